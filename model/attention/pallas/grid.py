"""The pairs of blocks that a Pallas grid visits, in order, from arrays of row indices.

A few integers, called facts, describe a query or key, so that a kernel masks a score with two
comparisons. The smallest and largest facts of a block say whether a pair of blocks is hidden,
partially visible or fully visible. Hidden pairs are not in the grid. Block masks are not supported.

Letters: B batch, L queries, T keys; X, Y tokens in a block of queries, of keys; Q, K blocks of
queries, of keys; N outer and M inner blocks of a grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from model.attention.mask import UNUSED, AttentionInputs, MaskSpec

_FAR = int(np.iinfo(np.int32).max)

# Visibility of a pair of blocks.
HIDDEN, PARTIAL, FULL = 0, 1, 2


def row_facts(inputs: AttentionInputs, mask: MaskSpec) -> tuple[Array, Array]:
    """Return the facts of queries `B 3 L` and of keys `B 2 T`; B may be 1 in both.

    Queries: first and last visible row index, and segment. Keys: row index, larger than all others
    if unused, and segment. Every mask is such a range of indices, plus the prefix.
    """
    assert mask.blocks is None
    low_BL, high_BL = _range_seen(inputs.q_index_BL.astype(jnp.int32), mask)
    index_BT = inputs.kv_index_BT.astype(jnp.int32)
    index_BT = jnp.where(index_BT > UNUSED, index_BT, _FAR)
    segments = inputs.q_segment_ids_BL, inputs.kv_segment_ids_BT
    q_segment_BL, kv_segment_BT = (
        jnp.zeros((1, 1), jnp.int32) if segment is None else segment for segment in segments
    )
    rows = [x.shape[0] for x in (low_BL, index_BT, q_segment_BL, kv_segment_BT)]

    def stacked(*facts: Array) -> Array:
        shape = max(rows), facts[0].shape[1]
        return jnp.stack([jnp.broadcast_to(fact, shape).astype(jnp.int32) for fact in facts], 1)

    return stacked(low_BL, high_BL, q_segment_BL), stacked(index_BT, kv_segment_BT)


def _range_seen(index_BL: Array, mask: MaskSpec) -> tuple[Array, Array]:
    """Return the first and last row index that a query sees, prefix aside."""
    low_BL, high_BL = jnp.zeros_like(index_BL), jnp.full_like(index_BL, _FAR - 1)
    if mask.causal:
        high_BL = index_BL
    if mask.window is not None:
        reach = min(mask.window, _FAR // 2) - 1
        low_BL = jnp.maximum(low_BL, index_BL - reach)
        high_BL = jnp.minimum(high_BL, index_BL + reach)
    return low_BL, jnp.where(index_BL >= UNUSED, high_BL, UNUSED)


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """The facts that decide what is visible; static.

    bounded_below: a query may not see all earlier keys. segmented: there are segments.
    """

    prefix: int
    bounded_below: bool
    segmented: bool

    @classmethod
    def of(cls, inputs: AttentionInputs, mask: MaskSpec) -> "Visibility":
        """Return what this mask and these inputs need."""
        return cls(
            prefix=mask.prefix,
            bounded_below=mask.window is not None,
            segmented=inputs.q_segment_ids_BL is not None and inputs.kv_segment_ids_BT is not None,
        )

    def seen(self, query: Sequence[Array], key: Sequence[Array]) -> Array:
        """Return booleans from the facts of queries and keys, which broadcast."""
        (low, high, query_segment), (index, key_segment) = query, key
        seen = index <= high
        if self.bounded_below:
            seen &= index >= low
        if self.prefix:
            seen |= index < self.prefix
        if self.segmented:
            seen &= query_segment == key_segment
        return seen

    def kinds(self, query_facts_B3QX: Array, key_facts_B2KY: Array) -> Array:
        """Return the visibility of every pair of blocks `B Q K`.

        A hidden or fully visible pair may be reported as PARTIAL, never the reverse.
        """
        low, high, segment = (query_facts_B3QX[:, i, :, None] for i in range(3))
        index, key_segment = (key_facts_B2KY[:, i, None] for i in range(2))
        used = jnp.where(index == _FAR, UNUSED, index)
        least, most = partial(jnp.min, axis=-1), partial(jnp.max, axis=-1)
        any_seen = (least(low) <= most(used)) & (least(index) <= most(high))
        all_seen = (most(low) <= least(index)) & (most(index) <= least(high))
        if self.prefix:
            any_seen |= least(index) < self.prefix
            all_seen |= most(index) < self.prefix
        if self.segmented:
            below, above = least(segment), most(segment)
            first, last = least(key_segment), most(key_segment)
            any_seen &= (below <= last) & (first <= above)
            all_seen &= (below == last) & (first == above)
        return jnp.where(any_seen, jnp.where(all_seen, FULL, PARTIAL), HIDDEN)


# Scalar memory of a TPU core (v5e and v5p), less a part reserved for the compiler.
_SCALAR_BYTES = 2**20 - 2**14


@dataclass(frozen=True)
class Step:
    """One step of the grid, packed into 30 bits of scalar memory."""

    word: Any

    @classmethod
    def pack(cls, outer: Any, inner: Any, kind: Any, *, begins: Any, ends: Any) -> "Step":
        """Return a packed step; outer, inner: numbers of blocks, below 2^13."""
        return cls(outer << 17 | inner << 4 | ends << 3 | begins << 2 | kind)

    @property
    def outer(self) -> Any:
        """The block that stays, to which results are written."""
        return self.word >> 17

    @property
    def inner(self) -> Any:
        """The block that is paired with it in this step."""
        return (self.word >> 4) & 0x1FFF

    @property
    def kind(self) -> Any:
        """The visibility of the pair."""
        return self.word & 3

    @property
    def begins(self) -> Any:
        """Whether this is the first step of the outer block."""
        return (self.word & 4) != 0

    @property
    def ends(self) -> Any:
        """Whether this is the last step of the outer block."""
        return (self.word & 8) != 0


@dataclass(frozen=True)
class Steps:
    """The visible pairs of blocks, in the order of a grid.

    words: packed steps, `stride` for each row of the batch; stride 0: the same for all.
    count: the most steps of a row, which is the size of the grid.
    """

    words: Array
    count: Array
    stride: int


def steps_of(kinds_BNM: Array) -> Steps:
    """Return the steps: for each outer block N in turn, its visible inner blocks M.

    An outer block without a visible one has one step, which writes its zeros. Rows of the batch
    with fewer steps than others end in idle steps.
    Raises: ValueError for more steps than scalar memory holds.
    """
    B, N, M = kinds_BNM.shape
    if 4 * B * N * M > _SCALAR_BYTES or max(N, M) >= 1 << 13:
        raise ValueError(
            f"attention on TPU over {B} rows of {N} x {M} blocks needs {4 * B * N * M} bytes of "
            f"scalar memory, which has {_SCALAR_BYTES}; use larger blocks "
            "(model.operation_configs), fewer rows per device, or more sp"
        )
    none_visible = ~jnp.any(kinds_BNM > HIDDEN, axis=-1, keepdims=True)
    wanted = (kinds_BNM > HIDDEN) | (none_visible & (jnp.arange(M) == 0))
    places = jnp.arange(N * M, dtype=jnp.int32)
    flat = wanted.reshape(B, N * M)
    count = jnp.sum(flat, axis=-1, keepdims=True, dtype=jnp.int32)
    keys = jnp.where(flat, places * 4 + kinds_BNM.reshape(B, N * M), _FAR)
    keys = jnp.sort(keys, axis=-1)
    idle = places >= count
    keys = jnp.where(idle, jnp.max(jnp.where(idle, 0, keys), axis=-1, keepdims=True), keys)
    kind, place = jnp.where(idle, HIDDEN, keys & 3), keys >> 2
    outer, inner = place // M, place % M
    begins = (places == 0) | (outer != jnp.roll(outer, 1, axis=-1))
    ends = (places == count - 1) | ((outer != jnp.roll(outer, -1, axis=-1)) & ~idle)
    step = Step.pack(outer, inner, kind, begins=begins, ends=ends)
    return Steps(step.word.reshape(-1), jnp.max(count), N * M if B > 1 else 0)
