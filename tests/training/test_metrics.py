"""The record of a run: exact numbers, no line twice after a resume, none torn."""

import io
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from training.metrics import Display, Metrics, last_goodput, log, logging_to

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def lines(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def write(directory, resumed_step: int, steps) -> None:
    with Metrics(directory, resumed_step) as metrics:
        for step in steps:
            metrics.write(step, {"loss": step / 3})


@settings(max_examples=25, deadline=None)
@given(st.lists(FLOAT32, min_size=1, max_size=20))
def test_numbers_read_back_bit_equal(tmp_path_factory, values):
    directory = tmp_path_factory.mktemp("run")
    with Metrics(directory, 0) as metrics:
        for step, value in enumerate(values, start=1):
            metrics.write(step, {"loss": float(np.float32(value)), "step_time": value / 7})
    read = lines(directory)
    assert [line["step"] for line in read] == list(range(1, len(values) + 1))
    losses = np.array([line["loss"] for line in read], np.float32)
    assert losses.tobytes() == np.array(values, np.float32).tobytes()
    times = np.array([line["step_time"] for line in read])
    assert times.tobytes() == np.array([value / 7 for value in values]).tobytes()


@pytest.mark.parametrize("resumed", [0, 1, 3, 5, 9])
def test_lines_after_the_resumed_step_are_dropped(tmp_path, resumed):
    write(tmp_path, 0, range(1, 6))
    before = (tmp_path / "metrics.jsonl").read_text().splitlines(True)
    write(tmp_path, resumed, [])
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(before[:resumed])


def test_a_resumed_record_has_every_step_once(tmp_path):
    write(tmp_path, 0, range(1, 6))
    write(tmp_path, 3, range(4, 8))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0}', "{", '{"step": 3}']
)
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    write(tmp_path, 0, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    write(tmp_path, 3, [4])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 4]


@pytest.mark.parametrize(
    "bad", [b"garbage\n", b"\xff\xfe{\n", b"[]\n", b"\0\0\0\n", b'{"loss": 1}\n']
)
def test_lines_that_say_nothing_are_passed_over_and_lost_ones_told(tmp_path, bad, caplog):
    write(tmp_path, 0, [1, 2, 3])
    one, two, three = (tmp_path / "metrics.jsonl").read_bytes().splitlines(True)
    (tmp_path / "metrics.jsonl").write_bytes(one + bad + two + bad)
    assert last_goodput(tmp_path / "metrics.jsonl") == {}
    write(tmp_path, 2, [])
    assert (tmp_path / "metrics.jsonl").read_bytes() == one + two and not caplog.messages
    (tmp_path / "metrics.jsonl").write_bytes(one + bad + three)
    write(tmp_path, 3, [4])
    assert [line["step"] for line in lines(tmp_path)] == [1, 3, 4]
    assert [message.endswith("lacks 1 of 3 steps") for message in caplog.messages] == [True]


def test_a_run_that_begins_again_without_its_checkpoints_says_so(tmp_path, caplog):
    write(tmp_path, 0, [1, 2])
    write(tmp_path, 0, [])
    assert caplog.messages == ["no checkpoint is left of steps 1 to 2: they are trained again"]


def test_a_reader_that_has_had_enough_stops_neither_the_run_nor_its_log(tmp_path):
    program = (
        "from pathlib import Path; from training.metrics import log, logging_to\n"
        "with logging_to(Path('log.txt'), None):\n"
        "    for n in range(9999): log.info('line %d', n)"
    )
    done = subprocess.run(
        f'set -o pipefail; {sys.executable} -c "{program}" | head -n 1',
        shell=True,
        executable="/bin/bash",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "line 0\n", "")
    assert (tmp_path / "log.txt").read_text().endswith("line 9998\n")


def test_a_line_is_on_disk_when_write_returns(tmp_path):
    with Metrics(tmp_path, 0) as metrics:
        metrics.write(1, {"loss": 0.5})
        assert lines(tmp_path) == [{"step": 1, "loss": 0.5}]


def test_a_run_that_diverged_can_still_be_resumed(tmp_path):
    with Metrics(tmp_path, 0) as metrics:
        metrics.write(1, {"loss": math.nan, "grad_norm": math.inf})
    write(tmp_path, 1, [2])
    first, second = lines(tmp_path)
    assert math.isnan(first["loss"]) and first["grad_norm"] == math.inf
    assert second["step"] == 2


def test_tensorboard_gets_what_the_file_gets(tmp_path):
    with Metrics(tmp_path, 0) as metrics:
        metrics.write(1, {"loss": 2.5, "grad_norm": 1.0})
        metrics.write_text(1, "sample", "def torus():")
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"loss" in content and b"grad_norm" in content and b"def torus():" in content


def test_an_image_comes_back_from_tensorboard_pixel_by_pixel(tmp_path):
    image_HWC = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    with Metrics(tmp_path, 0) as metrics:
        metrics.write_image(1, "experts", image_HWC)
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"experts" in content
    with Image.open(io.BytesIO(content[content.index(b"\x89PNG") :])) as shown:
        np.testing.assert_array_equal(np.asarray(shown), image_HWC)


def test_lines_go_to_the_screen_and_with_times_to_the_file(tmp_path, capsys):
    path = tmp_path / "log.txt"
    path.write_text("an older run\n")
    with logging_to(path, None):
        log.info("step %d", 7)
    assert capsys.readouterr().out == "step 7\n"
    older, line = path.read_text().splitlines()
    assert older == "an older run"
    assert line.endswith(" step 7") and line[:4].isdigit()


def test_lines_above_a_progress_bar_are_printed_as_they_are(tmp_path):
    screen = io.StringIO()
    with logging_to(tmp_path / "log.txt", Console(file=screen, soft_wrap=True)):
        log.info("sample:\n%s", "x[0] = [bold]1[/bold]" + " y" * 100)
    assert screen.getvalue() == "sample:\nx[0] = [bold]1[/bold]" + " y" * 100 + "\n"
    assert "x[0] = [bold]1[/bold]" in (tmp_path / "log.txt").read_text()


def test_afterwards_nothing_is_written_even_if_the_run_failed(tmp_path, capsys):
    before = list(log.handlers)
    with pytest.raises(RuntimeError), logging_to(tmp_path / "log.txt", None):
        raise RuntimeError
    log.info("too late")
    assert log.handlers == before
    assert capsys.readouterr().out == "" and (tmp_path / "log.txt").read_text() == ""


def test_the_console_shows_the_first_the_last_and_every_nth_step(tmp_path, capsys):
    numbers = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "data_wait": 0.0}
    numbers["step_time"] = 0.5
    with logging_to(tmp_path / "log.txt", None), Display(23, 10) as display:
        display.begin(4)
        for step in range(5, 24):
            display.step(step, numbers | {"tokens_per_second": 1000.0})
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["5/23", "10/23", "20/23", "23/23"]
    assert "loss 1.0000  grad 1.00  lr 1.0e-03  1,000 tok/s  0.500 s/step" in shown[1]
    assert shown[0].endswith("eta 0:09") and shown[-1].endswith("eta 0:00")


def test_a_line_of_the_console_averages_the_steps_since_the_last(tmp_path, capsys):
    numbers = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "data_wait": 0.1}
    with logging_to(tmp_path / "log.txt", None), Display(5, 5) as display:
        for step, seconds in enumerate([9.0, 1.0, 2.0, 3.0, 2.0], start=1):
            display.step(step, numbers | {"step_time": seconds, "tokens_per_second": 600 / seconds})
    assert "300 tok/s  2.000 s/step  data_wait 10%" in capsys.readouterr().out.splitlines()[1]
