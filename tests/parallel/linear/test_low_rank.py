"""Linears with adapters equal x W + scale * (x A) B on every mesh, overlap and layout."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, sample, tensor_parallel
from flax import nnx
from linears import (
    ARRAYS,
    HIDDEN,
    D,
    F,
    assert_same_runs,
    close,
    column,
    rngs,
    row,
    run,
    to_residual,
    token,
)
from linears import (
    CASES as ALL,
)
from rings import primitives
from test_chain import Pair, gated

from parallel.linear.linear import ParallelLinear, named_rngs
from parallel.linear.low_rank import adapter_of, add_adapter, factor_axes
from parallel.sharding.axes import (
    BATCH,
    EMPTY,
    EP,
    FSDP,
    LENGTH,
    SP,
    TP,
    ColumnWise,
    ExpertRowWise,
    ResidualSharding,
)

RANK, SCALE = 3, 1.5
FAST = [
    ("dp2-fsdp2-tp2", "sequence", "none"),
    ("tp8", "sequence", "bidirectional"),
    ("dp2-fsdp2-tp2", "hidden", "ring"),
    ("tp4-sp2", "replicated", "ring"),
]
CASES = [*FAST, *sample(case for case in ALL if case not in FAST)]


def normal(linear, name):
    """Return an initializer whose numbers depend on the name alone."""
    key = named_rngs(rngs(), f"{type(linear).__name__}.{name}").params()
    return partial(nnx.initializers.normal(0.5), key)


def adapted(linear, outputs):
    """Return the linear with adapters whose B is not zero."""
    initializers = {name: normal(linear, f"{name}.a") for name in outputs}
    add_adapter(linear, outputs, rank=RANK, scale=SCALE, initializers=initializers)
    for path, b in nnx.to_flat_state(nnx.state(linear)):
        if "lora_b" in path:
            (name,) = path[1:] or ("",)
            owner = linear.lora_b[name] if name else linear.lora_b
            init = normal(linear, f"{name}.b")
            options = {} if linear.mesh is None else {"out_sharding": b.get_value().sharding.spec}
            owner.set_value(init(b.shape, jnp.float32, **options))
    return linear


def column_of_two(tp):
    return adapted(column(tp), ["gate", "up"])


def column_with_one_adapter(tp):
    return adapted(column(tp), ["up"])


def tokens_of_two(tp):
    return adapted(token(tp), ["gate", "up"])


def rows_of_two(tp):
    return adapted(row(tp, (D, 2 * D)), ["0", "1"])


def assert_plain(found, x, scale):
    """Outputs and gradients of a linear equal those of x W + scale * (x A) B, by autodiff.

    The kernels of a linear with adapters are frozen.
    """
    y, (dparams, dx), params = found

    def plain(params, x):
        outputs = {}
        for name, kernel in params["kernel"].items():
            product = x @ jax.lax.stop_gradient(kernel)
            if name in params["lora_a"]:
                product += SCALE * (x @ params["lora_a"][name]) @ params["lora_b"][name]
            outputs[name] = scale * product + params["bias"][name]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in outputs.values()), outputs

    (_, outputs), want = jax.value_and_grad(plain, (0, 1), has_aux=True)(params, x)
    found_outputs = y.values() if isinstance(y, dict) else y
    for a, b in zip(found_outputs, outputs.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    got = jax.tree.leaves((nnx.to_pure_dict(dparams), dx))
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4)


@lru_cache
def on_one_device(build):
    tp = tensor_parallel(ONE_DEVICE)
    if build is rows_of_two:
        return run(tp, HIDDEN, ARRAYS["h"], build, to_residual, ResidualSharding)
    out = [BATCH, LENGTH, EMPTY] if build is tokens_of_two else HIDDEN
    return run(tp, ResidualSharding, ARRAYS["x"], build, lambda m, x: m(x), out)


@pytest.mark.parametrize(
    "build", [column_of_two, column_with_one_adapter, tokens_of_two, rows_of_two]
)
@pytest.mark.costly
def test_one_device_equals_the_formula(build) -> None:
    by_rows = build is rows_of_two
    x, scale = (ARRAYS["h"], (3 * D) ** -0.5) if by_rows else (ARRAYS["x"], D**-0.5)
    assert_plain(on_one_device(build), x, scale)


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
def test_column_linear_with_adapters(mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    got = run(tp, ResidualSharding, ARRAYS["x"], column_of_two, lambda m, x: m(x), HIDDEN)
    assert_same_runs(got, on_one_device(column_of_two))


@pytest.mark.parametrize("overlap", ["none", "ring"])
def test_column_linear_with_an_adapter_of_one_output(overlap) -> None:
    tp = tensor_parallel(MESHES["dp2-fsdp2-tp2"], "sequence", overlap)
    got = run(tp, ResidualSharding, ARRAYS["x"], column_with_one_adapter, lambda m, x: m(x), HIDDEN)
    assert_same_runs(got, on_one_device(column_with_one_adapter))


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [("dp2-fsdp2-tp2", "sequence"), ("tp4-sp2", "hidden"), ("tp8", "replicated")],
)
def test_token_linear_with_adapters(mesh, layout) -> None:
    tp, tokens = tensor_parallel(MESHES[mesh], layout), [BATCH, LENGTH, EMPTY]
    got = run(tp, ResidualSharding, ARRAYS["x"], tokens_of_two, lambda m, x: m(x), tokens)
    want = on_one_device(tokens_of_two)
    assert_same_runs(got, want)


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
@pytest.mark.costly
def test_row_linear_with_adapters(mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    got = run(tp, HIDDEN, ARRAYS["h"], rows_of_two, to_residual, ResidualSharding)
    assert_same_runs(got, on_one_device(rows_of_two))


def adapted_pair(tp):
    return Pair(column_of_two(tp), adapted(row(tp), [""]), gated)


def pair_with_adapted_columns(tp):
    return Pair(column_with_one_adapter(tp), row(tp), gated)


def pair_with_adapted_rows(tp):
    return Pair(column(tp), adapted(row(tp), [""]), gated)


PAIRS = (adapted_pair, pair_with_adapted_columns, pair_with_adapted_rows)


@pytest.fixture(scope="module")
def pairs_on_one_device():
    tp, x = tensor_parallel(ONE_DEVICE), ARRAYS["x"]
    runs = {
        pair: run(tp, ResidualSharding, x, pair, Pair.__call__, ResidualSharding) for pair in PAIRS
    }
    y, _, params = runs[adapted_pair]
    first, last = params["column"], params["row"]
    hidden = gated(
        *(
            D**-0.5 * (x @ (first["kernel"][k] + SCALE * first["lora_a"][k] @ first["lora_b"][k]))
            + first["bias"][k]
            for k in ("gate", "up")
        )
    )
    kernel = last["kernel"] + SCALE * last["lora_a"] @ last["lora_b"]
    np.testing.assert_allclose(y, D**-0.5 * hidden @ kernel + last["bias"], rtol=1e-4, atol=1e-4)
    return runs


@pytest.mark.parametrize(("mesh", "layout", "overlap"), CASES)
def test_a_chain_of_linears_with_adapters(pairs_on_one_device, mesh, layout, overlap) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    for pair, want in pairs_on_one_device.items():
        if pair is adapted_pair or (mesh, overlap) == ("dp2-fsdp2-tp2", "split"):
            got = run(tp, ResidualSharding, ARRAYS["x"], pair, Pair.__call__, ResidualSharding)
            assert_same_runs(got, want)


@pytest.mark.parametrize("overlap", ["none", "ring", "bidirectional", "split", "hypercube"])
def test_adapters_add_no_hop_to_a_chain(overlap) -> None:
    tp = tensor_parallel(MESHES["tp8"], "sequence", overlap)
    with jax.set_mesh(tp.mesh):
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
        plain, own = (
            primitives(pair, x) for pair in (Pair(column(tp), row(tp), gated), adapted_pair(tp))
        )
    for name in ("ppermute", "all_gather", "reduce_scatter", "psum_scatter"):
        assert own[name] == plain[name], name
    assert own["dynamic_update_slice"] == plain["dynamic_update_slice"]


@pytest.mark.parametrize("build", [column_of_two, rows_of_two])
@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2"])
def test_native_forward_equals_the_call(build, mesh) -> None:
    tp = tensor_parallel(MESHES[mesh])
    axes, array = (HIDDEN, "h") if build is rows_of_two else (ResidualSharding, "x")
    with jax.set_mesh(tp.mesh):
        linear = build(tp)
        x = jax.device_put(ARRAYS[array], tp.manager.sharding(axes))
        called, native = jax.jit(lambda m, x: (m(x), m.native_forward(x)))(linear, x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), called, native)


def test_gradients_of_whole_factors_are_summed_in_their_own_dtype() -> None:
    """In bfloat16, a sum over tp of rounded gradients would differ from the rounded sum."""
    tp = tensor_parallel(MESHES["tp8"], "sequence", "ring")
    with jax.set_mesh(tp.mesh):
        linear = adapted(column(tp, dtype=jnp.bfloat16), ["gate", "up"])
        definition, params = nnx.split(linear)
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))

        def loss(params):
            y = nnx.merge(definition, params)(x)
            return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in y.values())

        text = jax.jit(jax.grad(loss)).lower(params).as_text()
        sums = [line for line in text.splitlines() if "all_reduce" in line]
    assert sums and "bf16" not in "".join(sums)


def test_factors_are_sharded_as_rows_and_columns_of_the_kernel() -> None:
    assert factor_axes(ColumnWise) == (((FSDP, SP), EMPTY), (EMPTY, TP))
    assert factor_axes(ExpertRowWise) == ((EP, TP, EMPTY), (EP, EMPTY, FSDP))
    tp = tensor_parallel(MESHES["dp2-fsdp2-tp2"])
    with jax.set_mesh(tp.mesh):
        specs = [
            p.get_value().sharding.spec for _, p in nnx.to_flat_state(nnx.state(rows_of_two(tp)))
        ]
    assert len({str(spec) for spec in specs}) == 4


@pytest.mark.parametrize("overlap", ["none", "ring"])
def test_a_fresh_adapter_changes_no_bit(overlap) -> None:
    tp = tensor_parallel(MESHES["tp8"], "sequence", overlap)
    with jax.set_mesh(tp.mesh):
        plain, fresh = column(tp), column(tp)
        init = {name: normal(fresh, name) for name in ("gate", "up")}
        add_adapter(fresh, ["gate", "up"], rank=RANK, scale=SCALE, initializers=init)
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
        want, got = jax.jit(lambda a, b, x: (a(x), b(x)))(plain, fresh, x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_an_ordinary_linear_takes_adapters_and_merges_them() -> None:
    linear = adapted(ParallelLinear(D, (F, 4), rngs=rngs()), ["0", "1"])
    kernels = adapter_of(linear).merged(linear.arrays_of(linear.kernel))
    for y, kernel, name in zip(linear(ARRAYS["x"]), kernels, "01", strict=True):
        a, b = (np.asarray(f[name][...]) for f in (linear.lora_a, linear.lora_b))
        close(kernel, np.asarray(linear.kernel[name][...]) + SCALE * a @ b)
        close(y, ARRAYS["x"] @ np.asarray(kernel))
