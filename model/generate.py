"""Text from a trained model: one token after another, each by a full forward pass."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.transformer import Transformer
from parallel.axes import BATCH, TokenSharding
from parallel.layout import TensorParallelConfig


def generate(
    definition: Any,
    params: Any,
    prompt: np.ndarray,
    *,
    tp: TensorParallelConfig,
    length: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> np.ndarray:
    """Continues one prompt; returns prompt and continuation, at most `length` ids.

    length: of the buffer, a multiple of what the mesh splits a row into. The prompt's last
    `length - max_new_tokens` ids are used. temperature 0: the likeliest token every time.
    """
    prompt = prompt[-max(1, length - max_new_tokens) :]
    # Every data-parallel device works on a copy of the one row.
    rows = tp.manager.axis_size(BATCH)
    buffer = np.zeros((rows, length), np.int32)
    buffer[:, : len(prompt)] = prompt
    stop = min(length, len(prompt) + max_new_tokens)
    sharding = tp.manager.sharding(TokenSharding)
    tokens = jax.make_array_from_callback(buffer.shape, sharding, lambda index: buffer[index])
    out = _continue(
        params,
        tokens,
        jnp.asarray(len(prompt)),
        jnp.asarray(stop),
        jax.random.key(seed),
        definition=definition,
        tp=tp,
        temperature=temperature,
    )
    return np.asarray(out)[:stop]


@partial(jax.jit, static_argnames=("definition", "tp", "temperature"))
def _continue(
    params: Any,
    tokens_BL: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    key: jax.Array,
    *,
    definition: Any,
    tp: TensorParallelConfig,
    temperature: float,
) -> jax.Array:
    model: Transformer = nnx.merge(definition, params)
    spec = jax.typeof(tokens_BL).sharding.spec
    index_L = jnp.arange(tokens_BL.shape[1])
    positions_BL = jnp.broadcast_to(index_L, tokens_BL.shape)

    def body(position: jax.Array, tokens_BL: jax.Array) -> jax.Array:
        hidden_BLD = model(tokens_BL, positions_BL, jnp.zeros_like(tokens_BL))
        logits_BLV = jax.sharding.reshard(model.logits(hidden_BLD), P())
        logits_V = lax.dynamic_index_in_dim(logits_BLV[0], position - 1, keepdims=False)
        if temperature:
            step_key = jax.random.fold_in(key, position)
            token = jax.random.categorical(step_key, logits_V.astype(jnp.float32) / temperature)
        else:
            token = jnp.argmax(logits_V)
        here_BL = jax.sharding.reshard(jnp.broadcast_to(index_L == position, tokens_BL.shape), spec)
        return jnp.where(here_BL, token.astype(jnp.int32), tokens_BL)

    tokens_BL = lax.fori_loop(start, stop, body, tokens_BL)
    return jax.sharding.reshard(tokens_BL, NamedSharding(tp.manager.mesh, P()))[0]
