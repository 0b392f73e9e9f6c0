"""Column- and row-parallel linears, and linears that are not split.

A column-parallel linear splits its outputs over tp, a row-parallel linear its inputs. The
communication follows from two layouts: that of the input, which its array type carries, and the
requested output spec. Kernels are logical `(in, out)` arrays whose values do not depend on the mesh
or on the overlap method. Names are those of the published reference `easydel.layers.linear`; all of
them can be imported from here.
"""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallel.linear.config import (
    MatrixMultiplyMethod,
    TensorParallelConfig,
    get_matmul_output_sharding,
    get_output_partition_spec,
    get_sharding,
)
from parallel.linear.int8_kernel import Kernel, floats, frozen, with_scales
from parallel.linear.low_rank import adapter_of
from parallel.linear.quantized import Precision, QuantizedMatmul
from parallel.linear.sharded_matmul import column_parallel, row_parallel, token_parallel
from parallel.sharding.axes import ColumnWise, Replicated, RowWise, SRowWise, TokenWise
from parallel.sharding.mesh import mesh_context
from parallel.sharding.specs import without_axis

__all__ = [
    "ColumnParallelLinear",
    "Linear",
    "MatrixMultiplyMethod",
    "ParallelLinear",
    "RowParallelLinear",
    "TensorParallelConfig",
    "TokenParallelLinear",
    "get_matmul_output_sharding",
    "get_output_partition_spec",
    "get_sharding",
    "named_rngs",
]

Parallelism = Literal["none", "column", "row", "token"]
Initializer = Callable[..., jax.Array]
_LECUN_NORMAL = nnx.initializers.lecun_normal()
_KERNEL_AXES: dict[Parallelism, Any] = {
    "none": (None, None),
    "column": ColumnWise,
    "row": RowWise,
    "token": TokenWise,
}
_BIAS_AXES: dict[Parallelism, Any] = {
    "none": Replicated,
    "column": SRowWise,
    "row": Replicated,
    "token": Replicated,
}
_Method = TypeVar("_Method", bound=Callable[..., Any])


def named_rngs(rngs: nnx.Rngs, name: str) -> nnx.Rngs:
    """Return generators for the child `name` that depend only on the root seed and the path.

    So a parameter starts from the same numbers on every mesh and in every order of construction.
    """
    return nnx.Rngs(params=jax.random.fold_in(rngs.params.key[...], zlib.crc32(name.encode())))


def _on_config_mesh(method: _Method) -> _Method:
    """Run a method on the mesh of `parallel_config` if no mesh is set."""

    @functools.wraps(method)
    def run(self: "ParallelLinear", *args: Any, **kwargs: Any) -> Any:
        with mesh_context(self.mesh):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]  # wraps keeps the signature


class ParallelLinear(nnx.Module):
    """A linear layer `y = scale * (x @ kernel) + bias` with whole or sharded kernels.

    Kernels are logical (in, out) parameters, one per output, with equal values on every mesh. Works
    under `jax.set_mesh(mesh)` or with the mesh of `parallel_config` alone.

    Args:
        in_features: Width of the input.
        out_features: Width of the output. A sequence of widths, or a mapping from name to width,
            makes several outputs that share one gather of the input; the result is then a tuple or
            a dict.
        scale: Factor on the output before the bias: a number, or "fan_in" / "fan_out" for
            width ** -0.5.
        use_bias: Whether to add a bias.
        dtype: Dtype of the computation; None: that of the input. Kernels are cast to it before they
            are communicated.
        param_dtype: Dtype of the parameters.
        precision: Precision of the matmuls, or a `QuantizedMatmul`, which needs `parallel_config`.
        kernel_init: Initializer of each kernel. On a mesh it must also accept `out_sharding=`.
        bias_init: Initializer of each bias, likewise.
        parallel_config: None makes an ordinary linear. `matmul_method` gives this class a
            direction: ALL_GATHER computes as a `ColumnParallelLinear`, REDUCE_SCATTER as a
            `RowParallelLinear` whose sum is scattered onto features (or whole, if `reduce_output`).
        rngs: None starts from seed 0. Several outputs derive their streams from the root seed by
            name and leave `rngs` unchanged, so layers that must differ need generators of their own
            (`named_rngs`).

    Differences from the reference: there, several outputs share one kernel. The arguments features,
    gather_output and axis_name of its example, which it does not accept either, are here
    out_features, `reduce_scatter_output=False` and `axis_name` of the config.
    """

    direction: Parallelism = "none"
    kind: str = ""
    """Group of linears that it belongs to, as `TensorParallelConfig.for_kind` names it."""
    distributed_matmul = None
    """Always None, here as in the reference."""

    def __init__(  # noqa: PLR0913  # the reference's signature
        self,
        in_features: int,
        out_features: int | Sequence[int] | Mapping[str, int],
        *,
        scale: float | Literal["fan_in", "fan_out"] = 1.0,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        precision: Precision = None,
        kernel_init: Initializer = _LECUN_NORMAL,
        bias_init: Initializer = nnx.initializers.zeros,
        parallel_config: TensorParallelConfig | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        if isinstance(scale, str) and scale not in ("fan_in", "fan_out"):
            raise ValueError(f"scale={scale!r} is unknown; give a number, fan_in or fan_out")
        self.in_features = int(in_features)
        self.output_names: tuple[str, ...] | None = None
        if isinstance(out_features, Mapping):
            self.output_names = tuple(out_features)
            out_features = tuple(out_features.values())
        self.out_features: int | tuple[int, ...] = (
            int(out_features) if isinstance(out_features, int | np.integer) else tuple(out_features)
        )
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.kernel_init = kernel_init
        self.bias_init = bias_init
        self.parallel_config = parallel_config
        self.scale = scale
        self.direction = self._direction_for(parallel_config)
        self._init_parameters(nnx.Rngs(0) if rngs is None else rngs)

    @property
    def float_precision(self) -> jax.lax.PrecisionLike:
        """The precision of matmuls that XLA distributes. Raises: ValueError if it is quantized."""
        if isinstance(self.precision, QuantizedMatmul):
            raise ValueError(
                "a quantized matmul needs a linear with a parallel_config and a mesh, and not its "
                "native_forward; give another precision"
            )
        return self.precision

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of `parallel_config`, if there is one."""
        return None if self.parallel_config is None else self.parallel_config.mesh

    def _direction_for(self, config: TensorParallelConfig | None) -> Parallelism:
        """Return the direction that the config's matmul_method asks for, or that of the class."""
        if config is None or config.matmul_method is None:
            return self.direction
        gathers = config.matmul_method == MatrixMultiplyMethod.ALL_GATHER
        asked: Parallelism = "column" if gathers else "row"
        if self.direction not in ("none", asked):
            raise ValueError(
                f"a {self.direction}-parallel linear cannot use matmul_method "
                f"{config.matmul_method}; leave it out, or use ParallelLinear"
            )
        return asked

    @_on_config_mesh
    def _init_parameters(self, rngs: nnx.Rngs) -> None:
        """Create `kernel` and `bias`: one parameter, or an nnx.Dict of one per output."""
        kernels, biases = {}, {}
        for name, width in self._widths().items():
            stream = named_rngs(rngs, name) if name else rngs
            init = partial(self.kernel_init, stream.params())
            shape = (self.in_features, width)
            kernels[name] = self._parameter(shape, _KERNEL_AXES[self.direction], init)
            if self.use_bias:
                init = partial(self.bias_init, stream.params())
                biases[name] = self._parameter((width,), _BIAS_AXES[self.direction], init)
        single = set(kernels) == {""}
        self.kernel: Any = kernels[""] if single else nnx.Dict(kernels)
        self.bias: Any = None if not biases else biases[""] if single else nnx.Dict(biases)

    def _widths(self) -> dict[str, int]:
        """Return output names and widths in the caller's order, which nnx.Dict does not keep."""
        if isinstance(self.out_features, int):
            return {"": self.out_features}
        names = self.output_names or tuple(str(i) for i in range(len(self.out_features)))
        return dict(zip(names, self.out_features, strict=True))

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the outputs in order; a single output is named ""."""
        return tuple(self._widths())

    def _parameter(self, shape: tuple[int, ...], axes: Any, init: Initializer) -> nnx.Param:
        if self.parallel_config is None or self.parallel_config.mesh is None:
            return nnx.Param(init(shape, self.param_dtype), semantic_axes=axes)
        name = f"{type(self).__name__} {'kernel' if len(shape) == 2 else 'bias'}"
        spec = self.parallel_config.manager.resolve(axes, shape=shape, name=name)
        value = init(shape, self.param_dtype, out_sharding=spec)
        return nnx.Param(value, out_sharding=spec, semantic_axes=axes)

    def arrays_of(self, parameter: Any) -> list[jax.Array]:
        """Return the arrays of `kernel` or `bias`, one per output; empty for no bias."""
        if parameter is None:
            return []
        if isinstance(parameter, nnx.Dict):
            return [parameter[name][...] for name in self._widths()]
        return [parameter[...]]

    def kernels(self) -> list[Kernel]:
        """Return the kernels, one per output; without a gradient if the linear has adapters."""
        kernels = with_scales(self, self.arrays_of(self.kernel))
        return kernels if adapter_of(self) is None else [frozen(w) for w in kernels]

    def merged_kernels(self) -> list[jax.Array]:
        """Return the kernels in floats, each with the update of its adapter if it has one."""
        kernels, adapter = [floats(w) for w in self.kernels()], adapter_of(self)
        return kernels if adapter is None else adapter.merged(kernels)

    def scale_factor(self) -> float:
        """Return `scale` as a number."""
        if not isinstance(self.scale, str):
            return self.scale
        width = self.in_features if self.scale == "fan_in" else sum(self._widths().values())
        return width**-0.5

    def _finish(self, outputs: Sequence[jax.Array]) -> Any:
        biases = self.arrays_of(self.bias)
        return self.pack(scale_and_add(outputs, biases, self.scale_factor()))

    def pack(self, outputs: Sequence[jax.Array]) -> Any:
        """Return one array, a tuple or a dict of outputs, as `out_features` was."""
        if self.output_names is not None:
            return dict(zip(self.output_names, outputs, strict=True))
        return outputs[0] if isinstance(self.out_features, int) else tuple(outputs)

    def cast_input(self, inputs: jax.Array) -> jax.Array:
        """Cast to the dtype of the computation; integers become the parameters' dtype.

        Raises: ValueError for inputs of another width.
        """
        if inputs.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{type(self).__name__}: inputs {inputs.shape} do not end in in_features="
                f"{self.in_features}; give `... {self.in_features}`"
            )
        return inputs.astype(self.compute_dtype(inputs.dtype))

    def compute_dtype(self, dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
        """Return the dtype in which inputs of this dtype are multiplied."""
        return self.dtype or (dtype if jnp.issubdtype(dtype, jnp.inexact) else self.param_dtype)

    @_on_config_mesh
    def native_forward(self, inputs: jax.Array, w: jax.Array | None = None) -> Any:
        """Compute `... in` -> `... out` by plain matmuls whose collectives the compiler chooses.

        The test reference of the overlapped forms, and the only form without a parallel_config.
        Features of a row-parallel input are on tp. Column-parallel outputs stay split over tp with
        `reduce_scatter_output`, rows of a token-parallel input as they are; otherwise outputs are
        whole.

        w: An array (in, out) to use instead of the kernel, for a tied head.
        """
        if w is not None and not isinstance(self.out_features, int):
            raise ValueError(
                f"w replaces a single kernel, but this linear has {len(self._widths())}; leave it "
                "out"
            )
        x = self.cast_input(inputs)
        dtype, kernels = x.dtype, self.merged_kernels() if w is None else [w]
        config = self.parallel_config
        if config is None or config.mesh is None:
            return self._finish(
                [jnp.matmul(x, k.astype(dtype), precision=self.float_precision) for k in kernels]
            )
        axis, spec = config.axis_name, jax.typeof(x).sharding.spec
        rows = list(spec[:-1])
        if self.direction != "token":
            rows = [without_axis(entry, axis) for entry in rows]
        in_axis, out_axis = (axis if self.direction == side else None for side in ("row", "column"))
        x = jax.sharding.reshard(x, P(*rows, in_axis))
        kernels = [jax.sharding.reshard(k.astype(dtype), P(in_axis, out_axis)) for k in kernels]
        out_spec = P(*rows, out_axis)
        outputs = [
            jnp.einsum("...k,kn->...n", x, k, precision=self.float_precision, out_sharding=out_spec)
            for k in kernels
        ]
        return self._gather_outputs(self._finish(outputs))

    def _gather_outputs(self, outputs: Any) -> Any:
        """Gather column-parallel outputs over tp, unless the config leaves them split."""
        config = self.parallel_config
        if self.direction != "column" or config is None or config.reduce_scatter_output:
            return outputs

        def gather(y: jax.Array) -> jax.Array:
            return jax.sharding.reshard(y, P(*jax.typeof(y).sharding.spec[:-1], None))

        if isinstance(outputs, dict):  # jax.tree.map would sort the names
            return {name: gather(y) for name, y in outputs.items()}
        return jax.tree.map(gather, outputs)

    @_on_config_mesh
    def __call__(self, inputs: jax.Array, out_spec: P | None = None) -> Any:
        """Compute `... in` -> `... out`.

        out_spec: Layout of a row-parallel output; None: whole over tp.
        """
        config = self.parallel_config
        if self.direction != "row" and out_spec is not None:
            raise ValueError(
                "out_spec is for row-parallel linears; set reduce_scatter_output in the "
                "TensorParallelConfig of a column-parallel one"
            )
        if self.direction == "none" or config is None or config.mesh is None:
            return self.native_forward(inputs)
        if self.direction == "column":
            return self._gather_outputs(self.sharded_forward(inputs))
        x = self.cast_input(inputs)
        if self.direction == "token":
            adapter = adapter_of(self)
            return self._finish(token_parallel(x, self.kernels(), config, self.precision, adapter))
        if out_spec is None:
            scattered = config.matmul_method is not None and not config.reduce_output
            rows = jax.typeof(x).sharding.spec[:-1]
            out_spec = P(*rows, config.axis_name if scattered else None)
        kernels, adapter = self.kernels(), adapter_of(self)
        return self._finish(row_parallel(x, kernels, out_spec, config, self.precision, adapter))

    @_on_config_mesh
    def sharded_forward(self, inputs: jax.Array) -> Any:
        """Compute a column-parallel `... in` -> `... out` whose features stay split over tp."""
        config, adapter = self.parallel_config, adapter_of(self)
        if config is None or config.mesh is None:
            return self.native_forward(inputs)
        x, kernels = self.cast_input(inputs), self.kernels()
        return self._finish(column_parallel(x, kernels, config, self.precision, adapter))


Linear = ParallelLinear


class ColumnParallelLinear(ParallelLinear):
    """A linear that splits its outputs over tp: `... L D` -> `... L F` with F on tp.

    The input may have D on tp (features are gathered), L on tp (rows are gathered) or neither (no
    communication over tp). Without `reduce_scatter_output` the outputs are gathered at the end.
    Kernels have the layout `ColumnWise`: their in dim is gathered over (fsdp, sp) in the compute
    dtype. The bias is split like its columns. With x whole, and W_r the columns of rank r:
      forward y_r = x W_r;  dgrad dx = sum over r of dy_r W_r^T;  wgrad dW_r = x^T dy_r.
    """

    direction = "column"


class RowParallelLinear(ParallelLinear):
    """A linear that splits its inputs over tp: `... L F` with F on tp -> `... L D`.

    Partial products are summed over tp: reduce-scattered onto features or rows if `out_spec` has
    them on tp, all-reduced otherwise. The bias is added once, after the sum. With W_r the rows of
    rank r:
      forward y = sum over r of x_r W_r;  dgrad dx_r = dy W_r^T;  wgrad dW_r = x_r^T dy.
    """

    direction = "row"


class TokenParallelLinear(ParallelLinear):
    """A linear that tp does not split: `... L D` -> `... L F`, for narrow outputs. Ours.

    Every device of tp multiplies the rows that it has; see `token_parallel`. With L on tp nothing
    is computed twice, and only the narrow output has to be gathered afterwards.
    """

    direction = "token"


def scale_and_add(
    outputs: Sequence[jax.Array], biases: Sequence[jax.Array], factor: float
) -> list[jax.Array]:
    """Return factor * y + bias for each y; an empty `biases` adds none.

    Biases are rounded to the dtype of y, but added in float32 at least: the gradient of a bias then
    sums rows in float32.
    """
    if factor != 1.0:
        outputs = [y * jnp.asarray(factor, y.dtype) for y in outputs]
    if biases:
        outputs = [_add_bias(y, b) for y, b in zip(outputs, biases, strict=True)]
    return list(outputs)


def _add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    wide = jnp.promote_types(y.dtype, jnp.float32)
    return (y.astype(wide) + bias.astype(y.dtype).astype(wide)).astype(y.dtype)
