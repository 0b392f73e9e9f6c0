"""Packed rows of a store, cached on disk: made once, then verified and opened by every run.

A packed store is a folder under `cache_dir/packs` with one file per array and an index with their
sizes and digests. Its name is a hash of everything that decides its content.
"""

import glob
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.config import Packing
from data.files import DataError
from data.packing import (
    CONVERSATION_PACK_VERSION,
    PACK_VERSION,
    PACKERS,
    PackedRows,
    TokenSpans,
    count_divided,
    count_loss_tokens,
    pack_pairs,
    split_conversations,
    split_documents,
)
from data.store import Store
from safe_files import publish_folder, replace_file


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
class PackedStore:
    """Training and held-out rows of a store, memory-mapped; pickles as its folder."""

    folder: Path
    train: PackedRows
    held_out: PackedRows
    info: PackingInfo

    def __reduce__(self) -> tuple[Callable[[Path], "PackedStore"], tuple[Path]]:
        return _open_folder, (self.folder,)


def open_packed_store(
    store: Store, *, row_length: int, packing: Packing, eval_fraction: float, cache: Path
) -> PackedStore:
    """Open the packed rows of a store, or pack them on first use.

    Raises: DataError when the store is too small to be split, or the cached files are damaged.
    """
    has_conversations = packing != "pairs" and store.loss_mask is not None
    version = CONVERSATION_PACK_VERSION if has_conversations else PACK_VERSION
    identity = store.digest, row_length, packing, eval_fraction, version
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    folder = cache / "packs" / name
    _remove_leftovers(folder.parent)
    if not folder.exists():
        if packing == "pairs":
            train, held_out = pack_pairs(store.ends, row_length, eval_fraction)
            held_spans = TokenSpans(held_out.start, held_out.length)
        else:
            split = split_conversations if has_conversations else split_documents
            train_spans, held_spans = split(store.ends, eval_fraction)
            pack = PACKERS[packing]
            train, held_out = pack(train_spans, row_length), pack(held_spans, row_length)
        info = _describe(store, train, held_out, held_spans, row_length)
        if has_conversations:
            info = replace(
                info,
                held_out_conversations=len(held_spans.start),
                once_divided=count_divided(store.ends, eval_fraction),
            )
        if eval_fraction and not info.held_out_learned:
            raise DataError(
                f"none of the {info.held_out_tokens} held-out tokens contributes to the loss; give "
                f"more text, or change data.eval_fraction={eval_fraction:g}"
            )
        _write_folder(folder, train, held_out, info)
    return _open_folder(folder)


def _describe(
    store: Store, train: PackedRows, held_out: PackedRows, held: TokenSpans, row_length: int
) -> PackingInfo:
    ends = np.asarray(store.ends)
    if store.loss_mask is None:
        held_out_learned = int((held.length - 1).sum())
    else:
        mask = np.asarray(store.loss_mask)
        counts = count_loss_tokens(mask, held.start + 1, held.start + held.length)
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


def _array_names() -> list[tuple[str, str]]:
    return [(split, array.name) for split in ("train", "held_out") for array in fields(PackedRows)]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write_folder(folder: Path, train: PackedRows, held_out: PackedRows, info: PackingInfo) -> None:
    """Write the folder under a temporary name, and rename it when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    splits = {"train": train, "held_out": held_out}
    prefix = f"{_temporary_prefix()}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as building:
        made = Path(building) / folder.name
        made.mkdir()
        files = {}
        for split, name in _array_names():
            path = made / f"{split}_{name}.npy"
            np.save(path, getattr(splits[split], name))
            files[path.name] = {"size": path.stat().st_size, "sha256": _digest(path)}
        record = {"info": asdict(info), "files": files}
        text = json.dumps({"sha256": _digest_of(record), **record}, indent=1)
        replace_file(made / "pack.json", text)
        try:
            publish_folder(made, folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same content
                raise


def _temporary_prefix() -> str:
    """Return the first part of the names of temporary folders of this machine."""
    return f"building-{socket.gethostname()}-"


def _remove_leftovers(packs: Path) -> None:
    """Delete the temporary folders that killed processes of this machine left."""
    for path in packs.glob(f"{glob.escape(_temporary_prefix())}*"):
        process = path.name.removeprefix(_temporary_prefix()).partition("-")[0]
        if process.isdecimal() and not _is_running(int(process)):
            shutil.rmtree(path, ignore_errors=True)  # another process may delete it, too


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def _open_folder(folder: Path) -> PackedStore:
    def damaged(path: Path, what: str) -> DataError:
        return DataError(f"{path}: {what}; delete the folder {folder}, the next run makes it again")

    index = folder / "pack.json"
    try:
        record = json.loads(index.read_text())
        digest = record.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(index, f"not the index of a packed store: {error}") from error
    if digest != _digest_of(record):
        raise damaged(index, "its content differs from what was written")
    arrays: dict[str, dict[str, np.ndarray]] = {"train": {}, "held_out": {}}
    for split, name in _array_names():
        path = folder / f"{split}_{name}.npy"
        written = record["files"][path.name]
        size = path.stat().st_size if path.exists() else 0
        if size != written["size"]:
            raise damaged(path, f"has {size} bytes, expected {written['size']}")
        if _digest(path) != written["sha256"]:
            raise damaged(path, "its content differs from what was written")
        # A plain view, since every slice of a memmap costs a microsecond.
        arrays[split][name] = np.load(path, mmap_mode="r").view(np.ndarray)
    train, held_out = (PackedRows(**arrays[split]) for split in ("train", "held_out"))
    try:
        info = PackingInfo(**record["info"])
    except TypeError as error:
        raise damaged(index, "another version of this program wrote it") from error
    return PackedStore(folder, train, held_out, info)
