"""Runs in a bucket, with an emulator: train, kill, resume, damage, and what reads them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from buckets import AnyBucket
from conftest import ROOT
from runs import losses, write_config

SECONDS = 300


@pytest.fixture
def config(tmp_path, bucket) -> str:
    return write_config(tmp_path, str(tmp_path / "xla"))


def start(*arguments: str, script: str = "train.py") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / script, *arguments], cwd=ROOT, text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=SECONDS)
    return process.returncode, out


@pytest.fixture
def run(bucket: AnyBucket) -> str:
    return f"{bucket.url}/some/run"


def train(config: str, run: str, *overrides: str) -> tuple[int, str]:
    return finish(start("--config", config, f"run.dir={run}", *overrides))


def metrics(bucket: AnyBucket) -> dict[int, float]:
    lines = bucket.read("some/run/metrics.jsonl").decode().splitlines()
    found = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def steps(bucket: AnyBucket) -> list[int]:
    names = (name.split("/") for name in bucket.names("some/run/checkpoints/"))
    done = [parts[3] for parts in names if len(parts) == 5 and parts[4] == "commit_success.txt"]
    return sorted(int(step) for step in done if step.isdecimal())


def test_a_run_is_that_on_a_disk_and_its_files_are_in_the_bucket(
    tmp_path, config, run, bucket: AnyBucket, undisturbed
) -> None:
    code, out = train(config, run)
    assert code == 0, out
    assert metrics(bucket) == losses(undisturbed / "run")
    names = {name.removeprefix("some/run/") for name in bucket.names("some/run/")}
    assert {"config.yaml", "log.txt", "metrics.jsonl", "run.json", "goodput.json"} <= names
    assert steps(bucket) == [2, 4, 6]
    # Another machine continues, and reads.
    shutil.rmtree(tmp_path / "home")
    code, out = train(config, run, "training.steps=8")
    assert code == 0 and "resumed from step 6" in out, out
    assert sorted(metrics(bucket)) == [*range(1, 9)]
    shutil.rmtree(tmp_path / "home")
    options = ("--prompt", "def", "--max-new-tokens", "4")
    code, out = finish(start("--run", run, *options, script="scripts/generate.py"))
    assert code == 0 and "def" in out, out
    page = tmp_path / "report.html"
    code, out = finish(start(run, "--output", str(page), script="scripts/report.py"))
    assert code == 0 and page.stat().st_size > 10_000, out
    code, out = finish(start("list", run, script="scripts/checkpoint.py"))
    assert code == 0 and out.count("whole") == 3, out
    code, out = finish(start("verify", run, script="scripts/checkpoint.py"))
    assert code == 0 and "3 whole" in out, out
    code, out = finish(start("prune", run, "--keep", "1", script="scripts/checkpoint.py"))
    assert code == 0 and steps(bucket) == [8], out
    code, out = finish(start("to-hf", run, str(tmp_path / "hf"), script="scripts/convert.py"))
    assert code == 0 and (tmp_path / "hf" / "model.safetensors").exists(), out
    code, out = finish(
        start("--config", config, f"run.dir={tmp_path}/second", f"training.init_from={run}")
    )
    assert code == 0 and f"from checkpoint 8 of {run}" in out, out


def test_a_killed_run_resumes_on_another_mesh_and_a_damaged_checkpoint_is_set_aside(
    tmp_path, config, run, bucket: AnyBucket, undisturbed
) -> None:
    process = start("--config", config, f"run.dir={run}", "training.steps=400")
    end = time.monotonic() + SECONDS
    while not steps(bucket):
        assert process.poll() is None and time.monotonic() < end, finish(process)
        time.sleep(0.05)
    process.kill()
    finish(process)
    done = steps(bucket)
    options = ("training.steps=60", "mesh.dp=4", "mesh.tp=1", "checkpoint.every=50")
    code, out = train(config, run, *options)
    assert code == 0, out
    assert any(f"resumed from step {step}" in out for step in [*done, done[-1] + 2]), out
    assert sorted(metrics(bucket)) == [*range(1, 61)]
    kept = steps(bucket)
    name = next(
        name
        for name in bucket.names(f"some/run/checkpoints/{kept[-1]}/state/")
        if "/d/" in name and len(bucket.read(name)) > 3000
    )
    content = bytearray(bucket.read(name))
    content[len(content) // 2] ^= 1
    bucket.write(name, bytes(content))
    code, out = train(config, run, "training.steps=61", "checkpoint.every=50")
    assert code == 0 and f"checkpoint {kept[-1]} cannot be read" in out, out
    assert "Traceback" not in out and "Event loop" not in out, out
    assert f"renamed to {kept[-1]}.damaged; resuming from {kept[-2]}" in out
    names = bucket.names("some/run/checkpoints/")
    assert any(f"/{kept[-1]}.damaged/" in name for name in names)


def test_only_one_process_trains_a_run_and_an_old_one_is_moved(
    tmp_path, config, run, bucket: AnyBucket
) -> None:
    process = start("--config", config, f"run.dir={run}", "training.steps=4000")
    end = time.monotonic() + SECONDS
    while not steps(bucket):
        assert process.poll() is None and time.monotonic() < end, finish(process)
        time.sleep(0.05)
    code, out = train(config, run)  # on this machine, which has a lock
    assert code == 2 and "is in use by process" in out, out
    environment = os.environ["XDG_CACHE_HOME"]
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "elsewhere")
    code, out = train(config, run)  # as from another one
    assert code == 2 and f"run.dir='{run}' is in use by process {process.pid} of" in out, out
    os.environ["XDG_CACHE_HOME"] = environment
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75
    code, out = train(config, run, "checkpoint.resume=never")
    assert code == 0 and f"moved to {run}.old-1" in out, out
    assert sorted(metrics(bucket)) == [*range(1, 7)]
    assert bucket.names("some/run.old-1/checkpoints/")
    assert bucket.read("some/run.old-1/log.txt")


def test_a_place_that_is_not_supported_is_one_line(config) -> None:
    code, out = finish(start("--config", config, "run.dir=az://bucket/run"))
    assert code == 2 and out.count("\n") == 1 and "gs://BUCKET/NAME or s3://BUCKET/NAME" in out
