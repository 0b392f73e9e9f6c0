"""Sources to stores: documents are read, tokenised by worker processes, and written in order.

The content of a store is a function of the input files, the tokenizer and a few settings; how many
workers there were, and how often they were killed, leaves no trace. Nothing is lost in silence: a
broken document stops the work with its place, or is counted in the store.
"""

import ctypes
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from data.config import OnError, SourceConfig
from data.formats import Document, Fault, read_documents
from data.source import DataError, Entry, Unit, find_files, fingerprint, input_bytes, plan_units
from data.store import (
    INFO,
    MAX_EXAMPLES,
    VERSION,
    InputFile,
    Part,
    Skipped,
    Store,
    StorePlan,
    StoreWriter,
    add_skipped,
    remove_journal,
)
from data.tokenizer import Tokenizer, encode_chat

log = logging.getLogger("torus")

Show = Callable[[int, int, int], None]
"""Called after each unit with bytes of input done, bytes of input in all, tokens written."""

_BATCH_CHARACTERS = 2**20
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Reader:
    """What a worker needs to know besides its unit."""

    tokenizer: Tokenizer
    field: str
    on_error: OnError
    dtype: np.dtype


@dataclass(frozen=True)
class Work:
    """A source that is to be a store. name: of the source, for messages."""

    name: str
    source: SourceConfig
    tokenizer: Tokenizer
    on_error: OnError

    @cached_property
    def paths(self) -> list[str]:
        """The input files. Raises: DataError when there are none."""
        return find_files(self.source.files, files_key(self.name))

    @cached_property
    def num_bytes(self) -> int:
        """Of the input, as it lies there, perhaps compressed."""
        return input_bytes(self.paths)

    @cached_property
    def key(self) -> str:
        """Identity of everything that decides the content of the store."""
        parts = [VERSION, fingerprint(self.paths), self.tokenizer.digest, self.source.field]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def folder(self, cache: Path) -> Path:
        """Where the cache keeps the store."""
        name = re.sub(r"[^\w.-]", "_", self.name)
        return cache.expanduser() / f"{name}-{self.key[:16]}"

    def plan(self) -> StorePlan:
        """What the store's writer must know."""
        for path in self.paths:
            if not path.isprintable():  # lone surrogates stand for bytes that are not UTF-8
                raise DataError(f"{files_key(self.name)}: {path!r} is no printable name; rename it")
        settings = self.source.model_dump(mode="json", include={"files", "field"})
        return StorePlan(
            key=self.key,
            tokenizer=self.tokenizer.name,
            tokenizer_digest=self.tokenizer.digest,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            source={"name": self.name, **settings, "on_error": self.on_error},
            files=tuple(InputFile(path=path, size=input_bytes([path])) for path in self.paths),
        )


def files_key(name: str) -> str:
    """The key of the configuration that names a source's files."""
    return "data.files" if name == "text" else f"data.sources.{name}.files"


def prepare(
    name: str,
    source: SourceConfig,
    tokenizer: Tokenizer,
    *,
    cache: Path,
    on_error: OnError,
    workers: int = 0,
    limit: int | None = None,
    show: Show | None = None,
) -> Store:
    """The store of a source: opened if it is there, else made; two processes do it once.

    workers: processes that tokenise; 0: this one. limit: bytes of input above which the store must
    be there already. Raises: DataError for what the user can mend; OSError, for instance of a full
    disk: then, as after a kill, the next call continues.
    """
    if (folder := prepared_folder(source)) is not None:
        return open_prepared(folder, tokenizer, files_key(name))
    work = Work(name, source, tokenizer, on_error)
    folder = work.folder(cache)
    if _is_free(folder) and limit is not None and work.num_bytes > limit:
        raise DataError(
            f"{files_key(name)}: {work.num_bytes / 2**30:.1f} GiB of text is not prepared; run "
            "python scripts/prepare_data.py --config ... first"
        )
    return build(work, folder, workers=workers, show=show)


def prepared_folder(source: SourceConfig) -> Path | None:
    """The store that the source itself is, if it is one."""
    if isinstance(source.files, str):
        folder = Path(source.files).expanduser()
        if (folder / INFO).is_file():
            return folder
    return None


def open_prepared(folder: Path, tokenizer: Tokenizer, key: str) -> Store:
    """A store that the user names. Raises: DataError if another tokenizer made it."""
    store = Store(folder)
    if store.info.tokenizer_digest != tokenizer.digest:
        raise DataError(
            f"{key}={folder} was made with tokenizer {store.info.tokenizer} "
            f"({store.info.tokenizer_digest[:16]}), but data.tokenizer is {tokenizer.name} "
            f"({tokenizer.digest[:16]}); use the same, or prepare it again"
        )
    return store


def build(work: Work, folder: Path, *, workers: int = 0, show: Show | None = None) -> Store:
    """The store of this work at `folder`: opened if it is there, else made or continued.

    Raises: DataError, also when another store lies there; OSError.
    """
    if _is_free(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if _is_free(folder):
                return _learned(_make(work, folder, workers, show), work)
    store = _learned(Store(folder), work)
    if store.info.key != work.key:
        raise DataError(f"{folder} is a store of other files or settings; choose another folder")
    remove_journal(folder)
    if work.on_error == "raise":
        for kind, skip in store.info.skipped.items():
            if kind != "empty":  # made by a run that skipped them
                raise DataError(
                    f"{skip.examples[0]} ({kind}, {skip.count} in all); mend it, or use "
                    "data.on_error=skip"
                )
    return store


def _learned(store: Store, work: Work) -> Store:
    if store.learned is not None and not store.num_bytes.any():
        raise DataError(
            f"{files_key(work.name)}: no message has the role assistant, so there is nothing to "
            "learn; give the answers that role"
        )
    return store


def _is_free(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process of this machine at a time makes the store."""
    with open(folder.with_name(f"{folder.name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another process, which prepares %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(work: Work, folder: Path, workers: int, show: Show | None) -> Store:
    plan, units = work.plan(), plan_units(work.paths)
    keys = [hashlib.sha256(json.dumps(asdict(unit)).encode()).hexdigest() for unit in units]
    shares = _bytes_done(units, plan.files)
    reader = Reader(work.tokenizer, work.source.field, work.on_error, plan.dtype)
    with StoreWriter(folder, plan) as writer:
        done = len(writer.units)
        if writer.units != keys[:done]:
            raise DataError(
                f"{writer.building} was begun in other units of work; delete it and prepare again"
            )
        if show:
            show(shares[done], shares[-1], writer.num_tokens)
        try:
            with closing(tokenize_units(units[done:], reader, workers)) as results:
                for index, (parts, skipped) in enumerate(results, done):
                    writer.append(keys[index], parts, skipped)
                    if show:
                        show(shares[index + 1], shares[-1], writer.num_tokens)
            if work.key != Work(work.name, work.source, work.tokenizer, work.on_error).key:
                writer.discard()
                raise DataError(
                    f"{files_key(work.name)}: files changed while they were read; run again"
                )
            return writer.finish()
        except DataError:
            if not writer.num_tokens:
                writer.discard()
            raise


def _bytes_done(units: Sequence[Unit], files: Sequence[InputFile]) -> list[int]:
    """Bytes of input before unit 0, 1, ..., and in all.

    Entries may count in records: each has the share of its file that it has of these.
    """
    whole: dict[str, int] = {}
    for entry in (entry for unit in units for entry in unit.entries):
        whole[entry.path] = whole.get(entry.path, 0) + entry.end - entry.begin
    sizes, done = {file.path: file.size for file in files}, [0.0]
    for unit in units:
        shares = ((entry.end - entry.begin) / max(1, whole[entry.path]) for entry in unit.entries)
        paths = (entry.path for entry in unit.entries)
        done.append(done[-1] + sum(s * sizes[p] for s, p in zip(shares, paths, strict=True)))
    return [round(count) for count in done]


Tokenized = tuple[list[Part], dict[str, Skipped]]


def tokenize_units(
    units: Sequence[Unit], reader: Reader, workers: int
) -> Generator[Tokenized, None, None]:
    """Documents and faults of each unit, in order. workers: as in `prepare`.

    Raises: DataError, that of the first broken document; RuntimeError when a worker dies.
    """
    if not workers:
        for unit in units:
            yield tokenize_unit(unit, reader)
        return
    pool = ProcessPoolExecutor(
        min(workers, max(1, len(units))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(reader, os.getpid()),
    )
    try:
        window: deque[Future[Tokenized]] = deque()
        for unit in units:
            window.append(pool.submit(_tokenize_in_worker, unit))
            if len(window) == 2 * workers:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that tokenises died, perhaps of too little memory; run again with fewer "
            "workers: it continues where it stopped"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass
class _Worker:
    """What a process keeps between units: to send a tokenizer with each would cost seconds."""

    reader: Reader | None = None


_worker = _Worker()


def leave_signals_to(parent: int) -> None:
    """A worker dies with its parent, with all its memory, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def _start_worker(reader: Reader, parent: int) -> None:
    """Of a process that tokenises."""
    leave_signals_to(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker.reader = reader


def _tokenize_in_worker(unit: Unit) -> Tokenized:
    assert _worker.reader is not None
    return tokenize_unit(unit, _worker.reader)


def tokenize_unit(unit: Unit, reader: Reader) -> Tokenized:
    """Documents and faults of one unit. Raises: DataError for a broken document, if so wished."""
    texts = _Texts(reader)
    buffers: list[_Buffer] = []
    skipped: dict[str, Skipped] = {}
    for entry in unit.entries:
        buffer = _Buffer(entry, texts)
        buffers.append(buffer)
        for document in read_documents(entry, reader.field):
            if isinstance(document, Document):
                buffer.add(document)
                continue
            if reader.on_error == "raise" and document.kind != "empty":
                raise fault_error(document)
            before = skipped.get(document.kind)
            shown = before is None or before.count < MAX_EXAMPLES  # a place costs time to find
            examples = (_line(f"{document.where}: {document.detail}"),) if shown else ()
            add_skipped(skipped, {document.kind: Skipped(count=1, examples=examples)})
    texts.encode()
    return [buffer.part() for buffer in buffers], skipped


def fault_error(fault: Fault) -> DataError:
    """What stops the work, unless broken documents are skipped."""
    return DataError(
        _line(f"{fault.where}: {fault.kind}: {fault.detail}")
        + "; mend it, or use data.on_error=skip"
    )


def _line(text: str) -> str:
    """One line that can be printed: documents put anything into messages about them."""
    return " ".join(text.split())[:500].encode(errors="backslashreplace").decode()


@dataclass
class _Texts:
    """Texts that wait to be encoded together, which tokenizers do faster; of one unit."""

    reader: Reader
    texts: list[str] = field(default_factory=list)
    places: list[tuple["_Buffer", int]] = field(default_factory=list)
    characters: int = 0

    def add(self, buffer: "_Buffer", text: str) -> None:
        """Takes the next place in the buffer, filled when the batch is full."""
        self.places.append((buffer, len(buffer.tokens)))
        buffer.append(np.empty(0, self.reader.dtype), None, len(text.encode()))
        self.texts.append(text)
        self.characters += len(text)
        if self.characters >= _BATCH_CHARACTERS:
            self.encode()

    def encode(self) -> None:
        """Fills the places that wait."""
        batch = self.reader.tokenizer.encode_batch(self.texts) if self.texts else []
        for (buffer, place), ids in zip(self.places, batch, strict=True):
            buffer.tokens[place] = self.closed(ids)
        self.texts, self.places, self.characters = [], [], 0

    def closed(self, ids: np.ndarray) -> np.ndarray:
        """A document's ids with the end of text."""
        tokenizer = self.reader.tokenizer
        assert not len(ids) or int(ids.max()) < tokenizer.vocab_size
        return np.append(ids, tokenizer.eos_id).astype(self.reader.dtype)


@dataclass
class _Buffer:
    """The documents of an entry as they come."""

    entry: Entry
    texts: _Texts
    tokens: list[np.ndarray] = field(default_factory=list)
    learned: list[np.ndarray | None] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def add(self, document: Document) -> None:
        """Appends a document."""
        if document.messages is None:
            assert document.text is not None
            self.texts.add(self, document.text)
            return
        messages = document.messages
        ids, learned = encode_chat(self.texts.reader.tokenizer, messages)
        count = sum(len(text.encode()) for role, text in messages if role == "assistant")
        ends_learned = messages[-1][0] == "assistant"
        self.append(self.texts.closed(ids), np.append(learned, ends_learned), count)

    def append(self, ids: np.ndarray, learned: np.ndarray | None, num_bytes: int) -> None:
        """Appends closed ids; learned: which of them, None: all."""
        self.tokens.append(ids)
        self.learned.append(learned)
        self.num_bytes.append(num_bytes)

    def part(self) -> Part:
        """All of it."""
        learned = None
        if any(mask is not None for mask in self.learned):
            pairs = zip(self.learned, self.tokens, strict=True)
            learned = np.concatenate(
                [np.ones(len(ids), bool) if mask is None else mask for mask, ids in pairs]
            )
        return Part(
            path=self.entry.path,
            tokens=np.concatenate([np.empty(0, self.texts.reader.dtype), *self.tokens]),
            lengths=np.array([len(ids) for ids in self.tokens], np.int64),
            num_bytes=np.array(self.num_bytes, np.int64),
            learned=learned,
        )
