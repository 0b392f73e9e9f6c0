"""`scripts/checkpoint.py diff` names the first step at which two runs differ in a bit."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from runs import run, write_config

sys.path.insert(0, str(ROOT / "scripts"))
import checkpoint as script

from training.checkpoint_tools import compare_steps

ONE = 1.0
NEXT = float(np.nextafter(np.float32(1), np.float32(2)))


def folder_of(path: Path, *lines: dict[str, float]) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text)
    return path


def line(step: int, loss: float = ONE, grad_norm: float = ONE, **others: float) -> dict:
    return {"step": step, "loss": loss, "grad_norm": grad_norm, **others}


def fingerprinted(value: float) -> dict:
    return line(2, params_fingerprint=value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (line(2), (None, {})),
        (line(2, step_time=3.0), (None, {})),
        (line(2, NEXT), (2, {"loss": (ONE, NEXT)})),
        (line(2, grad_norm=NEXT), (2, {"grad_norm": (ONE, NEXT)})),
        (fingerprinted(2.0**48 - 1), (2, {"params_fingerprint": (2.0**48 - 2, 2.0**48 - 1)})),
        (line(2, math.nan, 0.0), (2, {"loss": (ONE, math.nan), "grad_norm": (ONE, 0.0)})),
        (line(4), (None, {})),
    ],
)
def test_the_first_difference_is_one_of_bits(tmp_path, changed, expected) -> None:
    before = [line(1), fingerprinted(2.0**48 - 2), line(3, NEXT)]
    a = folder_of(tmp_path / "a", *before)
    b = folder_of(tmp_path / "b", before[0], changed, before[2])
    found = compare_steps(a, b)
    assert repr((found.first, dict(found.differences))) == repr(expected)
    assert found.steps == ([1, 3] if changed["step"] == 4 else [1, 2, 3])


def test_nan_equals_nan_and_zero_is_not_minus_zero(tmp_path) -> None:
    a = folder_of(tmp_path / "a", line(1, math.nan), line(2, 0.0))
    b = folder_of(tmp_path / "b", line(1, math.nan), line(2, -0.0))
    assert compare_steps(a, b).first == 2


def test_diff_prints_the_first_step_that_differs_between_two_runs(
    undisturbed, signals, tmp_path, capsys
) -> None:
    """Another learning rate changes the parameters of step 1, and so the loss of step 2."""
    assert run(write_config(tmp_path), "optimizer.learning_rate=1.0001e-2") == 0
    capsys.readouterr()
    assert script.main(["diff", str(undisturbed / "run"), str(tmp_path / "run")]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    losses = [
        json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[1])["loss"]
        for folder in (undisturbed, tmp_path)
    ]
    assert first.startswith(f"steps: 2 is the first that differs: loss {losses[0]} -> {losses[1]}")
    assert first.endswith("; the 1 before it are bit-equal") and losses[0] != losses[1]
    assert " step 6 -> " in second


def test_diff_compares_the_steps_of_runs_without_checkpoints(tmp_path, capsys) -> None:
    a, b = (folder_of(tmp_path / name, line(1), line(2)) for name in "ab")
    assert script.main(["diff", str(a), str(b)]) == 2
    out, error = capsys.readouterr()
    assert out == "steps: all 2 that both have logged are bit-equal\n"
    assert error.startswith(f"error: {a} has no checkpoint")
