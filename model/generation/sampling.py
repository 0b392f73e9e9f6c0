"""Sampling of the next token from logits: greedy, temperature, top-k and top-p.

Every row draws with its own key (`row_keys`), so its text does not depend on the other rows of the
batch. Each row needs the logits of the whole vocabulary.

Letters: B batch, V vocabulary, k candidate tokens, most likely first.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling parameters; hashable, so that they can be a static argument of jax.jit."""

    temperature: float = 0.0
    """Divisor of the logits, 1e-30 to 1e30; 0: greedy, the most likely token."""
    top_k: int | None = None
    """Number of most likely tokens to sample from; None: all."""
    top_p: float | None = None
    """Total probability of the smallest set of most likely tokens, after top_k; None: all."""

    def __post_init__(self) -> None:
        # Beyond this range, quotients in float32 could become infinite, or 0 / 0.
        if self.temperature != 0 and not 1e-30 <= self.temperature <= 1e30:
            raise ValueError(
                f"temperature={self.temperature}: use 1e-30 to 1e30, or 0 for greedy decoding"
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k}: use an integer of at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: use more than 0 and at most 1")


def row_keys(key: jax.Array, row_ids_B: jax.Array, positions_B: jax.Array) -> jax.Array:
    """Return one key per row, derived from its row id and from the position to be drawn."""

    def fold(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, row), position)

    return jax.vmap(fold)(row_ids_B, positions_B)


def sample_tokens(logits_BV: jax.Array, keys_B: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Draw the next token of every row, int32 `B`; ties go to the lowest id.

    Temperature comes first, then top_k, then top_p among the tokens that are left; at least one
    token stays. A logit of -inf is never drawn. Without top_k and top_p this is
    jax.random.categorical with one key per row. Source of top_p: arXiv 1904.09751, section 3.1.

    logits_BV: V whole on every device; B may be split. keys_B: from `row_keys`.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    # Relative to the maximum, so that a low temperature cannot overflow.
    top_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    gap_BV = (top_B1 - logits_BV) / sampling.temperature
    kept_BV = _kept_BV(gap_BV, sampling)
    # The draw runs over all ids, so a smaller set of kept tokens does not shift the random bits.
    logits_BV = -gap_BV if kept_BV is None else jnp.where(kept_BV, -gap_BV, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def _kept_BV(gap_BV: jax.Array, sampling: SamplingConfig) -> jax.Array | None:
    """Return the mask of tokens that may be drawn, or None for all.

    gap_BV: the maximum logit minus each logit, divided by the temperature.
    """
    V = gap_BV.shape[-1]
    top_p = None if sampling.top_p == 1 else sampling.top_p
    k = min(sampling.top_k or V, V)
    if top_p is None and k == V:
        return None
    # lax.top_k orders ties by id.
    values_Bk, ids_Bk = lax.top_k(-gap_BV, k)
    kept_Bk = jnp.ones_like(values_Bk, bool)
    if top_p is not None:
        weights_Bk = jnp.exp(values_Bk)
        sums_Bk = jnp.cumsum(weights_Bk, axis=-1)
        kept_Bk = sums_Bk - weights_Bk < top_p * sums_Bk[:, -1:]
        kept_Bk |= jnp.arange(k) == 0  # a top_p that underflows float32 would keep no token
    # Compare every token with the last one kept, by value and then id: cheaper than a scatter.
    value_B1 = jnp.min(jnp.where(kept_Bk, values_Bk, jnp.inf), axis=-1, keepdims=True)
    last_Bk = kept_Bk & (values_Bk == value_B1)
    id_B1 = jnp.max(jnp.where(last_Bk, ids_Bk, -1), axis=-1, keepdims=True)
    return (-gap_BV > value_B1) | ((-gap_BV == value_B1) & (jnp.arange(V) <= id_B1))
