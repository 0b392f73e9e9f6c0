"""Split dense layers equal numpy on rings of any size, from the same parameters on all of them."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_layers import BITS, SPLIT, WHOLE, D, F, arrays, close, draw, grid, merged, place, pull
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from parallel.linear.config import TensorParallelConfig
from parallel.linear.tensor_parallel import TPAsyncDense, TPDense, scale_init

SIZES = (1, 2, 3, 4, 8)
# Every way to communicate: class, mode and directions.
VARIANTS = {
    "gather": (TPDense, "gather", {}),
    "gather-ring": (TPAsyncDense, "gather", {"use_bidirectional_gather": False}),
    "gather-bidirectional": (TPAsyncDense, "gather", {}),
    "scatter": (TPDense, "scatter", {}),
    "scatter-ring": (TPAsyncDense, "scatter", {}),
    "scatter-split": (TPAsyncDense, "scatter", {"use_bidirectional_scatter": True}),
}


def dense(name: str, features: tuple[int, int] = (D, F), seed: int = 0, **fields):
    """Build a variant with a nonzero bias; without a mesh in context, an ordinary layer."""
    cls, mode, directions = VARIANTS[name]
    layer = partial(nnx.Linear, *features, bias_init=BITS)
    fields = {"kernel_init": BITS, **directions, **fields}
    return cls(layer, "tp", mode, **fields, rngs=nnx.Rngs(seed))


def check(function, state, *, x_spec: P = SPLIT, y_spec: P = SPLIT, seed: int = 0) -> None:
    """Check values and gradients of a dense layer against numpy."""
    params = arrays(state)
    kernel, bias = params["module.kernel"], params.get("module.bias")
    x, c = draw((4, 3, kernel.shape[0]), (4, 3, kernel.shape[1]), seed=seed)
    y, grads, dx = pull(function, state, place(x, x_spec), c, y_spec)
    assert jax.typeof(y).sharding.spec == y_spec
    close(y, x @ kernel + (0 if bias is None else bias))
    close(dx, c @ kernel.T)
    close(grads["module.kernel"], np.einsum("bld,blf->df", x, c))
    if bias is not None:
        close(grads["module.bias"], c.sum((0, 1)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_split_dense_equals_matmul_on_every_ring(name: str, size: int) -> None:
    with jax.set_mesh(grid(size)):
        definition, state = nnx.split(dense(name, use_bias=size % 2 == 0))
        check(partial(merged, definition), state)


@pytest.mark.parametrize("inside", [False, True], ids=["global", "inside"])
@pytest.mark.parametrize("name", VARIANTS)
def test_batch_and_kernels_may_be_sharded_over_other_axes(name: str, inside: bool) -> None:
    devices, split = np.array(jax.devices()).reshape(2, 2, 2), P(("dp", "fsdp"), None, "tp")
    with jax.set_mesh(Mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Explicit,) * 3)):
        definition, state = nnx.split(dense(name))
        assert "fsdp" in state["module"]["kernel"][...].sharding.spec
        call = partial(merged, definition)
        if inside:
            specs = nnx.get_partition_spec(state), split
            call = jax.shard_map(call, in_specs=specs, out_specs=split)
        check(call, state, x_spec=split, y_spec=split)


@pytest.mark.parametrize("inside", [False, True], ids=["global", "inside"])
def test_rows_may_be_on_the_axis(inside: bool) -> None:
    rows = P("dp", "tp", None)
    with jax.set_mesh(grid(3, dp=2)):
        for names in (("gather", "scatter"), ("gather-ring", "scatter-ring")):
            layers = nnx.List([dense(names[0]), dense(names[1], (F, D))])
            definition, state = nnx.split(layers)

            def call(state, x, definition=definition):
                up, down = nnx.merge(definition, state)
                return down(up(x), rows)

            if inside:
                specs = nnx.get_partition_spec(state), rows
                call = jax.shard_map(call, in_specs=specs, out_specs=rows)
            x, c = draw((4, 3, D), (4, 3, D))
            y, _, dx = pull(call, state, place(x, rows), c, rows)
            up, down = (arrays(nnx.state(layer.module)) for layer in layers)
            close(y, (x @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"])
            close(dx, c @ down["kernel"].T @ up["kernel"].T)


def test_parameters_are_bit_equal_in_every_class_mode_direction_and_ring_size() -> None:
    want = arrays(nnx.state(nnx.Linear(D, F, kernel_init=BITS, bias_init=BITS, rngs=nnx.Rngs(0))))
    for name, size in itertools.product(VARIANTS, SIZES):
        with jax.set_mesh(grid(size)):
            eager = nnx.state(dense(name))
            got = {"eager": eager}
            if size in (3, 8):
                got["jit"] = jax.jit(lambda name=name: nnx.state(dense(name)))()
        for how, state in got.items():
            params = arrays(state)
            assert set(params) == {"module.kernel", "module.bias"}, (name, size, how)
            for path, value in want.items():
                np.testing.assert_array_equal(params[f"module.{path}"], value)
            gathers = name.startswith("gather")
            spec = P(None, "tp") if gathers else P("tp", None)
            assert state["module"]["kernel"][...].sharding.spec == spec
            assert state["module"]["bias"][...].sharding.spec == (P("tp") if gathers else P(None))


@pytest.mark.parametrize("size", SIZES)
def test_gather_without_communication_takes_the_whole_input(size: int) -> None:
    with jax.set_mesh(grid(size)):
        definition, state = nnx.split(dense("gather", (5, F), skip_communication=True))
        check(partial(merged, definition), state, x_spec=WHOLE)


@pytest.mark.parametrize("size", SIZES)
def test_scatter_without_communication_has_an_unreduced_type(size: int) -> None:
    with jax.set_mesh(grid(size)):
        definition, state = nnx.split(dense("scatter", skip_communication=True))

        def summed(state, x, spec):
            y = nnx.merge(definition, state)(x)
            unreduced = P("dp", None, None, unreduced={"tp"}) if size > 1 else SPLIT
            assert jax.typeof(y).sharding.spec == unreduced
            return jax.sharding.reshard(y, spec)

        for spec in (SPLIT, WHOLE):
            check(partial(summed, spec=spec), state, y_spec=spec)


def test_partial_sums_inside_a_shard_map_carry_the_bias_once() -> None:
    with jax.set_mesh(grid(4, dp=2)):
        definition, state = nnx.split(dense("scatter", skip_communication=True))

        def body(state, x):
            y = nnx.merge(definition, state)(x)
            assert y.shape[-1] == F
            assert jax.typeof(y).manual_axis_type.varying == {"dp", "tp"}
            return lax.psum_scatter(y, "tp", scatter_dimension=2, tiled=True)

        specs = (nnx.get_partition_spec(state), SPLIT)
        check(jax.shard_map(body, in_specs=specs, out_specs=SPLIT), state)


def test_mode_none_is_the_layer_itself_and_ignores_the_adjustment() -> None:
    want = nnx.Linear(D, F, kernel_init=BITS, rngs=nnx.Rngs(0)).kernel[...]
    for cls in (TPDense, TPAsyncDense):
        with jax.set_mesh(grid(4, dp=2)):
            fields = {"kernel_init": BITS, "kernel_init_adjustment": 0.5}
            layer = cls(partial(nnx.Linear, D, F), "tp", **fields, rngs=nnx.Rngs(0))
            np.testing.assert_array_equal(layer.module.kernel[...], want)
            definition, state = nnx.split(layer)
            check(partial(merged, definition), state, x_spec=WHOLE, y_spec=WHOLE)


def test_the_adjustment_depends_on_the_mode_and_not_on_the_ring_size() -> None:
    want = np.asarray(nnx.Linear(D, F, kernel_init=BITS, rngs=nnx.Rngs(0)).kernel[...]) * 0.5
    for size in (1, 4):
        with jax.set_mesh(grid(size)):
            layer = dense("gather-ring", kernel_init_adjustment=0.5)
            np.testing.assert_array_equal(layer.module.kernel[...], want)


def test_without_a_mesh_it_is_an_ordinary_layer() -> None:
    (x,) = draw((2, 3, D))
    for name in VARIANTS:
        layer = dense(name, dense_name="proj")
        close(layer(x), x @ np.asarray(layer.proj.kernel[...]) + np.asarray(layer.proj.bias[...]))


def test_an_axis_of_one_device_takes_any_layout_of_features() -> None:
    (x,) = draw((4, 3, D))
    with jax.set_mesh(grid(1, dp=4)):
        for name, spec in itertools.product(VARIANTS, (SPLIT, WHOLE)):
            layer = dense(name)
            params = arrays(nnx.state(layer.module))
            close(jax.jit(layer)(place(x, spec)), x @ params["kernel"] + params["bias"])


def test_the_async_layer_hops_and_the_plain_one_does_not() -> None:
    # Hops in all, and how many ways they go.
    hops = {
        "gather-ring": (3, 1),
        "gather-bidirectional": (3, 2),
        "scatter-ring": (3, 1),
        "scatter-split": (6, 2),
    }
    with jax.set_mesh(grid(4)):
        for name in VARIANTS:
            text = str(jax.make_jaxpr(dense(name))(place(*draw((2, 1, D)), SPLIT)))
            ways = {line.strip() for line in text.splitlines() if "perm=(" in line}
            assert (text.count("ppermute["), len(ways)) == hops.get(name, (0, 0)), (name, ways)
            plain = text.count("all_gather[") + text.count("reduce_scatter[")
            assert plain == (0 if name in hops else 1), name


def test_dtype_and_precision_are_those_of_the_layer() -> None:
    layer = partial(nnx.Linear, D, F, dtype=jnp.bfloat16, precision=lax.Precision.HIGHEST)
    with jax.set_mesh(grid(4)):
        x = place(*draw((2, 1, D)), SPLIT)
        for cls, mode in itertools.product((TPDense, TPAsyncDense), ("gather", "scatter")):
            module = cls(layer, "tp", mode, rngs=nnx.Rngs(0))
            assert module.module.kernel[...].dtype == jnp.float32
            text = str(jax.make_jaxpr(module)(x))
            assert jax.eval_shape(module, x).dtype == jnp.bfloat16
            assert "all_gather" not in text or "bf16[2,1,24]" in text
            assert text.count("precision=(Precision.HIGHEST") == text.count("dot_general[") > 0


def test_scale_init_scales_and_passes_keywords_on() -> None:
    with jax.set_mesh(grid(4)):
        init = scale_init(nnx.initializers.normal(1.0), 0.5)
        key = jax.random.key(3)
        split = init(key, (8, 4), jnp.float32, out_sharding=P("tp", None))
        assert split.sharding.spec == P("tp", None)
        want = 0.5 * np.asarray(nnx.initializers.normal(1.0)(key, (8, 4), jnp.float32))
        np.testing.assert_allclose(split, want, rtol=1e-6)
        half = scale_init(nnx.initializers.ones, np.float64(0.5))(key, (2,), jnp.bfloat16)
        assert half.dtype == jnp.bfloat16 and np.asarray(half, np.float32).tolist() == [0.5, 0.5]


def test_abstract_parameters_carry_their_layout() -> None:
    with jax.set_mesh(grid(4)):
        state = jax.eval_shape(lambda: nnx.state(dense("gather")))
    assert nnx.to_pure_dict(state)["module"]["kernel"].sharding.spec == P(None, "tp")


def test_wrong_fields_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="dense_name='tp_mode' is an attribute already"):
        dense("gather", dense_name="tp_mode")
    with jax.set_mesh(grid(4)):
        with pytest.raises(ValueError, match=r"kernel \(6, 48\): dim 0 = 6 is not divisible by tp"):
            dense("scatter", (6, F))
        with pytest.raises(ValueError, match=r"dim 1 = 9 is not .* tp = 4; change this size"):
            dense("gather", (D, 9))
        x = place(*draw((2, 1, D)), SPLIT)
        with pytest.raises(ValueError, match="divisible"):
            dense("scatter", (D, 9))(x)
        with pytest.raises(ValueError, match="use an even size there"):
            dense("scatter-split", (D, 12))(x)
        for name in ("gather", "gather-ring", "scatter"):
            skips = {"skip_communication": True} if name == "scatter" else {}
            with pytest.raises(ValueError, match="out_spec is for tp_mode='scatter' with communic"):
                dense(name, **skips)(x, P())
        with pytest.raises(ValueError, match=r"'ring' is not an axis of the mesh.*use one of dp"):
            TPDense(partial(nnx.Linear, D, F), "ring", rngs=nnx.Rngs(0))


class Plain(nnx.Module):
    """A module with a kernel of its own, as a user would write it."""

    def __init__(self, rows, columns, *, kernel_init, use_bias, rngs, bias_init=BITS, work=None):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (rows, columns), jnp.float32))
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (columns,), jnp.float32))
        self.work = work or (lambda y: y)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum("...i,io->...o", x, self.kernel.astype(x.dtype), precision="highest")
        return self.work(y + self.bias.astype(y.dtype) if hasattr(self, "bias") else y)


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_dense_layer_may_be_any_module_with_a_kernel(use_bias) -> None:
    with jax.set_mesh(grid(4, dp=2)):
        x = place(*draw((4, 3, D)), SPLIT)
        for cls, mode in itertools.product((TPDense, TPAsyncDense), ("gather", "scatter")):
            options = {"kernel_init": BITS, "use_bias": use_bias}
            own = cls(partial(Plain, D, F), "tp", mode, **options, rngs=nnx.Rngs(0))
            check(partial(merged, nnx.graphdef(own)), nnx.state(own))
            twin = cls(partial(nnx.Linear, D, F), "tp", mode, **options, rngs=nnx.Rngs(0))
            np.testing.assert_array_equal(own.module.kernel[...], twin.module.kernel[...])
            text = str(jax.make_jaxpr(own)(x.astype(jnp.bfloat16)))
            assert "bf16" in text and text.count("Precision.HIGHEST") and "f32[4,3" not in text


@pytest.mark.parametrize("mode", ["gather", "scatter", "none"])
def test_a_linen_module_is_refused_with_the_remedy(mode) -> None:
    message = r"dense_fn builds a flax.linen Dense.*use an nnx module with a kernel, e.g. functools"
    for layer in (linen.Dense, partial(linen.Dense, F), lambda **_: linen.Dense(F)):
        with pytest.raises(ValueError, match=message):
            TPDense(layer, "tp", mode, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["gather-bidirectional", "scatter-split"])
@pytest.mark.costly
def test_the_mesh_of_a_config_is_enough(name) -> None:
    config = TensorParallelConfig(grid(4, dp=2))
    layer = dense(name, parallel_config=config)
    params = arrays(nnx.state(layer.module))
    (x,), kernel, bias = draw((4, 3, D)), params["kernel"], params["bias"]
    placed = jax.device_put(x, jax.NamedSharding(config.mesh, SPLIT))
    for y in (layer(placed), jax.jit(lambda layer, x: layer(x))(layer, placed)):
        assert jax.typeof(y).sharding.spec == SPLIT
        close(y, x @ kernel + bias)
    if name.startswith("gather"):
        close(layer(x), x @ kernel + bias)


def test_layers_with_other_arithmetic_are_refused_when_split() -> None:
    short = {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}
    others = (
        partial(nnx.LoRALinear, D, F, lora_rank=2),
        partial(nnx.Linear, D, F, **short),
        *(partial(Plain, D, F, work=work) for work in (jnp.tanh, lambda y: y + y, lambda y: 2 * y)),
    )
    for layer in others:
        for cls in (TPDense, TPAsyncDense):
            with pytest.raises(ValueError, match="may compute something else than x @ kernel"):
                cls(layer, "tp", "gather", rngs=nnx.Rngs(0))
            assert cls(layer, "tp", rngs=nnx.Rngs(0))(jnp.ones((2, D))).shape == (2, F)


def test_wrong_layouts_are_refused() -> None:
    (x,) = draw((4, 4, D))
    with jax.set_mesh(grid(4, dp=2)):
        for options in ({}, {"skip_communication": True}):
            with pytest.raises(ValueError, match="needs the features of its input on tp, got P"):
                dense("scatter", **options)(place(x, WHOLE))
        gathered = dense("gather", skip_communication=True)
        for spec in (SPLIT, P("dp", "tp", None)):
            with pytest.raises(ValueError, match="wants its input whole over 'tp'"):
                gathered(place(x, spec))
        with pytest.raises(ValueError, match="mode 'none' wants its features whole over 'tp'"):
            TPDense(partial(nnx.Linear, D, F), "tp", rngs=nnx.Rngs(0))(place(x, SPLIT))
        for name in ("gather", "scatter"):
            definition, state = nnx.split(dense(name))
            body = partial(merged, definition)
            state = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), state)
            island = jax.shard_map(body, in_specs=(P(), SPLIT), out_specs=SPLIT)
            with pytest.raises(ValueError, match=r"wants inputs .* 6\) and the kernel's block"):
                island(state, place(x, SPLIT))


@pytest.mark.parametrize("manual", ["dp", "tp"])
def test_a_shard_map_over_some_axes_is_refused(manual: str) -> None:
    with jax.set_mesh(grid(4, dp=2)):
        definition, state = nnx.split(dense("gather"))
        state = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), state)
        body = partial(merged, definition)
        island = jax.shard_map(body, in_specs=P(), out_specs=P(), axis_names={manual})
        with pytest.raises(ValueError, match=f"a shard_map over {manual} alone leaves .* explicit"):
            island(state, jnp.ones((1, D)))
