"""The spike guard: against numpy, and bit-equal on every device."""

import dataclasses
import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ROOT, slow
from jax import lax

from configs.build import build_program
from configs.schema import load_config
from training.guard import MEMORY, WARMUP, GuardConfig, GuardState, fresh_guard, judge
from training.state import TrainState
from training.step import Program

STATISTICS = ("loss_mean", "loss_var", "grad_mean", "grad_var", "count")
POLICIES = ("off", "warn", "skip", "rollback")


@cache
def scanned(on_spike: str):
    """Return `judge` over a whole run, jitted."""
    config = GuardConfig(on_spike=on_spike)

    def body(guard, numbers):
        is_good, guard, metrics = judge(guard, *numbers, config)
        return guard, (is_good, guard, metrics)

    return jax.jit(lambda guard, numbers: lax.scan(body, guard, numbers))


def judged(losses, norms, on_spike="warn", start: GuardState | None = None):
    """Return (is_good, states, metrics) of every step as numpy, and the last state."""
    numbers = jnp.asarray(losses, jnp.float32), jnp.asarray(norms, jnp.float32)
    last, (good, states, metrics) = scanned(on_spike)(start or fresh_guard(), numbers)
    return np.asarray(good), jax.device_get(vars(states)), jax.device_get(metrics), last


def noise(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return 3 + 0.05 * rng.normal(size=count), np.exp(0.2 * rng.normal(size=count))


def statistics(guard: GuardState) -> dict[str, bytes]:
    return {name: np.asarray(getattr(guard, name)).tobytes() for name in STATISTICS}


@cache
def calm() -> GuardState:
    """Return the guard after 60 ordinary steps."""
    return judged(*noise(60))[-1]


def weighted(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation: uniform up to MEMORY steps, then exponential."""
    n = len(values)
    first, keep = min(n, MEMORY), 1 - 1 / MEMORY
    late = np.arange(n - first, 0, -1) - 1
    weights = np.concatenate(
        [np.full(first, keep ** (n - first) / first), (1 - keep) * keep ** late.astype(float)]
    )
    assert weights.sum() == pytest.approx(1)
    mean = np.average(values, weights=weights)
    return mean, math.sqrt(np.average((values - mean) ** 2, weights=weights))


def test_z_scores_are_relative_to_the_weighted_mean_of_earlier_steps():
    losses, norms = noise(400)
    losses += np.linspace(0.2, 0, 400)
    _, states, metrics, _ = judged(losses, norms)
    for name, values in (("loss", losses), ("grad", np.log(norms))):
        for step in (WARMUP, 50, MEMORY, MEMORY + 1, 399):
            mean, deviation = weighted(values[:step])
            z = max(0.0, (values[step] - mean) / deviation)
            assert metrics[f"{name}_z"][step] == pytest.approx(z, rel=1e-3, abs=1e-3)
            after, spread = weighted(values[: step + 1])
            assert states[f"{name}_mean"][step] == pytest.approx(after, rel=1e-5, abs=1e-5)
            assert states[f"{name}_var"][step] == pytest.approx(spread**2, rel=1e-4)
    assert (metrics["loss_z"] > 0.5).any() and (metrics["grad_z"] > 0.5).any()


def test_spikes_are_detected_from_the_first_step_after_warm_up():
    losses, norms = noise(WARMUP + 2)
    for step, is_seen in ((WARMUP - 1, False), (WARMUP, True)):
        raised = losses.copy()
        raised[step] = 30
        good, _, metrics, _ = judged(raised, norms, "skip")
        assert (metrics["loss_z"][step] > 6) == is_seen == (not good[step])
        assert good.sum() == len(good) - is_seen


@pytest.mark.parametrize("which", ["loss", "norm"])
def test_only_a_rise_is_a_spike(which):
    for factor, is_good in ((1e-3, True), (1e3, False)):
        losses, norms = noise(1, seed=1)
        (losses if which == "loss" else norms)[0] *= factor
        good, _, metrics, _ = judged(losses, norms, "skip", start=calm())
        z = metrics["loss_z" if which == "loss" else "grad_z"]
        assert good[0] == is_good and (z[0] > 6) == (not is_good)
        assert z[0] >= 0


@pytest.mark.parametrize("which", ["loss", "norm"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_spike_updates_parameters_and_statistics_only_with_off_and_warn(policy, which):
    losses, norms = noise(1, seed=1)
    (losses if which == "loss" else norms)[0] *= 1e3
    good, _, metrics, after = judged(losses, norms, policy, start=calm())
    applied = policy in ("off", "warn")
    assert good[0] == applied
    assert (statistics(after) == statistics(calm())) == (not applied)
    assert metrics["bad_steps"][0] == metrics["skipped_steps"][0] == (not applied)
    assert int(after.count) == 60 + applied


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_non_finite_step_never_updates_parameters_or_statistics(policy, value):
    for losses, norms in (([value], [1.0]), ([3.0], [value]), ([value], [value])):
        for start in (fresh_guard(), calm()):
            good, _, metrics, after = judged(losses, norms, policy, start=start)
            assert not good[0]
            assert statistics(after) == statistics(start)
            assert metrics["bad_steps"][0] == metrics["skipped_steps"][0] == 1


def test_bad_steps_are_counted_in_a_row_and_in_total():
    losses, norms = noise(8)
    losses[[1, 2, 5]] = math.nan
    good, _, metrics, _ = judged(losses, norms, "off")
    np.testing.assert_array_equal(good, [1, 0, 0, 1, 1, 0, 1, 1])
    np.testing.assert_array_equal(metrics["bad_steps"], [0, 1, 2, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(metrics["skipped_steps"], [0, 1, 2, 2, 2, 3, 3, 3])


def test_a_fully_masked_batch_is_good_and_leaves_the_statistics_alone():
    good, _, metrics, after = judged([0.0], [0.0], "skip", start=calm())
    assert good[0] and metrics["grad_z"][0] == 0
    assert statistics(after) == statistics(calm())


def test_the_guard_recovers_from_a_loss_whose_square_overflows():
    losses, norms = noise(3000, seed=2)
    losses[0], losses[-1] = 1e30, 30
    good, states, metrics, _ = judged(losses, norms, "warn", start=calm())
    assert good.all() and all(np.isfinite(states[name]).all() for name in STATISTICS)
    assert metrics["loss_z"][-1] > 6


def test_noise_and_a_falling_loss_are_not_spikes():
    losses, norms = noise(20_000)
    losses += 8 * np.exp(-np.arange(20_000) / 500)
    _, _, metrics, _ = judged(losses, norms)
    assert 3 < metrics["loss_z"].max() < 6 and 3 < metrics["grad_z"].max() < 6


def test_rounding_of_a_constant_loss_is_not_a_spike():
    losses, norms = np.full(50, 3, np.float32), np.full(50, 0.7, np.float32)
    losses[40], norms[40] = (np.nextafter(x[40], np.float32(9)) for x in (losses, norms))
    _, _, metrics, _ = judged(losses, norms)
    assert 0 < metrics["loss_z"][40] < 0.1 and metrics["grad_z"][40] < 0.1


LENGTH, ROWS, DECAY = 16, 8, 0.75
TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.intermediate_size=64",
    f"data.sequence_length={LENGTH}",
    f"data.global_batch_size={ROWS}",
    "optimizer.warmup_steps=0",
    f"optimizer.ema_decay={DECAY}",
    "training.steps=10",
    "training.guard.on_spike=skip",
]
SPARSE = ["model.moe.num_experts=4", "model.moe.bias_update_speed=0.01"]
PROGRAMS = {"dp2-fsdp2-tp2": [], "ep2-fsdp2-sp2": SPARSE}


class Poisoned(Program):
    """Adds the field `poison` of the batch to one number of one gradient, on one shard."""

    def gradients(self, params, batch, dropout_key=None):
        """Return the gradients with the poison added."""
        means, report, grads = super().gradients(params, batch, dropout_key)
        table = grads["embed"]["table"]
        last = np.zeros(table.shape, bool)
        last[-1, -1] = True
        last = jax.sharding.reshard(jnp.asarray(last), jax.typeof(table).sharding.spec)
        table = jnp.where(last, table + jnp.max(batch["poison"]), table)
        return means, report, {**grads, "embed": {**grads["embed"], "table": table}}


@cache
def poisoned_on(name: str) -> Poisoned:
    sizes = [f"mesh.{axis}={size}" for axis, size in MESHES[name].model_dump().items()]
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *sizes, *PROGRAMS[name]])
    program = build_program(config, jax.devices())
    return Poisoned(**{f.name: getattr(program, f.name) for f in dataclasses.fields(program)})


def batch_of(program: Program, seed: int, *, poison: float = 0.0, mask: float = 1.0):
    """Random rows (1, B, L). mask: weight of the first token of all."""
    rng = np.random.default_rng(seed)
    shape = (1, ROWS, LENGTH)
    fields = {
        "tokens": rng.integers(0, 256, shape, np.int32),
        "targets": rng.integers(0, 256, shape, np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.ones(shape, np.float32),
        "poison": np.full(shape, poison, np.float32),
    }
    fields["loss_mask"][0, 0, 0] = mask
    return {name: jax.device_put(field, program.batch_sharding) for name, field in fields.items()}


def bits(tree) -> dict[str, list[bytes]]:
    """Return the bytes of every shard."""
    return {
        jax.tree_util.keystr(path): [np.asarray(s.data).tobytes() for s in x.addressable_shards]
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def learned(state: TrainState) -> dict[str, list[bytes]]:
    """Return everything that a bad step must not change."""
    statistics = {name: getattr(state.guard, name) for name in STATISTICS}
    return bits((state.params, state.opt_state, state.ema, statistics))


BAD = {
    "nan gradient": {"poison": math.nan},
    "infinite gradient": {"poison": math.inf},
    "gradient whose square overflows": {"poison": 1e30},
    "nan loss": {"mask": math.nan},
}


@pytest.mark.parametrize("name", ["dp2-fsdp2-tp2", slow("ep2-fsdp2-sp2")])
def test_training_after_a_bad_step_is_bit_equal_to_training_without_it(name):
    program = poisoned_on(name)
    with jax.set_mesh(program.tp.mesh):
        first, second = batch_of(program, 0), batch_of(program, 1)
        table = program.abstract_state.params["embed"]["table"]
        assert not table.sharding.is_fully_replicated, "the poison must lie on one shard"

        wanted, _ = program.train_step(program.init(), first)
        after_first = learned(wanted)
        wanted, metrics = program.train_step(wanted, second)
        after_second, rate = learned(wanted), metrics["learning_rate"]
        still = {path for path in after_first if after_first[path] == after_second[path]}
        moments_of_bias = re.compile(r"\.[mn]u\[.*'router'\]\['bias'\]$")  # has no gradient
        assert all(moments_of_bias.search(path) for path in still)

        state, _ = program.train_step(program.init(), first)
        for count, how in enumerate(BAD.values(), 1):
            state, metrics = program.train_step(state, batch_of(program, 2, **how))
            norm, loss = float(metrics["grad_norm"]), float(metrics["loss"])
            assert not math.isfinite(norm) and math.isfinite(loss) == ("poison" in how)
            assert learned(state) == after_first, how
            assert int(state.step) == 1 + count
            assert int(metrics["bad_steps"]) == int(state.guard.skipped_steps) == count
        state, metrics = program.train_step(state, second)
    assert learned(state) == after_second
    assert metrics["learning_rate"] == rate == jnp.float32(program.schedule(1))
    assert int(metrics["bad_steps"]) == 0 and int(metrics["skipped_steps"]) == len(BAD)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.costly
def test_a_skipped_spike_changes_nothing_on_any_device(name):
    program = poisoned_on(name)
    with jax.set_mesh(program.tp.mesh):
        state = program.init()
        ordinary = {"count": 100, "grad_mean": 9.0, "loss_mean": 1.0, "loss_var": 0.25}
        guard = {
            field: jax.device_put(np.asarray(ordinary.get(field, 0), x.dtype), x.sharding)
            for field, x in vars(state.guard).items()
        }
        state = dataclasses.replace(state, guard=GuardState(**guard))
        before = learned(state)
        state, metrics = program.train_step(state, batch_of(program, 0))
    assert metrics["loss_z"] == pytest.approx(2 * (float(metrics["loss"]) - 1), rel=1e-5)
    assert float(metrics["loss_z"]) > 6 and float(metrics["grad_z"]) == 0
    assert learned(state) == before
    assert [float(norms[2]) for norms in metrics["norms"].values()] == [0.0] * len(metrics["norms"])
    assert int(state.step) == int(state.guard.bad_steps) == 1


def test_the_moving_average_starts_at_the_parameters_and_follows_every_update():
    program = poisoned_on("dp2-fsdp2-tp2")
    with jax.set_mesh(program.tp.mesh):
        state = program.init()
        assert bits(state.ema) == bits(state.params)
        wanted = jax.tree.map(np.float64, jax.device_get(state.params))
        for seed, poison in ((0, 0.0), (1, math.nan), (2, 0.0), (3, 0.0)):
            state, _ = program.train_step(state, batch_of(program, seed, poison=poison))
            if not math.isnan(poison):
                params = jax.device_get(state.params)
                wanted = jax.tree.map(lambda e, p: DECAY * e + (1 - DECAY) * p, wanted, params)
    jax.tree.map(
        lambda e, w: np.testing.assert_allclose(e, w, rtol=1e-6, atol=1e-7), state.ema, wanted
    )
    assert bits(state.ema) != bits(state.params)
