"""Trackers: curves equal metrics.jsonl, a resume continues their run, a lost server loses nothing.

Stand-ins for the packages show what is sent. Slow tests at the end use the packages, if they are
installed: an offline run of wandb, and a server of MLflow.
"""

import dataclasses
import importlib.util
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from runs import read_lines, refusal, write_config

from training.spikes import TrainingError
from training.writers import mlflow as mlflow_writer
from training.writers.mlflow import MLflowWriter
from training.writers.registry import WriterContext, begun, check_writers
from training.writers.tracker import store_id, stored_id
from training.writers.wandb import WandbWriter

CONFIG = "training:\n  steps: 4\nmesh: {tp: 2}\n"


def context(directory: Path) -> WriterContext:
    return WriterContext(
        directory, 4, resolved_config=CONFIG, command="python train.py", project="mine"
    )


class FakeWandb:
    """The calls of the package wandb, recorded."""

    class Error(Exception):
        pass

    def __init__(self):
        self.started, self.logged, self.finished = [], [], 0
        self.refuses = False

    def init(self, **settings):
        if self.refuses:
            raise self.Error("No API key configured.\nmore")
        self.started.append(settings)
        return SimpleNamespace(
            id=settings["id"] or f"id{len(self.started)}", log=self.log, finish=self.finish
        )

    def log(self, values, step):
        assert not self.logged or step >= self.logged[-1][0], "wandb would drop it"
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1

    def Settings(self, **settings):
        return settings

    def Html(self, text, inject):
        return text

    def Image(self, image_HWC):
        return image_HWC.shape


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


class FakeMLflow:
    """The calls of the package mlflow, recorded; it can lose its server."""

    class MlflowException(Exception):
        def __init__(self, message: str, status: int = 500):
            super().__init__(message)
            self.get_http_status_code = lambda: status

    def __init__(self):
        self.metrics, self.params, self.files, self.status = {}, {}, {}, {}
        self.batches, self.is_lost = [], False
        self.entities = SimpleNamespace(
            Metric=lambda key, value, timestamp, step: (key, value, step),
            Param=lambda key, value: (key, value),
        )

    def MlflowClient(self):
        return self

    def get_tracking_uri(self):
        return "http://nowhere"

    def get_experiment_by_name(self, name):
        assert name == "mine"
        return None

    def create_experiment(self, name):
        return "7"

    def create_run(self, experiment, run_name):
        self.check()
        assert (experiment, run_name) == ("7", "run")
        number = f"run{len(self.status)}"
        self.status[number] = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id=number))

    def check(self):
        if self.is_lost:
            raise self.MlflowException("connection refused\nmore")

    def update_run(self, number, status):
        self.check()
        assert number in self.status
        self.status[number] = status

    set_terminated = update_run

    def set_tag(self, number, key, value):
        self.params[key] = value

    def log_text(self, number, text, path):
        self.check()
        self.files[path] = text

    def log_image(self, number, image_HWC, path):
        self.files[path] = image_HWC.shape

    def log_batch(self, number, metrics=(), params=()):
        self.check()
        assert len(metrics) <= 1000 and len(params) <= 100
        self.batches.append(len(metrics))
        self.params |= dict(params)
        for key, value, step in metrics:
            self.metrics.setdefault((number, key), {})[step] = value


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def train(writer, resumed: int, last: int, *, is_finished: bool = False) -> None:
    with begun(writer, resumed):
        for step in range(resumed + 1, last + 1):
            writer.write(step, {"loss": 1 / step, "eval_loss": 2.0})
            writer.write_text(step, "sample", "a <b>")
            writer.write_image(step, "moe/load", np.zeros((2, 3, 3), np.uint8))
        if is_finished:
            writer.finish()


def test_wandb_gets_every_step_and_a_resume_continues_its_run(directory, wandb):
    train(WandbWriter(context(directory)), 0, 2)
    writer = WandbWriter(context(directory))
    with begun(writer, 2):
        writer.amend(2, {"eval_loss": 3.0})  # wandb closed step 2 with the first process
        writer.write(3, {"loss": 0.5})
    first, second = wandb.started
    assert (first["id"], first["resume"], first["project"]) == (None, None, "mine")
    assert (second["id"], second["resume"]) == ("id1", "allow")
    assert first["config"] == {
        "training": {"steps": 4}, "mesh": {"tp": 2}, "command": "python train.py",
    }  # fmt: skip
    assert wandb.logged[0] == (1, {"train/loss": 1.0, "eval/loss": 2.0})
    assert wandb.logged[1:3] == [
        (1, {"sample": "<pre>a &lt;b&gt;</pre>"}),
        (1, {"moe/load": (2, 3, 3)}),
    ]
    assert wandb.logged[-2:] == [(3, {"eval/loss": 3.0}), (3, {"train/loss": 0.5})]
    assert wandb.finished == 2


def test_training_from_step_1_starts_another_run_of_the_trackers(directory, wandb, mlflow):
    for writer in (WandbWriter, MLflowWriter):
        for _ in range(2):
            train(writer(context(directory)), 0, 1)
    assert [settings["id"] for settings in wandb.started] == [None, None]
    assert list(mlflow.status) == ["run0", "run1"]
    assert stored_id(directory, "wandb") == "id2" and stored_id(directory, "mlflow") == "run1"


def test_a_tracker_that_refuses_ends_the_run_with_one_line(directory, wandb, mlflow):
    wandb.refuses = mlflow.is_lost = True
    with pytest.raises(TrainingError, match=r"API key configured\.\); log in with `wandb login`"):
        WandbWriter(context(directory)).begin(0)
    with pytest.raises(TrainingError, match=r"http://nowhere \(connection refused\); check MLFLOW"):
        MLflowWriter(context(directory)).begin(0)


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["every step", "at the end"])
def test_mlflow_gets_every_step_and_a_resume_continues_its_run(
    directory, mlflow, monkeypatch, seconds
):
    monkeypatch.setattr(mlflow_writer, "SECONDS_PER_SEND", seconds)
    train(MLflowWriter(context(directory)), 0, 2)
    assert mlflow.status == {"run0": "KILLED"}
    train(MLflowWriter(context(directory)), 2, 4, is_finished=True)
    assert mlflow.status == {"run0": "FINISHED"}
    assert mlflow.metrics["run0", "train/loss"] == {step: 1 / step for step in range(1, 5)}
    assert mlflow.params["training.steps"] == "4" and mlflow.params["command"] == "python train.py"
    assert mlflow.files["config.yaml"] == CONFIG
    assert mlflow.files["sample/step_00000004.txt"] == "a <b>"
    assert mlflow.files["moe/load/step_00000001.png"] == (2, 3, 3)


def test_a_lost_mlflow_server_gets_everything_when_it_is_back(
    directory, mlflow, monkeypatch, caplog
):
    monkeypatch.setattr(mlflow_writer, "SECONDS_PER_SEND", 0.0)
    writer = MLflowWriter(context(directory))
    with begun(writer, 0):
        mlflow.is_lost = True
        for step in (1, 2, 3):
            writer.write(step, {"loss": float(step)})
            writer._wait()
        mlflow.is_lost = False
        writer.write(4, {"loss": 4.0})
    assert mlflow.metrics["run0", "train/loss"] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert [line for line in caplog.messages if "mlflow" in line] == [
        "mlflow: cannot send metrics: connection refused; they are kept in memory"
    ]


def test_a_lost_mlflow_server_does_not_end_the_run(directory, mlflow, caplog):
    writer = MLflowWriter(context(directory))
    with begun(writer, 0):
        writer.write(1, {"loss": 1.0})
        mlflow.is_lost = True
    assert "mlflow: the last 1 requests were not sent" in caplog.messages


def test_a_rollback_while_a_tracker_is_lost_does_not_end_the_run(
    directory, wandb, mlflow, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("torus"), "propagate", True)
    writers = MLflowWriter(context(directory)), WandbWriter(context(directory))
    for writer in writers:
        with begun(writer, 0):
            writer.write(1, {"loss": 1.0})
            wandb.refuses = mlflow.is_lost = True
        with begun(writer, 1):
            writer.write(2, {"loss": 2.0})
            mlflow.is_lost = False
        wandb.refuses = False
    assert mlflow.metrics["run0", "train/loss"] == {1: 1.0, 2: 2.0}
    assert "wandb cannot continue the run (No API key configured.); it gets no more" in caplog.text


def test_names_of_sources_are_allowed_as_parameters_of_mlflow(directory, mlflow):
    text = CONFIG + "data:\n  sources:\n    c++: {field: x}\n"
    writer = MLflowWriter(dataclasses.replace(context(directory), resolved_config=text))
    with begun(writer, 0):
        pass
    assert mlflow.params["data.sources.c__.field"] == "x"


class StoreError(Exception):
    """An error of a store of artifacts, which MLflow passes on."""


def test_a_store_of_artifacts_that_fails_does_not_end_the_run(directory, mlflow, monkeypatch):
    writer = MLflowWriter(context(directory))
    with begun(writer, 0):
        monkeypatch.setattr(mlflow, "check", lambda: (_ for _ in ()).throw(StoreError("no bucket")))
        writer.write_text(1, "sample", "a")
    with pytest.raises(TrainingError, match=r"\(no bucket\); check MLFLOW_TRACKING_URI, and that"):
        MLflowWriter(context(directory)).begin(0)


def test_an_end_that_mlflow_cannot_record_does_not_end_the_run(
    directory, mlflow, monkeypatch, caplog
):
    def refuse(number, status):
        raise mlflow.MlflowException("gone\nmore")

    monkeypatch.setattr(mlflow, "set_terminated", refuse)
    train(MLflowWriter(context(directory)), 0, 2)
    assert "mlflow: cannot record the end of the run: gone" in caplog.messages


@pytest.mark.parametrize(("status", "metrics"), [(400, {2: 2.0}), (401, {})])
def test_a_request_that_the_server_rejects_is_dropped_but_one_without_login_is_kept(
    directory, mlflow, monkeypatch, caplog, status, metrics
):
    def reject(number, text, path):
        raise mlflow.MlflowException("bad name\nmore", status)

    monkeypatch.setattr(mlflow_writer, "SECONDS_PER_SEND", 1e9)
    writer = MLflowWriter(context(directory))
    with begun(writer, 0):
        monkeypatch.setattr(mlflow, "log_text", reject)
        writer.write_text(1, "sample", "a")
        writer.write(2, {"loss": 2.0})
    assert mlflow.metrics.get(("run0", "train/loss"), {}) == metrics
    rejected = "mlflow: the server rejected a request: bad name"
    assert (rejected in caplog.messages) is (status == 400)


def test_requests_to_mlflow_keep_to_its_limits(directory, mlflow):
    with begun(writer := MLflowWriter(context(directory)), 0):
        for step in (1, 2, 3):
            writer.write(step, {f"data/a+b{n}/tokens": 0.0 for n in range(900)})
    assert sum(mlflow.batches) == 2700 and max(mlflow.batches) == 1000
    assert ("run0", "data/a_b0/tokens") in mlflow.metrics


def test_ids_of_several_trackers_are_kept(tmp_path):
    assert stored_id(tmp_path, "wandb") is None
    store_id(tmp_path, "wandb", "a")
    store_id(tmp_path, "mlflow", "b")
    assert (stored_id(tmp_path, "wandb"), stored_id(tmp_path, "mlflow")) == ("a", "b")
    assert stored_id(tmp_path, "other") is None


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line_before_anything_is_read(
    tmp_path, capsys, monkeypatch, signals, name
):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda x: None if x == name else found(x))
    error = refusal(capsys, write_config(tmp_path), f"training.writers=[jsonl,{name}]")
    assert error == (
        f"error: training.writers has {name}, but the package {name} is not installed; "
        f'pip install -e ".[{name}]"\n'
    )
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_a_folder_of_the_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="the package wandb is not installed"):
        check_writers(["wandb"])


def is_missing(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is None or spec.origin is None


def train_twice(folder: Path, writer: str, **environment: str) -> dict[int, float]:
    """Train three of six steps, then all, in processes of their own; return the losses."""
    config = write_config(folder)
    for steps in (3, 6):
        command = [sys.executable, str(ROOT / "train.py"), "--config", config, "mesh.dp=1"]
        command += ["mesh.tp=1", f"training.steps={steps}", f"training.writers=[jsonl,{writer}]"]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    return {line["step"]: line["loss"] for line in read_lines(folder / "run" / "metrics.jsonl")}


def wandb_records(path: Path):
    """Yield the records of an offline file: LevelDB's log format, after a header of 7 bytes."""
    content, position, whole = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


READ_WANDB = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
found = {"runs": [], "loss": {}}
for text in sys.stdin.read().split():
    record = Record.FromString(bytes.fromhex(text))
    if record.WhichOneof("record_type") == "run":
        found["runs"].append([record.run.run_id, record.run.project, record.run.display_name])
    for item in record.history.item:
        if item.key == "train/loss" or list(item.nested_key) == ["train/loss"]:
            found["loss"][record.history.step.num] = json.loads(item.value_json)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(is_missing("wandb"), reason="needs wandb")
def test_the_offline_files_of_wandb_hold_the_curves(tmp_path):
    losses = train_twice(tmp_path, "wandb", WANDB_MODE="offline")
    paths = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    given = "\n".join(record.hex() for path in paths for record in wandb_records(path))
    command = [sys.executable, "-c", READ_WANDB]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    identifier = stored_id(tmp_path / "run", "wandb")
    assert found["runs"] == [[identifier, "torus", "run"]] * 2
    assert {int(step): loss for step, loss in found["loss"].items()} == losses
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.skipif(is_missing("mlflow"), reason="needs mlflow")
def test_a_server_of_mlflow_returns_the_curves(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, store = f"http://127.0.0.1:{port}", f"sqlite:///{tmp_path / 'store.db'}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
    command += ["--port", str(port), "--backend-store-uri", store]
    command += ["--artifacts-destination", str(tmp_path / "artifacts")]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None, "the server ended"
                time.sleep(1)
        losses = train_twice(tmp_path, "mlflow", MLFLOW_TRACKING_URI=address)
        identifier = stored_id(tmp_path / "run", "mlflow")
        url = f"{address}/api/2.0/mlflow/metrics/get-history"
        query = f"{url}?run_id={identifier}&metric_key=train/loss"
        with urllib.request.urlopen(query, timeout=60) as answer:
            history = json.load(answer)["metrics"]
        assert {int(entry["step"]): entry["value"] for entry in history} == losses
        run = f"{address}/api/2.0/mlflow/runs/get?run_id={identifier}"
        with urllib.request.urlopen(run, timeout=60) as answer:
            assert json.load(answer)["run"]["info"]["status"] == "FINISHED"
    finally:
        os.killpg(server.pid, 15)
        server.wait(60)
