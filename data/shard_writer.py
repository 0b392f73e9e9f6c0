"""Prepare the shards of a store; after a kill, the same command continues.

A part is planned first: which pieces of the input each shard holds. Its shards are then made one
after the other, each in a folder for work on the disk, and published when they are complete: by a
rename on a disk, by copying the files to a bucket, the record of the shard last. A shard that is
missing, because it was deleted after damage, is made again from the same pieces.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from data.bucket_path import AnyPath, BucketPath
from data.duplicates import SeenDocuments
from data.engine import Engine, run_tasks
from data.files import DataError, fingerprint, forget_listings
from data.packed_store import PackSettings
from data.prepare import ReportProgress, check_skipped, locked, no_answer
from data.shard_list import (
    RECORD,
    SHARDS,
    ShardRecord,
    delete_file,
    in_parallel,
    is_sharded,
    part_file,
    read_list,
    read_model,
    rows_lists,
    shard_names,
    upload_folder,
    write_list,
    write_tree,
)
from data.shard_plan import (
    PartPlanner,
    PlannedPart,
    Sharding,
    check_new_store,
    has_made_nothing,
)
from data.shard_rows import ShardRows
from data.sharded_store import ShardedStore
from data.store import INFO, Skipped, Store
from data.store_job import StoreJob
from data.store_writer import SEEN, StoreWriter, add_skipped, remove_leftovers
from data.tokenization import TokenizedPiece
from safe_files import publish_folder, rename


def prepare_shards(
    job: StoreJob,
    folder: AnyPath,
    sharding: Sharding,
    settings: Sequence[PackSettings],
    *,
    cache: Path,
    engine: Engine = run_tasks,
    report: ReportProgress | None = None,
) -> ShardedStore:
    """Make the shards of a source that are missing, pack their rows, and return the store.

    settings: of rows; each shard is packed with every one of them.
    cache: folder for the work on a store in a bucket.
    Raises: DataError for what the user can correct; OSError. After either, or a kill, the next call
        continues.
    """
    root = _work_folder(folder, cache)
    if not is_sharded(folder):
        check_new_store(folder, sharding)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / "shards"):
        _Preparation(job, folder, sharding, settings, engine, report or _no_report, root).run()
    return ShardedStore(folder)


def _no_report(done: int, total: int, tokens: int) -> None:
    pass


def _work_folder(folder: AnyPath, cache: Path) -> Path:
    if isinstance(folder, Path):
        return folder / "building"  # on the same disk, so that a rename publishes a shard
    return cache.expanduser() / "building" / hashlib.sha256(str(folder).encode()).hexdigest()[:16]


class _Preparation:
    """One call of `prepare_shards`, while no other process of this machine makes one."""

    def __init__(
        self,
        job: StoreJob,
        folder: AnyPath,
        sharding: Sharding,
        settings: Sequence[PackSettings],
        engine: Engine,
        report: ReportProgress,
        root: Path,
    ):
        self._job, self._folder, self._sharding, self._settings = job, folder, sharding, settings
        self._engine, self._report, self._root = engine, report, root
        self._work = root / job.key[:16]

    def run(self) -> None:
        """Make what is missing. Raises: DataError, OSError."""
        self._part = part = self._open_part()
        self._rows = [ShardRows(self._folder, part, settings) for settings in self._settings]
        file = part_file(self._folder, part.number, "shards")
        listed = read_list(file, ShardRecord)
        there = self._there()
        missing = [n for n, name in enumerate(part.names) if name not in there]
        if missing and part.recorded.in_order:
            self._pack_those_there(there)
        if missing:
            self._make(missing, listed)
        if listed is None:
            found = in_parallel(self._read_record, part.names)
            listed = [record for record in found if record is not None]
            assert len(listed) == len(part.names)
            part.check(self._folder)
            write_list(file, listed)
        self._check_records(listed)
        for rows in self._rows:
            rows.write_list(listed, self._work)
        shutil.rmtree(self._work)

    def _open_part(self) -> PlannedPart:
        """Return the part of the job, which is begun now unless it was before."""
        planner = PartPlanner(self._job, self._folder, self._sharding)
        part = planner.find()
        if part is None:
            planner.check_new()
            for path in self._root.iterdir():  # of another plan, nothing may be published
                if path.is_dir():
                    shutil.rmtree(path)
            part = planner.begin()
        self._work.mkdir(exist_ok=True)
        return part

    def _check_records(self, listed: Sequence[ShardRecord]) -> None:
        """Raise DataError for a part without tokens in the loss, or with unreadable documents."""
        skipped: dict[str, Skipped] = {}
        for record in listed:
            add_skipped(skipped, record.skipped)
        if not sum(record.num_tokens for record in listed):
            kinds = ", ".join(f"{skip.count} {kind}" for kind, skip in skipped.items())
            raise DataError(
                f"{self._job.files_key}: no document has a token; skipped: {kinds or 'none'}; "
                f"delete {self._folder}, and give files with text, or another field"
            )
        is_masked = any(record.is_masked for record in listed)
        if is_masked and not sum(record.text_bytes for record in listed):
            raise DataError(no_answer(self._job))
        check_skipped(skipped, self._job)

    # Shards

    def _there(self) -> set[str]:
        """Return the names of the shards of this part that are complete."""
        found = shard_names(self._folder)
        if isinstance(self._folder, Path):  # a rename publishes all of a shard
            return found
        names = [name for name in self._part.names if name in found]
        have_record = in_parallel(
            lambda name: (self._folder / SHARDS / name / RECORD).is_file(), names
        )
        return {name for name, is_there in zip(names, have_record, strict=True) if is_there}

    def _read_record(self, name: str) -> ShardRecord | None:
        path = self._folder / SHARDS / name / RECORD
        return read_model(
            path, ShardRecord, f"delete {self._folder / SHARDS / name} and run this again"
        )

    def _pack_those_there(self, there: set[str]) -> None:
        """Pack complete shards with settings that they lack.

        Whether a later shard of a store that is read in order is held out depends on them.
        """
        names = [name for name in self._part.names if name in there]
        records = dict(zip(names, in_parallel(self._read_record, names), strict=True))
        for number, name in enumerate(self._part.names):
            if (record := records.get(name)) is not None and record.num_tokens:
                for rows in self._rows:
                    rows.record_of(number, self._work)

    def _make(self, missing: list[int], listed: Sequence[ShardRecord] | None) -> None:
        """Make the missing shards; listed: what they must hold, if the part was complete."""
        for path in [*self._work.glob("*.done"), *self._work.glob("*.empty")]:
            shutil.rmtree(path)
        for n in [n for n in missing if (self._work / self._part.names[n]).exists()]:
            made = self._work / self._part.names[n]
            if not ((made / RECORD).exists() or (made / INFO).exists()):
                shutil.rmtree(made)
                continue
            self._publish(n, listed)  # a kill came between its last piece and its publication
            missing.remove(n)
        if not missing:
            return
        for path in self._work.glob("*.building"):
            if path.name != f"{self._part.names[missing[0]]}.building":
                shutil.rmtree(path)
        with StoreWriter(
            self._work / self._part.names[missing[0]], self._part.store_plan(missing[0])
        ) as writer:
            done, num_documents = len(writer.pieces), writer.num_documents
        seen, todo = self._open_seen(missing, num_documents)
        if todo != missing:
            shutil.rmtree(writer.building)
            done = 0
        pieces = [self._part.pieces[i] for n in todo for i in self._part.ranges[n]][done:]
        self._before = {path: fingerprint([path]) for n in missing for path in self._part.paths(n)}
        self._num_tokens = 0
        with (
            seen or nullcontext(),
            closing(
                self._engine(pieces, self._job.settings(self._part.recorded.plan.dtype))
            ) as results,
        ):
            for n in todo:
                if n in missing:
                    self._make_shard(n, results, seen)
                    self._publish(n, listed)
                else:  # only to know its documents
                    for _ in self._part.ranges[n]:
                        documents, _ = next(results)
                        assert seen is not None
                        seen.first_of(documents)
        (self._work / SEEN).unlink(missing_ok=True)

    def _open_seen(
        self, missing: Sequence[int], num_documents: int
    ) -> tuple[SeenDocuments | None, Sequence[int]]:
        """Return the documents before the first missing shard, and the shards that are to be read.

        These are more than the missing ones if the documents of the others are not known.
        num_documents: of the first missing shard, which are known too.
        """
        if not self._job.filters.without_duplicates:
            return None, missing
        per_item = 2 if self._job.is_paired else 1
        every = range(len(self._part.names))
        if [*missing] == [*every[missing[0] :]]:
            before = in_parallel(self._read_record, self._part.names[: missing[0]])
            count = num_documents + sum(record.num_documents for record in before if record)
            try:
                return SeenDocuments(self._work, count, per_item), missing
            except DataError:  # deleted when the part was complete, or another cache_dir
                pass
        return SeenDocuments(self._work, 0, per_item), every

    def _make_shard(
        self, shard: int, results: Iterator[TokenizedPiece], seen: SeenDocuments | None
    ) -> None:
        """Write the store of a shard into the folder for work. Raises: DataError, OSError."""
        folder, keys = self._work / self._part.names[shard], self._part.keys(shard)
        with StoreWriter(folder, self._part.store_plan(shard)) as writer:
            done = len(writer.pieces)
            if writer.pieces != keys[:done]:
                raise DataError(
                    f"{writer.building} was begun with other pieces; delete it and prepare again"
                )
            pieces = self._part.ranges[shard]
            for index, key in zip(pieces[done:], keys[done:], strict=True):
                self._report_at(index, writer.num_tokens)
                documents, skipped = next(results)
                if seen is not None:
                    documents, duplicates = seen.first_of(documents)
                    skipped = {**skipped, **duplicates}
                writer.append(key, documents, skipped)
            self._report_at(self._part.ranges[shard].stop, writer.num_tokens)
            if (changed := self._find_changed(shard)) is not None:
                writer.discard()
                remedy = "run again"
                if not has_made_nothing(self._folder, self._part.number):
                    remedy = f"restore it, or delete {self._folder} and prepare it again"
                raise DataError(f"{changed} changed while it was read; {remedy}")
            if writer.num_tokens:
                writer.finish()
                self._num_tokens += writer.num_tokens
            else:
                writer.discard()
                record = ShardRecord(
                    digest="",
                    num_tokens=0,
                    num_documents=0,
                    loss_tokens=0,
                    text_bytes=0,
                    unanswered=0,
                    is_masked=False,
                    skipped=writer.skipped,
                )
                begun = folder.with_name(f"{folder.name}.empty")
                write_tree(begun / RECORD, record.model_dump(mode="json"))
                publish_folder(begun, folder)

    def _report_at(self, piece: int, num_tokens: int) -> None:
        before = self._part.bytes_before
        self._report(before[piece], before[-1], self._num_tokens + num_tokens)

    def _find_changed(self, shard: int) -> str | None:
        """Return a file of a shard that has changed since the start, or None."""
        for path in self._part.paths(shard):
            forget_listings(path)
            if fingerprint([path]) != self._before[path]:
                return path
        return None

    def _publish(self, shard: int, listed: Sequence[ShardRecord] | None) -> None:
        """Pack a shard that is made, write its record, and move it to the store."""
        name = self._part.names[shard]
        made, target = self._work / name, self._folder / SHARDS / name
        remove_leftovers(made)
        if (made / RECORD).exists():
            record = read_model(made / RECORD, ShardRecord, f"delete {made} and run this again")
        else:
            store = Store(made)
            for rows in self._rows:
                rows.pack(store, shard, made)
            record = ShardRecord(
                digest=store.digest,
                num_tokens=store.num_tokens,
                num_documents=store.num_documents,
                loss_tokens=store.loss_tokens(),
                text_bytes=store.text_bytes(),
                unanswered=store.count_unanswered(),
                is_masked=store.is_masked,
                skipped=store.skipped,
            )
            write_tree(made / RECORD, record.model_dump(mode="json"))
        if listed is not None and record.digest != listed[shard].digest:
            shutil.rmtree(made)
            raise DataError(
                f"{self._folder}: shard {shard} holds other tokens than before, since a library or "
                f"the code of a filter has changed; restore them, or delete {self._folder} and "
                "prepare it again"
            )
        self._part.check(self._folder)
        if listed is not None:
            kept = {rows.list_file.name for rows in self._rows}
            for path in rows_lists(self._folder, self._part.number):
                if path.name not in kept:  # a shard that is made again lacks such rows
                    delete_file(path)
        move_folder(made, target)


def move_folder(made: Path, target: AnyPath) -> None:
    """Move a complete shard to its place; in a bucket, its record is written last."""
    if isinstance(target, BucketPath):
        upload_folder(made, target, last=RECORD)
        done = made.with_name(f"{made.name}.done")  # never half of it under its name
        rename(made, done)
        shutil.rmtree(done)
        return
    target.parent.mkdir(exist_ok=True)
    publish_folder(made, target)
