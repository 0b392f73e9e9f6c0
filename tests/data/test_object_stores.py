"""Input files in buckets of Google Cloud Storage and S3 are read as those of a disk are."""

import gzip
import json
import os
import random
from pathlib import Path

import fsspec
import pytest
from buckets import STORES

from data import prepare as preparation
from data.config import SourceConfig
from data.files import DataError, find_files
from data.formats.pieces import known_suffixes, plan_pieces
from data.prepare import build
from data.store_job import StoreJob
from data.tokenizers.byte_level import ByteTokenizer


def corpus(seed: int) -> dict[str, bytes]:
    """Return files of several formats with random documents, by name."""
    choose = random.Random(seed)

    def text() -> str:
        words = ("one", "zwei", "három", "四", "\n", "x = 1;")
        return " ".join(choose.choices(words, k=choose.randint(1, 60)))

    lines = [json.dumps({"text": text()}) for _ in range(60)]
    return {
        "a.txt": text().encode(),
        "deep/b.jsonl": "\n".join(lines).encode(),
        "deep/c.jsonl.gz": gzip.compress("\n".join(lines[:9]).encode()),
        "ä b.txt": text().encode(),
        ".hidden.txt": b"not read",
    }


def job_of(files: str) -> StoreJob:
    return StoreJob("text", SourceConfig(files=files), ByteTokenizer(), "raise")


@pytest.mark.parametrize("place", STORES, indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_are_those_of_a_disk(place, tmp_path, monkeypatch, seed) -> None:
    monkeypatch.setattr(preparation, "plan_pieces", lambda paths: plan_pieces(paths, 700))
    for name, data in corpus(seed).items():
        place.write(name, data)
        (tmp_path / "disk" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "disk" / name).write_bytes(data)
    there, here = job_of(place.url), job_of(str(tmp_path / "disk"))
    names = [path.removeprefix(f"{place.url}/") for path in there.paths]
    assert names == [str(Path(path).relative_to(tmp_path / "disk")) for path in here.paths]
    stores = [build(job, tmp_path / str(n)) for n, job in enumerate((there, here))]
    assert stores[0].digest == stores[1].digest
    found = find_files(f"{place.url}/**/*.jsonl*", suffixes=known_suffixes())
    assert found == [f"{place.url}/deep/b.jsonl", f"{place.url}/deep/c.jsonl.gz"]


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_another_object_of_the_same_name_and_size_is_another_store(place) -> None:
    place.write("a.txt", b"one two")
    before = job_of(f"{place.url}/*.txt").key
    assert job_of(f"{place.url}/*.txt").key == before
    place.write("a.txt", b"two one")
    fsspec.get_filesystem_class(place.url[:2]).clear_instance_cache()  # as in another process
    assert job_of(f"{place.url}/*.txt").key != before


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_a_glob_without_objects_or_a_missing_bucket_is_one_line(place) -> None:
    place.write("a.txt", b"one")
    with pytest.raises(DataError, match=r"/nothing\*.* matches no file; give a glob"):
        find_files(f"{place.url}/nothing*")
    scheme = place.url[:2]
    with pytest.raises((DataError, OSError)) as error:
        find_files(f"{scheme}://no-such-bucket-anywhere/*.txt")
    assert "no-such-bucket-anywhere" in str(error.value)


@pytest.mark.parametrize("place", [STORES[0]], indirect=True)
def test_a_busy_service_is_asked_again_and_a_refusal_is_one_line(
    place, google_bucket, tmp_path
) -> None:
    place.write("a.txt", b"one two three")
    asked: dict[str, int] = {}

    def busy(method: str, path: str) -> int | None:
        asked[path] = asked.get(path, 0) + 1
        return None if asked[path] > 1 else 429 if len(asked) % 2 else 503

    google_bucket.fault = busy
    store = build(job_of(f"{place.url}/*.txt"), tmp_path / "store")
    assert store.info.num_documents == 1 and max(asked.values()) > 1
    google_bucket.fault = lambda method, path: 401
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    with pytest.raises(DataError, match=r"data\.files='gs://bucket/texts/\*\.txt'.*on demand, 401"):
        find_files(f"{place.url}/*.txt")


@pytest.mark.parametrize("place", [STORES[0]], indirect=True)
def test_an_object_that_changes_while_it_is_read_is_noticed(place, tmp_path) -> None:
    place.write("a.txt", b"one two three")
    job = job_of(f"{place.url}/*.txt")
    assert job.key

    def engine(pieces, settings):
        place.write("a.txt", b"other")
        yield from preparation.run_tasks(pieces, settings)

    with pytest.raises(DataError, match="files changed while they were read; run again"):
        build(job, tmp_path / "store", engine=engine)
    assert not os.path.exists(tmp_path / "store")
