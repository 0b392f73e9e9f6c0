"""Tokens on disk: every document once, in order, memory-mapped.

A store is a folder of little-endian arrays and one description, `store.json`:
    tokens.bin     uint16 or uint32 (T,)  token ids; the end of text closes every document
    ends.bin       int64 (D,)             where the tokens of each document end
    num_bytes.bin  int64 (D,)             UTF-8 bytes of the text of each document that is learned
    learned.bin    uint8 (T,)             1: a token is learned; only if some is not (prompts)
It is written under another name, continued after a kill, and renamed when it is whole: a half store
is never read. What the tokens were made of is prepare.py's matter; here are only arrays.
"""

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, NonNegativeInt, PositiveInt

from data.source import DataError

VERSION: Literal[1] = 1
INFO, JOURNAL = "store.json", "journal.jsonl"
TOKENS, ENDS, NUM_BYTES, LEARNED = "tokens.bin", "ends.bin", "num_bytes.bin", "learned.bin"
MAX_EXAMPLES = 5
_BLOCK = 2**24


class Skipped(BaseModel, frozen=True, extra="forbid"):
    """Documents of one kind that were left out."""

    count: PositiveInt
    examples: tuple[str, ...]


def add_skipped(total: dict[str, Skipped], more: Mapping[str, Skipped]) -> None:
    """Adds `more` to `total` by kind; the first examples of each are kept."""
    for kind, skip in more.items():
        before = total.get(kind)
        total[kind] = Skipped(
            count=skip.count + (before.count if before else 0),
            examples=((*before.examples, *skip.examples) if before else skip.examples)[
                :MAX_EXAMPLES
            ],
        )


class InputFile(BaseModel, frozen=True, extra="forbid"):
    """A file that was read."""

    path: str
    size: NonNegativeInt


class StoredFile(InputFile, frozen=True, extra="forbid"):
    """What became of it. digest: sha256 of its tokens' bytes in tokens.bin."""

    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    digest: str


class StorePlan(BaseModel, frozen=True, extra="forbid"):
    """What is known before the first token. key: identity of everything that decides the content.

    source: the settings as written, for a reader.
    """

    key: str
    tokenizer: str
    tokenizer_digest: str
    vocab_size: PositiveInt
    eos_id: NonNegativeInt
    source: dict[str, Any]
    files: tuple[InputFile, ...]

    @property
    def dtype(self) -> np.dtype:
        """Of tokens.bin: the smaller one that holds the vocabulary."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


class StoreInfo(BaseModel, frozen=True, extra="forbid"):
    """The description of a whole store.

    digests: sha256 of each array file. digest: of those, in the form that sha256sum prints;
    identity of tokens, borders and masks, wherever they lie.
    """

    version: Literal[1]
    key: str
    tokenizer: str
    tokenizer_digest: str
    vocab_size: PositiveInt
    eos_id: NonNegativeInt
    dtype: Literal["uint16", "uint32"]
    num_tokens: PositiveInt
    num_documents: PositiveInt
    digest: str
    digests: dict[str, str]
    skipped: dict[str, Skipped]
    source: dict[str, Any]
    files: tuple[StoredFile, ...]

    def sizes(self) -> dict[str, int]:
        """Bytes of each array file."""
        return _sizes(self.num_tokens, self.num_documents, self.dtype, LEARNED in self.digests)


def _sizes(tokens: int, documents: int, dtype: Any, masked: bool) -> dict[str, int]:
    sizes = {
        TOKENS: tokens * np.dtype(dtype).itemsize,
        ENDS: documents * 8,
        NUM_BYTES: documents * 8,
    }
    return {**sizes, LEARNED: tokens} if masked else sizes


class Store:
    """A whole store, read-only: see the module for its arrays.

    Opening reads store.json and the index of documents, never the tokens. Pickles by its folder.
    Raises: DataError when anything is missing, cut short, or not what was written.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.info = _read_info(self.folder)
        for name, expected in self.info.sizes().items():
            _check_size(self.folder, name, expected, exact=True)
        for name in (ENDS, NUM_BYTES):
            self._check_digest(name)
        self.tokens = self._map_rows(TOKENS, np.dtype(self.info.dtype).newbyteorder("<"))
        self.ends = np.memmap(self.folder / ENDS, "<i8", "r")
        self.num_bytes = np.memmap(self.folder / NUM_BYTES, "<i8", "r")
        self.learned: np.memmap | None = None
        if LEARNED in self.info.digests:
            self.learned = self._map_rows(LEARNED, np.dtype(np.uint8))

    def _map_rows(self, name: str, dtype: np.dtype) -> np.memmap:
        array = np.memmap(self.folder / name, dtype, "r")
        assert isinstance(array.base, mmap.mmap)
        # Rows are read in random order: to read ahead would read a cold disk many times over.
        array.base.madvise(mmap.MADV_RANDOM)
        return array

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.folder,)

    @property
    def digest(self) -> str:
        """Identity of tokens, borders and masks."""
        return self.info.digest

    def verify(self) -> None:
        """Reads everything. Raises: DataError that names the input file whose tokens changed."""
        begin = 0
        with open(self.folder / TOKENS, "rb") as tokens:
            for file in self.info.files:
                digest = hashlib.sha256()
                for block in _blocks(tokens, file.num_tokens * self.tokens.itemsize):
                    digest.update(block)
                if digest.hexdigest() != file.digest:
                    raise DataError(
                        f"{self.folder / TOKENS}: tokens {begin} to {begin + file.num_tokens} of "
                        f"{file.path} are not those that were written; {_remedy(self.folder)}"
                    )
                begin += file.num_tokens
        for name in self.info.digests:
            if name != TOKENS:  # the input files cover it
                self._check_digest(name)

    def _check_digest(self, name: str) -> None:
        with open(self.folder / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        written = self.info.digests[name]
        if found != written:
            raise DataError(
                f"{self.folder / name}: its sha256 {found[:16]} is not {written[:16]} of what was "
                f"written; {_remedy(self.folder)}"
            )

    def summary(self) -> str:
        """One line: how much there is, and what was left out."""
        info, num_bytes = self.info, int(self.num_bytes.sum())
        line = f"{info.num_documents:,} documents, {info.num_tokens:,} tokens, " + (
            f"{num_bytes / info.num_tokens:.2f} bytes per token"
            if self.learned is None
            else f"{num_bytes:,} bytes of learned text"
        )
        skipped = [
            f"{skip.count:,} {kind} (first: {skip.examples[0]})"
            for kind, skip in info.skipped.items()
        ]
        return f"{line}; skipped: {', '.join(skipped)}" if skipped else line


def _remedy(folder: Path) -> str:
    return f"delete {folder} and prepare the data again"


def _read_info(folder: Path) -> StoreInfo:
    path = folder / INFO
    try:
        tree = json.loads(path.read_bytes())
        version = tree["version"]
        checksum = tree.pop("checksum")
        if version == VERSION and checksum == _checksum(tree):
            return StoreInfo.model_validate(tree)
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no {INFO}, so it is no whole store; prepare it") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is damaged; {_remedy(folder)}") from error
    if version != VERSION:
        law = f"{path}: version {version!r}, but this program reads {VERSION}"
        raise DataError(f"{law}; {_remedy(folder)}")
    raise DataError(f"{path}: its checksum does not hold; {_remedy(folder)}")


def write_info(folder: Path, info: StoreInfo) -> None:
    """Writes store.json with a checksum of its own."""
    tree = info.model_dump(mode="json")
    with open(folder / INFO, "w", encoding="utf-8") as out:
        out.write(json.dumps({**tree, "checksum": _checksum(tree)}, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())


def _checksum(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _check_size(folder: Path, name: str, expected: int, *, exact: bool) -> None:
    path = folder / name
    found = path.stat().st_size if path.is_file() else None
    if found is None or found < expected or (exact and found != expected):
        what = "is missing" if found is None else f"has {found} bytes"
        raise DataError(f"{path} {what}, expected {expected} bytes; {_remedy(folder)}")


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The next `size` bytes, or fewer if the file ends before."""
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        yield block
        size -= len(block)


@dataclass(frozen=True)
class Part:
    """Documents of one input file: tokens (t,) of the store's dtype, lengths (d,) in tokens,
    num_bytes (d,), learned (t,) bool or None: all of them."""

    path: str
    tokens: np.ndarray
    lengths: np.ndarray
    num_bytes: np.ndarray
    learned: np.ndarray | None = None


class _Line(BaseModel, frozen=True, extra="forbid"):
    """A unit in the journal. parts: path, tokens, documents. digest: of the store up to here."""

    unit: str
    parts: tuple[tuple[str, int, int], ...]
    masked: bool
    digest: str
    skipped: dict[str, Skipped]


@dataclass
class _Input:
    """What is written of one input file."""

    num_tokens: int = 0
    num_documents: int = 0
    digest: Any = field(default_factory=hashlib.sha256)


class StoreWriter:
    """Writes a store unit by unit into FOLDER.building; after a kill, opening continues there.

    A unit is on disk before its line in the journal is. units: keys of those that are done. One
    process at a time. After an exception from `append`, close it; a new one continues.
    Raises: DataError when FOLDER.building belongs to another plan, or is not what was written.
    """

    def __init__(self, folder: Path, plan: StorePlan):
        self.folder, self.plan = folder, plan
        self.building = folder.with_name(f"{folder.name}.building")
        self.units: list[str] = []
        self.num_tokens = self.num_documents = 0
        self._skipped: dict[str, Skipped] = {}
        self._inputs = {file.path: _Input() for file in plan.files}
        self._digests: dict[str, Any] = {}
        self._files: dict[str, BinaryIO] = {}
        self.building.mkdir(parents=True, exist_ok=True)
        lines, size = self._read_journal()
        masked = bool(lines) and lines[-1].masked
        self._restore(lines, masked)
        with contextlib.ExitStack() as stack:
            for name, length in self._sizes(masked).items():
                self._files[name] = stack.enter_context(open(self.building / name, "ab"))
                os.truncate(self.building / name, length)
            self._journal = stack.enter_context(open(self.building / JOURNAL, "ab"))
            os.truncate(self.building / JOURNAL, size)
            if not size:
                self._log(json.dumps({"version": VERSION, "key": plan.key}))
            _sync_folder(self.building)
            self._stack = stack.pop_all()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def append(self, unit: str, parts: Sequence[Part], skipped: Mapping[str, Skipped]) -> None:
        """Writes a unit's documents and accounts for what it left out. Raises: OSError."""
        for part in parts:
            self._append_part(part)
        add_skipped(self._skipped, skipped)
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        line = _Line(
            unit=unit,
            parts=tuple((part.path, len(part.tokens), len(part.lengths)) for part in parts),
            masked=LEARNED in self._files,
            digest=self._digest(),
            skipped=dict(skipped),
        )
        self._log(line.model_dump_json())
        self.units.append(unit)

    def finish(self) -> Store:
        """Describes the store and gives it its name. Raises: DataError if it holds no token."""
        if not self.num_tokens:
            left_out = ", ".join(f"{skip.count} {kind}" for kind, skip in self._skipped.items())
            raise DataError(
                f"{self._whole_source()}: no document has a token ({left_out or 'none found'}); "
                "give files with text"
            )
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
            skipped=self._skipped,
            files=tuple(files),
        )
        write_info(self.building, info)
        for name, size in info.sizes().items():  # locks that do not hold let two write at once
            _check_size(self.building, name, size, exact=True)
        _sync_folder(self.building)
        os.rename(self.building, self.folder)
        _sync_folder(self.folder.parent)
        remove_journal(self.folder)
        return Store(self.folder)

    def discard(self) -> None:
        """Removes what is written: nothing can continue it."""
        self._stack.close()
        for name in (*self._files, JOURNAL):
            (self.building / name).unlink()
        self.building.rmdir()

    def _whole_source(self) -> str:
        files = self.plan.files
        return files[0].path if len(files) == 1 else f"{len(files)} files of {files[0].path} ..."

    def _append_part(self, part: Part) -> None:
        tokens, lengths, mask = part.tokens, part.lengths, part.learned
        assert tokens.dtype == self.plan.dtype and lengths.sum() == len(tokens)
        assert len(part.num_bytes) == len(lengths) and (mask is None or len(mask) == len(tokens))
        if mask is not None and LEARNED not in self._files and not mask.all():
            path = self.building / LEARNED
            self._files[LEARNED] = self._stack.enter_context(open(path, "wb"))
            self._digests[LEARNED] = hashlib.sha256()
            for begin in range(0, self.num_tokens, _BLOCK):
                count = min(_BLOCK, self.num_tokens - begin)
                self._write(LEARNED, np.ones(count, np.uint8))
        if LEARNED in self._files:
            mask = np.ones(len(tokens), bool) if mask is None else mask
            self._write(LEARNED, mask.astype(np.uint8))
        self._write(TOKENS, tokens)
        self._write(ENDS, (self.num_tokens + np.cumsum(lengths)).astype("<i8"))
        self._write(NUM_BYTES, part.num_bytes.astype("<i8"))
        state = self._inputs[part.path]
        state.digest.update(np.ascontiguousarray(tokens))
        self._count(part.path, len(tokens), len(lengths))

    def _write(self, name: str, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self._files[name].write(array.data)
        self._digests[name].update(array)

    def _count(self, path: str, tokens: int, documents: int) -> None:
        state = self._inputs[path]
        state.num_tokens += tokens
        state.num_documents += documents
        self.num_tokens += tokens
        self.num_documents += documents

    def _sizes(self, masked: bool) -> dict[str, int]:
        return _sizes(self.num_tokens, self.num_documents, self.plan.dtype, masked)

    def _digest(self) -> str:
        """Of the files in the form that sha256sum prints."""
        lines = (f"{digest.hexdigest()}  {name}\n" for name, digest in self._digests.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _log(self, line: str) -> None:
        self._journal.write(line.encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _read_journal(self) -> tuple[list[_Line], int]:
        """Its whole lines after the first, and their bytes; a torn last line counts as none."""
        path = self.building / JOURNAL
        *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if not whole:
            return [], 0
        try:
            header = json.loads(whole[0])
            lines = [_Line.model_validate_json(line) for line in whole[1:]]
            is_ours = (header["version"], header["key"]) == (VERSION, self.plan.key)
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path} is damaged; {_remedy(self.building)}") from error
        if not is_ours:
            raise DataError(
                f"{self.building} is the beginning of a store of other files or settings; "
                "delete it, or choose another folder"
            )
        return lines, sum(len(line) + 1 for line in whole)

    def _restore(self, lines: Sequence[_Line], masked: bool) -> None:
        """The state after the last line of the journal, from what is on disk."""
        names = [TOKENS, ENDS, NUM_BYTES, *([LEARNED] if masked else [])]
        self._digests = {name: hashlib.sha256() for name in names}
        if not lines:
            return
        itemsize = self.plan.dtype.itemsize
        with open(self.building / TOKENS, "rb") as file:
            for line in lines:
                self.units.append(line.unit)
                for path, tokens, documents in line.parts:
                    self._count(path, tokens, documents)
                    for block in _blocks(file, tokens * itemsize):
                        self._digests[TOKENS].update(block)
                        self._inputs[path].digest.update(block)
                add_skipped(self._skipped, line.skipped)
        for name, size in self._sizes(masked).items():
            _check_size(self.building, name, size, exact=False)
            if name != TOKENS:
                with open(self.building / name, "rb") as file:
                    for block in _blocks(file, size):
                        self._digests[name].update(block)
        if self._digest() != lines[-1].digest:
            what = "does not hold what its journal says"
            raise DataError(f"{self.building} {what}; {_remedy(self.building)}")


def remove_journal(folder: Path) -> None:
    """Of a whole store, which a kill at its very end may have left there."""
    journal = folder / JOURNAL
    if journal.exists():
        journal.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
