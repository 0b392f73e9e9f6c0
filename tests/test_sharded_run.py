"""Runs on sharded stores: on those that grow, and on those to which shards are added."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT
from runs import losses, run, write_config

from data.config import SourceConfig
from data.engine import run_tasks
from data.formats.pieces import plan_pieces
from data.packed_store import PackSettings
from data.shard_plan import Sharding
from data.shard_writer import prepare_shards
from data.sharded_store import ShardedStore
from data.store_job import StoreJob
from data.tokenizers.byte_level import ByteTokenizer
from training.batch_wait import BatchWait
from training.checkpoint_record import read_record

pytestmark = pytest.mark.usefixtures("signals")
PIECES = 12


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    for name in ("data.prepare.plan_pieces", "data.shard_plan.plan_pieces"):
        monkeypatch.setattr(name, partial(plan_pieces, piece_bytes=200))
    for name in ("training.batch_wait.LOOK_SECONDS", "data.sharded_store.LOOK_SECONDS"):
        monkeypatch.setattr(name, 0.05)


def write_texts(folder: Path, count: int, first: int = 0) -> SourceConfig:
    folder.mkdir()
    for n in range(first, first + count):
        lines = (f"def f{n}_{k}(): {k * n}\n" for k in range(20))
        (folder / f"{n:03}.txt").write_text("".join(lines))
    return SourceConfig(files=f"{folder}/*.txt")


def prepare(source: SourceConfig, folder: Path, **options) -> ShardedStore:
    sharding = Sharding(700, **{k: options.pop(k) for k in ("in_order", "append") if k in options})
    job = StoreJob("text", source, ByteTokenizer(), "raise")
    rows = PackSettings(32, "split", 0.05)
    return prepare_shards(job, folder, sharding, [rows], cache=folder.parent / "cache", **options)


class Growing:
    """A store that is prepared in a thread, one piece after the other on demand."""

    def __init__(self, source: SourceConfig, folder: Path, first: int):
        self.folder, self._gate = folder, threading.Semaphore(first)
        options = {"in_order": True, "engine": self._engine}
        self._thread = threading.Thread(target=prepare, args=(source, folder), kwargs=options)
        self._thread.start()

    def _engine(self, pieces, settings):
        for piece in run_tasks(pieces, settings):
            self._gate.acquire()
            yield piece

    def add(self, pieces: int) -> None:
        self._gate.release(pieces)

    def finish(self) -> None:
        self.add(1000)
        self._thread.join()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_a_store_that_grows_is_that_on_the_complete_one(
    tmp_path, monkeypatch, workers
) -> None:
    config, source = write_config(tmp_path), write_texts(tmp_path / "texts", PIECES)
    whole = prepare(source, tmp_path / "whole", in_order=True)
    options = ["training.steps=8", f"data.num_workers={workers}"]
    assert run(config, *options, f"data.files={whole.folder}", f"run.dir={tmp_path}/one") == 0
    store = Growing(source, tmp_path / "store", first=4)
    waits: list[int] = []
    is_over = BatchWait.is_over

    def look(wait: BatchWait, step: int) -> bool:
        waits.append(step)
        store.add(1)
        return is_over(wait, step)

    monkeypatch.setattr(BatchWait, "is_over", look)
    assert run(config, *options, f"data.files={store.folder}", f"run.dir={tmp_path}/two") == 0
    store.finish()
    assert losses(tmp_path / "two") == losses(tmp_path / "one") and len(waits) > 3
    log = (tmp_path / "two" / "log.txt").read_text()
    assert "waits for rows of data text, which are being prepared" in log
    assert "the others are being prepared" in log


def test_a_run_that_waits_can_be_stopped_and_resumed(tmp_path, monkeypatch, capsys) -> None:
    config, source = write_config(tmp_path), write_texts(tmp_path / "texts", PIECES)
    whole = prepare(source, tmp_path / "whole", in_order=True)
    assert run(config, f"data.files={whole.folder}", f"run.dir={tmp_path}/one") == 0
    store, files = Growing(source, tmp_path / "store", first=4), f"data.files={tmp_path}/store"
    is_over, looks = BatchWait.is_over, [0]

    def look(wait: BatchWait, step: int) -> bool:
        looks[0] += 1
        if looks[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return is_over(wait, step)

    monkeypatch.setattr(BatchWait, "is_over", look)
    assert run(config, files) == 75
    text = capsys.readouterr().out
    assert "stopped by SIGTERM after step" in text
    done = int(text.rpartition("after step ")[2].partition(";")[0])
    assert 0 < done < 6 and (tmp_path / "run" / "checkpoints" / str(done)).exists()
    store.finish()
    assert run(config, files) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "one")


def test_a_run_that_waits_in_vain_saves_and_says_what_to_do(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("training.batch_wait.WAIT_SECONDS", 0.2)
    config, source = write_config(tmp_path), write_texts(tmp_path / "texts", PIECES)
    store = Growing(source, tmp_path / "store", first=4)
    assert run(config, f"data.files={store.folder}", "training.eval_every=1") == 1
    error = capsys.readouterr().err
    assert "data text had no new shard in" in error and "run the command that prepares" in error
    step = int(error.partition("no rows for step ")[2].partition(":")[0])
    saved = read_record(tmp_path / "run" / "checkpoints" / str(step - 1), step - 1)
    assert saved["metrics"]["eval_loss"] > 0
    store.finish()
    assert run(config, f"data.files={store.folder}") == 0


@pytest.mark.slow
def test_two_processes_on_a_store_that_grows_train_as_on_the_complete_one(tmp_path) -> None:
    config, source = write_config(tmp_path), write_texts(tmp_path / "texts", PIECES)
    whole = prepare(source, tmp_path / "whole", in_order=True)

    def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
        options = ["--processes", "2", "--devices-per-process", "2", "--", "--config", config]
        changes = [f"data.files={folder}", f"run.dir={tmp_path}/{name}", "training.steps=8"]
        command = [sys.executable, "scripts/launch_local.py", *options, *changes]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"})

    assert start(whole.folder, "one").wait(300) == 0
    store = Growing(source, tmp_path / "store", first=4)
    process = start(store.folder, "two")
    log = tmp_path / "two" / "log.txt"
    while process.poll() is None:
        if log.exists() and "waits for rows of data text" in log.read_text():
            store.add(1)
        time.sleep(0.5)
    store.finish()
    assert process.wait() == 0
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert "waits for rows of data text" in log.read_text()


def test_shards_that_are_added_change_nothing_for_a_run_that_resumes(tmp_path, capsys) -> None:
    config, source = write_config(tmp_path), write_texts(tmp_path / "texts", PIECES)
    store = f"data.files={prepare(source, tmp_path / 'store').folder}"
    assert run(config, store, f"run.dir={tmp_path}/one") == 0
    assert run(config, store, "training.steps=3") == 0
    prepare(write_texts(tmp_path / "more", 5, first=50), tmp_path / "store", append=True)
    assert run(config, store) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "one")
    assert run(config, store, f"run.dir={tmp_path}/new") == 0
    assert losses(tmp_path / "new") != losses(tmp_path / "one")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count(f"{PIECES} documents") == 2 and f"{PIECES + 5} documents" not in log
