"""Checkpoint policy: cadence, requests of one process, which checkpoints stay."""

import math

import pytest

from parallel.cluster.process_group import ProcessGroup
from parallel.cluster.signals import StopRequest
from training import checkpoint_policy
from training.agreement import StepCoordinator
from training.checkpoint_policy import CheckpointConfig, SaveSchedule, steps_to_keep
from training.stragglers import StragglerMonitor


def test_multiples_of_every_and_the_last_step_are_saved():
    schedule = SaveSchedule(CheckpointConfig(every=4), last_step=10)
    assert [step for step in range(1, 11) if schedule.is_due(step)] == [4, 8, 10]


def test_a_save_is_wanted_some_minutes_after_the_last_one(monkeypatch):
    clock = {"now": 1000.0}
    monkeypatch.setattr(checkpoint_policy.time, "monotonic", lambda: clock["now"])
    schedule = SaveSchedule(CheckpointConfig(every_minutes=0.5), last_step=10)
    by_steps = SaveSchedule(CheckpointConfig(), last_step=10)
    wanted = []
    for clock["now"] in (1029.0, 1030.0, 1059.0, 1060.0):
        wanted.append(schedule.wants_save())
        if wanted[-1]:
            schedule.saved()
        assert not by_steps.wants_save()
    assert wanted == [False, True, False, True]


def test_a_save_that_one_process_asks_for_is_agreed_on():
    group = ProcessGroup()
    coordinator = StepCoordinator(group, StopRequest(), StragglerMonitor(group), every=5)
    saves = [coordinator.agree_on_step(n, wants_save=n == 3).save for n in range(1, 6)]
    assert saves == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"keep": 1}, {9}),
        ({"keep": 2, "keep_every": 3}, {3, 6, 7, 9}),
        ({"keep": 1, "keep_best": 1}, {4, 9}),
        ({"keep": 1, "keep_best": 9}, {3, 4, 9}),
    ],
)
def test_the_newest_the_multiples_and_the_best_stay(policy, kept):
    losses = {3: 2.0, 4: 1.0, 6: math.nan}
    options = {"keep_every": None, "keep_best": 0} | policy
    assert steps_to_keep([3, 4, 6, 7, 9], losses, **options) == kept
