"""Attention masks, and the arrays and static settings that every attention operation reads.

`MaskSpec` says which keys a query sees, from row indices alone. `AttentionInputs` holds the arrays
beside q, k and v. `AttentionSpec` holds everything static. The row index of a token is its place in
its row before any reordering.

Letters: B batch, L queries, T keys, H query heads, h head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from parallel.sharding.axes import DEFAULT_MASK_VALUE

UNUSED = -1
"""Row index of an absent key: an empty cache slot or padding. No query sees it."""


@dataclass(frozen=True)
class BlockMask:
    """A user-defined mask over blocks of queries and keys; hashable.

    rows: one tuple of booleans per block of queries, one entry per block of keys. Tokens beyond the
    mask see nothing and are seen by nothing.
    block_q, block_k: tokens in a block.
    """

    rows: tuple[tuple[bool, ...], ...]
    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        if not self.rows or len({len(row) for row in self.rows}) != 1 or not self.rows[0]:
            raise ValueError("a block mask is a rectangle of booleans, with at least one block")
        if self.block_q < 1 or self.block_k < 1:
            raise ValueError(f"blocks of {self.block_q} x {self.block_k} tokens: use at least 1")

    @classmethod
    def from_array(cls, mask: Any, block_q: int, block_k: int) -> "BlockMask":
        """Return the block mask of an array of booleans (query blocks, key blocks)."""
        array = np.asarray(mask)
        if array.ndim != 2:
            raise ValueError(
                f"a block mask has two dims (query blocks, key blocks), not shape {array.shape}"
            )
        return cls(tuple(tuple(bool(x) for x in row) for row in array), block_q, block_k)

    def any_visible(self, q_low: Any, q_high: Any, kv_low: Any, kv_high: Any) -> Any:
        """Return whether a visible block meets these inclusive index ranges; all broadcast."""
        traced = any(isinstance(x, Array) for x in (q_low, q_high, kv_low, kv_high))
        xp: Any = jnp if traced else np
        # Entry (a, b): visible blocks among the first a x b.
        inner = np.asarray(self.rows, np.int32).cumsum(0).cumsum(1)
        counts = xp.asarray(np.pad(inner, ((1, 0), (1, 0))))
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


def _is_count(value: Any, minimum: int) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and bool(value >= minimum)


@dataclass(frozen=True, kw_only=True)
class MaskSpec:
    """Which keys a query sees, by row index alone; static and hashable.

    A query sees a key that passes every condition below.

    causal: the key is not later than the query.
    window: the key is less than `window` tokens away.
    prefix: every query sees the first `prefix` tokens, in spite of causal and window.
    blocks: the block of the query sees the block of the key; applies to the prefix too.
    """

    causal: bool = True
    window: int | None = None
    prefix: int = 0
    blocks: BlockMask | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not _is_count(self.window, 1):
            raise ValueError(
                f"attention window={self.window}: use at least 1, a static whole number, or none"
            )
        if not _is_count(self.prefix, 0):
            raise ValueError(
                f"attention prefix={self.prefix}: use at least 0, a static whole number"
            )
        if self.blocks is not None and not isinstance(self.blocks, BlockMask):
            raise ValueError(
                f"attention blocks of {type(self.blocks).__name__}: use BlockMask.from_array(mask, "
                "block_q, block_k)"
            )

    def visible(self, q_index: Any, kv_index: Any) -> Any:
        """Return booleans, broadcast from row indices of queries and keys; numpy in, numpy out.

        `any_visible` is exact for ranges of one index.
        """
        return self.any_visible(q_index, q_index, kv_index, kv_index)

    def any_visible(self, q_low: Any, q_high: Any, kv_low: Any, kv_high: Any) -> Any:
        """Return whether a query in one index range may see a key in another; all broadcast.

        Ranges are inclusive. The answer may be a false yes, never a false no: callers skip the
        ranges for which it is no.
        """
        seen = (kv_high > UNUSED) & (q_high >= UNUSED)
        if self.causal:
            seen &= q_high >= kv_low
        if self.window is not None:
            seen &= (q_low - kv_high < self.window) & (kv_low - q_high < self.window)
        if self.prefix:
            seen |= (kv_high > UNUSED) & (kv_low < self.prefix)
        if self.blocks is not None:
            seen &= self.blocks.any_visible(q_low, q_high, kv_low, kv_high)
        return seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """The arrays beside q, k and v; a feature whose arrays are None is not used.

    The letters at the end of a name are the dims of its array.

    q_index_BL, kv_index_BT: row index of every query and key; UNUSED for an absent one. The first
        dim may be 1. Callers may leave both out: keys then count from 0 and the queries are the
        last of them. Operations always receive both.
    q_segment_ids_BL, kv_segment_ids_BT: document of every token; a query sees its own only.
    bias_BHLT: added to the scores. B and H may be 1.
    mask_BHLT: booleans, False where a query does not see a key. B and H may be 1.
    sinks_H: float32 logits in the softmax's norm that have no value. Source: gpt-oss (OpenAI 2025).
    dropout_seed: two uint32; callers may give a key of jax.random. None: no dropout.
    row_ids_B, head_ids_H: global numbers of rows and heads, which dropout depends on.
    """

    q_index_BL: Any = None  # an Array in every operation
    kv_index_BT: Any = None
    q_segment_ids_BL: Array | None = None
    kv_segment_ids_BT: Array | None = None
    bias_BHLT: Array | None = None
    mask_BHLT: Array | None = None
    sinks_H: Array | None = None
    dropout_seed: Array | None = None
    row_ids_B: Array | None = None
    head_ids_H: Array | None = None

    def present(self) -> Iterator[tuple[str, str, Array]]:
        """Yield the name, dims (letters; none for dropout_seed) and array of every given field."""
        for name, array in vars(self).items():
            if array is not None:
                dims = name.rpartition("_")[2]
                yield name, dims if dims.isupper() else "", array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedInputs:
    """The arrays beside queries and pages.

    page_table_SP: int32, the pages of every sequence in order; entries beyond its length are
        ignored.
    lengths_S: int32, keys of every sequence, including those of this call's queries.
    query_starts: `S + 1` int32, cumulative: the first query of every sequence. The queries of a
        sequence are its last keys; tokens after the last entry are padding. None: one query per
        sequence.
    sinks_H: as in `AttentionInputs`.
    """

    page_table_SP: Array
    lengths_S: Array
    query_starts: Array | None = None
    sinks_H: Array | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static settings of an attention; hashable.

    scale: factor of q k^T.
    chunk: tokens in a chunk of a document, for operations on pages, whose rows are documents: a
        query sees the keys of its chunk. Over rows, `chunk_ids` are the segment ids instead. In
        both cases the mask has a window of this size, by which blocks are skipped.
    soft_cap: scores become cap * tanh(scores / cap), before the bias.
    dropout: fraction of the weights that is dropped; the others are scaled up.
    block_q, block_k: tokens in a block of queries and of keys, for operations that work in blocks;
        None: the operation's default.
    sequence_axis: mesh axis over which queries and keys are split, for operations that receive
        local keys only.
    merge_axis: mesh axis over which keys are split while every device has all queries (decoding);
        partial results are merged over it.
    contiguous: tokens are in the order of their row indices.
    scan: a ring is a `lax.scan` instead of unrolled.
    shared_values: the keys are also the values (`model.mla`, attention to latents): pages then hold
        K heads instead of 2 K. Over rows, callers pass the keys twice.
    """

    scale: float
    mask: MaskSpec = MaskSpec()
    chunk: int | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    block_q: int | None = None
    block_k: int | None = None
    sequence_axis: str | None = None
    merge_axis: str | None = None
    contiguous: bool = True
    scan: bool = False
    shared_values: bool = False

    def __post_init__(self) -> None:
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(
                f"attention soft_cap={self.soft_cap}: use a number above 0, or none for no cap"
            )


def chunk_ids(positions_BL: Array, segment_ids_BL: Array | None, *, chunk: int, keys: int) -> Array:
    """Return segment ids that tell the chunks of a document apart, for a window of `chunk`.

    positions_BL: of tokens in their documents, so that a packed document has the chunks that it has
    alone. keys: most tokens in a row.
    """
    most = keys // chunk + 2  # chunks that so many adjacent tokens can touch
    number_BL = positions_BL // chunk % most
    return number_BL if segment_ids_BL is None else segment_ids_BL * most + number_BL


def visible_BHLT(inputs: AttentionInputs, mask: MaskSpec) -> Array:
    """Return which keys every query sees: mask spec, segments and mask array. B, H may be 1."""
    seen_BLT = mask.visible(inputs.q_index_BL[:, :, None], inputs.kv_index_BT[:, None, :])
    if inputs.q_segment_ids_BL is not None and inputs.kv_segment_ids_BT is not None:
        same = inputs.q_segment_ids_BL[:, :, None] == inputs.kv_segment_ids_BT[:, None, :]
        seen_BLT = seen_BLT & same
    seen_BHLT = seen_BLT[:, None]
    return seen_BHLT if inputs.mask_BHLT is None else seen_BHLT & inputs.mask_BHLT


def dropout_keep_BHLT(inputs: AttentionInputs, dropout: float) -> Array:
    """Return which weights dropout keeps: a hash of the seed and global row, head and indices.

    Equal for every operation, block size and mesh, because nothing is drawn in sequence. The hash
    is Murmur3's finaliser (Appleby 2011, public domain) over the four numbers.
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


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def with_sinks(out_BLHh: Array, lse_BHL: Array, sinks_H: Array) -> tuple[Array, Array]:
    """Return result and logsumexp with the sinks added to the softmax's norm."""
    # Both may be -inf (a query that sees nothing, a sink of no weight); the difference must not
    # be nan.
    lse_BHL = jnp.maximum(lse_BHL, DEFAULT_MASK_VALUE)
    whole_BHL = jnp.logaddexp(lse_BHL, sinks_H[None, :, None])
    share_BLH = jnp.exp(lse_BHL - whole_BHL).transpose(0, 2, 1)
    return out_BLHh * share_BLH[..., None], whole_BHL
