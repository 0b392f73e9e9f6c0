"""The command line: refusals, whole runs, resuming, and runs that are killed."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, release
from ruamel.yaml import YAML
from runs import losses, read_lines, refusal, run, write_config

import train
from data.tokenizers.base import TOKENIZERS, open_tokenizer
from data.tokenizers.byte_level import ByteTokenizer
from exit_codes import EXIT_STOPPED
from training.directory import locked_run

STEP_KEYS = {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "step_time"}
STEP_KEYS |= {"data_wait", "data/text/tokens", "data/text/epoch"}

pytestmark = pytest.mark.usefixtures("signals")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.tpp=8", "mesh.tpp: unknown key; did you mean mesh.tp?"),
        ("mesh.tp=3", "model.num_attention_heads=4 is not divisible by mesh.tp=3; use mesh.tp=2"),
        ("training.steps=ten", "training.steps='ten': input should be a valid integer"),
        ("data.files=/nowhere/*.txt", "data.files='/nowhere/*.txt' matches no file; give a glob"),
        ("data.files=FOLDER/empty", "matches 1 file(s), all empty; give files with text"),
        ("data.files=FOLDER/short", "data: 2 tokens in 1 document(s) are too few for training"),
        ("data.files=FOLDER/broken", "FOLDER/broken: invalid UTF-8"),
        ("data.tokenizer=FOLDER/empty", "FOLDER/empty"),
        ("data.sequence_length={0: 24, 1: 32}", "data.sequence_length=24 does not divide 32, the"),
        ("data.repack_at=5", "data.repack_at=5: write a list of steps, such as [5000]"),
        ("run.dir=FOLDER/a.txt/run", "cannot be written: Not a directory; give a directory"),
        ("data.cache_dir=FOLDER/a.txt/cache", "Not a directory"),
        ("run.dir=FOLDER/lr=[1]/run", "orbax reads [ ] * ? as a pattern; give a path"),
        ("run.dir=''", "run.dir='': string should have at least 1 character"),
        ("checkpoint.resume=must", "the run directory holds no checkpoint; check run.dir"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, override, message):
    config = write_config(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("a")
    (tmp_path / "broken").write_bytes(b"good \xff bad")
    error = refusal(capsys, config, override.replace("FOLDER", str(tmp_path)))
    assert message.replace("FOLDER", str(tmp_path)) in error


def test_a_missing_configuration_is_one_line_and_exit_code_2(capsys):
    assert "--config nowhere.yaml: No such file" in refusal(capsys, "nowhere.yaml")


def test_print_config_prints_yaml_that_reads_back_and_does_not_train(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "--print-config", "optimizer.learning_rate=3e-4") == 0
    printed = capsys.readouterr().out
    values = YAML(typ="safe").load(printed)
    assert values["optimizer"]["learning_rate"] == 3e-4 and values["model"]["head_dim"] is None
    assert not (tmp_path / "run").exists()
    (tmp_path / "printed.yaml").write_text(printed)
    assert run(str(tmp_path / "printed.yaml"), "--print-config") == 0
    assert capsys.readouterr().out == printed


def test_a_copied_run_prints_its_configuration_and_is_not_continued(tmp_path, capsys):
    config, copy = write_config(tmp_path), tmp_path / "copy"
    (copy / "checkpoints").mkdir(parents=True)
    shutil.copy(config, copy / "config.yaml")
    assert run(str(copy / "config.yaml"), "--print-config") == 0
    assert f"{tmp_path}/run\n" in capsys.readouterr().out
    assert f"; add run.dir={copy} to" in refusal(capsys, str(copy / "config.yaml"))


def test_overrides_are_accepted_before_and_after_options(tmp_path, capsys):
    arguments = ["mesh.tp=2", "--config", write_config(tmp_path), "--print-config", "mesh.dp=1"]
    assert train.main(arguments) == 0
    assert "tp: 2" in capsys.readouterr().out


def test_print_sharding_needs_no_data_and_does_not_train(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "--print-sharding", "mesh.fsdp=2", "data.files=/nowhere/*.txt") == 0
    shown = capsys.readouterr().out
    for name in ("embed.table", "layers.mlp.down.kernel", "{mu,nu}.norm.scale", "x_BLD"):
        assert re.search(rf"^{re.escape(name)} ", shown, re.MULTILINE)
    assert "dp=2: data parallelism" in shown
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mesh.tp=3", "model.num_attention_heads=4 is not divisible by mesh.tp=3; use mesh.tp=2"),
        ("mesh.dp=8", "the mesh needs 16 CPU devices, but jax already started with 8"),
    ],
)
def test_print_sharding_refuses_in_one_line(tmp_path, capsys, override, message):
    assert message in refusal(capsys, write_config(tmp_path), "--print-sharding", override)


def test_a_run_prints_the_bytes_of_its_state_and_logs_the_sharding_table(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "--print-sharding") == 0
    table = capsys.readouterr().out
    assert run(config, "training.steps=1") == 0
    shown, logged = capsys.readouterr().out, (tmp_path / "run" / "log.txt").read_text()
    summary = re.search(
        r"parameters and optimizer: ([\d.]+) KiB per device, ([\d.]+) KiB of", shown
    )
    assert summary[0] in logged and table in logged and "semantic axes" not in shown
    totals = re.findall(r"^total +([\d,]+) +([\d,]+)$", table, re.MULTILINE)[:2]
    for number, column in zip(summary.groups(), zip(*totals, strict=True), strict=True):
        size = sum(int(part.replace(",", "")) for part in column)
        assert number == f"{size / 1024:.3g}"


# Twenty losses of the tiny run on jax 0.10.2; a mesh or jax 0.12 moves the seventh digit.
GOLDEN = [
    5.543580, 5.180146, 4.768479, 4.397229, 4.022637, 3.719482, 3.402270, 3.108232, 2.883665,
    2.644036, 2.430534, 2.214400, 2.042123, 1.954207, 1.815245, 1.629706, 1.481395, 1.376437,
    1.233879, 1.271907,
]  # fmt: skip


def test_twenty_steps_follow_the_golden_curve(tmp_path):
    config = write_config(tmp_path)
    assert run(config, "training.steps=20", "checkpoint.every=20", "training.sample_tokens=0") == 0
    assert list(losses(tmp_path / "run").values()) == pytest.approx(GOLDEN, rel=2**-18)


def test_a_run_writes_metrics_logs_checkpoints_and_a_sample(tmp_path, capsys):
    assert run(write_config(tmp_path)) == 0
    shown, directory = capsys.readouterr().out, tmp_path / "run"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() >= STEP_KEYS for line in lines)
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [4, 6]
    # The byte tokenizer has one byte per token; the end-of-text token has none.
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


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(undisturbed, half, tmp_path):
    assert run(half) == 0
    assert losses(tmp_path / "run") == losses(undisturbed / "run")
    assert "resumed from step 3" in (tmp_path / "run" / "log.txt").read_text()


def test_an_option_that_changes_the_state_of_the_optimizer_is_refused_on_resume(tmp_path, capsys):
    config, sgd = write_config(tmp_path), ("optimizer.name=sgd", "training.sample_tokens=0")
    assert run(config, *sgd, "training.steps=1") == 0
    message = refusal(capsys, config, *sgd, "optimizer.options={momentum: 0}")
    assert "optimizer.options.momentum changed, and the state of the optimizer in" in message
    assert "the old one as training.init_from to go on from the parameters" in message
    assert run(config, *sgd, "training.steps=2", "optimizer.options={nesterov: true}") == 0


def test_a_finished_run_has_nothing_left_to_train(half, tmp_path, capsys):
    folder, before = tmp_path / "run", losses(tmp_path / "run")
    saved = (folder / "config.yaml").read_text()
    capsys.readouterr()
    assert run(half, "training.steps=3", "training.log_every=3") == 0
    shown = capsys.readouterr().out
    assert "step 3 is the last: nothing left to train" in shown
    assert "restored step 3 in " in shown and "resumed from" not in shown
    assert losses(folder) == before
    assert (folder / "config.yaml").read_text() == saved


def test_an_extended_run_says_what_happens_to_the_learning_rate(tmp_path):
    config, log = write_config(tmp_path), tmp_path / "run" / "log.txt"
    cosine = ("optimizer.schedule=cosine", "training.sample_tokens=0")
    assert run(config, *cosine, "training.steps=2") == 0
    assert run(config, *cosine, "training.steps=4", "optimizer.schedule_steps=2") == 0
    assert "schedule covered" not in log.read_text()
    assert run(config, *cosine, "training.steps=6") == 0
    assert "the cosine schedule covered 2 steps and now covers 6: " in log.read_text()
    assert "; optimizer.schedule_steps=2 keeps the old length, 0.001 at step " in log.read_text()
    rates = [line["learning_rate"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert rates[2:4] == pytest.approx([1e-3, 1e-3]) and rates[4] > 1e-3


def test_a_run_resumes_on_another_mesh(undisturbed, half, tmp_path):
    assert run(half, "mesh.dp=1", "mesh.fsdp=2", "mesh.tp=4") == 0
    wanted = losses(undisturbed / "run")
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5)
    assert "mesh fsdp2 x tp4" in (tmp_path / "run" / "log.txt").read_text()


def test_resume_never_moves_the_old_run_aside(half, tmp_path):
    old = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert run(half, "training.steps=2", "checkpoint.resume=never") == 0
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_text() == old
    assert (tmp_path / "run.old-1" / "checkpoints" / "3").is_dir()
    assert list(losses(tmp_path / "run")) == [1, 2]


def test_a_schedule_of_batch_shapes_is_resumed_bit_equal(tmp_path):
    changing = ["data.sequence_length={0: 16, 2: 32}", "data.global_batch_size={0: 8, 4: 16}"]
    config = write_config(tmp_path)
    assert run(config, *changing, f"run.dir={tmp_path}/whole") == 0
    logged = (tmp_path / "whole" / "log.txt").read_text()
    shapes = re.findall(r"compiled the training step for (\d+) rows of (\d+) tokens", logged)
    assert shapes == [("8", "16"), ("8", "32"), ("16", "32")]
    for steps in (3, 5, 6):
        assert run(config, *changing, f"training.steps={steps}") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    tokens = [line["data/text/tokens"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert tokens == pytest.approx([128, 256, 512, 768, 1280, 1792], abs=8)  # without padding


def test_every_source_is_evaluated_and_the_tokenizer_is_saved(tmp_path):
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
    assert "trained on other data: the text of source 'text' has changed" in refusal(capsys, half)


def test_sources_join_and_leave_as_refusals_say(tmp_path, capsys):
    (tmp_path / "b.jsonl").write_text('{"text": "one line of text"}\n' * 99)
    config, files = write_config(tmp_path), f"data.sources.lines.files={tmp_path}/b.jsonl"
    code = ("data.files=null", f"data.sources.code.files={tmp_path}/a.txt")

    def advice(*arguments: str) -> list[str]:
        message = refusal(capsys, config, *code, *arguments)
        return shlex.split(re.search(r" set (.*), or give", message)[1])

    assert run(config, *code, "training.steps=2") == 0
    joined = advice(files)
    assert joined == ["data.sources.lines.weight={0: 0, 2: 1}"]
    assert run(config, *code, files, *joined, "training.steps=4") == 0
    left = advice()
    assert left == ["data.sources.lines.weight={0: 0, 2: 1, 4: 0}"]
    assert run(config, *code, files, *left, "training.steps=6") == 0
    seen = [x.get("data/lines/tokens") for x in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert seen[:2] == [None, None]
    assert seen[2] < seen[3] == seen[4] == seen[5] == pytest.approx(8 * 32, rel=0.1)


@pytest.mark.costly
def test_rows_become_longer_as_the_refusal_says_and_a_resume_is_bit_equal(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "training.steps=2") == 0
    message = refusal(capsys, config, "data.sequence_length=64", "training.steps=5")
    longer = shlex.split(re.search(r" set (.*), or give", message)[1])
    assert longer == ["data.sequence_length={0: 32, 2: 64}", "data.repack_at=[2]"]
    assert run(config, *longer, "training.steps=3") == 0
    assert run(config, *longer, "training.steps=5") == 0
    whole = ("run.dir=" + str(tmp_path / "whole"), "training.steps=5")
    assert run(config, *longer, *whole) == 0
    lines, wanted = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert [x["loss"] for x in lines] == [x["loss"] for x in wanted]
    seen = [x["data/text/tokens"] for x in lines]
    assert seen[1] == pytest.approx(2 * 8 * 32, rel=0.1)
    assert seen[4] - seen[1] == pytest.approx(3 * 8 * 64, rel=0.1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.seed=1",
            "trained on other data: data.seed was 0, is now 1; restore the former values",
        ),
        (
            "data.global_batch_size=16",
            "only from step 3 on, set data.global_batch_size='{0: 8, 3: 16}', or give another run",
        ),
        ("lora.rank=2", "no adapters, but lora.rank is set; to go on without, remove the section"),
        (
            "model.hidden_size=64",
            "checkpoint 3 was saved with model.hidden_size=32, but this run has "
            "model.hidden_size=64; restore the former, or give another run.dir",
        ),
        (
            "optimizer.name=lion",
            "optimizer.name=lion, but checkpoint 3 was saved with adamw; set optimizer.name=adamw",
        ),
        (
            "optimizer.moments_dtype=bfloat16",
            "optimizer.moments_dtype=bfloat16, but checkpoint 3 was saved with null; set",
        ),
        ("training.steps=2", "training.steps=2, but the run directory already holds step 3"),
    ],
)
@pytest.mark.costly
def test_a_run_that_cannot_be_resumed_is_refused_and_unchanged(
    half, tmp_path, capsys, override, message
):
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert message in refusal(capsys, half, override)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert run(half, "training.steps=3") == 0


class BlankTokenizer(ByteTokenizer):
    """Drops white space, as many tokenizers of words do."""

    name, digest = "blank:x", "blank"

    def encode(self, text):
        return super().encode("".join(text.split()))


def test_a_prompt_without_a_token_is_refused_at_the_start(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(TOKENIZERS, "blank", lambda name, eos_token: BlankTokenizer())
    config, blank = write_config(tmp_path), ("data.tokenizer=blank:x", "training.sample_prompt=' '")
    assert "training.sample_prompt=' ' has no token; give" in refusal(
        capsys, config, *blank, "training.sample_tokens=8"
    )
    assert not (tmp_path / "run").exists()


def test_clipping_may_change_on_resume(half):
    assert run(half, "optimizer.clip_norm=null", "checkpoint.resume=must") == 0


def test_a_directory_in_use_is_refused_before_data_are_read(half, tmp_path, capsys):
    with locked_run(tmp_path / "run", 0):
        error = refusal(capsys, half, f"data.files={tmp_path}/missing.txt")
    assert f"is in use by process {os.getpid()} of " in error


def test_ctrl_c_during_the_imports_ends_silently():
    # importtime prints a line on stderr after every import.
    command = [sys.executable, "-X", "importtime", "train.py", "--version"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert any("jax.version" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT
    assert output == "" and "Traceback" not in errors and "KeyboardInterrupt" not in errors


STEPS = 200
PATIENCE = 1800
"""Seconds that a process of a test may take."""


def start(config: str, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "train.py", "--config", config, f"training.steps={STEPS}"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *overrides], cwd=ROOT, **pipes)


def wait_for(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """Wait for a condition while the process runs."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> Path:
    """A folder with an undisturbed run in a process of its own, and compiled programs."""
    folder = tmp_path_factory.mktemp("long")
    process = start(write_config(folder, cache=str(folder / "xla")), "checkpoint.every=1000")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert any((folder / "xla").iterdir())
    return folder


@pytest.mark.slow
def test_a_refusal_after_opening_the_run_directory_is_one_line_too(tmp_path):
    process = start(write_config(tmp_path), "checkpoint.resume=must")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert errors.startswith("error: checkpoint.resume=must") and errors.count("\n") == 1


def resume_and_compare(config: str, directory: Path, long_run: Path) -> int:
    """Resume to the end; the losses are those of an uninterrupted run. Return the resumed step."""
    again = start(config, "checkpoint.resume=must", "checkpoint.every=1000")
    _, errors = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, errors
    assert losses(directory) == losses(long_run / "run")
    return int(re.search(r"resumed from step (\d+)", (directory / "log.txt").read_text())[1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, release(signal.SIGINT)], ids=lambda n: n.name)
def test_a_run_stopped_by_a_signal_resumes_bit_equal(long_run, tmp_path, number):
    config, directory = write_config(tmp_path, cache=str(long_run / "xla")), tmp_path / "run"
    process, log = start(config, "checkpoint.every=100000"), directory / "log.txt"
    wait_for(process, lambda: log.exists() and re.search(r"step +40/", log.read_text()))
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == EXIT_STOPPED == 75, errors
    last = max(losses(directory))
    assert 40 <= last < STEPS
    assert f"stopped by {number.name} after step {last}; run again to resume" in log.read_text()
    assert resume_and_compare(config, directory, long_run) == last


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_last_checkpoint(long_run, tmp_path):
    config, directory = write_config(tmp_path, cache=str(long_run / "xla")), tmp_path / "run"
    process = start(config, "checkpoint.every=30")
    wait_for(process, (directory / "checkpoints" / "60").exists)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    last = max(losses(directory))
    assert 60 <= last < STEPS
    assert 60 <= resume_and_compare(config, directory, long_run) <= last
