"""One line is logged when a step takes long, and none when it does not."""

import logging
import time
from types import SimpleNamespace

import pytest
from conftest import ONE_DEVICE, tensor_parallel

from training import clock
from training.clock import StepClock


@pytest.mark.parametrize(("limit", "lines"), [(0.02, 1), (60.0, 0)])
def test_a_slow_step_is_logged_once(monkeypatch, caplog, limit, lines):
    monkeypatch.setattr(clock, "SLOW_STEP_SECONDS", limit)
    monkeypatch.setattr(clock.log, "propagate", True)
    caplog.set_level(logging.INFO, logger=clock.log.name)
    step_clock = StepClock(SimpleNamespace(tp=tensor_parallel(ONE_DEVICE)))
    with step_clock.waiting_for_devices():
        time.sleep(0.5)
    assert len(caplog.records) == lines
    assert all("still running" in record.getMessage() for record in caplog.records)
