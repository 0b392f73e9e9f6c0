"""Pallas kernels of attention in blocks on a TPU, and the pairs of blocks that their grid visits.

A few integers, called facts, describe a query or key, so that a kernel masks a score with two
comparisons. The smallest and largest facts of a block say whether a pair of blocks is hidden,
partially visible or fully visible. Hidden pairs are not in the grid. Block masks are not supported.

Scores are X Y in the kernels whose outer blocks are queries, and Y X in the kernel whose outer
blocks are keys. So the facts of the outer block are spread over lanes once, and those of inner
blocks are used as rows, as they arrive. Scores have base 2, as the hardware's exponential.

Letters: B batch, L queries, T keys; X, Y tokens in a block of queries, of keys; Q, K blocks of
queries, of keys; N outer and M inner blocks of a grid, or N lanes with equal values; h head dim.
`words`: the steps, in scalar memory; `stride` as in `Steps`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from model.attention.mask import UNUSED, AttentionInputs, MaskSpec
from parallel.sharding.axes import DEFAULT_MASK_VALUE

LANES = 128
LOG2E = float(np.log2(np.e))
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


def fits_scalar_memory(B: int, N: int, M: int) -> bool:
    """Return whether scalar memory holds the steps of B rows of N x M pairs of blocks."""
    return 4 * B * N * M <= _SCALAR_BYTES and max(N, M) < 1 << 13


def steps_of(kinds_BNM: Array) -> Steps:
    """Return the steps: for each outer block N in turn, its visible inner blocks M.

    An outer block without a visible one has one step, which writes its zeros. Rows of the batch
    with fewer steps than others end in idle steps.
    Raises: ValueError for more steps than scalar memory holds.
    """
    B, N, M = kinds_BNM.shape
    if not fits_scalar_memory(B, N, M):
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


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """Static settings of scores: scale, soft cap and mask."""

    scale: float
    soft_cap: float | None
    visibility: Visibility

    def scores(self, products: Array) -> tuple[Array, Array | None]:
        """Return scores of base 2 from q k^T, and the derivative of the soft cap if any."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2E), None
        share = jnp.tanh(products * (self.scale / self.soft_cap))
        return share * (self.soft_cap * LOG2E), 1.0 - share * share

    def masked(self, scores: Array, query: Sequence[Array], key: Sequence[Array]) -> Array:
        """Return the scores with the mask value where a key is hidden; facts broadcast."""
        return jnp.where(self.visibility.seen(query, key), scores, DEFAULT_MASK_VALUE)


def forward_kernel(words: Any, *refs: Any, settings: ScoreSettings, stride: int) -> None:
    """Compute out and logsumexp with an online softmax: running maximum, norm and sum."""
    query_facts, key_facts, q, k, v, out, lse, query_lanes, top, norm = refs
    step = step_at(words, stride, pl.program_id(0), pl.program_id(2))

    @pl.when(step.begins)
    def _() -> None:
        _put_in_lanes(query_facts, query_lanes)
        # Above the mask value, so that the weight of a hidden key is zero even for a first block.
        top[...] = jnp.full_like(top, 0.5 * DEFAULT_MASK_VALUE)
        norm[...] = jnp.zeros_like(norm)
        out[...] = jnp.zeros_like(out)

    def process(masked: bool) -> None:
        scores_XY, _ = settings.scores(_dot_transposed(q[...], k[...]))
        width = scores_XY.shape[1]
        if masked:
            scores_XY = settings.masked(scores_XY, _wide_rows(query_lanes, width), _rows(key_facts))
        old_XN = top[...]
        new_XN = jnp.maximum(old_XN, jnp.max(scores_XY, axis=1, keepdims=True))
        weights_XY = jnp.exp2(scores_XY - _wide(new_XN, width))
        shrink_XN = jnp.exp2(old_XN - new_XN)
        # Summed lane by lane; the lanes are added at the end.
        parts = jnp.split(weights_XY, width // LANES, axis=1)
        norm[...] = norm[...] * shrink_XN + sum(parts[1:], parts[0])
        sums_Xh = _dot(weights_XY.astype(v.dtype), v[...])
        out[...] = out[...] * _wide(shrink_XN, out.shape[1]) + sums_Xh
        top[...] = new_XN

    _process(step, process)

    @pl.when(step.ends)
    def _() -> None:
        norm_X1 = jnp.sum(norm[...], axis=1, keepdims=True)
        sees_none_X1 = norm_X1 == 0.0
        norm_X1 = jnp.where(sees_none_X1, 1.0, norm_X1)
        out[...] = out[...] / norm_X1
        lse_XN = jnp.where(sees_none_X1, -jnp.inf, top[...] / LOG2E + jnp.log(norm_X1))
        lse[...] = lse_XN.T[:1]


def query_gradient_kernel(words: Any, *refs: Any, settings: ScoreSettings, stride: int) -> None:
    """Compute dq = scale * sum over keys of ds k."""
    query_facts, key_facts, q, k, v, dout, lse, delta, dq, query_lanes, stats = refs
    step = step_at(words, stride, pl.program_id(0), pl.program_id(2))

    @pl.when(step.begins)
    def _() -> None:
        _put_in_lanes(query_facts, query_lanes)
        stats[0] = _in_lanes(lse[...])
        stats[1] = _in_lanes(delta[...])
        dq[...] = jnp.zeros_like(dq)

    def process(masked: bool) -> None:
        scores_XY, slope_XY = settings.scores(_dot_transposed(q[...], k[...]))
        width = scores_XY.shape[1]
        if masked:
            scores_XY = settings.masked(scores_XY, _wide_rows(query_lanes, width), _rows(key_facts))
        weights_XY = jnp.exp2(scores_XY - _wide(stats[0], width))
        dweights_XY = _dot_transposed(dout[...], v[...])
        dscores_XY = weights_XY * (dweights_XY - _wide(stats[1], width))
        if slope_XY is not None:
            dscores_XY *= slope_XY
        dq[...] += _dot(dscores_XY.astype(k.dtype), k[...])

    _process(step, process)

    @pl.when(step.ends)
    def _() -> None:
        dq[...] *= settings.scale


def key_gradients_kernel(words: Any, *refs: Any, settings: ScoreSettings, stride: int) -> None:
    """Compute dv = sum over queries of w dout, and dk = scale * sum over queries of ds q.

    With a third output, also compute dq `G L h` of all queries of the kv head. It stays in VMEM
    until the last step, and w and ds are computed once instead of twice.
    """
    query_facts, key_facts, q, k, v, dout, lse, delta, dk, dv, *dq, key_lanes = refs
    step = step_at(words, stride, pl.program_id(0), pl.program_id(2))
    g, last_g = pl.program_id(3), pl.num_programs(3) - 1

    @pl.when(step.begins & (g == 0))
    def _() -> None:
        _put_in_lanes(key_facts, key_lanes)
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    def process(masked: bool) -> None:
        scores_YX, slope_YX = settings.scores(_dot_transposed(k[...], q[...]))
        if masked:
            keys = _wide_rows(key_lanes, scores_YX.shape[1])
            scores_YX = settings.masked(scores_YX, _rows(query_facts), keys)
        weights_YX = jnp.exp2(scores_YX - lse[...])
        dv[...] += _dot(weights_YX.astype(dout.dtype), dout[...])
        dweights_YX = _dot_transposed(v[...], dout[...])
        dscores_YX = weights_YX * (dweights_YX - delta[...])
        if slope_YX is not None:
            dscores_YX *= slope_YX
        dscores_YX = dscores_YX.astype(q.dtype)
        dk[...] += _dot(dscores_YX, q[...])
        if dq:
            start = pl.multiple_of(step.inner * q.shape[0], q.shape[0])
            dq[0][g, pl.ds(start, q.shape[0])] += _transposed_dot(dscores_YX, k[...])

    @pl.when((pl.program_id(2) == 0) & (g == 0))
    def _() -> None:
        for x in dq:
            x[...] = jnp.zeros_like(x)

    _process(step, process)

    @pl.when(step.ends & (g == last_g))
    def _() -> None:
        dk[...] *= settings.scale

    @pl.when((pl.program_id(2) == pl.num_programs(2) - 1) & (g == last_g))
    def _() -> None:
        for x in dq:
            x[...] *= settings.scale


def step_at(words: Any, stride: int, row: Any, index: Any) -> Step:
    """Return the step with this index for this row of the batch."""
    return Step(words[row * stride + index])


def _process(step: Step, process: Callable[[bool], None]) -> None:
    """Process the pair of blocks unless it is hidden; mask it only if it is partially visible."""
    pl.when(step.kind == PARTIAL)(lambda: process(True))
    pl.when(step.kind == FULL)(lambda: process(False))


def _rows(facts: Any) -> list[Array]:
    """Return one array `1 X` per fact."""
    return [facts[i : i + 1] for i in range(facts.shape[0])]


def _wide_rows(lanes: Any, width: int) -> list[Array]:
    """Return one array of `width` lanes per fact."""
    return [_wide(lanes[i], width) for i in range(lanes.shape[0])]


def _put_in_lanes(facts: Any, lanes: Any) -> None:
    for i, row in enumerate(_rows(facts)):
        lanes[i] = _in_lanes(row)


def _in_lanes(row_1X: Array) -> Array:
    """`1 X -> X N`."""
    return jnp.broadcast_to(row_1X, (LANES, row_1X.shape[1])).T


def _wide(x_XN: Array, width: int) -> Array:
    """Return `width` equal lanes."""
    if width <= LANES:
        return x_XN[:, :width]
    return jnp.tile(x_XN, (1, math.ceil(width / LANES)))[:, :width]


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _dot_transposed(a: Array, b: Array) -> Array:
    """Return a b^T."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _transposed_dot(a: Array, b: Array) -> Array:
    """Return a^T b."""
    contract = (((0,), (0,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
