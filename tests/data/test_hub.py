"""Splits of the Hugging Face hub, from an imitation of it, are read as files are."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT
from hub import DATASET, Hub, serve_hub

from data.config import SourceConfig
from data.files import DataError
from data.formats.pieces import plan_pieces
from data.hub import HubSplit, parse_split
from data.packed_store import PackSettings
from data.shard_plan import Sharding
from data.shard_writer import prepare_shards
from data.sharded_store import ShardedStore
from data.store_job import StoreJob, find_paths
from data.tokenizers.byte_level import ByteTokenizer

README = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: validation
    path: data/val*
- config_name: small
  data_files:
  - split: train
    path: data/train-0*
---
"""


def lines(name: str, count: int) -> bytes:
    return b"\n".join(json.dumps({"text": f"{name} {n} " * 4}).encode() for n in range(count))


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    with serve_hub() as served:
        served.files = {
            "README.md": README,
            **{f"data/train-{n}.jsonl": lines(f"train {n}", 30) for n in range(3)},
            "data/validation.jsonl": lines("validation", 12),
        }
        yield served


def run(hub: Hub, tmp_path: Path, *arguments: str, script="prepare_data.py") -> str:
    """Return what a script prints, with its exit code; a new process, since clients keep caches."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub-cache")}
    ran = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, *arguments, f"data.cache_dir={tmp_path}/cache"],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    return f"{ran.returncode}\n{ran.stdout}{ran.stderr}"


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("a/b:train", HubSplit("a/b", "train")),
        ("hf://datasets/a/b:train", HubSplit("a/b", "train")),
        ("hf://datasets/a/b@v1.0:en:train", HubSplit("a/b", "train", "v1.0", "en")),
        ("a/b@refs:train", HubSplit("a/b", "train", "refs")),
        ("a/b", None),
        ("gs://bucket/a:b", None),
        ("hf://datasets/a/b/x.jsonl", None),
        ("C:/a/b", None),
        (None, None),
    ],
)
def test_a_split_is_told_from_files(text, split) -> None:
    assert parse_split(text) == split
    assert split is None or parse_split(str(split)) == split


def test_a_split_in_a_list_of_files_is_refused() -> None:
    with pytest.raises(DataError, match=r"a/b:train is a split of the hub and cannot be part of a"):
        find_paths(("a/b:train", "x.txt"), "data.files")


def test_a_file_of_that_name_is_a_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b:train").write_text("text")
    assert parse_split("a/b:train") is None


needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="needs datasets"
)


@needs_datasets
@pytest.mark.slow
def test_a_split_is_prepared_at_a_pinned_revision(hub, tmp_path) -> None:
    said = run(
        hub, tmp_path, f"data.files={DATASET}:train", f"data.eval_files={DATASET}:validation"
    )
    assert said.startswith("0\n") and "text: 90 documents" in said, said
    assert "text eval_files: 12 documents" in said
    assert "already tokenized" in run(hub, tmp_path, f"data.files={DATASET}:train")
    small = run(hub, tmp_path, f"data.files=hf://datasets/{DATASET}:small:train")
    assert "text: 30 documents" in small
    old = hub.commit
    hub.files["data/train-3.jsonl"] = lines("more", 10)
    assert "text: 100 documents" in run(hub, tmp_path, f"data.files={DATASET}:train")
    again = run(hub, tmp_path, f"data.files={DATASET}@{old}:train")
    assert "text: 90 documents" in again and "already tokenized" in again
    assert "text: 90 documents" in run(
        hub, tmp_path, f"data.files=hf://datasets/{DATASET}@{old}/data/train-*.jsonl"
    )


def test_shards_of_a_split_that_changed_are_continued_at_their_revision(
    tmp_path, monkeypatch
) -> None:
    for name in ("data.prepare.plan_pieces", "data.shard_plan.plan_pieces"):
        monkeypatch.setattr(name, partial(plan_pieces, piece_bytes=100))
    (tmp_path / "old").mkdir()
    for n in range(4):
        (tmp_path / "old" / f"{n}.jsonl").write_bytes(lines(f"text {n}", 5))
    (tmp_path / "old" / "3.jsonl").write_bytes(b'{"text": \n')
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    (tmp_path / "new" / "3.jsonl").write_bytes(lines("mended", 5))

    def files(split: HubSplit, key: str) -> tuple[list[str], HubSplit]:
        assert split.revision is not None
        return [str(path) for path in sorted((tmp_path / split.revision).iterdir())], split

    monkeypatch.setattr("data.store_job.find_split", files)

    def make(revision: str, on_error="raise") -> ShardedStore:
        source = SourceConfig(files=str(HubSplit("a/b", "train", revision)))
        job = StoreJob("text", source, ByteTokenizer(), on_error)
        rows = PackSettings(16, "split", 0.05)
        return prepare_shards(job, tmp_path / "store", Sharding(300), [rows], cache=tmp_path)

    with pytest.raises(DataError, match="invalid JSON"):
        make("old")
    with pytest.raises(DataError, match=r"set it to hf://datasets/a/b@old:train to go on with"):
        make("new")
    assert make("old", "skip").skipped["invalid JSON"].count == 1


@needs_datasets
@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "law"),
    [
        (f"{DATASET}:test", "the dataset has no such split; its splits: train, validation"),
        ("someone/nothing:train", "the hub has no such dataset or revision"),
        (f"{DATASET}@v9:train", "the hub has no such dataset or revision"),
        (f"{DATASET}:large:train", "BuilderConfig 'large' not found"),
    ],
)
def test_a_wrong_name_is_one_line(hub, tmp_path, files, law) -> None:
    said = run(hub, tmp_path, f"data.files={files}")
    assert said.startswith("2\nerror: data.files=") and law in said, said
    assert len(said.splitlines()) == 2


@needs_datasets
@pytest.mark.slow
def test_without_a_network_the_remedy_is_a_download(hub, tmp_path) -> None:
    hub.url = "http://127.0.0.1:9"
    said = run(hub, tmp_path, f"data.files={DATASET}:train")
    assert said.startswith("2\n") and said.splitlines()[-1].startswith("error: data.files="), said
    assert f"hf download --repo-type dataset {DATASET} --local-dir FOLDER" in said
