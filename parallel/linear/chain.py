"""A column-parallel linear, elementwise work and a row-parallel linear, overlapped as one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallel.linear.collective_chain import gather_matmul_scatter
from parallel.linear.config import TensorParallelConfig
from parallel.linear.int8_kernel import Kernel, kernel_specs
from parallel.linear.linear import ParallelLinear, scale_and_add
from parallel.linear.local_matmul import split_columns
from parallel.linear.low_rank import LowRank, adapter_of, update_blocks
from parallel.linear.quantized import Precision
from parallel.linear.sharded_matmul import (
    adapter_for_shard_map,
    add_row_update,
    check_features,
    gather_column_adapter,
    params_for_shard_map,
)
from parallel.linear.stored_kernel import gather_kernel
from parallel.sharding.axes import ColumnWise, RowWise
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

    x: `... L D` in any residual layout, as is the result. function: Elementwise function from the
    outputs of `column`, in order, to the input of `row`. It sees some of the rows and this device's
    features, and must not close over arrays.
    Communication: that of `gather_matmul_scatter`, or of the two linears.
    Raises: ValueError for inputs of another width.
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
            column.kernels(),
            biases,
            row.kernels()[0],
            function=function,
            config=config,
            precision=column.precision,
            adapters=(adapter_of(column), adapter_of(row)),
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


def column_row_parallel(
    x: jax.Array,
    column_kernels: Sequence[Kernel],
    biases: Sequence[jax.Array],
    row_kernel: Kernel,
    *,
    function: Callable[..., jax.Array],
    config: TensorParallelConfig,
    precision: Precision = None,
    adapters: tuple[LowRank | None, LowRank | None] = (None, None),
) -> jax.Array:
    """Compute `function(x @ column_kernels, biases) @ row_kernel` with both rings overlapped.

    `... L/tp D` -> `... L/tp D`. Meaning of `function`, communication and equations:
    `gather_matmul_scatter`.

    Args:
        x: Activations with their rows on tp.
        column_kernels: `ColumnWise` kernels (D, F).
        biases: Vectors (F,) on tp that `function` takes after the products.
        row_kernel: `RowWise` kernel (F, D).
        function: Elementwise work between the two matmuls.
        config: Mesh, tp axis and overlap method.
        precision: Precision of the matmuls.
        adapters: Those of the column kernels and of the row kernel.
    """
    manager, axis = config.manager, config.axis_name
    spec = jax.typeof(x).sharding.spec
    check_features(spec, config)
    to_params = partial(params_for_shard_map, x=x, keep=axis)
    column_spec, column_kernels = to_params(column_kernels, manager.resolve(ColumnWise))
    row_spec, (row_kernel,) = to_params([row_kernel], manager.resolve(RowWise))
    found = [
        adapter_for_shard_map(adapter, axes, x, config)
        for adapter, axes in zip(adapters, (ColumnWise, RowWise), strict=True)
    ]
    adapter_specs, adapters = zip(*found, strict=True)
    body = partial(
        _column_row_body,
        specs=(column_spec, row_spec, *adapter_specs),
        function=function,
        axis_name=axis,
        overlap=config.overlap,
        precision=precision,
    )
    island = jax.shard_map(
        body,
        mesh=manager.mesh,
        in_specs=(
            spec,
            kernel_specs(column_kernels, column_spec),
            [P(axis) for _ in biases],
            *kernel_specs([row_kernel], row_spec),
            adapter_specs,
        ),
        out_specs=spec,
    )
    return island(x, list(column_kernels), list(biases), row_kernel, adapters)


def _column_row_body(
    x: jax.Array,
    column_kernels: list[Kernel],
    biases: list[jax.Array],
    row_kernel: Kernel,
    adapters: tuple[LowRank | None, LowRank | None],
    *,
    specs: tuple[Any, ...],
    axis_name: str,
    function: Callable[..., jax.Array],
    **options: Any,
) -> jax.Array:
    """`... L/tp D`, kernels `D/fsdp F/tp`, biases `F/tp`, kernel `F/tp D/fsdp` -> `... L/tp D`."""
    gather = partial(gather_kernel, keep=axis_name, dtype=x.dtype, like=x)
    precision = options["precision"]
    columns = [gather(w, specs[0]) for w in column_kernels]
    vectors = [gather(bias, P(axis_name)) for bias in biases]
    w = gather(row_kernel, specs[1])
    (column, row), (column_spec, row_spec) = adapters, specs[2:]
    frozen, u_columns = 0, None
    if column is not None:
        frozen = len(columns)
        a, column = gather_column_adapter(column, column_spec, keep=axis_name, like=x)
        function = partial(
            update_blocks,
            function=function,
            count=frozen,
            outputs=column.outputs,
            scale=column.scale,
            precision=precision,
        )
        columns, vectors = [*columns, a], [*vectors, *column.b]
    if row is not None:
        u_columns = gather(row.a[0], row_spec.a[0])
    y = gather_matmul_scatter(
        *(x, columns, vectors, w),
        function=function,
        axis_name=axis_name,
        frozen=frozen,
        more_columns=u_columns,
        **options,
    )
    if row is None or u_columns is None:
        return y
    y, u = split_columns(y, [w, u_columns])
    return add_row_update(y, u, row, row_spec, ROWS, axis_name, precision)
