"""Products of typed arrays with split kernels: the shard_map islands beneath the linears.

Here the layouts that `layout.py` reads off the types meet the collective matmuls on local blocks:
activations come and go as their types and the target spec say, kernels are gathered over the axes
that store them (fsdp, sp) and stay split over tp. It owns no parameters and refuses to choose a
layout.

Letters: L rows, D in features, F out features, local along the axes that their specs name.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.collective_matmul import (
    Dim,
    Overlap,
    gather_matmul,
    gather_matmul_scatter,
    matmul_scatter,
)
from parallel.linear.layout import TensorParallelConfig, layout_of, mesh_axes_of, without_axis
from parallel.linear.ring import all_gather, vary
from parallel.sharding.axes import ColumnWise, RowWise
from parallel.sharding.partition import Residual

_DIMS: dict[Residual, Dim] = {"sequence": -2, "hidden": -1}


def gather_kernel(
    kernel: jax.Array,
    spec: P,
    *,
    keep: str | tuple[str, ...],
    dtype: jax.typing.DTypeLike | None,
    like: jax.Array,
) -> jax.Array:
    """Inside shard_map: a parameter whole on all axes but those to `keep`, cast before it travels.

    like: the activations that it will meet. Communication: one all-gather in `dtype` over the axes
    that shard it; backwards one reduce-scatter in `dtype`, then, of this device's shard alone and
    in the parameter's own dtype, an all-sum over the axes that repeat it (dp and ep).
    """
    kept = mesh_axes_of(keep)
    sharding = {name for entry in spec for name in mesh_axes_of(entry)}
    repeating = jax.typeof(like).manual_axis_type.varying - sharding - {*kept}
    kernel = vary(kernel, tuple(sorted(repeating)))
    kernel = kernel if dtype is None else kernel.astype(dtype)
    for dim, entry in enumerate(spec):
        names = without_axis(entry, *kept)
        if names is not None:
            kernel = all_gather(kernel, names, dim)
    return kernel


def as_stored(
    kernels: Sequence[jax.Array],
    spec: P,
    x: jax.Array,
    keep: str,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[P, list[jax.Array]]:
    """Kernels as an island takes them: split over `keep` and what x is split over too.

    Over the other axes they are gathered here, in `dtype` (None: x's): what is equal there sees the
    same kernel and has equal gradients, which must not be summed.
    """
    used = {keep, *(n for entry in jax.typeof(x).sharding.spec for n in mesh_axes_of(entry))}
    if used.issuperset(name for entry in spec for name in mesh_axes_of(entry)):
        return spec, list(kernels)
    kept = P(*(tuple(n for n in mesh_axes_of(entry) if n in used) or None for entry in spec))
    return kept, [jax.sharding.reshard(kernel.astype(dtype or x.dtype), kept) for kernel in kernels]


def _island(
    body: Callable[..., tuple[jax.Array, ...]],
    x: jax.Array,
    kernels: Sequence[jax.Array],
    axes: type,
    out_spec: P,
    config: TensorParallelConfig,
) -> tuple[jax.Array, ...]:
    """body on the blocks of x and of kernels that lie as `axes` say, one output per kernel."""
    manager, axis = config.manager, config.axis_name
    kernel_spec, kernels = as_stored(kernels, manager.resolve(axes), x, axis)
    island = jax.shard_map(
        partial(body, kernel_spec=kernel_spec, axis_name=axis, overlap=config.overlap),
        mesh=manager.mesh,
        in_specs=(jax.typeof(x).sharding.spec, *(kernel_spec for _ in kernels)),
        out_specs=tuple(out_spec for _ in kernels),
    )
    return island(x, *kernels)


def _check_features(spec: P, config: TensorParallelConfig) -> None:
    sizes = config.manager.mesh.shape
    for name in mesh_axes_of(spec[-1]):
        if name != config.axis_name and sizes[name] > 1:
            raise ValueError(
                f"features of type {spec} are split over {name}; reshard the input so that "
                f"nothing but {config.axis_name} splits them"
            )


def column_parallel(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    config: TensorParallelConfig,
    precision: lax.PrecisionLike = None,
) -> tuple[jax.Array, ...]:
    """`... L D` in any layout, `ColumnWise` kernels (D, F) -> `... L F` each, F on tp.

    Communication: n - 1 blocks of x per device over tp unless x is replicated there, and each
    kernel over (fsdp, sp) in x's dtype; equations in `gather_matmul`.
    Raises: ValueError if tp splits x before its rows, or outside of another axis, or if another
    axis splits its features.
    """
    axis, spec = config.axis_name, jax.typeof(x).sharding.spec
    _check_features(spec, config)
    body = partial(_column_body, layout=layout_of(spec, axis), precision=precision)
    out_spec = P(*(without_axis(entry, axis) for entry in spec[:-1]), axis)
    return _island(body, x, kernels, ColumnWise, out_spec, config)


def _column_body(
    x: jax.Array,
    *kernels: jax.Array,
    kernel_spec: P,
    layout: Residual,
    axis_name: str,
    overlap: Overlap,
    precision: lax.PrecisionLike,
) -> tuple[jax.Array, ...]:
    """`... L/tp D` or `... L D/tp` or `... L D`, kernels `D/fsdp F/tp` -> `... L F/tp` each."""
    whole = [gather_kernel(w, kernel_spec, keep=axis_name, dtype=x.dtype, like=x) for w in kernels]
    if layout == "replicated":
        return tuple(jnp.matmul(x, w, precision=precision) for w in whole)
    return gather_matmul(
        x, whole, axis_name=axis_name, dim=_DIMS[layout], overlap=overlap, precision=precision
    )


def row_parallel(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    out_spec: P,
    config: TensorParallelConfig,
    precision: lax.PrecisionLike = None,
) -> tuple[jax.Array, ...]:
    """`... L F` with F on tp, `RowWise` kernels (F, D) -> `... L D` each, as `out_spec` says.

    The kernels' local rows meet x's local features; one psum, or a reduce-scatter of n - 1 blocks
    of the result per device, adds the products up; equations in `matmul_scatter`.
    Raises: ValueError if the features of x are not on tp, or `out_spec` splits its rows differently
    over the other axes.
    """
    axis, spec = config.axis_name, jax.typeof(x).sharding.spec
    if layout_of(spec, axis) != "hidden":
        raise ValueError(
            f"a row-parallel linear needs its features on {axis}, got {spec}; "
            "reshard the input, or use a column-parallel linear"
        )
    _check_features(spec, config)
    rows = [mesh_axes_of(entry) for entry in spec[:-1]]
    wanted = [mesh_axes_of(without_axis(entry, axis)) for entry in (*out_spec, *[None] * x.ndim)]
    if wanted[: x.ndim - 1] != rows:
        raise ValueError(
            f"a row-parallel linear cannot turn rows of type {spec} into {out_spec}; only {axis} "
            "may differ, so reshard before or after it"
        )
    body = partial(_row_body, layout=layout_of(out_spec, axis, rank=x.ndim), precision=precision)
    return _island(body, x, kernels, RowWise, out_spec, config)


def _row_body(
    x: jax.Array,
    *kernels: jax.Array,
    kernel_spec: P,
    layout: Residual,
    axis_name: str,
    overlap: Overlap,
    precision: lax.PrecisionLike,
) -> tuple[jax.Array, ...]:
    """`... L F/tp`, kernels `F/tp D/fsdp` -> `... L/tp D` or `... L D/tp` or `... L D` each."""
    outputs = []
    for kernel in kernels:
        w = gather_kernel(kernel, kernel_spec, keep=axis_name, dtype=x.dtype, like=x)
        if layout == "replicated":
            y = lax.psum(jnp.matmul(x, w, precision=precision), axis_name)
        else:
            dim = _DIMS[layout]
            y = matmul_scatter(
                x, w, axis_name=axis_name, dim=dim, overlap=overlap, precision=precision
            )
        outputs.append(y)
    return tuple(outputs)


def column_row_parallel(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    extras: Sequence[jax.Array],
    kernel: jax.Array,
    *,
    function: Callable[..., jax.Array],
    config: TensorParallelConfig,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """`... L/tp D` -> `... L/tp D` through function(x @ kernels, extras) @ kernel, as one ring.

    kernels: `ColumnWise` (D, F); extras: vectors (F,) on tp; kernel: `RowWise` (F, D). function,
    communication and equations: `gather_matmul_scatter`.
    """
    manager, axis = config.manager, config.axis_name
    spec = jax.typeof(x).sharding.spec
    _check_features(spec, config)
    column_spec, kernels = as_stored(kernels, manager.resolve(ColumnWise), x, axis)
    row_spec, (kernel,) = as_stored([kernel], manager.resolve(RowWise), x, axis)
    body = partial(
        _column_row_body,
        column_spec=column_spec,
        row_spec=row_spec,
        function=function,
        axis_name=axis,
        overlap=config.overlap,
        precision=precision,
    )
    island = jax.shard_map(
        body,
        mesh=manager.mesh,
        in_specs=(spec, [column_spec for _ in kernels], [P(axis) for _ in extras], row_spec),
        out_specs=spec,
    )
    return island(x, list(kernels), list(extras), kernel)


def _column_row_body(
    x: jax.Array,
    kernels: list[jax.Array],
    extras: list[jax.Array],
    kernel: jax.Array,
    *,
    column_spec: P,
    row_spec: P,
    function: Callable[..., jax.Array],
    axis_name: str,
    overlap: Overlap,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """`... L/tp D`, kernels `D/fsdp F/tp`, extras `F/tp`, kernel `F/tp D/fsdp` -> `... L/tp D`."""
    gather = partial(gather_kernel, keep=axis_name, dtype=x.dtype, like=x)
    return gather_matmul_scatter(
        x,
        [gather(w, column_spec) for w in kernels],
        [gather(extra, P(axis_name)) for extra in extras],
        gather(kernel, row_spec),
        function=function,
        axis_name=axis_name,
        overlap=overlap,
        precision=precision,
    )
