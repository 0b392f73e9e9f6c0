"""Column and row linears equal a plain matmul for every layout of their input and output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx

from parallel.axes import BATCH, LENGTH, MLP_INTERMEDIATE, QUERY_LENGTH, ResidualSharding
from parallel.linear import ColumnParallelLinear, Linear, ParallelLinear, RowParallelLinear

LAYOUTS = ("hidden", "sequence", "replicated")
B, L, D, F = 8, 16, 16, 32


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
    """Output, gradient of the input and of the parameters, and the parameters, as numpy."""
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


def assert_same(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def column(tp):
    return ColumnParallelLinear(
        D, {"gate": F, "up": F}, parallel_config=tp, bias_init=bias_init, rngs=rngs()
    )


def row(tp):
    return RowParallelLinear(F, D, parallel_config=tp, bias_init=bias_init, rngs=rngs())


@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "tp4-sp2"])
def test_column_linear_equals_matmul(arrays, mesh, layout, overlap) -> None:
    axes = [BATCH, QUERY_LENGTH, MLP_INTERMEDIATE]
    arguments = (ResidualSharding, arrays["x"], column, lambda m, x: m(x), axes)
    want = run(tensor_parallel(ONE_DEVICE), *arguments)
    y, _, params = want
    plain = arrays["x"] @ params["kernel"]["up"] + params["bias"]["up"]
    np.testing.assert_allclose(y["up"], plain, rtol=1e-5, atol=1e-5)
    assert_same(run(tensor_parallel(MESHES[mesh], layout, overlap), *arguments), want)


@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "tp4-sp2"])
def test_row_linear_equals_matmul_and_adds_its_bias_once(arrays, mesh, layout, overlap) -> None:
    def call(module, x):
        return module(x, module.parallel_config.manager.resolve(ResidualSharding))

    axes = [BATCH, QUERY_LENGTH, MLP_INTERMEDIATE]
    want = run(tensor_parallel(ONE_DEVICE), axes, arrays["h"], row, call, ResidualSharding)
    y, _, params = want
    plain = arrays["h"] @ params["kernel"] + params["bias"]
    np.testing.assert_allclose(y, plain, rtol=1e-5, atol=1e-5)
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    assert_same(run(tp, axes, arrays["h"], row, call, ResidualSharding), want)


def test_without_a_parallel_config_it_is_an_ordinary_linear(arrays) -> None:
    layer = Linear(D, F, scale="fan_in", use_bias=False, rngs=rngs())
    want = arrays["x"] @ np.asarray(layer.kernel[...]) * D**-0.5
    np.testing.assert_allclose(layer(arrays["x"]), want, rtol=1e-5, atol=1e-5)
    other = np.full((D, 3), 2.0, np.float32)
    tied = layer.native_forward(arrays["x"], w=other)
    np.testing.assert_allclose(tied, arrays["x"] @ other * D**-0.5, rtol=1e-5, atol=1e-5)


def test_several_outputs_come_back_as_they_were_asked_for(arrays) -> None:
    pair = ParallelLinear(D, (F, 4), use_bias=False, rngs=rngs())(arrays["x"])
    named = ParallelLinear(D, {"b": F, "a": 4}, use_bias=False, rngs=rngs())(arrays["x"])
    assert isinstance(pair, tuple) and [y.shape[-1] for y in pair] == [F, 4]
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
        with pytest.raises(ValueError, match="needs its features on tp"):
            row(tp)(h)
