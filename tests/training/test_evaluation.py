"""Runs with validation files: evaluated, never trained on, resumed bit for bit; and samples."""

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import losses, read_lines, refusal, run, write_config

from training.config import TrainingConfig
from training.evaluation import Sampling
from training.logs import logging_to

pytestmark = pytest.mark.usefixtures("signals")


@pytest.fixture
def validated(tmp_path) -> list[str]:
    """Configuration and overrides of a run with a validation file."""
    config = write_config(tmp_path)
    folder = tmp_path / "held"
    folder.mkdir()
    (folder / "held.txt").write_text("".join(f"class C{n}: pass\n" for n in range(60)))
    return [config, f"data.eval_files={folder}/*.txt", "data.eval_fraction=0"]


def eval_lines(folder: Path) -> list[dict]:
    """The metrics of every evaluation of a run."""
    return [
        {name: value for name, value in line.items() if name.startswith("eval")}
        for line in read_lines(folder / "metrics.jsonl")
        if "eval_loss" in line
    ]


def test_a_run_evaluates_its_validation_file_and_resumes_bit_equal(validated, tmp_path, capsys):
    whole = f"run.dir={tmp_path}/whole"
    assert run(*validated, whole, "training.early_stop.patience=9") == 0
    assert "; eval_files: 1 document, 9" in capsys.readouterr().out
    (first, *_) = found = eval_lines(tmp_path / "whole")
    assert len(found) == 2 and first["eval/text/loss"] == first["eval_loss"]
    # A byte has one target, so the rates differ by the unit alone.
    assert {*first} > {f"eval_activation/{kind}" for kind in ("attention", "mlp", "residual")}
    assert first["eval_bits_per_byte"] == pytest.approx(first["eval_loss"] / math.log(2))
    assert run(*validated, "training.steps=3") == 0
    assert run(*validated) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert eval_lines(tmp_path / "run")[-1] == found[-1]


def test_losses_of_sources_are_in_nats_and_follow_the_loss_of_all(tmp_path, capsys) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text("".join(f"class {name}{n}: pass\n" for n in range(60)))
    sources = [f"data.sources.{name}.files={folder}/{name}.txt" for name in "ab"]
    config = write_config(tmp_path)
    assert run(config, "data.files=null", *sources, "data.eval_fraction=0.5") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "eval loss" in line)
    found = eval_lines(tmp_path / "run")[0]
    a, b = (f"{found[f'eval/{name}/loss']:.4f}" for name in "ab")
    total, bits = found["eval_loss"], found["eval_bits_per_byte"]
    assert line.endswith(f"eval loss {total:.4f} nats (a {a}, b {b}), {bits:.3f} bits per byte")


@pytest.mark.parametrize(
    ("answer", "shown"),
    [("", "sample (the model ended it at once):\ndef \n"), ("\x1bf", "sample:\ndef \ufffdf\n")],
)
def test_a_sample_says_that_it_is_empty_and_controls_no_terminal(
    answer, shown, tmp_path, capsys
) -> None:
    written = []
    sampling = Sampling(
        generate=lambda _, prompt, tokens: prompt + answer,
        config=TrainingConfig(steps=4, sample_prompt="def "),
        writers=SimpleNamespace(write_text=lambda *text: written.append(text)),
        goodput=SimpleNamespace(spend=lambda *_, **__: contextlib.nullcontext()),
        clock=SimpleNamespace(restart=lambda: None),
    )
    with logging_to(tmp_path / "log.txt", None):
        sampling.run(4, SimpleNamespace(params=None))
    assert capsys.readouterr().out == shown and written == [(4, "sample", f"def {answer}")]


def test_another_validation_text_is_refused_on_resume_like_other_data(validated, tmp_path, capsys):
    assert run(*validated, "training.steps=2") == 0
    path = tmp_path / "held" / "held.txt"
    path.write_text(path.read_text() + "more")
    message = "checkpoint 2 was trained on other data: the text of eval_files of source 'text' has"
    assert message in refusal(capsys, *validated)
