"""Linears whose kernels are split over devices: every projection of the model is one of them.

A column-parallel linear splits its outputs over tp, a row-parallel one its inputs. Neither is told
what to communicate: it reads the layout of its input from the input's type and the layout of its
output from the target spec (table in the README). Kernels are logical `(in, out)` arrays: what a
kernel holds never depends on the mesh or on the overlap method. The names are those of the
published reference `easydel.layers.linear`, all of which can be imported from here.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.layout import (
    MatrixMultiplyMethod,
    TensorParallelConfig,
    get_matmul_output_sharding,
    get_output_partition_spec,
    get_sharding,
    layout_of,
    without_axis,
)
from parallel.linear.projection import column_parallel, column_row_parallel, row_parallel
from parallel.sharding.axes import ColumnWise, Replicated, RowWise, SRowWise

__all__ = [
    "ColumnParallelLinear",
    "Linear",
    "MatrixMultiplyMethod",
    "ParallelLinear",
    "RowParallelLinear",
    "TensorParallelConfig",
    "chain",
    "get_matmul_output_sharding",
    "get_output_partition_spec",
    "get_sharding",
    "named_rngs",
]

Parallelism = Literal["none", "column", "row"]
Initializer = Callable[..., jax.Array]
_LECUN_NORMAL = nnx.initializers.lecun_normal()


def named_rngs(rngs: nnx.Rngs, name: str) -> nnx.Rngs:
    """Generators for the child `name`: a function of the root seed and the path, of nothing else.

    Hence a parameter starts from the same numbers on every mesh and in every order of building.
    """
    return nnx.Rngs(params=jax.random.fold_in(rngs.params.key[...], zlib.crc32(name.encode())))


class ParallelLinear(nnx.Module):
    """`y = scale * (x @ kernel) + bias`, on whole or split kernels.

    in_features, out_features: widths; several outputs, given as a sequence or as a mapping from
        name to width, share one gather of the input and come back as a tuple or a dict.
    scale: a float, or "fan_in" / "fan_out" for width ** -0.5; multiplies the output, not the bias.
    dtype: of the computation; None: the input's. Kernels are cast to it before they travel.
    parallel_config: None makes this an ordinary linear. Its `matmul_method` gives this class a
        direction: ALL_GATHER computes as a `ColumnParallelLinear`, REDUCE_SCATTER as a
        `RowParallelLinear` whose sum is scattered onto features (whole with `reduce_output`).
    rngs: None starts from seed 0. Several outputs draw by their names from its root, which stays as
        it was: layers that shall differ need generators of their own (`named_rngs`).
    kernel_init: also takes `out_sharding=` if there is a mesh, which has explicit axes.
    Kernels are logical (in, out) parameters, one per output, equal on every mesh. Differences from
    the reference: there, several outputs share one kernel as wide as all; its example's arguments
    features, gather_output and axis_name, which it does not accept either, are out_features,
    `reduce_scatter_output=False` and `axis_name` of the config. Its attribute `distributed_matmul`
    is always None there and here.
    """

    direction: Parallelism = "none"
    distributed_matmul = None

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
        rngs: nnx.Rngs | None = None,
    ):
        if isinstance(scale, str) and scale not in ("fan_in", "fan_out"):
            raise ValueError(f"scale={scale!r}: give a number, fan_in or fan_out")
        if isinstance(out_features, np.integer):
            out_features = int(out_features)
        self.in_features = int(in_features)
        self.output_names = tuple(out_features) if isinstance(out_features, Mapping) else None
        if isinstance(out_features, Mapping):
            out_features = tuple(out_features.values())
        self.out_features = out_features if isinstance(out_features, int) else tuple(out_features)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.kernel_init = kernel_init
        self.bias_init = bias_init
        self.parallel_config = parallel_config
        self.scale = scale
        if parallel_config and parallel_config.matmul_method:
            gathers = parallel_config.matmul_method == MatrixMultiplyMethod.ALL_GATHER
            asked: Parallelism = "column" if gathers else "row"
            if self.direction not in ("none", asked):
                raise ValueError(
                    f"a {self.direction}-parallel linear cannot use matmul_method "
                    f"{parallel_config.matmul_method}; leave it out, or use ParallelLinear"
                )
            self.direction = asked
        rngs = nnx.Rngs(0) if rngs is None else rngs
        kernel_axes = {"none": [None, None], "column": ColumnWise, "row": RowWise}[self.direction]
        bias_axes = SRowWise if self.direction == "column" else Replicated
        kernels, biases = {}, {}
        for name, width in self._widths().items():
            stream = named_rngs(rngs, name) if name else rngs
            init = partial(kernel_init, stream.params())
            kernels[name] = self._parameter((in_features, width), kernel_axes, init)
            if use_bias:
                init = partial(bias_init, stream.params())
                biases[name] = self._parameter((width,), bias_axes, init)
        single = set(kernels) == {""}
        self.kernel: Any = kernels[""] if single else nnx.Dict(kernels)
        self.bias: Any = None if not use_bias else biases[""] if single else nnx.Dict(biases)

    def _widths(self) -> dict[str, int]:
        """Output name to width, in the caller's order (nnx.Dict does not keep it)."""
        if isinstance(self.out_features, int):
            return {"": self.out_features}
        names = self.output_names or tuple(str(i) for i in range(len(self.out_features)))
        return dict(zip(names, self.out_features, strict=True))

    def _parameter(self, shape: tuple[int, ...], axes: Any, init: Initializer) -> nnx.Param:
        rule = axes if hasattr(axes, "axes") else tuple(axes)
        if self.parallel_config is None or self.parallel_config.mesh is None:
            return nnx.Param(init(shape, self.param_dtype), semantic_axes=rule)
        name = f"{type(self).__name__} {'kernel' if len(shape) == 2 else 'bias'}"
        spec = self.parallel_config.manager.resolve(axes, shape=shape, name=name)
        value = init(shape, self.param_dtype, out_sharding=spec)
        return nnx.Param(value, out_sharding=spec, semantic_axes=rule)

    def each(self, parameter: Any) -> list[jax.Array]:
        """The arrays of `kernel` or `bias`, one per output in their order; none for no bias."""
        if parameter is None:
            return []
        if isinstance(parameter, nnx.Dict):
            return [parameter[name][...] for name in self._widths()]
        return [parameter[...]]

    def factor(self) -> float:
        """The number that `scale` stands for."""
        if not isinstance(self.scale, str):
            return self.scale
        width = self.in_features if self.scale == "fan_in" else sum(self._widths().values())
        return width**-0.5

    def _finish(self, outputs: Sequence[jax.Array]) -> Any:
        """Scale and bias, then the shape in which out_features was given."""
        outputs = scaled_and_shifted(outputs, self.each(self.bias), self.factor())
        if self.output_names is not None:
            return dict(zip(self.output_names, outputs, strict=True))
        return outputs[0] if isinstance(self.out_features, int) else tuple(outputs)

    def _cast(self, inputs: jax.Array) -> jax.Array:
        """To the dtype of the computation; integers become the parameters' dtype.

        Raises: ValueError for inputs of another width.
        """
        if inputs.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{type(self).__name__}: inputs {inputs.shape} do not end in in_features="
                f"{self.in_features}; give `... {self.in_features}`"
            )
        inexact = jnp.issubdtype(inputs.dtype, jnp.inexact)
        return inputs.astype(self.dtype or (inputs.dtype if inexact else self.param_dtype))

    def native_forward(self, inputs: jax.Array, w: jax.Array | None = None) -> Any:
        """`... in` -> `... out` by plain matmuls whose collectives the compiler chooses.

        The twin of the ring forms, and all there is without a parallel_config. w: takes the place
        of the kernel (a tied head's `(in, out)`). Features of a row-parallel input lie on tp. The
        output is split over tp for column parallelism if `reduce_scatter_output`, else whole.
        """
        if w is not None and not isinstance(self.out_features, int):
            raise ValueError(f"w takes the place of one kernel; here are {len(self._widths())}")
        x = self._cast(inputs)
        dtype, kernels = x.dtype, self.each(self.kernel) if w is None else [w]
        config = self.parallel_config
        if config is None or config.mesh is None:
            return self._finish(
                [jnp.matmul(x, k.astype(dtype), precision=self.precision) for k in kernels]
            )
        axis, spec = config.axis_name, jax.typeof(x).sharding.spec
        rows = [without_axis(entry, axis) for entry in spec[:-1]]
        of_in, of_out = (axis if self.direction == side else None for side in ("row", "column"))
        x = jax.sharding.reshard(x, P(*rows, of_in))
        kernels = [jax.sharding.reshard(k.astype(dtype), P(of_in, of_out)) for k in kernels]
        out_spec = P(*rows, of_out)
        outputs = [
            jnp.einsum("...k,kn->...n", x, k, precision=self.precision, out_sharding=out_spec)
            for k in kernels
        ]
        return self._deliver(self._finish(outputs))

    def _deliver(self, outputs: Any) -> Any:
        """Column outputs as the config says: split over tp, or gathered."""
        config = self.parallel_config
        if self.direction != "column" or config is None or config.reduce_scatter_output:
            return outputs

        def whole(y: jax.Array) -> jax.Array:
            return jax.sharding.reshard(y, P(*jax.typeof(y).sharding.spec[:-1], None))

        if isinstance(outputs, dict):  # in the caller's order, which trees do not keep
            return {name: whole(y) for name, y in outputs.items()}
        return jax.tree.map(whole, outputs)

    def __call__(self, inputs: jax.Array, out_spec: P | None = None) -> Any:
        """`... in` -> `... out`; out_spec: the layout of a row-parallel output (None: whole)."""
        config = self.parallel_config
        if self.direction == "none" or config is None or config.mesh is None:
            return self.native_forward(inputs)
        if self.direction == "column":
            if out_spec is not None:
                raise ValueError("out_spec is for row-parallel linears; see reduce_scatter_output")
            return self._deliver(self.split_columns(inputs))
        x = self._cast(inputs)
        if out_spec is None:
            scattered = config.matmul_method is not None and not config.reduce_output
            rows = jax.typeof(x).sharding.spec[:-1]
            out_spec = P(*rows, config.axis_name if scattered else None)
        return self._finish(
            row_parallel(x, self.each(self.kernel), out_spec, config, self.precision)
        )

    def split_columns(self, inputs: jax.Array) -> Any:
        """A column-parallel `... in` -> `... out` with its features left on tp."""
        if self.parallel_config is None or self.parallel_config.mesh is None:
            return self.native_forward(inputs)
        x, kernels = self._cast(inputs), self.each(self.kernel)
        return self._finish(column_parallel(x, kernels, self.parallel_config, self.precision))


Linear = ParallelLinear


class ColumnParallelLinear(ParallelLinear):
    """A linear with its outputs split over tp: `... L D` -> `... L F` with F on tp.

    Input by type: `hidden` (D on tp: features are gathered), `sequence` (L on tp: rows are
    gathered) or `replicated` (no communication). Without `reduce_scatter_output` the outputs are
    gathered at the end. Kernels lie `ColumnWise`: their in dim is gathered over (fsdp, sp) in the
    compute dtype. The bias is split with its columns. With x whole, and rank r owning columns r:
      forward y_r = x W_r;  dgrad dx = sum over r of dy_r W_r^T;  wgrad dW_r = x^T dy_r.
    """

    direction = "column"


class RowParallelLinear(ParallelLinear):
    """A linear with its inputs split over tp: `... L F` with F on tp -> `... L D`.

    The partial products are summed over tp and laid out as `out_spec` says: `hidden`
    (reduce-scatter onto features), `sequence` (reduce-scatter onto rows) or `replicated`
    (all-reduce). The bias is added once, after the sum. With rank r owning rows r:
      forward y = sum over r of x_r W_r;  dgrad dx_r = dy W_r^T;  wgrad dW_r = x_r^T dy.
    """

    direction = "row"


def scaled_and_shifted(
    outputs: Sequence[jax.Array], biases: Sequence[jax.Array], factor: float
) -> list[jax.Array]:
    """factor * y + bias for each y; no biases: none is added."""
    if factor != 1.0:
        outputs = [y * jnp.asarray(factor, y.dtype) for y in outputs]
    if biases:
        outputs = [y + b.astype(y.dtype) for y, b in zip(outputs, biases, strict=True)]
    return list(outputs)


def chain(
    x: jax.Array,
    column: ColumnParallelLinear,
    function: Callable[..., jax.Array],
    row: RowParallelLinear,
) -> jax.Array:
    """row(function(*column(x))) in the layout of x, as one ring where rows travel.

    function: from the outputs of `column`, in their order, to the input of `row`; elementwise, as a
    ring shows it some rows and this device's features, and closed over no array.
    With a `sequence` layout and one config, dtype and precision for both linears the blocks stay in
    the order in which they arrive (`gather_matmul_scatter`); otherwise the linears run one after
    the other, the features between them on tp.
    """
    config, spec = column.parallel_config, jax.typeof(x).sharding.spec
    dtype = column._cast(x).dtype
    if (
        config is None
        or config.mesh is None
        or config.overlap == "none"
        or layout_of(spec, config.axis_name) != "sequence"
        or not isinstance(row.out_features, int)
        or (config, dtype, column.precision)
        != (row.parallel_config, jnp.dtype(row.dtype or dtype), row.precision)
    ):
        outputs = column.split_columns(x)
        values = outputs.values() if isinstance(outputs, dict) else outputs
        hidden = function(outputs) if isinstance(values, jax.Array) else function(*values)
        return row(hidden, spec if row.parallel_config is not None else None)
    biases = column.each(column.bias)
    work = partial(_biased, function=function, factor=column.factor(), count=len(biases))
    y = column_row_parallel(
        column._cast(x),
        column.each(column.kernel),
        biases,
        row.kernel[...],
        function=function if column.factor() == 1.0 and not biases else work,
        config=config,
        precision=column.precision,
    )
    return scaled_and_shifted([y], row.each(row.bias), row.factor())[0]


def _biased(
    *arrays: jax.Array, function: Callable[..., jax.Array], factor: float, count: int
) -> jax.Array:
    """function of the scaled products with their biases, which are the last `count` arrays."""
    products, biases = arrays[: len(arrays) - count], arrays[len(arrays) - count :]
    return function(*scaled_and_shifted(products, biases, factor))
