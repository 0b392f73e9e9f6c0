"""Attention in blocks with an online softmax, on any platform; memory is linear in L and T.

One loop visits the pairs (block of queries, block of keys) in which a query sees a key. The pairs
are found at run time from row indices, segments and mask, so a skipped pair costs nothing. `attend`
is the forward pass over the given keys. `attend_gradients` returns the derivatives through them,
given the logsumexp over all keys. Flash attention is one call of each, ring attention one per hop.
Sinks, meshes and autodiff are the callers' work.

Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head dim; l, t rows of
a block; X = G l. Source: FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from model.attention.mask import (
    UNUSED,
    AttentionInputs,
    AttentionSpec,
    dropout_keep_BHLT,
    visible_BHLT,
)
from parallel.linear.ring import pcast_varying

# Measured on two CPU cores (2048 and 4096 tokens, heads of 64): forward and backward take 10 to 20%
# less time than with 256 x 256 and 512 x 512. Decoding with 32 sequences and a cache of 4096 slots
# took 28 ms with blocks of 256 keys and 72 ms with one block of 4096.
_BLOCK_Q, _BLOCK_K = 512, 256
# Larger blocks of queries are visited one sequence at a time, so that each skips by its own
# documents: eight sequences of 1024 tokens take a third less time than in blocks of all eight.
_MAX_BATCHED_BLOCK_Q = 32
_LATE = np.int32(np.iinfo(np.int32).max)
_EARLY = np.int32(np.iinfo(np.int32).min)


class OutputGradients(NamedTuple):
    """Facts of the output over all keys that a backward pass needs.

    lse_BHL: logsumexp over all keys, sinks included. delta_BHL: sum over h of dout * out, minus the
    cotangent of lse if there is one. dout_BLHh: cotangent of out.
    """

    lse_BHL: Array
    delta_BHL: Array
    dout_BLHh: Array


class Gradients(NamedTuple):
    """Derivatives in float32, shaped as their arrays; bias is None if there is none."""

    q_BLHh: Array
    k_BTKh: Array
    v_BTKh: Array
    bias_BHLT: Array | None


def attend(
    q_BLHh: Array, k_BTKh: Array, v_BTKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    """Return attention over these keys without sinks: (out `B L H h`, lse `B H L`), float32.

    A query that sees nothing gets out 0 and lse -inf. Not differentiable: see `attend_gradients`.
    Inside shard_map the results vary over every axis that an argument varies over.
    """
    grid = _Grid.of(q_BLHh, k_BTKh, spec)
    axes = varying(q_BLHh, k_BTKh, v_BTKh, inputs)
    q_BKGLh, k, v = grid.by_head(q_BLHh), grid.keys(k_BTKh), grid.keys(v_BTKh)
    visits, count = block_pairs(inputs, spec, grid.L, grid.T, B=grid.B)

    def visit(step: Array, sums: _Sums) -> _Sums:
        pair = grid.pair(visits[step])
        k_BKth, v_BKth = grid.keys_at(k, pair), grid.keys_at(v, pair)
        scores = _scores(grid.queries_at(q_BKGLh, pair), k_BKth, grid.inputs_at(inputs, pair), spec)
        here = _Sums(*(grid.queries_at(x, pair) for x in sums))
        there = _attend_to_block(here, scores, v_BKth, spec)
        return _Sums(*(grid.put(x, y, pair) for x, y in zip(sums, there, strict=True)))

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
    q_BLHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
    output: OutputGradients,
) -> Gradients:
    """Return the derivatives through these keys, a part of all keys.

    p = exp(s - lse);  dv = p^T dout;  ds = p (dout v^T - delta);  dq = ds k;  dk = ds^T q.
    """
    grid = _Grid.of(q_BLHh, k_BTKh, spec)
    lse_BHL, delta_BHL, dout_BLHh = output
    axes = varying(q_BLHh, k_BTKh, v_BTKh, inputs, output)
    q_BKGLh, k, v = grid.by_head(q_BLHh), grid.keys(k_BTKh), grid.keys(v_BTKh)
    dout_BKGLh = grid.by_head(dout_BLHh.astype(v.dtype))
    lse_BKGL, delta_BKGL = (x.reshape(q_BKGLh.shape[:-1]) for x in (_finite(lse_BHL), delta_BHL))
    visits, count = block_pairs(inputs, spec, grid.L, grid.T, B=grid.B)

    def visit(step: Array, sums: _Derivatives) -> _Derivatives:
        pair = grid.pair(visits[step])
        q_BKGlh, dout_BKGlh, lse_BKGl, delta_BKGl = (
            grid.queries_at(x, pair) for x in (q_BKGLh, dout_BKGLh, lse_BKGL, delta_BKGL)
        )
        k_BKth, v_BKth = grid.keys_at(k, pair), grid.keys_at(v, pair)
        scores = _scores(q_BKGlh, k_BKth, grid.inputs_at(inputs, pair), spec)
        kept = _kept(scores, spec)
        weights_BKGlt = jnp.exp(scores.s_BKGlt - lse_BKGl[..., None])
        dweights_BKGlt = _over_features(dout_BKGlh, v_BKth) * kept
        bias_BKGlt = weights_BKGlt * (dweights_BKGlt - delta_BKGl[..., None])
        s_BKGlt = (bias_BKGlt * scores.slope).astype(k.dtype)
        q = grid.queries_at(sums.q_BKGLh, pair) + _over_keys(s_BKGlt, k_BKth)
        return _Derivatives(
            grid.put(sums.q_BKGLh, q, pair),
            grid.add_to_keys(sums.k, _over_queries(s_BKGlt, q_BKGlh), pair),
            grid.add_to_keys(
                sums.v, _over_queries((weights_BKGlt * kept).astype(v.dtype), dout_BKGlh), pair
            ),
            None if sums.bias_BHLT is None else grid.add_to_bias(sums.bias_BHLT, bias_BKGlt, pair),
        )

    none = _Derivatives(q_BKGLh, k, v, inputs.bias_BHLT)
    zeros = jax.tree.map(lambda x: pcast_varying(jnp.zeros(x.shape, jnp.float32), axes), none)
    sums = lax.fori_loop(0, count, visit, zeros)
    dq_BLHh, dk_BTKh = grid.by_row(sums.q_BKGLh) * spec.scale, grid.whole(sums.k) * spec.scale
    return Gradients(dq_BLHh, dk_BTKh, grid.whole(sums.v), sums.bias_BHLT)


def block_sizes(spec: AttentionSpec, L: int, T: int) -> tuple[int, int]:
    """Return block_q and block_k: the spec's, else blocks of nearly equal size."""
    block_q = spec.block_q or _even(L, _BLOCK_Q)
    block_k = spec.block_k or _even(T, _BLOCK_K)
    return min(block_q, L), min(block_k, T)


def _even(rows: int, most: int) -> int:
    return -(-rows // -(-rows // most))


def block_pairs(
    inputs: AttentionInputs, spec: AttentionSpec, L: int, T: int, *, B: int = 1
) -> tuple[Array, Array]:
    """Return pairs (sequence, block of queries, block of keys) `N 3`, and how many to visit.

    The pairs to visit come first. They are found from the ranges of indices and segments in a
    block: a visited pair may have nothing to see, a skipped pair never has. Small blocks of queries
    (decoding) hold all sequences, numbered 0. B: sequences, if all of them share the inputs.
    """
    block_q, block_k = block_sizes(spec, L, T)
    num_q, num_k = -(-L // block_q), -(-T // block_k)
    used_BT = inputs.kv_index_BT > UNUSED
    q_low, q_high = _ranges(inputs.q_index_BL, block_q)
    kv_low, kv_high = _ranges(inputs.kv_index_BT, block_k, used_BT)
    seen = spec.mask.any_visible(
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
    if _is_batched(block_q):
        seen = seen.any(0, keepdims=True)
    order = jnp.argsort(~seen.reshape(-1), stable=True).astype(jnp.int32)
    visits = jnp.stack(jnp.unravel_index(order, seen.shape), axis=-1)
    return visits, jnp.sum(seen, dtype=jnp.int32)


def _is_batched(block_q: int) -> bool:
    """Return whether a block holds all sequences: few queries each, as in decoding."""
    return block_q <= _MAX_BATCHED_BLOCK_Q


def _ranges(x_BR: Array, block: int, counted: Array | None = None) -> tuple[Array, Array]:
    """Return the smallest and largest counted value of every block: `B N` each.

    If none is counted, the largest is below every index.
    """
    counted = jnp.ones(x_BR.shape, bool) if counted is None else counted
    low_BR, high_BR = jnp.where(counted, x_BR, _LATE), jnp.where(counted, x_BR, _EARLY)
    spare = ((0, 0), (0, -x_BR.shape[1] % block))
    low_BR = jnp.pad(low_BR, spare, constant_values=_LATE)
    high_BR = jnp.pad(high_BR, spare, constant_values=_EARLY)
    shape = (low_BR.shape[0], -1, block)
    return low_BR.reshape(shape).min(-1), high_BR.reshape(shape).max(-1)


class _Sums(NamedTuple):
    """Running sums of every query: weights times values, largest score, sum of weights."""

    out_BKGLh: Array
    top_BKGL: Array
    norm_BKGL: Array


class _Derivatives(NamedTuple):
    """Running sums of derivatives; k and v in the grid's layout of keys."""

    q_BKGLh: Array
    k: Array
    v: Array
    bias_BHLT: Array | None


class _Pair(NamedTuple):
    """Starts of a pair of blocks, and how many of its tokens belong to the blocks before."""

    sequence: Array
    q_start: Array
    k_start: Array
    q_done: Array
    k_done: Array


@dataclass(frozen=True)
class _Part:
    """A slice of an array, to read and to write in place."""

    starts: tuple[Array | int, ...]
    sizes: tuple[int, ...]

    def of(self, x: Array) -> Array:
        return lax.dynamic_slice(x, self.starts, self.sizes)

    def put(self, x: Array, block: Array) -> Array:
        return lax.dynamic_update_slice(x, block, self.starts)

    def add(self, x: Array, block: Array) -> Array:
        return self.put(x, self.of(x) + block)


class _Scores(NamedTuple):
    """Scores of a block, -inf where hidden; their derivative by scaled q k^T; their inputs."""

    s_BKGlt: Array
    slope: Array | float
    inputs: AttentionInputs


@dataclass(frozen=True)
class _Grid:
    """Sizes of arrays and blocks, and the slices of a pair of blocks.

    The last block ends with the row. If the sizes do not divide, it overlaps the block before, and
    hides the shared tokens. So nothing is padded.
    """

    B: int
    L: int
    T: int
    K: int
    G: int
    block_q: int
    block_k: int

    @classmethod
    def of(cls, q_BLHh: Array, k_BTKh: Array, spec: AttentionSpec) -> "_Grid":
        (B, L, H, _), (_, T, K, _) = q_BLHh.shape, k_BTKh.shape
        assert H % K == 0, f"{H} query heads for {K} kv heads"
        return cls(B, L, T, K, H // K, *block_sizes(spec, L, T))

    @property
    def _reads_once(self) -> bool:
        """Whether every block of keys is read at most once: then keys are not transposed."""
        return self.block_q == self.L

    def by_head(self, x_BLHh: Array) -> Array:
        """`B L H h -> B K G L h`."""
        x_BLKGh = x_BLHh.reshape(self.B, self.L, self.K, self.G, x_BLHh.shape[-1])
        return x_BLKGh.transpose(0, 2, 3, 1, 4)

    def by_row(self, x_BKGLh: Array) -> Array:
        return x_BKGLh.transpose(0, 3, 1, 2, 4).reshape(self.B, self.L, self.K * self.G, -1)

    def keys(self, x_BTKh: Array) -> Array:
        """Return `B T K h` if every block is read at most once, else `B K T h`."""
        return x_BTKh if self._reads_once else x_BTKh.transpose(0, 2, 1, 3)

    def whole(self, x: Array) -> Array:
        """Return `B T K h` from the layout of `keys`."""
        return x if self._reads_once else x.transpose(0, 2, 1, 3)

    def pair(self, visit: Array) -> _Pair:
        q_first, k_first = visit[1] * self.block_q, visit[2] * self.block_k
        q_start = jnp.minimum(q_first, self.L - self.block_q)
        k_start = jnp.minimum(k_first, self.T - self.block_k)
        return _Pair(visit[0], q_start, k_start, q_first - q_start, k_first - k_start)

    def _cut(self, x: Array, pair: _Pair, q_dim: int = -1, k_dim: int = -1) -> "_Part":
        """Return the part of x in a pair of blocks; x may have one row for all sequences."""
        starts: list[Array | int] = [0] * x.ndim
        sizes = list(x.shape)
        if q_dim >= 0:
            starts[q_dim], sizes[q_dim] = pair.q_start, self.block_q
        if k_dim >= 0:
            starts[k_dim], sizes[k_dim] = pair.k_start, self.block_k
        if x.shape[0] > 1 and not _is_batched(self.block_q):
            starts[0], sizes[0] = pair.sequence, 1
        return _Part(tuple(starts), tuple(sizes))

    def queries_at(self, x: Array, pair: _Pair) -> Array:
        return self._cut(x, pair, q_dim=3).of(x)

    def put(self, x: Array, block: Array, pair: _Pair) -> Array:
        return self._cut(x, pair, q_dim=3).put(x, block)

    def keys_at(self, x: Array, pair: _Pair) -> Array:
        return self._swapped(self._cut(x, pair, k_dim=self._key_dim).of(x))

    def add_to_keys(self, x: Array, block_BKth: Array, pair: _Pair) -> Array:
        return self._cut(x, pair, k_dim=self._key_dim).add(x, self._swapped(block_BKth))

    @property
    def _key_dim(self) -> int:
        return 1 if self._reads_once else 2

    def _swapped(self, block: Array) -> Array:
        return block.transpose(0, 2, 1, 3) if self._reads_once else block

    def add_to_bias(self, x_BHLT: Array, block_BKGlt: Array, pair: _Pair) -> Array:
        """Add a block, summed over the sequences and heads that share a bias."""
        block_BHlt = block_BKGlt.reshape(-1, self.K * self.G, self.block_q, self.block_k)
        shared = tuple(dim for dim in (0, 1) if x_BHLT.shape[dim] == 1)
        return self._cut(x_BHLT, pair, 2, 3).add(x_BHLT, block_BHlt.sum(shared, keepdims=True))

    def inputs_at(self, inputs: AttentionInputs, pair: _Pair) -> AttentionInputs:
        """Return the inputs of a pair of blocks."""

        def cut(dims: str, x: Array) -> Array:
            whole = "B" not in dims
            return x if whole else self._cut(x, pair, dims.find("L"), dims.find("T")).of(x)

        arrays = {name: cut(dims, x) for name, dims, x in inputs.present()}
        mask = self._without_shared(arrays.get("mask_BHLT"), pair)
        return AttentionInputs(**{**arrays, "mask_BHLT": mask})

    def _without_shared(self, mask_BHlt: Array | None, pair: _Pair) -> Array | None:
        """Return the mask without tokens that belong to the blocks before."""
        if self.L % self.block_q:
            queries_l1 = (jnp.arange(self.block_q) >= pair.q_done)[:, None]
            mask_BHlt = queries_l1[None, None] if mask_BHlt is None else mask_BHlt & queries_l1
        if self.T % self.block_k:
            keys_t = jnp.arange(self.block_k) >= pair.k_done
            mask_BHlt = keys_t[None, None, None] if mask_BHlt is None else mask_BHlt & keys_t
        return mask_BHlt


def _scores(q_BKGlh: Array, k_BKth: Array, inputs: AttentionInputs, spec: AttentionSpec) -> _Scores:
    """Return the float32 scores of a block."""
    s_BKGlt = _over_features(q_BKGlh, k_BKth) * spec.scale
    slope: Array | float = 1.0
    if spec.soft_cap is not None:
        tanh_BKGlt = jnp.tanh(s_BKGlt / spec.soft_cap)
        s_BKGlt, slope = spec.soft_cap * tanh_BKGlt, 1.0 - tanh_BKGlt * tanh_BKGlt
    if inputs.bias_BHLT is not None:
        s_BKGlt += _grouped(inputs.bias_BHLT, s_BKGlt).astype(jnp.float32)
    seen = _grouped(visible_BHLT(inputs, spec.mask), s_BKGlt)
    return _Scores(jnp.where(seen, s_BKGlt, -jnp.inf), slope, inputs)


def _attend_to_block(sums: _Sums, scores: _Scores, v_BKth: Array, spec: AttentionSpec) -> _Sums:
    """Return the running sums of a block of queries with these keys added."""
    top_BKGl = jnp.maximum(sums.top_BKGL, jnp.max(scores.s_BKGlt, axis=-1))
    finite_BKGl = _finite(top_BKGl)
    shrink_BKGl = jnp.exp(sums.top_BKGL - finite_BKGl)
    weights_BKGlt = jnp.exp(scores.s_BKGlt - finite_BKGl[..., None])
    norm_BKGl = sums.norm_BKGL * shrink_BKGl + jnp.sum(weights_BKGlt, axis=-1)
    weights_BKGlt = (weights_BKGlt * _kept(scores, spec)).astype(v_BKth.dtype)
    out_BKGlh = sums.out_BKGLh * shrink_BKGl[..., None] + _over_keys(weights_BKGlt, v_BKth)
    return _Sums(out_BKGlh, top_BKGl, norm_BKGl)


def _kept(scores: _Scores, spec: AttentionSpec) -> Array | float:
    """Return the factor of the weights of a block under dropout."""
    if not spec.dropout:
        return 1.0
    kept = _grouped(dropout_keep_BHLT(scores.inputs, spec.dropout), scores.s_BKGlt)
    return jnp.where(kept, 1.0 / (1.0 - spec.dropout), 0.0)


def _grouped(x_BHlt: Array, like_BKGlt: Array) -> Array:
    """`B H l t -> B K G l t`; dims of size one stay."""
    B, H, *block = x_BHlt.shape
    K, G = (1, 1) if H == 1 else like_BKGlt.shape[1:3]
    return x_BHlt.reshape(B, K, G, *block)


def _finite(x: Array) -> Array:
    """Replace -inf, of rows that see nothing, by 0; their scores stay -inf."""
    return jnp.where(x == -jnp.inf, 0.0, x)


def _over_features(x_BKGlh: Array, y_BKth: Array) -> Array:
    """Return x y^T `B K G l t`."""
    return _matmul("BKXh,BKth->BKXt", _merge(x_BKGlh), y_BKth).reshape(
        *x_BKGlh.shape[:-1], y_BKth.shape[2]
    )


def _over_keys(w_BKGlt: Array, y_BKth: Array) -> Array:
    """Return w y `B K G l h`."""
    return _matmul("BKXt,BKth->BKXh", _merge(w_BKGlt), y_BKth).reshape(
        *w_BKGlt.shape[:-1], y_BKth.shape[3]
    )


def _over_queries(w_BKGlt: Array, x_BKGlh: Array) -> Array:
    """Return w^T x `B K t h`."""
    return _matmul("BKXt,BKXh->BKth", _merge(w_BKGlt), _merge(x_BKGlh))


def _matmul(dims: str, x: Array, y: Array) -> Array:
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)


def _merge(x_BKGly: Array) -> Array:
    B, K, G, rows, width = x_BKGly.shape
    return x_BKGly.reshape(B, K, G * rows, width)


def varying(*trees: object) -> tuple[str, ...]:
    """Return the manual mesh axes that any array in these trees varies over."""
    leaves = jax.tree.leaves(trees)
    return tuple(sorted(set().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))))
