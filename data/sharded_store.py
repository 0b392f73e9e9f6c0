"""Sharded store for reading: its lists in memory, its shards opened when a batch needs them.

A reader is pinned to the parts that the store had when it was opened, so that shards which are
added later change nothing for it. `shard_list.py` has the layout of the folder.
"""

import math
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from data.block_cache import BlockCache
from data.bucket_path import AnyPath, to_path
from data.checked_array import FILES_PER_SOURCE, allow_open_files
from data.files import DataError
from data.packed_store import PACKS, PackedStore, PackingInfo, PackSettings, StoredRows, open_rows
from data.shard_list import (
    RECORD,
    SHARDS,
    Part,
    RowsRecord,
    ShardRecord,
    in_parallel,
    part_file,
    read_list,
    read_model,
    read_parts,
    rows_key,
    rows_lists,
    shard_name,
    shard_names,
)
from data.store import Encoding, Skipped, Store, count_of, open_again, summary
from data.store_writer import add_skipped
from safe_files import json_digest

# How long a run waits for rows that are being prepared, how often it looks, and says so.
WAIT_SECONDS, LOOK_SECONDS, LINE_SECONDS = 1800.0, 1.0, 60.0
KEPT_OPEN = 512
"""Shards of a source that stay open; each takes up to eight files."""
_AT_A_TIME = 64


class ShardedStore:
    """Shards of the parts of a store, as one store.

    While a part that is read in order is prepared, only its first shards are there; `refresh` looks
    for more. Otherwise a part that is not complete is left out.
    """

    def __init__(
        self, folder: str | AnyPath, cache: BlockCache | None = None, num_parts: int | None = None
    ):
        """Open a store.

        folder: where it is, on a disk or in a bucket. cache: of what is read from a bucket.
            num_parts: only the first ones; None: all.
        Raises: DataError when no part is complete, or a list is damaged.
        """
        self.folder, self.cache = to_path(folder), cache
        parts = read_parts(self.folder)
        if not parts:
            raise DataError(f"{folder} is not a sharded store; prepare it")
        self.in_order = parts[0].in_order
        self.shards: list[tuple[str, ShardRecord]] = []
        """Names and records of the shards that can be read, in their order."""
        self.parts: list[Part] = []
        self.is_complete = True
        for number, part in enumerate(parts[:num_parts]):
            found, is_complete = self._records(number, part, ())
            if not is_complete and not self.in_order:
                break
            self.parts.append(part)
            self.shards += found
            if not is_complete:
                self.is_complete = False
                break
        if not self.parts:
            raise DataError(
                f"{folder} is not complete; run the command that prepares it again, which continues"
            )
        if num_parts is not None and len(self.parts) < num_parts:
            raise DataError(
                f"{folder} has {count_of(len(self.parts), 'part')}, but the run was trained on "
                f"{num_parts}; name the store of that run, or give another run.dir"
            )
        self._check_present()
        for part in self.parts:
            if (reason := part.explain_difference(parts[0])) is not None:
                what = f"{folder}: a part of it {reason.partition(';')[0]}, unlike the first one"
                raise DataError(f"{what}; delete {folder} and prepare it again")
        self.check_shards: Callable[[range], None] | None = None
        """Called with the numbers of the shards that `refresh` finds; may raise DataError."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedStore, (self.folder, self.cache, len(self.parts))

    def _records(
        self, number: int, part: Part, known: Sequence[tuple[str, ShardRecord]]
    ) -> tuple[list[tuple[str, ShardRecord]], bool]:
        """Return the shards of a part that are there, and whether they are all."""
        names = [shard_name(number, shard) for shard in range(len(part.pieces))]
        listed = read_list(part_file(self.folder, number, "shards"), ShardRecord)
        if listed is not None:
            if len(listed) != len(names):
                raise DataError(
                    f"{self.folder}: part {number} has {len(names)} shards, and a list of "
                    f"{len(listed)}; delete the folder and prepare it again"
                )
            return [*zip(names, listed, strict=True)], True
        if not part.in_order:
            return [], False
        there = shard_names(self.folder)
        count = next((n for n, name in enumerate(names) if name not in there), len(names))
        new = in_parallel(self._record, names[len(known) : count])
        # A folder in a bucket is there before its record.
        whole = next((n for n, record in enumerate(new) if record is None), len(new))
        records = [record for record in new[:whole] if record is not None]
        found = [*known, *zip(names[len(known) :], records, strict=False)]
        return found, len(found) == len(names)

    def _check_present(self) -> None:
        """Raise DataError for a shard that was deleted, with the files of its part."""
        there = shard_names(self.folder)
        for number, part in enumerate(self.parts):
            first = sum(len(each.pieces) for each in self.parts[:number])
            for name, _ in self.shards[first : first + len(part.pieces)]:
                if name not in there:
                    raise DataError(
                        f"{self.folder}: shard {name} is missing; run the command that prepared it "
                        f"from data.files={part.plan.source.get('files')} again, which makes only "
                        "what is missing"
                    )

    def _check_part(self, number: int) -> None:
        """Raise DataError unless a part is the one that was opened."""
        file = part_file(self.folder, number)
        try:
            if read_model(file, Part, "prepare the data again").digest == self.parts[number].digest:
                return
        except FileNotFoundError:
            pass
        raise DataError(
            f"{file} has changed since the start of this run: the store was prepared anew, or "
            "deleted; start the run again"
        )

    def _record(self, name: str) -> ShardRecord | None:
        path = self.folder / SHARDS / name / RECORD
        try:
            return read_model(path, ShardRecord, self.remedy(name))
        except FileNotFoundError:
            return None

    def remedy(self, name: str) -> str:
        """Return what to do about a damaged shard."""
        return (
            f"delete {self.folder / SHARDS / name}, and run the command that prepared the store "
            "again, which makes only what is missing"
        )

    def refresh(self) -> None:
        """Look for shards that were added to the last part since. Raises: DataError."""
        if self.is_complete:
            return
        last = len(self.parts) - 1
        self._check_part(last)
        before = sum(len(part.pieces) for part in self.parts[:-1])
        known = len(self.shards)
        found, is_complete = self._records(last, self.parts[last], self.shards[before:])
        self.shards = self.shards[:before] + found
        if self.check_shards is not None:
            self.check_shards(range(known, len(self.shards)))
        self.is_complete = is_complete

    @property
    def share_there(self) -> float:
        """Share of the pieces of the input whose shards can be read."""
        pieces = [count for part in self.parts for count in part.pieces]
        return sum(pieces[: len(self.shards)]) / max(1, sum(pieces))

    @property
    def records(self) -> list[ShardRecord]:
        """Records of the shards that can be read."""
        return [record for _, record in self.shards]

    @property
    def digest(self) -> str:
        """Identity of the tokens of all shards. If they are read in order: that of their input."""
        if self.in_order:
            return json_digest([part.digest for part in self.parts])
        return json_digest([record.digest for record in self.records])

    @property
    def tokenizer(self) -> tuple[str, str]:
        """Name and digest of the tokenizer."""
        plan = self.parts[0].plan
        return plan.tokenizer, plan.tokenizer_digest

    @property
    def encoding(self) -> Encoding:
        """Additions to the text of documents."""
        return self.parts[0].plan.encoding

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return sum(record.num_tokens for record in self.records)

    @property
    def num_documents(self) -> int:
        """Number of documents; two of each preference pair."""
        return sum(record.num_documents for record in self.records)

    @property
    def is_masked(self) -> bool:
        """Whether some tokens do not contribute to the loss."""
        return any(record.is_masked for record in self.records)

    @property
    def has_checksums(self) -> bool:
        """Whether damage is noticed when it is read: always."""
        return True

    @property
    def skipped(self) -> dict[str, Skipped]:
        """Documents that were left out, by reason."""
        found: dict[str, Skipped] = {}
        for record in self.records:
            add_skipped(found, record.skipped)
        return found

    def text_bytes(self) -> int:
        """Return the UTF-8 bytes of all documents that contribute to the loss."""
        return sum(record.text_bytes for record in self.records)

    def loss_tokens(self) -> int:
        """Return the number of tokens that contribute to the loss."""
        return sum(record.loss_tokens for record in self.records)

    def count_unanswered(self) -> int:
        """Return the number of documents of which nothing contributes to the loss."""
        return sum(record.unanswered for record in self.records)

    def summary(self) -> str:
        """Return one line with the size of the store and the skipped documents."""
        count, total = len(self.shards), sum(len(part.pieces) for part in self.parts)
        of = "" if self.is_complete else f" of {total:,}, the others are being prepared"
        return f"{count_of(count, 'shard')}{of}; {summary(self)}"

    def open_shard(self, number: int) -> Store:
        """Open a shard. Raises: DataError."""
        name, record = self.shards[number]
        return open_again(self.folder / SHARDS / name, record.digest, self.cache)

    def stores(self, limit: int | None = None) -> Iterator[Store]:
        """Yield the shards that have tokens; at most `limit`, evenly spread."""
        numbers = [number for number, record in enumerate(self.records) if record.num_tokens]
        count = len(numbers) if limit is None else min(limit, len(numbers))
        for place in range(count):
            yield self.open_shard(numbers[place * len(numbers) // count])

    def input_files(self) -> Iterator[str]:
        """Yield the paths of the files from which it was prepared; each shard is opened."""
        numbers = [number for number, record in enumerate(self.records) if record.num_tokens]
        for begin in range(0, len(numbers), _AT_A_TIME):
            for store in in_parallel(self.open_shard, numbers[begin : begin + _AT_A_TIME]):
                yield from store.input_files()

    def verify(self) -> None:
        """Read everything. Raises: DataError that names the shard and the damaged part."""
        packs: dict[str, list[str]] = {}
        for number in range(len(self.parts)):
            for path in rows_lists(self.folder, number):
                records = read_list(path, RowsRecord) or []
                first = sum(len(part.pieces) for part in self.parts[:number])
                for (name, _), record in zip(self.shards[first:], records, strict=False):
                    if record.name:  # it has rows
                        packs.setdefault(name, []).append(record.name)
        for store in self.stores():
            store.verify()
            for rows in packs.get(store.folder.name, []):
                remedy = self.remedy(store.folder.name)
                open_rows(store.folder / PACKS / rows, self.cache, remedy=remedy).verify()


class ShardedSplit:
    """Training rows, or held-out rows, of all shards, one after the other."""

    def __init__(self, rows: "ShardedRows", counts: Sequence[int], *, is_train: bool):
        self._rows, self._is_train = rows, is_train
        self.ends = np.cumsum(np.array([0, *counts], np.int64))[1:].tolist()

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.ends[-1] if self.ends else 0

    def locate(self, row: int) -> tuple[Store, StoredRows, int]:
        """Return the shard of a row, its rows, and the number of the row among them."""
        shard = bisect_right(self.ends, row)
        store, packed = self._rows.open_shard(shard)
        first = self.ends[shard - 1] if shard else 0
        return store, packed.train if self._is_train else packed.held_out, row - first


class ShardedRows:
    """Packed rows of a sharded store."""

    def __init__(self, store: ShardedStore, settings: PackSettings, num_sharing: int = 4):
        """Read the counts of all rows.

        num_sharing: how many such objects share the open files of this process.
        Raises: DataError when they were not packed with these settings.
        """
        self.store, self.settings, self._num_sharing = store, settings, num_sharing
        num_shards = sum(len(part.pieces) for part in store.parts)
        limit = allow_open_files(FILES_PER_SOURCE * min(KEPT_OPEN, num_shards) * num_sharing)
        most = 3 * limit // (4 * FILES_PER_SOURCE * num_sharing)  # a quarter is for other files
        self._kept_open = max(1, min(KEPT_OPEN, most))
        self._lock = threading.Lock()
        self._open: OrderedDict[int, tuple[Store, PackedStore]] = OrderedDict()
        self._records: list[RowsRecord] = []
        self.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedRows, (self.store, self.settings, self._num_sharing)

    def refresh(self) -> None:
        """Read the counts of rows of shards that were added since. Raises: DataError."""
        first, found = 0, list[RowsRecord]()
        for number, part in enumerate(self.store.parts):
            end = min(first + len(part.pieces), len(self.store.shards))
            found += self._records[first:end]
            if len(found) < end:
                found += self._read(number, len(found) - first, self.store.shards[first:end])
            first = end
        self._records = found
        counts = [record.counts for record in found]
        self.train = ShardedSplit(self, [c.train_rows for c in counts], is_train=True)
        self.held_out = ShardedSplit(self, [c.held_out_rows for c in counts], is_train=False)
        self.info = PackingInfo(
            **{
                field.name: sum(getattr(c, field.name) for c in counts)
                for field in fields(PackingInfo)
            }
        )

    def _read(
        self, part: int, known: int, shards: Sequence[tuple[str, ShardRecord]]
    ) -> list[RowsRecord]:
        """Return the records of the rows of shards of a part, without the `known` first ones."""
        store, key = self.store, rows_key(self.settings)
        listed = read_list(part_file(store.folder, part, key), RowsRecord)
        if listed is not None:
            found = listed[known : len(shards)]
        else:  # the part is being prepared
            folders = [store.folder / SHARDS / name for name, _ in shards[known:]]
            read = in_parallel(lambda folder: read_rows_record(folder, key), folders)
            found = [record for record in read if record is not None]
        if len(found) < len(shards) - known:
            given = ", ".join(f"{name} {value}" for name, value in asdict(self.settings).items())
            files = " and from ".join(
                str(each.plan.source.get("files"))
                for number, each in enumerate(store.parts)
                if number == part or self._lacks_rows(number, key)
            )
            fraction = f"data.eval_fraction={self.settings.eval_fraction:g}"
            raise DataError(
                f"{store.folder} has no rows for these settings ({given}) of what was prepared "
                f"from {files}; run scripts/prepare_data.py with --out={store.folder}, those "
                f"files, {fraction}, and data.sequence_length, data.repack_at and data.packing as "
                "here, which packs them; for longer rows of a run that has begun, add "
                "data.repack_at first"
            )
        return found

    def _lacks_rows(self, part: int, key: str) -> bool:
        """Return whether a complete part has no rows for the settings of a `rows_key`."""
        is_complete, has_rows = (
            part_file(self.store.folder, part, kind).is_file() for kind in ("shards", key)
        )
        return is_complete and not has_rows

    def open_shard(self, number: int) -> tuple[Store, PackedStore]:
        """Return a shard and its rows, opened unless they are still open. Raises: DataError."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
        store = self.store.open_shard(number)
        folder = store.folder / PACKS / self._records[number].name
        remedy = self.store.remedy(self.store.shards[number][0])
        opened = store, open_rows(folder, self.store.cache, keep=False, remedy=remedy)
        with self._lock:
            self._open[number] = opened
            while len(self._open) > self._kept_open:
                self._open.popitem(last=False)
        return opened


def read_rows_record(folder: AnyPath, key: str) -> RowsRecord | None:
    """Return the record of the packed rows of a shard; None: it was packed otherwise."""
    try:
        path = folder / PACKS / f"{key}.json"
        return read_model(path, RowsRecord, f"delete {folder} and prepare the shard again")
    except FileNotFoundError:
        return None


def wait_for_first_rows(
    store: ShardedStore,
    rows: Sequence[ShardedRows],
    report: Callable[[str], None],
    limit: float = WAIT_SECONDS,
) -> None:
    """Wait until the first shard is prepared.

    rows: of the store, with different settings. report: called with a line now and then.
    Raises: DataError when there is still none after `limit` seconds, or never will be.
    """
    begin, last = time.monotonic(), -math.inf
    for one in rows:  # the store may have found shards since they were opened
        one.refresh()
    while not all(map(_has_first_rows, rows)):
        if store.is_complete:
            if all(one.train.num_rows for one in rows):  # of a part that was added, for example
                return
            raise DataError(f"{store.folder} has no row for training; prepare other texts")
        now = time.monotonic()
        if now - begin > limit:
            raise DataError(
                f"{store.folder}: no shard was prepared in {limit / 60:.0f} minutes; see whether "
                "the command that prepares it still runs"
            )
        if now - last > LINE_SECONDS:
            report(
                f"waiting for the first shard of {store.folder}, which is being prepared; if no "
                f"command prepares it, start that again ({limit / 60:.0f} minutes at most)"
            )
            last = now
        time.sleep(LOOK_SECONDS)
        store.refresh()
        for one in rows:
            one.refresh()


def _has_first_rows(rows: ShardedRows) -> bool:
    return bool(rows.train.num_rows and (rows.held_out.num_rows or not rows.settings.eval_fraction))


def wait_until(is_there: Callable[[], bool], refresh: Callable[[], None]) -> None:
    """Wait until this process sees the shards that process 0 has seen. Raises: DataError."""
    end = time.monotonic() + WAIT_SECONDS
    while not is_there():
        if time.monotonic() > end:
            raise DataError(
                "this process does not see shards that process 0 has found; give data.files a "
                "folder that all hosts share"
            )
        time.sleep(LOOK_SECONDS)
        refresh()
