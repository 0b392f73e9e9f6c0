"""Kernels of attention in blocks for TPU: what one step of the grid does in VMEM.

In those over queries the rows of scores are queries, X Y; in the one over keys they are keys, Y X.
Thus what belongs to the outer block is put into lanes once, and what moves past it lies in rows as
it comes. Scores are of base 2: the unit for exponentials knows no other. Grids and arrays are in
`model/attention/pallas_tpu.py`.

Letters: X rows of a block of queries, Y rows of a block of keys, h head dim, N lanes that all hold
the same. `words`: the steps, in scalar memory; `stride` as in `Steps`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from model.attention.pallas_steps import PARTLY, WHOLLY, Step, Visibility
from parallel.sharding.axes import DEFAULT_MASK_VALUE

LANES = 128
LOG2E = float(np.log2(np.e))


@dataclass(frozen=True, kw_only=True)
class ScoreLaw:
    """From products q k^T to scores of base 2, and which of them count. Static."""

    scale: float
    soft_cap: float | None
    visibility: Visibility

    def scores(self, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The scores, and what the soft cap multiplies their derivative with."""
        if self.soft_cap is None:
            return products * (self.scale * LOG2E), None
        share = jnp.tanh(products * (self.scale / self.soft_cap))
        return share * (self.soft_cap * LOG2E), 1.0 - share * share

    def masked(
        self, scores: jax.Array, query: Sequence[jax.Array], key: Sequence[jax.Array]
    ) -> jax.Array:
        """The scores, very low where nothing is seen; facts of rows broadcast."""
        return jnp.where(self.visibility.seen(query, key), scores, DEFAULT_MASK_VALUE)


def forward_kernel(words: Any, *refs: Any, law: ScoreLaw, stride: int) -> None:
    """Online softmax: the largest score so far, the norm below it, and the sum of values."""
    query_facts, key_facts, q, k, v, out, lse, query_lanes, top, norm = refs
    step = step_at(words, stride, pl.program_id(0), pl.program_id(2))

    @pl.when(step.begins)
    def _() -> None:
        _put_in_lanes(query_facts, query_lanes)
        # Above the mask's value: the weight of a key that is not seen is zero even then.
        top[...] = jnp.full_like(top, 0.5 * DEFAULT_MASK_VALUE)
        norm[...] = jnp.zeros_like(norm)
        out[...] = jnp.zeros_like(out)

    def meet(masked: bool) -> None:
        scores_XY, _ = law.scores(_dot_transposed(q[...], k[...]))
        width = scores_XY.shape[1]
        if masked:
            scores_XY = law.masked(scores_XY, _wide_rows(query_lanes, width), _rows(key_facts))
        old_XN = top[...]
        new_XN = jnp.maximum(old_XN, jnp.max(scores_XY, axis=1, keepdims=True))
        weights_XY = jnp.exp2(scores_XY - _wide(new_XN, width))
        shrink_XN = jnp.exp2(old_XN - new_XN)
        # Lane by lane; the lanes are added up at the end.
        parts = jnp.split(weights_XY, width // LANES, axis=1)
        norm[...] = norm[...] * shrink_XN + sum(parts[1:], parts[0])
        sums_Xh = _dot(weights_XY.astype(v.dtype), v[...])
        out[...] = out[...] * _wide(shrink_XN, out.shape[1]) + sums_Xh
        top[...] = new_XN

    _meet_by_kind(step, meet)

    @pl.when(step.ends)
    def _() -> None:
        norm_X1 = jnp.sum(norm[...], axis=1, keepdims=True)
        blind_X1 = norm_X1 == 0.0
        norm_X1 = jnp.where(blind_X1, 1.0, norm_X1)
        out[...] = out[...] / norm_X1
        lse_XN = jnp.where(blind_X1, -jnp.inf, top[...] / LOG2E + jnp.log(norm_X1))
        lse[...] = lse_XN.T[:1]


def query_gradient_kernel(words: Any, *refs: Any, law: ScoreLaw, stride: int) -> None:
    """dq = scale * sum over keys of ds k."""
    query_facts, key_facts, q, k, v, dout, lse, delta, dq, query_lanes, stats = refs
    step = step_at(words, stride, pl.program_id(0), pl.program_id(2))

    @pl.when(step.begins)
    def _() -> None:
        _put_in_lanes(query_facts, query_lanes)
        stats[0] = _in_lanes(lse[...])
        stats[1] = _in_lanes(delta[...])
        dq[...] = jnp.zeros_like(dq)

    def meet(masked: bool) -> None:
        scores_XY, slope_XY = law.scores(_dot_transposed(q[...], k[...]))
        width = scores_XY.shape[1]
        if masked:
            scores_XY = law.masked(scores_XY, _wide_rows(query_lanes, width), _rows(key_facts))
        weights_XY = jnp.exp2(scores_XY - _wide(stats[0], width))
        dweights_XY = _dot_transposed(dout[...], v[...])
        dscores_XY = weights_XY * (dweights_XY - _wide(stats[1], width))
        if slope_XY is not None:
            dscores_XY *= slope_XY
        dq[...] += _dot(dscores_XY.astype(k.dtype), k[...])

    _meet_by_kind(step, meet)

    @pl.when(step.ends)
    def _() -> None:
        dq[...] *= law.scale


def key_gradients_kernel(words: Any, *refs: Any, law: ScoreLaw, stride: int) -> None:
    """dv = sum over queries of w dout, dk = scale * sum over queries of ds q.

    And, if there is an output for it, dq `G L h` of all queries of the kv head, which stays in VMEM
    until the last step: w and ds are then made once instead of twice.
    """
    query_facts, key_facts, q, k, v, dout, lse, delta, dk, dv, *dq, key_lanes = refs
    step = step_at(words, stride, pl.program_id(0), pl.program_id(2))
    g, last_g = pl.program_id(3), pl.num_programs(3) - 1

    @pl.when(step.begins & (g == 0))
    def _() -> None:
        _put_in_lanes(key_facts, key_lanes)
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    def meet(masked: bool) -> None:
        scores_YX, slope_YX = law.scores(_dot_transposed(k[...], q[...]))
        if masked:
            keys = _wide_rows(key_lanes, scores_YX.shape[1])
            scores_YX = law.masked(scores_YX, _rows(query_facts), keys)
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

    _meet_by_kind(step, meet)

    @pl.when(step.ends & (g == last_g))
    def _() -> None:
        dk[...] *= law.scale

    @pl.when((pl.program_id(2) == pl.num_programs(2) - 1) & (g == last_g))
    def _() -> None:
        for x in dq:
            x[...] *= law.scale


def step_at(words: Any, stride: int, row: Any, index: Any) -> Step:
    """The step with this index for this row of the batch."""
    return Step(words[row * stride + index])


def _meet_by_kind(step: Step, meet: Callable[[bool], None]) -> None:
    """Runs the step, masked only where the pair of blocks is seen in part."""
    pl.when(step.kind == PARTLY)(lambda: meet(True))
    pl.when(step.kind == WHOLLY)(lambda: meet(False))


def _rows(facts: Any) -> list[jax.Array]:
    """One array `1 X` per fact."""
    return [facts[i : i + 1] for i in range(facts.shape[0])]


def _wide_rows(lanes: Any, width: int) -> list[jax.Array]:
    """One array per fact that lies in lanes, as wide as asked."""
    return [_wide(lanes[i], width) for i in range(lanes.shape[0])]


def _put_in_lanes(facts: Any, lanes: Any) -> None:
    for i, row in enumerate(_rows(facts)):
        lanes[i] = _in_lanes(row)


def _in_lanes(row_1X: jax.Array) -> jax.Array:
    """`1 X -> X N`."""
    return jnp.broadcast_to(row_1X, (LANES, row_1X.shape[1])).T


def _wide(x_XN: jax.Array, width: int) -> jax.Array:
    """As many equal lanes as asked."""
    if width <= LANES:
        return x_XN[:, :width]
    return jnp.tile(x_XN, (1, math.ceil(width / LANES)))[:, :width]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _dot_transposed(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b^T."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _transposed_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a^T b."""
    contract = (((0,), (0,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
