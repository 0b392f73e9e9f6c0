"""The benchmark against PyTorch compares the same computation."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import json
import subprocess
import sys

from conftest import ROOT


def test_both_steps_start_with_the_same_loss() -> None:
    command = [sys.executable, "scripts/bench.py", "torch", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["first_loss"]["ours"] == pytest.approx(result["first_loss"]["torch"], rel=1e-5)
    assert result["ratio"] > 0
