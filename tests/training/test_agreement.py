"""The agreement after a step: equal on all processes at the same step, stragglers named."""

import logging
import signal
from typing import Any

import pytest

from parallel.cluster.process_group import ProcessGroup
from parallel.cluster.signals import StopRequest
from training.agreement import StepAgreement, StepCoordinator
from training.stragglers import StragglerMonitor

NOTHING = StepAgreement()


class Processes:
    """All processes of a run in this one; an all-gather finds what the others contributed."""

    def __init__(self, num_processes: int, every: int):
        self.contributions: dict[str, dict[int, Any]] = {}
        self.stops = [StopRequest() for _ in range(num_processes)]
        self.stragglers = [StragglerMonitor(self._group(n)) for n in range(num_processes)]
        self.coordinators = [
            StepCoordinator(monitor._group, stop, monitor, every=every)
            for stop, monitor in zip(self.stops, self.stragglers, strict=True)
        ]

    def _group(self, number: int) -> ProcessGroup:
        group = ProcessGroup(len(self.stops), number)
        group.hosts = [f"host-{n}" for n in range(len(self.stops))]

        def start(tag: str, value: Any) -> None:
            self.contributions.setdefault(tag, {})[number] = value

        def wait(tag: str) -> list[Any]:
            return [self.contributions[tag][n] for n in range(len(self.stops))]

        group.start_all_gather, group.wait_all_gather = start, wait  # type: ignore[method-assign]
        return group

    def agree(
        self,
        step: int,
        finished_saves: list[int | None] | None = None,
        failed: int | None = None,
        wants_save: bool = False,
    ) -> StepAgreement:
        """Return what all processes agree on; that it is the same on all is a law.

        failed: the process whose save has failed. wants_save: of all processes.
        """
        finished = finished_saves or [None] * len(self.stops)
        first, *others = [
            coordinator.agree_on_step(
                step, finished_save=save, save_failed=number == failed, wants_save=wants_save
            )
            for number, (coordinator, save) in enumerate(
                zip(self.coordinators, finished, strict=True)
            )
        ]
        assert others == [first] * len(others)
        return first


def run(
    times: list[list[tuple[float, float]]],
    *,
    every: int,
    requests: dict[int, int] | None = None,
    first: int = 1,
) -> dict[int, StepAgreement]:
    """Return the agreement after each step. As in the loop, times arrive one step late.

    times: of a process, then a step. requests: step -> process that is asked for a checkpoint.
    """
    processes = Processes(len(times), every)
    agreements = {}
    for n in range(len(times[0])):
        if n:
            for monitor, of_steps in zip(processes.stragglers, times, strict=True):
                monitor.add(*of_steps[n - 1])
        if (number := (requests or {}).get(first + n)) is not None:
            processes.stops[number]._on_checkpoint(signal.SIGUSR1, None)
        agreements[first + n] = processes.agree(first + n)
    return agreements


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torus"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records]


def even(processes: int, steps: int) -> list[list[tuple[float, float]]]:
    return [[(1.0, 0.2)] * steps for _ in range(processes)]


def test_a_report_is_read_by_all_one_step_after_it_was_sent():
    found = run([[(1.0 + n, 0.1 * n)] * 10 for n in range(3)], every=4)
    assert [step for step, agreement in found.items() if agreement != NOTHING] == [5, 9]
    assert found[5].metrics == {
        "hosts/step_time_spread": pytest.approx(2 / 2),
        "hosts/slowest": 2,
        "hosts/slowest_host_time": pytest.approx(0.2),
        "hosts/median_host_time": pytest.approx(0.1),
    }


def test_a_report_is_the_median_of_the_steps_since_the_last_one():
    times = [[(1.0, 0.1), (9.0, 5.0), (1.2, 0.2), (2.0, 0.6), (2.0, 0.6), (2.0, 0.6), (0, 0)]] * 2
    found = run(times, every=3)
    assert found[4].metrics["hosts/median_host_time"] == pytest.approx((0.1 + 5.0) / 2)
    assert found[7].metrics["hosts/median_host_time"] == pytest.approx(0.6)


@pytest.mark.parametrize("first", [1, 7, 8])
def test_a_checkpoint_request_to_one_process_saves_on_all_at_one_step(first):
    found = run(even(3, 12), every=4, requests={first + 2: 1}, first=first)
    (step,) = [step for step, agreement in found.items() if agreement.save]
    assert 0 < step - (first + 2) <= 5


def test_a_checkpoint_request_before_the_first_report_is_kept():
    """A process may start at a step after which reports are due, with no times to report yet."""
    found = run(even(2, 6), every=2, requests={4: 0}, first=4)
    assert [step for step, agreement in found.items() if agreement.save] == [7]


def test_two_checkpoint_requests_are_two_saves():
    found = run(even(2, 12), every=2, requests={1: 0, 6: 1})
    assert [step for step, agreement in found.items() if agreement.save] == [3, 7]


@pytest.mark.parametrize("is_due_after", [None, 2], ids=["by minutes", "due meanwhile"])
def test_minutes_that_have_run_out_give_one_save(is_due_after):
    """Step 2 asks for it in a report that is read after step 3."""
    processes, saves = Processes(2, every=1), []
    for step in range(1, 7):
        for monitor in processes.stragglers:
            monitor.add(1.0, 0.2)
        agreement = processes.agree(step, wants_save=step >= 2 and not saves)
        if agreement.save or step == is_due_after:
            saves.append(step)
            for coordinator in processes.coordinators:
                coordinator.saved()
    assert saves == [is_due_after or 3]


@pytest.mark.parametrize(
    ("slow", "step_time", "is_straggler"),
    [
        (0.55, 2.0, True),
        (0.39, 2.0, False),  # less than a tenth of a step
        (0.29, 0.5, False),  # less than a tenth of a second
        (0.31, 0.5, True),
    ],
)
def test_a_straggler_is_named_above_both_thresholds(warnings, slow, step_time, is_straggler):
    times = [[(step_time, 0.2)] * 3, [(step_time, slow)] * 3, [(step_time, 0.1)] * 3]
    run(times, every=2)
    line = (
        f"step 3: host-1 (process 1) is a straggler: {slow:.3f} s of host work in a step of "
        f"{step_time:.3f} s, the median host has 0.200 s"
    )
    assert warnings() == ([line] * 3 if is_straggler else [])


def test_a_save_has_finished_when_it_has_on_all_processes():
    processes = Processes(2, every=2)
    found = []
    for step in range(1, 10):
        for monitor in processes.stragglers:
            monitor.add(1.0, 0.1)
        saves = [2 if step > last else None for last in (2, 5)]
        found.append(processes.agree(step, saves).finished_save)
    assert found == [None] * 6 + [2, None, 2]


def test_a_save_that_has_failed_on_one_process_has_ended_on_all():
    processes = Processes(3, every=2)
    found = []
    for step in range(1, 6):
        for monitor in processes.stragglers:
            monitor.add(1.0, 0.1)
        failed = 1 if step == 4 else None
        found.append(processes.agree(step, [None, 2, None], failed).finished_save)
    assert found == [None] * 4 + [2]


def test_the_summary_counts_how_often_a_host_was_slowest():
    processes = Processes(3, every=1)
    assert processes.stragglers[0].summary() is None
    for step, (slow, step_time) in enumerate([(2, 1.1), (1, 1.2), (2, 1.4), (0, 9.0)]):
        for number, monitor in enumerate(processes.stragglers):
            is_slow = number == slow
            monitor.add(step_time if is_slow else 1.0, 0.5 if is_slow else 0.1)
        processes.agree(step)
    line = (
        "step times of the hosts differ by 20.0% (median); most often slowest: host-2 (process 2), "
        "in 2 of 3 reports"  # the fourth was sent and not read
    )
    assert [monitor.summary() for monitor in processes.stragglers] == [line] * 3


def test_a_single_process_agrees_with_itself_at_once():
    group, stop = ProcessGroup(), StopRequest()
    stragglers = StragglerMonitor(group)
    coordinator = StepCoordinator(group, stop, stragglers, every=2)
    for step in range(1, 6):
        stragglers.add(1.0, 0.5)
        if step == 3:
            stop._on_checkpoint(signal.SIGUSR1, None)
        stop.signal = signal.SIGINT if step > 4 else None
        assert coordinator.agree_on_step(
            step, finished_save=step - 1, wants_save=step == 2
        ) == StepAgreement(stop.signal, step in (2, 3), step - 1)
