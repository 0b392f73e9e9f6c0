"""Muon against a formula in numpy and against optax's; which parameters it trains."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MESHES, ROOT, tensor_parallel
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

from configs.build import build_program
from configs.schema import load_config
from training.optimizers import OptimizerConfig, make_optimizer
from training.optimizers.muon import newton_schulz, orthogonal_steps
from training.optimizers.parameters import matrices


def tree(seed: int, scale: float = 1.0) -> dict:
    """Return kernels of two layers, wide and tall, a norm and an embedding."""
    rng = np.random.default_rng(seed)
    shapes = {"up": (2, 4, 12), "down": (2, 12, 4)}
    layers = {name: {"kernel": scale * rng.normal(size=size)} for name, size in shapes.items()}
    layers["norm"] = {"scale": scale * rng.normal(size=(2, 4))}
    found = {"layers": layers, "embed": {"table": scale * rng.normal(size=(7, 4))}}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), found)


def quintic(matrix: np.ndarray, iterations: int) -> np.ndarray:
    """Apply the published iteration to the singular values of a matrix, in double precision."""
    left, values, right = np.linalg.svd(np.float64(matrix), full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right


@pytest.mark.parametrize("shape", [(6, 6), (3, 8), (8, 3), (1, 5)])
@pytest.mark.parametrize("iterations", [1, 5])
def test_the_iteration_is_a_polynomial_of_the_singular_values(shape, iterations):
    matrix = np.random.default_rng(1).normal(size=shape).astype("f4")
    found = newton_schulz(jnp.asarray(matrix), iterations=iterations)
    np.testing.assert_allclose(found, quintic(matrix, iterations), rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)])
def test_bfloat16_changes_steps_by_about_two_percent(shape):
    stack = jnp.asarray(np.random.default_rng(1).normal(size=(3, *shape)), jnp.float32)
    wanted = orthogonal_steps(stack, 5, 0.2)
    found = orthogonal_steps(stack, 5, 0.2, "bfloat16")
    assert found.dtype == jnp.float32
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 0.005 < error < 0.04


@pytest.mark.parametrize(("dtype", "short"), [(None, "f32"), ("bfloat16", "bf16")])
def test_matrices_travel_in_the_dtype_of_the_iteration(dtype, short):
    mesh = tensor_parallel(MESHES["fsdp8"]).mesh
    with jax.set_mesh(mesh):
        stack = jax.device_put(jnp.ones((8, 16, 16)), NamedSharding(mesh, P(None, "fsdp")))
        text = str(jax.make_jaxpr(lambda x: orthogonal_steps(x, 5, 0.2, dtype))(stack))
        small = str(jax.make_jaxpr(lambda x: orthogonal_steps(x, 5, 0.2))(stack.astype("bfloat16")))
    assert len(re.findall(r":bf16\[[\d,]*\]\S* = all_to_all", small)) == 2
    assert re.findall(r":(\w+)\[[\d,]*\]\S* = all_to_all", text) == [short, short]


def test_no_step_is_made_without_a_gradient():
    assert not np.any(orthogonal_steps(jnp.zeros((2, 3, 4)), 5, 0.2))


@pytest.mark.parametrize("nesterov", [True, False])
def test_three_steps_equal_the_formula(nesterov):
    config = OptimizerConfig(
        name="muon",
        options={"momentum": 0.9, "nesterov": nesterov, "iterations": 4, "rms": 0.3},
        weight_decay=0.3,
        clip_norm=None,
    )
    optimizer, adamw = (
        make_optimizer(config.model_copy(update=change), optax.constant_schedule(0.1))
        for change in ({}, {"name": "adamw", "options": {}})
    )
    params = others = tree(0)
    wanted = {name: np.float64(params["layers"][name]["kernel"]) for name in ("up", "down")}
    mean = {name: np.zeros_like(x) for name, x in wanted.items()}
    state, other_state = optimizer.init(params), adamw.init(params)
    for seed in (1, 2, 3):
        grads = tree(seed, 10.0**-seed)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, other_state = adamw.update(grads, other_state, others)
        others = optax.apply_updates(others, updates)
        for name in wanted:
            gradient = np.float64(grads["layers"][name]["kernel"])
            mean[name] = 0.9 * mean[name] + 0.1 * gradient
            step = 0.9 * mean[name] + 0.1 * gradient if nesterov else mean[name]
            step = 0.3 * 12**0.5 * np.stack([quintic(x, 4) for x in step])
            wanted[name] -= 0.1 * (step + 0.3 * wanted[name])
    for name, value in wanted.items():
        np.testing.assert_allclose(params["layers"][name]["kernel"], value, rtol=0, atol=2e-5)
    for found, same in ((params["embed"], others["embed"]), (params, others)):
        found, same = found.get("layers", found), same.get("layers", same)
        for key in {"norm", "table"} & {*found}:
            jax.tree.map(np.testing.assert_array_equal, found[key], same[key])


def test_steps_equal_those_of_optax():
    dims = contrib.MuonDimensionNumbers(1, 2)
    other = contrib.muon(
        0.1,
        beta=0.9,
        nesterov=False,
        consistent_rms=0.2,
        muon_weight_dimension_numbers={"kernel": dims},
    )
    options = {"momentum": 0.9, "nesterov": False}
    config = OptimizerConfig(name="muon", options=options, weight_decay=0.0, clip_norm=None)
    ours = make_optimizer(config, optax.constant_schedule(0.1))
    params = tree(0)["layers"]["up"]
    state, other_state = ours.init(params), other.init(params)
    for seed in (1, 2, 3):
        grads = tree(seed)["layers"]["up"]
        found, state = ours.update(grads, state, params)
        wanted, other_state = other.update(grads, other_state, params)
        np.testing.assert_allclose(found["kernel"], wanted["kernel"], rtol=0, atol=1e-6)


def test_kernels_between_features_are_matrices_and_nothing_else():
    found = {}
    shared = ["model.moe.num_shared_experts=1", "model.moe.shared_expert_gate=true"]
    for name, keys in (("tp8", ["lora.rank=4"]), ("moe_ep8", shared)):
        program = build_program(load_config(ROOT / "configs" / f"{name}.yaml", keys), jax.devices())
        with jax.set_mesh(program.tp.manager.mesh):
            params = program.abstract_state.params
        for path, is_matrix in jax.tree_util.tree_leaves_with_path(matrices(params)):
            found[jax.tree_util.keystr(path, simple=True, separator=".")] = is_matrix
    kept = {"attention.o.lora_a", "attention.qkv.kernel.q", "mlp.down.kernel", "mlp.gate_up.kernel"}
    for name in kept:
        assert any(name in path for path in found), name
    others = {path for path, is_matrix in found.items() if not is_matrix}
    assert others == {
        "embed.table", "head.kernel", "norm.scale",
        *(f"{layers}.{norm}.scale" for layers in ("layers", "sparse_layers")
          for norm in ("attention_norm", "mlp_norm")),
        "sparse_layers.mlp.router.kernel", "sparse_layers.mlp.router.bias",
        "sparse_layers.mlp.shared_gate.kernel",
    }  # fmt: skip
