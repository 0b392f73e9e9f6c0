"""Dense layers sharded over one mesh axis.

Names, fields, defaults and order are those of the published reference `xlstm_jax.distributed.
tensor_parallel`; docstrings say where we differ. The trainer does not use this file. Each layer has
one logical kernel (in, out) and one logical bias (out,), whose values do not depend on the mesh,
the mode or the overlap.

Build modules under `jax.set_mesh`, outside of shard_map. Call them there on global arrays, or
inside a shard_map over all mesh axes on local blocks.

Letters: n size of the axis, r index of this device on it; in, out the logical features.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.collective_matmul import Overlap, gather_matmul, matmul_scatter
from parallel.linear.ring import pcast_varying
from parallel.sharding.specs import mesh_axes_of, without_axis

Initializer = Callable[..., jax.Array]
_LECUN_NORMAL = nnx.initializers.lecun_normal()

TPMode = Literal["scatter", "gather", "none"]
"""gather: communicate the input, split columns; scatter: communicate the output, split rows."""


def scale_init(init_fn: Initializer, scale_factor: float = 1.0) -> Initializer:
    """Return an initializer that computes `scale_factor * init_fn(...)` in init_fn's dtype.

    It passes on all arguments, including keywords such as `out_sharding`.
    """

    def init(*args: Any, **kwargs: Any) -> jax.Array:
        value = init_fn(*args, **kwargs)
        return value * jnp.asarray(scale_factor, value.dtype)

    return init


def size_in_context(axis_name: str) -> int | None:
    """Return the size of an axis of the mesh in context, manual or not; None without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"model_axis_name {axis_name!r} is not an axis of the mesh in context; use one of "
            f"{', '.join(mesh.axis_names)}"
        )
    return mesh.shape[axis_name]


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
    """Construction, layout and call of TPDense and TPAsyncDense."""

    dense_fn: Callable[..., Any]
    model_axis_name: str
    tp_mode: TPMode
    kernel_init: Initializer
    kernel_init_adjustment: float
    use_bias: bool
    dense_name: str

    def _overlap(self) -> Overlap:
        return "none"

    def _skips(self) -> bool:
        return False

    def _kernel_spec(self) -> P:
        name = self.model_axis_name
        return P(None, name) if self.tp_mode == "gather" else P(name, None)

    def _build(self, rngs: nnx.Rngs) -> None:
        owner = type(self).__name__
        if self.tp_mode not in get_args(TPMode):
            modes = ", ".join(get_args(TPMode))
            raise ValueError(f"Unknown Tensor Parallel mode: {self.tp_mode!r}; use {modes}")
        if hasattr(self, self.dense_name):
            raise ValueError(
                f"{owner}: dense_name={self.dense_name!r} is an attribute already; use another name"
            )
        n = size_in_context(self.model_axis_name)
        kernel_init = self.kernel_init
        if self.tp_mode != "none":
            refuse_building_inside(owner, self.model_axis_name)
            scaled = scale_init(kernel_init, self.kernel_init_adjustment)
            kernel_init = scaled if n is None else partial(self._init_split_kernel, n, scaled)
        layer = self.dense_fn(kernel_init=kernel_init, use_bias=self.use_bias, rngs=rngs)
        if self.tp_mode != "none":
            _check_arithmetic(owner, layer)
        if self.tp_mode != "none" and n is not None:
            specs = (layer.kernel, self._kernel_spec()), (layer.bias, P(self.model_axis_name))
            for parameter, spec in specs:
                if parameter is not None:
                    parameter.set_value(jax.sharding.reshard(parameter[...], spec))
                    parameter.set_metadata(out_sharding=spec)
        setattr(self, self.dense_name, layer)

    def _init_split_kernel(
        self, n: int, init: Initializer, key: jax.Array, shape: tuple[int, ...], dtype: Any
    ) -> jax.Array:
        """Check sizes, then create the logical kernel; each device computes its block."""
        owner = f"{type(self).__name__} kernel {shape}"
        sizes = {"in_features": shape[0], "out_features": shape[1]}
        if self.tp_mode == "gather" and self._skips():
            del sizes["in_features"]
        axis_name = self.model_axis_name
        for name, size in sizes.items():
            if size % n:
                legal = [str(k) for k in range(1, n) if not any(s % k for s in sizes.values())]
                raise ValueError(
                    f"{owner}: {name}={size} is not divisible by {axis_name}={n}; use "
                    f"{axis_name}={' or '.join(legal)}, or other features"
                )
        if self._overlap() == "split" and n > 1 and shape[1] // n % 2:
            raise ValueError(
                f"{owner}: out_features={shape[1]} over {axis_name}={n} is odd and cannot be "
                "halved; use use_bidirectional_scatter=False"
            )
        return init(key, shape, dtype, out_sharding=self._kernel_spec())

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Compute `... in` -> `... out` on global arrays, or on local blocks inside shard_map."""
        layer, axis_name = getattr(self, self.dense_name), self.model_axis_name
        n = size_in_context(axis_name)
        if n is not None and self.tp_mode == "none":
            self._input_spec(inputs, n)
        if n is None or self.tp_mode == "none":
            return layer(inputs)
        bias = None if layer.bias is None else layer.bias[...]
        x, kernel, bias = layer.promote_dtype((inputs, layer.kernel[...], bias), dtype=layer.dtype)
        body = partial(
            _dense_block,
            mode=self.tp_mode,
            axis_name=axis_name,
            overlap=self._overlap(),
            skip_communication=self._skips(),
            precision=layer.precision,
        )
        if is_manual(axis_name):
            self._check_blocks(x, kernel, n)
            return body(x, kernel, bias)
        spec = self._input_spec(x, n)
        out_spec = P(*(without_axis(entry, axis_name) for entry in spec[:-1]), axis_name)
        if self.tp_mode == "scatter" and self._skips() and n > 1:
            out_spec = P(*spec[:-1], None, unreduced={axis_name})
            body = partial(_unreduced, body=body, axis_name=axis_name)
        in_specs = (spec, self._kernel_spec(), P(axis_name))
        return jax.shard_map(body, in_specs=in_specs, out_specs=out_spec)(x, kernel, bias)

    def _input_spec(self, x: jax.Array, n: int) -> P:
        """Return the layout of a global input; refuse one that the mode does not accept."""
        spec, axis_name = jax.typeof(x).sharding.spec, self.model_axis_name
        if self.tp_mode == "none":
            wanted, fits = "its features whole over", axis_name not in mesh_axes_of(spec[-1])
        elif self.tp_mode == "gather" and self._skips():
            carried = any(axis_name in mesh_axes_of(entry) for entry in spec)
            wanted, fits = "its input whole over", not carried
        else:
            wanted, fits = "its features on", spec[-1] == axis_name
        if not fits and n > 1:
            raise ValueError(
                f"{type(self).__name__} in mode {self.tp_mode!r} wants {wanted} {axis_name!r}, got "
                f"{jax.typeof(x)}; use jax.sharding.reshard on the input, or another mode"
            )
        return spec

    def _check_blocks(self, x: jax.Array, kernel: jax.Array, n: int) -> None:
        """Inside shard_map, refuse whole arrays where blocks of one device are expected."""
        layer = getattr(self, self.dense_name)
        rows, columns = layer.in_features, layer.out_features
        width = rows if self.tp_mode == "gather" and self._skips() else rows // n
        block = (rows, columns // n) if self.tp_mode == "gather" else (rows // n, columns)
        if kernel.shape != block or x.shape[-1] != width:
            raise ValueError(
                f"{type(self).__name__} in mode {self.tp_mode!r} inside a shard_map with "
                f"{self.model_axis_name}={n} wants inputs (..., {width}) and the kernel's block "
                f"{block}, got {x.shape} and {kernel.shape}; pass the state in with in_specs="
                "nnx.get_partition_spec(state)"
            )


def _check_arithmetic(owner: str, layer: Any) -> None:
    """Refuse a layer whose own arithmetic the collective matmuls would replace."""
    known = isinstance(layer, nnx.Linear) and type(layer).__call__ is nnx.Linear.__call__
    if not (
        known and layer.dot_general is lax.dot_general and layer.preferred_element_type is None
    ):
        raise ValueError(
            f"{owner}: dense_fn builds a {type(layer).__name__} that may compute something else "
            "than x @ kernel + bias; use nnx.Linear (or a subclass with its __call__) with default "
            "dot_general and preferred_element_type, or tp_mode='none'"
        )


def _dense_block(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    mode: TPMode,
    axis_name: str,
    overlap: Overlap,
    skip_communication: bool,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Multiply local blocks and add the bias.

    gather: x `... in/n` (`... in` if communication is skipped), kernel `in out/n`, bias `out/n` ->
    `... out/n`. scatter: x `... in/n`, kernel `in/n out`, bias `out/n` -> `... out/n`. A skipped
    reduction returns the partial sum `... out`; each device adds its bias block to its own columns,
    so that the sum has the bias once.
    """
    # The rings have derivative rules, whose cotangents vary over the axes of x; so must the kernel.
    x = pcast_varying(x, (axis_name,))
    kernel = pcast_varying(kernel, tuple(sorted(jax.typeof(x).manual_axis_type.varying)))
    if skip_communication:
        y = jnp.matmul(x, kernel, precision=precision)
        if mode == "scatter" and bias is not None:
            start = lax.axis_index(axis_name) * bias.shape[0]
            zeros = pcast_varying(jnp.zeros(y.shape[-1:], bias.dtype), (axis_name,))
            bias = lax.dynamic_update_slice_in_dim(zeros, bias, start, axis=0)
    elif mode == "gather":
        (y,) = gather_matmul(
            x, [kernel], axis_name=axis_name, dim=-1, overlap=overlap, precision=precision
        )
    else:
        y = matmul_scatter(
            x, kernel, axis_name=axis_name, dim=-1, overlap=overlap, precision=precision
        )
    return y if bias is None else y + bias


def _unreduced(*blocks: Any, body: Callable[..., jax.Array], axis_name: str) -> jax.Array:
    """Type the result of `body` as an unreduced partial sum over the axis."""
    return lax.pcast(body(*blocks), axis_name, to="unreduced")


@dataclass(eq=False, repr=False)
class TPDense(_TensorParallelDense):
    """A dense layer sharded over the model axis, without overlap of communication and matmul.

    dense_fn: Builds the layer, e.g. `functools.partial(nnx.Linear, in, out)`; called with
        kernel_init, use_bias and rngs. Features are logical in both classes. (The reference takes
        out / n for "gather"; for "scatter" out in TPDense, but out / n in TPAsyncDense.)
    model_axis_name: The mesh axis.
    tp_mode: "gather": all-gather the input, `... in/n` -> `... out/n`. "scatter": reduce-scatter
        the output, `... in/n` -> `... out/n`. "none": the plain layer on whole features. With
        n = 1, or without a mesh, no mode communicates.
    skip_communication: "gather": take the input whole, `... in`. "scatter": return this device's
        partial sum, `... out`. Inside a shard_map it varies over the axis; reduce it with psum or
        psum_scatter. Outside, its type has `unreduced={axis}` (unless n = 1), and
        `jax.sharding.reshard` to a plain spec sums it.
    kernel_init, kernel_init_adjustment: The kernel is kernel_init * adjustment. kernel_init accepts
        `out_sharding=`, as jax's do, so that each device computes its block. Mode "none" ignores
        the adjustment, as in the reference. (There n = 1 turns any mode into "none"; here only
        tp_mode counts, or parameters would depend on the mesh.) Fan-in is that of the logical
        kernel, so no adjustment is needed. (In the reference's TPAsyncDense with "gather" it is
        in / n, and kernels start sqrt(n) too large.)
    use_bias: The bias is split like the output and added once, after the sum. (The reference sums n
        biases in mode "scatter".)
    dense_name: Attribute that holds the layer, hence part of its parameters' path. (The reference
        ignores it in TPAsyncDense.)

    Parameters: kernel (in, out), `P(None, axis)` for gather, `P(axis, None)` for scatter; bias
    (out,), `P(axis)`; whole for none. They are placed on the mesh in context at construction.
    Communication per device: (n - 1)/n of the whole input (gather) or output (scatter), and as much
    in the backward pass. With W_r and x_r the blocks of device r:
      gather: forward y_r = x W_r; dgrad dx = sum over r of dy_r W_r^T; wgrad dW_r = x^T dy_r.
      scatter: forward y = sum over r of x_r W_r; dgrad dx_r = dy W_r^T; wgrad dW_r = x_r^T dy.

    Raises: ValueError for an unknown mode, features that n does not divide, a layer that is not
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
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        self._build(rngs)

    def _skips(self) -> bool:
        return self.skip_communication


@dataclass(eq=False, repr=False)
class TPAsyncDense(_TensorParallelDense):
    """TPDense with its communication overlapped with its matmul, hop by hop around a ring.

    The fields of TPDense except skip_communication, and
    use_bidirectional_gather: Send whole blocks both ways, so that at most n // 2 hops wait for one
        another; otherwise one way, n - 1 hops.
    use_bidirectional_scatter: Send the halves of every partial sum in opposite ways, so out / n
        must be even; otherwise one way.
    The kernel is the logical one, so state is interchangeable between TPDense, TPAsyncDense, any n
    and any direction. (The reference has one submodule per hop, in ring order: its parameters fit
    one class, one n and one choice of directions.)
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
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        self._build(rngs)

    def _overlap(self) -> Overlap:
        if self.tp_mode == "gather":
            return "bidirectional" if self.use_bidirectional_gather else "ring"
        return "split" if self.use_bidirectional_scatter else "ring"
