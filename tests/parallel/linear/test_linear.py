"""Linears equal plain matmuls for every layout, mesh and overlap."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linears import (
    ARRAYS,
    CASES,
    HIDDEN,
    LAYOUTS,
    RINGS,
    D,
    F,
    L,
    assert_same_runs,
    bias_init,
    close,
    column,
    rngs,
    row,
    run,
    to_residual,
    token,
)

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
from parallel.linear.tensor_parallel import TPDense
from parallel.sharding.axes import (
    BATCH,
    EMPTY,
    LENGTH,
    QUERY_LENGTH,
    ResidualSharding,
    RowWise,
)


@pytest.fixture(scope="module")
def column_on_one_device():
    want = run(
        tensor_parallel(ONE_DEVICE),
        ResidualSharding,
        ARRAYS["x"],
        column,
        lambda m, x: m(x),
        HIDDEN,
    )
    y, _, params = want
    for name in ("gate", "up"):
        plain = ARRAYS["x"] @ params["kernel"][name] * (D**-0.5) + params["bias"][name]
        close(y[name], plain)
    return want


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
def test_column_linear_equals_matmul(column_on_one_device, mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    got = run(tp, ResidualSharding, ARRAYS["x"], column, lambda m, x: m(x), HIDDEN)
    assert_same_runs(got, column_on_one_device)


def pair_of_rows(tp):
    return row(tp, (D, 2 * D))


@pytest.fixture(scope="module")
def rows_on_one_device():
    tp = tensor_parallel(ONE_DEVICE)
    want = run(tp, HIDDEN, ARRAYS["h"], pair_of_rows, to_residual, ResidualSharding)
    y, _, params = want
    for index in (0, 1):
        plain = ARRAYS["h"] @ params["kernel"][str(index)] * ((3 * D) ** -0.5)
        close(y[index], plain + params["bias"][str(index)])
    return want


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
def test_row_linear_equals_matmul_and_adds_its_bias_once(
    rows_on_one_device, mesh, layout, overlap
) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    got = run(tp, HIDDEN, ARRAYS["h"], pair_of_rows, to_residual, ResidualSharding)
    assert_same_runs(got, rows_on_one_device)


TOKENS = [BATCH, LENGTH, EMPTY]  # rows as in the residual stream, features whole


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "tp4-sp2"])
def test_token_linear_equals_matmul(mesh, layout) -> None:
    single, split = tensor_parallel(ONE_DEVICE, layout), tensor_parallel(MESHES[mesh], layout)
    want, got = (
        run(tp, ResidualSharding, ARRAYS["x"], token, lambda m, x: m(x), TOKENS)
        for tp in (single, split)
    )
    assert_same_runs(got, want)
    y, _, params = want
    for name in ("gate", "up"):
        plain = ARRAYS["x"] @ params["kernel"][name] * (D**-0.5) + params["bias"][name]
        close(y[name], plain)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.costly
def test_native_forward_equals_the_call(mesh, layout) -> None:
    split = tensor_parallel(MESHES[mesh], layout)
    with jax.set_mesh(split.mesh):
        whole_columns = column(split.replace(reduce_scatter_output=False))
        modules = [column(split), whole_columns, row(split), token(split)]
        x = jax.device_put(ARRAYS["x"], split.manager.sharding(ResidualSharding))
        h = jax.device_put(ARRAYS["h"], split.manager.sharding(HIDDEN))
        inputs = [x, x, h, x]

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
    tokens = split.manager.resolve(TOKENS)
    specs = [split.manager.resolve(HIDDEN), whole, whole, tokens]
    for outputs, spec in zip(called, specs, strict=True):
        assert {y.sharding.spec for y in jax.tree.leaves(outputs)} == {spec}


@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2"])
def test_native_forward_multiplies_with_a_tied_head(mesh) -> None:
    tp = tensor_parallel(MESHES[mesh])
    table = np.random.default_rng(1).normal(size=(F, D)).astype(np.float32)
    with jax.set_mesh(tp.mesh):
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
        placed = jax.device_put(table, tp.manager.sharding(RowWise))
        head = column(tp, F, use_bias=False)
        logits = jax.jit(lambda m, x, w: m.native_forward(x, w=w.T))(head, x, placed)
        assert logits.sharding.spec == tp.manager.resolve(HIDDEN)
    close(np.asarray(logits), ARRAYS["x"] @ table.T * D**-0.5)


@pytest.mark.parametrize("overlap", ["none", "split"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "tp4-sp2"])
def test_all_gather_makes_a_linear_column_parallel(mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    gathers = tp.replace(matmul_method=MatrixMultiplyMethod.ALL_GATHER)
    with jax.set_mesh(tp.mesh):
        layer = ParallelLinear(D, F, parallel_config=gathers, bias_init=bias_init, rngs=rngs())
        twin = column(tp, F, scale=1.0)
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
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
def test_reduce_scatter_makes_a_linear_row_parallel(mesh, overlap, reduce_output) -> None:
    tp = tensor_parallel(MESHES[mesh], "sequence", overlap).replace(
        matmul_method="reduce_scatter", reduce_output=reduce_output
    )
    with jax.set_mesh(tp.mesh):
        layer = ParallelLinear(F, D, parallel_config=tp, bias_init=bias_init, rngs=rngs())
        h = jax.device_put(ARRAYS["h"], tp.manager.sharding(HIDDEN))
        y = jax.jit(lambda layer, h: layer(h))(layer, h)
        predicted = get_output_partition_spec(h, layer.kernel[...], "reduce_scatter", "tp")
        whole = tp.manager.resolve([BATCH, QUERY_LENGTH, None])
        assert layer.kernel[...].sharding == row(tp).kernel[...].sharding
    assert layer.direction == "row"
    assert y.sharding.spec == (whole if reduce_output else predicted) and predicted != whole
    close(np.asarray(y), ARRAYS["h"] @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...]))


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


@pytest.mark.parametrize(
    ("scale", "factor"), [("fan_in", D**-0.5), ("fan_out", (F + 4) ** -0.5), (0.25, 0.25)]
)
def test_scale_multiplies_the_output_and_not_the_bias(scale, factor) -> None:
    layer = ParallelLinear(D, (F, 4), scale=scale, bias_init=bias_init, rngs=rngs())
    outputs = layer(ARRAYS["x"])
    assert isinstance(outputs, tuple) and layer.out_features == (F, 4)
    for index, y in enumerate(outputs):
        kernel, bias = (np.asarray(p[str(index)][...]) for p in (layer.kernel, layer.bias))
        close(y, factor * (ARRAYS["x"] @ kernel) + bias)


def test_without_a_parallel_config_it_is_an_ordinary_linear() -> None:
    layer = Linear(D, F, scale="fan_in", use_bias=False, rngs=rngs())
    want = ARRAYS["x"] @ np.asarray(layer.kernel[...]) * D**-0.5
    close(layer(ARRAYS["x"]), want)
    other = np.full((D, 3), 2.0, np.float32)
    tied = layer.native_forward(ARRAYS["x"], w=other)
    close(tied, ARRAYS["x"] @ other * D**-0.5)
    with pytest.raises(ValueError, match="out_spec is for row-parallel linears"):
        layer(ARRAYS["x"], P("tp"))


def test_named_outputs_come_back_in_the_order_in_which_they_were_asked_for() -> None:
    named = ParallelLinear(D, {"b": F, "a": 4}, use_bias=False, rngs=rngs())(ARRAYS["x"])
    assert list(named) == ["b", "a"] and named["b"].shape[-1] == F


def test_the_initial_kernel_depends_on_seed_and_name_only() -> None:
    apart = ColumnParallelLinear(D, {"up": F}, rngs=rngs()).kernel["up"][...]
    together = ColumnParallelLinear(D, {"gate": F, "up": F}, rngs=rngs()).kernel["up"][...]
    np.testing.assert_array_equal(apart, together)


def test_wrong_layouts_are_refused() -> None:
    tp = tensor_parallel(MESHES["tp8"], "sequence")
    with jax.set_mesh(tp.mesh):
        with pytest.raises(ValueError, match=r"RowParallelLinear kernel .* not divisible by tp"):
            RowParallelLinear(12, D, parallel_config=tp, rngs=rngs())
        h = jax.device_put(ARRAYS["h"], tp.manager.sharding([BATCH, LENGTH, None]))
        with pytest.raises(
            ValueError, match=r"ColumnParallelLinear computes the input.*reduce_scatter_output=True"
        ):
            row(tp)(h)


@pytest.mark.parametrize("spec", [P(None, None), P(None, "tp"), P("fsdp", None), P("tp", None)])
def test_rows_may_lie_on_any_axes_or_none(spec) -> None:
    tp, x = tensor_parallel(MESHES["dp2-fsdp2-tp2"], overlap="ring"), ARRAYS["x"][0]
    with jax.set_mesh(tp.mesh):
        layer = column(tp, F, scale=1.0)
        placed = jax.device_put(x, NamedSharding(tp.mesh, spec))
        definition, params = nnx.split(layer)

        @jax.jit
        def both(params, x, g):
            y, pull = jax.vjp(lambda params, x: nnx.merge(definition, params)(x), params, x)
            return y, *pull(g)

        like = jax.eval_shape(layer, placed).sharding
        g = jax.device_put(ARRAYS["h"][0], NamedSharding(tp.mesh, like.spec))
        y, dparams, dx = both(params, placed, g)
    kernel, g = np.asarray(layer.kernel[...]), ARRAYS["h"][0]
    close(y, x @ kernel + np.asarray(layer.bias[...]))
    close(dx, g @ kernel.T)
    close(dparams["kernel"][...], x.T @ g)
    close(dparams["bias"][...], g.sum(0))


@pytest.mark.parametrize("overlap", ["none", "bidirectional"])
def test_a_mesh_of_one_axis_of_any_name_is_enough(overlap) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("model",), axis_types=(AxisType.Explicit,))
    config = TensorParallelConfig(mesh, "model", overlap=overlap)
    with jax.set_mesh(mesh):
        column = ColumnParallelLinear(D, F, parallel_config=config, rngs=rngs())
        row = RowParallelLinear(F, D, parallel_config=config.replace(), rngs=rngs())
        x = jax.device_put(ARRAYS["x"], NamedSharding(mesh, P(None, "model", None)))
        y = jax.jit(lambda x: chain(x, column, jax.nn.silu, row))(x)
        whole = jax.jit(lambda x: column(x))(x)
    want = ARRAYS["x"] @ np.asarray(column.kernel[...])
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
            x = jax.device_put(np.ones((3, L, D), np.float32), layout)
            y = jax.jit(lambda x: row(column.sharded_forward(x), layout))(x)
            want = row.native_forward(column.native_forward(x))
            np.testing.assert_allclose(y, want, atol=1e-5)


@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.costly
def test_linears_need_no_mesh_in_context_if_the_config_has_one(overlap) -> None:
    tp = tensor_parallel(MESHES["dp2-fsdp2-tp2"], "sequence", overlap)
    first, last = column(tp, F), row(tp)
    x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
    whole = column(tp.replace(reduce_scatter_output=False), F)

    def run_all(first, last, whole, x):
        return (
            last(first(x)),
            whole(x),
            whole.native_forward(x),
            chain(x, first, jnp.tanh, last),
        )

    with jax.set_mesh(tp.mesh):
        want = jax.jit(run_all)(first, last, whole, x)
    for got in (jax.jit(run_all)(first, last, whole, x), run_all(first, last, whole, x)):
        for y, y_want in zip(got, want, strict=True):
            close(y, y_want)
            assert jax.typeof(y).sharding.spec == jax.typeof(y_want).sharding.spec
    # Arrays that are on no mesh yet are accepted too.
    close(first(ARRAYS["x"]), first(x))


def test_a_row_linear_after_a_gathered_column_linear_names_the_remedy() -> None:
    tp = tensor_parallel(MESHES["tp8"]).replace(reduce_scatter_output=False)
    scatters = ParallelLinear(F, D, parallel_config=tp.replace(matmul_method="reduce_scatter"))
    dense = TPDense(partial(nnx.Linear, F, D), "tp", "scatter", parallel_config=tp, rngs=rngs())
    first, last = column(tp, F), row(tp)
    calls = (last, scatters, dense, lambda y: last(y, P(None, None, "tp")))
    for call in calls:
        for run_it in (lambda x, call=call: call(first(x)), lambda x, call=call: call(first(x[0]))):
            for form in (run_it, jax.jit(run_it)):
                with pytest.raises(
                    ValueError, match=r"give that one a .* reduce_scatter_output=Tr"
                ):
                    form(ARRAYS["x"])
    split = column(tp.replace(reduce_scatter_output=True), F)
    close(last(split(ARRAYS["x"])), last.native_forward(first(ARRAYS["x"])))
