"""Profiles: the steps that were asked for, once, and never the reason that a run ends."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from training.logs import log
from training.profiler import ProfileConfig, Profiler


class Clock:
    restarts = 0

    def restart(self) -> None:
        self.restarts += 1


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    found: list[str] = []
    for name in ("info", "warning"):
        monkeypatch.setattr(log, name, lambda text, *values: found.append(text % values))
    return found


def run(profiler: Profiler, steps) -> None:
    work = jax.jit(lambda x: jnp.sin(x) @ x.T, inline=False)
    for step in steps:
        profiler.begin_step(step)
        profiler.end_step(step, work(jnp.ones((64, 64))))


def test_a_profile_of_the_configured_steps_is_written_for_perfetto(tmp_path, lines):
    clock = Clock()
    profiler = Profiler(ProfileConfig(start=2, steps=2), tmp_path, lambda: False, clock)
    run(profiler, range(1, 6))
    folder = tmp_path / "profiles" / "step-2"
    assert [*folder.parent.iterdir()] == [folder] and clock.restarts == 1
    (line,) = lines
    assert line.startswith(f"profile of 2 steps from step 2: {folder}; open perfetto")
    (trace,) = tmp_path.rglob("perfetto_trace.json.gz")
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert any("PjitFunction" in str(name) for name in names)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_request_during_a_profile_starts_another_one_after_it(tmp_path, monkeypatch):
    calls, signals = [], {2, 3}
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path, **_: calls.append(path.name))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    now = 0

    def is_requested() -> bool:
        """Return whether a signal has come since the last call."""
        came = {step for step in signals if step <= now}
        signals.difference_update(came)
        return bool(came)

    profiler = Profiler(ProfileConfig(steps=3), tmp_path, is_requested, Clock())
    for now in range(1, 7):
        run(profiler, [now])
    assert calls == ["step-2", "stop", "step-5"]
    profiler.close()
    profiler.close()
    assert calls[3:] == ["stop"]


def test_a_profile_that_the_end_of_the_run_cuts_short_says_so(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    profiler = Profiler(ProfileConfig(start=3, steps=3), tmp_path, lambda: False, Clock())
    run(profiler, range(1, 5))
    profiler.close()
    (line,) = lines
    assert line.startswith("profile of 2 steps from step 3: ")


@pytest.mark.parametrize("name", ["start_trace", "stop_trace"])
def test_a_profile_that_cannot_be_taken_is_a_warning(tmp_path, lines, monkeypatch, name):
    def fail(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax.profiler, name, fail)
    run(Profiler(ProfileConfig(start=1, steps=1), tmp_path, lambda: False, Clock()), range(1, 3))
    (line,) = lines
    assert "profile" in line and line.endswith("No space left on device")
