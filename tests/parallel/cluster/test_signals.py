"""Signals: which of them stop a run, after which step, alone and among several processes."""

import queue
import re
import signal
import threading
import time
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

from parallel.cluster import signals as module
from parallel.cluster.signals import StoppedEarly, StopRequest


@pytest.fixture
def stop(signals) -> StopRequest:
    return StopRequest().install()


@pytest.fixture
def service(monkeypatch) -> dict[str, Any]:
    """jax's preemption service: `step` is where it stops all, `signals` what it was sent."""
    found: dict[str, Any] = {"step": None, "signals": []}

    def reached(step: int) -> bool:
        found.get("asked", []).append(step)
        return found["step"] is not None and step >= found["step"]

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
    monkeypatch.setattr(module.os, "kill", lambda pid, number: found["signals"].append(number))
    return found


def test_one_process_stops_after_the_step_in_which_it_was_signalled(stop):
    assert stop.agree() is None
    signal.raise_signal(signal.SIGINT)
    assert stop.agree() == signal.SIGINT


def test_another_request_takes_the_place_of_the_last_one(stop):
    answers = queue.SimpleQueue()
    for _ in range(3):
        StopRequest().install(answers.put)
    signal.raise_signal(signal.SIGINT)
    assert "stopping after this step" in answers.get(timeout=60)

    def threads() -> int:
        return sum(thread.name == "signals" for thread in threading.enumerate())

    deadline = time.monotonic() + 60
    while threads() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 1 and answers.empty()


def test_a_checkpoint_request_is_taken_once(stop):
    assert not stop.take_checkpoint_request()
    signal.raise_signal(signal.SIGUSR1)
    assert stop.take_checkpoint_request() and not stop.take_checkpoint_request()
    assert stop.agree() is None


def test_several_processes_stop_where_the_service_decides(stop, service):
    signal.raise_signal(signal.SIGINT)  # jax handles SIGTERM
    assert service["signals"] == [signal.SIGTERM]
    assert stop.agree() is None
    service["step"] = 3
    assert [stop.agree() for _ in range(3)] == [None, signal.SIGTERM, signal.SIGTERM]
    assert service["signals"] == [signal.SIGTERM]


def test_the_service_counts_calls_and_not_steps(stop, service):
    asked: list[int] = []
    service["asked"] = asked
    for _ in range(3):
        stop.agree()
    assert asked == [1, 2, 3]  # the service stops after number 1 if the signal came before it


def test_a_signal_that_comes_later_than_the_agreement_does_not_end_the_save(
    stop, service, monkeypatch
):
    exits: list[int] = []
    monkeypatch.setattr(module, "_quit", lambda: exits.append(1))
    monkeypatch.setattr(module, "_SAME_SIGNAL", 0.0)
    service["step"] = 1
    assert stop.agree() == signal.SIGTERM  # another process was signalled
    stop._on_stop(signal.SIGTERM, None)
    assert exits == []
    stop._on_stop(signal.SIGTERM, None)
    assert exits == [1]


def test_a_signal_from_before_jax_started_is_passed_on_to_the_service(stop, service, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert [stop.agree() for _ in range(2)] == [None, None]
    service["step"] = 3
    assert stop.agree() == signal.SIGTERM and service["signals"] == [signal.SIGTERM]


def test_the_first_signal_is_answered_at_once_and_the_second_one_exits(signals, monkeypatch):
    lines, exits = queue.Queue[str](), queue.Queue[int]()
    monkeypatch.setattr(module, "_quit", lambda: exits.put(1))
    monkeypatch.setattr(module, "_SAME_SIGNAL", 0.0)
    stop = StopRequest().install(lines.put)
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGINT)
    expected = "stopping after this step and saving; press Ctrl-C again to quit without saving"
    assert lines.get(timeout=60) == expected
    assert stop.agree() == signal.SIGINT and exits.empty()
    signal.raise_signal(signal.SIGINT)
    # The thread may be faster than the handler, which waits for the main thread, and the reverse.
    assert [exits.get(timeout=60) for _ in range(2)] == [1, 1] and lines.empty()


def test_a_signal_that_comes_twice_at_once_counts_as_one(signals, monkeypatch):
    lines, exits = queue.Queue[str](), queue.Queue[int]()
    monkeypatch.setattr(module, "_quit", lambda: exits.put(1))
    monkeypatch.setattr(module, "_SAME_SIGNAL", 600.0)
    before = threading.enumerate()  # threads of other tests may still be ending
    stop = StopRequest().install(lines.put)
    (thread,) = (new for new in threading.enumerate() if new not in before)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
        assert stop.agree() == signal.SIGINT
    StopRequest().install()  # ends the thread, which has then read all signals
    thread.join(60)
    assert lines.get().startswith("stopping after this step") and lines.empty()
    assert not thread.is_alive() and exits.empty()


def test_a_process_that_does_not_stop_says_what_it_is_doing(signals, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_REMINDER", 0.05)
    lines, exits = queue.Queue[str](), queue.Queue[int]()
    monkeypatch.setattr(module, "_quit", lambda: exits.put(1))
    monkeypatch.setattr(module, "_SAME_SIGNAL", 0.0)
    phases = ["step 12", None, "the last save"]
    StopRequest().install(lines.put, lambda: phases.pop(0) if phases else None)
    signal.raise_signal(signal.SIGTERM)
    assert lines.get(timeout=60).startswith("stopping after this step")
    expected = (
        r"not stopped \d+ s after the signal, still busy with: step 12; send SIGTERM again to "
        "quit without saving"
    )
    assert re.fullmatch(expected, lines.get(timeout=60))
    assert "still busy with: the last save;" in lines.get(timeout=60)
    signal.raise_signal(signal.SIGINT)
    assert [exits.get(timeout=60) for _ in range(2)] == [1, 1] and lines.empty()


def test_before_the_first_step_a_signal_ends_the_process_without_a_save(signals):
    lines = queue.Queue[str]()
    stop = StopRequest().install(lines.put)
    stop.has_nothing_to_save = True
    with pytest.raises(StoppedEarly, match="stopped by SIGTERM before the first step of this pro"):
        signal.raise_signal(signal.SIGTERM)
    assert lines.get(timeout=60) == "stopping now; send SIGTERM again to quit at once"
