"""A gather ring, elementwise work and a scatter ring as one: blocks are never put in order.

It runs inside `jax.shard_map` on local blocks of a ring of n devices. Numerics, residuals and the
names in the equations are those of `collective_matmul.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from parallel.linear.collective_matmul import Overlap, ring_of, without_gradient
from parallel.linear.local_matmul import (
    CHAIN_WGRAD_BLOCKS,
    add_in_float32,
    concat_columns,
    kernel_gradient_of_blocks,
    matmul,
    matmul_transposed,
    plain_matmul,
    split_gradient,
    trained_columns,
)
from parallel.linear.quantized import Precision, rows_for
from parallel.linear.ring import Ring, all_gather, reduce_scatter, same_type
from parallel.sharding.specs import ROWS


def gather_matmul_scatter(  # noqa: PLR0913  # the arguments of two linears
    x_shard: jax.Array,
    column_shards: Sequence[jax.Array],
    bias_shards: Sequence[jax.Array],
    row_shard: jax.Array,
    *,
    function: Callable[..., jax.Array],
    axis_name: str,
    overlap: Overlap = "none",
    precision: Precision = None,
    frozen: int = 0,
    more_columns: jax.Array | None = None,
) -> jax.Array:
    """Compute a column linear, elementwise work and a row linear, without reordering blocks.

    x_shard `... R/n D`, column_shards (c) `D F/n` each, bias_shards `F/n`, row_shard (r) `F/n D` ->
    y_shard `... R/n D`. `function` maps the products `... r F/n`, then the biases, to `... r F/n`.
    It works on rows one by one: it sees some of them and this device's features.
      forward: a[k] = x[k] @ c and h[k] = function(a[k]) for all k;
               y_shard = sum over devices of (h[s] @ r)
      dgrad: dh[k] = dy[k] @ r^T and da[k] = function'(a[k]) * dh[k] for all k;
             dx_shard = sum over devices of (da[s] @ c^T)
      wgrad: dc_shard = sum over k of x[k]^T @ da[k];  dr_shard = sum over k of h[k]^T @ dy[k]
    Communication: n - 1 blocks each of x and y per device, and as many of dy and dx in the backward
    pass.

    frozen: Number of column_shards, from the first, that have no gradient.
    more_columns: A second kernel `F/n E`, whose columns are appended to those of row_shard: y_shard
    `... R/n D+E`. row_shard then has no gradient.

    Raises: ValueError for an unknown overlap, mixed dtypes, or blocks that `split` cannot halve.
    """
    ring = ring_of(axis_name, overlap, x_shard, ROWS, fuse_halves=False)
    function = partial(_in_dtype, function=function, dtype=x_shard.dtype)
    rows = [row_shard] if more_columns is None else [row_shard, more_columns]
    counts = frozen, len(rows) - 1
    if ring is not None:
        first, last = len(column_shards), len(rows)
        x_shard, *rest = same_type(x_shard, *rows, *column_shards, *bias_shards)
        kernels = rest[last : last + first], rest[last + first :], rest[:last]
        return _chain(function, ring, precision, counts, x_shard, *map(tuple, kernels))
    columns, rows = map(without_gradient, (column_shards, rows), counts)
    x = all_gather(x_shard, axis_name, ROWS)
    products = [plain_matmul(x, w, precision) for w in columns]
    hidden = function(*products, *bias_shards)
    y = concat_columns([plain_matmul(hidden, w, precision) for w in rows])
    return reduce_scatter(y, axis_name, ROWS)


def _in_dtype(
    *arrays: jax.Array, function: Callable[..., jax.Array], dtype: jnp.dtype
) -> jax.Array:
    return function(*arrays).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _chain(
    function: Callable[..., jax.Array],
    ring: Ring,
    precision: Any,
    frozen: tuple[int, int],
    x: jax.Array,
    columns: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...],
    rows: tuple[jax.Array, ...],
) -> jax.Array:
    arrays = x, columns, biases, rows
    return _run_chain(function, ring, precision, frozen, *arrays, hide_last_hop=False)[0]


def _run_chain(
    function: Callable[..., jax.Array],
    ring: Ring,
    precision: Any,
    frozen: tuple[int, int],
    *arrays: Any,
    hide_last_hop: bool,
) -> tuple[jax.Array, Any]:
    x, columns, biases, rows = arrays
    row = concat_columns(rows)
    blocks, products, y = ring.gather_scatter(
        rows_for(x, precision, "forward"),
        lambda _, block: [matmul(block, w, precision) for w in columns],
        lambda a: matmul(function(*a, *biases), row, precision),
        dim=ROWS,
        hide_last_hop=hide_last_hop,
    )
    return y, (blocks, products, columns, biases, rows)


def _chain_backward(
    function: Callable[..., jax.Array],
    ring: Ring,
    precision: Any,
    frozen: tuple[int, int],
    residuals: Any,
    dy: jax.Array,
) -> Any:
    blocks, products, columns, biases, rows = residuals
    row = concat_columns(rows)

    def pull_back(position: int, block: jax.Array) -> tuple[jax.Array, Any]:
        # h is a second output of the fusion that computes it anyway; the barrier keeps it there.
        h, vjp = jax.vjp(function, *products[position], *biases)
        return h, vjp(matmul_transposed(block, row, precision))

    count = len(columns)
    dys, pulled, dx = ring.gather_scatter(
        rows_for(dy, precision, "dgrad"),
        pull_back,
        lambda result: add_in_float32(
            [
                matmul_transposed(da, w, precision)
                for da, w in zip(result[1][:count], columns, strict=True)
            ]
        ),
        dim=ROWS,
        hide_last_hop=True,
    )
    wgrad = partial(kernel_gradient_of_blocks, precision=precision, blocks=CHAIN_WGRAD_BLOCKS)
    hs = [h for h, _ in pulled]
    cotangents = list(zip(*(c for _, c in pulled), strict=True))
    trained = (wgrad(blocks, das) for das in cotangents[frozen[0] : count])
    dcolumns = (*[None] * frozen[0], *trained)
    dbiases = tuple(add_in_float32(parts) for parts in cotangents[count:])
    drow = wgrad(hs, [trained_columns(block, rows, frozen[1]) for block in dys])
    return dx, dcolumns, dbiases, split_gradient(drow, rows, frozen[1])


_chain.defvjp(partial(_run_chain, hide_last_hop=True), _chain_backward)
