"""Kernels gathered, and gradients summed, around a ring equal those of one collective or device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx
from jax.sharding import AxisType
from linears import (
    ARRAYS,
    HIDDEN,
    RINGS,
    B,
    D,
    F,
    L,
    assert_same_runs,
    column,
    rngs,
    row,
    run,
    to_residual,
    token,
)
from rings import primitives
from test_low_rank import column_of_two

from parallel.linear.linear import ColumnParallelLinear
from parallel.sharding.axes import BATCH, EMPTY, LENGTH, ResidualSharding
from parallel.sharding.mesh import MeshConfig

# Copies over dp and ep; kernels stored over fsdp, over sp, and over both.
STORED = {
    "fsdp8": MESHES["fsdp8"],
    "dp2-fsdp4": MeshConfig(dp=2, fsdp=4),
    "ep2-fsdp2-sp2": MESHES["ep2-fsdp2-sp2"],
    "dp4-sp2": MeshConfig(dp=4, sp=2),
}
WITH_TP = MeshConfig(fsdp=2, sp=2, tp=2)
KINDS = {
    "column": (ResidualSharding, "x", column, lambda m, x: m(x), HIDDEN),
    "row": (HIDDEN, "h", lambda tp: row(tp, (D, 2 * D)), to_residual, ResidualSharding),
    "token": (ResidualSharding, "x", token, lambda m, x: m(x), [BATCH, LENGTH, EMPTY]),
}


def run_kind(tp, kind):
    axes, name, build, call, out_axes = KINDS[kind]
    return run(tp, axes, ARRAYS[name], build, call, out_axes)


@pytest.fixture(scope="module")
def on_one_device():
    return {kind: run_kind(tensor_parallel(ONE_DEVICE), kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mesh", "overlap"),
    [
        *(("fsdp8", overlap) for overlap in RINGS if overlap != "hypercube"),  # 2 rows each
        ("dp2-fsdp4", "bidirectional"),
        ("dp2-fsdp4", "split"),
        ("dp2-fsdp4", "hypercube"),
        ("ep2-fsdp2-sp2", "bidirectional"),
        ("dp4-sp2", "ring"),
    ],
)
@pytest.mark.costly
def test_gradients_equal_those_of_one_device(on_one_device, kind, mesh, overlap) -> None:
    tp = tensor_parallel(STORED[mesh]).replace(fsdp_overlap=overlap)
    assert_same_runs(run_kind(tp, kind), on_one_device[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["sequence", "hidden", "replicated"])
def test_tp_keeps_the_plain_form(on_one_device, kind, layout) -> None:
    tp = tensor_parallel(WITH_TP, layout).replace(fsdp_overlap="bidirectional")
    assert_same_runs(run_kind(tp, kind), on_one_device[kind])
    axes, name, build, call, _ = KINDS[kind]
    with jax.set_mesh(tp.mesh):
        x = jax.device_put(ARRAYS[name], tp.manager.sharding(axes))
        assert gradient_primitives(build(tp), x, call)["ppermute"] == 0


@pytest.mark.parametrize("axes", [("sp", "fsdp"), ("fsdp", "sp")], ids="-".join)
def test_a_ring_may_span_mesh_axes_in_any_order(on_one_device, axes) -> None:
    mesh = jax.make_mesh((1, 2, 2, 1, 1), ("dp", *axes, "ep", "tp"), (AxisType.Explicit,) * 5)
    tp = tensor_parallel(ONE_DEVICE).replace(mesh=mesh, fsdp_overlap="ring")
    assert_same_runs(run_kind(tp, "column"), on_one_device["column"])
    with jax.set_mesh(mesh):
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
        assert gradient_primitives(column(tp), x)["ppermute"] == 2 * (3 + 3)


def gradient_primitives(layer, x, call=lambda m, x: m(x)):
    """Count the primitives of a linear and its derivative by its trained parameters and input."""
    definition, params = nnx.split(layer)

    def loss(params, x):
        y = call(nnx.merge(definition, params), x)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(y))

    return primitives(jax.grad(loss, (0, 1)), params, x)


def test_a_ring_replaces_both_collectives() -> None:
    counts = {}
    for overlap in ("none", "ring"):
        tp = tensor_parallel(STORED["dp2-fsdp4"]).replace(fsdp_overlap=overlap)
        with jax.set_mesh(tp.mesh):
            layer = ColumnParallelLinear(D, {"gate": F, "up": F}, parallel_config=tp, rngs=rngs())
            x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
            counts[overlap] = gradient_primitives(layer, x)
    plain = {"all_gather": 2, "reduce_scatter": 2, "ppermute": 0}
    assert {name: counts["none"][name] for name in plain} == plain
    rings = {"all_gather": 0, "reduce_scatter": 0, "ppermute": 2 * (3 + 3)}
    assert {name: counts["ring"][name] for name in rings} == rings
    assert counts["ring"]["dot_general"] == counts["none"]["dot_general"] + 2 * 3
    # The copies on dp are summed as shards, in the dtype of the parameter, either way.
    assert counts["ring"]["psum_invariant"] == counts["none"]["psum_invariant"] > 0


def test_a_split_needs_an_even_block() -> None:
    tp = tensor_parallel(STORED["fsdp8"]).replace(fsdp_overlap="split")
    with jax.set_mesh(tp.mesh):
        layer = ColumnParallelLinear(8, F, parallel_config=tp, rngs=rngs())
        x = jax.device_put(np.ones((B, L, 8), np.float32), tp.manager.sharding(ResidualSharding))
        with pytest.raises(ValueError, match="overlap split halves a block of"):
            jax.jit(jax.grad(lambda x: jnp.sum(layer(x))))(x)


def test_remat_keeps_the_same_arrays_as_in_the_plain_form() -> None:
    policy, matrices = jax.checkpoint_policies.dots_with_no_batch_dims_saveable, {}
    for overlap in ("none", "bidirectional"):
        tp = tensor_parallel(STORED["fsdp8"]).replace(fsdp_overlap=overlap)
        with jax.set_mesh(tp.mesh):
            definition, params = nnx.split(row(tp))
            h = jax.device_put(ARRAYS["h"], tp.manager.sharding(HIDDEN))

            def layer(params, h, definition=definition):
                return jnp.sin(to_residual(nnx.merge(definition, params), h))

            _, pullback = jax.vjp(jax.checkpoint(layer, policy=policy), params, h)
            # The plain form merges the dims of rows.
            kept = jax.tree.leaves(pullback)
            matrices[overlap] = sorted((math.prod(x.shape[:-1]), *x.shape[-1:]) for x in kept)
    assert matrices["bidirectional"] == matrices["none"] and (B * L, D) in matrices["none"]


def test_kernels_below_adapters_keep_the_plain_form() -> None:
    plain = tensor_parallel(STORED["ep2-fsdp2-sp2"])
    want, got = (
        run(tp, ResidualSharding, ARRAYS["x"], column_of_two, lambda m, x: m(x), HIDDEN)
        for tp in (plain, plain.replace(fsdp_overlap="bidirectional"))
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    tp = plain.replace(fsdp_overlap="bidirectional")
    with jax.set_mesh(tp.mesh):
        x = jax.device_put(ARRAYS["x"], tp.manager.sharding(ResidualSharding))
        assert gradient_primitives(column_of_two(tp), x)["ppermute"] == 0
