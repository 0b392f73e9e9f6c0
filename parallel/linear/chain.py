"""A column-parallel linear, elementwise work and a row-parallel linear, overlapped as one."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import ParallelLinear, scale_and_add
from parallel.linear.sharded_matmul import column_row_parallel
from parallel.sharding.mesh import mesh_context
from parallel.sharding.specs import ROWS, split_dim


def chain(
    x: jax.Array,
    column: ParallelLinear,
    function: Callable[..., jax.Array],
    row: ParallelLinear,
) -> jax.Array:
    """Compute `row(function(*column(x)))`, overlapping both linears, in the layout of `x`.

    If the rows of `x` are on tp, and both linears have the same config with an overlap, the same
    dtype and precision, partial results stay in the order in which blocks arrive
    (`gather_matmul_scatter`). Otherwise the linears run one after the other, with the features
    between them on tp.

    function: Elementwise function from the outputs of `column`, in order, to the input of `row`. It
        sees some of the rows and this device's features, and must not close over arrays.
    """
    with mesh_context(column.mesh):
        config = _shared_config(x, column, row)
        if config is None:
            return _one_after_the_other(x, column, function, row)
        biases, factor = column.arrays_of(column.bias), column.scale_factor()
        if factor != 1.0 or biases:
            function = partial(_with_biases, function=function, factor=factor, count=len(biases))
        y = column_row_parallel(
            column.cast_input(x),
            column.arrays_of(column.kernel),
            biases,
            row.kernel[...],
            function=function,
            config=config,
            precision=column.precision,
        )
        return scale_and_add([y], row.arrays_of(row.bias), row.scale_factor())[0]


def _shared_config(
    x: jax.Array, column: ParallelLinear, row: ParallelLinear
) -> TensorParallelConfig | None:
    """Return the config of both linears if `gather_matmul_scatter` can compute them, else None."""
    config = column.parallel_config
    if config is None or config.mesh is None or config.overlap == "none":
        return None
    if split_dim(jax.typeof(x).sharding.spec, config.axis_name) != ROWS:
        return None
    dtype = column.cast_input(x).dtype
    same = (config, dtype, column.precision) == (
        row.parallel_config,
        jnp.dtype(row.dtype or dtype),
        row.precision,
    )
    return config if same and isinstance(row.out_features, int) else None


def _one_after_the_other(
    x: jax.Array,
    column: ParallelLinear,
    function: Callable[..., jax.Array],
    row: ParallelLinear,
) -> jax.Array:
    outputs = column.sharded_forward(x)
    values = outputs.values() if isinstance(outputs, dict) else outputs
    hidden = function(outputs) if isinstance(values, jax.Array) else function(*values)
    return row(hidden, jax.typeof(x).sharding.spec if row.parallel_config is not None else None)


def _with_biases(
    *arrays: jax.Array, function: Callable[..., jax.Array], factor: float, count: int
) -> jax.Array:
    """Call `function` on scaled products plus their biases, the last `count` arrays."""
    products, biases = arrays[: len(arrays) - count], arrays[len(arrays) - count :]
    return function(*scale_and_add(products, biases, factor))
