"""Early stopping: which evaluation ends a run, and that resumed runs end as undisturbed ones."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import slow
from runs import losses, read_lines, refusal, run, write_config

from exit_codes import EXIT_STOPPED
from parallel.cluster.process_group import ProcessGroup
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.early_stop import (
    EarlyStopConfig,
    EarlyStopping,
    evaluation_metrics,
    higher_is_better,
)
from training.evaluation import Evaluation
from training.logs import log
from training.writers.console import ConsoleWriter
from training.writers.jsonl import JsonLinesWriter

pytestmark = pytest.mark.usefixtures("signals")

# No step improves the loss by 100 nats: the first evaluation is the best one.
STOPS = ["training.early_stop.patience=2", "training.early_stop.min_delta=100"]
OFTEN = ["training.eval_every=2", "training.eval_batches=1", "training.steps=20"]


def watch(values, group=None, **settings) -> EarlyStopping:
    """Count evaluations of eval_loss at steps 10, 20, ..."""
    found = EarlyStopping(EarlyStopConfig(**settings), group or ProcessGroup())
    for number, value in enumerate(values, 1):
        found.add(10 * number, {} if value is None else {"eval_loss": value})
        if found.last_step is not None:
            assert number == len(values), "evaluated after the end"
    return found


@pytest.mark.parametrize(
    ("values", "settings", "last_step", "best_step"),
    [
        ([3.0, 2.0, 2.0, 2.5], {"patience": 2}, 40, 20),
        ([3.0, 2.0, 2.5, 1.5, 1.6], {"patience": 2}, None, 40),
        ([3.0, 2.75, 2.5], {"patience": 2, "min_delta": 0.5}, 30, 10),
        ([3.0, 2.75, 2.25], {"patience": 2, "min_delta": 0.5}, None, 30),
        ([1.0, 2.0, 1.5], {"patience": 1, "mode": "max"}, 30, 20),
        ([math.nan, math.inf], {"patience": 2}, 20, 0),
        ([math.nan, 3.0, math.nan], {"patience": 1}, 10, 0),
        ([9.0, 9.0, 9.0], {}, None, 0),
    ],
)
def test_a_run_ends_after_patience_evaluations_without_improvement(
    values, settings, last_step, best_step
):
    stopping = watch(values[: last_step // 10 if last_step else None], **settings)
    assert stopping.last_step == last_step
    assert stopping.record.get("best_step", 0) == best_step


@pytest.fixture
def messages(caplog, monkeypatch):
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level("INFO", log.name)
    return lambda: caplog.messages


def test_one_line_says_why_the_run_ends_and_which_step_was_best(messages):
    watch([3.0, 2.0, 2.0, 2.5], patience=2)
    assert messages() == [
        "early stopping after step 40: eval_loss has not improved for 2 evaluations; "
        "best 2 at step 20"
    ]


def test_an_evaluation_without_the_metric_does_not_count(messages):
    assert watch([3.0, None, None], patience=1).last_step is None
    assert len(messages()) == 2 and "eval_loss was not measured" in messages()[0]


@pytest.mark.parametrize(
    ("metric", "mode", "higher"),
    [
        ("eval_loss", "auto", False),
        ("eval/x/bits_per_byte", "auto", False),
        ("eval_accuracy", "auto", True),
        ("eval/x/margin", "auto", True),
        ("eval_accuracy", "min", False),
        ("eval_loss", "max", True),
    ],
)
def test_accuracy_and_margin_rise_and_losses_fall_unless_the_mode_says_otherwise(
    metric, mode, higher
):
    assert higher_is_better(metric, mode) is higher


def test_the_evaluations_so_far_are_the_same_from_a_record(messages):
    values = [3.0, 2.1, 2.3, 2.2000000000000001]
    whole, half = watch(values, patience=3), watch(values[:2], patience=3)
    stored = json.loads(json.dumps(half.record))
    resumed = EarlyStopping(EarlyStopConfig(patience=3), ProcessGroup())
    resumed.begin(stored)
    for step, value in zip((30, 40), values[2:], strict=True):
        resumed.add(step, {"eval_loss": value})
    assert resumed.record == whole.record and messages() == []
    other = EarlyStopping(EarlyStopConfig(patience=3, metric="eval/a/loss"), ProcessGroup())
    other.begin(stored)
    assert (
        other.record == {} and "is now eval/a/loss (lower is better); until step" in messages()[0]
    )


def test_all_processes_count_the_values_of_process_0(connected):
    def evaluate(group: ProcessGroup) -> tuple[int | None, dict]:
        rounding = 1e-9 * group.process_id
        stopping = watch([3.0, 2.0, 2.0 - rounding], group, patience=1)
        return stopping.last_step, stopping.record

    found = connected.each(evaluate)
    assert found[0][0] == 30 and found == [found[0]] * 3


def test_the_listed_metrics_are_those_of_an_evaluation(undisturbed):
    lines = read_lines(undisturbed / "run" / "metrics.jsonl")
    found = {name for name in lines[-1] if re.match("eval(_(?!activation)|/)", name)}
    assert sorted(found) == sorted(evaluation_metrics("sft", ["text"]))


def records(folder: Path) -> dict[int, dict]:
    """What the checkpoints of a run record about its evaluations, by step."""
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(), read_only=True)
    with contextlib.closing(checkpoints):
        return {step: checkpoints.record(step).get("early_stop", {}) for step in checkpoints.steps}


@pytest.fixture
def stopped(tmp_path, monkeypatch) -> str:
    """Configuration of a run that early stopping ended after step 6 of 20."""
    config, finished = write_config(tmp_path), []
    with monkeypatch.context() as patch:
        patch.setattr(JsonLinesWriter, "finish", lambda self: finished.append(self))
        assert run(config, *STOPS, *OFTEN) == 0
    assert len(finished) == 1, "the writers were not told that the run has ended"
    return config


def test_an_early_stop_saves_and_a_further_start_says_that_it_is_finished(
    stopped, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "run"
    assert [*losses(folder)] == [1, 2, 3, 4, 5, 6]
    assert records(folder)[6]["num_worse"] == 2 and records(folder)[6]["best_step"] == 2
    line = "early stopping after step 6: eval_loss has not improved by more than 100 for 2"
    assert (folder / "log.txt").read_text().count(line) == 1
    files = [folder / "metrics.jsonl", folder / "config.yaml"]
    before = [file.read_text() for file in files]
    capsys.readouterr()
    # Nothing will be written, so that it needs no space.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert run(stopped, *STOPS, *OFTEN, "training.log_every=3") == 0
    shown = capsys.readouterr().out
    assert f"{line} evaluations; best " in shown and "at step 2; nothing left to train" in shown
    assert [file.read_text() for file in files] == before


def test_a_larger_patience_continues_a_run_that_early_stopping_ended(stopped, tmp_path):
    assert run(stopped, *STOPS[1:], "training.early_stop.patience=4", *OFTEN) == 0
    assert records(tmp_path / "run")[10]["num_worse"] == 4
    assert [*losses(tmp_path / "run")] == [*range(1, 11)]


def test_a_killed_run_ends_at_the_same_step_with_the_same_record(stopped, tmp_path):
    """After the kill, the checkpoints of the last steps are missing."""
    folder = tmp_path / "run"
    before, found = records(folder), losses(folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    assert run(stopped, *STOPS, *OFTEN) == 0
    assert records(folder) == before and losses(folder) == found


@pytest.mark.parametrize("last", [2, slow(6)])
def test_an_interrupted_evaluation_counts_in_the_next_process(stopped, tmp_path, monkeypatch, last):
    """Also if it is the one that ends the run: no step is trained after it."""
    again = [*STOPS, *OFTEN, f"run.dir={tmp_path}/again"]

    def stop(self, step, values):
        if step == last - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleWriter, "preview", stop)
        assert run(stopped, *again) == EXIT_STOPPED
    assert [*losses(tmp_path / "again")][-1] == last
    assert run(stopped, *again) == 0
    assert losses(tmp_path / "again") == losses(tmp_path / "run")
    lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "again")]
    first, second = ([line.get("eval_loss") for line in part] for part in lines)
    assert first == second
    assert records(tmp_path / "again")[6] == records(tmp_path / "run")[6]
    with monkeypatch.context() as patch:  # a further start has nothing to evaluate
        patch.setattr(Evaluation, "run", None)
        assert run(stopped, *again) == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["training.early_stop.metric=eval_los", "training.early_stop.patience=2"],
            "training.early_stop.metric=eval_los: unknown metric; use one of eval_loss, "
            "eval_bits_per_byte, eval/text/loss, eval/text/bits_per_byte",
        ),
        (
            ["data.eval_fraction=0", "training.early_stop.patience=2"],
            "training.early_stop.metric=eval_loss needs an evaluation, and there is no held-out "
            "split; raise data.eval_fraction",
        ),
        (
            ["data.eval_fraction=0", "checkpoint.keep_best=1"],
            "checkpoint.keep_best=1 needs an evaluation, and there is no held-out split; raise",
        ),
        (
            ["training.early_stop.min_delta=0.1"],
            "training.early_stop.min_delta=0.1 has no effect without a patience; set "
            "training.early_stop.patience",
        ),
        (["training.early_stop.patience=0"], "training.early_stop.patience=0: input should be"),
        (["training.early_stop.mode=lower"], "training.early_stop.mode='lower': input should be"),
    ],
)
def test_a_mistake_is_refused_before_training(tmp_path, capsys, overrides, message):
    assert message in refusal(capsys, write_config(tmp_path), *overrides)
    assert not (tmp_path / "run").exists()
