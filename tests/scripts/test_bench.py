"""The benchmarks of this machine run, and their last line has the figures."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ratios"),
    [
        (["step"], lambda result: [result["ratio"]]),
        (["moe-step"], lambda result: [result["ratio"]]),
        (["attention", "--lengths", "128"], lambda result: [result["rows"][0]["ratio"]]),
        (
            ["decode", "--batches", "1", "--prompt", "8", "--new", "8"],
            lambda result: [*result["batches"]["1"]["ratio_to_plain"].values()],
        ),
    ],
    ids=["step", "moe-step", "attention", "decode"],
)
def test_a_benchmark_measures_ratios(arguments, ratios) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bench.py", *arguments, "--repeats", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == arguments[0]
    assert ratios(result) and all(ratio > 0 for ratio in ratios(result))
