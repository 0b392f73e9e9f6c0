"""Matmuls that overlap with their communication: each hop of a ring runs under a partial matmul.

All functions run inside `jax.shard_map` on local blocks of a ring of n devices; s is this device.
Rows (dim -2, tokens) or features (dim -1) are gathered or scattered.

`overlap="none"` is the reference form of each function: one collective, one matmul, derivatives by
autodiff. The other methods use a `Ring` and have derivative rules: the derivative of a gather ring
is the mirrored scatter ring, and the reverse. Each kernel gradient multiplies several blocks
at a time, which fills the time in which that ring communicates.

Numerics: matmuls accumulate in float32. Sums have the dtype of x while they travel, and so do the
partial sums of a kernel gradient; a sum that arrives is added in this dtype, rounded once.

Blocks gathered in the forward pass are residuals of the backward pass. A remat policy that does not
save them makes the backward pass gather them again. There is no forward-mode derivative.

Names in the equations: `x_shard`, `w_shard`, `y_shard` are the blocks of this device; `d` marks a
gradient (`dw_shard`); `x[k]` is the block of device k, of rows or of features; R rows, D in
features, F out features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from parallel.linear.hypercube import make_ring
from parallel.linear.local_matmul import (
    CHAIN_WGRAD_BLOCKS,
    concat_columns,
    kernel_gradient,
    kernel_gradient_of_blocks,
    matmul,
    matmul_transposed,
    plain_matmul,
    split_columns,
    split_gradient,
    trained_columns,
)
from parallel.linear.quantized import Precision, rows_for
from parallel.linear.ring import Direction, Ring, all_gather, reduce_scatter, same_type
from parallel.sharding.specs import ROWS, SplitDim

Overlap = Literal["none", Direction]
"""How a linear hides its communication under its matmuls; see `ring.Direction`."""


def gather_matmul(
    x_shard: jax.Array,
    w_shards: Sequence[jax.Array],
    *,
    axis_name: str,
    dim: SplitDim,
    overlap: Overlap = "none",
    precision: Precision = None,
    frozen: int = 0,
) -> tuple[jax.Array, ...]:
    """All-gather x and multiply it with every kernel; all kernels share one gather.

    dim=-2: x_shard `... R/n D`, w_shard `D F/n` -> y_shard `... R F/n`, rows in natural order.
      forward: y_shard[k] = x[k] @ w_shard for all k
      dgrad: dx_shard = sum over devices of (dy_shard[s] @ w_shard^T)
      wgrad: dw_shard = sum over k of x[k]^T @ dy_shard[k]
    dim=-1: x_shard `... R D/n`, w_shard `D F/n` -> y_shard `... R F/n`, summed in float32.
      forward: y_shard = sum over k of x[k] @ w_shard[k]
      dgrad: dx_shard = sum over devices of (dy_shard @ w_shard[s]^T)
      wgrad: dw_shard[k] = x[k]^T @ dy_shard for all k
    Communication: n - 1 blocks of x per device, and as many of dx in the backward pass.

    frozen: Number of kernels, from the first, that have no gradient.

    Raises: ValueError for an unknown overlap, mixed dtypes, or blocks that `split` cannot halve.
    """
    ring = ring_of(axis_name, overlap, x_shard, dim, fuse_halves=dim == ROWS)
    if ring is None:
        w_shards = without_gradient(w_shards, frozen)
        x = all_gather(x_shard, axis_name, dim)
        return tuple(plain_matmul(x, w, precision) for w in w_shards)
    x_shard, *w_shards = same_type(x_shard, *w_shards)
    rule = _gather_rows if dim == ROWS else _gather_features
    return rule(ring, precision, frozen, x_shard, tuple(w_shards))


@dataclass(frozen=True)
class BlockedProduct:
    """A product in blocks of rows, in the order in which a ring computes them, and its pullback.

    Without a ring over rows there is one block, all rows in natural order.
    """

    results: list[Any]
    """Results of the epilogue, by block."""
    pullback: Callable[[list[jax.Array]], tuple[jax.Array, jax.Array]]
    """Maps dy by block to (dx_shard in the dtype of x, dw_shard in float32)."""
    ring: Ring | None = None

    def shard(self, y: jax.Array) -> list[jax.Array]:
        """Cut an array `R ...` in natural order into blocks."""
        if self.ring is None:
            return [y]
        block_at = self.ring.shard(y, ROWS)
        return [block_at(position) for position in range(len(self.results))]

    def unshard(self, blocks: list[jax.Array]) -> jax.Array:
        """Return the array `R ...` in natural order from its blocks."""
        return blocks[0] if self.ring is None else self.ring.unshard(blocks, ROWS)


def gather_matmul_blocks(
    x_shard: jax.Array,
    w_shard: jax.Array,
    epilogue: Callable[[jax.Array], Any],
    *,
    axis_name: str,
    dim: SplitDim | None,
    overlap: Overlap = "none",
    precision: Precision = None,
) -> BlockedProduct:
    """Compute a float32 `gather_matmul` of x `R D` and one kernel, and apply `epilogue` to blocks.

    For a loss that computes its gradient in the forward pass, while its logits exist. `epilogue`
    maps rows of y to arrays with as many rows; it is computed under the hop of its block. dim=None:
    x is whole, and dx_shard is this device's term of the sum over the axis. Equations,
    communication and errors: `gather_matmul`.
    """
    x_shard, w_shard = same_type(x_shard, w_shard)
    ring = None if dim is None else ring_of(axis_name, overlap, x_shard, dim, dim == ROWS)
    multiply = partial(matmul, precision=precision, preferred_element_type=jnp.float32)
    wgrad = partial(
        kernel_gradient_of_blocks, precision=precision, blocks=CHAIN_WGRAD_BLOCKS, dtype=jnp.float32
    )
    dtype = x_shard.dtype
    if ring is not None and dim == ROWS:
        blocks, results = ring.gather(x_shard, lambda _, x: epilogue(multiply(x, w_shard)), ROWS)

        def rows_pullback(dys: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            dys = [dy.astype(dtype) for dy in dys]
            term = partial(matmul_transposed, w=w_shard, precision=precision)
            dx = ring.scatter(dys.__getitem__, term, dim=ROWS, hide_last_hop=True)
            return dx, wgrad(blocks, dys)

        return BlockedProduct(results, rows_pullback, ring)
    if ring is not None:
        (y,), residuals = _gather_features_forward(
            ring, precision, 0, x_shard, (w_shard,), jnp.float32
        )

        def features_pullback(dys: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            dy = (dys[0].astype(dtype),)
            dx, (dw,) = _gather_features_backward(ring, precision, 0, residuals, dy, jnp.float32)
            return dx, dw

        return BlockedProduct([epilogue(y)], features_pullback)
    x = x_shard if dim is None else all_gather(x_shard, axis_name, dim)

    def plain_pullback(dys: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        dy = dys[0].astype(dtype)
        dx = matmul_transposed(dy, w_shard, precision)
        dx = dx if dim is None else reduce_scatter(dx, axis_name, dim)
        return dx, kernel_gradient(x, dy, precision, jnp.float32)

    return BlockedProduct([epilogue(multiply(x, w_shard))], plain_pullback)


def matmul_scatter(
    x_shard: jax.Array,
    w_shard: jax.Array,
    *,
    axis_name: str,
    dim: SplitDim,
    overlap: Overlap = "none",
    precision: Precision = None,
    more_columns: jax.Array | None = None,
) -> jax.Array:
    """Multiply and reduce-scatter the product.

    dim=-2: x_shard `... R F/n`, w_shard `F/n D` -> y_shard `... R/n D`.
      forward: y_shard = sum over devices of (x_shard[s] @ w_shard)
      dgrad: dx_shard[k] = dy[k] @ w_shard^T for all k
      wgrad: dw_shard = sum over k of x_shard[k]^T @ dy[k]
    dim=-1: x_shard `... R F/n`, w_shard `F/n D` -> y_shard `... R D/n`.
      forward: y_shard = sum over devices of (x_shard @ w_shard[s])
      dgrad: dx_shard = sum over k of dy[k] @ w_shard[k]^T
      wgrad: dw_shard[k] = x_shard^T @ dy[k] for all k
    Communication: n - 1 blocks of y per device, and as many of dy in the backward pass.

    more_columns: For dim=-2: a second kernel `F/n E`, whose columns are appended to those of
      w_shard: y_shard `... R/n D+E`. w_shard then has no gradient.

    Raises: ValueError as `gather_matmul`, and for a result that does not divide into n blocks.
    """
    ring = ring_of(axis_name, overlap, x_shard, dim, fuse_halves=dim == ROWS)
    kernels = [w_shard] if more_columns is None else [w_shard, more_columns]
    frozen = len(kernels) - 1
    if ring is None:
        kernels = without_gradient(kernels, frozen)
        products = [plain_matmul(x_shard, w, precision) for w in kernels]
        return reduce_scatter(concat_columns(products), axis_name, dim)
    x_shard, *kernels = same_type(x_shard, *kernels)
    if dim == ROWS:
        return _scatter_rows(ring, precision, frozen, x_shard, tuple(kernels))
    return _scatter_features(ring, precision, x_shard, *kernels)


def without_gradient(kernels: Sequence[jax.Array], count: int) -> list[jax.Array]:
    """Return the kernels, the first `count` of them without a gradient."""
    return [*map(lax.stop_gradient, kernels[:count]), *kernels[count:]]


def ring_of(
    axis_name: str, overlap: Overlap, x: jax.Array, dim: SplitDim, fuse_halves: bool
) -> Ring | None:
    """Return the ring to use, or None if there is nothing to overlap."""
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap {overlap!r}: use {', '.join(get_args(Overlap))}")
    if overlap == "none" or lax.axis_size(axis_name) == 1:
        return None
    # Pieces of the batch are contiguous in memory; pieces of the rows of every sequence are not.
    cut_batch = dim == ROWS and x.ndim > 2
    if overlap == "hypercube":
        cut_batch &= x.shape[0] >= lax.axis_size(axis_name).bit_length() - 1
    else:
        cut_batch &= x.shape[0] % 2 == 0
    return make_ring(axis_name, overlap, cut_batch=cut_batch, fuse_halves=fuse_halves)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather_rows(
    ring: Ring, precision: Any, frozen: int, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    return _gather_rows_forward(ring, precision, frozen, x, kernels)[0]


def _gather_rows_forward(
    ring: Ring, precision: Any, frozen: int, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], Any]:
    # A kernel with half of all columns or more gets its own matmul, whose result is written in
    # place. Narrow kernels share one matmul, because each of their own would read x again. Very
    # narrow kernels (adapters) do not count, so that they leave the matmuls of the others alone.
    widest = max(w.shape[1] for w in kernels)
    total = sum(w.shape[1] for w in kernels if 16 * w.shape[1] > widest)
    narrow = [i for i, w in enumerate(kernels) if 2 * w.shape[1] < total]
    groups = [*([i] for i in range(len(kernels)) if i not in narrow), *([narrow] if narrow else [])]
    used = [concat_columns([kernels[i] for i in group]) for group in groups]
    blocks, products = ring.gather(
        rows_for(x, precision, "forward"),
        lambda _, block: [matmul(block, w, precision) for w in used],
        ROWS,
    )
    outs: dict[int, jax.Array] = {}
    for group, ys in zip(groups, zip(*products, strict=True), strict=True):
        y = ring.unshard(ys, ROWS)
        outs |= zip(group, split_columns(y, [kernels[i] for i in group]), strict=True)
    return tuple(outs[i] for i in range(len(kernels))), (blocks, kernels)


def _gather_rows_backward(ring: Ring, precision: Any, frozen: int, residuals: Any, dy: Any) -> Any:
    blocks, kernels = residuals
    w, dy_at = concat_columns(kernels), ring.shard(jnp.concatenate(dy, axis=-1), ROWS)
    dys = [dy_at(position) for position in range(len(blocks))]
    dx = ring.scatter(
        dys.__getitem__, lambda g: matmul_transposed(g, w, precision), dim=ROWS, hide_last_hop=True
    )
    trained = [trained_columns(g, kernels, frozen) for g in dys]
    dw = kernel_gradient_of_blocks(blocks, trained, precision)
    return dx, split_gradient(dw, kernels, frozen)


_gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scatter_rows(
    ring: Ring, precision: Any, frozen: int, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> jax.Array:
    w = concat_columns(kernels)
    return ring.scatter(ring.shard(x, ROWS), lambda rows: matmul(rows, w, precision), dim=ROWS)


def _scatter_rows_forward(
    ring: Ring, precision: Any, frozen: int, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, Any]:
    # Not inlined: a remat policy would otherwise see the partial products, and save them.
    return _scatter_rows(ring, precision, frozen, x, kernels), (x, kernels)


def _scatter_rows_backward(
    ring: Ring, precision: Any, frozen: int, residuals: Any, dy: jax.Array
) -> Any:
    x, kernels = residuals
    x_at, w = ring.shard(x, ROWS), concat_columns(kernels)
    dys, products = ring.gather(
        rows_for(dy, precision, "dgrad"),
        lambda _, block: matmul_transposed(block, w, precision),
        ROWS,
    )
    xs, dx = [x_at(position) for position in range(len(dys))], ring.unshard(products, ROWS)
    trained = [trained_columns(block, kernels, frozen) for block in dys]
    dw = kernel_gradient_of_blocks(xs, trained, precision)
    return dx, split_gradient(dw, kernels, frozen)


_scatter_rows.defvjp(_scatter_rows_forward, _scatter_rows_backward)


def _gather_and_sum(
    ring: Ring, x: jax.Array, product: Callable[..., jax.Array], dtype: Any = None
) -> tuple[list[jax.Array], jax.Array]:
    """Return the feature blocks of x, and the float32 sum of product(position, block)."""
    sums: list[jax.Array] = []

    def add(position: int, block: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        part = product(position, block, preferred_element_type=wide)
        sums.append(sums[-1] + part if sums else part)
        return sums[-1]

    blocks, running = ring.gather(x, add, -1)
    return blocks, running[-1].astype(dtype or x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather_features(
    ring: Ring, precision: Any, frozen: int, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    return _gather_features_forward(ring, precision, frozen, x, kernels)[0]


def _gather_features_forward(
    ring: Ring,
    precision: Any,
    frozen: int,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    dtype: Any = None,
) -> tuple[tuple[jax.Array, ...], Any]:
    w_at = ring.shard(concat_columns(kernels), 0)

    def product(position: int, block: jax.Array, **options: Any) -> jax.Array:
        return matmul(block, w_at(position), precision, **options)

    blocks, y = _gather_and_sum(ring, x, product, dtype)
    return split_columns(y, kernels), (blocks, kernels)


def _gather_features_backward(
    ring: Ring, precision: Any, frozen: int, residuals: Any, dys: Any, dtype: Any = None
) -> Any:
    blocks, kernels = residuals
    w_at, dy = ring.shard(concat_columns(kernels), 0), jnp.concatenate(dys, axis=-1)
    dx = ring.scatter(
        w_at, lambda w: matmul_transposed(dy, w, precision), dim=-1, hide_last_hop=True
    )
    own = trained_columns(dy, kernels, frozen)
    dw = ring.unshard([kernel_gradient(block, own, precision, dtype) for block in blocks], 0)
    return dx, split_gradient(dw, kernels, frozen)


_gather_features.defvjp(_gather_features_forward, _gather_features_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scatter_features(ring: Ring, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    return ring.scatter(ring.shard(w, 1), lambda columns: matmul(x, columns, precision), dim=-1)


def _scatter_features_forward(
    ring: Ring, precision: Any, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, Any]:
    return _scatter_features(ring, precision, x, w), (x, w)


def _scatter_features_backward(ring: Ring, precision: Any, residuals: Any, dy: jax.Array) -> Any:
    x, w = residuals
    w_at = ring.shard(w, 1)

    def product(position: int, block: jax.Array, **options: Any) -> jax.Array:
        return matmul_transposed(block, w_at(position), precision, **options)

    dys, dx = _gather_and_sum(ring, dy, product)
    return dx, ring.unshard([kernel_gradient(x, block, precision) for block in dys], 1)


_scatter_features.defvjp(_scatter_features_forward, _scatter_features_backward)
