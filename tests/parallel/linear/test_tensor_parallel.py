"""Split dense layers equal numpy on rings of any size, from the same parameters on all of them."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from parallel.linear.model_parallelism import ModelParallelismWrapper
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
# Bit for bit the same in blocks of any shape: no transcendental function, no rounding.
BITS = nnx.initializers.uniform(1.0)
D, F = 24, 48
WHOLE, SPLIT = P("dp", None, None), P("dp", None, "tp")


def grid(tp: int, dp: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
    return Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)


def dense(name: str, features: tuple[int, int] = (D, F), seed: int = 0, **fields):
    """Build a variant with a nonzero bias; without a mesh in context, an ordinary layer."""
    cls, mode, directions = VARIANTS[name]
    layer = partial(nnx.Linear, *features, bias_init=BITS)
    fields = {"kernel_init": BITS, **directions, **fields}
    return cls(layer, "tp", mode, **fields, rngs=nnx.Rngs(seed))


def place(array: np.ndarray, spec: P) -> jax.Array:
    return jax.device_put(array, jax.NamedSharding(jax.sharding.get_mesh(), spec))


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def merged(definition, *states_and_input):
    *states, x = states_and_input
    return nnx.merge(definition, *states)(x)


def close(got, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-5)


def arrays(state) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(state)
    return {".".join(path): np.asarray(v[...]) for path, v in flat if "rngs" not in path}


def pull(function, state, x: jax.Array, cotangent: np.ndarray, spec: P):
    """Return output and gradients of state and x, in one compilation."""

    @jax.jit
    def run(state, x, cotangent):
        y, vjp = jax.vjp(function, state, x)
        return y, vjp(cotangent)

    y, (dstate, dx) = run(state, x, place(cotangent, spec))
    return y, arrays(dstate), dx


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
        definition, state = nnx.split(dense(name))
        check(partial(merged, definition), state)


@settings(deadline=None, max_examples=10, derandomize=True)
@given(
    name=st.sampled_from(sorted(VARIANTS)),
    size=st.sampled_from(SIZES),
    features=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    use_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_dense_layers_take_every_width_that_divides(name, size, features, use_bias, seed) -> None:
    even = 2 if name == "scatter-split" else 1
    widths = features[0] * size, features[1] * size * even
    with jax.set_mesh(grid(size)):
        definition, state = nnx.split(dense(name, widths, seed, use_bias=use_bias))
        check(partial(merged, definition), state, seed=seed)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_batch_may_be_sharded_over_another_axis(name: str) -> None:
    with jax.set_mesh(grid(4, dp=2)):
        definition, state = nnx.split(dense(name))
        check(partial(merged, definition), state)


@pytest.mark.parametrize("name", VARIANTS)
def test_dense_layers_inside_a_shard_map_compute_on_blocks(name: str) -> None:
    with jax.set_mesh(grid(4, dp=2)):
        definition, state = nnx.split(dense(name))
        body = partial(merged, definition)
        specs = nnx.get_partition_spec(state), SPLIT
        check(jax.shard_map(body, in_specs=specs, out_specs=SPLIT), state)


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
            spec = {"gather": P(None, "tp"), "scatter": P("tp", None)}[name.split("-")[0]]
            assert state["module"]["kernel"][...].sharding.spec == spec
            assert state["module"]["bias"][...].sharding.spec == P("tp")


def test_state_is_interchangeable_between_the_classes() -> None:
    with jax.set_mesh(grid(8)):
        x = place(*draw((2, 1, D)), P(None, None, "tp"))
        for mode in ("gather", "scatter"):
            plain, other = dense(mode, seed=1), dense(f"{mode}-ring", seed=2)
            nnx.update(other, nnx.state(plain))
            close(jax.jit(other)(x), np.asarray(jax.jit(plain)(x)))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bias_is_added_once(name: str) -> None:
    with jax.set_mesh(grid(8)):
        layer = dense(name, kernel_init=nnx.initializers.zeros)
        bias = np.asarray(layer.module.bias[...])
        y = jax.jit(layer)(place(*draw((2, 3, D)), P(None, None, "tp")))
        np.testing.assert_array_equal(np.asarray(y), np.broadcast_to(bias, (2, 3, F)))


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


def test_fields_have_the_documented_names_order_and_defaults() -> None:
    want = {
        TPDense: "dense_fn model_axis_name tp_mode=none skip_communication=False kernel_init "
        "kernel_init_adjustment=1.0 use_bias=True dense_name=module",
        TPAsyncDense: "dense_fn model_axis_name tp_mode=none kernel_init "
        "kernel_init_adjustment=1.0 use_bias=True dense_name=module "
        "use_bidirectional_gather=True use_bidirectional_scatter=False",
        ModelParallelismWrapper: "model_axis_name module_fn mask_except_model_idx=None "
        "split_rngs=True module_kwargs={}",
    }
    for cls, text in want.items():
        fields = dataclasses.fields(cls)
        names = [part.split("=") for part in text.split()]
        assert [field.name for field in fields] == [name[0] for name in names]
        for field, (_, *default) in zip(fields, names, strict=True):
            if default and field.name == "module_kwargs":
                assert dict(field.default) == {}
            elif default:
                assert str(field.default) == default[0]


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


class Counting(nnx.Module):
    """A linear with dropout and a counter: parameters, a random stream and a statistic."""

    def __init__(self, features: int, *, rate: float = 0.0, rngs: nnx.Rngs):
        self.linear = nnx.Linear(D, features, kernel_init=BITS, bias_init=BITS, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.calls = nnx.Variable(jnp.ones((), jnp.int32))

    def __call__(self, x: jax.Array, *, count: bool = False) -> jax.Array:
        if count:
            self.calls[...] += 1
        return self.dropout(self.linear(x))


def copies(**options) -> ModelParallelismWrapper:
    kwargs = {"features": 6, "rate": options.pop("rate", 0.0)}
    rngs = nnx.Rngs(params=0, dropout=1)
    return ModelParallelismWrapper("tp", Counting, module_kwargs=kwargs, **options, rngs=rngs)


@pytest.mark.parametrize("inside", [False, True], ids=["global", "inside"])
@pytest.mark.parametrize("keep", [None, 0, 2])
@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_copies_equal_their_blocks_in_numpy(size: int, keep: int | None, inside: bool) -> None:
    if keep is not None and keep >= size:
        keep = size - 1
    with jax.set_mesh(grid(size)):
        definition, params, rest = nnx.split(copies(mask_except_model_idx=keep), nnx.Param, ...)
        values = arrays(params)
        kernel, bias = values["sharded.linear.kernel"], values["sharded.linear.bias"]
        assert kernel.shape == (size, D, 6)
        assert params["sharded"]["linear"]["bias"][...].sharding.spec == P("tp", None)

        def whole(params, x):
            return nnx.merge(definition, params, rest, copy=True)(x, out_specs=SPLIT)

        def blocks(params, x):
            body = partial(merged, definition)
            specs = nnx.get_partition_spec(params), nnx.get_partition_spec(rest), WHOLE
            return jax.shard_map(body, in_specs=specs, out_specs=SPLIT)(params, rest, x)

        x, c = draw((4, 3, D), (4, 3, size * 6))
        y, grads, dx = pull(blocks if inside else whole, params, place(x, WHOLE), c, SPLIT)
    kept = np.array([keep in (None, i) for i in range(size)])
    np.testing.assert_array_equal(arrays(rest)["sharded.calls"], [1] * size)
    assert not kernel[~kept].any() and not bias[~kept].any()
    assert all(kernel[i].any() for i in np.flatnonzero(kept))
    c_BLnF = c.reshape(4, 3, size, 6) * kept[:, None]
    close(y, (np.einsum("bld,ndf->blnf", x, kernel) + bias).reshape(c.shape))
    close(dx, np.einsum("blnf,ndf->bld", c_BLnF, kernel))
    close(grads["sharded.linear.kernel"], np.einsum("bld,blnf->ndf", x, c_BLnF))
    close(grads["sharded.linear.bias"], c_BLnF.sum((0, 1)))


def test_copy_i_depends_on_i_and_not_on_their_number() -> None:
    kernels = {}
    for size in SIZES:
        with jax.set_mesh(grid(size)):
            kernels[size] = np.asarray(copies().sharded.linear.kernel[...])
    for size in SIZES:
        np.testing.assert_array_equal(kernels[size], kernels[8][:size])
    assert len({kernel.tobytes() for kernel in kernels[8]}) == 8
    key = jax.random.fold_in(nnx.Rngs(params=0).params(), 5)
    alone = Counting(6, rngs=nnx.Rngs(params=key, dropout=0))
    np.testing.assert_array_equal(kernels[8][5], alone.linear.kernel[...])


def test_without_split_rngs_all_copies_start_equal() -> None:
    with jax.set_mesh(grid(4)):
        kernel = np.asarray(copies(split_rngs=False).sharded.linear.kernel[...])
    np.testing.assert_array_equal(kernel, np.broadcast_to(kernel[:1], kernel.shape))


def test_random_streams_and_statistics_of_copies_advance() -> None:
    with jax.set_mesh(grid(4, dp=2)):
        wrapper = copies(rate=0.5)
        x = place(np.ones((1, 1, D), np.float32), P())

        @nnx.jit
        def run(wrapper, x):
            return wrapper(x, out_specs=P(None, None, "tp"), count=True)

        first, second = np.asarray(run(wrapper, x)), np.asarray(run(wrapper, x))
        assert ((first == 0) != (second == 0)).any()
        dropped = (first == 0).reshape(4, 6)
        assert len({row.tobytes() for row in dropped}) > 1
        np.testing.assert_array_equal(wrapper.sharded.calls[...], [3] * 4)
        assert wrapper.sharded.calls[...].sharding.spec == P("tp")


def test_copies_take_blocks_by_in_specs() -> None:
    with jax.set_mesh(grid(4)):
        wrapper = copies()
        x = place(*draw((8, 1, D)), P("tp", None, None))
        y = jax.jit(lambda x: wrapper(x, out_specs=P("tp")))(x)
        same = jax.jit(lambda x: wrapper(x, in_specs=(P("tp"),), out_specs=P("tp")))(x)
        np.testing.assert_array_equal(y, same)
        params = arrays(nnx.state(wrapper.sharded.linear))
        x = np.asarray(x).reshape(4, 2, D)
        want = np.einsum("nrd,ndf->nrf", x, params["kernel"]) + params["bias"][:, None]
        close(y, want.reshape(8, 1, 6))


def test_abstract_parameters_carry_their_layout() -> None:
    with jax.set_mesh(grid(4)):
        tree = jax.eval_shape(lambda: (nnx.state(dense("gather")), nnx.state(copies())))
    one, stacked = (nnx.to_pure_dict(state) for state in tree)
    assert one["module"]["kernel"].sharding.spec == P(None, "tp")
    assert stacked["sharded"]["linear"]["kernel"].sharding.spec == P("tp", None, None)


def test_wrong_fields_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown Tensor Parallel mode: 'row'; use scatter, gath"):
        TPDense(partial(nnx.Linear, D, F), "tp", "row", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dense_name='tp_mode' is an attribute already"):
        dense("gather", dense_name="tp_mode")
    with jax.set_mesh(grid(4)):
        for name in ("gather", "scatter"):
            with pytest.raises(
                ValueError, match=r"in_features=6 is not .* tp=4; use tp=1 or 2 or 3,"
            ):
                dense(name, (6, F))
            with pytest.raises(ValueError, match=r"out_features=9 is not divisible by tp=4"):
                dense(name, (D, 9))
        with pytest.raises(ValueError, match=r"out_features=12 .* use_bidirectional_scatter=False"):
            dense("scatter-split", (D, 12))
        with pytest.raises(ValueError, match=r"'ring' is not an axis of the mesh.*use one of dp"):
            TPDense(partial(nnx.Linear, D, F), "ring", rngs=nnx.Rngs(0))


def test_layers_with_other_arithmetic_are_refused_when_split() -> None:
    others = (
        partial(nnx.LoRALinear, D, F, lora_rank=2),
        partial(nnx.Linear, D, F, preferred_element_type=jnp.float32),
    )
    for layer in others:
        for cls in (TPDense, TPAsyncDense):
            with pytest.raises(ValueError, match="may compute something else than x @ kernel"):
                cls(layer, "tp", "gather", rngs=nnx.Rngs(0))
            assert cls(layer, "tp", rngs=nnx.Rngs(0))(np.ones((2, D))).shape == (2, F)


def test_wrong_layouts_are_refused() -> None:
    (x,) = draw((4, 4, D))
    with jax.set_mesh(grid(4, dp=2)):
        for name in ("gather", "scatter"):
            with pytest.raises(ValueError, match="wants its features on 'tp', got float32"):
                dense(name)(place(x, WHOLE))
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
            with pytest.raises(ValueError, match=r"wants inputs \(..., 6\) and the kernel's block"):
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


def test_wrong_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="built without a mesh in context"):
        copies()
    with jax.set_mesh(grid(4)):
        for index in (-1, 4):
            with pytest.raises(ValueError, match=f"idx={index} is no index on tp=4; use 0 to 3"):
                copies(mask_except_model_idx=index)
        with pytest.raises(ValueError, match="pass out_specs"):
            copies()(np.ones((1, D), np.float32))
        inner = partial(TPDense, partial(nnx.Linear, D, F), "tp", "gather")
        with pytest.raises(ValueError, match="TPDense is built inside a shard_map or ModelPar"):
            ModelParallelismWrapper("tp", inner, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="ModelParallelismWrapper is built inside a shard_map"):
            ModelParallelismWrapper("tp", lambda rngs: copies(), rngs=nnx.Rngs(0))
