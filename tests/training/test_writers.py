"""Metrics writers: exact numbers, no step twice after a resume, no incomplete line, a registry."""

import errno
import io
import json
import math
import re

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from training.goodput import Goodput
from training.logs import logging_to
from training.spikes import TrainingError
from training.writers import jsonl, registry
from training.writers.console import ConsoleWriter
from training.writers.groups import GROUPS, grouped_name
from training.writers.jsonl import JsonLinesWriter, last_goodput
from training.writers.registry import MetricsWriter, WriterContext, begun, open_writers
from training.writers.tensorboard import LAYOUT, TensorBoardWriter

METRICS = (ROOT / "docs" / "metrics.md").read_text()
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def lines(directory) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def write(directory, resumed_step: int, steps) -> None:
    writer = JsonLinesWriter(WriterContext(directory, 10))
    with begun(writer, resumed_step):
        for step in steps:
            writer.write(step, {"loss": step / 3})
            assert lines(directory)[-1] == {"step": step, "loss": step / 3}, "not on disk yet"


@settings(max_examples=25, deadline=None)
@given(st.lists(FLOAT32, min_size=1, max_size=20))
def test_numbers_read_back_bit_equal(tmp_path_factory, values):
    directory = tmp_path_factory.mktemp("run")
    writer = JsonLinesWriter(WriterContext(directory, 20))
    with begun(writer, 0):
        for step, value in enumerate(values, start=1):
            writer.write(step, {"loss": float(np.float32(value)), "step_time": value / 7})
    read = lines(directory)
    assert [line["step"] for line in read] == list(range(1, len(values) + 1))
    losses = np.array([line["loss"] for line in read], np.float32)
    assert losses.tobytes() == np.array(values, np.float32).tobytes()
    times = np.array([line["step_time"] for line in read])
    assert times.tobytes() == np.array([value / 7 for value in values]).tobytes()


def test_a_full_disk_does_not_keep_lines_that_a_rollback_drops(tmp_path, monkeypatch):
    write(tmp_path, 0, range(1, 6))

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl, "replace_file", fail)
    write(tmp_path, 3, [4])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    (tmp_path / "metrics.jsonl").write_text("broken\n" + (tmp_path / "metrics.jsonl").read_text())
    with pytest.raises(TrainingError, match=r"metrics.jsonl cannot be written: No space left on"):
        write(tmp_path, 3, [])


@pytest.mark.parametrize("resumed", [0, 1, 3, 5, 9])
def test_a_resume_drops_later_lines_and_writes_every_step_once(tmp_path, resumed):
    write(tmp_path, 0, range(1, 6))
    before = (tmp_path / "metrics.jsonl").read_text().splitlines(True)
    write(tmp_path, resumed, [])
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(before[:resumed])
    write(tmp_path, resumed, [resumed + 1])
    assert [line["step"] for line in lines(tmp_path)] == [*[1, 2, 3, 4, 5][:resumed], resumed + 1]


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0}', "{", '{"step": 3}']
)
def test_an_incomplete_last_line_is_dropped(tmp_path, torn):
    write(tmp_path, 0, [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    write(tmp_path, 3, [4])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 4]


@pytest.mark.parametrize(
    "bad", [b"garbage\n", b"\xff\xfe{\n", b"[]\n", b"\0\0\0\n", b'{"loss": 1}\n']
)
def test_invalid_lines_are_skipped_and_missing_steps_are_reported(tmp_path, bad, caplog):
    write(tmp_path, 0, [1, 2, 3])
    one, two, three = (tmp_path / "metrics.jsonl").read_bytes().splitlines(True)
    (tmp_path / "metrics.jsonl").write_bytes(one + bad + two + bad)
    assert last_goodput(tmp_path / "metrics.jsonl") == {}
    write(tmp_path, 2, [])
    assert (tmp_path / "metrics.jsonl").read_bytes() == one + two and not caplog.messages
    (tmp_path / "metrics.jsonl").write_bytes(one + bad + three)
    write(tmp_path, 3, [4])
    assert [line["step"] for line in lines(tmp_path)] == [1, 3, 4]
    assert [
        "1 of the 3 steps before the resume are missing" in message for message in caplog.messages
    ] == [True]


def test_a_start_at_step_1_over_old_metrics_is_reported(tmp_path, caplog):
    write(tmp_path, 0, [1, 2])
    write(tmp_path, 0, [])
    (message,) = caplog.messages
    assert message.endswith(
        "has steps 1 to 2, but no checkpoint is left; training starts at step 1"
    )


def test_a_diverged_run_can_be_resumed(tmp_path):
    writer = JsonLinesWriter(WriterContext(tmp_path, 2))
    with begun(writer, 0):
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf})
    write(tmp_path, 1, [2])
    first, second = lines(tmp_path)
    assert math.isnan(first["loss"]) and first["grad_norm"] == math.inf
    assert second["step"] == 2


def test_tensorboard_gets_scalars_texts_and_images_pixel_by_pixel(tmp_path):
    image_HWC = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    writer = TensorBoardWriter(WriterContext(tmp_path, 1))
    with begun(writer, 0):
        writer.write(1, {"loss": 2.5, "grad_norm": 1.0})
        writer.write_text(1, "sample", "def torus():")
        writer.write_image(1, "experts", image_HWC)
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"def torus():" in content
    tags = [value.tag for event in read_events(events) for value in event.summary.value]
    scalars = ["train/loss", "train/grad_norm"]
    assert tags == ["custom_scalars__config__", *scalars, "sample/text_summary", "experts"]
    with Image.open(io.BytesIO(content[content.index(b"\x89PNG") :])) as shown:
        np.testing.assert_array_equal(np.asarray(shown), image_HWC)


def read_events(path) -> list[Event]:
    """Return the events of a TensorBoard file, after the one with its version."""
    content, found = path.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[12 + length + 4 :]
    return found[1:]


def test_tensorboard_shows_configuration_command_and_charts_before_the_first_step(tmp_path):
    context = WriterContext(tmp_path, 9, resolved_config="steps: 9", command="python train.py")
    writer = TensorBoardWriter(context)
    with begun(writer, 4):
        writer.write(5, {"loss": 2.5, "eval_loss": 2.0, "data/web/tokens": 3.0})
    (path,) = (tmp_path / "tensorboard").iterdir()
    start, charts, config, command, *scalars = read_events(path)
    assert start.step == 5 and [event.step for event in (charts, config, command)] == [4, 4, 4]
    assert b"steps: 9" in config.summary.value[0].tensor.string_val[0]
    assert b"python train.py" in command.summary.value[0].tensor.string_val[0]
    values = [event.summary.value[0] for event in scalars]
    found = {value.tag: value.simple_value for value in values}
    assert found == {"train/loss": 2.5, "eval/loss": 2.0, "data/web/tokens": 3.0}


def test_every_listed_metric_has_a_group_and_the_charts_show_existing_ones():
    rows = [line.split("|")[1] for line in METRICS.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`([\w/]+)`", "\n".join(rows))
    tags = [grouped_name(name) for name in [*listed, "moe/layer_03/load_max_over_mean"]]
    assert len(tags) > 50 and {tag.partition("/")[0] for tag in tags} == set(GROUPS)
    assert grouped_name("dpo/margin") == "train/dpo/margin"
    for charts in LAYOUT.values():
        for title, (_, patterns) in charts.items():
            for pattern in patterns:
                assert any(re.match(pattern, tag) for tag in tags), (title, pattern)


def test_a_rollback_starts_a_new_event_file(tmp_path):
    writer = TensorBoardWriter(WriterContext(tmp_path, 9))
    for resumed_step in (0, 1):
        with begun(writer, resumed_step):
            writer.write(resumed_step + 1, {"loss": 1.0})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def console(directory, steps: int, log_every: int, **settings) -> ConsoleWriter:
    return ConsoleWriter(WriterContext(directory, steps, log_every, **settings))


def test_the_console_shows_the_first_the_last_and_every_nth_step(tmp_path, capsys):
    numbers = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "data_wait": 0.0}
    numbers |= {"step_time": 0.5, "tokens_per_second": 1000.0}
    writer = console(tmp_path, 23, 10)
    with logging_to(tmp_path / "log.txt", None), begun(writer, 4):
        for step in range(5, 24):
            writer.preview(step, numbers)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == ["5/23", "10/23", "20/23", "23/23"]
    assert "loss 1.0000  grad 1.00  lr 1.0e-03  1,000 tok/s  0.500 s/step" in shown[1]
    assert shown[0].endswith("eta 0:09") and shown[-1].endswith("eta 0:00")


def test_the_bar_of_a_terminal_shows_what_the_run_does_its_loss_and_its_rate(tmp_path):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    numbers = {"loss": 1.5, "grad_norm": 1.0, "learning_rate": 1e-3, "data_wait": 0.0}
    numbers |= {"step_time": 0.5, "tokens_per_second": 1234.0}
    writer = console(tmp_path, 9, 100, console=terminal)
    goodput = Goodput(show_phase=writer.show_phase)
    shown = []

    def bar() -> str:
        plain = io.StringIO()
        Console(file=plain, width=100).print(writer.progress)
        return plain.getvalue()

    with begun(writer, 2):
        writer.preview(5, numbers)
        for label in ("compile", "step", "data_wait", "evaluation", "checkpoint"):
            with goodput.spend(label):
                shown.append(bar())
        with goodput.spend("evaluation", phase="sample"):
            shown.append(bar())
    assert [line.split()[0] for line in shown] == [
        "compiling", "training", "training", "evaluating", "saving", "sampling",
    ]  # fmt: skip
    assert all("5/9 loss 1.5000  1,234 tok/s" in line for line in shown)


def test_a_console_line_averages_the_steps_since_the_last_line(tmp_path, capsys):
    numbers = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "data_wait": 0.1}
    numbers["dpo/accuracy"] = 0.75
    writer = console(tmp_path, 5, 5, console_metrics={"dpo/accuracy": "accuracy {:.1%}"})
    with logging_to(tmp_path / "log.txt", None), begun(writer, 0):
        for step, seconds in enumerate([9.0, 1.0, 2.0, 3.0, 2.0], start=1):
            rate = {"step_time": seconds, "tokens_per_second": 600 / seconds}
            writer.preview(step, numbers | rate)
    shown = capsys.readouterr().out.splitlines()[1]
    assert "300 tok/s  2.000 s/step  data_wait 10%" in shown
    assert "loss 1.0000  accuracy 75.0%  grad 1.00" in shown


def test_a_registered_writer_gets_every_call(tmp_path, monkeypatch):
    calls = []

    class Toy(MetricsWriter):
        def __init__(self, context: WriterContext):
            calls.append(context.steps)

        def write(self, step, values):
            calls.append((step, values))

        def close(self):
            calls.append("closed")

    monkeypatch.setitem(registry.WRITERS, "toy", Toy)
    writers = open_writers(["toy", "jsonl"], WriterContext(tmp_path, 7))
    with begun(writers, 0):
        writers.write(1, {"loss": 1.0})
        writers.amend(1, {"eval_loss": 2.0})
    assert calls == [7, (1, {"loss": 1.0}), (1, {"eval_loss": 2.0}), "closed"]
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0, "eval_loss": 2.0}]
    with pytest.raises(ValueError, match="unknown metrics writer 'comet'; use one of console"):
        open_writers(["comet"], WriterContext(tmp_path, 7))
