"""Goodput: every second has one label, and a resume continues the ledger."""

import contextlib
import json
import os
import subprocess
import sys
import time
import timeit
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.goodput import LABELS, Goodput

ROOT = Path(__file__).parents[2]


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ledger(before=None) -> tuple[Goodput, FakeClock]:
    clock = FakeClock()
    return Goodput(before, clock=clock), clock


def spent(goodput: Goodput) -> dict[str, float]:
    return {label: seconds for label, seconds in goodput.seconds.items() if seconds}


def one_process(goodput: Goodput, clock: FakeClock) -> None:
    clock.now += 31
    with goodput.spend("step"):
        with goodput.spend("compile"):
            clock.now += 121
        for _ in range(100):
            clock.now += 33.94
            with goodput.spend("data_wait"):
                clock.now += 0.5
        with goodput.spend("checkpoint"):
            clock.now += 7.5


# A program: (label, seconds before, nested calls, seconds after).
PROGRAMS = st.recursive(
    st.just([]),
    lambda inner: st.lists(
        st.tuples(st.sampled_from(sorted(LABELS)), st.integers(0, 9), inner, st.integers(0, 9)),
        max_size=4,
    ),
    max_leaves=12,
)


@given(PROGRAMS, st.integers(0, 9))
def test_every_second_has_the_innermost_label(program, begin):
    goodput, clock = ledger()
    expected = dict.fromkeys(LABELS, 0.0)
    begun = False

    def tick(seconds, outer):
        clock.now += seconds
        expected[outer or ("other" if begun else "start_up")] += seconds

    def run(calls, outer):
        nonlocal begun
        for label, before, inside, after in calls:
            tick(before, outer)
            with goodput.spend(label):
                begun = begun or label in ("compile", "step")
                tick(before, label)
                run(inside, label)
                assert goodput.seconds == expected
            tick(after, outer)

    tick(begin, None)
    run(program, None)
    assert goodput.seconds == expected
    assert sum(goodput.seconds.values()) == clock.now


def test_an_exception_ends_the_labels_of_the_contexts_that_it_leaves():
    goodput, clock = ledger()
    with goodput.spend("step"):
        with contextlib.suppress(KeyError), goodput.spend("evaluation"):
            with goodput.spend("data_wait"):
                clock.now = 4
                raise KeyError
        clock.now = 9
    clock.now = 11
    assert spent(goodput) == {"data_wait": 4, "step": 5, "other": 2}


def test_the_processes_of_a_run_add_up():
    first, clock = ledger()
    one_process(first, clock)
    record = json.loads(json.dumps(first.seconds))
    second, again = ledger(record)
    one_process(second, again)
    assert second.seconds == pytest.approx({label: 2 * y for label, y in first.seconds.items()})
    assert sum(second.seconds.values()) == pytest.approx(clock.now + again.now)
    assert record == first.seconds


def test_lost_seconds_are_taken_from_the_steps():
    goodput, clock = ledger({"step": 20.0})
    with goodput.spend("step"):
        clock.now = 10
        at_the_save = goodput.seconds
        clock.now = 16
        goodput.lose(1)  # a skipped step
        # a rollback to the checkpoint
        goodput.lose(goodput.seconds["step"] - at_the_save["step"])
    assert spent(goodput) == {"step": 30, "lost": 6}
    goodput.lose(-1)
    assert spent(goodput) == {"step": 30, "lost": 6}
    goodput.lose(1000)
    assert spent(goodput) == {"lost": 36}


def test_the_summary_is_one_line_by_size_without_zeros():
    goodput, clock = ledger()
    one_process(goodput, clock)
    assert goodput.summary() == (
        "goodput 94.2 % of 1 h 00 min: steps 56 min 34 s, compile 2 min 1 s, data wait 50 s, "
        "start-up 31 s, checkpoint 7.5 s"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.05, "0.1 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.6, "1 h 00 min"),
        (3599.4, "59 min 59 s"),
        (7169, "1 h 59 min"),
        (7199, "1 h 59 min"),
        (360000, "100 h 00 min"),
    ],
)
def test_durations_are_rounded_to_the_nearest_unit(seconds, text):
    goodput, clock = ledger()
    clock.now = seconds
    assert goodput.summary() == f"goodput 0.0 % of {text}: start-up {text}"


def test_the_breakdown_of_this_process_excludes_earlier_ones():
    goodput, clock = ledger({"step": 500.0, "start_up": 100.0, "lost": 40.0})
    clock.now = 15
    assert " % of 10 min 55 s with earlier processes: steps 8 min 20 s, " in goodput.summary()
    with goodput.spend("step"):
        with goodput.spend("compile"):
            clock.now = 20.25
        clock.now = 20.5
    assert goodput.this_process() == "20 s: start-up 15 s, compile 5.2 s, steps 0.2 s"


PRINT = "from training.goodput import process_seconds; print(process_seconds())"


def age_of(program: str) -> tuple[float, float]:
    """Return the age that a process prints, and the seconds that its parent measured."""
    begin = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(result.stdout), time.perf_counter() - begin


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/stat")
@pytest.mark.parametrize("name", [b"python", b"a) b (c 1 2"])
def test_the_age_of_a_process_does_not_depend_on_its_name(name):
    rename = f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name!r}); time.sleep(0.5); "
    seconds, elapsed = age_of(rename + PRINT)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert 0.5 < seconds < elapsed + tick


def test_outside_linux_the_age_counts_from_the_import():
    sleep = "import calendar, contextlib, pathlib, sys, time; time.sleep(0.5); "
    seconds, _ = age_of(sleep + "sys.platform = 'elsewhere'; " + PRINT)
    assert 0 <= seconds < 0.5


def test_a_label_costs_microseconds():
    goodput = Goodput()

    def spend():
        with goodput.spend("step"):
            pass

    assert min(timeit.repeat(spend, number=200, repeat=50)) / 200 < 5e-5


def test_the_next_process_continues_the_saved_seconds(tmp_path):
    assert Goodput.saved_in(tmp_path) == {}
    goodput, clock = ledger()
    one_process(goodput, clock)
    goodput.save(tmp_path)
    resumed, _ = ledger(Goodput.saved_in(tmp_path))
    assert resumed.seconds == goodput.seconds and sum(resumed.seconds.values()) == clock.now


@pytest.mark.parametrize("content", ["", "[1]", '{"step": null}', "\x00"])
def test_an_unreadable_file_of_seconds_is_a_warning(tmp_path, caplog, content):
    (tmp_path / "goodput.json").write_text(content)
    with caplog.at_level("WARNING", "torus"):
        assert Goodput.saved_in(tmp_path) == {}
    assert f"{tmp_path / 'goodput.json'} is not read: " in caplog.text


def test_seconds_that_cannot_be_written_are_a_warning(tmp_path, caplog):
    (tmp_path / "goodput.json").mkdir()
    with caplog.at_level("WARNING", "torus"):
        Goodput().save(tmp_path)
    assert "goodput.json was not written: " in caplog.text
