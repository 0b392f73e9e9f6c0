"""Reaction of the host to bad steps: when a run goes on, rolls back, or ends."""

from types import SimpleNamespace

import pytest

from training.goodput import Goodput
from training.guard import GuardConfig
from training.resume import ResumePoint
from training.spikes import Rollback, SpikeHandler, TrainingError

LIMIT = 3
GOOD = {"loss": 2.0, "grad_norm": 1.0, "loss_z": 0.0, "grad_z": 0.0, "bad_steps": 0}
SPIKE = {**GOOD, "grad_z": 9.0}
NAN = {**GOOD, "loss": float("nan")}


def handler(policy: str = "skip", latest_step: int | None = 4) -> SpikeHandler:
    """Return a handler beside the checkpoint of a step, or beside none."""
    checkpoints = SimpleNamespace(finish=lambda: None, latest_step=latest_step)
    find_again = lambda: ResumePoint(step=latest_step)  # noqa: E731
    resumer = SimpleNamespace(checkpoints=checkpoints, find_again=find_again)
    guard = GuardConfig(on_spike=policy, max_bad_steps=LIMIT)
    return SpikeHandler(guard, resumer, Goodput())


def reaction(to: dict[str, float], bad_steps: int = 0, **options) -> str | None:
    try:
        handler(**options).handle_spike(5, {**to, "bad_steps": bad_steps, "step_time": 0.1})
    except (Rollback, TrainingError) as error:
        return type(error).__name__
    return None


@pytest.mark.parametrize("policy", ["off", "warn", "skip", "rollback"])
@pytest.mark.parametrize("bad_steps", [1, LIMIT - 1, LIMIT])
def test_a_run_ends_at_the_configured_number_of_bad_steps(policy, bad_steps) -> None:
    """Also if it is the last step of the run, after which there is no other to notice it."""
    expected = "TrainingError" if bad_steps == LIMIT else None
    assert reaction(NAN, bad_steps, policy=policy) == expected


def test_only_a_finite_spike_rolls_back_and_only_to_a_checkpoint() -> None:
    assert reaction(GOOD, policy="rollback") is None
    assert reaction(SPIKE, 1, policy="rollback") == "Rollback"
    assert reaction(SPIKE, 1, policy="rollback", latest_step=None) is None
    assert reaction(SPIKE, 1, policy="rollback", latest_step=0) is None  # only parameters
    assert reaction(SPIKE, 1, policy="skip") is None
    assert reaction(NAN, 1, policy="rollback") is None


@pytest.mark.parametrize("saved_by", ["earlier", "this"])
def test_a_process_that_rolls_back_is_not_named_as_an_earlier_one(saved_by) -> None:
    first, second = {"began": "10:00"}, {"began": "11:00"}
    by_first, by_second = ResumePoint(4, lineage=(first,)), ResumePoint(4, lineage=(first, second))
    spikes = handler("rollback")
    spikes._resumer.find_again = lambda: by_first if saved_by == "earlier" else by_second
    point = ResumePoint(3, lineage=(first,))  # of the second process
    for _ in range(2):
        point = spikes.roll_back(6, point)
        assert point.lineage == (first,)


def test_a_run_rolls_back_to_one_checkpoint_a_limited_number_of_times() -> None:
    spikes, point = handler("rollback"), ResumePoint(step=4)
    for count in range(1, LIMIT + 1):
        point = spikes.roll_back(6, point)
        # Batches 4 and 5 are left out, then 6 and 7, and so on.
        assert (point.step, point.skipped) == (4, ((4, 4 + 2 * count),))
    with pytest.raises(TrainingError, match=f"spiked {LIMIT + 1} times after checkpoint 4"):
        spikes.roll_back(6, point)


def test_a_skipped_step_loses_its_own_seconds_and_not_those_of_a_wait_before_it() -> None:
    ledger = Goodput({"step": 100.0, "checkpoint": 18.0, "data_wait": 2.0})
    spikes = handler()
    spikes._goodput = ledger
    values = {**NAN, "bad_steps": 1, "step_time": 21.0, "save_blocked": 18.0, "data_wait": 2 / 21}
    spikes.handle_spike(5, values)
    assert ledger.seconds["lost"] == pytest.approx(1.0)


def test_one_bad_step_leaves_no_room_for_a_rollback() -> None:
    with pytest.raises(
        ValueError, match=r"training\.guard\.max_bad_steps=1 ends the run at the first"
    ):
        GuardConfig(on_spike="rollback", max_bad_steps=1)
    GuardConfig(on_spike="skip", max_bad_steps=1)
