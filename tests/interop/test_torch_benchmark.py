"""The benchmark against PyTorch compares the same computation."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import json
import subprocess
import sys

from conftest import ROOT


@pytest.mark.release
def test_both_optimizers_take_the_same_steps() -> None:
    command = [sys.executable, "scripts/bench.py", "torch", "--repeats", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = (
        json.loads(done.stdout.splitlines()[-1])["losses"][n] for n in ("ours", "torch")
    )
    assert len(ours) == 3 and ours[0] - ours[-1] > 0.1
    assert ours == pytest.approx(theirs, rel=1e-5)
