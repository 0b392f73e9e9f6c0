"""Prepare the token store of a source: open it if it exists, else tokenize the input files.

The content of a store depends on the input files, the tokenizer and a few settings, but not on the
number of workers or on interruptions. An unreadable document stops the preparation with its
location, or is counted in the store.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from data.block_cache import BlockCache
from data.bucket_path import AnyPath, BucketPath, to_path
from data.chat import DEFAULT_TEMPLATE, ChosenTemplate
from data.chat_jinja import find_chat_template
from data.config import DataConfig, OnError, SourceConfig, files_key
from data.duplicates import SeenDocuments
from data.files import DataError, find_files, fingerprint, input_bytes, suffix_of
from data.filters import NO_FILTERS, Filters
from data.formats.shards import bytes_before_each, known_suffixes, piece_key, plan_shards
from data.hub import find_split, parse_split
from data.shard_list import is_sharded
from data.sharded_store import ShardedStore
from data.store import (
    INFO,
    VERSION,
    Encoding,
    InputFile,
    Skipped,
    Store,
    StorePlan,
    count_of,
    is_unreadable,
)
from data.store_writer import StoreWriter, remove_leftovers
from data.tokenization import Engine, TokenizeSettings, document_remedy, tokenize_shards
from data.tokenizers.base import Tokenizer, document_bos

log = logging.getLogger("torus")

ReportProgress = Callable[[int, int, int], None]
"""Called at the start and after each shard: bytes of input done, bytes in all, tokens written."""


@dataclass(frozen=True)
class StoreJob:
    """A source to be tokenized into a store. name: of the source."""

    name: str
    source: SourceConfig
    tokenizer: Tokenizer
    on_error: OnError
    chat_template: ChosenTemplate = DEFAULT_TEMPLATE
    bos_id: int | None = None
    is_paired: bool = False
    """Whether documents are preference pairs."""
    is_evaluation: bool = False
    """Whether the documents are those of `eval_files`."""
    held_out: frozenset[str] = frozenset()
    """Files that the job leaves out; see `held_out_files`."""
    filters: Filters = NO_FILTERS

    @property
    def files(self) -> str | tuple[str, ...] | None:
        """The globs of the input files."""
        return self.source.eval_files if self.is_evaluation else self.source.files

    @property
    def files_key(self) -> str:
        """The configuration key that names the files."""
        return files_key(self.name, is_evaluation=self.is_evaluation)

    @cached_property
    def paths(self) -> list[str]:
        """The input files. Raises: DataError when there are none."""
        found = find_paths(self.files, self.files_key)
        return without_files(found, self.held_out, self.files_key)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the input files as stored, compressed or not."""
        return input_bytes(self.paths)

    @cached_property
    def key(self) -> str:
        """Hash of everything that decides the content of the store."""
        parts = [VERSION, fingerprint(self.paths), self.tokenizer.digest, self.source.field]
        if self.chat_template != DEFAULT_TEMPLATE:  # stores of chatml are older than this setting
            parts.append(self.chat_template.key)
        if self.bos_id is not None:
            parts.append(f"bos {self.bos_id}")
        if self.is_paired:
            parts.append("pairs")
        if self.filters.specs:
            parts.append(f"filters {json.dumps(self.filters.key)}")
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def encoding(self) -> Encoding:
        """Additions of this store to the text of its documents."""
        return Encoding(
            bos_id=self.bos_id, chat_template=self.chat_template.key, is_paired=self.is_paired
        )

    def folder(self, cache: Path) -> Path:
        """Return the folder of the store in the cache."""
        name = re.sub(r"[^\w.-]", "_", self.name)
        return cache.expanduser() / f"{name}-{self.key[:16]}"

    def settings(self, dtype: np.dtype) -> TokenizeSettings:
        """Return the settings of tokenization. dtype: of tokens."""
        return TokenizeSettings(
            self.name,
            None if self.is_paired else self.source.field,
            self.tokenizer,
            self.chat_template.template,
            self.on_error,
            dtype,
            self.bos_id,
            self.filters,
        )

    def plan(self) -> StorePlan:
        """Return the description of the store before it is written."""
        for path in self.paths:
            if not path.isprintable():  # lone surrogates stand for bytes that are not UTF-8
                raise DataError(
                    f"{self.files_key}: {path!r} is not a printable name; rename the file"
                )
        files = list(self.files) if isinstance(self.files, tuple) else self.files
        return StorePlan(
            key=self.key,
            tokenizer=self.tokenizer.name,
            tokenizer_digest=self.tokenizer.digest,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            source={
                "name": self.name,
                "files": files,
                "field": self.source.field,
                "on_error": self.on_error,
                **({"filters": specs} if (specs := self.filters.specs) else {}),
            },
            files=tuple(InputFile(path=path, size=input_bytes([path])) for path in self.paths),
            encoding=self.encoding,
        )


def store_job(
    name: str, config: DataConfig, tokenizer: Tokenizer, *, is_evaluation: bool = False
) -> StoreJob:
    """Return the job of a source of the configuration, or of its eval_files.

    A split of the hub is pinned to its present revision. Raises: DataError.
    """
    source = config.named_sources[name]
    field = "eval_files" if is_evaluation else "files"
    if (split := parse_split(getattr(source, field))) is not None:
        _, pinned = find_split(split, files_key(name, is_evaluation=is_evaluation))
        source = source.model_copy(update={field: str(pinned)})
    return StoreJob(
        name,
        source,
        tokenizer,
        config.on_error,
        find_chat_template(config.chat_template, tokenizer),
        document_bos(tokenizer, config.add_bos),
        config.packing == "pairs",
        is_evaluation,
        frozenset() if is_evaluation else held_out_files(config),
    )


def find_paths(files: str | tuple[str, ...] | None, key: str) -> list[str]:
    """Return the input files of a source: of a split of the hub, or as `find_files` finds them.

    Raises: DataError when there are none.
    """
    if (split := parse_split(files)) is None:
        return find_files(files, key, known_suffixes())
    paths, _ = find_split(split, key)
    for path in paths:
        if suffix_of(path) not in known_suffixes():
            raise DataError(
                f"{key}={split}: {path} is in a format that is not read; the suffixes are "
                f"{', '.join(sorted(known_suffixes()))}"
            )
    return paths


def held_out_files(config: DataConfig) -> frozenset[str]:
    """Return the files of every `eval_files`, on which no source may train. Raises: DataError."""
    found: set[str] = set()
    for name, source in config.named_sources.items():
        if source.eval_files is None:
            continue
        if (folder := prepared_folder(source.eval_files)) is not None:
            found |= {_identity(path) for path in open_any(folder).input_files()}
        else:
            key = files_key(name, is_evaluation=True)
            paths = find_paths(source.eval_files, key)
            found |= {_identity(path) for path in paths}
    return frozenset(found)


def without_files(paths: Sequence[str], held_out: frozenset[str], key: str) -> list[str]:
    """Return the paths that are not held out. Raises: DataError if none is left."""
    left = [path for path in paths if _identity(path) not in held_out]
    if not left:
        raise DataError(
            f"{key}: each of its {len(paths)} file(s) is one of eval_files, which are not trained "
            "on; give other files"
        )
    return left


def _identity(path: str) -> str:
    """Return the same text for all names of a local file."""
    return path if "://" in path else os.path.realpath(path)


def prepare(
    job: StoreJob,
    *,
    cache: Path,
    engine: Engine = tokenize_shards,
    limit: int | None = None,
    report: ReportProgress | None = None,
    blocks: BlockCache | None = None,
    num_parts: int | None = None,
) -> Store | ShardedStore:
    """Return the store of a source, made if necessary; concurrent calls make it once.

    engine: where to tokenize; default: in this process. limit: bytes of input above which the store
        must exist already. blocks, num_parts: see `open_prepared`.
    Raises: DataError for what the user can correct; OSError, for instance of a full disk. After
        either, or a kill, the next call continues.
    """
    if (folder := prepared_folder(job.files)) is not None:
        return open_prepared(folder, job, blocks, num_parts)
    folder = job.folder(cache)
    if _is_free(folder) and limit is not None and job.num_bytes > limit:
        raise DataError(
            f"{job.files_key}: {job.num_bytes / 2**30:.1f} GiB of text is not prepared; run "
            "python scripts/prepare_data.py --config ... first"
        )
    return build(job, folder, engine=engine, report=report)


def prepared_folder(files: str | tuple[str, ...] | None) -> AnyPath | None:
    """Return the folder that the files of a source name, if it is a store itself."""
    if not isinstance(files, str) or files.startswith("hf://"):
        return None
    folder = to_path(files)
    if isinstance(folder, BucketPath):  # each question is a request, and may be refused
        if set("*?[") & set(files) or suffix_of(files) in known_suffixes():
            return None
    elif (folder / "building").is_dir():
        _wait_for_plan(folder)
    return folder if (folder / INFO).is_file() or is_sharded(folder) else None


def _wait_for_plan(folder: Path, seconds: float = 600.0) -> None:
    """Wait until a store in shards that is just being begun says what it will hold."""
    end = time.monotonic() + seconds
    while not is_sharded(folder) and time.monotonic() < end:
        with open(folder / "building" / "shards.lock", "a") as file:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return  # nobody prepares it
        time.sleep(0.5)


def open_any(folder: AnyPath, cache: BlockCache | None = None) -> Store | ShardedStore:
    """Open a store, sharded or not. Raises: DataError."""
    return ShardedStore(folder, cache) if is_sharded(folder) else Store(folder, cache)


def open_prepared(
    folder: AnyPath, job: StoreJob, cache: BlockCache | None = None, num_parts: int | None = None
) -> Store | ShardedStore:
    """Open a store that the user names.

    cache: of what is read from a bucket. num_parts: of a sharded store, see `ShardedStore`.
    Raises: DataError if the job would make other tokens.
    """
    store: Store | ShardedStore
    if is_sharded(folder):
        store = ShardedStore(folder, cache, num_parts)
        name, digest = store.tokenizer
    else:
        store = Store(folder, cache)
        name, digest = store.info.tokenizer, store.info.tokenizer_digest
    tokenizer, key = job.tokenizer, job.files_key
    if digest != tokenizer.digest:
        raise DataError(
            f"{key}={folder} was made with tokenizer {name} ({digest[:16]}), but data.tokenizer is "
            f"{tokenizer.name} ({tokenizer.digest[:16]}); use the same, or prepare it again"
        )
    _check_encoding(store, job)
    if job.held_out:
        check = partial(_check_held_out, job, folder)
        for path in store.input_files():
            check([path])
        if isinstance(store, ShardedStore):
            store.check_files = lambda shard: check(shard.input_files())
    if job.is_evaluation and isinstance(store, ShardedStore) and not store.is_complete:
        raise DataError(
            f"{key}={folder} is still being prepared, and held-out files must be complete; wait "
            "until it is"
        )
    return store


def _check_held_out(job: StoreJob, folder: AnyPath, paths: Iterable[str]) -> None:
    """Raise DataError for a store with files that are held out."""
    for path in paths:
        if _identity(path) in job.held_out:
            raise DataError(
                f"{job.files_key}={folder} was prepared from {path}, which is one of eval_files "
                "and is not trained on; prepare it again without that file"
            )


def _check_encoding(store: Store | ShardedStore, job: StoreJob) -> None:
    """Raise DataError unless a store has the BOS, pairs and, in chats, the template of a job."""
    stored, wanted = _stored_encoding(store, job), job.encoding
    place = f"{job.files_key}={store.folder}"
    if stored.is_paired != wanted.is_paired:
        has, remedy = "no preference pairs", "prepare it again with"
        if stored.is_paired:
            has, remedy = "preference pairs", "set"
        raise DataError(f"{place} holds {has}; {remedy} data.packing=pairs")
    if stored.bos_id != wanted.bos_id:
        was, now = (
            "without BOS" if encoding.bos_id is None else f"with BOS id {encoding.bos_id}"
            for encoding in (stored, wanted)
        )
        or_set = ""
        if stored.bos_id in (None, job.tokenizer.bos_id):
            or_set = f", or set data.add_bos={str(stored.bos_id is not None).lower()}"
        raise DataError(
            f"{place} was prepared {was} before its documents, but data.tokenizer="
            f"{job.tokenizer.name} and data.add_bos ask for documents {now}; prepare it again"
            f"{or_set}"
        )
    if store.is_masked and stored.chat_template != wanted.chat_template:
        was, now = (encoding.chat_template[:16] for encoding in (stored, wanted))
        raise DataError(
            f"{place} was prepared with chat template {was}, but data.chat_template is {now}; use "
            "the same, or prepare it again"
        )


def _stored_encoding(store: Store | ShardedStore, job: StoreJob) -> Encoding:
    """Return the encoding of a store.

    Older stores do not record it, and hold no pairs. Their text begins with BOS if they have one;
    nothing is known about their chats.
    """
    if isinstance(store, ShardedStore) or store.encoding is not None:
        assert store.encoding is not None
        return store.encoding
    encoding = job.encoding.model_copy(update={"is_paired": False})
    if job.bos_id is None or store.loss_mask is not None or job.bos_id in store.tokens[:1]:
        return encoding
    return encoding.model_copy(update={"bos_id": None})


def build(
    job: StoreJob,
    folder: Path,
    *,
    engine: Engine = tokenize_shards,
    report: ReportProgress | None = None,
) -> Store:
    """Return the store of a job at `folder`: opened if it exists, else made or continued.

    Raises: DataError, also when the folder holds another store; OSError.
    """
    if _is_free(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if _is_free(folder):
                return _check_loss(_make(job, folder, engine, report), job)
    store = _check_loss(Store(folder), job)
    if store.info.key != job.key:
        is_cached = folder == job.folder(folder.parent)  # its name has the key of the job
        remedy = "delete it to prepare it again" if is_cached else "choose another folder"
        raise DataError(f"{folder} is a store of other files or settings; {remedy}")
    remove_leftovers(folder)
    check_skipped(store.skipped, job)
    return store


def check_skipped(skipped: Mapping[str, Skipped], job: StoreJob) -> None:
    """Raise DataError for unreadable documents that an earlier run skipped, if a job does not."""
    for kind, skip in skipped.items():
        if job.on_error == "raise" and is_unreadable(kind):
            raise DataError(
                f"{skip.examples[0]} ({kind}, {skip.count} in all); "
                f"{document_remedy(kind, job.name)}"
            )


def _check_loss(store: Store, job: StoreJob) -> Store:
    if store.loss_mask is not None and not any(part.any() for part in store.num_bytes.chunks()):
        raise DataError(no_answer(job))
    return store


def no_answer(job: StoreJob) -> str:
    """Return the error of a source of conversations without any answer."""
    return (
        f"{job.files_key}: no message has the role assistant, so no token contributes to the loss; "
        "give the answers that role"
    )


def _is_free(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let only one process of this machine make what is in a folder."""
    with open(folder.with_name(f"{folder.name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another process that prepares %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"{file.name} cannot be locked: {error.strerror}; mount the file system with locks "
                "(Lustre: -o flock), or give another data.cache_dir"
            ) from error
        yield


def _make(job: StoreJob, folder: Path, engine: Engine, report: ReportProgress | None) -> Store:
    plan, shards = job.plan(), plan_shards(job.paths)
    keys = [piece_key(shard) for shard in shards]
    bytes_before = bytes_before_each(shards, plan.files)
    settings = job.settings(plan.dtype)
    with StoreWriter(folder, plan) as writer, _seen_documents(job, writer) as seen:
        done = len(writer.shards)
        if writer.shards != keys[:done]:
            raise DataError(
                f"{writer.building} was begun with other shards; delete it and prepare again"
            )
        if report:
            report(bytes_before[done], bytes_before[-1], writer.num_tokens)
        is_current = True
        try:
            with closing(engine(shards[done:], settings)) as results:
                for index, (documents, skipped) in enumerate(results, done):
                    if seen is not None:
                        documents, duplicates = seen.first_of(documents)
                        skipped = {**skipped, **duplicates}
                    writer.append(keys[index], documents, skipped)
                    if report:
                        report(bytes_before[index + 1], bytes_before[-1], writer.num_tokens)
            # A copy computes its key, and so its files, again.
            if not (is_current := replace(job).key == job.key):
                raise DataError(f"{job.files_key}: files changed while they were read; run again")
            return writer.finish()
        except DataError:
            if not (is_current and writer.num_tokens):
                if seen is not None:
                    seen.close()  # NFS keeps the name of an open file
                writer.discard()
            raise


def _seen_documents(
    job: StoreJob, writer: StoreWriter
) -> AbstractContextManager[SeenDocuments | None]:
    if not job.filters.without_duplicates:
        return nullcontext()
    per_item = 2 if job.is_paired else 1
    return SeenDocuments(writer.building, writer.num_documents, per_item)


def describe_unread_files(job: StoreJob) -> Iterator[str]:
    """Yield a line if a folder has files that are not read, as others have a known suffix."""
    if job.files is None or prepared_folder(job.files) is not None:
        return
    if parse_split(job.files) is not None:
        return
    # Without suffixes, a folder stands for all of its files.
    read = find_files(job.files, job.files_key, known_suffixes())
    if others := sorted({*find_files(job.files)} - {*read}):
        such_as = ", such as" if len(others) > 1 else ":"
        yield (
            f"{job.files_key}: {count_of(len(others), 'file')} of other formats in the folder left "
            f"out{such_as} {others[0]}; give a glob to read them"
        )
