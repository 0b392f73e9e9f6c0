"""Packed rows of a store, cached on disk: made once, then opened by every run.

A packed store is a folder under `cache_dir/packs`. Its name is a hash of everything that decides
its content. `pack.json` describes `rows.bin`, one array of int64 with four parts:
    index of training rows  (R + 1,)  2 * first span of the row + 1 if its last span goes on
    spans of training rows  (S, 2)    first token and number of tokens
    the same two for held-out rows
`rows.crc32` has the checksums of its blocks; see `checked_array.py`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.block_cache import BlockCache
from data.bucket_path import AnyPath
from data.checked_array import CheckedArray, ChecksumWriter, checksum_path, make_seed
from data.config import DataConfig, Packing, SourceConfig
from data.files import DataError, cannot_lock
from data.packing import (
    CONVERSATION_PACK_VERSION,
    PACK_VERSION,
    PACKERS,
    PackedRows,
    RowSpans,
    TokenSpans,
    TooLittleTextError,
    count_divided,
    count_loss_tokens,
    pack_pairs,
    split_conversations,
    split_documents,
)
from data.store import Store
from safe_files import json_digest, publish_folder, replace_file

# Part of the name of a folder; raise it when the files change.
FORMAT = 2
PACKS, INDEX, ROWS = "packs", "pack.json", "rows.bin"
# Bytes of a block that has a checksum: a row is a few dozen bytes.
BLOCK_BYTES = 512
_BUILDING, _LOCK = "building-", "lock"
# A younger temporary folder is never deleted, and an older one even if it has no lock.
_NEW_SECONDS, _ABANDONED_SECONDS = 60.0, 7 * 86400.0


@dataclass(frozen=True, kw_only=True)
class PackingInfo:
    """Counts of a packed store; the names are keys of pack.json."""

    train_rows: int
    train_tokens: int
    padding: int
    """Places of training rows without a token."""
    cut_documents: int
    """Training documents that continue in another row."""
    held_out_rows: int
    held_out_tokens: int
    held_out_learned: int
    """Targets with loss_mask 1 in the held-out rows."""
    held_out_conversations: int = 0
    """Whole conversations in the held-out rows; 0 for stores of text, and of preference pairs."""
    once_divided: int = 0
    """Conversations of which earlier versions of this program could hold out a part."""

    @property
    def efficiency(self) -> float:
        """Share of the places of training rows with a token."""
        return self.train_tokens / (self.train_tokens + self.padding)


@dataclass(frozen=True)
class StoredRows:
    """Rows on disk; each read is checked."""

    array: CheckedArray
    num_rows: int
    index_begin: int
    """Where the index begins in `array`."""

    def spans(self, row: int) -> RowSpans:
        """Return the spans of a row. Raises: DataError; OSError."""
        place = self.index_begin + row
        entry, following = self.array[place : place + 2].tolist()
        begin = self.index_begin + self.num_rows + 1
        part = self.array[begin + (entry & ~1) : begin + (following & ~1)].reshape(-1, 2)
        return RowSpans(part[:, 0], part[:, 1], bool(entry & 1))


@dataclass(frozen=True)
class PackedStore:
    """Training and held-out rows of a store, in a folder, by which it pickles."""

    folder: AnyPath
    train: StoredRows
    held_out: StoredRows
    info: PackingInfo
    cache: BlockCache | None = None
    """Cache of what is read from a bucket."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open_rows, (self.folder, self.cache)

    def refresh(self) -> None:
        """Look for rows of shards that were added, as `ShardedRows` do: there are none."""

    def verify(self) -> None:
        """Read everything. Raises: DataError."""
        for _ in self.train.array.chunks():  # of both splits; each chunk is checked
            pass


@dataclass(frozen=True)
class PackSettings:
    """Settings that decide the rows of a store; they are keys of the section `data`."""

    row_length: int
    packing: Packing
    eval_fraction: float

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the code and of the files."""
        return CONVERSATION_PACK_VERSION, PACK_VERSION, FORMAT

    def pack_name(self, store: Store) -> str:
        """Return the name of the folder with the packed rows of a store."""
        version = CONVERSATION_PACK_VERSION if self._are_conversations(store) else PACK_VERSION
        identity = store.digest, self.row_length, self.packing, self.eval_fraction, version, FORMAT
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]

    def _are_conversations(self, store: Store) -> bool:
        return self.packing != "pairs" and store.loss_mask is not None

    def pack(self, store: Store) -> tuple[PackedRows, PackedRows, PackingInfo]:
        """Return training rows, held-out rows, and their counts.

        Raises: DataError when the store is too small to be split.
        """
        ends, row_length, eval_fraction = store.ends[:], self.row_length, self.eval_fraction
        has_conversations = self._are_conversations(store)
        if self.packing == "pairs":
            train, held_out = pack_pairs(ends, row_length, eval_fraction)
            held_spans = TokenSpans(held_out.start, held_out.length)
        else:
            split = split_conversations if has_conversations else split_documents
            train_spans, held_spans = split(ends, eval_fraction)
            pack = PACKERS[self.packing]
            train, held_out = pack(train_spans, row_length), pack(held_spans, row_length)
        info = _describe(store, train, held_out, held_spans, row_length)
        if has_conversations:
            info = replace(
                info,
                held_out_conversations=len(held_spans.start),
                once_divided=count_divided(ends, eval_fraction),
            )
        if eval_fraction and not info.held_out_learned:
            raise TooLittleTextError(
                f"none of the {info.held_out_tokens} held-out tokens contributes to the loss; give "
                f"more text, or change data.eval_fraction={eval_fraction:g}"
            )
        return train, held_out, info


def settings_of(
    config: DataConfig, source: SourceConfig, *, is_evaluation: bool
) -> list[PackSettings]:
    """Return the settings for every length of rows of a run, the largest first.

    Of eval_files, only rows of the largest length are read.
    """
    lengths = sorted({*config.row_lengths.values()}, reverse=True)
    fraction = config.eval_fraction_of(source)
    return [
        PackSettings(length, config.packing, fraction)
        for length in (lengths[:1] if is_evaluation else lengths)
    ]


def open_packed_store(store: Store, settings: PackSettings, cache: Path) -> PackedStore:
    """Open the packed rows of a store, or pack them on first use.

    Raises: DataError when the store is too small to be split, or the cached files are damaged.
    """
    return open_rows(write_rows(store, settings, cache / PACKS))


def write_rows(store: Store, settings: PackSettings, packs: Path) -> Path:
    """Pack the rows of a store into a folder in `packs`, unless they are there; return the folder.

    Raises: DataError when the store is too small to be split.
    """
    folder = packs / settings.pack_name(store)
    _remove_leftovers(packs)
    if not folder.exists():
        _write_folder(folder, *settings.pack(store))
    return folder


def _describe(
    store: Store, train: PackedRows, held_out: PackedRows, held: TokenSpans, row_length: int
) -> PackingInfo:
    ends = store.ends[:]
    if store.loss_mask is None:
        held_out_learned = int((held.length - 1).sum())
    else:
        counts = count_loss_tokens(store.loss_mask, held.start + 1, held.start + held.length)
        held_out_learned = int(counts.sum())
    train_tokens = int(train.length.sum(dtype=np.int64))
    cut = np.searchsorted(ends, train.start[train.row_begin[1:][train.goes_on] - 1], side="right")
    return PackingInfo(
        train_rows=train.num_rows,
        train_tokens=train_tokens,
        padding=train.num_rows * row_length - train_tokens,
        cut_documents=int(
            np.count_nonzero(np.diff(cut, prepend=-1))
        ),  # rows filled by one document ascend
        held_out_rows=held_out.num_rows,
        held_out_tokens=int(held.length.sum()),
        held_out_learned=held_out_learned,
    )


def _write_folder(folder: Path, train: PackedRows, held_out: PackedRows, info: PackingInfo) -> None:
    """Write the folder under a temporary name, and rename it when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=_BUILDING, dir=folder.parent) as building,
        open(Path(building) / _LOCK, "w") as lock,
    ):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise cannot_lock(lock.name, error) from error
        made = Path(building) / folder.name
        made.mkdir()
        seed = make_seed(folder.name, ROWS)
        with (
            open(made / ROWS, "wb") as file,
            ChecksumWriter(checksum_path(made / ROWS), BLOCK_BYTES, seed) as checksums,
        ):
            for part in (*_as_stored(train), *_as_stored(held_out)):
                file.write(part.data)
                checksums.update(part)
            checksums.finish()
            file.flush()
            os.fsync(file.fileno())
        counts = {"train": _counts(train), "held_out": _counts(held_out)}
        record = {"name": folder.name, "info": asdict(info), "rows": counts}
        text = json.dumps({"sha256": json_digest(record), **record}, indent=1)
        replace_file(made / INDEX, text)
        try:
            publish_folder(made, folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same content
                raise


def _remove_leftovers(packs: Path) -> None:
    """Delete temporary folders of killed processes; a running one holds the lock in its folder."""
    for path in packs.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):  # another process deletes it, or holds its lock
            age = time.time() - path.stat().st_mtime
            if age < _NEW_SECONDS:  # its lock may be about to be taken
                continue
            if age < _ABANDONED_SECONDS:
                with open(path / _LOCK, "r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)


def _as_stored(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the index and the spans of rows, as the module docstring lays them out."""
    index = 2 * rows.row_begin.astype("<i8")
    index[:-1] += rows.goes_on
    return index, np.stack([rows.start, rows.length], axis=1, dtype="<i8")


def _counts(rows: PackedRows) -> list[int]:
    return [rows.num_rows, len(rows.start)]


def open_rows(
    folder: AnyPath,
    cache: BlockCache | None = None,
    *,
    keep: bool = True,
    remedy: str | None = None,
) -> PackedStore:
    """Open packed rows.

    cache: of what is read from a bucket. keep: keep a small index in memory, and so check it now.
        remedy: what to do about damage.
    Raises: DataError when they are damaged.
    """
    remedy = remedy or f"delete the folder {folder}, the next run makes it again"
    index = folder / INDEX
    try:
        record = json.loads(index.read_bytes())
        digest = record.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index}: not the index of a packed store: {error}; {remedy}") from error
    if digest != json_digest(record) or record["name"] != folder.name:
        raise DataError(f"{index}: its content differs from what was written; {remedy}")
    counts = record["rows"]
    sizes = {split: rows + 1 + 2 * spans for split, (rows, spans) in counts.items()}
    array = CheckedArray(
        folder / ROWS,
        "<i8",
        sum(sizes.values()),
        remedy=remedy,
        block_bytes=BLOCK_BYTES,
        seed=make_seed(folder.name, ROWS),
        cache=cache,
    )
    if keep:
        array.load()
    train = StoredRows(array, counts["train"][0], 0)
    held_out = StoredRows(array, counts["held_out"][0], sizes["train"])
    try:
        info = PackingInfo(**record["info"])
    except TypeError as error:
        raise DataError(f"{index}: another version of this program wrote it; {remedy}") from error
    return PackedStore(folder, train, held_out, info, cache)
