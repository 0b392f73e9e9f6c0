"""Dense layers split over one mesh axis, and copies of any module along it.

Names, fields, defaults and order are those of the published reference `xlstm_jax.distributed.
tensor_parallel`; every docstring says where we differ. There is one logical kernel (in, out) and
one logical bias (out,): what they hold depends neither on the mesh, nor on the mode, nor on how
communication is hidden. Modules are built under `jax.set_mesh` and outside of shard_map. They are
called there too, on typed global arrays, and open the island themselves; or inside a shard_map over
all axes, on local blocks. It refuses layers that are not x @ kernel + bias, sizes that do not
divide, and layouts other than the documented ones. No model word in here.

Letters: n the size of the axis, r this device's index on it; in, out the logical features.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.collective_matmul import Overlap, gather_matmul, matmul_scatter
from parallel.linear.ring import pcast_varying
from parallel.sharding.specs import mesh_axes_of, without_axis

Initializer = Callable[..., jax.Array]
_LECUN_NORMAL = nnx.initializers.lecun_normal()

TPMode = Literal["scatter", "gather", "none"]
"""gather: the input travels, columns are split; scatter: the output travels, rows are split."""


def scale_init(init_fn: Initializer, scale_factor: float = 1.0) -> Initializer:
    """An initialiser that returns `scale_factor * init_fn(...)`, in the dtype of init_fn.

    All arguments are passed on, keywords such as `out_sharding` too.
    """

    def init(*args: Any, **kwargs: Any) -> jax.Array:
        value = init_fn(*args, **kwargs)
        return value * jnp.asarray(scale_factor, value.dtype)

    return init


def _size_in_context(axis_name: str) -> int | None:
    """The size of an axis of the mesh in context, manual or not; None if there is no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"model_axis_name {axis_name!r} is not an axis of the mesh in context; use one of "
            f"{', '.join(mesh.axis_names)}"
        )
    return mesh.shape[axis_name]


def _is_manual(axis_name: str) -> bool:
    """Whether this is traced inside a shard_map; refused if that is over some axes only."""
    mesh = jax.sharding.get_abstract_mesh()
    others = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if mesh.manual_axes and others:
        # jax 0.10.2 and 0.12.0: psum_scatter fails on explicit dims, as do most derivatives.
        raise ValueError(
            f"a shard_map over {', '.join(mesh.manual_axes)} alone leaves {', '.join(others)} "
            f"explicit, and collectives over {axis_name!r} do not lower there; open it on all axes"
        )
    return axis_name in mesh.manual_axes


def _refuse_building_inside(owner: str, axis_name: str) -> None:
    if _is_manual(axis_name):
        raise ValueError(
            f"{owner} is built inside a shard_map or ModelParallelismWrapper over {axis_name!r}, "
            "where arrays are not logical; build it outside, or wrap plain layers"
        )


class _TensorParallelDense(nnx.Module):
    """What TPDense and TPAsyncDense share: how the layer is built, laid out and called."""

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
        n = _size_in_context(self.model_axis_name)
        kernel_init = self.kernel_init
        if self.tp_mode != "none":
            _refuse_building_inside(owner, self.model_axis_name)
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
        """The logical kernel, every device making its block; sizes are checked before that."""
        what = f"{type(self).__name__} kernel {shape}"
        sizes = {"in_features": shape[0], "out_features": shape[1]}
        if self.tp_mode == "gather" and self._skips():
            del sizes["in_features"]
        axis_name = self.model_axis_name
        for name, size in sizes.items():
            if size % n:
                legal = [str(k) for k in range(1, n) if not any(s % k for s in sizes.values())]
                raise ValueError(
                    f"{what}: {name}={size} is not divisible by {axis_name}={n}; use "
                    f"{axis_name}={' or '.join(legal)}, or other features"
                )
        if self._overlap() == "split" and n > 1 and shape[1] // n % 2:
            raise ValueError(
                f"{what}: out_features={shape[1]} over {axis_name}={n} is odd and cannot be "
                "halved; use use_bidirectional_scatter=False"
            )
        return init(key, shape, dtype, out_sharding=self._kernel_spec())

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Global `... in` -> `... out`, features laid out as the mode says; or local blocks."""
        layer, axis_name = getattr(self, self.dense_name), self.model_axis_name
        n = _size_in_context(axis_name)
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
        if _is_manual(axis_name):
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
        """The layout of a global input, refused unless its features lie as the mode wants them."""
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
        """Inside shard_map: the blocks of one device, not whole arrays."""
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
    """Blocks are multiplied by our rings: any other arithmetic would be lost in silence."""
    known = isinstance(layer, nnx.Linear) and type(layer).__call__ is nnx.Linear.__call__
    if not (
        known and layer.dot_general is lax.dot_general and layer.preferred_element_type is None
    ):
        raise ValueError(
            f"{owner}: dense_fn builds a {type(layer).__name__} that may compute something else "
            "than x @ kernel + bias; use nnx.Linear, or a subclass with its __call__, with default "
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
    """gather: x `... in/n` (skipping: `... in`), kernel `in out/n`, bias `out/n` -> `... out/n`.

    scatter: x `... in/n`, kernel `in/n out`, bias `out/n` -> `... out/n`. Skipping: -> `... out`, a
    partial sum; the bias block is added to its own columns of it, so that the sum has it once.
    """
    # All of one type: the rings have derivative rules, whose cotangents vary like x.
    x = pcast_varying(x, (axis_name,))
    kernel = pcast_varying(kernel, tuple(sorted(jax.typeof(x).manual_axis_type.varying)))
    if skip_communication:
        y = jnp.matmul(x, kernel, precision=precision)
        if mode == "scatter" and bias is not None:
            start = lax.axis_index(axis_name) * bias.shape[0]
            nowhere = pcast_varying(jnp.zeros(y.shape[-1:], bias.dtype), (axis_name,))
            bias = lax.dynamic_update_slice_in_dim(nowhere, bias, start, axis=0)
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
    """A partial sum per device, with a type that says so."""
    return lax.pcast(body(*blocks), axis_name, to="unreduced")


@dataclass(eq=False, repr=False)
class TPDense(_TensorParallelDense):
    """A dense layer split over the model axis; communication and matmul follow each other.

    dense_fn: builds the layer, e.g. `functools.partial(nnx.Linear, in, out)`; called with
        kernel_init, use_bias and rngs. Features are logical, in both classes. (The reference takes
        out / n for "gather"; for "scatter" out in TPDense, but out / n in TPAsyncDense.)
    model_axis_name: the mesh axis.
    tp_mode: "gather": `... in/n`, all-gathered, -> `... out/n`; "scatter": `... in/n` -> `... out`,
        reduce-scattered to `... out/n`; "none": the layer as it is, on whole features. With n = 1,
        or without a mesh, nothing is communicated in any mode.
    skip_communication: "gather": the input comes whole, `... in`. "scatter": the output stays a
        partial sum `... out`, another on every device. Inside a shard_map it varies over the axis
        (psum or psum_scatter it there); outside, its type says `unreduced={axis}` (unless n = 1),
        and `jax.sharding.reshard` to a plain spec sums it.
    kernel_init, kernel_init_adjustment: the kernel is kernel_init * adjustment. kernel_init takes
        `out_sharding=`, as jax's do: every device makes its block. In mode "none" the adjustment is
        not applied, as in the reference. (There n = 1 turns any mode into it; here the mode asked
        for decides, or parameters would depend on the mesh.) Fan-in is the logical one: nobody
        needs an adjustment. (In the reference's TPAsyncDense with "gather" it is in / n, and
        kernels start sqrt(n) too large.)
    use_bias: the bias is split like the output and added once, after the sum; a skipped reduction
        carries it once. (The reference sums n biases in mode "scatter".)
    dense_name: the attribute that holds the layer, hence the path of its parameters. (The reference
        ignores it in TPAsyncDense.)

    Parameters: kernel (in, out), `P(None, axis)` for gather, `P(axis, None)` for scatter; bias
    (out,), `P(axis)`; whole for none. Laid out on the mesh in context when the layer is built.
    Communication per device: (n - 1)/n of the whole input (gather) or output (scatter), as much in
    the backward pass. With W_r and x_r the blocks of device r:
      gather: forward y_r = x W_r; dgrad dx = sum over r of dy_r W_r^T; wgrad dW_r = x^T dy_r.
      scatter: forward y = sum over r of x_r W_r; dgrad dx_r = dy W_r^T; wgrad dW_r = x_r^T dy.
    Raises: ValueError for an unknown mode, features that n does not divide, a layer that is not
        x @ kernel + bias, an input laid out otherwise, building inside a shard_map.
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
    """TPDense with its communication hidden under its matmul, hop by hop around the ring.

    Fields of TPDense but skip_communication, and
    use_bidirectional_gather: whole blocks travel both ways, the longest chain is n // 2 hops;
        else one way, n - 1 hops.
    use_bidirectional_scatter: the halves of every partial sum travel opposite ways, so out / n must
        be even; else one way.
    The kernel is the logical one, and the order of the ring is index arithmetic: state moves freely
    between TPDense, TPAsyncDense, any n and any direction. (The reference keeps one submodule per
    step: its parameters lie in ring order, for one class, one n and one choice of directions.)
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


@dataclass(eq=False, repr=False)
class ModelParallelismWrapper(nnx.Module):
    """n copies of a module, one per device of the model axis, each with parameters of its own.

    model_axis_name: the mesh axis; n is its size on the mesh in context.
    module_fn: builds the module; called with **module_kwargs and rngs. (No name="sharded": an nnx
        module is named by the attribute that holds it, here `sharded`.)
    mask_except_model_idx: the parameters of all other copies are zero. They are masked in the
        forward pass too, so their gradient is zero and they stay zero.
    split_rngs: copy i starts from fold_in(key, i) for every stream of rngs: it depends on i only,
        and is bit-equal for every n > i. Else all copies start equal. (The reference puts its dense
        layers into this wrapper, so their initialisation depends on n; ours have one logical
        kernel and do not use it.)
    module_kwargs: more keywords for module_fn.

    Every variable of the module gets a leading dim of size n, `P(axis)`, unseen inside.
    Raises: ValueError without a mesh that has the axis, for an index that no copy has, when built
        inside a shard_map over the axis, when called outside of one without out_specs.
    """

    model_axis_name: str
    module_fn: Callable[..., nnx.Module]
    mask_except_model_idx: int | None = None
    split_rngs: bool = True
    module_kwargs: Mapping[str, Any] = FrozenDict()
    _: KW_ONLY
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        axis_name, keep = self.model_axis_name, self.mask_except_model_idx
        n = _size_in_context(axis_name)
        if n is None:
            raise ValueError(
                f"ModelParallelismWrapper over {axis_name!r} is built without a mesh in context; "
                "build it under jax.set_mesh(mesh)"
            )
        _refuse_building_inside("ModelParallelismWrapper", axis_name)
        if keep is not None and not 0 <= keep < n:
            raise ValueError(
                f"mask_except_model_idx={keep} is no index on {axis_name}={n}; use 0 to {n - 1}"
            )
        self.module_kwargs = FrozenDict(self.module_kwargs)
        build = partial(
            _build_copy,
            module_fn=partial(self.module_fn, **self.module_kwargs),
            axis_name=axis_name,
            split_rngs=self.split_rngs,
            keep=keep,
        )
        keys = {name: stream() for name, stream in rngs.items()}
        # Compiled as a whole: op by op, every step of an initialiser would be a compilation.
        island = jax.shard_map(build, in_specs=P(), out_specs=P(axis_name))
        self.sharded = nnx.merge(*jax.jit(island)(keys))
        for _, variable in nnx.to_flat_state(nnx.state(self.sharded)):
            variable.set_metadata(out_sharding=P(axis_name))

    def __call__(
        self, *args: Any, in_specs: Any = None, out_specs: Any = None, **kwargs: Any
    ) -> Any:
        """Calls the copy of device r with its blocks of args, and with kwargs as they are.

        args: pytrees of arrays. in_specs: one entry per argument; None: as their types say.
        out_specs: how the outputs of the copies make global arrays. (Inside a shard_map over the
        axis neither is read: args and outputs are blocks already.) Variables that the module
        changes, such as statistics or the counts of a random stream, change in every copy.
        """
        axis_name = self.model_axis_name
        definition, state = nnx.split(self.sharded)
        body: Callable[..., Any] = partial(
            _run_copy,
            definition=definition,
            call=kwargs,
            axis_name=axis_name,
            keep=self.mask_except_model_idx,
        )
        if not _is_manual(axis_name):
            if out_specs is None:
                raise ValueError(
                    "ModelParallelismWrapper on global arrays cannot tell how the outputs of its "
                    f"copies lie; pass out_specs, e.g. P(None, {axis_name!r}) for blocks of columns"
                )
            if in_specs is None:
                in_specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, args)
            copies = P(axis_name)
            body = jax.shard_map(body, in_specs=(copies, *in_specs), out_specs=(out_specs, copies))
        outputs, changed = body(state, *args)
        if jax.tree.leaves(changed):
            nnx.update(self.sharded, changed)
        return outputs


def _build_copy(
    keys: Mapping[str, jax.Array],
    *,
    module_fn: Callable[..., nnx.Module],
    axis_name: str,
    split_rngs: bool,
    keep: int | None,
) -> tuple[Any, Any]:
    """This device's copy: its definition, and its state with a leading dim of one."""
    if split_rngs:
        index = lax.axis_index(axis_name)
        keys = {name: jax.random.fold_in(key, index) for name, key in keys.items()}
    definition, state = nnx.split(module_fn(rngs=nnx.Rngs(**keys)))
    state = _mask(state, axis_name, keep)
    return definition, jax.tree.map(lambda leaf: leaf[None], state)


def _run_copy(
    state: Any,
    *args: Any,
    definition: Any,
    call: Mapping[str, Any],
    axis_name: str,
    keep: int | None,
) -> tuple[Any, Any]:
    """The outputs of this device's copy, and the variables that it has changed."""
    state = _mask(jax.tree.map(lambda leaf: leaf[0], state), axis_name, keep)
    before = {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}
    module = nnx.merge(definition, state)
    outputs = module(*args, **call)
    after = nnx.to_flat_state(nnx.state(module))
    changed = [(path, v) for path, v in after if v.get_value() is not before.get(path)]
    return outputs, jax.tree.map(lambda leaf: leaf[None], nnx.from_flat_state(changed))


def _mask(state: Any, axis_name: str, keep: int | None) -> Any:
    """Parameters become zero on every device but one; so do their derivatives."""
    if keep is None:
        return state
    kept = lax.axis_index(axis_name) == keep

    def mask(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, nnx.Param):
            return variable
        return jax.tree.map(lambda leaf: jnp.where(kept, leaf, jnp.zeros_like(leaf)), variable)

    return jax.tree.map(mask, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
