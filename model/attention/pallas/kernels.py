"""Pallas kernels of attention in blocks: the work of one grid step, in VMEM on a TPU.

Scores are X Y in the kernels whose outer blocks are queries, and Y X in the kernel whose outer
blocks are keys. So the facts of the outer block are spread over lanes once, and those of inner
blocks are used as rows, as they arrive. Scores have base 2, as the hardware's exponential. Grids
and arrays are in `model/attention/pallas/flash.py`.

Letters: X tokens in a block of queries, Y tokens in a block of keys, h head dim, N lanes with equal
values. `words`: the steps, in scalar memory; `stride` as in `Steps`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from model.attention.pallas.grid import FULL, PARTIAL, Step, Visibility
from parallel.sharding.axes import DEFAULT_MASK_VALUE

LANES = 128
LOG2E = float(np.log2(np.e))


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
