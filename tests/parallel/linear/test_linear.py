"""Linears and chains of them equal plain matmuls for every layout, mesh and overlap."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rings import primitives

from parallel.linear.chain import chain
from parallel.linear.linear import (
    ColumnParallelLinear,
    Linear,
    MatrixMultiplyMethod,
    ParallelLinear,
    RowParallelLinear,
    TensorParallelConfig,
    get_output_partition_spec,
    get_sharding,
)
from parallel.sharding.axes import (
    BATCH,
    LENGTH,
    MLP_INTERMEDIATE,
    QUERY_LENGTH,
    ResidualSharding,
    RowWise,
)

LAYOUTS = ("hidden", "sequence", "replicated")
RINGS = ("ring", "bidirectional", "split")
HIDDEN = [BATCH, QUERY_LENGTH, MLP_INTERMEDIATE]
B, L, D, F = 8, 16, 16, 32
GATE_UP = {"gate": F, "up": F}
# Every layout with the plain twin, every ring on the largest axis, and each ring on other meshes.
CASES = [
    *((mesh, y, "none") for mesh in ("tp8", "dp2-fsdp2-tp2", "tp4-sp2") for y in LAYOUTS),
    *(("tp8", layout, overlap) for layout in ("hidden", "sequence") for overlap in RINGS),
    ("dp2-fsdp2-tp2", "hidden", "ring"),
    ("dp2-fsdp2-tp2", "sequence", "bidirectional"),
    ("dp2-fsdp2-tp2", "sequence", "split"),
    ("tp4-sp2", "sequence", "ring"),
    ("tp4-sp2", "hidden", "bidirectional"),
    ("tp4-sp2", "hidden", "split"),
    ("tp4-sp2", "replicated", "ring"),
]


def rngs() -> nnx.Rngs:
    return nnx.Rngs(params=jax.random.key(7))


def bias_init(key, shape, dtype, out_sharding=None):
    return nnx.initializers.normal(1.0)(key, shape, dtype, out_sharding=out_sharding)


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (B, L, D), "h": (B, L, F)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run(tp, axes, array, build, call, out_axes):
    """Output, gradient of the parameters and of the input, and the parameters, as numpy."""
    with jax.set_mesh(tp.mesh):
        definition, params = nnx.split(build(tp))
        x = jax.device_put(array, tp.manager.sharding(axes))

        def loss(params, x):
            y = call(nnx.merge(definition, params), x)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y)), y

        (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
        for leaf in jax.tree.leaves(y):
            assert leaf.sharding.spec == tp.manager.resolve(out_axes)
    return jax.tree.map(np.asarray, (y, grads, nnx.to_pure_dict(params)))


def assert_same_runs(got, want) -> None:
    """Outputs and gradients up to rounding, initial parameters to the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    jax.tree.map(np.testing.assert_array_equal, got[2], want[2])


def close(got, want) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def column(tp, out=GATE_UP, scale="fan_in", **options):
    options = {"parallel_config": tp, "bias_init": bias_init, "rngs": rngs(), **options}
    return ColumnParallelLinear(D, out, scale=scale, **options)


def row(tp, out=D, scale="fan_out", **options):
    options = {"parallel_config": tp, "bias_init": bias_init, "rngs": rngs(), **options}
    return RowParallelLinear(F, out, scale=scale, **options)


def to_residual(module, x):
    return module(x, module.parallel_config.manager.resolve(ResidualSharding))


@pytest.fixture(scope="module")
def column_on_one_device(arrays):
    want = run(
        tensor_parallel(ONE_DEVICE),
        ResidualSharding,
        arrays["x"],
        column,
        lambda m, x: m(x),
        HIDDEN,
    )
    y, _, params = want
    for name in ("gate", "up"):
        plain = arrays["x"] @ params["kernel"][name] * (D**-0.5) + params["bias"][name]
        close(y[name], plain)
    return want


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
def test_column_linear_equals_matmul(arrays, column_on_one_device, mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    got = run(tp, ResidualSharding, arrays["x"], column, lambda m, x: m(x), HIDDEN)
    assert_same_runs(got, column_on_one_device)


def pair_of_rows(tp):
    return row(tp, (D, 2 * D))


@pytest.fixture(scope="module")
def rows_on_one_device(arrays):
    tp = tensor_parallel(ONE_DEVICE)
    want = run(tp, HIDDEN, arrays["h"], pair_of_rows, to_residual, ResidualSharding)
    y, _, params = want
    for index in (0, 1):
        plain = arrays["h"] @ params["kernel"][str(index)] * ((3 * D) ** -0.5)
        close(y[index], plain + params["bias"][str(index)])
    return want


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
def test_row_linear_equals_matmul_and_adds_its_bias_once(
    arrays, rows_on_one_device, mesh, layout, overlap
) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    got = run(tp, HIDDEN, arrays["h"], pair_of_rows, to_residual, ResidualSharding)
    assert_same_runs(got, rows_on_one_device)


class Pair(nnx.Module):
    """Two linears with work between them."""

    def __init__(self, column, row, work):
        self.column, self.row, self.work = column, row, work

    def __call__(self, x):
        return chain(x, self.column, self.work, self.row)


def gated(gate, up):
    return jnp.tanh(gate) * up


def biased_pair(tp):
    return Pair(column(tp, scale=1.5), row(tp, scale=0.5), gated)


def scaled_pair(tp):
    return Pair(column(tp, F, 2.0, use_bias=False), row(tp, use_bias=False), jnp.tanh)


def plain_pair(tp):
    one = {"use_bias": False, "scale": 1.0}
    return Pair(column(tp, F, **one), row(tp, **one), jnp.tanh)


@pytest.fixture(scope="module")
def pairs_on_one_device(arrays):
    tp, x = tensor_parallel(ONE_DEVICE), arrays["x"]
    runs = {
        pair: run(tp, ResidualSharding, x, pair, Pair.__call__, ResidualSharding)
        for pair in (biased_pair, scaled_pair, plain_pair)
    }
    y, _, params = runs[biased_pair]
    first, last = params["column"], params["row"]
    gate, up = (1.5 * (x @ first["kernel"][k]) + first["bias"][k] for k in ("gate", "up"))
    close(y, 0.5 * (gated(gate, up) @ last["kernel"]) + last["bias"])
    for pair, first_scale, last_scale in ((scaled_pair, 2.0, D**-0.5), (plain_pair, 1.0, 1.0)):
        y, _, params = runs[pair]
        hidden = np.tanh(first_scale * (x @ params["column"]["kernel"]))
        close(y, last_scale * (hidden @ params["row"]["kernel"]))
    return runs


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
def test_a_chain_equals_its_two_linears(arrays, pairs_on_one_device, mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    for pair, want in pairs_on_one_device.items():
        if pair is biased_pair or (mesh, layout) == ("dp2-fsdp2-tp2", "sequence"):
            got = run(tp, ResidualSharding, arrays["x"], pair, Pair.__call__, ResidualSharding)
            assert_same_runs(got, want)


def chain_program(tp, x, **options):
    with jax.set_mesh(tp.mesh):
        pair = Pair(column(tp), row(tp, **options), gated)
        placed = jax.device_put(x, tp.manager.sharding(ResidualSharding))
        return primitives(pair, placed)


@pytest.mark.parametrize("overlap", RINGS)
def test_a_chain_where_rows_travel_is_one_ring(arrays, overlap) -> None:
    tp = tensor_parallel(MESHES["tp8"], "sequence", overlap)
    joined = chain_program(tp, arrays["x"])
    assert joined["ppermute"] and not joined["dynamic_update_slice"]
    other = tp.replace(overlap="bidirectional" if overlap == "ring" else "ring")
    apart = chain_program(tp, arrays["x"], parallel_config=other)
    assert apart["ppermute"] and apart["dynamic_update_slice"]
    for layout in ("hidden", "replicated"):
        moved = chain_program(tensor_parallel(MESHES["tp8"], layout, overlap), arrays["x"])
        assert moved["ppermute"] == (0 if layout == "replicated" else joined["ppermute"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_native_forward_equals_the_call(arrays, mesh, layout) -> None:
    split = tensor_parallel(MESHES[mesh], layout)
    with jax.set_mesh(split.mesh):
        modules = [column(split), column(split.replace(reduce_scatter_output=False)), row(split)]
        x = jax.device_put(arrays["x"], split.manager.sharding(ResidualSharding))
        h = jax.device_put(arrays["h"], split.manager.sharding(HIDDEN))
        inputs = [x, x, h]

        @jax.jit
        def both(modules, inputs):
            called = [module(y) for module, y in zip(modules, inputs, strict=True)]
            native = [m.native_forward(y) for m, y in zip(modules, inputs, strict=True)]
            return called, native

        called, native = both(modules, inputs)
    for got, want in zip(jax.tree.leaves(native), jax.tree.leaves(called), strict=True):
        assert got.sharding.spec == want.sharding.spec
        close(np.asarray(got), np.asarray(want))
    whole = split.manager.resolve([BATCH, QUERY_LENGTH, None])
    specs = [split.manager.resolve(HIDDEN), whole, whole]
    for outputs, spec in zip(called, specs, strict=True):
        assert {y.sharding.spec for y in jax.tree.leaves(outputs)} == {spec}


@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2"])
def test_native_forward_multiplies_with_a_tied_head(arrays, mesh) -> None:
    tp = tensor_parallel(MESHES[mesh])
    table = np.random.default_rng(1).normal(size=(F, D)).astype(np.float32)
    with jax.set_mesh(tp.mesh):
        x = jax.device_put(arrays["x"], tp.manager.sharding(ResidualSharding))
        placed = jax.device_put(table, tp.manager.sharding(RowWise))
        head = column(tp, F, use_bias=False)
        logits = jax.jit(lambda m, x, w: m.native_forward(x, w=w.T))(head, x, placed)
        assert logits.sharding.spec == tp.manager.resolve(HIDDEN)
    close(np.asarray(logits), arrays["x"] @ table.T * D**-0.5)


@pytest.mark.parametrize("overlap", ["none", "split"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "tp4-sp2"])
def test_all_gather_makes_a_linear_column_parallel(arrays, mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    gathers = tp.replace(matmul_method=MatrixMultiplyMethod.ALL_GATHER)
    with jax.set_mesh(tp.mesh):
        layer = ParallelLinear(D, F, parallel_config=gathers, bias_init=bias_init, rngs=rngs())
        twin = column(tp, F, scale=1.0)
        x = jax.device_put(arrays["x"], tp.manager.sharding(ResidualSharding))
        y, want = jax.jit(lambda layer, twin, x: (layer(x), twin(x)))(layer, twin, x)
        predicted = get_output_partition_spec(x, layer.kernel[...], "all_gather", "tp")
    assert layer.direction == "column"
    assert y.sharding.spec == predicted == tp.manager.resolve(HIDDEN)
    for name in ("kernel", "bias"):
        one, other = (getattr(module, name)[...] for module in (layer, twin))
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("reduce_output", [False, True])
@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "tp4-sp2"])
def test_reduce_scatter_makes_a_linear_row_parallel(arrays, mesh, overlap, reduce_output) -> None:
    tp = tensor_parallel(MESHES[mesh], "sequence", overlap).replace(
        matmul_method="reduce_scatter", reduce_output=reduce_output
    )
    with jax.set_mesh(tp.mesh):
        layer = ParallelLinear(F, D, parallel_config=tp, bias_init=bias_init, rngs=rngs())
        h = jax.device_put(arrays["h"], tp.manager.sharding(HIDDEN))
        y = jax.jit(lambda layer, h: layer(h))(layer, h)
        predicted = get_output_partition_spec(h, layer.kernel[...], "reduce_scatter", "tp")
        whole = tp.manager.resolve([BATCH, QUERY_LENGTH, None])
        assert layer.kernel[...].sharding == row(tp).kernel[...].sharding
    assert layer.direction == "row"
    assert y.sharding.spec == (whole if reduce_output else predicted) and predicted != whole
    close(np.asarray(y), arrays["h"] @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...]))


def test_kernels_and_biases_are_equal_for_every_direction_mesh_and_overlap() -> None:
    out = {"gate": F, "up": 2 * F}
    options = {"bias_init": bias_init, "rngs": rngs()}
    want = nnx.to_pure_dict(nnx.state(ParallelLinear(D, out, **options)))
    for mesh, overlap in (("tp8", "split"), ("dp2-fsdp2-tp2", "ring"), ("ep2-fsdp2-sp2", "none")):
        tp = tensor_parallel(MESHES[mesh], "hidden", overlap)
        with jax.set_mesh(tp.mesh):
            for linear in (ParallelLinear, ColumnParallelLinear, RowParallelLinear):
                options = {"bias_init": bias_init, "rngs": rngs(), "parallel_config": tp}
                got = nnx.to_pure_dict(nnx.state(linear(D, out, **options)))
                jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_chain_computes_in_its_linears_dtypes_and_precisions(arrays) -> None:
    for overlap in ("none", "ring"):
        tp = tensor_parallel(MESHES["tp8"], "sequence", overlap)
        with jax.set_mesh(tp.mesh):
            x = jax.device_put(arrays["x"], tp.manager.sharding(ResidualSharding))
            first = column(tp, dtype=jnp.bfloat16)
            for precision in (None, lax.Precision.HIGHEST):
                last = row(tp, dtype=jnp.float32, precision=precision)
                y = jax.eval_shape(lambda x, c=first, r=last: chain(x, c, gated, r), x)
                assert y.dtype == jnp.float32


def test_the_attributes_of_the_reference_are_public() -> None:
    layer = Linear(D, F, precision="highest", dtype=jnp.bfloat16, param_dtype=jnp.float16)
    assert Linear is ParallelLinear
    assert (layer.in_features, layer.out_features) == (D, F)
    assert layer.use_bias and layer.precision == "highest"
    assert layer.dtype == jnp.bfloat16 and layer.param_dtype == jnp.float16
    assert layer.kernel_init(jax.random.key(0), (2, 2)).shape == (2, 2)
    assert layer.bias_init is nnx.initializers.zeros
    assert layer.parallel_config is None and layer.distributed_matmul is None
    assert layer.kernel[...].shape == (D, F) and layer.kernel[...].dtype == jnp.float16
    assert layer.bias[...].shape == (F,) and not layer.bias[...].any()
    assert Linear(D, F, use_bias=False).bias is None
    assert layer(jnp.ones((2, D))).dtype == jnp.bfloat16


def test_no_rngs_start_from_seed_zero() -> None:
    default, seeded = ParallelLinear(D, F), ParallelLinear(D, F, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(default.kernel[...], seeded.kernel[...])


@pytest.mark.parametrize(
    ("scale", "factor"), [("fan_in", D**-0.5), ("fan_out", (F + 4) ** -0.5), (0.25, 0.25)]
)
def test_scale_multiplies_the_output_and_not_the_bias(arrays, scale, factor) -> None:
    layer = ParallelLinear(D, (F, 4), scale=scale, bias_init=bias_init, rngs=rngs())
    outputs = layer(arrays["x"])
    assert isinstance(outputs, tuple) and layer.out_features == (F, 4)
    for index, y in enumerate(outputs):
        kernel, bias = (np.asarray(p[str(index)][...]) for p in (layer.kernel, layer.bias))
        close(y, factor * (arrays["x"] @ kernel) + bias)


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="scale"):
        ParallelLinear(D, F, scale="fan")


def test_without_a_parallel_config_it_is_an_ordinary_linear(arrays) -> None:
    layer = Linear(D, F, scale="fan_in", use_bias=False, rngs=rngs())
    want = arrays["x"] @ np.asarray(layer.kernel[...]) * D**-0.5
    close(layer(arrays["x"]), want)
    other = np.full((D, 3), 2.0, np.float32)
    tied = layer.native_forward(arrays["x"], w=other)
    close(tied, arrays["x"] @ other * D**-0.5)


def test_a_chain_without_a_parallel_config_calls_its_linears(arrays) -> None:
    first, last = Linear(D, {"gate": F, "up": F}, rngs=rngs()), Linear(F, D, rngs=rngs())
    hidden = gated(*first(arrays["x"]).values())
    np.testing.assert_array_equal(chain(arrays["x"], first, gated, last), last(hidden))


def test_named_outputs_come_back_in_the_order_in_which_they_were_asked_for(arrays) -> None:
    named = ParallelLinear(D, {"b": F, "a": 4}, use_bias=False, rngs=rngs())(arrays["x"])
    assert list(named) == ["b", "a"] and named["b"].shape[-1] == F


def test_the_initial_kernel_depends_on_seed_and_name_only() -> None:
    apart = ColumnParallelLinear(D, {"up": F}, rngs=rngs()).kernel["up"][...]
    together = ColumnParallelLinear(D, {"gate": F, "up": F}, rngs=rngs()).kernel["up"][...]
    np.testing.assert_array_equal(apart, together)


def test_wrong_layouts_are_refused(arrays) -> None:
    tp = tensor_parallel(MESHES["tp8"], "sequence")
    with jax.set_mesh(tp.mesh):
        with pytest.raises(ValueError, match=r"RowParallelLinear kernel .* not divisible by tp"):
            RowParallelLinear(12, D, parallel_config=tp, rngs=rngs())
        h = jax.device_put(arrays["h"], tp.manager.sharding([BATCH, LENGTH, None]))
        with pytest.raises(
            ValueError, match="ColumnParallelLinear computes the input.*reduce_scatter_output=True"
        ):
            row(tp)(h)


@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chain_does_not_gather_between_its_linears(arrays, layout, overlap) -> None:
    tp = tensor_parallel(MESHES["tp4-sp2"], layout, overlap).replace(reduce_scatter_output=False)
    with jax.set_mesh(tp.mesh):
        x = jax.device_put(arrays["x"], tp.manager.sharding(ResidualSharding))
        y = jax.eval_shape(Pair(column(tp), row(tp), gated), x)
        assert y.sharding.spec == jax.typeof(x).sharding.spec


@pytest.mark.parametrize("spec", [P(None, None), P(None, "tp"), P("fsdp", None), P("tp", None)])
def test_rows_may_lie_on_any_axes_or_none(arrays, spec) -> None:
    tp, x = tensor_parallel(MESHES["dp2-fsdp2-tp2"], overlap="ring"), arrays["x"][0]
    with jax.set_mesh(tp.mesh):
        layer = column(tp, F, scale=1.0)
        placed = jax.device_put(x, NamedSharding(tp.mesh, spec))
        definition, params = nnx.split(layer)

        @jax.jit
        def both(params, x, g):
            y, pull = jax.vjp(lambda params, x: nnx.merge(definition, params)(x), params, x)
            return y, *pull(g)

        like = jax.eval_shape(layer, placed).sharding
        g = jax.device_put(arrays["h"][0], NamedSharding(tp.mesh, like.spec))
        y, dparams, dx = both(params, placed, g)
    kernel, g = np.asarray(layer.kernel[...]), arrays["h"][0]
    close(y, x @ kernel + np.asarray(layer.bias[...]))
    close(dx, g @ kernel.T)
    close(dparams["kernel"][...], x.T @ g)
    close(dparams["bias"][...], g.sum(0))


@pytest.mark.parametrize("overlap", ["none", "bidirectional"])
def test_a_mesh_of_one_axis_of_any_name_is_enough(arrays, overlap) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",), axis_types=(AxisType.Explicit,))
    config = TensorParallelConfig(mesh, "model", overlap=overlap)
    with jax.set_mesh(mesh):
        column = ColumnParallelLinear(D, F, parallel_config=config, rngs=rngs())
        row = RowParallelLinear(F, D, parallel_config=config.replace(), rngs=rngs())
        x = jax.device_put(arrays["x"], NamedSharding(mesh, P(None, "model", None)))
        y = jax.jit(lambda x: chain(x, column, jax.nn.silu, row))(x)
        whole = jax.jit(lambda x: column(x))(x)
    want = arrays["x"] @ np.asarray(column.kernel[...])
    close(whole, want)
    assert jax.typeof(whole).sharding.spec == P(None, None, None)
    close(y, np.asarray(jax.nn.silu(want)) @ np.asarray(row.kernel[...]))


@pytest.mark.parametrize("scattered", [True, False])
def test_outputs_come_in_the_order_that_was_asked_for(scattered) -> None:
    tp = tensor_parallel(MESHES["tp8"]).replace(reduce_scatter_output=scattered)
    with jax.set_mesh(tp.mesh):
        linear = ColumnParallelLinear(D, {"v": 8, "q": 16}, parallel_config=tp, rngs=rngs())
        outputs = linear(jnp.ones((2, L, D)))
        assert [(name, y.shape[-1]) for name, y in outputs.items()] == [("v", 8), ("q", 16)]


def test_inputs_of_another_width_or_split_elsewhere_are_refused() -> None:
    tp = tensor_parallel(MESHES["dp2-fsdp2-tp2"])
    with jax.set_mesh(tp.mesh):
        linear = ColumnParallelLinear(D, np.int64(F), parallel_config=tp, rngs=rngs())
        with pytest.raises(ValueError, match=rf"inputs \(2, {F}\) do not end in in_features={D}"):
            linear(jnp.ones((2, F)))
        x = jax.device_put(jnp.ones((2, D)), P(None, "fsdp"))
        with pytest.raises(
            ValueError, match="split over fsdp; reshard the input so that no axis but tp"
        ):
            linear(x)
        ring = tp.replace(overlap="ring")
        column = ColumnParallelLinear(D, F, parallel_config=ring, rngs=rngs())
        row = RowParallelLinear(F, D, parallel_config=ring, rngs=rngs())
        x = jax.device_put(jnp.ones((2, L, D)), P(None, "tp", "fsdp"))
        with pytest.raises(
            ValueError, match="split over fsdp; reshard the input so that no axis but tp"
        ):
            chain(x, column, jax.nn.silu, row)
        assert copy.deepcopy(linear).parallel_config == tp
        assert get_sharding(linear.kernel) == get_sharding(linear.kernel[...])


def test_complex_inputs_keep_their_imaginary_part() -> None:
    linear = ParallelLinear(D, F, use_bias=False, rngs=rngs())
    np.testing.assert_array_equal(linear(1j * jnp.ones((1, D))), 1j * linear(jnp.ones((1, D))))


@pytest.mark.parametrize("overlap", RINGS)
def test_rings_turn_under_x64(overlap) -> None:
    with jax.enable_x64(True):
        tp = tensor_parallel(MESHES["tp8"], "sequence", overlap)
        with jax.set_mesh(tp.mesh):
            column = ColumnParallelLinear(D, F, parallel_config=tp, rngs=rngs())
            row = RowParallelLinear(F, D, parallel_config=tp, rngs=rngs())
            layout = tp.manager.resolve(ResidualSharding)
            x = jax.device_put(np.ones((2, L, D), np.float32), layout)
            y = jax.jit(lambda x: row(column.sharded_forward(x), layout))(x)
            want = row.native_forward(column.native_forward(x))
            np.testing.assert_allclose(y, want, atol=1e-5)
