"""The benchmarks of this machine run, and their last line has the figures."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

# Arguments, the ratios in the result, and the stage.
BENCHMARKS = {
    "step": (["step"], lambda result: [result["ratio"]], "release"),
    "moe-step": (["moe-step"], lambda result: [result["ratio"]], "release"),
    "attention": (
        ["attention", "--lengths", "128"],
        lambda result: [result["rows"][0]["ratio"]],
        "slow",
    ),
    "decode": (
        ["decode", "--batches", "1", "--prompt", "8", "--new", "8"],
        lambda result: [*result["batches"]["1"]["ratio_to_plain"].values()],
        "slow",
    ),
    "data": (
        ["data", "--copies", "1", "--gigabytes", "0.001"],
        lambda result: [*result["tokenise_mb_per_second"].values()],
        "slow",
    ),
}


@pytest.mark.parametrize(
    ("arguments", "ratios"),
    [
        pytest.param(arguments, ratios, id=name, marks=getattr(pytest.mark, stage))
        for name, (arguments, ratios, stage) in BENCHMARKS.items()
    ],
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


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/bench.py", "gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_the_benchmark_of_gpus_needs_one() -> None:
    done = gpu()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: this needs a GPU, but jax found a cpu")


@pytest.mark.slow
def test_the_benchmark_of_gpus_measures_both_models() -> None:
    """On a CPU with tiny models: what is measured, not how fast it is."""
    done = gpu("--tiny", "--repeats", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tiny"] and result["matmul_peak"] > 0
    for name, grouped in (("dense", None), ("sparse", "blocked")):
        figures = result["models"][name]
        per_second = figures["model_flops"] / figures["seconds"]
        assert figures["mfu_of_measured_peak"] == pytest.approx(per_second / result["matmul_peak"])
        assert figures["tokens_per_second"] == pytest.approx(2 * 128 / figures["seconds"])
        assert list(figures["attention"]) == ["vanilla"] and figures["grouped_matmul"] == grouped
        assert figures["mfu_of_data_sheet_peak"] is None
