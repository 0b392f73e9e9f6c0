"""Runs with damaged checkpoints, a full disk, loss spikes and signals."""

import ast
import contextlib
import dataclasses
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from conftest import ROOT
from process_groups import wait_until
from runs import losses, read_lines, refusal, run, write_config

from data.files import DataError
from exit_codes import EXIT_STOPPED
from parallel.cluster import process_group
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.evaluation import Evaluation
from training.runner import StepRunner
from training.trainer import Trainer
from training.writers.console import ConsoleWriter

pytestmark = pytest.mark.usefixtures("signals")


def test_the_loop_has_at_most_40_lines_and_the_trainer_is_complete_when_constructed():
    assert len(inspect.getsource(Trainer._train_steps).splitlines()) <= 40
    stored = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(Trainer)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert stored <= {field.name for field in dataclasses.fields(Trainer)}


@pytest.mark.slow
def test_a_full_disk_ends_the_run_only_after_the_last_save_failed(tmp_path):
    """A limit of 64 KiB per file fails saves as a full disk does."""
    config = write_config(tmp_path)
    command = (
        f"ulimit -f 64; exec {sys.executable} train.py --config {config} model.hidden_size=128"
    )
    arguments = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 1800}
    process = subprocess.run(["bash", "-c", command], **arguments)
    assert process.returncode == 1
    assert process.stderr == (
        "error: the last state was not saved, for the reason in the log; the newest checkpoint is "
        "none; correct the cause, and run the same command again\n"
    )
    assert "checkpoint 2 was not saved: " in process.stdout
    assert "training continues, next try after step 3" in process.stdout
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def damage(directory: Path, step: int) -> None:
    """Flip one bit of the largest file, which holds arrays."""
    files = [path for path in (directory / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_restored(
    undisturbed, half, tmp_path
):
    damage(tmp_path / "run", 3)
    assert run(half) == 0
    logged = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(
        r"checkpoint 3.*; renamed to 3\.damaged; resuming from 2\n(.*\n)*.*resumed from step 2",
        logged,
    )
    assert losses(tmp_path / "run") == losses(undisturbed / "run")
    assert (tmp_path / "run" / "checkpoints" / "3.damaged").is_dir()


def test_a_run_with_only_damaged_checkpoints_is_refused(half, tmp_path, capsys):
    for step in (2, 3):
        for path in (tmp_path / "run" / "checkpoints" / str(step)).rglob("*METADATA*"):
            path.write_text("{}")
    before = losses(tmp_path / "run")
    message = "every checkpoint is damaged: 2.damaged, 3.damaged; restore one from a backup"
    # A launcher may restart the run.
    for _ in range(2):
        assert message in refusal(capsys, half)
    assert losses(tmp_path / "run") == before
    assert run(half, "checkpoint.resume=never", "training.steps=1") == 0


def test_the_record_describes_the_process_and_its_lineage(half, tmp_path):
    assert run(half, "mesh.dp=1", "mesh.tp=4") == 0
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    with contextlib.closing(checkpoints):
        record = checkpoints.record(6)
    assert record["mesh"]["tp"] == 4 and record["from_step"] == 3
    (parent,) = record["lineage"]
    assert parent["mesh"]["tp"] == 2 and parent["from_step"] == 0
    assert parent["config_hash"] != record["config_hash"]
    assert record["config"] == (tmp_path / "run" / "config.yaml").read_text()
    assert record["versions"]["jax"] == jax.__version__


def test_the_moving_average_is_evaluated_saved_and_resumed(tmp_path, capsys):
    config = write_config(tmp_path)
    ema = "optimizer.ema_decay=0.5"
    assert run(config, ema, f"run.dir={tmp_path}/whole") == 0
    assert run(config, ema, "training.steps=3") == 0
    assert run(config, ema) == 0
    whole, parts = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "run"))
    assert [line["loss"] for line in whole] == [line["loss"] for line in parts]
    assert whole[-1]["eval_loss"] == parts[-1]["eval_loss"]
    assert run(config, f"run.dir={tmp_path}/plain") == 0
    plain = json.loads((tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()[-1])
    assert plain["loss"] == whole[-1]["loss"] and plain["eval_loss"] != whole[-1]["eval_loss"]
    message = refusal(capsys, config, ema, f"run.dir={tmp_path}/plain", "training.steps=9")
    assert "checkpoint 6 has no moving average" in message and "optimizer.ema_decay" in message


def test_required_disk_space_counts_only_the_saves_of_the_run(tmp_path):
    assert run(write_config(tmp_path), "training.steps=1", "checkpoint.keep=1000000000000") == 0


def test_a_non_finite_loss_never_updates_the_parameters(tmp_path, capsys):
    """With an exploding learning rate later steps are skipped, and then the run ends."""
    config = write_config(tmp_path)
    wild = ["optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "training.steps=40"]
    capsys.readouterr()
    assert run(config, *wild, "training.guard.max_bad_steps=3", "checkpoint.every=1") == 1
    shown = capsys.readouterr()
    assert re.search(
        r"step \d+: loss .*, grad norm nan: not finite; the update was skipped", shown.out
    )
    assert re.match(r"error: 3 updates in a row were skipped, up to step \d+ with loss", shown.err)
    assert "the newest complete checkpoint is " in shown.err and shown.err.count("\n") == 1
    last = re.search(r"up to step (\d+) with", shown.err)[1]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == int(last)
    # Also if the last bad step is the last step of the run.
    end = [f"run.dir={tmp_path}/end", f"training.steps={last}", "training.guard.max_bad_steps=3"]
    assert run(config, *wild, *end) == 1
    assert f"3 updates in a row were skipped, up to step {last}" in capsys.readouterr().err
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    with contextlib.closing(checkpoints):
        prints = checkpoints.record(checkpoints.latest_step)["fingerprints"]
    assert prints


def test_a_spike_rolls_back_and_skips_its_batches(tmp_path):
    """A tiny learning rate and a low threshold make spikes out of noise."""
    config = write_config(tmp_path)
    easy = ["training.guard.on_spike=rollback", "training.guard.max_z=1.8", "training.steps=50"]
    easy += ["optimizer.learning_rate=1e-9", "training.guard.max_bad_steps=30"]
    assert run(config, *easy, "checkpoint.every=10", "training.eval_every=100") == 0
    logged = (tmp_path / "run" / "log.txt").read_text()
    back = re.findall(r"back to step (\d+); batches (\d+) to (\d+) are left out", logged)
    assert back
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 51))
    with contextlib.closing(
        Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    ) as checkpoints:
        skipped = checkpoints.record(50)["skipped"]
    left_out = sum(last - first for first, last in skipped)
    assert left_out == sum(int(last) + 1 - int(first) for _, first, last in back)
    assert lines[-1]["data/text/tokens"] == pytest.approx((50 + left_out) * 8 * 32, rel=0.01)


def test_a_save_that_fails_after_a_spike_is_not_rolled_back_to(tmp_path, monkeypatch):
    """The only save is still in progress at the spike, and then fails."""
    save = Checkpoints.save

    def failing(self, state, step, *args):
        seconds = save(self, state, step, *args)
        if step == 30:
            number, result = self._pending

            def result_without_it():
                result()
                shutil.rmtree(self._directory / "30")
                raise OSError(28, "No space left on device")

            self._pending = number, result_without_it
        return seconds

    monkeypatch.setattr(Checkpoints, "save", failing)
    monkeypatch.setattr(Checkpoints, "poll", lambda *_: None)
    config = write_config(tmp_path)
    easy = ["training.guard.on_spike=rollback", "training.guard.max_z=1.8", "training.steps=34"]
    easy += ["optimizer.learning_rate=1e-9", "training.guard.max_bad_steps=30"]
    easy += ["data.seed=14"]  # an order whose first jump is at step 31
    assert run(config, *easy, "checkpoint.every=30", "training.eval_every=100") == 0
    logged = (tmp_path / "run" / "log.txt").read_text()
    assert "step 31: loss" in logged and "checkpoint 30 was not saved" in logged
    assert "back to step" not in logged


def test_the_best_checkpoint_is_kept_when_evaluated_after_the_save(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    keys = ["checkpoint.every=100", "checkpoint.keep=1", "checkpoint.keep_best=1"]

    def stopped(self, step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleWriter, "preview", stopped)
        patch.setattr(ConsoleWriter, "finish", lambda self: pytest.fail("the run is not finished"))
        assert run(config, *keys) == EXIT_STOPPED  # after step 4, without its evaluation
    worse = [*keys, "optimizer.learning_rate=3", "training.eval_every=2"]
    for steps in (6, 8):  # the process that evaluates it, and one that starts later
        assert run(config, *worse, f"training.steps={steps}") == 0
        kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
        assert kept == {"4", str(steps)}
    log_text = (tmp_path / "run" / "log.txt").read_text()
    assert "changed since checkpoint 4: " in log_text
    assert "optimizer.learning_rate 0.01 -> 3.0" in log_text


def test_sigusr1_saves_and_training_continues(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    signals = iter([signal.SIGUSR1])

    def send(self, step, values):
        for number in signals:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ConsoleWriter, "preview", send)
    assert run(config, "checkpoint.every=100") == 0
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"2", "6"}


def test_a_step_is_timed_and_shown_before_its_evaluation_and_its_save(tmp_path, monkeypatch):
    """So neither counts as time of the step, and a spike is handled before both."""
    events = []

    def shown(self, step, values):
        events.append(("shown", step))

    def evaluated(self, step, params):
        events.append(("evaluated", step))
        return {"eval_loss": 3.5}

    def saved(self, state, step, *_, **__):
        events.append(("saved", step))
        return 0.0

    monkeypatch.setattr(ConsoleWriter, "preview", shown)
    monkeypatch.setattr(Evaluation, "run", evaluated)
    monkeypatch.setattr(Checkpoints, "save", saved)
    steps = ["training.steps=4", "training.eval_every=3", "checkpoint.every=2"]
    assert run(write_config(tmp_path), *steps) == 0
    assert events == [
        *(("shown", 1), ("shown", 2), ("saved", 2), ("shown", 3), ("evaluated", 3)),
        *(("shown", 4), ("evaluated", 4), ("saved", 4)),
    ]


def test_a_signal_during_an_evaluation_stops_the_run_at_its_end(tmp_path, monkeypatch):
    """Evaluations take long, so many signals arrive in one. No further step is trained."""
    signals = iter([signal.SIGTERM])

    def interrupted(self, step, params):
        for number in signals:  # once: a second signal ends the process
            os.kill(os.getpid(), number)
        return {"eval_loss": 3.5}

    config = write_config(tmp_path)
    monkeypatch.setattr(Evaluation, "run", interrupted)
    assert run(config, "training.eval_every=3", "checkpoint.every=100") == EXIT_STOPPED
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    with contextlib.closing(checkpoints):
        assert checkpoints.latest_step == max(losses(tmp_path / "run")) == 3
        record = checkpoints.record(3)
    assert record["metrics"] == {"eval_loss": 3.5} and record["pending"] == []


def test_an_interrupted_evaluation_is_finished_by_the_next_process(
    tmp_path, undisturbed, monkeypatch
):
    config = write_config(tmp_path)

    def stopped(self, step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleWriter, "preview", stopped)
        assert run(config, "checkpoint.every=100") == EXIT_STOPPED
    lines, whole = (
        read_lines(folder / "run" / "metrics.jsonl") for folder in (tmp_path, undisturbed)
    )
    assert lines[-1]["step"] == 4 and "eval_loss" not in lines[-1]
    assert run(config) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("eval_loss") for line in lines] == [line.get("eval_loss") for line in whole]
    # A process that resumes from the same checkpoint does not repeat it.
    steps, evaluate = list[int](), Evaluation.run
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    monkeypatch.setattr(
        Evaluation, "run", lambda it, step, state: steps.append(step) or evaluate(it, step, state)
    )
    assert run(config) == 0 and steps == [6]
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["loss"] == whole[-1]["loss"]


def test_a_run_with_one_process_ends_when_it_makes_no_progress(tmp_path, monkeypatch):
    """It is monitored like several, and says where it waited."""
    failures: list[tuple[str, int]] = []
    monkeypatch.setattr(process_group, "_exit", lambda *failure: failures.append(failure))
    dispatch = StepRunner.run

    def run_and_hang(runner, step, state):
        assert not failures
        if step == 3:
            runner._group.set_phase("step 3")
            monkeypatch.setitem(vars(runner._group.config), "stall_timeout", 0.5)
            wait_until(lambda: failures)
            raise DataError("the end of the test")
        return dispatch(runner, step, state)

    monkeypatch.setattr(StepRunner, "run", run_and_hang)
    assert run(write_config(tmp_path)) == 1
    ((reason, code),) = failures
    assert code == 76 and reason.startswith("no progress for 0.5 s (cluster.stall_timeout): ")
    assert "step 3 for" in reason
    assert "in run_and_hang\n" in (tmp_path / "run" / "stacks.txt").read_text()


def test_the_next_process_counts_the_time_of_the_last_save_too(tmp_path):
    config = write_config(tmp_path)
    ledgers = []
    for steps in (3, 6):
        assert run(config, f"training.steps={steps}") == 0
        ledgers.append(json.loads((tmp_path / "run" / "goodput.json").read_text()))
        (*_, last) = read_lines(tmp_path / "run" / "metrics.jsonl")
        assert ledgers[-1]["checkpoint"] > last.get("goodput/checkpoint", 0.0)
    assert all(ledgers[1][label] >= seconds for label, seconds in ledgers[0].items())
