"""A sharded store holds the documents of one store, whatever its shards, kills and repairs."""

import itertools
import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig, SourceConfig
from data.engine import run_tasks
from data.files import DataError
from data.filters import Filters, parse_filters
from data.formats.pieces import plan_pieces
from data.packed_store import PackSettings
from data.pipeline import Dataset
from data.prepare import build
from data.shard_list import read_parts
from data.shard_plan import Sharding
from data.shard_writer import prepare_shards
from data.sharded_store import ShardedRows, ShardedStore, wait_for_first_rows
from data.store_job import StoreJob
from data.tokenizers.byte_level import ByteTokenizer

ROWS = PackSettings(16, "split", 0.05)
PIECE_BYTES = 50


def write_texts(folder: Path, count: int = 12, first: int = 0) -> SourceConfig:
    """Text files, JSON lines, and a chat."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(first, first + count):
        (folder / f"{n:03}.txt").write_text(f"text number {n}, " * (1 + n % 5))
    lines = [json.dumps({"text": f"line {n} " * 3}) for n in range(8)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return SourceConfig(files=f"{folder}/*")


def job_of(source: SourceConfig, filters: Filters | None = None, on_error="raise") -> StoreJob:
    job = StoreJob("text", source, ByteTokenizer(), on_error)
    return job if filters is None else StoreJob(
        "text", source, ByteTokenizer(), on_error, filters=filters
    )  # fmt: skip


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    for name in ("data.prepare.plan_pieces", "data.shard_plan.plan_pieces"):
        monkeypatch.setattr(name, partial(plan_pieces, piece_bytes=PIECE_BYTES))


def shards(job: StoreJob, folder: Path, size: int = 150, **options) -> ShardedStore:
    sharding = {key: options.pop(key) for key in ("in_order", "append") if key in options}
    rows = options.pop("rows", ROWS)
    rows = [rows] if isinstance(rows, PackSettings) else rows
    return prepare_shards(
        job, folder, Sharding(size, **sharding), rows, cache=folder.parent / "cache", **options
    )


def joined(store: ShardedStore) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"tokens": [], "lengths": [], "bytes": [], "mask": []}
    for each in store.stores():
        found["tokens"] += each.tokens[:].tolist()
        found["lengths"] += np.diff(each.ends[:], prepend=0).tolist()
        found["bytes"] += each.num_bytes[:].tolist()
        ones = np.ones(len(each.tokens), np.uint8)
        found["mask"] += (ones if each.loss_mask is None else each.loss_mask[:]).tolist()
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.relative_to(folder).parts[0].startswith("building")
    }


@given(size=st.integers(1, 2000), chat=st.booleans())
@settings(max_examples=15)
def test_shards_hold_what_one_store_holds(tmp_path_factory, size, chat) -> None:
    folder = tmp_path_factory.mktemp("size")
    source = write_texts(folder / "input")
    if chat:
        messages = [{"role": r, "content": r * 9} for r in ("user", "assistant")]
        (folder / "input" / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    whole = build(job_of(source), folder / "whole")
    store = shards(job_of(source), folder / "cut", size)
    assert joined(store) == joined(whole)
    assert store.num_tokens == whole.num_tokens and store.num_documents == whole.num_documents
    assert store.text_bytes() == whole.text_bytes() and store.loss_tokens() == whole.loss_tokens()
    assert store.summary().partition("; ")[2] == whole.summary()
    store.verify()


def test_workers_do_not_change_the_bytes(tmp_path) -> None:
    job = job_of(write_texts(tmp_path / "input"))
    alone = shards(job, tmp_path / "alone")
    together = shards(job, tmp_path / "together", engine=partial(run_tasks, workers=2))
    assert content(alone.folder) == content(together.folder) and len(alone.shards) > 4


class Killed(BaseException):
    pass


@pytest.mark.parametrize("filters", [[], ["duplicates"]], ids=["plain", "duplicates"])
def test_a_kill_at_any_moment_changes_no_byte(tmp_path, monkeypatch, filters) -> None:
    source = write_texts(tmp_path / "input", 6)
    (tmp_path / "input" / "005.txt").write_text((tmp_path / "input" / "000.txt").read_text())
    make = partial(job_of, source, parse_filters(filters))
    wanted = content(shards(make(), tmp_path / "whole").folder)
    calls = 0

    def count(function, *args, **options):
        nonlocal calls
        calls += 1
        if calls == kill_at:
            raise Killed
        return function(*args, **options)

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, partial(count, getattr(os, name)))
    kill_at, kills = 1, 0
    while True:
        calls, folder = 0, tmp_path / f"killed-{kill_at}"
        try:
            shards(make(), folder)
            break
        except Killed:
            kills += 1
        calls, before = -(10**9), kill_at
        assert content(shards(make(), folder).folder) == wanted, kill_at
        kill_at = before + max(1, before // 12)
    assert kills > 20


def test_equal_documents_are_left_out_over_shards(tmp_path) -> None:
    source = write_texts(tmp_path / "input")
    (tmp_path / "input" / "zzz.txt").write_text((tmp_path / "input" / "001.txt").read_text())
    filters = parse_filters(["duplicates"])
    whole = build(job_of(source, filters), tmp_path / "whole")
    store = shards(job_of(source, filters), tmp_path / "cut")
    assert joined(store) == joined(whole)
    assert store.skipped["left out by duplicates"].count == 1
    # A shard that is made again leaves out the same ones.
    wanted = content(store.folder)
    for name, _ in (store.shards[0], store.shards[-1]):
        shutil.rmtree(store.folder / "shards" / name)
        shards(job_of(source, filters), tmp_path / "cut")
        assert content(store.folder) == wanted


def test_a_deleted_shard_is_made_again_and_others_are_not(tmp_path) -> None:
    source = write_texts(tmp_path / "input")
    store = shards(job_of(source), tmp_path / "cut")
    wanted, name = content(store.folder), store.shards[2][0]
    array = store.folder / "shards" / name / "tokens.bin"
    array.write_bytes(bytes(len(array.read_bytes())))
    law = rf"shards/{name}/tokens\.bin: .* differ from what was written; delete .*shards/{name} and"
    with pytest.raises(DataError, match=law):
        ShardedStore(store.folder).verify()
    shutil.rmtree(array.parent)
    with pytest.raises(DataError, match=f"shard {name} is missing; run the command"):
        ShardedStore(store.folder).verify()
    kept = {path: path.stat().st_mtime_ns for path in (store.folder / "shards").iterdir()}
    shards(job_of(source), tmp_path / "cut")
    assert content(store.folder) == wanted
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


def test_every_row_is_read_once_in_an_epoch(tmp_path) -> None:
    store = shards(job_of(write_texts(tmp_path / "input")), tmp_path / "cut")
    for in_order in (False, True):
        folder = tmp_path / f"order-{in_order}"
        store = shards(job_of(write_texts(tmp_path / "input")), folder, in_order=in_order)
        source = dataset(folder, tmp_path).sources[0]
        rows = [source.train_row(n) for n in range(2 * source.num_items)]
        epochs = rows[: source.num_items], rows[source.num_items :]
        read = [sorted(tuple(row["tokens"].tolist()) for row in epoch) for epoch in epochs]
        assert read[0] == read[1]
        order = [[tuple(row["tokens"].tolist()) for row in epoch] for epoch in epochs]
        assert order[0] != order[1]
        held = [source.eval_row(n) for n in range(source.num_eval)]
        tokens = [
            token
            for row in [*rows[: source.num_items], *held]
            for token in row["tokens"][row["segment_ids"] >= 0].tolist()
        ]
        assert sorted(tokens) == sorted(joined(store)["tokens"])


def dataset(folder: Path, tmp_path: Path, pins=None, **changes) -> Dataset:
    config = DataConfig(
        files=str(folder), sequence_length=16, global_batch_size=2, eval_fraction=0.05,
        cache_dir=str(tmp_path / "run-cache"), **changes,
    )  # fmt: skip
    return Dataset(config, pins=pins)


def batches(data: Dataset, count: int) -> list[list[int]]:
    return [data.read_train(step, range(2))["tokens"].tolist() for step in range(count)]


def test_shards_that_are_added_later_change_nothing_for_a_run(tmp_path) -> None:
    folder = tmp_path / "store"
    shards(job_of(write_texts(tmp_path / "one")), folder)
    before = dataset(folder, tmp_path)
    read, order = batches(before, 40), before.order(40)
    more = job_of(write_texts(tmp_path / "two", 5, first=50))
    with pytest.raises(DataError, match="add --append to add these files to it"):
        shards(more, folder)
    shards(more, folder, append=True)
    assert batches(before, 40) == read
    pinned = dataset(folder, tmp_path, before.pins)
    assert batches(pinned, 40) == read and pinned.order(40) == order
    new = dataset(folder, tmp_path)
    assert new.order(40) != order and new.pins.parts == {"text": 2}
    assert new.sources[0].store.num_tokens > before.sources[0].store.num_tokens
    new.pin(before.pins)
    assert batches(new, 40) == read


def test_a_run_reads_a_store_that_grows_as_it_will_read_the_complete_one(tmp_path) -> None:
    source = write_texts(tmp_path / "input", 20)
    whole = shards(job_of(source), tmp_path / "whole", in_order=True)
    wanted = batches(dataset(whole.folder, tmp_path), 30)
    seen: list[int] = []
    growing: list[Dataset] = []

    def watch(done: int, total: int, tokens: int) -> None:
        folder = tmp_path / "growing"
        if not (folder / "shards").exists() or not any((folder / "shards").iterdir()):
            return
        data = growing[0] if growing else dataset(folder, tmp_path)
        growing[:] = [data]
        data.refresh()
        ready = next(n for n in range(1000) if not data.is_ready(n)) if data.is_growing else 30
        assert batches(data, min(ready, 30)) == wanted[:ready]
        assert data.order(20) == dataset(whole.folder, tmp_path).order(20)
        seen.append(ready)

    shards(job_of(source), tmp_path / "growing", in_order=True, report=watch)
    assert len({*seen}) > 3 and seen == sorted(seen)
    growing[0].refresh()
    assert not growing[0].is_growing and batches(growing[0], 30) == wanted


@pytest.mark.parametrize("texts", [["", "a", "", ""], ["", "", "x" * 300, ""], ["ab"] * 5])
def test_shards_may_be_small_or_empty(tmp_path, texts) -> None:
    (tmp_path / "input").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / "input" / f"{n}.txt").write_text(text)
    (tmp_path / "input" / "9.txt").write_text("long enough to be held out " * 8)
    source = SourceConfig(files=f"{tmp_path}/input/*")
    store = shards(job_of(source), tmp_path / "cut", 1)
    assert joined(store) == joined(build(job_of(source), tmp_path / "whole"))
    source = dataset(store.folder, tmp_path).sources[0]
    rows = [source.train_row(n) for n in range(source.num_items)]
    count = sum(int((row["segment_ids"] >= 0).sum()) for row in rows)
    assert count == source.packed.info.train_tokens and source.num_eval >= 1


def test_other_rows_are_packed_without_tokenizing(tmp_path) -> None:
    source = write_texts(tmp_path / "input")
    folder = shards(job_of(source), tmp_path / "cut").folder
    config = DataConfig(files=str(folder), sequence_length=32, cache_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"row_length 32.*run scripts/prepare_data\.py with"):
        Dataset(config)

    def engine(pieces, settings):
        assert not pieces
        yield from ()

    shards(job_of(source), folder, rows=PackSettings(32, "split", 0.01), engine=engine)
    assert Dataset(config).sources[0].num_items > 5


TWO_LENGTHS = PackSettings(32, "split", 0.05), ROWS


def data_of_two_lengths(folder: Path) -> Dataset:
    """Rows of 16 tokens, and of 32 from step 6 on."""
    lengths = {"sequence_length": {0: 16, 6: 32}, "repack_at": (6,), "global_batch_size": 2}
    return Dataset(
        DataConfig(files=f"{folder}/cut", eval_fraction=0.05, cache_dir=str(folder), **lengths)
    )


def test_rows_of_two_lengths_are_packed_at_once(tmp_path) -> None:
    """A run whose rows become longer begins while the store is being prepared."""
    job, found = job_of(write_texts(tmp_path / "input")), list[tuple[Dataset, list[int]]]()

    def counts(dataset: Dataset) -> list[int]:
        return [sources[0].num_items for sources in dataset._sources.values()]

    def engine(pieces, settings):
        for number, piece in enumerate(run_tasks(pieces, settings)):
            if number == len(pieces) // 3:
                dataset = data_of_two_lengths(tmp_path)
                assert dataset.is_growing
                ready = [dataset.is_ready(step) for step in range(20)]
                # The longer rows begin anew, so that they are there before the last short ones.
                first = ready.index(False)
                assert first < 6 and any(ready[first:])
                assert dataset.prepared_until(0, 20, ()) == first
                assert dataset.prepared_until(6, 20, ()) == 6 + ready[6:].index(False)
                found.append((dataset, counts(dataset)))
            yield piece

    shards(job, tmp_path / "cut", rows=TWO_LENGTHS, engine=engine, in_order=True)
    ((dataset, before),) = found
    dataset.refresh()
    assert not dataset.is_growing and dataset.prepared_until(0, 9, ()) == 9
    assert counts(dataset) == counts(data_of_two_lengths(tmp_path))
    assert all(0 < n < m for n, m in zip(before, counts(dataset), strict=True))
    for rows in TWO_LENGTHS:
        shards(job, tmp_path / "again", rows=rows, in_order=True)
    assert content(tmp_path / "again") == content(tmp_path / "cut")


def test_a_continued_preparation_holds_out_the_same_rows_of_every_length(tmp_path) -> None:
    """Else what is held out of long rows would be trained on in short ones."""
    job = job_of(write_texts(tmp_path / "input"))

    def killed(pieces, settings):
        yield from itertools.islice(run_tasks(pieces, settings), len(pieces) // 2)
        raise Killed

    with pytest.raises(Killed):
        shards(job, tmp_path / "cut", engine=killed, in_order=True)
    shards(job, tmp_path / "cut", rows=TWO_LENGTHS, in_order=True)
    shards(job, tmp_path / "once", rows=TWO_LENGTHS, in_order=True)
    assert content(tmp_path / "cut") == content(tmp_path / "once")


def test_rows_that_were_opened_before_the_first_shard_are_found(tmp_path) -> None:
    job, opened = job_of(write_texts(tmp_path / "input")), list[ShardedRows]()

    def engine(pieces, settings):
        store = ShardedStore(tmp_path / "cut")
        opened.extend(ShardedRows(store, of_length) for of_length in TWO_LENGTHS)
        assert not any(rows.train.num_rows for rows in opened)
        yield from run_tasks(pieces, settings)

    shards(job, tmp_path / "cut", rows=TWO_LENGTHS, engine=engine, in_order=True)
    store = opened[0].store
    store.refresh()  # as the wait for the rows of one length does
    assert store.is_complete
    wait_for_first_rows(store, opened, print)
    for rows, of_length in zip(opened, TWO_LENGTHS, strict=True):
        assert rows.train.ends == ShardedRows(ShardedStore(store.folder), of_length).train.ends


def test_mistakes_are_one_line(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "input"), tmp_path / "store"
    with pytest.raises(DataError, match="is no store in shards yet; leave --append out"):
        shards(job_of(source), folder, append=True)
    shards(job_of(source), folder)
    with pytest.raises(DataError, match="was begun without --stream; give the same"):
        shards(job_of(source), folder, in_order=True)
    more = write_texts(tmp_path / "more", 3)
    with pytest.raises(DataError, match="was made without --stream; give the same"):
        shards(job_of(more), folder, in_order=True, append=True)
    (folder / "parts" / "00000.shards.json").write_text("{}")
    with pytest.raises(DataError, match=r"00000\.shards\.json is damaged; delete"):
        ShardedStore(folder)
    (folder / "parts" / "00000.shards.json").unlink()
    with pytest.raises(DataError, match="is not complete; run the command that prepares it again"):
        ShardedStore(folder)
    shards(job_of(source), folder)
    ShardedStore(folder)


def test_an_unreadable_document_keeps_the_shards_before_it(tmp_path) -> None:
    source = write_texts(tmp_path / "input")
    (tmp_path / "input" / "middle.jsonl").write_text('{"text": "a"}\n{"text": \n')
    folder = tmp_path / "store"
    with pytest.raises(DataError, match=r"middle\.jsonl:2: invalid JSON"):
        shards(job_of(source), folder)
    kept = {path.name for path in (folder / "shards").iterdir()}
    assert len(kept) > 2
    store = shards(job_of(source, on_error="skip"), folder)
    assert joined(store) == joined(build(job_of(source, on_error="skip"), tmp_path / "whole"))
    with pytest.raises(DataError, match="invalid JSON, 1 in all"):
        shards(job_of(source), folder)


def test_files_that_change_while_they_are_read_are_not_stored(tmp_path) -> None:
    source = write_texts(tmp_path / "input")

    def engine(pieces, settings):
        for number, shard in enumerate(run_tasks(pieces, settings)):
            if number == 3:
                (tmp_path / "input" / "000.txt").write_text("another text")
            yield shard

    with pytest.raises(DataError, match=r"000\.txt changed while it was read; run again"):
        shards(job_of(source), tmp_path / "store", 10_000, engine=engine)
    store = shards(job_of(source), tmp_path / "store", 10_000)
    assert joined(store) == joined(build(job_of(source), tmp_path / "whole"))


def test_a_dataset_in_another_process_reads_the_same(tmp_path) -> None:
    import pickle

    folder = shards(job_of(write_texts(tmp_path / "input")), tmp_path / "cut").folder
    data = dataset(folder, tmp_path)
    assert batches(pickle.loads(pickle.dumps(data)), 10) == batches(data, 10)


def test_few_shards_stay_open(tmp_path, monkeypatch) -> None:
    store = shards(job_of(write_texts(tmp_path / "input", 40)), tmp_path / "cut", 1)
    monkeypatch.setattr("data.sharded_store.KEPT_OPEN", 3)
    rows = ShardedRows(ShardedStore(store.folder), ROWS)
    for row in range(rows.train.num_rows):
        rows.train.locate(row)
    assert len(rows._open) == 3 and len(store.shards) > 20
    assert len(read_parts(store.folder)) == 1
