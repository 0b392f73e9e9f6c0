"""Every optimizer: equal on every mesh, sharded state, bad steps without effect, exact resumes."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from conftest import ROOT, release, slow
from runs import losses, run, write_config

from configs.build import build_program
from configs.schema import load_config
from training.optimizers import OPTIMIZERS
from training.optimizers.parameters import matrices
from training.parameter_kinds import kind_of_parameter

pytestmark = pytest.mark.usefixtures("signals")

NAMES = sorted(OPTIMIZERS)
MESHES = {
    "tp8": ["mesh.tp=8"],
    "fsdp8": ["mesh.fsdp=8"],
    "dp2-fsdp2-tp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "ep2-fsdp2-tp2": ["mesh.ep=2", "mesh.fsdp=2", "mesh.tp=2"],
    "dp4-ep2": ["mesh.dp=4", "mesh.ep=2"],
}


# The options of SOAP make it well-conditioned. By default it divides by numbers that are little
# more than rounding errors.
KEYS = {
    "schedule_free_adamw": ["optimizer.schedule=constant"],
    "soap": ["optimizer.options={interval: 2, damping: 0.3}", "optimizer.eps=0.3"],
}


def named(name: str) -> list[str]:
    """Return the keys that choose an optimizer."""
    return [f"optimizer.name={name}", *KEYS.get(name, [])]


def program_of(name: str, mesh: list[str] | None, *overrides: str):
    """Return a small sparse program on a mesh of eight devices, or on one device."""
    keys = ["model.num_hidden_layers=3", "model.hidden_size=128", "model.moe.num_experts=4"]
    keys += ["model.moe.moe_intermediate_size=128", "mesh.tp=1", "mesh.ep=1"]
    keys += [*named(name), "optimizer.warmup_steps=0", "optimizer.clip_norm=null"]
    path = ROOT / "configs" / "moe_ep8.yaml"
    config = load_config(path, [*keys, *(mesh or []), *overrides])
    program = build_program(config, jax.devices() if mesh else jax.devices()[:1])
    with jax.set_mesh(program.tp.manager.mesh):
        assert program.abstract_state  # cached
    return program


def random_tree(abstract, seed: int):
    """Return values of the shapes and shardings of a tree, equal on every mesh."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding), abstract
    )


def three_updates(program, is_good=(True, True, True)):
    """Return the parameters and the optimizer's state after three random gradients."""
    optimizer, abstract = program.optimizer, program.abstract_state

    @jax.jit
    def update(grads, state, params, good):
        updates, state = optimizer.update(grads, state, params, is_good=good)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(program.tp.manager.mesh):
        trained = program.trained(abstract.params)
        params = random_tree(trained, 0)
        shardings = jax.tree.map(lambda x: x.sharding, abstract.opt_state)
        state = jax.jit(optimizer.init, out_shardings=shardings)(params)
        for seed, good in enumerate(is_good, 1):
            params, state = update(random_tree(trained, seed), state, params, good)
    return params, state


@cache
def on_one_device(name: str):
    params, state = three_updates(program_of(name, None))
    return jax.tree.map(np.asarray, (params, state))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.costly
def test_updates_on_a_mesh_equal_those_on_one_device(name, mesh):
    program = program_of(name, MESHES[mesh])
    found = three_updates(program)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree.leaves(on_one_device(name)),
        strict=True,
    ):
        place = jax.tree_util.keystr(path)
        # Products of 128 gradients are sums of large terms that may cancel.
        atol = 1e-6 * (np.abs(y).max() if ".statistic" in place else 1.0)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol, err_msg=place)
    abstract = program.abstract_state
    wanted = jax.tree.leaves((abstract.params, abstract.opt_state))
    for x, want in zip(jax.tree.leaves(found), wanted, strict=True):
        assert x.sharding.is_equivalent_to(want.sharding, x.ndim), (x.sharding, want.sharding)


LORA = ("lora.rank=2", "model.moe.bias_update_speed=0")


@pytest.mark.parametrize("lora", [(), LORA], ids=["all parameters", "LoRA"])
@pytest.mark.costly
def test_groups_apply_to_the_parameters_of_their_layers_alone(lora):
    def params_after(*keys: str):
        return three_updates(program_of("adamw", MESHES["dp2-fsdp2-tp2"], *lora, *keys))[0]

    found = params_after(
        "optimizer.groups={experts: {learning_rate: 0}, attention: {weight_decay: 0.7}}"
    )
    plain, strong = params_after(), params_after("optimizer.weight_decay=0.7")
    frozen = params_after("optimizer.learning_rate=1e-30")
    kinds = set()
    for (path, x), start, usual, decayed in zip(
        jax.tree_util.tree_leaves_with_path(found),
        *map(jax.tree.leaves, (frozen, plain, strong)),
        strict=True,
    ):
        kind = kind_of_parameter(path)
        kinds.add(kind)
        wanted = {"experts": start, "attention": decayed}.get(kind, usual)
        np.testing.assert_allclose(x, wanted, rtol=1e-6, err_msg=jax.tree_util.keystr(path))
        if kind == "attention":
            assert np.abs(np.asarray(x) - np.asarray(usual)).max() > 1e-5
    assert {"experts", "attention"} <= kinds and (lora or len(kinds) == 5), kinds


@pytest.mark.parametrize("mesh", ["dp2-fsdp2-tp2", *(release(x) for x in ("tp8", "fsdp8"))])
@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", "bfloat16"), ("muon", "bfloat16"), ("adamw", "int8")]
)
@pytest.mark.costly
def test_moments_are_rounded_alike_on_every_mesh(name, dtype, mesh):
    keys = [f"optimizer.moments_dtype={dtype}"]
    found = three_updates(program_of(name, MESHES[mesh], *keys))
    wanted = three_updates(program_of(name, None, *keys))
    rounded = equal = 0
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        where = jax.tree_util.keystr(path)
        # Another rounding of the sums may choose the other neighbour, rarely.
        np.testing.assert_allclose(x, y, rtol=2**-6, atol=1e-2, err_msg=where)
        rounded, equal = rounded + x.size, equal + np.sum(np.isclose(x, y, rtol=1e-5, atol=1e-6))
    assert equal > 0.999 * rounded


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.costly
def test_a_bad_step_changes_nothing_in_the_state(name):
    program = program_of(name, MESHES["dp2-fsdp2-tp2"])
    once = three_updates(program, (True,))[1]
    kept = three_updates(program, (True, False))[1]
    for before, after in zip(jax.tree.leaves(once), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("name", NAMES)
def test_moments_are_as_registered_and_in_shards_as_their_parameters(name):
    program = program_of(name, MESHES["dp2-fsdp2-tp2"])
    state, entry = program.abstract_state, OPTIMIZERS[name]
    layouts = {}
    for x, is_matrix in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(matrices(state.params)), strict=True
    ):
        count = entry.matrix_moments if is_matrix else entry.moments
        if name == "adafactor" and sorted((0, *x.shape))[-2] < 128:
            count = 1  # too small for sums of rows and columns
        key = (x.shape, x.sharding.spec)
        layouts[key] = layouts.get(key, 0) + count
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state):
        if {getattr(key, "name", "") for key in path} & {*entry.exact}:
            continue  # no moments
        key = (x.shape, x.sharding.spec)
        found[key] = found.get(key, 0) + 1
    for key, count in layouts.items():
        assert found.get(key, 0) == count, key


@pytest.mark.parametrize(  # tests/test_train.py has adamw
    ("name", "moments"),
    [
        ("muon", "null"),
        ("adamw", "int8"),
        slow("adamw", "bfloat16"),
        *(slow(x, "null") for x in ("schedule_free_adamw", "soap")),
        *(release(x, "null") for x in ("adafactor", "lion", "sgd")),
    ],
)
@pytest.mark.costly
def test_a_resumed_run_is_bit_equal(name, moments, tmp_path):
    config, keys = write_config(tmp_path), [*named(name), "mesh.fsdp=2"]
    keys += [f"optimizer.moments_dtype={moments}"]
    if name == "adafactor":  # it factors from 128 features on
        keys += ["model.hidden_size=128", "model.intermediate_size=128"]
    assert run(config, *keys, f"run.dir={tmp_path}/whole") == 0
    assert run(config, *keys, "training.steps=3") == 0
    assert run(config, *keys) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
