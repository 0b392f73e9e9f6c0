"""One line is logged when a step takes long, and none when it does not."""

import time
from types import SimpleNamespace

import pytest
from conftest import ONE_DEVICE, tensor_parallel

from training import clock
from training.clock import StepClock


@pytest.mark.parametrize(("limit", "lines"), [(0.02, 1), (60.0, 0)])
def test_a_slow_step_is_logged_once(monkeypatch, limit, lines):
    monkeypatch.setattr(clock, "SLOW_STEP_SECONDS", limit)
    logged = []
    monkeypatch.setattr(clock.log, "info", lambda text, *values: logged.append(text % values))
    step_clock = StepClock(SimpleNamespace(tp=tensor_parallel(ONE_DEVICE)))
    for _ in range(2):
        with step_clock.waiting_for_devices():
            time.sleep(0.5)
    assert len(logged) == lines
    assert all("still running" in message for message in logged)
