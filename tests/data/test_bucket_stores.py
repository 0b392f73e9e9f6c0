"""Stores in buckets are read and written as those on a disk are, through a cache of blocks."""

import os
import shutil
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
from buckets import STORES, Bucket
from test_sharded_stores import ROWS, batches, content, job_of, joined, write_texts

from data.block_cache import BLOCK_BYTES, BlockCache
from data.bucket_path import BucketPath, to_path
from data.config import DataConfig, SourceConfig
from data.files import DataError
from data.formats.pieces import plan_pieces
from data.pipeline import Dataset
from data.shard_plan import PartPlanner, Sharding
from data.shard_writer import prepare_shards
from data.sharded_store import ShardedStore


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr("data.bucket_path.PAUSE_SECONDS", 0.01)
    for name in ("data.prepare.plan_pieces", "data.shard_plan.plan_pieces"):
        monkeypatch.setattr(name, partial(plan_pieces, piece_bytes=50))


def make(job, folder, tmp_path: Path, size: int = 120, **options) -> ShardedStore:
    sharding = Sharding(size, in_order=options.pop("in_order", False))
    return prepare_shards(
        job, to_path(folder), sharding, [ROWS], cache=tmp_path / "work", **options
    )


def objects(url: str) -> dict[str, bytes]:
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    names = system.find(root)
    return {name.removeprefix(root).lstrip("/"): system.cat_file(name) for name in names}


def dataset(files, tmp_path: Path, **changes) -> Dataset:
    return Dataset(
        DataConfig(
            files=str(files), sequence_length=16, global_batch_size=2, eval_fraction=0.05,
            cache_dir=str(tmp_path / "run-cache"), **changes,
        )
    )  # fmt: skip


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_objects_are_the_files_of_a_store_on_a_disk_and_are_read_alike(place, tmp_path) -> None:
    job = job_of(write_texts(tmp_path / "input"))
    here = make(job, tmp_path / "store", tmp_path)
    there = make(job, f"{place.url}/store", tmp_path)
    assert objects(f"{place.url}/store") == content(here.folder)
    assert not any(path.is_file() for path in (tmp_path / "work" / "building").rglob("*.bin"))
    one, other = dataset(here.folder, tmp_path), dataset(there.folder, tmp_path)
    assert batches(one, 30) == batches(other, 30) and one.order(30) == other.order(30)
    assert [one.sources[0].eval_row(n)["tokens"].tolist() for n in range(3)] == [
        other.sources[0].eval_row(n)["tokens"].tolist() for n in range(3)
    ]
    there.verify()
    assert joined(there) == joined(here)


@pytest.mark.parametrize("was_complete", [False, True])
@pytest.mark.parametrize("place", STORES, indirect=True)
def test_a_shard_that_is_half_there_is_made_again(place, was_complete, tmp_path) -> None:
    """As after a kill, while a store was made or while a damaged shard of it was made again."""
    job = job_of(write_texts(tmp_path / "input"))
    folder = make(job, f"{place.url}/store", tmp_path).folder
    wanted = objects(str(folder))
    system, root = fsspec.core.url_to_fs(str(folder))
    name = next(n for n in wanted if n.endswith("00000-00002/shard.json"))
    gone_too = [] if was_complete else ["parts/00000.shards.json"]
    for gone in (name, name.replace("shard.json", "tokens.bin"), *gone_too):
        system.rm_file(f"{root}/{gone}")
    make(job, folder, tmp_path)
    assert objects(str(folder)) == wanted


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_of_two_commands_that_add_to_a_store_at_once_one_is_refused(place, tmp_path) -> None:
    folder = make(job_of(write_texts(tmp_path / "input")), f"{place.url}/store", tmp_path).folder
    planners = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name * 20)
        job = job_of(SourceConfig(files=f"{tmp_path}/{name}/*.txt"))
        planners.append(PartPlanner(job, folder, Sharding(120, append=True)))
    for planner in planners:
        planner.check_new()
    assert planners[0].begin().number == 1
    with pytest.raises(DataError, match="another command has just begun to add to it; run again"):
        planners[1].begin()


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_a_part_in_a_bucket_is_not_replaced_by_one_of_other_files(place, tmp_path) -> None:
    """Its command may run on another machine, and have made no shard yet."""
    folder = to_path(f"{place.url}/store")
    one = PartPlanner(job_of(write_texts(tmp_path / "one")), folder, Sharding(120))
    one.check_new()
    part = one.begin()
    other = PartPlanner(job_of(write_texts(tmp_path / "other", 3)), folder, Sharding(120))
    with pytest.raises(DataError, match="unless another command is making them, delete it and"):
        other.check_new()
    part.check(folder)


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_damage_is_found_and_named_and_a_damaged_cache_is_read_again(place, tmp_path) -> None:
    folder = make(job_of(write_texts(tmp_path / "input")), f"{place.url}/store", tmp_path).folder
    wanted = batches(dataset(folder, tmp_path), 20)
    blocks = [path for path in (tmp_path / "run-cache" / "blocks").rglob("*") if path.is_file()]
    assert len(blocks) > 8
    for path in blocks:
        path.write_bytes(bytes(len(path.read_bytes())))
    assert batches(dataset(folder, tmp_path), 20) == wanted
    shutil.rmtree(tmp_path / "run-cache")
    name = next(n for n in objects(str(folder)) if n.endswith("00000-00001/tokens.bin"))
    system, root = fsspec.core.url_to_fs(str(folder))
    size = len(system.cat_file(f"{root}/{name}"))
    system.pipe_file(f"{root}/{name}", bytes(size))
    with pytest.raises(DataError, match=rf"{name}: .*differ from what was written; delete"):
        batches(dataset(folder, tmp_path), 100)
    system.pipe_file(f"{root}/{name}", bytes(size // 2))
    with pytest.raises(DataError, match=rf"{name} ends at byte {size // 2}, expected {size} bytes"):
        ShardedStore(folder).verify()
    system.rm_file(f"{root}/{name}")
    with pytest.raises(DataError, match=rf"{name} is missing, expected {size} bytes"):
        ShardedStore(folder).verify()


@pytest.mark.parametrize("place", [STORES[0]], indirect=True)
def test_a_busy_service_is_asked_again_and_a_refusal_is_one_line(
    place, google_bucket: Bucket, tmp_path
) -> None:
    asked: dict[str, int] = {}

    def busy(method: str, path: str) -> int | None:
        asked[path] = asked.get(path, 0) + 1
        return None if asked[path] % 3 else (429 if len(asked) % 2 else 503)

    job = job_of(write_texts(tmp_path / "input"))
    wanted = content(make(job, tmp_path / "store", tmp_path).folder)
    google_bucket.fault = busy
    folder = make(job, f"{place.url}/store", tmp_path).folder
    data = dataset(folder, tmp_path)
    assert batches(data, 10) == batches(dataset(tmp_path / "store", tmp_path), 10)
    assert any(count > 3 for count in asked.values())
    google_bucket.fault = lambda method, path: None
    assert objects(str(folder)) == wanted
    google_bucket.fault = lambda method, path: 401
    with pytest.raises(OSError, match=r"gs://bucket/texts/store/.*401"):
        dataset(folder, tmp_path)


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_an_object_is_created_once(place) -> None:
    path = to_path(f"{place.url}/one")
    assert isinstance(path, BucketPath)
    assert path.create(b"first") and not path.create(b"second") and path.read_bytes() == b"first"
    assert path.create(b"first")  # as after an answer that was lost
    for written in (b"", b"\n", b"a\r\n", b"\r", b"\n\n--\r\n\r\n"):
        path.overwrite(written)
        assert path.read_bytes() == written
    path.overwrite(b"third")
    assert path.read_bytes() == b"third" and path.read_range(1, 3) == b"hi" and path.size() == 5
    assert [each.name for each in to_path(place.url).iterdir()] == ["one"] and path.is_file()
    path.delete()
    assert not path.exists() and not [*(to_path(place.url) / "none").iterdir()]
    with pytest.raises(FileNotFoundError, match="one"):
        path.read_bytes()


def numbers(begin: int, end: int) -> bytes:
    return (np.arange(begin, end) % 251).astype(np.uint8).tobytes()


class Counted(BucketPath):
    """An object of numbers that counts its requests."""

    requests: list[tuple[int, int]] = []  # noqa: RUF012

    def read_range(self, begin: int, end: int) -> bytes:
        self.requests.append((begin, end))
        return numbers(begin, end)


def test_a_block_is_asked_for_once_and_shared(tmp_path) -> None:
    path, size = Counted("gs://b/x"), 10 * BLOCK_BYTES + 7
    path.requests.clear()
    for cache in (BlockCache(tmp_path, 10**9), BlockCache(tmp_path, 10**9)):
        for begin in range(0, size, BLOCK_BYTES // 3):
            end = min(size, begin + 100)
            assert cache.read(path, size, begin, end) == numbers(begin, end)
    assert cache.read(path, size, 5, 3 * BLOCK_BYTES) == numbers(5, 3 * BLOCK_BYTES)
    assert len(path.requests) == 11 == len({*path.requests})
    (block,) = tmp_path.rglob("3")
    block.write_bytes(block.read_bytes()[:-1])  # a disk that lost the end of a file
    at = 3 * BLOCK_BYTES
    assert cache.read(path, size, at, at + 9) == numbers(at, at + 9) and len(path.requests) == 12
    shutil.rmtree(tmp_path)
    assert cache.read(path, size, 5, 9) == numbers(5, 9) and len(path.requests) == 13


def test_the_blocks_stay_below_the_limit_and_the_oldest_go_first(tmp_path) -> None:
    limit = 20 * BLOCK_BYTES
    cache, size = BlockCache(tmp_path, limit), 100 * BLOCK_BYTES
    path = Counted("gs://b/y")
    path.requests.clear()
    for number in range(100):
        for block in tmp_path.rglob("[0-9]*"):
            if block.is_file():
                stat = block.stat()
                os.utime(block, (stat.st_atime, stat.st_mtime - 1))  # time goes by
        cache.read(path, size, number * BLOCK_BYTES, number * BLOCK_BYTES + 1)
        cache.read(path, size, 0, 1)
        sizes = [block.stat().st_size for block in tmp_path.rglob("*") if block.is_file()]
        assert sum(sizes) <= 1.1 * limit
    assert sum(begin == 0 for begin, _ in path.requests) == 1  # block 0 was in use all the time
    path.requests.clear()
    cache.read(path, size, 0, 1)
    cache.read(path, size, 99 * BLOCK_BYTES, 99 * BLOCK_BYTES + 1)
    assert not path.requests
    nothing = BlockCache(tmp_path / "none", 0)
    nothing.read(path, size, 0, 1)
    assert path.requests and not (tmp_path / "none").exists()


def test_a_full_disk_is_no_error(tmp_path, monkeypatch, caplog) -> None:
    def full(*args) -> None:
        raise OSError(28, "No space left on device")

    path = Counted("gs://b/z")
    cache = BlockCache(tmp_path, 10**9)
    monkeypatch.setattr(Path, "write_bytes", full)
    for _ in range(3):
        assert cache.read(path, 100, 10, 20) == numbers(10, 20)
    assert len([r for r in caplog.records if "no more blocks are kept" in r.message]) == 1
