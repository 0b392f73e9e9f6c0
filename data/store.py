"""Token store: the documents of a source on disk, in order, checked whenever they are read.

A store is a folder of little-endian arrays and one description, `store.json`:
    tokens.bin     uint16 or uint32 (T,)  token ids; the end of text closes every document
    ends.bin       int64 (D,)             where the tokens of each document end
    num_bytes.bin  int64 (D,)             UTF-8 bytes of each document that contribute to the loss
    learned.bin    uint8 (T,)             loss mask; missing if every token contributes
Beside each is a `.crc32` file with checksums of its blocks; see `checked_array.py`.
`store_writer.py` writes it under a temporary name and renames it when it is complete.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import BaseModel, NonNegativeInt, PositiveInt

from data.block_cache import BlockCache
from data.bucket_path import AnyPath, to_path
from data.checked_array import CheckedArray, make_seed
from data.files import DataError
from safe_files import json_digest, replace_file

VERSION: Literal[1] = 1
LEFT_OUT = "left out by "  # begins the kind of what a filter skips
INFO = "store.json"
TOKENS, ENDS, NUM_BYTES, LOSS_MASK = "tokens.bin", "ends.bin", "num_bytes.bin", "learned.bin"
# Bytes of a block that has a checksum. A block of tokens is a page of memory, so that a check reads
# no more from a disk than the row itself. Of the index, single values are read.
CHECKSUM_BLOCKS = {TOKENS: 4096, ENDS: 512, NUM_BYTES: 512, LOSS_MASK: 4096}


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: "1 row", "2,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_unreadable(kind: str) -> bool:
    """Return whether documents of this kind are skipped because they cannot be read."""
    return kind != "empty" and not kind.startswith(LEFT_OUT)


class Skipped(BaseModel, frozen=True, extra="forbid"):
    """Documents that were left out for one reason."""

    count: PositiveInt
    examples: tuple[str, ...]

    def example(self, kind: str) -> str:
        """Return the first document in parentheses, or "" for empty ones, which lose nothing."""
        return "" if kind == "empty" else f" (first: {self.examples[0]})"


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
    which identifies tokens, document ends and masks independently of the folder. encoding,
    checksum_blocks (bytes of a block that has a checksum): None in stores that are older than these
    entries.
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
    checksum_blocks: dict[str, PositiveInt] | None = None

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

    Opening reads store.json alone, and compares the sizes of all files; of a store without
    checksums it reads the index of documents too. It pickles as its folder and digest.
    Raises: DataError when a file is missing, truncated or damaged.
    """

    in_order = False
    """Whether its shards are read one after the other; only a sharded store has shards."""
    is_complete = True
    """Whether all rows can be read; a sharded store may be read while it is prepared."""
    share_there = 1.0
    """Share of the pieces of the input that can be read."""

    def __init__(self, folder: str | AnyPath, cache: BlockCache | None = None):
        """Open a store.

        folder: where it is, on a disk or in a bucket. cache: of what is read from a bucket.
        """
        self.folder, self._cache = to_path(folder), cache
        self.info = _read_info(self.folder)
        tokens = np.dtype(self.info.dtype).newbyteorder("<")
        # Not a method: with it, files would stay open until the garbage collector comes.
        describe = partial(_tokens_of, self.info.files)
        self.tokens = self._open(TOKENS, tokens, describe)
        self.ends = self._open(ENDS, "<i8", "documents {} to {}".format)
        self.num_bytes = self._open(NUM_BYTES, "<i8", "documents {} to {}".format)
        self.loss_mask: CheckedArray | None = None
        if LOSS_MASK in self.info.digests:
            self.loss_mask = self._open(LOSS_MASK, np.uint8, describe)
        if not self.has_checksums:
            for array in (self.ends, self.num_bytes):
                self._check_digest(array)

    def load_index(self) -> None:
        """Check the index of documents and keep it in memory, if it is small. Raises: DataError."""
        for array in (self.ends, self.num_bytes):
            array.load()

    def _open(self, name: str, dtype: Any, describe: Callable[[int, int], str]) -> CheckedArray:
        return CheckedArray(
            self.folder / name,
            dtype,
            self.info.sizes()[name] // np.dtype(dtype).itemsize,
            remedy=remedy(self.folder),
            block_bytes=(self.info.checksum_blocks or {}).get(name),
            seed=make_seed(self.info.key, name),
            describe=describe,
            cache=self._cache,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return open_again, (self.folder, self.digest, self._cache)

    @property
    def digest(self) -> str:
        """Identity of tokens, document ends and loss mask."""
        return self.info.digest

    @property
    def has_checksums(self) -> bool:
        """Whether damage is noticed when it is read; earlier versions wrote no checksums."""
        return self.info.checksum_blocks is not None

    def refresh(self) -> None:
        """Look for shards that were added, as a sharded store does: there are none."""

    def stores(self, limit: int | None = None) -> Iterator["Store"]:
        """Yield this store, as a sharded one yields its shards."""
        yield self

    def input_files(self) -> Iterator[str]:
        """Yield the paths of the files from which it was prepared."""
        for file in self.info.files:
            yield file.path

    def verify(self) -> None:
        """Read everything. Raises: DataError that names the input file whose tokens changed."""
        begin = 0
        for file in self.info.files:
            digest, end = hashlib.sha256(), begin + file.num_tokens
            for part in self.tokens.chunks(begin, end):
                digest.update(part.data)
            if digest.hexdigest() != file.digest:
                what = _tokens_of(self.info.files, begin, end)
                raise DataError(
                    f"{self.tokens.path}: {what} differ from what was written; "
                    f"{remedy(self.folder)}"
                )
            begin = end
        for array in (self.ends, self.num_bytes, self.loss_mask):
            if array is not None:
                self._check_digest(array)

    def _check_digest(self, array: CheckedArray) -> None:
        found, written = array.digest(), self.info.digests[array.path.name]
        if found != written:
            raise DataError(
                f"{array.path}: its SHA-256 is {found[:16]}, expected {written[:16]}; "
                f"{remedy(self.folder)}"
            )

    @property
    def num_tokens(self) -> int:
        """Number of tokens (T)."""
        return self.info.num_tokens

    @property
    def num_documents(self) -> int:
        """Number of documents (D); two of each preference pair."""
        return self.info.num_documents

    @property
    def encoding(self) -> Encoding | None:
        """Additions to the text of documents; None in stores that are older than this entry."""
        return self.info.encoding

    @property
    def is_masked(self) -> bool:
        """Whether some tokens do not contribute to the loss."""
        return self.loss_mask is not None

    @property
    def skipped(self) -> dict[str, Skipped]:
        """Documents that were left out, by reason."""
        return self.info.skipped

    def text_bytes(self) -> int:
        """Return the UTF-8 bytes of all documents that contribute to the loss."""
        return sum(int(part.sum()) for part in self.num_bytes.chunks())

    def loss_tokens(self) -> int:
        """Return the number of tokens that contribute to the loss."""
        if self.loss_mask is None:
            return self.num_tokens
        return sum(int(np.count_nonzero(part)) for part in self.loss_mask.chunks())

    def count_unanswered(self) -> int:
        """Return the number of documents of which nothing contributes to the loss."""
        return sum(int(np.count_nonzero(part == 0)) for part in self.num_bytes.chunks())

    def summary(self) -> str:
        """Return one line with the size of the store and the skipped documents."""
        return summary(self)


class Contents(Protocol):
    """Counts of a store, or of all shards of one."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""

    @property
    def num_documents(self) -> int:
        """Number of documents; two of each preference pair."""

    @property
    def encoding(self) -> Encoding | None:
        """Additions to the text of documents."""

    @property
    def is_masked(self) -> bool:
        """Whether some tokens do not contribute to the loss."""

    @property
    def skipped(self) -> dict[str, Skipped]:
        """Documents that were left out, by reason."""

    def text_bytes(self) -> int:
        """Return the UTF-8 bytes of all documents that contribute to the loss."""


def summary(store: Contents) -> str:
    """Return one line with the size of a store and the skipped documents."""
    num_bytes = store.text_bytes()
    documents = count_of(store.num_documents, "document")
    if store.encoding is not None and store.encoding.is_paired:
        documents = count_of(store.num_documents // 2, "preference pair")
    line = f"{documents}, {count_of(store.num_tokens, 'token')}, " + (
        f"{num_bytes:,} bytes of text in the loss"
        if store.is_masked
        else f"{num_bytes / max(1, store.num_tokens):.2f} bytes per token"
    )
    skipped = [f"{skip.count:,} {kind}{skip.example(kind)}" for kind, skip in store.skipped.items()]
    return f"{line}; skipped: {', '.join(skipped)}" if skipped else line


def _tokens_of(files: Sequence[StoredFile], begin: int, end: int) -> str:
    """Name tokens, and the input files that they are from."""
    ends = list(accumulate(file.num_tokens for file in files))
    first, last = bisect_right(ends, begin), bisect_left(ends, end)
    paths = [file.path for file in files[first : last + 1] if file.num_tokens]
    names = " to ".join(dict.fromkeys([*paths[:1], *paths[-1:]]))
    return f"tokens {begin} to {end}" + (f" of {names}" if names else "")


def open_again(folder: AnyPath, digest: str, cache: BlockCache | None) -> Store:
    """Open a store that was open before. Raises: DataError also when it holds other tokens now."""
    store = Store(folder, cache)
    if store.digest != digest:
        raise DataError(f"{folder} was replaced by another store during the run; start it again")
    return store


def remedy(folder: AnyPath) -> str:
    """Return what to do about a damaged store."""
    return f"delete {folder} and prepare the data again"


def _read_info(folder: AnyPath) -> StoreInfo:
    path = folder / INFO
    try:
        tree = json.loads(path.read_bytes())
        version = tree["version"]
        checksum = tree.pop("checksum")
        if version == VERSION and checksum == json_digest(tree):
            return StoreInfo.model_validate(tree)
    except FileNotFoundError as error:
        is_store = any((folder / name).exists() for name in CHECKSUM_BLOCKS)
        what = remedy(folder) if is_store else "name another folder, or prepare a new one"
        if not folder.exists():  # such as one that was deleted during a run
            what = "prepare it"
        raise DataError(f"{folder} has no {INFO}, so it is not a complete store; {what}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} is damaged; {remedy(folder)}") from error
    if version != VERSION:
        rule = f"{path}: version {version!r}, but this program reads {VERSION}"
        raise DataError(f"{rule}; {remedy(folder)}")
    raise DataError(f"{path}: its checksum does not match; {remedy(folder)}")


def write_info(folder: Path, info: StoreInfo) -> None:
    """Write store.json with its checksum."""
    tree = info.model_dump(mode="json")
    text = json.dumps({**tree, "checksum": json_digest(tree)}, indent=1) + "\n"
    replace_file(folder / INFO, text)
