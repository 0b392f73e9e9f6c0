"""Signals: which of them stop a run, after which step, alone and among several processes."""

import signal
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

from parallel.cluster import signals as module
from parallel.cluster.signals import StopRequest


@pytest.fixture
def stop(signals) -> StopRequest:
    return StopRequest().install()


@pytest.fixture
def service(monkeypatch) -> dict[str, Any]:
    """jax's preemption service: `step` is where it stops all, `signals` what it was sent."""
    found: dict[str, Any] = {"step": None, "signals": []}

    def reached(step: int) -> bool:
        return found["step"] is not None and step >= found["step"]

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
    monkeypatch.setattr(module.os, "kill", lambda pid, number: found["signals"].append(number))
    return found


def test_one_process_stops_after_the_step_in_which_it_was_signalled(stop):
    assert stop.agree(1) is None
    signal.raise_signal(signal.SIGINT)
    assert stop.agree(2) == signal.SIGINT


def test_a_checkpoint_request_is_taken_once(stop):
    assert not stop.take_checkpoint_request()
    signal.raise_signal(signal.SIGUSR1)
    assert stop.take_checkpoint_request() and not stop.take_checkpoint_request()
    assert stop.agree(1) is None


def test_several_processes_stop_where_the_service_decides(stop, service):
    signal.raise_signal(signal.SIGINT)  # jax handles SIGTERM
    assert service["signals"] == [signal.SIGTERM]
    assert stop.agree(1) is None
    service["step"] = 3
    assert [stop.agree(step) for step in (2, 3, 4)] == [None, signal.SIGTERM, signal.SIGTERM]
    assert service["signals"] == [signal.SIGTERM]


def test_a_signal_from_before_jax_started_is_passed_on_to_the_service(stop, service, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert [stop.agree(step) for step in (1, 2)] == [None, None]
    service["step"] = 3
    assert stop.agree(3) == signal.SIGTERM and service["signals"] == [signal.SIGTERM]
