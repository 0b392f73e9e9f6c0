"""What a score depends on beside q and k: who sees whom, and what is added to it.

`Pattern` tells by row index alone which keys a query sees; `ScoreInputs` are the arrays that go
with q, k and v; `ScoreRule` is everything static. Every operation reads these three and nothing
else. Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parallel.sharding.axes import DEFAULT_MASK_VALUE

UNUSED = -1
"""Row index of a key that is not there: an empty slot of a cache, padding. Nobody sees it."""


@dataclass(frozen=True)
class BlockMask:
    """Blocks of keys that blocks of queries may see, as the user draws them; hashable.

    rows: one tuple of booleans per block of queries, one entry per block of keys.
    block_q, block_k: rows of a block. Rows beyond the mask see and are seen by nobody.
    """

    rows: tuple[tuple[bool, ...], ...]
    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        if not self.rows or len({len(row) for row in self.rows}) != 1 or not self.rows[0]:
            raise ValueError("a block mask is a rectangle of booleans, with at least one block")
        if self.block_q < 1 or self.block_k < 1:
            raise ValueError(f"blocks of {self.block_q} x {self.block_k} rows: use at least one")

    @classmethod
    def of(cls, mask: Any, block_q: int, block_k: int) -> "BlockMask":
        """From a two-dimensional array of booleans."""
        array = np.asarray(mask)
        if array.ndim != 2:
            raise ValueError(f"a block mask has two dims (query blocks, key blocks), not {array}")
        return cls(tuple(tuple(bool(x) for x in row) for row in array), block_q, block_k)

    def _counts(self) -> np.ndarray:
        """Entry (a, b): how many blocks are visible among the first a x b."""
        inner = np.asarray(self.rows, np.int32).cumsum(0).cumsum(1)
        return np.pad(inner, ((1, 0), (1, 0)))

    def any_visible(self, q_low: Any, q_high: Any, kv_low: Any, kv_high: Any) -> Any:
        """Whether a visible block meets these (inclusive) ranges of rows; all broadcast."""
        traced = any(isinstance(x, jax.Array) for x in (q_low, q_high, kv_low, kv_high))
        xp: Any = jnp if traced else np
        counts = xp.asarray(self._counts())
        top, bottom = (
            xp.clip(x // self.block_q + more, 0, len(self.rows))
            for x, more in ((q_low, 0), (q_high, 1))
        )
        left, right = (
            xp.clip(x // self.block_k + more, 0, len(self.rows[0]))
            for x, more in ((kv_low, 0), (kv_high, 1))
        )
        without = counts[top, right] + counts[bottom, left] - counts[top, left]
        return counts[bottom, right] > without


def _is_count(value: Any, least: int) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and bool(value >= least)


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Which keys a query sees, by row index alone; static and hashable.

    causal: keys that are not later. window: keys less than `window` rows away. chunk: keys of the
    same chunk of that many rows. prefix: that many first rows are seen by every query, whatever
    causal, window and chunk say. blocks: and only where these are visible.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    prefix: int = 0
    blocks: BlockMask | None = None

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None and not _is_count(value, 1):
                raise ValueError(
                    f"attention {name}={value}: use at least 1, a static whole number, or none"
                )
        if not _is_count(self.prefix, 0):
            raise ValueError(
                f"attention prefix={self.prefix}: use at least 0, a static whole number"
            )
        if self.blocks is not None and not isinstance(self.blocks, BlockMask):
            raise ValueError(
                f"attention blocks of {type(self.blocks).__name__}: use BlockMask.of(mask, "
                "block_q, block_k)"
            )

    def visible(self, q_index: Any, kv_index: Any) -> Any:
        """Booleans, broadcast from row indices of queries and keys; numpy in, numpy out."""
        seen = (kv_index > UNUSED) & (q_index >= UNUSED)
        if self.causal:
            seen &= q_index >= kv_index
        if self.window is not None:
            seen &= (q_index - kv_index < self.window) & (kv_index - q_index < self.window)
        if self.chunk is not None:
            seen &= q_index // self.chunk == kv_index // self.chunk
        if self.prefix:
            seen |= (kv_index > UNUSED) & (kv_index < self.prefix)
        if self.blocks is not None:
            seen &= self.blocks.any_visible(q_index, q_index, kv_index, kv_index)
        return seen

    def any_visible(self, q_low: Any, q_high: Any, kv_low: Any, kv_high: Any) -> Any:
        """Whether some query in a range of rows may see some key in another; all broadcast.

        Ranges are inclusive. May say yes where the answer is no (never the reverse): what it says
        no to is skipped.
        """
        seen = (kv_high > UNUSED) & (q_high >= UNUSED)
        if self.causal:
            seen &= q_high >= kv_low
        if self.window is not None:
            seen &= (q_low - kv_high < self.window) & (kv_low - q_high < self.window)
        if self.chunk is not None:
            seen &= (q_low // self.chunk <= kv_high // self.chunk) & (
                kv_low // self.chunk <= q_high // self.chunk
            )
        if self.prefix:
            seen |= (kv_high > UNUSED) & (kv_low < self.prefix)
        if self.blocks is not None:
            seen &= self.blocks.any_visible(q_low, q_high, kv_low, kv_high)
        return seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ScoreInputs:
    """The arrays that go with q, k and v; None: that feature is not used.

    q_index_BL, kv_index_BT: row index of every query and key, the first dim may be 1; UNUSED: not
    there. q_segment_ids_BL, kv_segment_ids_BT: a query sees its own segment only. bias_BHLT: added
    to the scores; mask_BHLT: booleans, False is unseen (B, H may be 1 in both). sinks_H: float32
    logits in the norm of the softmax that no value belongs to. dropout_seed: two uint32.
    row_ids_B, head_ids_H: global numbers of rows and heads, which dropout depends on.
    """

    q_index_BL: jax.Array
    kv_index_BT: jax.Array
    q_segment_ids_BL: jax.Array | None = None
    kv_segment_ids_BT: jax.Array | None = None
    bias_BHLT: jax.Array | None = None
    mask_BHLT: jax.Array | None = None
    sinks_H: jax.Array | None = None
    dropout_seed: jax.Array | None = None
    row_ids_B: jax.Array | None = None
    head_ids_H: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedInputs:
    """The arrays that go with queries and pages.

    page_table_SP: int32, the pages of every sequence in order; entries beyond its length are not
    read. lengths_S: int32, keys of every sequence, those of this call's queries included.
    query_starts: `S + 1` int32, cumulative: where the queries of a sequence start, the last ones of
    its keys; tokens beyond the last start are padding. None: one query per sequence.
    sinks_H: float32 logits in the norm of the softmax that no value belongs to.
    """

    page_table_SP: jax.Array
    lengths_S: jax.Array
    query_starts: jax.Array | None = None
    sinks_H: jax.Array | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """Everything static about an attention; hashable.

    scale: of q k^T. soft_cap: scores become cap * tanh(scores / cap), before the bias. dropout:
    share of the weights that are dropped, the rest is scaled up. block_q, block_k: rows of a block
    where an operation works in blocks; None: its own choice. sequence_axis: the mesh axis over
    which queries and keys are split, if the operation is given its own part of the keys only.
    merge_axis: the one over which keys are split while every device has all queries (decoding);
    the results are merged. contiguous: rows lie in the order of their indices. scan: a ring turns
    in a `lax.scan` instead of being unrolled.
    """

    scale: float
    pattern: Pattern = Pattern()
    soft_cap: float | None = None
    dropout: float = 0.0
    block_q: int | None = None
    block_k: int | None = None
    sequence_axis: str | None = None
    merge_axis: str | None = None
    contiguous: bool = True
    scan: bool = False

    def __post_init__(self) -> None:
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(
                f"attention soft_cap={self.soft_cap}: use a number above 0, or none for no cap"
            )


def visible_BHLT(inputs: ScoreInputs, pattern: Pattern) -> jax.Array:
    """Who sees whom, B and H may be 1: pattern, segments and explicit mask together."""
    seen_BLT = pattern.visible(inputs.q_index_BL[:, :, None], inputs.kv_index_BT[:, None, :])
    if inputs.q_segment_ids_BL is not None and inputs.kv_segment_ids_BT is not None:
        same = inputs.q_segment_ids_BL[:, :, None] == inputs.kv_segment_ids_BT[:, None, :]
        seen_BLT = seen_BLT & same
    seen_BHLT = seen_BLT[:, None]
    return seen_BHLT if inputs.mask_BHLT is None else seen_BHLT & inputs.mask_BHLT


def kept_BHLT(inputs: ScoreInputs, dropout: float) -> jax.Array:
    """Which weights dropout keeps: a function of the seed and of global row, head and indices.

    Equal for every operation, block size and mesh: nothing is drawn in an order. Murmur3's
    finaliser (Appleby 2011, public domain) over the four numbers.
    """
    assert inputs.dropout_seed is not None
    assert inputs.row_ids_B is not None and inputs.head_ids_H is not None
    seed = inputs.dropout_seed.astype(jnp.uint32)
    row_B = _mix(inputs.row_ids_B.astype(jnp.uint32) ^ seed[0])
    head_BH = _mix(row_B[:, None] + inputs.head_ids_H.astype(jnp.uint32)[None] * _ODD[0] + seed[1])
    query_BHL = _mix(head_BH[:, :, None] + inputs.q_index_BL.astype(jnp.uint32)[:, None] * _ODD[1])
    key_B1LT = inputs.kv_index_BT.astype(jnp.uint32)[:, None, None, :] * _ODD[2]
    return _mix(query_BHL[..., None] + key_B1LT) >= np.uint32(min(dropout * 2**32, 2**32 - 1))


_ODD = tuple(np.uint32(x) for x in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def with_sinks(
    out_BLHh: jax.Array, lse_BHL: jax.Array, sinks_H: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Result and logsumexp once the sinks are in the norm; source: gpt-oss (OpenAI 2025)."""
    # Of a query that sees nothing it is -inf, and so may a sink be: their difference is a number.
    lse_BHL = jnp.maximum(lse_BHL, DEFAULT_MASK_VALUE)
    whole_BHL = jnp.logaddexp(lse_BHL, sinks_H[None, :, None])
    share_BLH = jnp.exp(lse_BHL - whole_BHL).transpose(0, 2, 1)
    return out_BLHh * share_BLH[..., None], whole_BHL
