"""Peak memory of devices as metrics."""

from types import SimpleNamespace

import jax
import pytest
from runs import read_lines

from training.memory_use import memory_metrics


def device(number: int, stats) -> SimpleNamespace:
    return SimpleNamespace(id=number, memory_stats=lambda: stats)


def test_the_peak_is_that_of_the_fullest_device():
    devices = [device(4, {"peak_bytes_in_use": 2**30}), device(5, {"peak_bytes_in_use": 3 * 2**29})]
    metrics = memory_metrics(devices)
    assert 0.01 < metrics.pop("memory/host_peak") < 1000
    assert metrics == {"memory/device_4": 1.0, "memory/device_5": 1.5, "memory/peak": 1.5}


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 1}])
def test_a_device_that_does_not_count_its_memory_has_no_metric(stats):
    assert memory_metrics([device(0, stats)]).keys() == {"memory/host_peak"}


def test_a_simulated_device_has_no_metric():
    assert memory_metrics(jax.local_devices()[:1]).keys() == {"memory/host_peak"}


def test_a_run_writes_its_compile_time_once_and_its_memory_at_its_end(undisturbed):
    lines = read_lines(undisturbed / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "compile_time" in line] == [1]
    assert 0 < lines[0]["compile_time"] <= 1.05 * lines[-1]["goodput/compile"]
    assert [line["step"] for line in lines if "memory/host_peak" in line] == [6]
