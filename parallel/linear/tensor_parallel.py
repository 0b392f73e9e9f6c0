"""Dense layers sharded over one mesh axis.

Names, fields, defaults and order are those of the published reference `xlstm_jax.distributed.
tensor_parallel`; docstrings say where we differ. "gather" computes as `ColumnParallelLinear` does
and "scatter" as `RowParallelLinear`, with the same functions on kernels of the same layout, so
equal parameters give equal values, gradients and collectives.

Build modules outside of shard_map, under `jax.set_mesh` or with a `parallel_config`. Call them
there on global arrays, or inside a shard_map over all mesh axes on local blocks.

Letters: n size of the axis; in, out the logical features.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.collective_matmul import Overlap
from parallel.linear.config import TensorParallelConfig
from parallel.linear.dense_layer import DenseLayer, refuse_linen
from parallel.linear.linear import Initializer, scale_and_add
from parallel.linear.ring import pcast_varying
from parallel.linear.sharded_matmul import (
    check_row_input,
    column_block,
    column_parallel,
    params_for_shard_map,
    row_block,
    row_parallel,
)
from parallel.sharding.axes import ColumnWise, Replicated, RowWise, SRowWise
from parallel.sharding.mesh import mesh_context
from parallel.sharding.partition import PartitionAxis
from parallel.sharding.specs import FEATURES, ROWS, SplitDim, mesh_axes_of, split_dim

_LECUN_NORMAL = nnx.initializers.lecun_normal()

TPMode = Literal["scatter", "gather", "none"]
"""gather: communicate the input, split columns; scatter: communicate the output, split rows."""

# Layouts of kernel and bias: those of column- and row-parallel linears.
_AXES: Mapping[str, Any] = {"gather": (ColumnWise, SRowWise), "scatter": (RowWise, Replicated)}


def scale_init(init_fn: Initializer, scale_factor: float = 1.0) -> Initializer:
    """Return an initializer that computes `scale_factor * init_fn(...)` in init_fn's dtype.

    It passes on all arguments, including keywords such as `out_sharding`.
    """

    def init(*args: Any, **kwargs: Any) -> jax.Array:
        value = init_fn(*args, **kwargs)
        return value * jnp.asarray(scale_factor, value.dtype)

    return init


def is_manual(axis_name: str) -> bool:
    """Return whether code runs inside a shard_map; refuse one over some of the axes only."""
    mesh = jax.sharding.get_abstract_mesh()
    others = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if mesh.manual_axes and others:
        # jax 0.10.2 and 0.12.0: psum_scatter fails on explicit dims, as do most derivatives.
        raise ValueError(
            f"a shard_map over {', '.join(mesh.manual_axes)} alone leaves {', '.join(others)} "
            f"explicit, and collectives over {axis_name!r} do not lower there; open it on all axes"
        )
    return axis_name in mesh.manual_axes


def refuse_building_inside(owner: str, axis_name: str) -> None:
    """Refuse construction inside a shard_map over the axis."""
    if is_manual(axis_name):
        raise ValueError(
            f"{owner} is built inside a shard_map or ModelParallelismWrapper over {axis_name!r}, "
            "where arrays are not logical; build it outside, or wrap plain layers"
        )


class _TensorParallelDense(nnx.Module):
    """Construction and call of TPDense and TPAsyncDense."""

    dense_fn: Callable[..., Any]
    model_axis_name: str
    tp_mode: TPMode
    kernel_init: Initializer
    kernel_init_adjustment: float
    use_bias: bool
    dense_name: str
    parallel_config: TensorParallelConfig | None

    def _overlap(self) -> Overlap:
        return "none"

    def _skips(self) -> bool:
        return False

    def _config(self) -> TensorParallelConfig | None:
        """Return mesh, rules and overlap of this layer, or None without a mesh."""
        given = self.parallel_config
        mesh: Any = jax.sharding.get_abstract_mesh()
        rules = PartitionAxis() if given is None else given.partition_axis
        if given is not None and given.mesh is not None:
            mesh = given.mesh
        elif mesh.empty:
            return None
        name, overlap = self.model_axis_name, self._overlap()
        return TensorParallelConfig(mesh, name, partition_axis=rules, overlap=overlap)

    def _build(self, rngs: nnx.Rngs) -> None:
        owner = type(self).__name__
        if self.tp_mode not in get_args(TPMode):
            modes = ", ".join(get_args(TPMode))
            raise ValueError(f"Unknown Tensor Parallel mode: {self.tp_mode!r}; use {modes}")
        if hasattr(self, self.dense_name):
            raise ValueError(
                f"{owner}: dense_name={self.dense_name!r} is an attribute already; use another name"
            )
        refuse_linen(owner, self.dense_fn)
        config, kernel_init, splits = self._config(), self.kernel_init, self.tp_mode != "none"
        with mesh_context(None if config is None else config.mesh):
            if splits:
                refuse_building_inside(owner, self.model_axis_name)
                kernel_init = scale_init(kernel_init, self.kernel_init_adjustment)
            if splits and config is not None:
                kernel_init = partial(self._init_blocks, config, kernel_init)
            layer = self.dense_fn(kernel_init=kernel_init, use_bias=self.use_bias, rngs=rngs)
            refuse_linen(owner, layer)
            if splits:
                kernels = DenseLayer.read(owner, layer).kernels
                self.kernel_shapes = tuple(kernel.shape for kernel in kernels)
            if splits and config is not None:
                kernel_axes, bias_axes = _AXES[self.tp_mode]
                _place(layer.kernel, kernel_axes, config)
                _place(getattr(layer, "bias", None), bias_axes, config)
        setattr(self, self.dense_name, layer)

    def _init_blocks(
        self,
        config: TensorParallelConfig,
        init: Initializer,
        key: jax.Array,
        shape: tuple[int, ...],
        dtype: Any,
    ) -> jax.Array:
        """Create a logical kernel; each device computes its block."""
        axes, name = _AXES[self.tp_mode][0], f"{type(self).__name__} kernel"
        spec = config.manager.resolve(axes, shape=shape, name=name)
        return init(key, shape, dtype, out_sharding=spec)

    def __call__(self, inputs: jax.Array, out_spec: P | None = None) -> Any:
        """Compute `... in` -> `... out` on global arrays, or on local blocks inside shard_map.

        out_spec: Layout of the output of mode "scatter"; None: features on the axis.
        """
        layer, config = getattr(self, self.dense_name), self._config()
        if config is None:
            return layer(inputs)
        if out_spec is not None and (self.tp_mode != "scatter" or self._skips()):
            raise ValueError("out_spec is for tp_mode='scatter' with communication; leave it out")
        with mesh_context(config.mesh):
            if self.tp_mode == "none":
                self._check_whole(inputs, jax.typeof(inputs).sharding.spec[-1:])
                return layer(inputs)
            it = DenseLayer.read(type(self).__name__, layer, inputs.dtype)
            compute = self._on_blocks if is_manual(config.axis_name) else self._on_arrays
            return it.pack(compute(inputs.astype(it.dtype), it, config, out_spec))

    def _on_arrays(
        self, x: jax.Array, it: DenseLayer, config: TensorParallelConfig, out_spec: P | None
    ) -> Sequence[jax.Array]:
        axis, manager, spec = config.axis_name, config.manager, jax.typeof(x).sharding.spec
        if self.tp_mode == "gather":
            if self._skips():
                self._check_whole(x, spec)
            outputs = column_parallel(x, it.kernels, config, it.precision)
        elif not self._skips() or manager.mesh.shape[axis] == 1:
            out_spec = out_spec or P(*spec[:-1], axis)
            outputs = row_parallel(x, it.kernels, out_spec, config, it.precision)
        else:
            check_row_input(spec, config)
            rule, kernels = params_for_shard_map(it.kernels, manager.resolve(RowWise), x, axis)
            body = partial(_unreduced_sums, kernel_spec=rule, axis_name=axis, factor=it.factor)
            island = jax.shard_map(
                partial(body, precision=it.precision),
                mesh=manager.mesh,
                in_specs=(spec, [rule for _ in kernels], [P(None) for _ in it.biases]),
                out_specs=[P(*spec[:-1], None, unreduced={axis}) for _ in kernels],
            )
            return island(x, kernels, list(it.biases))
        return scale_and_add(outputs, it.biases, it.factor)

    def _on_blocks(
        self, x: jax.Array, it: DenseLayer, config: TensorParallelConfig, out_spec: P | None
    ) -> Sequence[jax.Array]:
        axis, spec = config.axis_name, config.manager.resolve(_AXES[self.tp_mode][0])
        dim, biases = self._input_dim(x, it, axis, spec), it.biases
        options: dict[str, Any] = dict(kernel_spec=spec, axis_name=axis, precision=it.precision)
        if self.tp_mode == "gather":
            outputs = column_block(x, *it.kernels, dim=dim, overlap=config.overlap, **options)
        elif self._skips():
            return _partial_sums(x, it.kernels, biases, factor=it.factor, **options)
        else:
            dim = FEATURES if out_spec is None else split_dim(out_spec, axis, rank=x.ndim)
            outputs = row_block(x, *it.kernels, dim=dim, overlap=config.overlap, **options)
            if dim == FEATURES:
                biases = [_own_block(bias, axis) for bias in biases]
        return scale_and_add(outputs, biases, it.factor)

    def _input_dim(self, x: jax.Array, it: DenseLayer, axis: str, spec: P) -> SplitDim | None:
        """Inside shard_map, return the dim of blocks `x` that the axis splits.

        Raises: ValueError for whole arrays where blocks of one device are expected.
        """
        sizes = jax.sharding.get_abstract_mesh().shape
        parts = [math.prod(sizes[name] for name in mesh_axes_of(entry)) for entry in spec]
        blocks = [(rows // parts[0], width // parts[1]) for rows, width in self.kernel_shapes]
        rows, n = self.kernel_shapes[0][0], sizes[axis]
        dims: dict[int, SplitDim | None] = {rows // n: FEATURES}
        if self._skips():
            dims = {rows if self.tp_mode == "gather" else rows // n: None}
        elif self.tp_mode == "gather" and axis in jax.typeof(x).manual_axis_type.varying:
            dims = {rows: ROWS, **dims}
        if [kernel.shape for kernel in it.kernels] != blocks or x.shape[-1] not in dims:
            raise ValueError(
                f"{type(self).__name__} in mode {self.tp_mode!r} inside a shard_map with {axis}={n}"
                f" wants inputs (..., {' or '.join(map(str, dims))}) and the kernel's block "
                f"{blocks[0]}, got {x.shape} and {it.kernels[0].shape}; pass the state in with "
                "in_specs=nnx.get_partition_spec(state)"
            )
        return dims[x.shape[-1]]

    def _check_whole(self, x: jax.Array, entries: Sequence[Any]) -> None:
        """Refuse inputs that the axis splits along the dims of these spec entries."""
        axis_name = self.model_axis_name
        size = jax.sharding.get_abstract_mesh().shape[axis_name]
        if size > 1 and any(axis_name in mesh_axes_of(entry) for entry in entries):
            wanted = "its features" if self.tp_mode == "none" else "its input"
            raise ValueError(
                f"{type(self).__name__} in mode {self.tp_mode!r} wants {wanted} whole over "
                f"{axis_name!r}, got {jax.typeof(x)}; use jax.sharding.reshard on the input, or "
                "another mode"
            )


def _place(parameter: Any, axes: Any, config: TensorParallelConfig) -> None:
    """Lay out a parameter, every parameter of an nnx.Dict, or None."""
    spec = config.manager.resolve(axes)
    for part in parameter.values() if isinstance(parameter, nnx.Dict) else [parameter]:
        if part is not None:
            part.set_value(jax.sharding.reshard(part[...], spec))
            part.set_metadata(out_sharding=spec, semantic_axes=axes)


def _own_block(bias: jax.Array, axis_name: str) -> jax.Array:
    """Return this device's block of a vector that every device holds whole."""
    width, index = bias.shape[0] // lax.axis_size(axis_name), lax.axis_index(axis_name)
    return lax.dynamic_slice_in_dim(pcast_varying(bias, (axis_name,)), index * width, width)


def _partial_sums(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    *,
    factor: float,
    axis_name: str,
    **options: Any,
) -> Sequence[jax.Array]:
    """`... in/n`, `in/n out`, `out` -> this device's terms `... out`; device 0 adds the biases."""
    outputs = column_block(x, *kernels, dim=None, overlap="none", axis_name=axis_name, **options)
    first = lax.axis_index(axis_name) == 0
    return scale_and_add(outputs, [jnp.where(first, bias, 0) for bias in biases], factor)


def _unreduced_sums(*blocks: Any, axis_name: str, **options: Any) -> Sequence[jax.Array]:
    """Return `_partial_sums`, typed as unreduced over the axis."""
    outputs = _partial_sums(*blocks, axis_name=axis_name, **options)
    return [lax.pcast(y, axis_name, to="unreduced") for y in outputs]


@dataclass(eq=False, repr=False)
class TPDense(_TensorParallelDense):
    """A dense layer sharded over the model axis, without overlap of communication and matmul.

    dense_fn: Builds the layer from kernel_init, use_bias and rngs: an nnx module with a `kernel`
        that computes x @ kernel + bias, e.g. `functools.partial(nnx.Linear, in, out)`, or a
        `ParallelLinear` without a config, whose several outputs then share one gather. Features are
        logical in both classes. (The reference takes linen modules and out / n for "gather"; for
        "scatter" out in TPDense, but out / n in TPAsyncDense.)
    model_axis_name: The mesh axis.
    tp_mode: "gather": all-gather the input's features, `... in/n` -> `... out/n`. "scatter":
        reduce-scatter the output's features, `... in/n` -> `... out/n`. Outside of shard_map the
        layouts of the input and of `out_spec` decide: rows are gathered if the axis splits rows,
        and nothing if it splits neither. "none": the plain layer on whole features. With n = 1, or
        without a mesh, no mode communicates.
    skip_communication: "gather": take the input whole, `... in`. "scatter": return this device's
        partial sum, `... out`. Inside a shard_map it varies over the axis; reduce it with psum or
        psum_scatter. Outside, its type has `unreduced={axis}` (unless n = 1), and
        `jax.sharding.reshard` to a plain spec sums it.
    kernel_init, kernel_init_adjustment: The kernel is kernel_init * adjustment. kernel_init accepts
        `out_sharding=`, as jax's do. Mode "none" ignores the adjustment, as in the reference.
        (There n = 1 turns any mode into "none"; here only tp_mode counts, or parameters would
        depend on the mesh.) Fan-in is that of the logical kernel, so no adjustment is needed. (In
        the reference's TPAsyncDense with "gather" it is in / n: kernels start sqrt(n) too large.)
    use_bias: The bias is added once, after the sum. (The reference sums n biases in "scatter".)
    dense_name: Attribute that holds the layer, hence part of its parameters' path. (The reference
        ignores it in TPAsyncDense.)
    parallel_config: Ours: its mesh is used where none is in context, its `partition_axis` instead
        of the default rules. Its other fields are not read.

    Parameters: kernel (in, out), ColumnWise for gather, RowWise for scatter; bias (out,), SRowWise
    for gather, else Replicated; whole for none. Communication and equations: `ColumnParallelLinear`
    and `RowParallelLinear`.

    Raises: ValueError for an unknown mode, features that do not divide, a layer that is not
        x @ kernel + bias, an input of another layout, or construction inside a shard_map.
    """

    dense_fn: Callable[..., Any]
    model_axis_name: str
    tp_mode: TPMode = "none"
    skip_communication: bool = False
    kernel_init: Initializer = _LECUN_NORMAL
    kernel_init_adjustment: float = 1.0
    use_bias: bool = True
    dense_name: str = "module"
    _: KW_ONLY
    parallel_config: TensorParallelConfig | None = None
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        self._build(rngs)

    def _skips(self) -> bool:
        return self.skip_communication


@dataclass(eq=False, repr=False)
class TPAsyncDense(_TensorParallelDense):
    """TPDense with its communication overlapped with its matmul, hop by hop around a ring.

    The fields of TPDense except skip_communication, and
    use_bidirectional_gather: Overlap "bidirectional": whole blocks travel both ways, and at most
        n // 2 hops wait for one another. False: "ring", n - 1 hops one way.
    use_bidirectional_scatter: Overlap "split": the halves of every partial sum travel in opposite
        ways, so out / n (or the rows of a device) must be even. False: "ring".
    State is interchangeable between TPDense, TPAsyncDense, any n and any direction. (The reference
    has one submodule per hop, in ring order: its parameters fit one class, one n and one choice of
    directions.)
    """

    dense_fn: Callable[..., Any]
    model_axis_name: str
    tp_mode: TPMode = "none"
    kernel_init: Initializer = _LECUN_NORMAL
    kernel_init_adjustment: float = 1.0
    use_bias: bool = True
    dense_name: str = "module"
    use_bidirectional_gather: bool = True
    use_bidirectional_scatter: bool = False
    _: KW_ONLY
    parallel_config: TensorParallelConfig | None = None
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        self._build(rngs)

    def _overlap(self) -> Overlap:
        if self.tp_mode == "gather":
            return "bidirectional" if self.use_bidirectional_gather else "ring"
        return "split" if self.use_bidirectional_scatter else "ring"
