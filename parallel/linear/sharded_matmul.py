"""Matmuls of sharded arrays: from layouts in array types to collective matmuls on local blocks.

The layer between the linears and `collective_matmul.py`. Each function reads the layout of its
input from the array type, opens a `shard_map`, gathers the kernel over the axes that only store it
(fsdp, sp), and calls the collective matmul that the layout asks for. It owns no parameters.

Shape letters: L rows (tokens), D in features, F out features; local along the axes in their spec.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parallel.linear.collective_matmul import (
    Overlap,
    gather_matmul,
    matmul_scatter,
)
from parallel.linear.config import TensorParallelConfig
from parallel.linear.head_matmul import PLAIN, HeadMatmul
from parallel.linear.int8_kernel import Int8Kernel, Kernel, kernel_specs, values_spec
from parallel.linear.local_matmul import plain_matmul, split_columns
from parallel.linear.low_rank import SAVED_NAMES, LowRank, add_product, factor_axes
from parallel.linear.quantized import Precision, QuantizedMatmul
from parallel.linear.ring import pcast_varying
from parallel.linear.stored_kernel import gather_kernel, storage_ring, stored_block
from parallel.sharding.axes import ColumnWise, RowWise, TokenWise
from parallel.sharding.specs import FEATURES, ROWS, SplitDim, mesh_axes_of, split_dim, without_axis


def params_for_shard_map(
    params: Sequence[Kernel],
    spec: P,
    x: jax.Array,
    keep: str,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[P, list[Any]]:
    """Return parameters, and their spec, as they enter a shard_map together with `x`.

    They stay split over `keep` and over the axes that split `x`. Over the other axes they are
    gathered here, in `dtype` (None: the dtype of `x`): devices along those axes compute the same
    gradient, which the transpose of a gather inside the shard_map would sum. Quantized kernels are
    gathered as they are; `kernel_specs` returns the layouts of their arrays.
    """
    used = {keep, *(n for entry in jax.typeof(x).sharding.spec for n in mesh_axes_of(entry))}
    if used.issuperset(name for entry in spec for name in mesh_axes_of(entry)):
        return spec, list(params)
    kept = P(*(tuple(n for n in mesh_axes_of(entry) if n in used) or None for entry in spec))
    cast = [p if isinstance(p, Int8Kernel) else p.astype(dtype or x.dtype) for p in params]
    return kept, [*map(jax.sharding.reshard, cast, kernel_specs(cast, kept))]


def adapter_for_shard_map(
    adapter: LowRank | None, kernel_axes: Any, x: jax.Array, config: TensorParallelConfig
) -> tuple[Any, LowRank | None]:
    """Return an adapter's specs, and the adapter, as they enter a shard_map together with `x`.

    kernel_axes: Semantic axes of the kernels that it belongs to.
    """
    if adapter is None:
        return None, None
    found = [
        params_for_shard_map(factors, config.manager.resolve(axes), x, config.axis_name)
        for axes, factors in zip(factor_axes(kernel_axes), (adapter.a, adapter.b), strict=True)
    ]
    (a_spec, a), (b_spec, b) = found
    specs = replace(adapter, a=(a_spec,) * len(a), b=(b_spec,) * len(b))
    return specs, replace(adapter, a=tuple(a), b=tuple(b))


def _shard_map(
    body: Callable[..., tuple[jax.Array, ...]],
    x: jax.Array,
    kernels: Sequence[Kernel],
    axes: type,
    out_spec: P,
    config: TensorParallelConfig,
    precision: Precision,
    adapter: LowRank | None,
) -> tuple[jax.Array, ...]:
    """Call `body` on local blocks of `x` and of kernels laid out as `axes`, one output each.

    With one device on tp, all bodies are plain matmuls. If kernels are gathered around a ring, or
    products lie by head, `stored_block` replaces `body`. Linears with adapters keep `body`.
    """
    manager, axis = config.manager, config.axis_name
    kernel_spec, kernels = params_for_shard_map(kernels, manager.resolve(axes), x, axis)
    adapter_spec, adapter = adapter_for_shard_map(adapter, axes, x, config)
    storage, heads = storage_ring(kernel_spec, config), _head_matmul(x, kernels, axes, config)
    if storage is None and isinstance(precision, QuantizedMatmul):
        heads = PLAIN  # the others have no derivative of rounded operands
    is_plain = storage is None and heads is PLAIN
    if is_plain or adapter is not None or manager.mesh.shape[axis] > 1:
        body = partial(body, overlap=config.overlap)
    else:
        varies = any(axis in mesh_axes_of(entry) for entry in out_spec)
        body = partial(stored_block, storage=storage, heads=heads, varies=varies)
    body = partial(body, kernel_spec=kernel_spec, axis_name=axis, precision=precision)
    island = jax.shard_map(
        partial(_local, body=body, adapter_spec=adapter_spec),
        mesh=manager.mesh,
        in_specs=(jax.typeof(x).sharding.spec, adapter_spec, *kernel_specs(kernels, kernel_spec)),
        out_specs=tuple(out_spec for _ in kernels),
    )
    return island(x, adapter, *kernels)


def _head_matmul(
    x: jax.Array, kernels: Sequence[Kernel], axes: type, config: TensorParallelConfig
) -> HeadMatmul:
    """Return the matmul to or from heads that the config asks for, or the plain one.

    Raises: ValueError if the width of a head does not divide the features that are heads.
    """
    width = config.head_width
    if width is None or x.ndim != 3 or axes not in (ColumnWise, RowWise):
        return PLAIN
    side: Literal["out", "in"] = "out" if axes is ColumnWise else "in"
    for kernel in kernels:
        values = kernel.values if isinstance(kernel, Int8Kernel) else kernel
        num_features = values.shape[-1 if side == "out" else -2]
        if num_features % width:
            raise ValueError(
                f"head_width={width} does not divide the F={num_features} features that are split "
                "into heads; use a head_width that divides F, or None"
            )
    return HeadMatmul(width, side)


def _local(
    x: jax.Array,
    adapter: LowRank | None,
    *kernels: Kernel,
    body: Callable[..., tuple[jax.Array, ...]],
    adapter_spec: Any,
) -> tuple[jax.Array, ...]:
    if adapter is None:
        return body(x, *kernels)
    return body(x, *kernels, adapter=adapter, adapter_spec=adapter_spec)


def check_features(spec: P, config: TensorParallelConfig) -> None:
    """Refuse activations whose features another axis than tp splits."""
    sizes = config.manager.mesh.shape
    for name in mesh_axes_of(spec[-1]):
        if name != config.axis_name and sizes[name] > 1:
            raise ValueError(
                f"features of type {spec} are split over {name}; reshard the input so that no "
                f"axis but {config.axis_name} splits them"
            )


def check_row_input(spec: P, config: TensorParallelConfig) -> None:
    """Refuse activations whose features are not on tp, or that another axis splits."""
    axis = config.axis_name
    if split_dim(spec, axis) != FEATURES and config.manager.mesh.shape[axis] > 1:
        raise ValueError(
            f"a row-parallel linear needs the features of its input on {axis}, got {spec}; if a "
            "ColumnParallelLinear computes the input, give that one a TensorParallelConfig with "
            "reduce_scatter_output=True; otherwise use jax.sharding.reshard on the input"
        )
    check_features(spec, config)


def column_parallel(
    x: jax.Array,
    kernels: Sequence[Kernel],
    config: TensorParallelConfig,
    precision: Precision = None,
    adapter: LowRank | None = None,
) -> tuple[jax.Array, ...]:
    """Multiply `x` with `ColumnWise` kernels (D, F): `... L D` -> `... L F` each, F on tp.

    `x` may have its rows, its features, or no dim on tp; equations in `gather_matmul`.
    Communication: n - 1 blocks of `x` per device over tp, none if tp does not split it; each kernel
    over (fsdp, sp) in the dtype of `x`.

    Raises: ValueError if tp splits a dim before the rows of `x` or is not the innermost axis of its
    dim, or if another axis splits its features.
    """
    axis, spec = config.axis_name, jax.typeof(x).sharding.spec
    check_features(spec, config)
    body = partial(column_block, dim=split_dim(spec, axis))
    out_spec = P(*(without_axis(entry, axis) for entry in spec[:-1]), axis)
    return _shard_map(body, x, kernels, ColumnWise, out_spec, config, precision, adapter)


def column_block(
    x: jax.Array,
    *kernels: Kernel,
    kernel_spec: P,
    dim: SplitDim | None,
    axis_name: str,
    overlap: Overlap,
    precision: Precision,
    adapter: LowRank | None = None,
    adapter_spec: Any = None,
) -> tuple[jax.Array, ...]:
    """Compute `column_parallel` of local blocks inside a shard_map over all mesh axes.

    `... L/tp D` or `... L D/tp` or `... L D`, kernels `D/fsdp F/tp` -> `... L F/tp` each.
    """
    frozen = 0
    if adapter is not None:
        # Every device computes all columns of x A. Their gradients are summed over tp: that of A in
        # its own dtype, that of x together with the gradient through the kernels.
        x, frozen = pcast_varying(x, (axis_name,)), len(kernels)
    gather = partial(gather_kernel, keep=axis_name, dtype=x.dtype, like=x)
    whole = [gather(w, kernel_spec) for w in kernels]
    if adapter is not None:
        a, adapter = gather_column_adapter(adapter, adapter_spec, keep=axis_name, like=x)
        whole.append(a)
    if dim is None:
        outputs = tuple(plain_matmul(x, w, precision) for w in whole)
    else:
        options: Any = {"axis_name": axis_name, "overlap": overlap, "precision": precision}
        outputs = gather_matmul(x, whole, dim=dim, frozen=frozen, **options)
    return outputs if adapter is None else adapter.update(outputs[:-1], outputs[-1], precision)


def gather_column_adapter(
    adapter: LowRank, specs: LowRank, *, keep: str | tuple[str, ...], like: jax.Array
) -> tuple[jax.Array, LowRank]:
    """Inside shard_map, return (matrices a side by side, the adapter), gathered but for `keep`."""
    gather = partial(gather_factor, keep=keep, like=like)
    b = tuple(map(gather, adapter.b, specs.b))
    return gather(adapter.columns(), specs.a[0]), replace(adapter, b=b)


def gather_factor(
    factor: Kernel, spec: Any, *, keep: str | tuple[str, ...], like: jax.Array
) -> jax.Array:
    """Inside shard_map, gather a factor of an adapter, or a kernel, in the dtype of `like`.

    It stays split over the axes of `keep` that split it. Where it is whole over such an axis, and
    `like` is not, its gradient is summed over it in its own dtype.
    """
    used = {name for entry in values_spec(spec) for name in mesh_axes_of(entry)}
    kept = tuple(name for name in mesh_axes_of(keep) if name in used)
    return gather_kernel(factor, spec, keep=kept, dtype=like.dtype, like=like)


def row_parallel(
    x: jax.Array,
    kernels: Sequence[Kernel],
    out_spec: P,
    config: TensorParallelConfig,
    precision: Precision = None,
    adapter: LowRank | None = None,
) -> tuple[jax.Array, ...]:
    """Multiply `x` with `RowWise` kernels (F, D): `... L F`, F on tp -> `... L D` each.

    The outputs lie as `out_spec` says, with their rows, their features or no dim on tp; equations
    in `matmul_scatter`. Communication over tp: n - 1 blocks of each output per device, or one
    all-reduce if tp does not split the outputs; each kernel over (fsdp, sp).

    Raises: ValueError if the features of `x` are not on tp, or if `out_spec` lays the rows out
    differently over the other axes.
    """
    axis, spec = config.axis_name, jax.typeof(x).sharding.spec
    check_row_input(spec, config)
    rows = [mesh_axes_of(entry) for entry in spec[:-1]]
    wanted = [mesh_axes_of(without_axis(entry, axis)) for entry in (*out_spec, *[None] * x.ndim)]
    if wanted[: x.ndim - 1] != rows:
        raise ValueError(
            f"a row-parallel linear cannot turn rows of type {spec} into {out_spec}; only {axis} "
            "may differ, so reshard before or after it"
        )
    body = partial(row_block, dim=split_dim(out_spec, axis, rank=x.ndim))
    return _shard_map(body, x, kernels, RowWise, out_spec, config, precision, adapter)


def row_block(
    x: jax.Array,
    *kernels: Kernel,
    kernel_spec: P,
    dim: SplitDim | None,
    axis_name: str,
    overlap: Overlap,
    precision: Precision,
    adapter: LowRank | None = None,
    adapter_spec: Any = None,
) -> tuple[jax.Array, ...]:
    """Compute `row_parallel` of local blocks inside a shard_map over all mesh axes.

    `... L F/tp`, kernels `F/tp D/fsdp` -> `... L/tp D` or `... L D/tp` or `... L D` each.
    """
    gather = partial(gather_kernel, keep=axis_name, dtype=x.dtype, like=x)
    ring: Any = {"axis_name": axis_name, "overlap": overlap, "precision": precision}
    outputs = []
    for index, kernel in enumerate(kernels):
        w, own = gather(kernel, kernel_spec), None if adapter is None else adapter.of(index)
        a = None if own is None else gather(own.a[0], adapter_spec.a[0])
        if a is not None and dim == ROWS and lax.axis_size(axis_name) > 1:
            y, u = split_columns(matmul_scatter(x, w, dim=dim, more_columns=a, **ring), [w, a])
        else:
            if dim is None:
                y = lax.psum(plain_matmul(x, w, precision), axis_name)
            else:
                y = matmul_scatter(x, w, dim=dim, **ring)
            if a is not None:
                u = lax.psum(plain_matmul(x, a, precision), axis_name)
        if own is not None:
            y = add_row_update(y, u, own, adapter_spec, dim, axis_name, precision)
        outputs.append(y)
    return tuple(outputs)


def add_row_update(
    y: jax.Array,
    u: jax.Array,
    adapter: LowRank,
    specs: LowRank,
    dim: SplitDim | None,
    axis_name: str,
    precision: Precision,
) -> jax.Array:
    """Add scale * u @ b to a row-parallel result, where u = x @ a is summed over tp.

    y: `... L/tp D` or `... L D/tp` or `... L D`; u: the same rows, all columns.
    """
    u = checkpoint_name(u, SAVED_NAMES[0])
    if dim is not None:
        u = pcast_varying(u, (axis_name,))
    b = gather_factor(adapter.b[0], specs.b[0], keep=(), like=u)
    if dim == FEATURES:
        width = y.shape[-1]
        b = lax.dynamic_slice_in_dim(b, lax.axis_index(axis_name) * width, width, 1)
    return add_product(y, u, b, adapter.scale, precision)


def token_parallel(
    x: jax.Array,
    kernels: Sequence[Kernel],
    config: TensorParallelConfig,
    precision: Precision = None,
    adapter: LowRank | None = None,
) -> tuple[jax.Array, ...]:
    """Multiply `x` with `TokenWise` kernels (D, F): `... L D` -> `... L F` each, F not split.

    Every device multiplies the rows that it has:
      forward y = x W;  dgrad dx = dy W^T;  wgrad dW = sum over devices of x^T dy.
    Communication: none over tp, unless tp splits the features of `x`: then each device multiplies
    these with its rows of the kernel, and an all-reduce sums the outputs. Each kernel is gathered
    over (fsdp, sp) in the dtype of `x`.

    Raises: ValueError if another axis than tp splits the features of `x`.
    """
    axis, spec = config.axis_name, jax.typeof(x).sharding.spec
    check_features(spec, config)
    body = partial(token_block, dim=split_dim(spec, axis))
    out_spec = P(*spec[:-1], None)
    return _shard_map(body, x, kernels, TokenWise, out_spec, config, precision, adapter)


def token_block(
    x: jax.Array,
    *kernels: Kernel,
    kernel_spec: P,
    dim: SplitDim | None,
    axis_name: str,
    overlap: Overlap,
    precision: Precision,
    adapter: LowRank | None = None,
    adapter_spec: Any = None,
) -> tuple[jax.Array, ...]:
    """Compute `token_parallel` of local blocks inside a shard_map over all mesh axes.

    `... L/tp D` or `... L D/tp` or `... L D`, kernels `D/fsdp F` -> `... L/tp F` or `... L F` each.
    overlap: not used; there is nothing to overlap with.
    """
    whole = [gather_kernel(w, kernel_spec, keep=(), dtype=x.dtype, like=x) for w in kernels]
    if adapter is not None:
        whole.append(gather_factor(adapter.columns(), adapter_spec.a[0], keep=(), like=x))
    if dim == FEATURES:
        width = x.shape[-1]
        first = lax.axis_index(axis_name) * width
        whole = [lax.dynamic_slice_in_dim(w, first, width, 0) for w in whole]
    outputs = tuple(plain_matmul(x, w, precision) for w in whole)
    if dim == FEATURES:
        outputs = tuple(lax.psum(y, axis_name) for y in outputs)
    if adapter is None:
        return outputs
    *products, u = outputs
    gather = partial(gather_factor, keep=(), like=u)
    adapter = replace(adapter, b=tuple(map(gather, adapter.b, adapter_spec.b)))
    return adapter.update(products, u, precision)
