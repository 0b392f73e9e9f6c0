"""The training step: accumulation, masking, donation, equal initial states on every mesh."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MESHES, ONE_DEVICE, ROOT, slow
from program_runs import (
    TINY,
    assert_same_gradients,
    fields,
    leaves,
    placed,
    program_on,
)

import training.step
from configs.build import build_program
from configs.schema import load_config
from parallel.sharding.mesh import MeshConfig
from training.moving_average import init_ema, update_ema
from training.optimizers import OptimizerConfig, decays
from training.state import TrainState
from training.step import Program

__all__ = ["fields"]
GRID = MeshConfig(dp=2, tp=2)


@cache
def fresh_on(mesh: MeshConfig) -> TrainState:
    """Return a fresh state for tests that only read; never donated."""
    with jax.set_mesh(program_on(mesh).tp.mesh):
        return program_on(mesh).init()


@cache
def gradients_on(mesh: MeshConfig):
    return jax.jit(program_on(mesh).gradients)


def gradients(fields: dict[str, np.ndarray], accumulation: int = 1, mesh: MeshConfig = GRID):
    """Return the mean loss, and its gradients as numpy by path."""
    program = program_on(mesh)
    with jax.set_mesh(program.tp.mesh):
        batch = placed(program, fields, accumulation)
        means, _, grads = gradients_on(mesh)(fresh_on(mesh).params, batch)
    return float(means["loss"]), leaves(grads)


def assert_same_layout(state: TrainState, abstract: TrainState):
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (got.sharding, got.shape, got.dtype) == (want.sharding, want.shape, want.dtype)


@pytest.mark.parametrize(
    ("mesh", "overlap", "remat", "accumulation"),
    [
        slow(MESHES["fsdp8"], "split", "none", 1),
        (MeshConfig(dp=2, fsdp=4), "ring", "full", 1),
        (MeshConfig(dp=2, fsdp=2), "bidirectional", "dots", 2),
        (MESHES["ep2-fsdp2-sp2"], "bidirectional", "dots", 1),
        (MeshConfig(fsdp=2, sp=2, tp=2), "bidirectional", "dots", 1),
    ],
    ids=str,
)
@pytest.mark.costly
def test_gradients_over_rings_equal_those_of_one_device(fields, mesh, overlap, remat, accumulation):
    options = f"parallel.overlap_fsdp={overlap}", f"model.remat={remat}"
    program = program_on(mesh, *options)
    with jax.set_mesh(program.tp.mesh):
        batch = placed(program, fields, accumulation)
        means, _, grads = jax.jit(program.gradients)(fresh_on(mesh).params, batch)
    want_loss, want = gradients(fields, mesh=ONE_DEVICE)
    assert float(means["loss"]) == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(leaves(grads), want)


@pytest.mark.parametrize(
    ("dtype", "scales", "most"),
    [("int8", "channel", 0.08), ("int8", "tensor", 0.12), ("fp8_e4m3", "channel", 0.3)],
)
@pytest.mark.parametrize("mesh", [ONE_DEVICE, GRID, MESHES["tp8"], MESHES["fsdp8"]], ids=str)
@pytest.mark.costly
def test_quantized_matmuls_change_gradients_by_their_rounding(fields, mesh, dtype, scales, most):
    program = program_on(mesh, f"model.matmul_dtype={dtype}", f"model.matmul_scales={scales}")
    with jax.set_mesh(program.tp.mesh):
        means, _, grads = jax.jit(program.gradients)(fresh_on(mesh).params, placed(program, fields))
    want_loss, want = gradients(fields, mesh=ONE_DEVICE)
    assert float(means["loss"]) == pytest.approx(want_loss, rel=3e-3)
    for name, grad in leaves(grads).items():
        distance = np.linalg.norm(grad - want[name]) / np.linalg.norm(want[name])
        assert 1e-4 < distance < most, name


def test_gradients_of_frozen_layers_are_zero_and_count_in_no_norm(fields):
    program = program_on(GRID, "optimizer.groups={embedding: {learning_rate: 0}}")
    with jax.set_mesh(program.tp.mesh):
        batch = placed(program, fields)
        _, _, grads = jax.jit(program.gradients)(fresh_on(GRID).params, batch)
        _, metrics = program.train_step(program.init(), batch)
    _, want = gradients(fields)
    found, kinds = leaves(grads), {name: "embed" in name for name in want}
    assert set(kinds.values()) == {True, False}
    for name, is_frozen in kinds.items():
        np.testing.assert_allclose(
            found[name], 0 * want[name] if is_frozen else want[name], rtol=1e-4, atol=1e-7
        )
    norm = np.sqrt(
        sum(np.sum(np.square(want[name])) for name, frozen in kinds.items() if not frozen)
    )
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_terms_of_the_objective_are_in_the_gradients_and_not_in_the_loss(fields):
    program = program_on(GRID, "training.z_loss=0.01", "training.label_smoothing=0.1")

    def logits_of(params, batch):
        part = {name: field[0] for name, field in batch.items()}
        model, hidden, *_ = program.hidden_states(params, part, None, dropless=True)
        return model.logits(hidden)

    with jax.set_mesh(program.tp.mesh):
        step = jax.jit(program.gradients)
        params = fresh_on(GRID).params
        means, _, grads = step(params, placed(program, fields))
        parts_means, _, parts_grads = step(params, placed(program, fields, 4))
        total, tokens, _ = program.eval_step(params, placed(program, fields))
        logits = jax.jit(logits_of)(params, placed(program, fields))
    logits = np.asarray(logits, np.float64)[..., : program.config.vocab_size]
    log_sums, mask = np.log(np.sum(np.exp(logits), axis=-1)), fields["loss_mask"]
    chosen = np.take_along_axis(logits, fields["targets"][..., None], axis=-1)[..., 0]
    extra = 0.01 * log_sums**2 + 0.1 * (chosen - logits.mean(axis=-1))
    loss, plain = gradients(fields)
    assert float(means["loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(total / tokens) == pytest.approx(loss, rel=1e-6)
    assert float(means["extra_loss"]) == pytest.approx(np.sum(extra * mask) / mask.sum(), rel=1e-5)
    assert float(parts_means["extra_loss"]) == pytest.approx(float(means["extra_loss"]), rel=1e-5)
    assert_same_gradients(leaves(parts_grads), leaves(grads))
    with pytest.raises(AssertionError):
        assert_same_gradients(leaves(grads), plain)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulated_gradients_equal_whole_batch_gradients(fields, accumulation):
    loss, grads = gradients(fields)
    parts_loss, parts_grads = gradients(fields, accumulation)
    assert parts_loss == pytest.approx(loss, rel=1e-6)
    assert_same_gradients(parts_grads, grads)


@pytest.mark.parametrize("dropout", ["model.attention_dropout=0.5", "lora.dropout=0.5"])
@pytest.mark.costly
def test_equal_microbatches_drop_different_weights(fields, dropout):
    ranks = ("lora.rank=2", "lora.targets=[qkv]") if dropout.startswith("lora") else ()
    program = program_on(ONE_DEVICE, "model.num_hidden_layers=1", dropout, *ranks)
    with jax.set_mesh(program.tp.mesh):
        params = program.init().params
        one = placed(program, fields)
        two = {name: jnp.concatenate([field, field]) for name, field in one.items()}
        found = [
            jax.jit(program.gradients)(params, batch, key)[2]
            for key in (None, jax.random.key(0))
            for batch in (one, two)
        ]
    plain, plain_twice, dropped, dropped_twice = map(leaves, found)
    assert_same = partial(np.testing.assert_allclose, rtol=0)
    changed = 0
    for name, grad in plain.items():
        scale = np.abs(grad).max()
        assert_same(plain_twice[name], grad, atol=1e-5 * scale)
        changed += np.abs(dropped_twice[name] - dropped[name]).max() > 1e-2 * scale
    assert changed


def test_the_loss_is_the_mean_over_unmasked_tokens(fields):
    program, params = program_on(GRID), fresh_on(GRID).params
    with jax.set_mesh(program.tp.mesh):
        batch = placed(program, fields)
        total, count, _ = program.eval_step(params, batch)
    loss, _ = gradients(fields)
    assert count == fields["loss_mask"].sum()
    assert loss == pytest.approx(float(total) / float(count), rel=1e-6)


def test_masked_targets_change_nothing(fields):
    loss, grads = gradients(fields)
    other = np.where(fields["loss_mask"] > 0, fields["targets"], 7)
    assert (other != fields["targets"]).any()
    changed_loss, changed_grads = gradients({**fields, "targets": other.astype(np.int32)})
    assert changed_loss == loss
    for name, grad in grads.items():
        np.testing.assert_array_equal(changed_grads[name], grad, err_msg=name)


def test_tokens_of_a_masked_row_change_nothing(fields):
    mask, tokens = fields["loss_mask"].copy(), fields["tokens"].copy()
    mask[3], tokens[3] = 0, 65
    loss, grads = gradients({**fields, "loss_mask": mask})
    changed_loss, changed_grads = gradients({**fields, "loss_mask": mask, "tokens": tokens})
    assert changed_loss == loss != gradients(fields)[0]
    for name, grad in grads.items():
        np.testing.assert_array_equal(changed_grads[name], grad, err_msg=name)


def test_a_fully_masked_batch_has_zero_loss_and_gradients(fields):
    loss, grads = gradients({**fields, "loss_mask": np.zeros_like(fields["loss_mask"])})
    assert loss == 0
    assert all(not grad.any() for grad in grads.values())


def test_the_state_is_donated_and_keeps_its_layout(fields):
    program = program_on(GRID)
    with jax.set_mesh(program.tp.mesh):
        state = program.init()
        after, _ = program.train_step(state, placed(program, fields))
        jax.block_until_ready(after)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert_same_layout(after, program.abstract_state)
    assert int(after.step) == 1


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.costly
def test_a_fresh_state_has_the_layout_of_the_abstract_state(name):
    assert_same_layout(fresh_on(MESHES[name]), program_on(MESHES[name]).abstract_state)


@pytest.mark.parametrize("name", MESHES)
def test_initial_parameters_are_bit_equal_on_every_mesh(name):
    wanted, found = leaves(fresh_on(ONE_DEVICE).params), leaves(fresh_on(MESHES[name]).params)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        assert found[path].tobytes() == value.tobytes(), path


def test_layers_and_linears_have_different_initial_values():
    params = fresh_on(ONE_DEVICE).params
    qkv = params["layers"]["attention"]["qkv"]["kernel"]
    kernels = [np.asarray(qkv[name][layer]) for name in "qkv" for layer in range(2)]
    assert len({kernel.tobytes() for kernel in kernels}) == 6


def test_metrics_are_loss_unclipped_norm_and_learning_rate_of_the_step(fields):
    program = program_on(GRID)
    loss, grads = gradients(fields)
    with jax.set_mesh(program.tp.mesh):
        state, metrics = program.train_step(program.init(), placed(program, fields))
        _, second = program.train_step(state, placed(program, fields))
    norm = np.sqrt(sum(np.sum(np.float64(grad) ** 2) for grad in grads.values()))
    assert norm > 1.0, "clipping must be at work"
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert metrics["learning_rate"] == jnp.float32(program.schedule(0))
    assert second["learning_rate"] == jnp.float32(program.schedule(1))
    assert float(second["loss"]) < loss


def unguarded(program: Program):
    """Return the update (params, opt_state, gradients) of optax's AdamW, without a guard."""
    config = OptimizerConfig()
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            program.schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )

    def update(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, optax.tree.norm(grads)

    return update


def test_the_guard_is_bit_exact_on_good_steps(fields):
    # From the same gradients: two programs that also compute these may round them differently.
    program = program_on(GRID)
    update, by_hand = jax.jit(program.apply_gradients), jax.jit(unguarded(program))
    with jax.set_mesh(program.tp.mesh):
        batch, state = placed(program, fields), program.init()
        params, opt_state = state.params, state.opt_state
        for _ in range(3):
            means, report, grads = gradients_on(GRID)(state.params, batch)
            state, metrics = update(state, means["loss"], report, grads)
            params, opt_state, norm = by_hand(params, opt_state, grads)
            assert (metrics["loss"], metrics["grad_norm"]) == (means["loss"], norm)
    found, wanted = leaves((state.params, state.opt_state)), leaves((params, opt_state))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        assert found[path].tobytes() == value.tobytes(), path


def test_the_guard_needs_no_second_state(fields, monkeypatch):
    monkeypatch.setattr(training.step, "norms_by_kind", lambda *_: {})  # not the guard
    program = dataclasses.replace(program_on(GRID))  # with a step of its own

    def step(params, opt_state, batch):
        means, _, grads = program.gradients(params, batch)
        return *unguarded(program)(params, opt_state, grads), means

    plain = jax.jit(step, donate_argnums=(0, 1))
    with jax.set_mesh(program.tp.mesh):
        batch, state = placed(program, fields), program.abstract_state
        programs = (
            program.train_step.lower(state, batch),
            plain.lower(state.params, state.opt_state, batch),
        )
    sizes = [it.compile().memory_analysis().temp_size_in_bytes for it in programs]
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
    assert held // GRID.num_devices > 10_000 and sizes[0] < sizes[1] + 512


def test_without_ema_decay_there_is_no_moving_average():
    assert fresh_on(ONE_DEVICE).ema is None


def test_the_moving_average_of_bfloat16_parameters_is_float32(fields):
    overrides = ["mesh.tp=1", "model.param_dtype=bfloat16", "optimizer.ema_decay=0.999"]
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *overrides])
    program = build_program(config, jax.devices()[:1])
    with jax.set_mesh(program.tp.mesh):
        abstract = program.abstract_state
        assert {x.dtype.name for x in jax.tree.leaves(abstract.params)} == {"bfloat16"}
        assert {x.dtype.name for x in jax.tree.leaves(abstract.ema)} == {"float32"}
        average = init_ema(fresh_on(ONE_DEVICE).params)
        total, count, _ = program.eval_step(average, placed(program, fields))
    assert float(total / count) == pytest.approx(gradients(fields, mesh=ONE_DEVICE)[0], rel=0.1)


def test_the_moving_average_keeps_steps_below_bfloat16_precision():
    average = init_ema({"x": jnp.ones(3, jnp.bfloat16)})
    for _ in range(100):
        average = update_ema(average, {"x": jnp.full(3, 2, jnp.bfloat16)}, 0.999)
    np.testing.assert_allclose(average["x"], 2 - 0.999**100, rtol=1e-5)


@pytest.mark.slow
def test_zigzag_rows_and_dropout_equal_one_device(fields) -> None:
    """Ring attention over reordered rows, with dropout keyed by step and microbatch."""

    def losses(mesh: MeshConfig, *overrides: str) -> list[float]:
        sizes = [f"mesh.{name}={size}" for name, size in mesh.model_dump().items()]
        dropping = ["model.attention_dropout=0.3", "model.dtype=float32"]
        config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *sizes, *dropping, *overrides])
        program = build_program(config, jax.devices()[: mesh.num_devices])
        found = []
        with jax.set_mesh(program.tp.mesh):
            state, batch = program.init(), placed(program, fields, 2)
            for _ in range(2):
                state, metrics = program.train_step(state, batch)
                found.append(float(metrics["loss"]))
        return found

    want = losses(ONE_DEVICE, "model.attention=vanilla")
    np.testing.assert_allclose(
        losses(MeshConfig(dp=2, tp=2, sp=2), "model.attention=ring"), want, rtol=2e-6
    )
    whole = losses(ONE_DEVICE, "model.attention=vanilla", "model.attention_dropout=0.0")
    assert abs(whole[0] - want[0]) > 1e-5
