"""A DPO step equals the formula over the whole logits of a plain model, on every mesh."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from conftest import MESHES, ONE_DEVICE, ROOT, release, slow
from program_runs import LENGTH, ROWS, TINY, leaves, placed
from test_int8_base import INT8, floats
from test_lora import plain_merge, stripped
from test_step import assert_same_layout

from configs.build import build_program, build_sharding_table, describe_parameters
from configs.schema import load_config
from model.lora import adapters_of
from parallel.sharding.mesh import MeshConfig

GRID = MESHES["dp2-fsdp2-tp2"]
BETA, SMOOTHING = 0.3, 0.2
# A margin has BETA times four sums of at most LENGTH log-probabilities of about log(1 / 256), each
# rounded once to float32: 4.6e-6. The rounding of single log-probabilities is smaller.
MARGIN_BOUND = 4 * BETA * float(np.spacing(np.float32(LENGTH * np.log(256)))) / 2
DPO = (
    "training.objective=dpo",
    "data.packing=pairs",
    "data.files=pairs.jsonl",
    f"training.dpo.beta={BETA}",
    f"training.dpo.label_smoothing={SMOOTHING}",
    "optimizer.schedule=constant",
    "model.num_hidden_layers=1",
)
EXPERTS = ("model.moe.num_experts=4", "model.moe.router=topk_softmax")
SPARSE = (*EXPERTS, "model.moe.router_aux_loss_coef=0")
LORA = ("lora.rank=4", "lora.alpha=6")  # test_lora merges with scale 1.5


def config_on(mesh: MeshConfig, *overrides: str):
    sizes = [f"mesh.{name}={size}" for name, size in mesh.model_dump().items()]
    return load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *DPO, *sizes, *overrides])


@cache
def program_on(mesh: MeshConfig, *overrides: str):
    return build_program(config_on(mesh, *overrides), jax.devices()[: mesh.num_devices])


@pytest.fixture(scope="module")
def pairs() -> dict[str, np.ndarray]:
    """Four pairs: prompts and answers of different lengths, padding after both."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 256, (ROWS, LENGTH + 1)).astype(np.int32)
    place = np.arange(LENGTH)
    ends, begins = rng.integers(9, LENGTH, (ROWS, 1)), rng.integers(2, 6, (ROWS, 1))
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(place, (ROWS, 1)).astype(np.int32),
        "segment_ids": np.where(place < ends, 0, -1).astype(np.int32),
        "loss_mask": ((place >= begins) & (place < ends - 1)).astype(np.float32),
    }


def moved(tree, size: float):
    """Return parameters with random changes that are equal on every mesh."""

    def alter(path, x):
        rng = np.random.default_rng(len(jax.tree_util.keystr(path)))
        noise = (size * rng.standard_normal(x.shape)).astype(np.float32)
        return jax.device_put(np.asarray(x) + noise, x.sharding)

    return jax.tree_util.tree_map_with_path(alter, tree)


def started(mesh: MeshConfig, *overrides: str):
    """Return a program, and a state whose trained and reference parameters differ."""
    program = program_on(mesh, *overrides)
    with jax.set_mesh(program.tp.mesh):
        state = program.init()
        trees = state.reference, program.trained(state.params)
        for got, want in zip(*map(jax.tree.leaves, trees), strict=True):
            np.testing.assert_array_equal(got, want)
        params = program.with_trained(state.params, moved(state.reference, 0.02))
        return program, replace(state, params=params, reference=moved(state.reference, 0.01))


def formula(config, state, pairs):
    """Return (loss and metrics, gradients) by autodiff of the formula, on one device in float64."""
    with jax.enable_x64(True):
        return _formula(config, state, pairs)


def _formula(config, state, pairs):
    plain = partial(jax.tree.map, lambda x: jnp.asarray(np.asarray(x, np.float64)))
    params, reference = plain(floats(state.params)), plain(state.reference)
    adapters = adapters_of(params)

    def whole(trained):
        return plain_merge(stripped(params), trained) if adapters else trained

    def answers(tree):
        rows = (pairs[name] for name in ("tokens", "positions", "segment_ids"))
        logits, _ = numpy_model.forward(config, tree, *rows)
        losses = numpy_model.token_losses(logits, pairs["targets"])
        return -jnp.where(pairs["loss_mask"] > 0, losses, 0).sum(-1)

    def loss(trained, kept):
        reward = BETA * (answers(whole(trained)) - answers(whole(kept)))
        chosen, rejected = reward[0::2], reward[1::2]
        margin = chosen - rejected
        each = (1 - SMOOTHING) * jnp.log1p(jnp.exp(-margin))
        each += SMOOTHING * jnp.log1p(jnp.exp(margin))
        return each.mean(), {
            "loss": each.mean(),
            "dpo/accuracy": jnp.mean(margin > 0),
            "dpo/margin": margin.mean(),
            "dpo/reward_chosen": chosen.mean(),
            "dpo/reward_rejected": rejected.mean(),
        }

    grad = jax.jit(jax.grad(loss, has_aux=True))
    grads, metrics = grad(adapters or params, reference)
    return {name: float(x) for name, x in metrics.items()}, leaves(grads)


@pytest.mark.parametrize(
    ("mesh", "options", "accumulation"),
    [
        (ONE_DEVICE, (), 1),
        (GRID, (), 2),
        slow(MESHES["tp4-sp2"], ("parallel.overlap=ring", *LORA), 1),
        (ONE_DEVICE, (*LORA, INT8), 1),
        release(GRID, ("parallel.overlap=ring", *LORA, INT8), 2),
        release(GRID, ("parallel.overlap=split", *LORA), 1),
        release(MESHES["tp4-sp2"], ("model.remat=full",), 2),
        slow(MESHES["ep2-fsdp2-sp2"], SPARSE, 2),
    ],
)
@pytest.mark.costly
def test_loss_metrics_and_gradients_equal_the_formula(pairs, mesh, options, accumulation):
    program, state = started(mesh, *options)
    want, want_grads = formula(program.config, state, pairs)
    assert 0 < want["dpo/accuracy"] < 1
    with jax.set_mesh(program.tp.mesh):
        batch = placed(program, pairs, accumulation)
        found, _, grads = jax.jit(program.step_gradients)(state, batch)
    assert {name: float(x) for name, x in found.items()} == pytest.approx(
        want, rel=1e-4, abs=MARGIN_BOUND
    )
    assert float(found["loss"]) == pytest.approx(want["loss"], rel=3e-6)
    grads = leaves(grads)
    assert grads.keys() == want_grads.keys()
    for name, grad in want_grads.items():
        bound = 2e-5 * np.abs(grad).max()
        assert bound > 0 and np.abs(grads[name] - grad).max() <= bound, name


def test_the_auxiliary_loss_of_experts_is_that_of_other_objectives(pairs):
    found = {}
    for coefficient in (0, 1):
        experts = (*EXPERTS, f"model.moe.router_aux_loss_coef={coefficient}")
        program, state = started(ONE_DEVICE, *experts)
        with jax.set_mesh(program.tp.mesh):
            batch = placed(program, pairs, 2)
            of_pairs = jax.jit(program.step_gradients)(state, batch)
            of_tokens = jax.jit(program.gradients)(state.params, batch)
        found[coefficient] = [leaves(grads) for _, _, grads in (of_pairs, of_tokens)]
    for name in found[0][0]:
        preferences, tokens = (found[1][n][name] - found[0][n][name] for n in range(2))
        scale = max(np.abs(grads[name]).max() for both in found.values() for grads in both)
        assert np.abs(preferences - tokens).max() <= 2e-6 * scale, name
        assert "router" not in name or np.abs(tokens).max() > 1e-2 * scale


def test_evaluation_sums_over_pairs_and_leaves_out_the_padding(pairs):
    program, state = started(GRID)
    want, _ = formula(program.config, state, pairs)
    masked = {**pairs, "loss_mask": pairs["loss_mask"].copy()}
    masked["loss_mask"][2:4] = 0
    alone = {name: field[[0, 1, 4, 5, 6, 7]] for name, field in pairs.items()}
    want_masked, _ = formula(program.config, state, alone)
    with jax.set_mesh(program.tp.mesh):
        for fields, mean, count in ((pairs, want, 4), (masked, want_masked, 3)):
            sums = program.preference_sums(state.params, state.reference, placed(program, fields))
            assert sums.pop("pairs") == count
            means = {name: float(total) / count for name, total in sums.items()}
            assert means == pytest.approx(mean, rel=1e-4, abs=MARGIN_BOUND)


@pytest.mark.parametrize("options", [(), slow(LORA)])
def test_a_step_keeps_the_reference_and_has_no_optimizer_state_for_it(pairs, options):
    program, state = started(GRID, *options)
    abstract = program.abstract_state
    assert_same_layout(state, abstract)
    assert leaves(abstract.reference).keys() == leaves(program.trained(abstract.params)).keys()
    shapes = [x.shape for x in jax.tree.leaves(abstract.reference)]
    assert [x.shape for x in jax.tree.leaves(abstract.opt_state) if x.shape] == [*shapes, *shapes]
    reference = leaves(state.reference)
    with jax.set_mesh(program.tp.mesh):
        batch = placed(program, pairs)
        for _ in range(2):
            state, metrics = program.train_step(state, batch)
        assert program.train_step._cache_size() == 1
    assert_same_layout(state, abstract)
    for name, array in leaves(state.reference).items():
        np.testing.assert_array_equal(array, reference[name])
    assert {"loss", "grad_norm", "dpo/accuracy", "dpo/margin"} <= metrics.keys()


def test_the_start_lines_name_the_objective_and_count_the_reference():
    lines = {options: [*program_on(GRID, *options).describe_objective()] for options in ((), LORA)}
    assert lines[()] == [
        "objective dpo with beta 0.3; the reference model is a frozen copy of all parameters "
        "before the first step"
    ]
    assert "frozen copy of the adapters" in lines[LORA][0]
    table = build_sharding_table(config_on(GRID), program_on(GRID))
    assert "{mu,nu,reference}.norm.scale" in {row.name for row in table["optimizer"]}
    (line,) = describe_parameters(program_on(GRID), table)
    assert line.startswith("memory of parameters, optimizer and reference model: ")


def test_the_flops_include_the_forward_of_the_reference():
    program = program_on(ONE_DEVICE)
    assert program.flops_per_token(LENGTH) == pytest.approx(
        4 / 3 * program.plan.flops_per_token(LENGTH)
    )
