"""Packed rows on disk equal the packed ones, damage is reported, and the counts are right."""

import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from token_rows import PACKERS, inputs, loss_pairs, read_all, store_of

from data import packed_store
from data.files import DataError
from data.packed_store import PackedStore, PackSettings, open_packed_store
from data.packing import count_bytes, split_documents
from safe_files import replace_file

OPTIONS = {"row_length": 8, "packing": "split", "eval_fraction": 0.2}


def rows_of(packs: PackedStore) -> list[list]:
    return [
        [spans.start.tolist(), spans.length.tolist(), spans.goes_on]
        for rows in (packs.train, packs.held_out)
        for spans in map(rows.spans, range(rows.num_rows))
    ]


def assert_equal(left: PackedStore, right: PackedStore) -> None:
    assert rows_of(left) == rows_of(right)
    assert (left.folder, left.info) == (right.folder, right.info)


@pytest.mark.parametrize("packing", PACKERS)
def test_opened_rows_are_the_packed_ones_and_lie_on_disk(packing, tmp_path):
    store = store_of(range(1, 30))
    packs = open_packed_store(store, PackSettings(**OPTIONS | {"packing": packing}), tmp_path)
    train, held_out = (PACKERS[packing](p, 8) for p in split_documents(store.ends, 0.2))
    assert rows_of(packs) == rows_of(replace(packs, train=train, held_out=held_out))
    assert packs.train.num_rows == train.num_rows > 0 < held_out.num_rows == packs.held_out.num_rows
    assert [path.name for path in (tmp_path / "packs").iterdir()] == [packs.folder.name]


def test_a_second_opening_makes_nothing(tmp_path):
    store = store_of(range(1, 30))
    first = open_packed_store(store, PackSettings(**OPTIONS), tmp_path)
    store.ends = None  # would be needed
    assert_equal(open_packed_store(store, PackSettings(**OPTIONS), tmp_path), first)


@pytest.mark.parametrize(
    "change", [{"row_length": 9}, {"packing": "best_fit"}, {"eval_fraction": 0.3}, {"digest": "1"}]
)
def test_other_options_or_another_store_are_another_folder(change, tmp_path):
    store = store_of(range(1, 30))
    first = open_packed_store(store, PackSettings(**OPTIONS), tmp_path)
    store.digest = change.pop("digest", store.digest)
    assert (
        open_packed_store(store, PackSettings(**OPTIONS | change), tmp_path).folder != first.folder
    )


def test_another_way_to_pack_is_another_folder(tmp_path, monkeypatch):
    store = store_of(range(1, 30))
    first = open_packed_store(store, PackSettings(**OPTIONS), tmp_path)
    monkeypatch.setattr("data.packed_store.PACK_VERSION", 0)
    assert open_packed_store(store, PackSettings(**OPTIONS), tmp_path).folder != first.folder


def test_threads_that_make_the_same_pack_at_once_all_have_it(tmp_path):
    store = store_of(range(1, 30))
    ready = threading.Barrier(6)

    def make(_: int) -> PackedStore:
        ready.wait()
        return open_packed_store(store, PackSettings(**OPTIONS), tmp_path)

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(make, range(6)))
    for packs in found[1:]:
        assert_equal(packs, found[0])
    assert len(list((tmp_path / "packs").iterdir())) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
import data.packed_store as packed_store
from token_rows import store_of

packed_store.asdict = lambda info: os.kill(os.getpid(), signal.SIGKILL)
options = {"row_length": 8, "packing": "split", "eval_fraction": 0.2}
settings = packed_store.PackSettings(**options)
packed_store.open_packed_store(store_of(range(1, 30)), settings, Path(sys.argv[1]))
"""


def test_what_a_killed_process_left_is_deleted_and_what_a_running_one_writes_is_not(tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": path})
    assert killed.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "packs").iterdir()
    begun, written, old = (left.with_name(f"building-{name}") for name in ("a", "b", "c"))
    for other in (begun, written, old):
        other.mkdir()
    with open(written / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hour_ago = time.time() - 3600
        for path, age in ((left, hour_ago), (written, hour_ago), (old, 0)):
            os.utime(path, (age, age))
        packs = open_packed_store(store_of(range(1, 30)), PackSettings(**OPTIONS), tmp_path)
        assert {*(tmp_path / "packs").iterdir()} == {begun, written, packs.folder}


def test_a_folder_that_is_written_is_locked(tmp_path, monkeypatch):
    settings, found = PackSettings(**OPTIONS), []

    def look(path: Path, text: str) -> None:
        os.utime(path.parent.parent, (time.time() - 3600,) * 2)
        packed_store._remove_leftovers(tmp_path / "packs")
        found.append(path.parent.is_dir())
        replace_file(path, text)

    monkeypatch.setattr(packed_store, "replace_file", look)
    open_packed_store(store_of(range(1, 30)), settings, tmp_path)
    assert found == [True]


def test_a_pickle_holds_the_folder_only(tmp_path):
    packs = open_packed_store(store_of([2] * 20_000), PackSettings(**OPTIONS), tmp_path)
    pickled = pickle.dumps(packs)
    assert len(pickled) < 1000
    assert_equal(pickle.loads(pickled), packs)


def flip(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGE = {"flipped": flip, "cut short": cut_short, "removed": Path.unlink}
FILES = ["pack.json", "rows.bin", "rows.crc32"]


def read_folder(store, cache: Path) -> list[list]:
    return rows_of(open_packed_store(store, PackSettings(**OPTIONS), cache))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_with_the_remedy(name, damage, tmp_path):
    store = store_of(range(1, 30))
    folder = open_packed_store(store, PackSettings(**OPTIONS), tmp_path).folder
    damage(folder / name)
    where = r"rows\..*" if name != "pack.json" else "pack.json: .*"
    with pytest.raises(DataError, match=rf"^{folder}/{where}; delete the folder {folder}, the"):
        read_folder(store, tmp_path)


def test_every_flipped_bit_of_the_rows_or_their_checksums_is_found_before_a_row_is_used(tmp_path):
    store = store_of(range(1, 30))
    folder = open_packed_store(store, PackSettings(**OPTIONS), tmp_path).folder
    for name in ("rows.bin", "rows.crc32"):
        for place in range(0, (folder / name).stat().st_size, 37):
            flip(folder / name, place)
            with pytest.raises(DataError, match="differ from what was written"):
                read_folder(store, tmp_path)
            flip(folder / name, place)
    read_folder(store, tmp_path)


@pytest.mark.parametrize("names", [FILES, FILES[1:], FILES[:1], FILES[2:]])
def test_files_of_another_packed_store_of_equal_sizes_are_found(names, tmp_path):
    one, two = store_of([8] * 60), store_of([8] * 60)
    two.digest = "1"
    folders = [
        open_packed_store(store, PackSettings(**OPTIONS), tmp_path).folder for store in (one, two)
    ]
    for name in names:
        assert (folders[0] / name).stat().st_size == (folders[1] / name).stat().st_size
        shutil.copy(folders[0] / name, folders[1] / name)
    with pytest.raises(DataError, match=r"differs? from what was written"):
        read_folder(two, tmp_path)


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("is_small", [False, True])
def test_rows_that_are_cut_short_in_use_are_an_error_or_in_memory(
    name, is_small, tmp_path, monkeypatch
):
    if not is_small:
        monkeypatch.setattr("data.checked_array.MAX_READ", 64)
    store = store_of(range(1, 30))
    packs = open_packed_store(store, PackSettings(**OPTIONS), tmp_path)
    wanted = rows_of(packs)
    os.truncate(packs.folder / name, 4)
    if is_small:
        assert rows_of(packs) == wanted
        return
    law = rf"^{packs.folder / name} was cut short while it was in use: .*; delete the folder"
    with pytest.raises(DataError, match=law):
        packs.train.spans(packs.train.num_rows - 1)


def test_an_index_that_says_something_else_is_damaged(tmp_path):
    store = store_of(range(1, 30))
    index = open_packed_store(store, PackSettings(**OPTIONS), tmp_path).folder / "pack.json"
    changed = index.read_text().replace('"train_rows": ', '"train_rows": 1')
    no_index = "not the index of a packed store"
    for content, what in (
        (changed, "its content differs"),
        ("[]", no_index),
        ("{}", no_index),
        ("1", no_index),
    ):
        index.write_text(content)
        with pytest.raises(DataError, match=f"pack.json: {what}"):
            open_packed_store(store, PackSettings(**OPTIONS), tmp_path)


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_numbers_of_a_pack_are_those_of_its_rows(packing, masked, tmp_path):
    lengths = [3, 40, 1, 7, 90, 8, 16, 5, 2, 30]
    mask = (np.arange(sum(lengths)) % 3 > 0).astype(np.uint8) if masked else None
    store = store_of(lengths, mask)
    packs = open_packed_store(store, PackSettings(**OPTIONS | {"packing": packing}), tmp_path)
    train, held_out = read_all(store, packs.train, 8), read_all(store, packs.held_out, 8)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    continued = [row["tokens"][-1] for row in train if row["tokens"][-1] + 1 == row["targets"][-1]]
    held = len(inputs(held_out))
    whole = {owner[token] for token in inputs(held_out)}
    assert asdict(packs.info) == {
        "train_rows": len(train),
        "train_tokens": len(inputs(train)),
        "padding": 8 * len(train) - len(inputs(train)),
        "cut_documents": len({owner[token] for token in continued}),
        "held_out_rows": len(held_out),
        "held_out_tokens": held,
        "held_out_learned": len(loss_pairs(held_out)),
        "held_out_conversations": masked * len(whole),
        "once_divided": masked * 1,  # the one of 90 tokens is longer than a fifth of 202
    }
    if masked:
        assert held == sum(lengths[n] for n in whole)
    assert packs.info.efficiency == len(inputs(train)) / (8 * len(train))


def test_a_document_held_out_in_part_gives_its_bytes_in_proportion(tmp_path):
    store = store_of([100, 60])
    store.num_bytes = np.array([700, 0])
    rows = open_packed_store(store, PackSettings(**OPTIONS), tmp_path).held_out
    tokens = inputs(read_all(store, rows, 8))
    count = count_bytes(store, rows, range(rows.num_rows))
    assert 0 < count < 700 and count == pytest.approx(7 * sum(token < 100 for token in tokens))


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_the_bytes_of_all_rows_are_those_of_all_documents(packing, tmp_path):
    store = store_of([5, 3, 17, 1, 40, 8])
    store.num_bytes = np.array([11, 0, 50, 2, 90, 16])
    options = OPTIONS | {"packing": packing, "eval_fraction": 0}
    rows = open_packed_store(store, PackSettings(**options), tmp_path).train
    assert count_bytes(store, rows, range(rows.num_rows)) == pytest.approx(169)
    assert count_bytes(store, rows, []) == 0


def test_a_held_out_part_without_a_token_in_the_loss_is_refused(tmp_path):
    store = store_of([9] * 30, np.zeros(270, np.uint8))
    with pytest.raises(DataError, match="none of the 54 held-out tokens contributes to"):
        open_packed_store(store, PackSettings(**OPTIONS), tmp_path)
    assert not open_packed_store(
        store, PackSettings(**OPTIONS | {"eval_fraction": 0}), tmp_path
    ).held_out.num_rows


def test_of_a_chat_in_parts_every_part_has_the_bytes_of_its_answers(tmp_path):
    learned = np.zeros(100, np.uint8)
    learned[60:] = 1
    store = store_of([100], learned)
    store.num_bytes = np.array([80])
    rows = open_packed_store(store, PackSettings(**OPTIONS | {"eval_fraction": 0}), tmp_path).train
    for row in range(rows.num_rows):
        tokens = inputs(read_all(store, rows, 8)[row : row + 1])
        wanted = 2 * sum(token >= 60 for token in tokens)
        assert count_bytes(store, rows, [row]) == pytest.approx(wanted)
