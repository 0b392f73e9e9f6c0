"""A Ray cluster of two nodes prepares the bytes of one process, whatever dies meanwhile."""

import gzip
import importlib.util
import json
import os
import platform
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import ray_engine as module
from data.config import DataConfig, SourceConfig
from data.engine import Engine, run_tasks
from data.files import DataError
from data.filters import parse_filters
from data.formats.pieces import plan_pieces
from data.packed_store import PackSettings
from data.prepare import build
from data.ray_engine import ray_engine
from data.shard_plan import Sharding
from data.shard_writer import prepare_shards
from data.store_job import StoreJob
from data.tokenization import TokenizeSettings
from data.tokenizers import training
from data.tokenizers.byte_level import ByteTokenizer
from data.tokenizers.training import ensure_tokenizer

ROWS = PackSettings(16, "split", 0.0)
# No import from conftest.py: the nodes import this file.
RELEASE = [pytest.param(seed, marks=pytest.mark.release) for seed in range(6, 50)]
HERE = Path(__file__).parent
needs_ray = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='pip install -e ".[ray]"'),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes of one CPU, on this machine."""
    from ray.cluster_utils import Cluster

    monkeypatch = pytest.MonkeyPatch()
    # The nodes import the tokenizers of this file.
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=1)
    yield found
    found.shutdown()
    monkeypatch.undo()


@pytest.fixture
def engine(cluster: Any) -> Iterator[Engine]:
    lines: list[str] = []
    with ray_engine(cluster.address, None, lines.append) as found:
        yield found


class SlowTokenizer(ByteTokenizer):
    """Takes a moment for every batch of texts."""

    def encode_batch(self, texts):
        time.sleep(0.3)
        return super().encode_batch(texts)


class DeadlyTokenizer(ByteTokenizer):
    """Kills its process, as long as the file of its name lacks that many lines."""

    def __init__(self, record: Path, times: int):
        self.record, self.times = record, times

    def encode_batch(self, texts):
        found = self.record.read_text() if self.record.exists() else ""
        if found.count("\n") < self.times:
            with self.record.open("a") as file:
                file.write("killed\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_batch(texts)


def write_corpus(folder: Path, seed: int) -> SourceConfig:
    """Write files of several formats with random documents."""
    folder.mkdir()
    choose = random.Random(seed)

    def text() -> str:
        words = ("one", "zwei", "három", "四", "\n", "x = 1;")
        return " ".join(choose.choices(words, k=choose.randint(1, 60)))

    for number in range(choose.randint(1, 4)):
        (folder / f"{number}.txt").write_text(text())
    lines = [json.dumps({"text": text()}) for _ in range(choose.randint(1, 80))]
    chat = [{"role": role, "content": text()} for role in ("user", "assistant")]
    lines += [json.dumps({"text": chat})] * choose.randint(0, 3)
    (folder / "lines.jsonl").write_text("\n".join(lines))
    with gzip.open(folder / "more.jsonl.gz", "wt") as out:
        out.write("\n".join(lines[: choose.randint(1, 20)]))
    return SourceConfig(files=str(folder / "*.*"))


def job_of(source: SourceConfig, tokenizer: ByteTokenizer | None = None) -> StoreJob:
    return StoreJob("text", source, tokenizer or ByteTokenizer(), "raise")


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def in_pieces_of(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for name in ("data.prepare.plan_pieces", "data.shard_plan.plan_pieces"):
        monkeypatch.setattr(name, lambda paths: plan_pieces(paths, size))


class TestOnRay:
    pytestmark = needs_ray

    @pytest.mark.parametrize("seed", [*range(6), *RELEASE])
    def test_the_bytes_are_those_of_this_machine(self, engine, tmp_path, monkeypatch, seed) -> None:
        """Of one process, or of one or two workers; of a store, and of one in shards."""
        in_pieces_of(monkeypatch, random.Random(seed).choice([40, 300, 5000]))
        job = job_of(write_corpus(tmp_path / "input", seed))
        if seed % 2:
            job = replace(job, filters=parse_filters(["length:9..", "regex:四 四", "duplicates"]))
        here, found = partial(run_tasks, workers=seed % 3), {}
        for name, used in (("there", engine), ("here", here)):
            store = build(job, tmp_path / name, engine=used)
            sharding, rows = Sharding(random.Random(seed).choice([200, 2000])), ROWS
            folder = tmp_path / f"{name}-shards"
            prepare_shards(job, folder, sharding, [rows], cache=tmp_path / name, engine=used)
            found[name] = content(store.folder), content(folder)
        assert found["there"] == found["here"] and len(found["here"][1]) > 8

    def test_the_tokenizer_is_that_of_this_machine(self, engine, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(training, "plan_pieces", lambda paths: plan_pieces(paths, 300))
        monkeypatch.setattr(training, "SAMPLE_PIECES", 5)
        source = write_corpus(tmp_path / "input", 7)
        found = {}
        for name, used in (("there", engine), ("here", partial(run_tasks, workers=2))):
            path = tmp_path / f"{name}.json"
            data = DataConfig(files=source.files, tokenizer=str(path))
            ensure_tokenizer(data, 300, print, engine=used)
            found[name] = path.read_bytes()
        assert found["there"] == found["here"]
        (broken := tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
        data = DataConfig(files=str(broken), tokenizer=str(tmp_path / "none.json"))
        with pytest.raises(DataError, match=r"a\.jsonl:2: invalid JSON"):
            ensure_tokenizer(data, 300, print, engine=engine)

    def test_a_killed_worker_is_replaced(self, engine, tmp_path, monkeypatch) -> None:
        in_pieces_of(monkeypatch, 100)
        source = write_corpus(tmp_path / "input", 7)
        here = build(job_of(source), tmp_path / "here")
        tokenizer = DeadlyTokenizer(tmp_path / "kills", 3)
        there = build(job_of(source, tokenizer), tmp_path / "there", engine=engine)
        assert (tmp_path / "kills").read_text().count("\n") >= 3
        np.testing.assert_array_equal(there.tokens[:], here.tokens[:])
        np.testing.assert_array_equal(there.ends[:], here.ends[:])

    def test_a_task_that_always_dies_ends_with_a_line(self, engine, tmp_path) -> None:
        source = write_corpus(tmp_path / "input", 1)
        tokenizer = DeadlyTokenizer(tmp_path / "kills", 10**6)
        with pytest.raises(
            RuntimeError, match="Ray: a task died 5 times, perhaps for lack of memory"
        ):
            build(job_of(source, tokenizer), tmp_path / "there", engine=engine)

    def test_a_lost_node_does_not_change_the_bytes(
        self, cluster, engine, tmp_path, monkeypatch
    ) -> None:
        in_pieces_of(monkeypatch, 300)
        source = write_corpus(tmp_path / "input", 3)
        here = build(job_of(source), tmp_path / "here")
        node = cluster.add_node(num_cpus=2)
        calls: list[int] = []

        def report(done: int, total: int, tokens: int) -> None:
            calls.append(done)
            if len(calls) == 4:
                cluster.remove_node(node, allow_graceful=False)

        job = job_of(source, SlowTokenizer())
        there = build(job, tmp_path / "there", engine=engine, report=report)
        assert len(calls) > 8
        np.testing.assert_array_equal(there.tokens[:], here.tokens[:])

    def test_an_unreadable_document_is_the_error_of_one_process(self, engine, tmp_path) -> None:
        source = write_corpus(tmp_path / "input", 2)
        (tmp_path / "input" / "z.jsonl").write_text('{"text": "a"}\n{"text": \n')
        messages = []
        for name, options in (("here", {}), ("there", {"engine": engine})):
            with pytest.raises(DataError, match=r"z\.jsonl:2: invalid JSON") as raised:
                build(job_of(source), tmp_path / name, **options)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]

    def test_a_node_with_other_code_is_refused_by_name(self, engine, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(module, "code_hash", lambda settings: "another")
        with pytest.raises(DataError, match=f"node {platform.node()} has another version of Torus"):
            job = job_of(write_corpus(tmp_path / "input", 2))
            build(job, tmp_path / "there", engine=engine)

    def test_a_file_that_a_node_lacks_is_named(self, engine, tmp_path) -> None:
        job = job_of(write_corpus(tmp_path / "input", 2))
        pieces = plan_pieces(job.paths)
        (tmp_path / "input" / "lines.jsonl").rename(tmp_path / "elsewhere")
        settings = TokenizeSettings(
            "text", "text", ByteTokenizer(), job.chat_template.template, "raise", np.dtype("<u2")
        )
        message = rf"node {platform.node()} has no file .*lines\.jsonl; all nodes need the input"
        with pytest.raises(DataError, match=message):
            list(engine(pieces, settings))

    def test_workers_are_those_of_the_cluster(self, cluster) -> None:
        with (
            pytest.raises(
                DataError, match=f"--workers 2 has no effect on the cluster at {cluster.address}"
            ),
            ray_engine(cluster.address, 2, print),
        ):
            pass

    def test_no_cluster_at_an_address_is_one_line(self, monkeypatch) -> None:
        monkeypatch.setattr(module, "_SECONDS_TO_CONNECT", 2.0)
        with (
            pytest.raises(DataError, match=r"no connection to .* 127.0.0.1:1 \(.*refused\); `ray"),
            ray_engine("127.0.0.1:1", None, print),
        ):
            pass
