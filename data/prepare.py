"""Prepare the token store of a source: open it if it exists, else tokenize the input files.

The content of a store depends on the input files, the tokenizer and a few settings, but not on the
number of workers or on interruptions. An unreadable document stops the preparation with its
location, or is counted in the store.
"""

import fcntl
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from data.block_cache import BlockCache
from data.bucket_path import AnyPath
from data.duplicates import SeenDocuments
from data.engine import Engine, run_tasks
from data.files import DataError, cannot_lock
from data.formats.pieces import bytes_before_each, piece_key, plan_pieces
from data.prepared_store import prepared_folder
from data.shard_list import is_sharded
from data.sharded_store import ShardedStore
from data.store import (
    Encoding,
    Skipped,
    Store,
    is_unreadable,
)
from data.store_job import StoreJob, identity_of
from data.store_writer import StoreWriter, remove_leftovers
from data.tokenization import document_remedy

log = logging.getLogger("torus")

ReportProgress = Callable[[int, int, int], None]
"""Called at the start and after each piece: bytes of input done, bytes in all, tokens written."""


def prepare(
    job: StoreJob,
    *,
    cache: Path,
    engine: Engine = run_tasks,
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
        _check_held_out(job, folder, store.input_files())
    if isinstance(store, ShardedStore):
        store.check_shards = partial(_check_shards, store, job, folder)
    if job.is_evaluation and not store.is_complete:
        raise DataError(
            f"{key}={folder} is still being prepared, and held-out files must be complete; wait "
            "until it is"
        )
    return store


def _check_shards(store: ShardedStore, job: StoreJob, folder: AnyPath, numbers: range) -> None:
    """Raise DataError for shards that the job must not read, as `open_prepared` does."""
    _check_encoding(store, job)  # the first chats may be among them
    for number in numbers if job.held_out else ():
        if store.shards[number][1].num_tokens:
            _check_held_out(job, folder, store.open_shard(number).input_files())


def _check_held_out(job: StoreJob, folder: AnyPath, paths: Iterable[str]) -> None:
    """Raise DataError for a store with files that are held out."""
    for path in paths:
        if identity_of(path) in job.held_out:
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
    engine: Engine = run_tasks,
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
            raise cannot_lock(file.name, error) from error
        yield


def _make(job: StoreJob, folder: Path, engine: Engine, report: ReportProgress | None) -> Store:
    plan, pieces = job.plan(), plan_pieces(job.paths)
    keys = [piece_key(piece) for piece in pieces]
    bytes_before = bytes_before_each(pieces, plan.files)
    settings = job.settings(plan.dtype)
    with StoreWriter(folder, plan) as writer, _seen_documents(job, writer) as seen:
        done = len(writer.pieces)
        if writer.pieces != keys[:done]:
            raise DataError(
                f"{writer.building} was begun with other pieces; delete it and prepare again"
            )
        if report:
            report(bytes_before[done], bytes_before[-1], writer.num_tokens)
        is_current = True
        try:
            with closing(engine(pieces[done:], settings)) as results:
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
