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
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from data.bucket_path import AnyPath, BucketPath
from data.duplicates import SeenDocuments
from data.files import DataError, fingerprint, forget_listings
from data.formats.shards import bytes_before_each, piece_key, plan_shards
from data.hub import parse_split
from data.packed_store import PACKS, PackSettings, open_rows, write_rows
from data.packing import TooLittleTextError
from data.prepare import (
    ReportProgress,
    StoreJob,
    check_skipped,
    locked,
    no_answer,
)
from data.shard_list import (
    NO_ROWS,
    PARTS,
    RECORD,
    SHARDS,
    Part,
    RowsRecord,
    ShardRecord,
    delete_file,
    digest_of,
    entries,
    in_parallel,
    part_file,
    read_list,
    read_model,
    read_parts,
    rows_key,
    shard_name,
    shard_names,
    write_list,
    write_tree,
)
from data.sharded_store import ShardedStore, read_rows_record
from data.store import INFO, InputFile, Skipped, Store, StorePlan
from data.store_writer import SEEN, StoreWriter, add_skipped, remove_leftovers
from data.tokenization import Engine, TokenizedShard, tokenize_shards
from safe_files import publish_folder, rename


@dataclass(frozen=True)
class Sharding:
    """How a store is cut into shards."""

    shard_bytes: int = 2**30
    """Bytes of input of a shard, approximately; about a fifth as many tokens."""
    in_order: bool = False
    """Runs read the shards one after the other, also while they are prepared."""
    append: bool = False
    """Add the files as another part to a store of other files."""


def prepare_shards(
    job: StoreJob,
    folder: AnyPath,
    sharding: Sharding,
    settings: PackSettings,
    *,
    cache: Path,
    engine: Engine = tokenize_shards,
    report: ReportProgress | None = None,
) -> ShardedStore:
    """Make the shards of a source that are missing, pack their rows, and return the store.

    cache: folder for the work on a store in a bucket.
    Raises: DataError for what the user can correct; OSError. After either, or a kill, the next call
        continues.
    """
    root = _work_folder(folder, cache)
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
        settings: PackSettings,
        engine: Engine,
        report: ReportProgress,
        root: Path,
    ):
        self._job, self._folder, self._sharding, self._settings = job, folder, sharding, settings
        self._engine, self._report, self._root = engine, report, root
        # Of another plan, even with the same name, nothing may be published.
        self._work = root / job.key[:16]
        self._work.mkdir(exist_ok=True)

    def run(self) -> None:
        """Make what is missing. Raises: DataError, OSError."""
        self._pieces = plan_shards(self._job.paths)
        self._number, self._part = self._find_part(read_parts(self._folder))
        self._names = [shard_name(self._number, n) for n in range(len(self._part.pieces))]
        ends = list(accumulate(self._part.pieces))
        self._ranges = [range(end - n, end) for n, end in zip(self._part.pieces, ends, strict=True)]
        file = part_file(self._folder, self._number, "shards")
        listed = read_list(file, ShardRecord)
        there = self._there()
        missing = [n for n, name in enumerate(self._names) if name not in there]
        if missing:
            self._make(missing, listed)
        if listed is None:
            listed = [
                record
                for record in in_parallel(self._read_record, self._names)
                if record is not None
            ]
            assert len(listed) == len(self._names)
            write_list(file, listed)
        self._check_records(listed)
        self._write_rows_list(listed)

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

    # Parts

    def _find_part(self, parts: Sequence[Part]) -> tuple[int, Part]:
        """Return the part of the job, which is planned now unless it was before."""
        folder, wanted = self._folder, self._plan_part()
        for number, part in enumerate(parts):
            if part.plan.key == wanted.plan.key:
                return number, self._check_begun(part, wanted)
        for part in parts:
            self._check_revision(part)
        number = len(parts)
        if is_replaced := number > 0 and self._made_nothing(number - 1):
            number -= 1
        if number:
            self._check_append(number, parts[0], wanted)
        elif self._sharding.append:
            raise DataError(f"--append: {folder} is no store in shards yet; leave it out")
        elif not is_replaced:
            self._check_free()
        for path in self._root.iterdir():
            if path.is_dir() and path != self._work:
                shutil.rmtree(path)
        file = part_file(folder, number)
        if is_replaced:
            delete_file(file)
        if not write_tree(file, wanted.model_dump(mode="json"), create=True):
            raise DataError(f"{folder}: another command has just begun to add to it; run again")
        return number, wanted

    def _check_append(self, number: int, first: Part, wanted: Part) -> None:
        """Raise DataError unless a part with this number may be added to the store."""
        folder = self._folder
        if not part_file(folder, number - 1, "shards").is_file():
            raise DataError(
                f"{folder}: its part {number - 1} is not complete, and was begun with other files "
                "or settings; finish it with the command that began it, or, if its files have "
                f"changed, delete {folder} and prepare it again"
            )
        if not self._sharding.append:
            raise DataError(
                f"{folder} holds shards of other files or settings; add --append to add these "
                "files to it, or choose another folder"
            )
        if (reason := wanted.explain_difference(first)) is not None:
            raise DataError(f"{folder} {reason}, or choose another folder")

    def _check_free(self) -> None:
        """Raise DataError if the folder holds anything but the work on a store in shards."""
        found = {path.name for path in entries(self._folder)} - {PARTS, SHARDS, "building"}
        if found:
            raise DataError(
                f"{self._folder} holds other files, such as {min(found)}; choose another folder"
            )

    def _made_nothing(self, number: int) -> bool:
        """Return whether the command that planned a part has published nothing."""
        if part_file(self._folder, number, "shards").is_file():
            return False
        return not any(name.startswith(f"{number:05}-") for name in shard_names(self._folder))

    def _check_revision(self, part: Part) -> None:
        """Raise DataError if a split of the hub has changed since the part was begun."""
        begun, now = (parse_split(files) for files in (part.plan.source["files"], self._job.files))
        if begun is not None and now is not None and now.is_another_revision_of(begun):
            raise DataError(
                f"{self._job.files_key}={now}: {self._folder} was begun with another revision; set "
                f"it to {begun} to go on with that"
            )

    def _plan_part(self) -> Part:
        job, plan = self._job, self._job.plan()
        self._sizes = {file.path: file.size for file in plan.files}
        self._bytes_before = bytes_before_each(self._pieces, plan.files)
        counts: list[int] = []
        begin = 0
        for index in range(1, len(self._pieces) + 1):
            size = self._bytes_before[index] - self._bytes_before[begin]
            if size >= self._sharding.shard_bytes or index == len(self._pieces):
                counts.append(index - begin)
                begin = index
        return Part(
            plan=plan.model_copy(update={"files": ()}),
            num_files=len(plan.files),
            num_bytes=job.num_bytes,
            pieces=tuple(counts),
            pieces_digest=digest_of([piece_key(piece) for piece in self._pieces]),
            in_order=self._sharding.in_order,
        )

    def _check_begun(self, part: Part, wanted: Part) -> Part:
        if part.pieces_digest != wanted.pieces_digest:
            raise DataError(
                f"{self._folder} was begun by a version of this program that reads the files in "
                "other pieces; delete it and prepare it again"
            )
        if part.in_order != wanted.in_order:
            was = "with" if part.in_order else "without"
            raise DataError(f"{self._folder} was begun {was} --stream; give the same")
        return part

    # Shards

    def _there(self) -> set[str]:
        """Return the names of the shards of this part that are complete."""
        found = shard_names(self._folder)
        if isinstance(self._folder, Path):  # a rename publishes all of a shard
            return found
        names = [name for name in self._names if name in found]
        have_record = in_parallel(
            lambda name: (self._folder / SHARDS / name / RECORD).is_file(), names
        )
        return {name for name, is_there in zip(names, have_record, strict=True) if is_there}

    def _read_record(self, name: str) -> ShardRecord | None:
        path = self._folder / SHARDS / name / RECORD
        return read_model(
            path, ShardRecord, f"delete {self._folder / SHARDS / name} and run this again"
        )

    def _make(self, missing: list[int], listed: Sequence[ShardRecord] | None) -> None:
        """Make the missing shards; listed: what they must hold, if the part was complete."""
        for path in [*self._work.glob("*.done"), *self._work.glob("*.empty")]:
            shutil.rmtree(path)
        for n in [n for n in missing if (self._work / self._names[n]).exists()]:
            made = self._work / self._names[n]
            if not ((made / RECORD).exists() or (made / INFO).exists()):
                shutil.rmtree(made)
                continue
            self._publish(n, listed)  # a kill came between its last piece and its publication
            missing.remove(n)
        if not missing:
            return
        for path in self._work.glob("*.building"):
            if path.name != f"{self._names[missing[0]]}.building":
                shutil.rmtree(path)
        with StoreWriter(*self._target(missing[0])) as writer:
            done, num_documents = len(writer.shards), writer.num_documents
        seen, todo = self._open_seen(missing, num_documents)
        if todo != missing:
            shutil.rmtree(writer.building)
            done = 0
        pieces = [self._pieces[i] for n in todo for i in self._ranges[n]][done:]
        self._before = {path: fingerprint([path]) for n in missing for path in self._paths(n)}
        self._num_tokens = 0
        with (
            seen or nullcontext(),
            closing(self._engine(pieces, self._job.settings(self._part.plan.dtype))) as results,
        ):
            for n in todo:
                if n in missing:
                    self._make_shard(n, results, seen)
                    self._publish(n, listed)
                else:  # only to know its documents
                    for _ in self._ranges[n]:
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
        every = range(len(self._names))
        if [*missing] == [*every[missing[0] :]]:
            before = in_parallel(self._read_record, self._names[: missing[0]])
            count = num_documents + sum(record.num_documents for record in before if record)
            try:
                return SeenDocuments(self._work, count, per_item), missing
            except DataError:  # deleted when the part was complete, or another cache_dir
                pass
        return SeenDocuments(self._work, 0, per_item), every

    def _paths(self, shard: int) -> list[str]:
        pieces = (self._pieces[i] for i in self._ranges[shard])
        return [*dict.fromkeys(part.path for piece in pieces for part in piece.ranges)]

    def _target(self, shard: int) -> tuple[Path, StorePlan]:
        """Return the folder in which a shard is made, and the plan of its store."""
        plan = self._part.plan
        files = tuple(InputFile(path=path, size=self._sizes[path]) for path in self._paths(shard))
        key = hashlib.sha256(f"{plan.key}/{shard}".encode()).hexdigest()
        changed = {"key": key, "files": files}
        return self._work / self._names[shard], plan.model_copy(update=changed)

    def _make_shard(
        self, shard: int, results: Iterator[TokenizedShard], seen: SeenDocuments | None
    ) -> None:
        """Write the store of a shard into the folder for work. Raises: DataError, OSError."""
        folder, plan = self._target(shard)
        keys = [piece_key(self._pieces[i]) for i in self._ranges[shard]]
        with StoreWriter(folder, plan) as writer:
            done = len(writer.shards)
            if writer.shards != keys[:done]:
                raise DataError(
                    f"{writer.building} was begun with other pieces; delete it and prepare again"
                )
            for index in self._ranges[shard][done:]:
                self._report_at(index, writer.num_tokens)
                documents, skipped = next(results)
                if seen is not None:
                    documents, duplicates = seen.first_of(documents)
                    skipped = {**skipped, **duplicates}
                writer.append(piece_key(self._pieces[index]), documents, skipped)
            self._report_at(self._ranges[shard].stop, writer.num_tokens)
            if (changed := self._find_changed(shard)) is not None:
                writer.discard()
                remedy = "run again"
                if not self._made_nothing(self._number):
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
        before = self._bytes_before
        self._report(before[piece], before[-1], self._num_tokens + num_tokens)

    def _find_changed(self, shard: int) -> str | None:
        """Return a file of a shard that has changed since the start, or None."""
        for path in self._paths(shard):
            forget_listings(path)
            if fingerprint([path]) != self._before[path]:
                return path
        return None

    def _publish(self, shard: int, listed: Sequence[ShardRecord] | None) -> None:
        """Pack a shard that is made, write its record, and move it to the store."""
        name = self._names[shard]
        made, target = self._work / name, self._folder / SHARDS / name
        remove_leftovers(made)
        if (made / RECORD).exists():
            record = read_model(made / RECORD, ShardRecord, f"delete {made} and run this again")
        else:
            store = Store(made)
            self._pack(store, shard, made)
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
        move_folder(made, target)

    # Rows

    def _pack(self, store: Store, shard: int, folder: Path) -> None:
        """Pack the rows of a shard into its folder."""
        packs, wanted = folder / PACKS, self._settings
        if self._part.in_order and (self._number or self._is_held_out_before(shard)):
            wanted = replace(wanted, eval_fraction=0.0)
        try:
            rows = write_rows(store, wanted, packs)
        except TooLittleTextError:
            try:
                rows = write_rows(store, replace(wanted, eval_fraction=0.0), packs)
            except TooLittleTextError:  # no preference pair fits a row
                rows = None
        record = NO_ROWS
        if rows is not None:
            record = RowsRecord(name=rows.name, info=asdict(open_rows(rows, keep=False).info))
        write_tree(packs / f"{rows_key(self._settings)}.json", record.model_dump(mode="json"))

    def _is_held_out_before(self, shard: int) -> bool:
        """Return whether an earlier shard of a store that is read in order has held-out rows."""
        key = rows_key(self._settings)
        for name in self._names[:shard]:
            record = read_rows_record(self._folder / SHARDS / name, key)
            if record is not None and record.counts.held_out_rows:
                return True
        return False

    def _write_rows_list(self, listed: Sequence[ShardRecord]) -> None:
        """Write the list of the rows of all shards, unless it is there. Raises: DataError."""
        key = rows_key(self._settings)
        file = part_file(self._folder, self._number, key)
        records = read_list(file, RowsRecord)
        if records is None:
            numbers = [n for n, record in enumerate(listed) if record.num_tokens]
            if self._part.in_order:  # each looks at those before it
                found = [self._rows_of(number) for number in numbers]
            else:
                found = in_parallel(self._rows_of, numbers)
            by_number = dict(zip(numbers, found, strict=True))
            records = [by_number.get(n, NO_ROWS) for n in range(len(listed))]
            write_list(file, records)
        counts = [record.counts for record in records]
        if not sum(count.train_rows for count in counts):
            raise DataError(f"{self._folder}: no row is left for training; give more text")
        is_first = self._number == 0 and self._settings.eval_fraction
        if is_first and not sum(count.held_out_rows for count in counts):
            raise DataError(
                f"{self._folder}: no shard has enough text to hold out "
                f"data.eval_fraction={self._settings.eval_fraction:g} of it; give a larger "
                "--shard-gb or fraction, or data.eval_fraction=0"
            )

    def _rows_of(self, shard: int) -> RowsRecord:
        """Return the record of the rows of a shard, which are packed unless they are there."""
        name, key = self._names[shard], rows_key(self._settings)
        folder = self._folder / SHARDS / name
        if (record := read_rows_record(folder, key)) is not None:
            return record
        made = folder if isinstance(folder, Path) else self._work / f"{name}.rows"
        self._pack(Store(folder), shard, made)
        if isinstance(folder, BucketPath):
            upload_folder(made, folder, last=f"{PACKS}/{key}.json")
            shutil.rmtree(made)
        found = read_rows_record(folder, key)
        assert found is not None
        return found


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


def upload_folder(source: Path, target: BucketPath, last: str) -> None:
    """Copy the files of a folder to a bucket. last: the file that says that it is complete."""
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    in_parallel(lambda name: (target / name).upload(source / name), [n for n in names if n != last])
    (target / last).upload(source / last)
