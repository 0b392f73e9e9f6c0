"""Which pairs of blocks a Pallas grid walks, and in which order, told by arrays of row indices.

A row is described by a few integers, so that a kernel tells who sees whom by two comparisons and a
block by the extremes of its rows. Pairs in which nothing is seen are not in the order at all. It
knows no kernel, and refuses block masks.
Letters: B batch, L queries, T keys; X, Y rows of a block of queries, of keys; Q, K numbers of such
blocks; N outer and M inner blocks of a grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.attention.scores import UNUSED, Pattern, ScoreInputs

_FAR = int(np.iinfo(np.int32).max)

# How much of a pair of blocks is seen.
NOTHING, PARTLY, WHOLLY = 0, 1, 2


def row_facts(inputs: ScoreInputs, pattern: Pattern) -> tuple[jax.Array, jax.Array]:
    """Queries `B 3 L`: the first and the last row index that each sees, and its segment.

    Keys `B 2 T`: row index, beyond all others if unused, and segment. B may be 1 in both. Every
    pattern is such a range, with the prefix beside it: two comparisons per score.
    """
    assert pattern.blocks is None
    low_BL, high_BL = _range_seen(inputs.q_index_BL.astype(jnp.int32), pattern)
    index_BT = inputs.kv_index_BT.astype(jnp.int32)
    index_BT = jnp.where(index_BT > UNUSED, index_BT, _FAR)
    segments = inputs.q_segment_ids_BL, inputs.kv_segment_ids_BT
    q_segment_BL, kv_segment_BT = (
        jnp.zeros((1, 1), jnp.int32) if segment is None else segment for segment in segments
    )
    rows = [x.shape[0] for x in (low_BL, index_BT, q_segment_BL, kv_segment_BT)]

    def stacked(*facts: jax.Array) -> jax.Array:
        shape = max(rows), facts[0].shape[1]
        return jnp.stack([jnp.broadcast_to(fact, shape).astype(jnp.int32) for fact in facts], 1)

    return stacked(low_BL, high_BL, q_segment_BL), stacked(index_BT, kv_segment_BT)


def _range_seen(index_BL: jax.Array, pattern: Pattern) -> tuple[jax.Array, jax.Array]:
    """First and last row index that a query sees, whatever the prefix."""
    low_BL, high_BL = jnp.zeros_like(index_BL), jnp.full_like(index_BL, _FAR - 1)
    if pattern.causal:
        high_BL = index_BL
    if pattern.window is not None:
        reach = min(pattern.window, _FAR // 2) - 1
        low_BL = jnp.maximum(low_BL, index_BL - reach)
        high_BL = jnp.minimum(high_BL, index_BL + reach)
    if pattern.chunk is not None:
        chunk = min(pattern.chunk, _FAR // 2)
        start_BL = index_BL // chunk * chunk
        low_BL = jnp.maximum(low_BL, start_BL)
        high_BL = jnp.minimum(high_BL, start_BL + (chunk - 1))
    return low_BL, jnp.where(index_BL >= UNUSED, high_BL, UNUSED)


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Which facts of rows decide; static. bounded_below: a query may see less than all before."""

    prefix: int
    bounded_below: bool
    segmented: bool

    @classmethod
    def of(cls, inputs: ScoreInputs, pattern: Pattern) -> "Visibility":
        """What this pattern and these inputs ask for."""
        return cls(
            prefix=pattern.prefix,
            bounded_below=pattern.window is not None or pattern.chunk is not None,
            segmented=inputs.q_segment_ids_BL is not None and inputs.kv_segment_ids_BT is not None,
        )

    def seen(self, query: Sequence[jax.Array], key: Sequence[jax.Array]) -> jax.Array:
        """Booleans from the facts of queries and keys, which broadcast."""
        (low, high, query_segment), (index, key_segment) = query, key
        seen = index <= high
        if self.bounded_below:
            seen &= index >= low
        if self.prefix:
            seen |= index < self.prefix
        if self.segmented:
            seen &= query_segment == key_segment
        return seen

    def kinds(self, query_facts_B3QX: jax.Array, key_facts_B2KY: jax.Array) -> jax.Array:
        """`B Q K`: how much of each pair of blocks is seen, from the extremes of its rows.

        May say "partly" of a pair in which nothing or everything is seen, never the reverse.
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
        return jnp.where(any_seen, jnp.where(all_seen, WHOLLY, PARTLY), NOTHING)


# Scalar memory of a TPU core (v5e and v5p), less what the compiler keeps there.
_SCALAR_BYTES = 2**20 - 2**14


@dataclass(frozen=True)
class Step:
    """One step of the grid, packed into 30 bits of scalar memory."""

    word: Any

    @classmethod
    def pack(cls, outer: Any, inner: Any, kind: Any, *, begins: Any, ends: Any) -> "Step":
        """outer, inner: numbers of blocks, below 2^13."""
        return cls(outer << 17 | inner << 4 | ends << 3 | begins << 2 | kind)

    @property
    def outer(self) -> Any:
        """The block that stays, and that results are written to."""
        return self.word >> 17

    @property
    def inner(self) -> Any:
        """The block that it meets in this step."""
        return (self.word >> 4) & 0x1FFF

    @property
    def kind(self) -> Any:
        """How much of the pair is seen."""
        return self.word & 3

    @property
    def begins(self) -> Any:
        """Whether the outer block is new."""
        return (self.word & 4) != 0

    @property
    def ends(self) -> Any:
        """Whether the outer block is done after this."""
        return (self.word & 8) != 0


@dataclass(frozen=True)
class Steps:
    """Pairs of blocks with something to see, in the order in which a grid takes them.

    words: packed steps, `stride` for each row of the batch; stride 0: the same for all.
    count: the most that a row has; a grid needs no more.
    """

    words: jax.Array
    count: jax.Array
    stride: int


def steps_of(kinds_BNM: jax.Array) -> Steps:
    """The steps: outer blocks N one after another, for each the inner blocks M that it meets.

    An outer block that meets none has one step, which writes its zeros. Rows of the batch with
    fewer steps than others end in steps that do nothing where they are.
    Raises: ValueError for more steps than scalar memory holds.
    """
    B, N, M = kinds_BNM.shape
    if 4 * B * N * M > _SCALAR_BYTES or max(N, M) >= 1 << 13:
        raise ValueError(
            f"attention on TPU over {B} rows of {N} x {M} blocks needs {4 * B * N * M} bytes of "
            f"scalar memory, which has {_SCALAR_BYTES}; use larger blocks "
            "(model.operation_configs), fewer rows per device, or more sp"
        )
    meets_none = ~jnp.any(kinds_BNM > NOTHING, axis=-1, keepdims=True)
    wanted = (kinds_BNM > NOTHING) | (meets_none & (jnp.arange(M) == 0))
    places = jnp.arange(N * M, dtype=jnp.int32)
    flat = wanted.reshape(B, N * M)
    count = jnp.sum(flat, axis=-1, keepdims=True, dtype=jnp.int32)
    keys = jnp.where(flat, places * 4 + kinds_BNM.reshape(B, N * M), _FAR)
    keys = jnp.sort(keys, axis=-1)
    idle = places >= count
    keys = jnp.where(idle, jnp.max(jnp.where(idle, 0, keys), axis=-1, keepdims=True), keys)
    kind, place = jnp.where(idle, NOTHING, keys & 3), keys >> 2
    outer, inner = place // M, place % M
    begins = (places == 0) | (outer != jnp.roll(outer, 1, axis=-1))
    ends = (places == count - 1) | ((outer != jnp.roll(outer, -1, axis=-1)) & ~idle)
    step = Step.pack(outer, inner, kind, begins=begins, ends=ends)
    return Steps(step.word.reshape(-1), jnp.max(count), N * M if B > 1 else 0)
