"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p.

A row is drawn with a key of its own (`row_keys`), so that what it becomes does not depend on the
rows beside it. Nothing here knows a model, a tokenizer or a mesh: logits have a whole vocabulary.
Letters: B batch, V vocabulary, k kept tokens, likeliest first.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is drawn; hashable, so that it can be a static argument of jax.jit."""

    temperature: float = 0.0
    """Logits are divided by it; 0: the likeliest token every time, whatever the others say."""
    top_k: int | None = None
    """Only this many likeliest tokens; None: all."""
    top_p: float | None = None
    """Only the fewest likeliest tokens, of those of top_k, whose share reaches it; None: all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: use a number above 0, or 0 for the likeliest "
                "token every time"
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k}: use a whole number of at least 1, or none")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: use more than 0 and at most 1, or none")


def row_keys(seed: jax.Array, row_ids_B: jax.Array, positions_B: jax.Array) -> jax.Array:
    """A key per row that depends on its own number and position alone.

    seed: a key of jax.random.key. positions_B: of the tokens that are to be drawn.
    """

    def one(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(seed, row), position)

    return jax.vmap(one)(row_ids_B, positions_B)


def sample_tokens(logits_BV: jax.Array, keys_B: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """The next token of every row, int32 `B`; of equally likely ones the lowest id comes first.

    logits_BV: V whole on every device, B split as one likes. keys_B: see `row_keys`.
    Temperature, then top_k, then top_p of what that leaves; at least one token stays. A logit of
    -inf is never drawn. With neither top_k nor top_p it is jax.random.categorical, key by key.
    Source of top_p: arXiv 1904.09751, section 3.1.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # Relative to the likeliest, so that no temperature is so low that logits overflow.
    top_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    less_BV = (top_B1 - logits_BV) / sampling.temperature
    kept_BV = _kept_BV(less_BV, sampling)
    # Drawn over all ids, whatever is kept: the same key draws alike from a smaller set.
    logits_BV = -less_BV if kept_BV is None else jnp.where(kept_BV, -less_BV, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def _kept_BV(less_BV: jax.Array, sampling: SamplingConfig) -> jax.Array | None:
    """Which tokens may be drawn, from what their logits lack to the likeliest; None: all."""
    V = less_BV.shape[-1]
    top_p = None if sampling.top_p == 1 else sampling.top_p
    k = min(sampling.top_k or V, V)
    if top_p is None and k == V:
        return None
    # Of equal ones the lowest id comes first: jax.lax.top_k says so.
    values_Bk, ids_Bk = lax.top_k(-less_BV, k)
    kept_Bk = jnp.ones_like(values_Bk, bool)
    if top_p is not None:
        weights_Bk = jnp.exp(values_Bk)
        sums_Bk = jnp.cumsum(weights_Bk, axis=-1)
        kept_Bk = sums_Bk - weights_Bk < top_p * sums_Bk[:, -1:]
        kept_Bk |= jnp.arange(k) == 0  # a top_p below float32's least would keep none
    # The last kept one splits the vocabulary; comparing costs less than a scatter.
    value_B1 = jnp.min(jnp.where(kept_Bk, values_Bk, jnp.inf), axis=-1, keepdims=True)
    last_Bk = kept_Bk & (values_Bk == value_B1)
    id_B1 = jnp.max(jnp.where(last_Bk, ids_Bk, -1), axis=-1, keepdims=True)
    return (-less_BV > value_B1) | ((-less_BV == value_B1) & (jnp.arange(V) <= id_B1))
