"""Attention in blocks with an online softmax, on any platform; memory grows linearly in L and T.

One loop walks the pairs (block of queries, block of keys) in which anything is visible: which ones
these are is told at run time from row indices, segments and mask, so what is skipped costs nothing,
whatever the reason. `attend` is the forward pass over the given keys, `attend_gradients` the
derivatives through them once the logsumexp over all keys is known: one call of each is flash
attention, one per hop is ring attention. It refuses to know sinks, meshes and autodiff.
Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head dim; l, t rows of
a block; X = G l. Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.attention.scores import UNUSED, ScoreInputs, ScoreRule, kept_BHLT, visible_BHLT
from parallel.linear.ring import pcast_varying

# Measured on two CPU cores (2048 and 4096 rows, heads of 64): forward and backward take 10 to 20%
# less than with 256 x 256 and 512 x 512. Decoding gains from few keys too: 32 rows of a cache of
# 4096 took 28 ms with blocks of 256 and 72 ms with one of 4096, most of it out of cache.
_BLOCK_Q, _BLOCK_K = 512, 256
# More queries than this are visited one sequence at a time: each skips by its own documents, and
# eight sequences of 1024 rows take a third less time than in blocks of all eight.
_FEW = 32
_LATE = np.int32(np.iinfo(np.int32).max)
_EARLY = np.int32(np.iinfo(np.int32).min)


class Gradients(NamedTuple):
    """float32, each shaped as what it belongs to; bias: None where there is none."""

    q_BLHh: jax.Array
    k_BTKh: jax.Array
    v_BTKh: jax.Array
    bias_BHLT: jax.Array | None


def attend(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> tuple[jax.Array, jax.Array]:
    """Attention over these keys alone, without sinks: (out `B L H h`, lse `B H L`), float32.

    A query that sees nothing: out 0, lse -inf. Not differentiable: see `attend_gradients`.
    Inside shard_map the results are typed as varying over every axis that an argument varies over.
    """
    grid = _Grid.of(q_BLHh, k_BTKh, rule)
    axes = varying(q_BLHh, k_BTKh, v_BTKh, inputs)
    q_BKGLh, k, v = grid.by_head(q_BLHh), grid.keys(k_BTKh), grid.keys(v_BTKh)
    visits, count = block_pairs(inputs, rule, grid.L, grid.T, B=grid.B)

    def visit(step: jax.Array, sums: _Sums) -> _Sums:
        spot = grid.spot(visits[step])
        k_BKth, v_BKth = grid.keys_at(k, spot), grid.keys_at(v, spot)
        scores = _scores(grid.queries_at(q_BKGLh, spot), k_BKth, grid.inputs_at(inputs, spot), rule)
        here = _Sums(*(grid.queries_at(x, spot) for x in sums))
        there = _attend_to_block(here, scores, v_BKth, rule)
        return _Sums(*(grid.put(x, y, spot) for x, y in zip(sums, there, strict=True)))

    none = _Sums(
        jnp.zeros(q_BKGLh.shape, jnp.float32),
        jnp.full(q_BKGLh.shape[:-1], -jnp.inf, jnp.float32),
        jnp.zeros(q_BKGLh.shape[:-1], jnp.float32),
    )
    sums = lax.fori_loop(0, count, visit, _Sums(*(pcast_varying(x, axes) for x in none)))
    norm_BKGL = jnp.where(sums.norm_BKGL > 0, sums.norm_BKGL, 1.0)
    lse_BHL = (sums.top_BKGL + jnp.log(norm_BKGL)).reshape(grid.B, -1, grid.L)
    return grid.by_row(sums.out_BKGLh / norm_BKGL[..., None]), lse_BHL


def attend_gradients(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
    *,
    lse_BHL: jax.Array,
    delta_BHL: jax.Array,
    dout_BLHh: jax.Array,
) -> Gradients:
    """Derivatives through the part of a softmax that these keys carry.

    lse: over all keys there are, sinks included; delta: sum over h of dout * out, of the whole
    result; subtract a cotangent of lse from it.
      p = exp(s - lse);  dv = p^T dout;  ds = p (dout v^T - delta);  dq = ds k;  dk = ds^T q.
    """
    grid = _Grid.of(q_BLHh, k_BTKh, rule)
    axes = varying(q_BLHh, k_BTKh, v_BTKh, inputs, lse_BHL, delta_BHL, dout_BLHh)
    q_BKGLh, k, v = grid.by_head(q_BLHh), grid.keys(k_BTKh), grid.keys(v_BTKh)
    dout_BKGLh = grid.by_head(dout_BLHh.astype(v.dtype))
    lse_BKGL, delta_BKGL = (x.reshape(q_BKGLh.shape[:-1]) for x in (_finite(lse_BHL), delta_BHL))
    visits, count = block_pairs(inputs, rule, grid.L, grid.T, B=grid.B)

    def visit(step: jax.Array, sums: _Derivatives) -> _Derivatives:
        spot = grid.spot(visits[step])
        q_BKGlh, dout_BKGlh, lse_BKGl, delta_BKGl = (
            grid.queries_at(x, spot) for x in (q_BKGLh, dout_BKGLh, lse_BKGL, delta_BKGL)
        )
        k_BKth, v_BKth = grid.keys_at(k, spot), grid.keys_at(v, spot)
        scores = _scores(q_BKGlh, k_BKth, grid.inputs_at(inputs, spot), rule)
        kept = _kept(scores, rule)
        weights_BKGlt = jnp.exp(scores.s_BKGlt - lse_BKGl[..., None])
        dweights_BKGlt = _over_features(dout_BKGlh, v_BKth) * kept
        bias_BKGlt = weights_BKGlt * (dweights_BKGlt - delta_BKGl[..., None])
        s_BKGlt = (bias_BKGlt * scores.slope).astype(k.dtype)
        q = grid.queries_at(sums.q_BKGLh, spot) + _over_keys(s_BKGlt, k_BKth)
        return _Derivatives(
            grid.put(sums.q_BKGLh, q, spot),
            grid.add_to_keys(sums.k, _over_queries(s_BKGlt, q_BKGlh), spot),
            grid.add_to_keys(
                sums.v, _over_queries((weights_BKGlt * kept).astype(v.dtype), dout_BKGlh), spot
            ),
            None if sums.bias_BHLT is None else grid.add_to_bias(sums.bias_BHLT, bias_BKGlt, spot),
        )

    none = _Derivatives(q_BKGLh, k, v, inputs.bias_BHLT)
    zeros = jax.tree.map(lambda x: pcast_varying(jnp.zeros(x.shape, jnp.float32), axes), none)
    sums = lax.fori_loop(0, count, visit, zeros)
    dq_BLHh, dk_BTKh = grid.by_row(sums.q_BKGLh) * rule.scale, grid.whole(sums.k) * rule.scale
    return Gradients(dq_BLHh, dk_BTKh, grid.whole(sums.v), sums.bias_BHLT)


def block_sizes(rule: ScoreRule, L: int, T: int) -> tuple[int, int]:
    """Rows of a block of queries and of one of keys: the rule's, else blocks of equal size."""
    block_q = rule.block_q or _even(L, _BLOCK_Q)
    block_k = rule.block_k or _even(T, _BLOCK_K)
    return min(block_q, L), min(block_k, T)


def _even(rows: int, most: int) -> int:
    return -(-rows // -(-rows // most))


def block_pairs(
    inputs: ScoreInputs, rule: ScoreRule, L: int, T: int, *, B: int = 1
) -> tuple[jax.Array, jax.Array]:
    """What to visit: (sequence, block of queries, block of keys) `N 3` and how many come first.

    Told from the ranges of indices and segments in a block: a pair may be visited for nothing,
    never skipped for nothing. Few queries (decoding): all sequences go together, as sequence 0.
    B: sequences, where all of them share the inputs.
    """
    block_q, block_k = block_sizes(rule, L, T)
    num_q, num_k = -(-L // block_q), -(-T // block_k)
    used_BT = inputs.kv_index_BT > UNUSED
    q_low, q_high = _ranges(inputs.q_index_BL, block_q)
    kv_low, kv_high = _ranges(inputs.kv_index_BT, block_k, used_BT)
    seen = rule.pattern.any_visible(
        q_low[:, :, None], q_high[:, :, None], kv_low[:, None], kv_high[:, None]
    )
    if inputs.q_segment_ids_BL is not None and inputs.kv_segment_ids_BT is not None:
        q_low, q_high = _ranges(inputs.q_segment_ids_BL, block_q)
        kv_low, kv_high = _ranges(inputs.kv_segment_ids_BT, block_k, used_BT)
        seen &= (q_low[:, :, None] <= kv_high[:, None]) & (kv_low[:, None] <= q_high[:, :, None])
    if inputs.mask_BHLT is not None:
        spare = ((0, 0), (0, num_q * block_q - L), (0, num_k * block_k - T))
        rows_BLT = jnp.pad(inputs.mask_BHLT.any(1), spare)
        seen &= rows_BLT.reshape(-1, num_q, block_q, num_k, block_k).any((2, 4))
    seen = jnp.broadcast_to(seen, (max(B, seen.shape[0]), num_q, num_k))
    if _goes_together(block_q):
        seen = seen.any(0, keepdims=True)
    order = jnp.argsort(~seen.reshape(-1), stable=True).astype(jnp.int32)
    visits = jnp.stack(jnp.unravel_index(order, seen.shape), axis=-1)
    return visits, jnp.sum(seen, dtype=jnp.int32)


def _goes_together(block_q: int) -> bool:
    """Whether a block is of all sequences: few queries each, as in decoding."""
    return block_q <= _FEW


def _ranges(
    x_BR: jax.Array, block: int, counted: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Least and greatest of the rows of every block that count: `B N` each.

    Where none does, the greatest is below every index.
    """
    counted = jnp.ones(x_BR.shape, bool) if counted is None else counted
    low_BR, high_BR = jnp.where(counted, x_BR, _LATE), jnp.where(counted, x_BR, _EARLY)
    spare = ((0, 0), (0, -x_BR.shape[1] % block))
    low_BR = jnp.pad(low_BR, spare, constant_values=_LATE)
    high_BR = jnp.pad(high_BR, spare, constant_values=_EARLY)
    shape = (low_BR.shape[0], -1, block)
    return low_BR.reshape(shape).min(-1), high_BR.reshape(shape).max(-1)


class _Sums(NamedTuple):
    """Of every query over the keys met so far: weights times values, greatest score, weights."""

    out_BKGLh: jax.Array
    top_BKGL: jax.Array
    norm_BKGL: jax.Array


class _Derivatives(NamedTuple):
    """Sums over the pairs met so far; k and v laid out as the grid's keys are."""

    q_BKGLh: jax.Array
    k: jax.Array
    v: jax.Array
    bias_BHLT: jax.Array | None


class _Spot(NamedTuple):
    """Where a pair of blocks starts, and how many of its rows belong to the blocks before it."""

    sequence: jax.Array
    q_start: jax.Array
    k_start: jax.Array
    q_done: jax.Array
    k_done: jax.Array


@dataclass(frozen=True)
class _Part:
    """A part of an array: what is read, and written in place."""

    starts: tuple[jax.Array | int, ...]
    sizes: tuple[int, ...]

    def of(self, x: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, self.starts, self.sizes)

    def put(self, x: jax.Array, block: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(x, block, self.starts)

    def add(self, x: jax.Array, block: jax.Array) -> jax.Array:
        return self.put(x, self.of(x) + block)


class _Scores(NamedTuple):
    """Scores of a block, -inf where unseen; their slope by q k^T; what they were made from."""

    s_BKGlt: jax.Array
    slope: jax.Array | float
    inputs: ScoreInputs


@dataclass(frozen=True)
class _Grid:
    """Sizes of arrays and blocks, and what lies in a block.

    The last block of rows ends with the rows: where they do not divide it begins inside the block
    before, and the rows they share are unseen in it. So nothing is padded.
    """

    B: int
    L: int
    T: int
    K: int
    G: int
    block_q: int
    block_k: int

    @classmethod
    def of(cls, q_BLHh: jax.Array, k_BTKh: jax.Array, rule: ScoreRule) -> "_Grid":
        (B, L, H, _), (_, T, K, _) = q_BLHh.shape, k_BTKh.shape
        assert H % K == 0, f"{H} query heads for {K} kv heads"
        return cls(B, L, T, K, H // K, *block_sizes(rule, L, T))

    @property
    def _reads_once(self) -> bool:
        """One block of queries: keys stay as they are, only those that are met are moved."""
        return self.block_q == self.L

    def by_head(self, x_BLHh: jax.Array) -> jax.Array:
        """Queries of one kv head side by side."""
        x_BLKGh = x_BLHh.reshape(self.B, self.L, self.K, self.G, x_BLHh.shape[-1])
        return x_BLKGh.transpose(0, 2, 3, 1, 4)

    def by_row(self, x_BKGLh: jax.Array) -> jax.Array:
        return x_BKGLh.transpose(0, 3, 1, 2, 4).reshape(self.B, self.L, self.K * self.G, -1)

    def keys(self, x_BTKh: jax.Array) -> jax.Array:
        """`B T K h` if every block is met at most once, else `B K T h`."""
        return x_BTKh if self._reads_once else x_BTKh.transpose(0, 2, 1, 3)

    def whole(self, x: jax.Array) -> jax.Array:
        """`B T K h` from what `keys` lays out."""
        return x if self._reads_once else x.transpose(0, 2, 1, 3)

    def spot(self, visit: jax.Array) -> _Spot:
        q_first, k_first = visit[1] * self.block_q, visit[2] * self.block_k
        q_start = jnp.minimum(q_first, self.L - self.block_q)
        k_start = jnp.minimum(k_first, self.T - self.block_k)
        return _Spot(visit[0], q_start, k_start, q_first - q_start, k_first - k_start)

    def _cut(self, x: jax.Array, spot: _Spot, q_dim: int = -1, k_dim: int = -1) -> "_Part":
        """The part of x that lies in a pair of blocks; x may have one row for all sequences."""
        starts: list[jax.Array | int] = [0] * x.ndim
        sizes = list(x.shape)
        if q_dim >= 0:
            starts[q_dim], sizes[q_dim] = spot.q_start, self.block_q
        if k_dim >= 0:
            starts[k_dim], sizes[k_dim] = spot.k_start, self.block_k
        if x.shape[0] > 1 and not _goes_together(self.block_q):
            starts[0], sizes[0] = spot.sequence, 1
        return _Part(tuple(starts), tuple(sizes))

    def queries_at(self, x: jax.Array, spot: _Spot) -> jax.Array:
        return self._cut(x, spot, q_dim=3).of(x)

    def put(self, x: jax.Array, block: jax.Array, spot: _Spot) -> jax.Array:
        return self._cut(x, spot, q_dim=3).put(x, block)

    def keys_at(self, x: jax.Array, spot: _Spot) -> jax.Array:
        return self._swapped(self._cut(x, spot, k_dim=self._key_dim).of(x))

    def add_to_keys(self, x: jax.Array, block_BKth: jax.Array, spot: _Spot) -> jax.Array:
        return self._cut(x, spot, k_dim=self._key_dim).add(x, self._swapped(block_BKth))

    @property
    def _key_dim(self) -> int:
        return 1 if self._reads_once else 2

    def _swapped(self, block: jax.Array) -> jax.Array:
        return block.transpose(0, 2, 1, 3) if self._reads_once else block

    def add_to_bias(self, x_BHLT: jax.Array, block_BKGlt: jax.Array, spot: _Spot) -> jax.Array:
        """Summed over the batch and over the heads that share a bias."""
        block_BHlt = block_BKGlt.reshape(-1, self.K * self.G, self.block_q, self.block_k)
        shared = tuple(dim for dim in (0, 1) if x_BHLT.shape[dim] == 1)
        return self._cut(x_BHLT, spot, 2, 3).add(x_BHLT, block_BHlt.sum(shared, keepdims=True))

    def inputs_at(self, inputs: ScoreInputs, spot: _Spot) -> ScoreInputs:
        """The inputs of a pair of blocks."""

        def cut(x: jax.Array | None, q_dim: int = -1, k_dim: int = -1) -> jax.Array | None:
            return None if x is None else self._cut(x, spot, q_dim, k_dim).of(x)

        return ScoreInputs(
            q_index_BL=self._cut(inputs.q_index_BL, spot, q_dim=1).of(inputs.q_index_BL),
            kv_index_BT=self._cut(inputs.kv_index_BT, spot, k_dim=1).of(inputs.kv_index_BT),
            q_segment_ids_BL=cut(inputs.q_segment_ids_BL, q_dim=1),
            kv_segment_ids_BT=cut(inputs.kv_segment_ids_BT, k_dim=1),
            bias_BHLT=cut(inputs.bias_BHLT, 2, 3),
            mask_BHLT=self._fresh(cut(inputs.mask_BHLT, 2, 3), spot),
            dropout_seed=inputs.dropout_seed,
            row_ids_B=cut(inputs.row_ids_B),
            head_ids_H=inputs.head_ids_H,
        )

    def _fresh(self, mask_BHlt: jax.Array | None, spot: _Spot) -> jax.Array | None:
        """The mask without rows that belong to the blocks before."""
        if self.L % self.block_q:
            queries_l1 = (jnp.arange(self.block_q) >= spot.q_done)[:, None]
            mask_BHlt = queries_l1[None, None] if mask_BHlt is None else mask_BHlt & queries_l1
        if self.T % self.block_k:
            keys_t = jnp.arange(self.block_k) >= spot.k_done
            mask_BHlt = keys_t[None, None, None] if mask_BHlt is None else mask_BHlt & keys_t
        return mask_BHlt


def _scores(q_BKGlh: jax.Array, k_BKth: jax.Array, inputs: ScoreInputs, rule: ScoreRule) -> _Scores:
    """float32 scores of a block."""
    s_BKGlt = _over_features(q_BKGlh, k_BKth) * rule.scale
    slope: jax.Array | float = 1.0
    if rule.soft_cap is not None:
        tanh_BKGlt = jnp.tanh(s_BKGlt / rule.soft_cap)
        s_BKGlt, slope = rule.soft_cap * tanh_BKGlt, 1.0 - tanh_BKGlt * tanh_BKGlt
    if inputs.bias_BHLT is not None:
        s_BKGlt += _grouped(inputs.bias_BHLT, s_BKGlt).astype(jnp.float32)
    seen = _grouped(visible_BHLT(inputs, rule.pattern), s_BKGlt)
    return _Scores(jnp.where(seen, s_BKGlt, -jnp.inf), slope, inputs)


def _attend_to_block(sums: _Sums, scores: _Scores, v_BKth: jax.Array, rule: ScoreRule) -> _Sums:
    """The sums of a block of queries once they have met these keys too."""
    top_BKGl = jnp.maximum(sums.top_BKGL, jnp.max(scores.s_BKGlt, axis=-1))
    finite_BKGl = _finite(top_BKGl)
    shrink_BKGl = jnp.exp(sums.top_BKGL - finite_BKGl)
    weights_BKGlt = jnp.exp(scores.s_BKGlt - finite_BKGl[..., None])
    norm_BKGl = sums.norm_BKGL * shrink_BKGl + jnp.sum(weights_BKGlt, axis=-1)
    weights_BKGlt = (weights_BKGlt * _kept(scores, rule)).astype(v_BKth.dtype)
    out_BKGlh = sums.out_BKGLh * shrink_BKGl[..., None] + _over_keys(weights_BKGlt, v_BKth)
    return _Sums(out_BKGlh, top_BKGl, norm_BKGl)


def _kept(scores: _Scores, rule: ScoreRule) -> jax.Array | float:
    """What dropout multiplies the weights of a block by."""
    if not rule.dropout:
        return 1.0
    kept = _grouped(kept_BHLT(scores.inputs, rule.dropout), scores.s_BKGlt)
    return jnp.where(kept, 1.0 / (1.0 - rule.dropout), 0.0)


def _grouped(x_BHlt: jax.Array, like_BKGlt: jax.Array) -> jax.Array:
    """Heads as (kv head, query of it); dims of size one stay."""
    B, H, *block = x_BHlt.shape
    K, G = (1, 1) if H == 1 else like_BKGlt.shape[1:3]
    return x_BHlt.reshape(B, K, G, *block)


def _finite(x: jax.Array) -> jax.Array:
    """0 for the -inf of rows that see nothing: their scores are -inf and stay it."""
    return jnp.where(x == -jnp.inf, 0.0, x)


def _over_features(x_BKGlh: jax.Array, y_BKth: jax.Array) -> jax.Array:
    """x y^T: `B K G l t`."""
    return _matmul("BKXh,BKth->BKXt", _merge(x_BKGlh), y_BKth).reshape(
        *x_BKGlh.shape[:-1], y_BKth.shape[2]
    )


def _over_keys(w_BKGlt: jax.Array, y_BKth: jax.Array) -> jax.Array:
    """w y: `B K G l h`."""
    return _matmul("BKXt,BKth->BKXh", _merge(w_BKGlt), y_BKth).reshape(
        *w_BKGlt.shape[:-1], y_BKth.shape[3]
    )


def _over_queries(w_BKGlt: jax.Array, x_BKGlh: jax.Array) -> jax.Array:
    """w^T x: `B K t h`."""
    return _matmul("BKXt,BKXh->BKth", _merge(w_BKGlt), _merge(x_BKGlh))


def _matmul(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)


def _merge(x_BKGly: jax.Array) -> jax.Array:
    B, K, G, rows, width = x_BKGly.shape
    return x_BKGly.reshape(B, K, G * rows, width)


def varying(*trees: object) -> tuple[str, ...]:
    """The manual axes that any array in these trees is typed as varying over."""
    leaves = jax.tree.leaves(trees)
    return tuple(sorted(set().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))))
