"""Linears whose kernels are split over devices: every projection of the model is one of them.

A column-parallel linear splits its outputs over tp, a row-parallel one its inputs. Neither is told
what to communicate: it reads the layout of its input from the input's type and the layout of its
output from the target spec (table in the README). Kernels are logical `(in, out)` arrays: what a
kernel holds never depends on the mesh or on the overlap method.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallel.axes import ColumnWise, Replicated, RowWise, SRowWise
from parallel.partition import PartitionAxis, PartitionManager, Residual
from parallel.ring import Overlap, all_gather, gather_matmul, matmul_scatter, vary

Initializer = Callable[..., jax.Array]
_LECUN_NORMAL = nnx.initializers.lecun_normal()


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig:
    """Where and how linears are split.

    mesh: explicit-sharding mesh with all five axes.
    axis_name: the mesh axis that splits heads, MLP width and vocabulary.
    partition_axis: the rules by which parameters and activations are laid out.
    overlap: how a linear hides its communication; see parallel/ring.py.
    """

    mesh: Mesh
    axis_name: str = "tp"
    partition_axis: PartitionAxis = field(default_factory=PartitionAxis)
    overlap: Overlap = "none"

    def __post_init__(self) -> None:
        if self.axis_name not in self.mesh.axis_names:
            raise ValueError(
                f"axis_name {self.axis_name!r} is not an axis of the mesh; use one of "
                f"{', '.join(self.mesh.axis_names)}"
            )

    @property
    def manager(self) -> PartitionManager:
        """Resolves semantic axes on this mesh."""
        return PartitionManager(self.partition_axis, self.mesh)


def named_rngs(rngs: nnx.Rngs, name: str) -> nnx.Rngs:
    """Generators for the child `name`: a function of the root seed and the path, of nothing else.

    Hence a parameter starts from the same numbers on every mesh and in every order of building.
    """
    return nnx.Rngs(params=jax.random.fold_in(rngs.params.key[...], zlib.crc32(name.encode())))


def layout_of(spec: P, axis_name: str) -> Residual:
    """How activations `... L D` with this spec lie on the tensor-parallel axis."""

    def carries(entry: Any) -> bool:
        return axis_name in _names(entry)

    if carries(spec[-1]):
        return "hidden"
    if len(spec) > 1 and carries(spec[-2]):
        return "sequence"
    if any(carries(entry) for entry in spec):
        raise ValueError(f"activations of type {spec} are split over {axis_name} before dim -2")
    return "replicated"


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def without_axis(entry: Any, axis_name: str) -> Any:
    """One entry of a PartitionSpec with one mesh axis taken out."""
    kept = tuple(name for name in _names(entry) if name != axis_name)
    return kept[0] if len(kept) == 1 else kept or None


def gather_kernel(
    kernel: jax.Array,
    spec: P,
    *,
    keep: str,
    dtype: jax.typing.DTypeLike | None,
    like: jax.Array,
) -> jax.Array:
    """Inside shard_map: a parameter whole on all axes but `keep`, cast before it travels.

    like: the activations that it will meet. Communication: one all-gather in `dtype` over the axes
    that shard it; backwards one reduce-scatter in `dtype`, then, of this device's shard alone and
    in the parameter's own dtype, an all-sum over the axes that repeat it (dp and ep).
    """
    sharding = {name for entry in spec for name in _names(entry)}
    repeating = jax.typeof(like).manual_axis_type.varying - sharding - {keep}
    kernel = vary(kernel, tuple(sorted(repeating)))
    kernel = kernel if dtype is None else kernel.astype(dtype)
    for dim, entry in enumerate(spec):
        names = without_axis(entry, keep)
        if names is not None:
            kernel = all_gather(kernel, names, dim)
    return kernel


def column_parallel(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    config: TensorParallelConfig,
    precision: lax.PrecisionLike = None,
) -> tuple[jax.Array, ...]:
    """`... L D` in any layout, `ColumnWise` kernels (D, F) -> `... L F` each, F on tp."""
    spec = jax.typeof(x).sharding.spec
    kernel_spec = config.manager.resolve(ColumnWise)
    length = [without_axis(entry, config.axis_name) for entry in spec[:-1]]
    body = partial(
        _column_body,
        kernel_spec=kernel_spec,
        layout=layout_of(spec, config.axis_name),
        axis_name=config.axis_name,
        overlap=config.overlap,
        precision=precision,
    )
    island = jax.shard_map(
        body,
        mesh=config.mesh,
        in_specs=(spec, *(kernel_spec for _ in kernels)),
        out_specs=tuple(P(*length, config.axis_name) for _ in kernels),
    )
    return island(x, *kernels)


class ParallelLinear(nnx.Module):
    """`y = scale * (x @ kernel) + bias`, on whole or split kernels.

    in_features, out_features: widths; several outputs, given as a sequence or as a mapping from
        name to width, share one gather of the input and come back as a tuple or a dict.
    scale: a float, or "fan_in" / "fan_out" for width ** -0.5.
    dtype: of the computation; None: the input's. Kernels are cast to it before they travel.
    parallel_config: None makes this an ordinary linear.
    Kernels are logical (in, out) parameters, one per output, equal on every mesh.
    """

    direction: Literal["none", "column", "row"] = "none"

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int] | Mapping[str, int],
        *,
        scale: float | Literal["fan_in", "fan_out"] = 1.0,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = _LECUN_NORMAL,
        bias_init: Initializer = nnx.initializers.zeros,
        parallel_config: TensorParallelConfig | None = None,
        rngs: nnx.Rngs,
    ):
        self.in_features = in_features
        self.output_names = tuple(out_features) if isinstance(out_features, Mapping) else None
        if isinstance(out_features, Mapping):
            out_features = tuple(out_features.values())
        self.out_features = out_features if isinstance(out_features, int) else tuple(out_features)
        self.use_bias = use_bias
        self.dtype = dtype
        self.precision = precision
        self.parallel_config = parallel_config
        self.scale = scale
        kernel_axes = {"none": [None, None], "column": ColumnWise, "row": RowWise}[self.direction]
        bias_axes = SRowWise if self.direction == "column" else Replicated
        kernels, biases = {}, {}
        for name, width in self._widths().items():
            stream = named_rngs(rngs, name) if name else rngs
            kernels[name] = self._parameter(
                (in_features, width),
                kernel_axes,
                param_dtype,
                partial(kernel_init, stream.params()),
            )
            if use_bias:
                biases[name] = self._parameter(
                    (width,), bias_axes, param_dtype, partial(bias_init, stream.params())
                )
        single = set(kernels) == {""}
        self.kernel: Any = kernels[""] if single else nnx.Dict(kernels)
        self.bias: Any = None if not use_bias else biases[""] if single else nnx.Dict(biases)

    def _widths(self) -> dict[str, int]:
        """Output name to width, in the caller's order (nnx.Dict does not keep it)."""
        if isinstance(self.out_features, int):
            return {"": self.out_features}
        names = self.output_names or tuple(str(i) for i in range(len(self.out_features)))
        return dict(zip(names, self.out_features, strict=True))

    def _parameter(
        self, shape: tuple[int, ...], axes: Any, dtype: jax.typing.DTypeLike, init: Initializer
    ) -> nnx.Param:
        if self.parallel_config is None:
            return nnx.Param(init(shape, dtype))
        name = f"{type(self).__name__} {'kernel' if len(shape) == 2 else 'bias'}"
        spec = self.parallel_config.manager.resolve(axes, shape=shape, name=name)
        return nnx.Param(init(shape, dtype, out_sharding=spec), out_sharding=spec)

    def _each(self, parameter: Any) -> list[jax.Array]:
        if isinstance(parameter, nnx.Dict):
            return [parameter[name][...] for name in self._widths()]
        return [parameter[...]]

    def _finish(self, outputs: Sequence[jax.Array]) -> Any:
        """Scale and bias, then the shape in which out_features was given."""
        factor = self.scale
        if isinstance(factor, str):
            width = self.in_features if factor == "fan_in" else sum(self._widths().values())
            factor = width**-0.5
        if factor != 1.0:
            outputs = [y * jnp.asarray(factor, y.dtype) for y in outputs]
        if self.bias is not None:
            biases = self._each(self.bias)
            outputs = [y + b.astype(y.dtype) for y, b in zip(outputs, biases, strict=True)]
        if self.output_names is not None:
            return dict(zip(self.output_names, outputs, strict=True))
        return outputs[0] if isinstance(self.out_features, int) else tuple(outputs)

    def native_forward(self, inputs: jax.Array, w: jax.Array | None = None) -> Any:
        """`... in` -> `... out` by a plain einsum; `w` replaces the kernel (tied heads)."""
        dtype = self.dtype or inputs.dtype
        kernels = self._each(self.kernel) if w is None else [w]
        x = inputs.astype(dtype)
        return self._finish(
            [jnp.matmul(x, k.astype(dtype), precision=self.precision) for k in kernels]
        )

    def __call__(self, inputs: jax.Array) -> Any:
        return self.native_forward(inputs)


Linear = ParallelLinear


class ColumnParallelLinear(ParallelLinear):
    """A linear with its outputs split over tp: `... L D` -> `... L F` with F on tp.

    Input by type: `hidden` (D on tp: features are gathered), `sequence` (L on tp: rows are
    gathered) or `replicated` (no communication). Kernels lie `ColumnWise`: their in dim is gathered
    over (fsdp, sp) in the compute dtype. With x whole, and rank r owning columns r:
      forward y_r = x W_r;  dgrad dx = sum over r of dy_r W_r^T;  wgrad dW_r = x^T dy_r.
    """

    direction = "column"

    def __call__(self, inputs: jax.Array) -> Any:
        if self.parallel_config is None:
            return self.native_forward(inputs)
        x = inputs.astype(self.dtype or inputs.dtype)
        kernels = self._each(self.kernel)
        return self._finish(column_parallel(x, kernels, self.parallel_config, self.precision))


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
    dim: Literal[-2, -1] = -2 if layout == "sequence" else -1
    return gather_matmul(
        x, whole, axis_name=axis_name, dim=dim, overlap=overlap, precision=precision
    )


class RowParallelLinear(ParallelLinear):
    """A linear with its inputs split over tp: `... L F` with F on tp -> `... L D`.

    The partial products are summed over tp and laid out as `out_spec` says: `hidden`
    (reduce-scatter onto features), `sequence` (reduce-scatter onto rows) or `replicated`
    (all-reduce). The bias is added once, after the sum. With rank r owning rows r:
      forward y = sum over r of x_r W_r;  dgrad dx_r = dy W_r^T;  wgrad dW_r = x_r^T dy.
    """

    direction = "row"

    def __call__(self, inputs: jax.Array, out_spec: P | None = None) -> Any:
        if self.parallel_config is None:
            return self.native_forward(inputs)
        config, x = self.parallel_config, inputs.astype(self.dtype or inputs.dtype)
        spec = jax.typeof(x).sharding.spec
        if layout_of(spec, config.axis_name) != "hidden":
            raise ValueError(
                f"a row-parallel linear needs its features on {config.axis_name}, got {spec}"
            )
        if out_spec is None:
            out_spec = P(*spec[:-1], None)
        kernel_spec = config.manager.resolve(RowWise)
        body = partial(
            _row_body,
            kernel_spec=kernel_spec,
            layout=layout_of(out_spec, config.axis_name),
            axis_name=config.axis_name,
            overlap=config.overlap,
            precision=self.precision,
        )
        kernels = self._each(self.kernel)
        island = jax.shard_map(
            body,
            mesh=config.mesh,
            in_specs=(spec, *(kernel_spec for _ in kernels)),
            out_specs=tuple(out_spec for _ in kernels),
        )
        return self._finish(island(x, *kernels))


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
            dim: Literal[-2, -1] = -2 if layout == "sequence" else -1
            y = matmul_scatter(
                x, w, axis_name=axis_name, dim=dim, overlap=overlap, precision=precision
            )
        outputs.append(y)
    return tuple(outputs)
