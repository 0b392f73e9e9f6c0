"""Writer of a token store, which survives a kill at any moment.

After each piece of input, a journal records what is on disk, with a digest. A new writer verifies
it and continues. The content of the store does not depend on how often it was interrupted.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import BaseModel

from data.checked_array import ChecksumWriter, checksum_path, make_seed
from data.config import field_key
from data.files import DataError
from data.store import (
    CHECKSUM_BLOCKS,
    ENDS,
    INFO,
    LOSS_MASK,
    NUM_BYTES,
    TOKENS,
    VERSION,
    Skipped,
    Store,
    StoredFile,
    StoreInfo,
    StorePlan,
    array_sizes,
    is_unreadable,
    remedy,
    write_info,
)
from safe_files import publish_folder, remove_partials, sync

JOURNAL, SEEN = "journal.jsonl", "seen.bin"
MAX_EXAMPLES = 5
BLOCK_BYTES = 2**24


def add_skipped(total: dict[str, Skipped], more: Mapping[str, Skipped]) -> None:
    """Add `more` to `total` by kind, keeping the first examples of each kind."""
    for kind, skip in more.items():
        before = total.get(kind)
        total[kind] = Skipped(
            count=skip.count + (before.count if before else 0),
            examples=((*before.examples, *skip.examples) if before else skip.examples)[
                :MAX_EXAMPLES
            ],
        )


@dataclass(frozen=True)
class TokenizedDocuments:
    """Documents of one input file."""

    path: str
    tokens: np.ndarray
    """(t,) of the store's dtype."""
    lengths: np.ndarray
    """(d,): tokens of each document."""
    num_bytes: np.ndarray
    """(d,): UTF-8 bytes of each document that contribute to the loss."""
    loss_mask: np.ndarray | None = None
    """(t,) bool; None: every token contributes to the loss."""
    keys: np.ndarray | None = None
    """(d,) bytes that only equal documents share; None: duplicates stay."""


class _JournalLine(BaseModel, frozen=True, extra="forbid"):
    """One piece in the journal; the names are keys on disk.

    unit: key of the piece. parts: path, tokens and documents of each file. digest: of the store up
    to here.
    """

    unit: str
    parts: tuple[tuple[str, int, int], ...]
    masked: bool
    digest: str
    skipped: dict[str, Skipped]


@dataclass
class _Written:
    """Counts and digest of what is written of one input file."""

    num_tokens: int = 0
    num_documents: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class StoreWriter:
    """Writer of a store, piece by piece, into FOLDER.building; after a kill, a new one continues.

    A piece is on disk before its line in the journal is. After an exception from `append`, close
    the writer. Only one process at a time may write.

    pieces: keys of the pieces on disk. skipped: documents that were left out so far.
    Raises: DataError when FOLDER.building belongs to another plan, or is damaged.
    """

    def __init__(self, folder: Path, plan: StorePlan):
        self.folder, self.plan = folder, plan
        self.building = folder.with_name(f"{folder.name}.building")
        self.pieces: list[str] = []
        self.num_tokens = self.num_documents = 0
        self.skipped: dict[str, Skipped] = {}
        self._inputs = {file.path: _Written() for file in plan.files}
        self._digests: dict[str, Any] = {}
        self._checksums: dict[str, ChecksumWriter] = {}
        self._files: dict[str, BinaryIO] = {}
        self.building.mkdir(parents=True, exist_ok=True)
        remove_partials(self.building / INFO)
        lines, size = self._read_journal()
        masked = bool(lines) and lines[-1].masked
        with contextlib.ExitStack() as stack:
            self._stack = stack
            self._restore(lines, masked)
            for name, length in self._sizes(masked).items():
                self._files[name] = stack.enter_context(open(self.building / name, "ab"))
                os.truncate(self.building / name, length)
            self._journal = stack.enter_context(open(self.building / JOURNAL, "ab"))
            os.truncate(self.building / JOURNAL, size)
            if not size:
                self._log(json.dumps({"version": VERSION, "key": plan.key}))
            sync(self.building)
            self._stack = stack.pop_all()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def append(
        self, piece: str, parts: Sequence[TokenizedDocuments], skipped: Mapping[str, Skipped]
    ) -> None:
        """Write the documents of a piece and count the skipped ones. Raises: OSError."""
        for part in parts:
            self._append_documents(part)
        add_skipped(self.skipped, skipped)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        line = _JournalLine(
            unit=piece,
            parts=tuple((part.path, len(part.tokens), len(part.lengths)) for part in parts),
            masked=LOSS_MASK in self._files,
            digest=self._digest(),
            skipped=dict(skipped),
        )
        self._log(line.model_dump_json())
        self.pieces.append(piece)

    def finish(self) -> Store:
        """Write store.json and rename the folder. Raises: DataError if there is no token."""
        if not self.num_tokens:
            raise DataError(self._explain_empty())
        for checksums in self._checksums.values():
            checksums.finish()
        self._stack.close()
        plan = self.plan
        files = [
            StoredFile(
                **file.model_dump(),
                num_tokens=self._inputs[file.path].num_tokens,
                num_documents=self._inputs[file.path].num_documents,
                digest=self._inputs[file.path].digest.hexdigest(),
            )
            for file in plan.files
        ]
        info = StoreInfo(
            version=VERSION,
            **plan.model_dump(exclude={"files"}),
            dtype="uint16" if plan.dtype.itemsize == 2 else "uint32",
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            digest=self._digest(),
            digests={name: digest.hexdigest() for name, digest in self._digests.items()},
            skipped=self.skipped,
            files=tuple(files),
            checksum_blocks={name: CHECKSUM_BLOCKS[name] for name in self._digests},
        )
        write_info(self.building, info)
        Store(self.building)  # where locks do not work, two processes may have written
        publish_folder(self.building, self.folder)
        remove_leftovers(self.folder)
        return Store(self.folder)

    def discard(self) -> None:
        """Delete what is written, since nothing can continue it."""
        self._stack.close()
        remove_leftovers(self.building)  # first: without a journal, the rest is written over
        for name in self._files:
            (self.building / name).unlink()
            checksum_path(self.building / name).unlink()
        self.building.rmdir()

    def _explain_empty(self) -> str:
        files = self.plan.files
        what = files[0].path if len(files) == 1 else f"{len(files)} files of {files[0].path} ..."
        skipped = ", ".join(
            f"{skip.count} {kind} (first: {skip.examples[0]})"
            for kind, skip in self.skipped.items()
        )
        remedy = "give files with text"
        if any(map(is_unreadable, self.skipped)):
            remedy = "correct the files"
        elif {*self.skipped} - {"empty"}:
            remedy = "give other filters"
        if "missing field" in self.skipped:
            remedy = f"set {field_key(str(self.plan.source.get('name')))} to a field with text"
        return f"{what}: no document has a token; skipped: {skipped or 'none'}; {remedy}"

    def _append_documents(self, part: TokenizedDocuments) -> None:
        tokens, lengths, mask = part.tokens, part.lengths, part.loss_mask
        assert tokens.dtype == self.plan.dtype and lengths.sum() == len(tokens)
        assert len(part.num_bytes) == len(lengths) and (mask is None or len(mask) == len(tokens))
        if mask is not None and LOSS_MASK not in self._files and not mask.all():
            path = self.building / LOSS_MASK
            self._files[LOSS_MASK] = self._stack.enter_context(open(path, "wb"))
            self._begin_file(LOSS_MASK)
            for begin in range(0, self.num_tokens, BLOCK_BYTES):
                count = min(BLOCK_BYTES, self.num_tokens - begin)
                self._write(LOSS_MASK, np.ones(count, np.uint8))
        if LOSS_MASK in self._files:
            mask = np.ones(len(tokens), bool) if mask is None else mask
            self._write(LOSS_MASK, mask.astype(np.uint8))
        self._write(TOKENS, tokens)
        self._write(ENDS, (self.num_tokens + np.cumsum(lengths)).astype("<i8"))
        self._write(NUM_BYTES, part.num_bytes.astype("<i8"))
        state = self._inputs[part.path]
        state.digest.update(np.ascontiguousarray(tokens))
        self._count(part.path, len(tokens), len(lengths))

    def _write(self, name: str, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self._files[name].write(array.data)
        self._account(name, array)

    def _begin_file(self, name: str) -> None:
        """Begin the digest and the checksums of a file."""
        self._digests[name] = hashlib.sha256()
        path, seed = checksum_path(self.building / name), make_seed(self.plan.key, name)
        self._checksums[name] = self._stack.enter_context(
            ChecksumWriter(path, CHECKSUM_BLOCKS[name], seed)
        )

    def _account(self, name: str, data: Any) -> None:
        """Add the next bytes of a file to its digest and its checksums."""
        self._digests[name].update(data)
        self._checksums[name].update(data)

    def _count(self, path: str, tokens: int, documents: int) -> None:
        state = self._inputs[path]
        state.num_tokens += tokens
        state.num_documents += documents
        self.num_tokens += tokens
        self.num_documents += documents

    def _sizes(self, masked: bool) -> dict[str, int]:
        return array_sizes(self.num_tokens, self.num_documents, self.plan.dtype, masked)

    def _digest(self) -> str:
        """Return the SHA-256 of what sha256sum prints for the files."""
        lines = (f"{digest.hexdigest()}  {name}\n" for name, digest in self._digests.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _log(self, line: str) -> None:
        self._journal.write(line.encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _read_journal(self) -> tuple[list[_JournalLine], int]:
        """Return the complete lines after the first, and the bytes of all complete lines."""
        path = self.building / JOURNAL
        *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if not whole:
            return [], 0
        try:
            header = json.loads(whole[0])
            lines = [_JournalLine.model_validate_json(line) for line in whole[1:]]
            is_ours = (header["version"], header["key"]) == (VERSION, self.plan.key)
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path} is damaged; {remedy(self.building)}") from error
        if not is_ours:
            raise DataError(
                f"{self.building} was begun with other files or settings; delete it, or "
                "choose another folder"
            )
        return lines, sum(len(line) + 1 for line in whole)

    def _restore(self, lines: Sequence[_JournalLine], masked: bool) -> None:
        """Restore the state after the last line of the journal, and verify what is on disk."""
        names = [TOKENS, ENDS, NUM_BYTES, *([LOSS_MASK] if masked else [])]
        for name in names:
            self._begin_file(name)
        if not lines:
            return
        itemsize = self.plan.dtype.itemsize
        with open(self.building / TOKENS, "rb") as file:
            for line in lines:
                self.pieces.append(line.unit)
                for path, tokens, documents in line.parts:
                    self._count(path, tokens, documents)
                    for block in _read_blocks(file, tokens * itemsize):
                        self._account(TOKENS, block)
                        self._inputs[path].digest.update(block)
                add_skipped(self.skipped, line.skipped)
        for name, size in self._sizes(masked).items():
            _check_size(self.building, name, size)
            if name != TOKENS:
                with open(self.building / name, "rb") as file:
                    for block in _read_blocks(file, size):
                        self._account(name, block)
        if self._digest() != lines[-1].digest:
            raise DataError(
                f"{self.building}: its files do not match its journal; {remedy(self.building)}"
            )


def remove_leftovers(folder: Path) -> None:
    """Delete what only writing needs, and a kill after the rename may have left in a store."""
    for path in (folder / JOURNAL, folder / SEEN):
        if path.exists():
            path.unlink(missing_ok=True)


def _check_size(folder: Path, name: str, expected: int) -> None:
    """Raise DataError when a file is missing or too small."""
    path = folder / name
    found = path.stat().st_size if path.is_file() else None
    if found is None or found < expected:
        what = "is missing" if found is None else f"has {found} bytes"
        raise DataError(f"{path} {what}, expected {expected} bytes; {remedy(folder)}")


def _read_blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes, or fewer if the file ends before."""
    while size > 0 and (block := file.read(min(size, BLOCK_BYTES))):
        yield block
        size -= len(block)
