"""The command line: refusals on one line, a whole run, resuming, and runs that are killed."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from conftest import ROOT
from ruamel.yaml import YAML

import train
from data.tokenizer import open_tokenizer
from training.checkpoint import CheckpointConfig, Checkpoints
from training.loop import EXIT_RESUMABLE, Run
from training.metrics import Display

STEP_KEYS = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "step_time"}
STEP_KEYS |= {"data_wait", "data/text/tokens", "data/text/epoch"}
TINY = """
run: {dir: FOLDER/run, compilation_cache: CACHE}
mesh: {dp: 2, tp: 2}
model:
  vocab_size: 264
  hidden_size: 32
  num_hidden_layers: 1
  num_attention_heads: 4
  num_key_value_heads: 4
  intermediate_size: 64
  dtype: float32
data:
  files: FOLDER/*.txt
  sequence_length: 32
  global_batch_size: 8
  eval_fraction: 0.05
  cache_dir: FOLDER/cache
optimizer: {schedule: constant, warmup_steps: 0, learning_rate: 1e-2}
training: {steps: 6, eval_every: 4, sample_tokens: 8}
checkpoint: {every: 2}
"""


@pytest.fixture(autouse=True)
def signals():
    """A run takes over the signals of its process, here pytest's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def write_config(folder: Path, cache: str = "null") -> str:
    """A tiny run with its text and all of its traces in `folder`."""
    (folder / "a.txt").write_text("".join(f"def f{n}(x): return x * {n * n}\n" for n in range(200)))
    (folder / "tiny.yaml").write_text(TINY.replace("FOLDER", str(folder)).replace("CACHE", cache))
    return str(folder / "tiny.yaml")


def run(config: str, *arguments: str) -> int:
    return train.main(["--config", config, *arguments])


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(directory: Path) -> dict[int, float]:
    """By step; a step that is there twice is an error."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """Folder of a run of six steps that nobody interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(write_config(folder)) == 0
    return folder


@pytest.fixture
def half(tmp_path) -> str:
    """Configuration of a run that stopped after three of six steps."""
    config = write_config(tmp_path)
    assert run(config, "training.steps=3") == 0
    return config


def refusal(capsys, config: str, *overrides: str) -> str:
    """The one line on stderr of a command that ends with exit code 2."""
    capsys.readouterr()
    assert run(config, *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith("\n")
    assert error.count("\n") == 1 and "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("override", "law"),
    [
        ("mesh.tpp=8", "mesh.tpp: unknown key; did you mean mesh.tp?"),
        ("mesh.tp=3", "model.num_attention_heads=4 is not divisible by mesh.tp=3; use mesh.tp=2"),
        ("training.steps=ten", "training.steps='ten': input should be a valid integer"),
        ("data.files=/nowhere/*.txt", "data.files='/nowhere/*.txt' matches no file; give a glob"),
        ("data.files=FOLDER/empty", "matches 1 file(s), all empty; give files with text"),
        ("data.files=FOLDER/short", "data: 2 tokens in 1 document(s) are too few for training"),
        ("data.files=FOLDER/broken", "FOLDER/broken: invalid UTF-8"),
        ("data.tokenizer=FOLDER/empty", "FOLDER/empty"),
        ("data.sequence_length={0: 24, 1: 32}", "data.sequence_length=24 does not divide the lon"),
        ("run.dir=FOLDER/a.txt/run", "cannot be written: Not a directory; give a directory"),
        ("data.cache_dir=FOLDER/a.txt/cache", "Not a directory"),
        ("checkpoint.resume=must", "the run directory holds no checkpoint; check run.dir"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, override, law):
    config = write_config(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("a")
    (tmp_path / "broken").write_bytes(b"good \xff bad")
    message = refusal(capsys, config, override.replace("FOLDER", str(tmp_path)))
    assert law.replace("FOLDER", str(tmp_path)) in message


def test_a_missing_configuration_is_one_line_and_exit_code_2(capsys):
    assert "--config nowhere.yaml: No such file" in refusal(capsys, "nowhere.yaml")


def test_print_config_prints_yaml_that_parses_and_trains_nothing(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "--print-config", "optimizer.learning_rate=3e-4") == 0
    printed = capsys.readouterr().out
    values = YAML(typ="safe").load(printed)
    assert values["optimizer"]["learning_rate"] == 3e-4 and values["model"]["head_dim"] is None
    assert not (tmp_path / "run").exists()
    (tmp_path / "printed.yaml").write_text(printed)
    assert run(str(tmp_path / "printed.yaml"), "--print-config") == 0
    assert capsys.readouterr().out == printed


def test_overrides_may_stand_around_options(tmp_path, capsys):
    arguments = ["mesh.tp=2", "--config", write_config(tmp_path), "--print-config", "mesh.dp=1"]
    assert train.main(arguments) == 0
    assert "tp: 2" in capsys.readouterr().out


def test_print_sharding_prints_every_tensor_without_data_and_trains_nothing(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "--print-sharding", "mesh.fsdp=2", "data.files=/nowhere/*.txt") == 0
    shown = capsys.readouterr().out
    for name in ("embed.table", "layers.mlp.down.kernel", "{mu,nu}.norm.scale", "x_BLD"):
        assert re.search(rf"^{re.escape(name)} ", shown, re.MULTILINE)
    assert "dp2: no dim is on dp: data parallel repeats it" in shown
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("override", "law"),
    [
        ("mesh.tp=3", "model.num_attention_heads=4 is not divisible by mesh.tp=3; use mesh.tp=2"),
        ("mesh.dp=8", "the mesh needs 16 CPU devices, but jax already started with 8"),
    ],
)
def test_print_sharding_refuses_in_one_line(tmp_path, capsys, override, law):
    assert law in refusal(capsys, write_config(tmp_path), "--print-sharding", override)


def test_a_run_shows_the_bytes_of_its_state_and_logs_the_whole_table(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "--print-sharding") == 0
    table = capsys.readouterr().out
    assert run(config, "training.steps=1") == 0
    shown, logged = capsys.readouterr().out, (tmp_path / "run" / "log.txt").read_text()
    summary = re.search(r"parameters and optimizer: ([\d,]+) bytes per device, ([\d,]+) b", shown)
    assert summary[0] in logged and table in logged and "semantic axes" not in shown
    totals = re.findall(r"^total +([\d,]+) +([\d,]+)$", table, re.MULTILINE)[:2]
    for number, column in zip(summary.groups(), zip(*totals, strict=True), strict=True):
        assert sum(int(part.replace(",", "")) for part in column) == int(number.replace(",", ""))


def test_a_run_leaves_its_traces_and_prints_a_sample(tmp_path, capsys):
    assert run(write_config(tmp_path)) == 0
    shown, directory = capsys.readouterr().out, tmp_path / "run"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() >= STEP_KEYS for line in lines)
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [4, 6]
    # The byte tokenizer: a byte per token, but for the end of the text, which has none.
    for line in evaluated:
        assert line["eval/text/loss"] == line["eval_loss"]
        assert line["eval_bits_per_byte"] == pytest.approx(
            line["eval_loss"] / math.log(2), rel=0.02
        )
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["learning_rate"] for line in lines] == [pytest.approx(1e-2)] * 6
    logged = (directory / "log.txt").read_text()
    for text in ("sample:\ndef ", "step 6/6  loss", "mesh dp2 x tp2", "eval loss"):
        assert text in shown and text in logged
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"2", "4", "6"}
    assert list((directory / "tensorboard").iterdir())
    assert YAML(typ="safe").load(directory / "config.yaml")["run"]["dir"] == str(directory)


def test_every_save_is_logged(undisturbed):
    logged = (undisturbed / "run" / "log.txt").read_text()
    assert re.findall(r"saved step (\d+)", logged) == ["2", "4", "6"]


def test_the_same_run_again_has_the_same_losses(undisturbed, tmp_path):
    assert run(write_config(tmp_path)) == 0
    assert losses(tmp_path / "run") == losses(undisturbed / "run")


def test_two_halves_equal_one_whole_bit_for_bit(undisturbed, half, tmp_path):
    assert run(half) == 0
    assert losses(tmp_path / "run") == losses(undisturbed / "run")
    assert "resumed from step 3" in (tmp_path / "run" / "log.txt").read_text()


def test_a_finished_run_has_nothing_left_to_train(half, tmp_path, capsys):
    before = losses(tmp_path / "run")
    capsys.readouterr()
    assert run(half, "training.steps=3") == 0
    assert "step 3 is the last: nothing left to train" in capsys.readouterr().out
    assert losses(tmp_path / "run") == before


def test_a_run_goes_on_upon_another_mesh(undisturbed, half, tmp_path):
    assert run(half, "mesh.dp=1", "mesh.fsdp=2", "mesh.tp=4") == 0
    wanted = losses(undisturbed / "run")
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)
    assert "mesh fsdp2 x tp4" in (tmp_path / "run" / "log.txt").read_text()


def test_never_resuming_moves_the_old_run_aside(half, tmp_path):
    old = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert run(half, "training.steps=2", "checkpoint.resume=never") == 0
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_text() == old
    assert (tmp_path / "run.old-1" / "checkpoints" / "3").is_dir()
    assert list(losses(tmp_path / "run")) == [1, 2]


def test_batches_may_grow_and_a_resume_in_between_changes_nothing(tmp_path):
    changing = ["data.sequence_length={0: 16, 2: 32}", "data.global_batch_size={0: 8, 4: 16}"]
    config = write_config(tmp_path)
    assert run(config, *changing, f"run.dir={tmp_path}/whole") == 0
    logged = (tmp_path / "whole" / "log.txt").read_text()
    shapes = re.findall(r"compiled the step for (\d+) rows of (\d+)", logged)
    assert shapes == [("8", "16"), ("8", "32"), ("16", "32")]
    for steps in (3, 5, 6):
        assert run(config, *changing, f"training.steps={steps}") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    tokens = [line["data/text/tokens"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert tokens == pytest.approx([128, 256, 512, 768, 1280, 1792], abs=8)  # but for padding


def test_every_source_is_evaluated_and_the_tokenizer_is_kept(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "one line of text"}\n' * 99)
    config = write_config(tmp_path)
    both = (
        f"data.sources={{code: {{files: {tmp_path}/a.txt}}, lines: {{files: {tmp_path}/b.jsonl}}}}"
    )
    assert run(config, "data.files=null", both) == 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    parts = [line[f"eval/{name}/loss"] for name in ("code", "lines")]
    assert min(parts) < line["eval_loss"] < max(parts)
    for name in ("code", "lines"):
        assert line[f"data/{name}/tokens"] == pytest.approx(3 * 8 * 32, rel=0.02)
    kept = open_tokenizer(str(tmp_path / "run" / "tokenizer.json"))
    assert kept.digest == open_tokenizer("bytes").digest


def test_another_text_is_refused_on_resume(half, tmp_path, capsys):
    (tmp_path / "b.txt").write_text("one document more")
    assert "trained on other data: the text of source 'text' is another" in refusal(capsys, half)


@pytest.mark.parametrize(
    ("override", "law"),
    [
        (
            "data.seed=1",
            "trained on other data: data.seed was 0, is 1; restore it, or",
        ),
        ("model.hidden_size=64", "checkpoint 3 holds embed.table as ((264, 32), 'float32')"),
        ("training.steps=2", "training.steps=2 but the run directory already holds step 3"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_the_run_stays(half, tmp_path, capsys, override, law):
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert law in refusal(capsys, half, override)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert run(half, "training.steps=3") == 0


def test_clipping_may_change_on_resume(half):
    assert run(half, "optimizer.clip_norm=null", "checkpoint.resume=must") == 0


def test_a_run_stopped_during_an_evaluation_has_saved_its_last_step(tmp_path, monkeypatch):
    """An evaluation takes long: many signals arrive there."""
    signals = iter([signal.SIGTERM])

    def interrupted(self, step, params):
        for number in signals:  # once: a second signal ends the process
            os.kill(os.getpid(), number)
        return {}

    config = write_config(tmp_path)
    monkeypatch.setattr(Run, "_evaluate", interrupted)
    assert run(config, "training.eval_every=3", "checkpoint.every=100") == EXIT_RESUMABLE
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    latest = checkpoints.latest_step
    checkpoints.close()
    assert latest == max(losses(tmp_path / "run"))


STEPS = 200


def start(config: str, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "train.py", "--config", config, f"training.steps={STEPS}"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *overrides], cwd=ROOT, **pipes)


def wait_for(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """Until the condition holds; the process must live so long."""
    limit = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """A folder with an undisturbed run in a process of its own, and compiled programs."""
    folder = tmp_path_factory.mktemp("long")
    process = start(write_config(folder, cache=str(folder / "xla")), "checkpoint.every=1000")
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert any((folder / "xla").iterdir())
    return folder


@pytest.mark.slow
def test_a_refusal_after_opening_the_run_directory_is_one_line_too(tmp_path):
    process = start(write_config(tmp_path), "checkpoint.resume=must")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert errors.startswith("error: checkpoint.resume=must") and errors.count("\n") == 1


def resume_and_compare(config: str, directory: Path, long_run: Path) -> int:
    """Runs to the end: every step once, as if nothing had happened. The step it resumed from."""
    again = start(config, "checkpoint.resume=must", "checkpoint.every=1000")
    _, errors = again.communicate(timeout=280)
    assert again.returncode == 0, errors
    assert losses(directory) == losses(long_run / "run")
    return int(re.search(r"resumed from step (\d+)", (directory / "log.txt").read_text())[1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_run_that_is_asked_to_stop_resumes_as_if_nothing_had_happened(long_run, tmp_path, number):
    config, directory = write_config(tmp_path, cache=str(long_run / "xla")), tmp_path / "run"
    process, log = start(config, "checkpoint.every=100000"), directory / "log.txt"
    wait_for(process, lambda: log.exists() and re.search(r"step +40/", log.read_text()))
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == EXIT_RESUMABLE == 75, errors
    last = max(losses(directory))
    assert 40 <= last < STEPS
    assert f"stopped by {number.name} after step {last}; run again to resume" in log.read_text()
    assert resume_and_compare(config, directory, long_run) == last


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_from_its_last_checkpoint(long_run, tmp_path):
    config, directory = write_config(tmp_path, cache=str(long_run / "xla")), tmp_path / "run"
    process = start(config, "checkpoint.every=30")
    wait_for(process, (directory / "checkpoints" / "60").exists)
    process.kill()
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGKILL
    last = max(losses(directory))
    assert 60 <= last < STEPS
    assert 60 <= resume_and_compare(config, directory, long_run) <= last


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_only_when_nothing_is_saved(tmp_path):
    """No file may grow beyond 64 KiB: what a full disk does to a save, without a disk to fill."""
    config = write_config(tmp_path)
    command = (
        f"ulimit -f 64; exec {sys.executable} train.py --config {config} model.hidden_size=128"
    )
    arguments = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100}
    process = subprocess.run(["bash", "-c", command], **arguments)
    assert process.returncode == 1
    assert process.stderr == (
        "error: the last state was not saved; the newest whole checkpoint is none\n"
    )
    assert "checkpoint 2 was not saved: " in process.stdout
    assert "training goes on, next try after step 3" in process.stdout
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def damage(directory: Path, step: int) -> None:
    """One bit of the largest file, which holds arrays."""
    files = [path for path in (directory / "checkpoints" / str(step)).rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_set_aside_loudly_for_the_one_before(undisturbed, half, tmp_path):
    damage(tmp_path / "run", 3)
    assert run(half) == 0
    logged = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(
        r"checkpoint 3.*; it is now 3\.damaged, going on from step 2\n(.*\n)*.*resumed from step 2",
        logged,
    )
    assert losses(tmp_path / "run") == losses(undisturbed / "run")
    assert (tmp_path / "run" / "checkpoints" / "3.damaged").is_dir()


def test_without_a_whole_checkpoint_nothing_starts_from_scratch(half, tmp_path, capsys):
    for step in (2, 3):
        for path in (tmp_path / "run" / "checkpoints" / str(step)).rglob("*METADATA*"):
            path.write_text("{}")
    before = losses(tmp_path / "run")
    law = (
        "no whole checkpoint is left, 3, 2 were damaged; bring one back from a copy, or begin anew"
    )
    assert law in refusal(capsys, half)
    assert losses(tmp_path / "run") == before
    assert run(half, "checkpoint.resume=never", "training.steps=1") == 0


def test_the_record_tells_what_the_run_was_and_came_from(half, tmp_path):
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


def test_the_moving_average_is_evaluated_kept_and_resumed(tmp_path):
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


def test_a_loss_that_is_not_finite_never_reaches_the_parameters(tmp_path, capsys):
    """A learning rate that explodes: the steps after it are left out, and in the end the run."""
    config = write_config(tmp_path)
    wild = ["optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "training.steps=40"]
    capsys.readouterr()
    assert run(config, *wild, "training.guard.max_bad_steps=3", "checkpoint.every=1") == 1
    shown = capsys.readouterr()
    assert re.search(
        r"step \d+: loss .*, grad norm nan, not finite: the update was left out", shown.out
    )
    assert re.match(r"error: 3 steps in a row, up to step \d+, could not be applied", shown.err)
    assert "the newest whole checkpoint is " in shown.err and shown.err.count("\n") == 1
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig())
    with contextlib.closing(checkpoints):
        prints = checkpoints.record(checkpoints.latest_step)["fingerprints"]
    assert prints


def test_a_spike_rolls_back_and_leaves_its_batches_out(tmp_path):
    """Nothing is learned, and every small rise counts as a spike, so that there are some."""
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


def test_sigusr1_saves_and_goes_on(tmp_path, monkeypatch):
    config = write_config(tmp_path)
    signals = iter([signal.SIGUSR1])

    def told(self, step, values):
        for number in signals:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Display, "step", told)
    assert run(config, "checkpoint.every=100") == 0
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"2", "6"}


def test_an_interrupted_evaluation_is_made_up_for(tmp_path, undisturbed, monkeypatch):
    config = write_config(tmp_path)

    def stopped(self, step, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "step", stopped)
        assert run(config, "checkpoint.every=100") == EXIT_RESUMABLE
    lines, whole = (
        read_lines(folder / "run" / "metrics.jsonl") for folder in (tmp_path, undisturbed)
    )
    assert lines[-1]["step"] == 4 and "eval_loss" not in lines[-1]
    assert run(config) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line.get("eval_loss") for line in lines] == [line.get("eval_loss") for line in whole]
