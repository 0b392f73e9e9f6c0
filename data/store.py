"""Token store: the documents of a source on disk, in order, memory-mapped.

A store is a folder of little-endian arrays and one description, `store.json`:
    tokens.bin     uint16 or uint32 (T,)  token ids; the end of text closes every document
    ends.bin       int64 (D,)             where the tokens of each document end
    num_bytes.bin  int64 (D,)             UTF-8 bytes of each document that contribute to the loss
    learned.bin    uint8 (T,)             loss mask; missing if every token contributes
`store_writer.py` writes it under a temporary name and renames it when it is complete.
"""

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, NonNegativeInt, PositiveInt

from data.files import DataError
from safe_files import replace_file

VERSION: Literal[1] = 1
INFO = "store.json"
TOKENS, ENDS, NUM_BYTES, LOSS_MASK = "tokens.bin", "ends.bin", "num_bytes.bin", "learned.bin"
BLOCK_BYTES = 2**24


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: "1 row", "2,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Skipped(BaseModel, frozen=True, extra="forbid"):
    """Documents that were left out for one reason."""

    count: PositiveInt
    examples: tuple[str, ...]


class InputFile(BaseModel, frozen=True, extra="forbid"):
    """An input file."""

    path: str
    size: NonNegativeInt


class StoredFile(InputFile, frozen=True, extra="forbid"):
    """Tokens of an input file. digest: SHA-256 of its part of tokens.bin."""

    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    digest: str


class Encoding(BaseModel, frozen=True, extra="forbid"):
    """Additions of a store to the text of its documents.

    bos_id: id before every document; None: none. chat_template: key of the template of chats.
    is_paired: documents alternate between the chosen and the rejected conversation of a pair.
    """

    bos_id: NonNegativeInt | None
    chat_template: str
    is_paired: bool = False


class StorePlan(BaseModel, frozen=True, extra="forbid"):
    """Description of a store before it is written.

    key: hash of everything that decides the content. source: settings of the source, for a person.
    """

    key: str
    tokenizer: str
    tokenizer_digest: str
    vocab_size: PositiveInt
    eos_id: NonNegativeInt
    source: dict[str, Any]
    files: tuple[InputFile, ...]
    encoding: Encoding

    @property
    def dtype(self) -> np.dtype:
        """Type of tokens.bin: the smaller one that holds the vocabulary."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")


class StoreInfo(BaseModel, frozen=True, extra="forbid"):
    """Description of a complete store: the content of store.json.

    digests: SHA-256 of each array file. digest: SHA-256 of what sha256sum prints for these files,
    which identifies tokens, document ends and masks independently of the folder. encoding: None in
    stores that are older than this entry.
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
    encoding: Encoding | None = None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each array file."""
        return array_sizes(
            self.num_tokens, self.num_documents, self.dtype, LOSS_MASK in self.digests
        )


def array_sizes(tokens: int, documents: int, dtype: Any, masked: bool) -> dict[str, int]:
    """Return the bytes of each array file. masked: whether there is a loss mask."""
    sizes = {
        TOKENS: tokens * np.dtype(dtype).itemsize,
        ENDS: documents * 8,
        NUM_BYTES: documents * 8,
    }
    return {**sizes, LOSS_MASK: tokens} if masked else sizes


class Store:
    """Complete store, read-only; the module docstring lists its arrays.

    Opening reads store.json and the index of documents, never the tokens. It pickles as its folder.
    Raises: DataError when a file is missing, truncated or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.info = _read_info(self.folder)
        for name, expected in self.info.sizes().items():
            check_size(self.folder, name, expected, exact=True)
        for name in (ENDS, NUM_BYTES):
            self._check_digest(name)
        self.tokens = self._map_tokens(TOKENS, np.dtype(self.info.dtype).newbyteorder("<"))
        self.ends = np.memmap(self.folder / ENDS, "<i8", "r")
        self.num_bytes = np.memmap(self.folder / NUM_BYTES, "<i8", "r")
        self.loss_mask: np.memmap | None = None
        if LOSS_MASK in self.info.digests:
            self.loss_mask = self._map_tokens(LOSS_MASK, np.dtype(np.uint8))

    def _map_tokens(self, name: str, dtype: np.dtype) -> np.memmap:
        array = np.memmap(self.folder / name, dtype, "r")
        assert isinstance(array.base, mmap.mmap)
        # Rows are read in random order, so that readahead would read a cold disk many times.
        array.base.madvise(mmap.MADV_RANDOM)
        return array

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.folder,)

    @property
    def digest(self) -> str:
        """Identity of tokens, document ends and loss mask."""
        return self.info.digest

    def verify(self) -> None:
        """Read everything. Raises: DataError that names the input file whose tokens changed."""
        begin = 0
        with open(self.folder / TOKENS, "rb") as tokens:
            for file in self.info.files:
                digest = hashlib.sha256()
                for block in read_blocks(tokens, file.num_tokens * self.tokens.itemsize):
                    digest.update(block)
                if digest.hexdigest() != file.digest:
                    raise DataError(
                        f"{self.folder / TOKENS}: tokens {begin} to {begin + file.num_tokens} of "
                        f"{file.path} differ from what was written; {remedy(self.folder)}"
                    )
                begin += file.num_tokens
        for name in self.info.digests:
            if name != TOKENS:  # covered by the digests of the input files
                self._check_digest(name)

    def _check_digest(self, name: str) -> None:
        with open(self.folder / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        written = self.info.digests[name]
        if found != written:
            raise DataError(
                f"{self.folder / name}: its SHA-256 is {found[:16]}, expected {written[:16]}; "
                f"{remedy(self.folder)}"
            )

    def summary(self) -> str:
        """Return one line with the size of the store and the skipped documents."""
        info, num_bytes = self.info, int(self.num_bytes.sum())
        documents = count_of(info.num_documents, "document")
        if info.encoding is not None and info.encoding.is_paired:
            documents = count_of(info.num_documents // 2, "preference pair")
        line = f"{documents}, {count_of(info.num_tokens, 'token')}, " + (
            f"{num_bytes / info.num_tokens:.2f} bytes per token"
            if self.loss_mask is None
            else f"{num_bytes:,} bytes of text in the loss"
        )
        skipped = [
            f"{skip.count:,} {kind} (first: {skip.examples[0]})"
            for kind, skip in info.skipped.items()
        ]
        return f"{line}; skipped: {', '.join(skipped)}" if skipped else line


def remedy(folder: Path) -> str:
    """Return what to do about a damaged store."""
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
        raise DataError(
            f"{folder} has no {INFO}, so it is not a complete store; prepare it"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is damaged; {remedy(folder)}") from error
    if version != VERSION:
        rule = f"{path}: version {version!r}, but this program reads {VERSION}"
        raise DataError(f"{rule}; {remedy(folder)}")
    raise DataError(f"{path}: its checksum does not match; {remedy(folder)}")


def write_info(folder: Path, info: StoreInfo) -> None:
    """Write store.json with its checksum."""
    tree = info.model_dump(mode="json")
    text = json.dumps({**tree, "checksum": _checksum(tree)}, indent=1) + "\n"
    replace_file(folder / INFO, text)


def _checksum(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def check_size(folder: Path, name: str, expected: int, *, exact: bool) -> None:
    """Raise DataError when a file is missing or too small, or, if `exact`, too large."""
    path = folder / name
    found = path.stat().st_size if path.is_file() else None
    if found is None or found < expected or (exact and found != expected):
        what = "is missing" if found is None else f"has {found} bytes"
        raise DataError(f"{path} {what}, expected {expected} bytes; {remedy(folder)}")


def read_blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes, or fewer if the file ends before."""
    while size > 0 and (block := file.read(min(size, BLOCK_BYTES))):
        yield block
        size -= len(block)
