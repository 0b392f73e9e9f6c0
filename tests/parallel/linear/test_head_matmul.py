"""Matmuls to and from heads equal plain matmuls, with all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from linears import (
    ARRAYS,
    HIDDEN,
    B,
    D,
    L,
    assert_same_runs,
    column,
    rngs,
    row,
    run,
    to_residual,
)

from parallel.linear.head_matmul import PLAIN, HeadMatmul
from parallel.linear.linear import ColumnParallelLinear
from parallel.sharding.axes import ResidualSharding
from parallel.sharding.mesh import MeshConfig

WIDTH = 8
KINDS = {
    "column": (ResidualSharding, "x", column, lambda m, x: m(x), HIDDEN),
    "row": (HIDDEN, "h", row, to_residual, ResidualSharding),
}


def run_kind(tp, kind):
    axes, name, build, call, out_axes = KINDS[kind]
    return run(tp, axes, ARRAYS[name], build, call, out_axes)


@pytest.mark.parametrize("side", ["out", "in"])
def test_products_equal_those_of_plain_matrices(side) -> None:
    rng = np.random.default_rng(0)
    heads, width_in, width_out = HeadMatmul(WIDTH, side), 16, 24
    x, dy = (rng.integers(-4, 5, (2, 3, n)).astype(np.float32) for n in (width_in, width_out))
    w = rng.integers(-4, 5, (width_in, width_out)).astype(np.float32)
    # Sums of small integers are exact in any order.
    np.testing.assert_array_equal(heads.forward(x, w), PLAIN.forward(x, w))
    np.testing.assert_array_equal(heads.forward(x, w), x @ w)
    np.testing.assert_array_equal(heads.dgrad(dy, w), PLAIN.dgrad(dy, w))
    np.testing.assert_array_equal(heads.dgrad(dy, w), dy @ w.T)
    np.testing.assert_array_equal(heads.wgrad(x, dy), PLAIN.wgrad(x, dy))
    np.testing.assert_array_equal(heads.wgrad(x, dy), np.einsum("bld,blf->df", x, dy))
    _, pullback = jax.vjp(heads.forward, x, w)
    np.testing.assert_array_equal(pullback(dy)[0], dy @ w.T)
    np.testing.assert_array_equal(pullback(dy)[1], np.einsum("bld,blf->df", x, dy))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mesh", "fsdp_overlap"),
    [
        (ONE_DEVICE, "none"),
        (MESHES["fsdp8"], "none"),
        (MESHES["fsdp8"], "bidirectional"),
        (MeshConfig(dp=2, fsdp=4), "split"),
        (MESHES["ep2-fsdp2-sp2"], "ring"),
        (MeshConfig(fsdp=2, sp=2, tp=2), "bidirectional"),
    ],
    ids=str,
)
@pytest.mark.costly
def test_linears_equal_plain_ones_on_one_device(kind, mesh, fsdp_overlap) -> None:
    tp = tensor_parallel(mesh).replace(fsdp_overlap=fsdp_overlap, head_width=WIDTH)
    assert_same_runs(run_kind(tp, kind), run_kind(tensor_parallel(ONE_DEVICE), kind))


@pytest.mark.parametrize("fsdp_overlap", ["none", "ring"])
def test_products_are_traced_by_head(fsdp_overlap) -> None:
    tp = tensor_parallel(MESHES["fsdp8"]).replace(fsdp_overlap=fsdp_overlap, head_width=WIDTH)
    with jax.set_mesh(tp.mesh):
        layer = ColumnParallelLinear(D, 3 * WIDTH, parallel_config=tp, rngs=rngs())
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
        text = str(jax.make_jaxpr(layer)(x))
        plain = str(
            jax.make_jaxpr(
                ColumnParallelLinear(
                    D, 3 * WIDTH, parallel_config=tp.replace(head_width=None), rngs=rngs()
                )
            )(x)
        )
    rows = B // 8
    assert "optimization_barrier" in text and f"[{rows},3,{L},{WIDTH}]" in text
    assert "optimization_barrier" not in plain and f"[{rows},3,{L},{WIDTH}]" not in plain


def test_rows_without_a_batch_keep_plain_matrices() -> None:
    tp = tensor_parallel(MESHES["fsdp8"]).replace(head_width=WIDTH)
    with jax.set_mesh(tp.mesh):
        layer = ColumnParallelLinear(D, 2 * WIDTH, parallel_config=tp, rngs=rngs())
        x = jnp.ones((8, D), out_sharding=jax.P("fsdp", None))
        assert "optimization_barrier" not in str(jax.make_jaxpr(layer)(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [ONE_DEVICE, MeshConfig(fsdp=2, tp=2)], ids=str)
def test_a_width_that_does_not_divide_the_features_is_refused(kind, mesh) -> None:
    tp = tensor_parallel(mesh).replace(head_width=5)
    with pytest.raises(ValueError, match="head_width=5 does not divide the F=32 features"):
        run_kind(tp, kind)
