"""A transformer written out in plain jax.numpy, one row and layer after another: the reference."""

import jax
import jax.numpy as jnp
import numpy as np

from model.config import ModelConfig

NAMES = ("bias", "scale", "sinks", "logit_bias")


def with_noise(params):
    """Return parameters whose constant initial values (biases, norms, sinks) are random."""

    def alter(path, leaf):
        names = [key.key for key in path]
        if not set(names) & set(NAMES):
            return leaf
        rng = np.random.default_rng(sum(map(ord, "".join(names))))
        noise = 0.2 * rng.standard_normal(leaf.shape).astype(np.float32)
        return jax.device_put(np.asarray(leaf) + noise, leaf.sharding)

    return jax.tree_util.tree_map_with_path(alter, params)


def rms_norm(x, scale, config):
    root = jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + config.rms_norm_eps)
    return x / root * (config.norm_offset + scale)


def activated(config, gate, up):
    if config.hidden_act == "silu":
        return gate / (1 + jnp.exp(-gate)) * up
    if config.hidden_act == "gelu_tanh":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + jnp.tanh(inner)) * up
    gate = jnp.where(gate > config.swiglu_limit, config.swiglu_limit, gate)
    up = jnp.maximum(jnp.minimum(up, config.swiglu_limit), -config.swiglu_limit)
    return (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))


def linear(x, weights, name=None, bias="bias"):
    kernel, bias = weights["kernel"], weights.get(bias)
    if name is not None:
        kernel, bias = kernel[name], bias and bias[name]
    return x @ kernel + (0 if bias is None else bias)


def mlp(config, weights, x):
    gate, up = (linear(x, weights["gate_up"], name) for name in ("gate", "up"))
    return linear(activated(config, gate, up), weights["down"])


def experts(config, weights, x):
    """Top-k softmax routing: every expert computes every token."""
    moe = config.moe
    assert moe.router == "topk_softmax"
    logits = linear(x, weights["router"], bias="logit_bias")
    kth = jnp.sort(logits, -1)[:, -moe.num_experts_per_tok]
    shares = jnp.where(logits >= kth[:, None], jnp.exp(logits), 0)
    shares /= shares.sum(-1, keepdims=True)
    y = 0
    for e in range(moe.num_experts):
        own = {name: jax.tree.map(lambda leaf, e=e: leaf[e], weights[name])
               for name in ("gate_up", "down")}  # fmt: skip
        y += shares[:, e : e + 1] * mlp(config, own, x)
    if moe.num_shared_experts:
        shared = mlp(config, weights["shared"], x)
        if moe.shared_expert_gate:
            shared /= 1 + jnp.exp(-linear(x, weights["shared_gate"]))
        y += shared
    return y


def rotated(config, x_LHh, positions, theta):
    """Rotate pairs (i, i + r/2) of the first r dimensions; complex numbers."""
    r = round(x_LHh.shape[-1] * config.partial_rotary_factor)
    angle = positions[:, None] * theta ** (-np.arange(0, r, 2) / r)
    pairs = x_LHh[..., : r // 2] + 1j * x_LHh[..., r // 2 : r]
    pairs *= jnp.exp(1j * angle)[:, None]
    return jnp.concatenate([pairs.real, pairs.imag, x_LHh[..., r:]], -1)


def grouped_qkv(config, weights, x, positions, layer, is_local):
    """Queries, keys and values of one row `L H h`, and the factor on the scores."""
    H, K, h = config.num_attention_heads, config.num_key_value_heads, config.head_size
    q, k, v = (linear(x, weights["qkv"], name) for name in "qkv")
    if config.qk_norm_across_heads:
        q, k = (rms_norm(y, weights[f"{n}_norm"]["scale"], config) for y, n in ((q, "q"), (k, "k")))
    q, k, v = q.reshape(-1, H, h), k.reshape(-1, K, h), v.reshape(-1, K, h)
    if config.qk_norm and not config.qk_norm_across_heads:
        q, k = (rms_norm(y, weights[f"{n}_norm"]["scale"], config) for y, n in ((q, "q"), (k, "k")))
    if config.rope_layers[layer % len(config.rope_layers)]:
        theta = config.rope_local_theta if is_local else None
        q, k = (rotated(config, y, positions, theta or config.rope_theta) for y in (q, k))
    k, v = (jnp.repeat(y, H // K, axis=1) for y in (k, v))
    return q, k, v, 1 / np.sqrt(config.query_pre_attn_scalar or h)


def latent_qkv(config, weights, x, positions):
    """Queries, keys and values of latent attention `L H .`, and the factor on the scores; yarn."""
    mla, H, scaling = config.mla, config.num_attention_heads, config.rope_scaling
    n, r, rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank

    def normed(y, name):
        root = jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + mla.norm_eps)
        return y / root * weights[f"{name}_norm"]["scale"]

    down = weights["down"]["kernel"]
    q = normed(x @ down["q_a"], "q_a") @ weights["q_b"]["kernel"]
    latent, k_rope = jnp.split(x @ down["kv_a"], [rank], -1)
    kv = normed(latent, "kv_a") @ weights["kv_b"]["kernel"]
    q, kv = q.reshape(-1, H, n + r), kv.reshape(-1, H, n + mla.v_head_dim)

    pair, theta = np.arange(r // 2), config.rope_theta
    ends = [
        (r / 2) * np.log(scaling.original_max_position_embeddings / (turns * 2 * np.pi))
        / np.log(theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]  # fmt: skip
    first, last = max(np.floor(ends[0]), 0), min(np.ceil(ends[1]), r - 1)
    slow = np.clip((pair - first) / (last - first), 0, 1)
    frequency = theta ** (-2 * pair / r) * (1 - slow + slow / scaling.factor)
    growth = 0.1 * np.log(scaling.factor)
    size = (growth * scaling.mscale + 1) / (growth * scaling.mscale_all_dim + 1)

    def turned(y):
        """Rotate the pairs (2i, 2i + 1)."""
        turn = size * jnp.exp(1j * positions[:, None] * frequency)[:, None]
        pairs = (y[..., ::2] + 1j * y[..., 1::2]) * turn
        return jnp.stack([pairs.real, pairs.imag], -1).reshape(y.shape)

    shared = jnp.repeat(turned(k_rope[:, None]), H, axis=1)
    q = jnp.concatenate([q[..., :n], turned(q[..., n:])], -1)
    k = jnp.concatenate([kv[..., :n], shared], -1)
    return q, k, kv[..., n:], (growth * scaling.mscale_all_dim + 1) ** 2 / np.sqrt(n + r)


def attention(config, weights, x, positions, segments, layer):
    """Attention of one row; the layer's number decides about window and rope."""
    is_local = config.layer_types[layer % len(config.layer_types)] == "sliding_attention"
    if config.mla:
        q, k, v, scale = latent_qkv(config, weights, x, positions)
    else:
        q, k, v, scale = grouped_qkv(config, weights, x, positions, layer, is_local)
    scores = jnp.einsum("lhd,thd->hlt", q, k) * scale
    if config.attn_logit_softcapping:
        scores = config.attn_logit_softcapping * jnp.tanh(scores / config.attn_logit_softcapping)
    index = np.arange(len(x))
    seen = (index[:, None] >= index) & (segments[:, None] == segments)
    if is_local:
        seen &= index[:, None] - index < config.sliding_window
    weight = jnp.where(seen, jnp.exp(scores), 0)
    total = weight.sum(-1, keepdims=True)
    if config.attention_sinks:
        total += jnp.exp(weights["sinks"])[:, None, None]
    out = jnp.einsum("hlt,thd->lhd", weight / total, v)
    return linear(out.reshape(len(x), -1), weights["o"])


def row_logits(config: ModelConfig, params, tokens, positions, segments):
    """Return the logits `L V` of one row, padded columns included."""
    table = params["embed"]["table"]
    x = table[tokens] * config.embedding_multiplier
    used = {"layers": 0, "sparse_layers": 0}
    for layer, is_sparse in enumerate(config.sparse_layers):
        stack = "sparse_layers" if is_sparse else "layers"
        own = jax.tree.map(lambda leaf, n=used[stack]: leaf[n], params[stack])
        used[stack] += 1

        def normed(y, name, own=own):
            return rms_norm(y, own[name]["scale"], config) if name in own else y

        y = attention(
            config, own["attention"], normed(x, "attention_norm"), positions, segments, layer
        )
        x = x + normed(y, "attention_post_norm")
        part = experts if is_sparse else mlp
        y = part(config, own["mlp"], normed(x, "mlp_norm"))
        x = x + normed(y, "mlp_post_norm")
    x = rms_norm(x, params["norm"]["scale"], config)
    logits = x @ (table.T if config.tie_word_embeddings else params["head"]["kernel"])
    if config.final_logit_softcapping:
        logits = config.final_logit_softcapping * jnp.tanh(logits / config.final_logit_softcapping)
    return logits


def loss(config: ModelConfig, params, fields):
    """Return the masked cross-entropy of a batch, summed over all tokens."""

    def row_loss(row):
        logits = row_logits(config, params, row["tokens"], row["positions"], row["segment_ids"])[
            :, : config.vocab_size
        ]
        chosen = logits[np.arange(logits.shape[0]), row["targets"]]
        return jnp.sum(row["loss_mask"] * (jax.nn.logsumexp(logits, -1) - chosen))

    return jnp.sum(jax.vmap(row_loss)(fields))
