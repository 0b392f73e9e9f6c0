"""A hand-written transformer: one function of plain arrays, without modules, mesh or scan.

Benchmarks compare the trainer with it. It reads the trainer's own parameters of the dense model.
"""

from typing import Any

import jax
import jax.numpy as jnp

from model.config import ModelConfig


def loss(params: Any, batch: dict[str, jax.Array], config: ModelConfig) -> jax.Array:
    """Return the mean cross-entropy of a batch `B L` in nats.

    params: the layers are stacked, as in training.
    """
    K, h = config.num_key_value_heads, config.head_size
    x_BLD = params["embed"]["table"][batch["tokens"]]
    B, L, _ = x_BLD.shape
    segments = batch["segment_ids"]
    visible = jnp.tril(jnp.ones((L, L), bool)) & (segments[:, :, None] == segments[:, None])
    for layer in range(config.num_hidden_layers):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        q, k, v = _project(x_BLD, p, batch["positions"], config)
        scores = jnp.einsum("blkgh,btkh->bkglt", q.reshape(B, L, K, -1, h), k) * h**-0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1)
        out = jnp.einsum("bkglt,btkh->blkgh", weights, v).reshape(B, L, -1)
        x_BLD = _finish_layer(x_BLD, out, p, config)
    logits = _logits(x_BLD, params, config)
    target = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, -1) - target
    return jnp.sum(losses * batch["loss_mask"]) / jnp.sum(batch["loss_mask"])


def decode_step(
    params: Any, cache: Any, tokens_B: jax.Array, position: jax.Array, config: ModelConfig
) -> tuple[Any, jax.Array]:
    """Append one token to every row, greedily, and return the cache and the next tokens.

    params: the layers are a list. cache: the keys and values of every layer, `B T K h`.
    """
    K, h = config.num_key_value_heads, config.head_size
    B, T = tokens_B.shape[0], cache[0][0].shape[1]
    x_BD = params["embed"]["table"][tokens_B]
    new_cache = []
    for layer, p in enumerate(params["layers"]):
        q, k, v = _project(x_BD, p, position, config)
        k_cache, v_cache = (
            held.at[:, position].set(new) for held, new in zip(cache[layer], (k, v), strict=True)
        )
        new_cache.append((k_cache, v_cache))
        scores = jnp.einsum("BKGh,BTKh->BKGT", q.reshape(B, K, -1, h), k_cache)
        scores = jnp.where(jnp.arange(T) <= position, scores * h**-0.5, -jnp.inf)
        out = jnp.einsum("BKGT,BTKh->BKGh", jax.nn.softmax(scores), v_cache)
        x_BD = _finish_layer(x_BD, out.reshape(B, -1), p, config)
    return new_cache, jnp.argmax(_logits(x_BD, params, config), -1).astype(jnp.int32)


def _norm(x: jax.Array, scale: jax.Array, config: ModelConfig) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps) * scale


def _matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply all rows as one matrix: XLA:CPU derives `B L D @ D F` much more slowly."""
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1)


def _rotate(x: jax.Array, positions: jax.Array, config: ModelConfig) -> jax.Array:
    """Apply rotary positions to heads `... H h`."""
    half = config.head_size // 2
    frequency = config.rope_theta ** -(jnp.arange(half) / half)
    angle = positions[..., None, None] * frequency
    a, b = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _project(
    x: jax.Array, p: Any, positions: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries `... H h`, keys and values `... K h` of one layer."""
    y, w = _norm(x, p["attention_norm"]["scale"], config), p["attention"]["qkv"]["kernel"]
    q, k, v = (_matmul(y, w[name]).reshape(*x.shape[:-1], -1, config.head_size) for name in "qkv")
    return _rotate(q, positions, config), _rotate(k, positions, config), v


def _finish_layer(x: jax.Array, attended: jax.Array, p: Any, config: ModelConfig) -> jax.Array:
    """Add the output of attention and the SwiGLU to the residual stream."""
    x = x + _matmul(attended, p["attention"]["o"]["kernel"])
    y, w = _norm(x, p["mlp_norm"]["scale"], config), p["mlp"]["gate_up"]["kernel"]
    hidden = jax.nn.silu(_matmul(y, w["gate"])) * _matmul(y, w["up"])
    return x + _matmul(hidden, p["mlp"]["down"]["kernel"])


def _logits(x: jax.Array, params: Any, config: ModelConfig) -> jax.Array:
    return _matmul(_norm(x, params["norm"]["scale"], config), params["head"]["kernel"])
