"""Batches never hold damaged tokens: reading a damaged store is an error that names it."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_pipeline import assert_equal, one_device, single, steps

from data import checked_array
from data.files import DataError
from data.pipeline import Dataset, train_batches
from data.store import INFO, write_info


@pytest.fixture
def folder(tmp_path) -> Path:
    lines = [{"text": "abcdefgh"[n % 8] * (1 + n * 97 % 400)} for n in range(90)]
    chats = [
        [{"role": r, "content": "x" * (n % 60)} for r in ("user", "assistant")] for n in range(90)
    ]
    for name, documents in (("a", lines), ("chat", [{"text": chat} for chat in chats])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    return tmp_path


def dataset(folder: Path, name: str = "a", **changes) -> Dataset:
    return single(folder, files=str(folder / f"{name}.jsonl"), sequence_length=64, **changes)


def flip_all(path: Path) -> None:
    """Flip one bit of every fourth byte in place, so of every block and of every checksum."""
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), 4):
        content[place] ^= 1
    with open(path, "r+b") as file:
        file.write(content)


def all_rows(rows: Dataset) -> list[bytes]:
    source = rows.sources[0]
    fields = [source.train_row(n) for n in range(source.num_items)]
    fields += [source.eval_row(n) for n in range(source.num_eval)]
    return [b"".join(np.ascontiguousarray(x).tobytes() for x in row.values()) for row in fields]


@pytest.mark.parametrize("how", [flip_all, lambda path: os.truncate(path, 2)])
@pytest.mark.parametrize("name", ["tokens.bin", "tokens.crc32", "learned.bin", "learned.crc32"])
@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_no_row_is_read_from_a_store_that_is_damaged_in_use(folder, packing, name, how):
    rows = dataset(folder, "chat", packing=packing)
    source, store = rows.sources[0], rows.sources[0].store.folder
    assert source.store.loss_mask is not None
    how(store / name)
    array = name.replace("crc32", r"(bin|crc32)")
    for read in (source.train_row, source.eval_row, lambda n: rows.read_train(n, range(2))):
        with pytest.raises(DataError, match=rf"^{store}/{array}.*; delete {store} and prepare"):
            read(0)


def test_a_store_that_is_made_again_has_the_same_batches_and_the_same_order(folder):
    rows = dataset(folder)
    wanted, order = steps(rows, 0, 5), rows.order_hash(5)
    store = rows.sources[0].store.folder
    flip_all(store / "tokens.bin")
    with pytest.raises(DataError, match=r"tokens \d+ to \d+ of .*a\.jsonl \(bytes .* differ from"):
        steps(dataset(folder), 0, 5)
    shutil.rmtree(store)
    again = dataset(folder)
    assert again.order_hash(5) == order
    assert_equal(steps(again, 0, 5), wanted)


@pytest.mark.parametrize("name", ["ends.bin", "num_bytes.bin"])
def test_a_damaged_index_of_documents_is_found_at_the_start(folder, name):
    store = dataset(folder).sources[0].store.folder
    flip_all(store / name)
    with pytest.raises(
        DataError, match=rf"{name}: documents 0 to 64 \(bytes 0 to 512\) differ from"
    ):
        dataset(folder)


@pytest.mark.parametrize("name", ["rows.bin", "rows.crc32", "pack.json"])
def test_damaged_packed_rows_are_found_at_the_start_with_the_source(folder, name):
    packed = dataset(folder).sources[0].packed.folder
    os.truncate(packed / name, 3)
    with pytest.raises(DataError, match=rf"^data: {packed / name}.*; delete the folder {packed}"):
        dataset(folder)
    shutil.rmtree(packed)
    dataset(folder)


def test_large_files_are_read_in_parts_and_give_the_same_batches(folder, monkeypatch):
    wanted = all_rows(dataset(folder, "chat")), dataset(folder, "chat").sources[0].eval_bytes(9)
    monkeypatch.setattr(checked_array, "MAX_READ", 128)
    rows = dataset(folder, "chat")
    assert rows.sources[0].packed.train.array._kept is None
    assert (all_rows(rows), rows.sources[0].eval_bytes(9)) == wanted


def test_a_store_without_checksums_is_read_and_its_folder_is_named(folder):
    rows = dataset(folder)
    assert rows.unchecked_stores() == []
    store, wanted = rows.sources[0].store, all_rows(rows)
    info = store.info.model_copy(update={"checksum_blocks": None})
    write_info(store.folder, info)
    text = json.loads((store.folder / INFO).read_text())
    for path in store.folder.glob("*.crc32"):
        path.unlink()
    assert text["checksum_blocks"] is None
    old = dataset(folder)
    assert all_rows(old) == wanted and old.order_hash(3) == rows.order_hash(3)
    (line,) = old.unchecked_stores()
    assert line == (
        f"data text: {store.folder} has no checksums, because an earlier version wrote it, so that "
        "damage to its tokens is not noticed; delete it to prepare it again"
    )


def test_many_sources_may_have_their_files_open_at_once(folder, monkeypatch):
    counts = []
    monkeypatch.setattr("data.pipeline.allow_open_files", counts.append)
    before = len(os.listdir("/proc/self/fd"))
    rows = dataset(folder, "chat")
    opened = len(os.listdir("/proc/self/fd")) - before
    assert len(rows.sources) == 1 and counts == [checked_array.FILES_PER_SOURCE] and opened <= 10


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_data_workers_raise_the_same_error(folder, how):
    rows = dataset(folder, num_workers=2)
    store = rows.sources[0].store.folder
    batches = train_batches(rows, one_device(), start=0, stop=400, accumulation=1)
    next(batches), next(batches)  # one of each worker: both have opened the store
    if how == "flip":
        flip_all(store / "tokens.bin")
    elif how == "truncate":
        os.truncate(store / "tokens.bin", 2)
    else:  # those who have it open do not need its name
        shutil.rmtree(store)
        assert sum(1 for _ in batches) == 398
        return
    with pytest.raises(DataError, match=rf"^{store}/tokens\.bin.*; delete {store} and prepare"):
        list(batches)
