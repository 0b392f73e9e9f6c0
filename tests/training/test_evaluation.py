"""Runs with validation files: evaluated, never trained on, and resumed bit for bit."""

import math
from pathlib import Path

import pytest
from runs import losses, read_lines, refusal, run, write_config

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


def test_another_validation_text_is_refused_on_resume_like_other_data(validated, tmp_path, capsys):
    assert run(*validated, "training.steps=2") == 0
    path = tmp_path / "held" / "held.txt"
    path.write_text(path.read_text() + "more")
    message = "checkpoint 2 was trained on other data: the text of eval_files of source 'text' has"
    assert message in refusal(capsys, *validated)
