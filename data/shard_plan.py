"""Plan a part of a sharded store: which pieces of the input each of its shards holds.

The plan of a part is written before anything else and stays, so that a command that was interrupted
makes the same shards.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from data.bucket_path import AnyPath, BucketPath
from data.files import DataError
from data.formats.pieces import InputPiece, bytes_before_each, piece_key, plan_pieces
from data.hub import parse_split
from data.shard_list import (
    PARTS,
    SHARDS,
    Part,
    delete_file,
    entries,
    part_file,
    read_model,
    read_parts,
    shard_name,
    shard_names,
    write_tree,
)
from data.store import InputFile, StorePlan
from data.store_job import StoreJob
from safe_files import json_digest


@dataclass(frozen=True)
class Sharding:
    """Size and order of the shards of a store."""

    shard_bytes: int
    """Bytes of input of a shard, approximately. A part keeps those with which it was begun."""
    in_order: bool = False
    """Runs read the shards one after the other, also while they are prepared."""
    append: bool = False
    """Add the files as another part to a store of other files."""


@dataclass(frozen=True)
class PlannedPart:
    """A part of a store and the pieces of the input that its shards hold."""

    number: int
    """Index of the part in its store."""
    recorded: Part
    """Its description in the store."""
    pieces: Sequence[InputPiece]
    """Pieces of the input, in order."""
    sizes: Mapping[str, int]
    """Bytes of every input file."""
    bytes_before: Sequence[int]
    """Bytes of input before each piece, and of all."""

    @cached_property
    def names(self) -> list[str]:
        """Names of the shards."""
        return [shard_name(self.number, n) for n in range(len(self.recorded.pieces))]

    @cached_property
    def ranges(self) -> list[range]:
        """Pieces of each shard."""
        ends = accumulate(self.recorded.pieces)
        return [range(end - n, end) for n, end in zip(self.recorded.pieces, ends, strict=True)]

    def check(self, folder: AnyPath) -> None:
        """Raise DataError if this is not the plan of the part any more."""
        file = part_file(folder, self.number)
        remedy = "another command replaced it, or it was deleted; run this command again"
        try:
            if read_model(file, Part, remedy).digest == self.recorded.digest:
                return
        except FileNotFoundError:
            pass
        raise DataError(f"{file} has changed since this command began: {remedy}")

    def keys(self, shard: int) -> list[str]:
        """Return the keys of the pieces of a shard."""
        return [piece_key(self.pieces[i]) for i in self.ranges[shard]]

    def paths(self, shard: int) -> list[str]:
        """Return the input files of a shard."""
        pieces = (self.pieces[i] for i in self.ranges[shard])
        return [*dict.fromkeys(part.path for piece in pieces for part in piece.ranges)]

    def store_plan(self, shard: int) -> StorePlan:
        """Return the plan of the store that is a shard."""
        plan = self.recorded.plan
        files = tuple(InputFile(path=path, size=self.sizes[path]) for path in self.paths(shard))
        key = hashlib.sha256(f"{plan.key}/{shard}".encode()).hexdigest()
        return plan.model_copy(update={"key": key, "files": files})


class PartPlanner:
    """Finds the part of a job in a store, or begins it."""

    def __init__(self, job: StoreJob, folder: AnyPath, sharding: Sharding):
        self._job, self._folder, self._sharding = job, folder, sharding
        self._parts = read_parts(folder)
        self._planned = self._plan()

    def find(self) -> PlannedPart | None:
        """Return the part of the job if it was begun before.

        Raises: DataError if it was begun by other code or with other options.
        """
        wanted = self._planned.recorded
        for number, part in enumerate(self._parts):
            if part.plan.key == wanted.plan.key:
                self._check_begun(part, wanted)
                return replace(self._planned, number=number, recorded=part)
        return None

    def check_new(self) -> None:
        """Raise DataError unless the job may begin a part of the store."""
        for part in self._parts:
            self._check_revision(part)
        number, is_replaced = self._next()
        if is_replaced and isinstance(self._folder, BucketPath):  # it has no lock
            raise DataError(
                f"{self._folder} was begun with other files or settings, and has no shard of them "
                "yet; unless another command is making them, delete it and prepare it again"
            )
        if number:
            self._check_append(number, self._parts[0])
        elif not is_replaced:
            check_new_store(self._folder, self._sharding)

    def begin(self) -> PlannedPart:
        """Write the plan of the job as another part, or in place of one that has made nothing.

        Raises: DataError if another command has begun one meanwhile; OSError.
        """
        number, is_replaced = self._next()
        file = part_file(self._folder, number)
        if is_replaced:
            delete_file(file)
        if not write_tree(file, self._planned.recorded.model_dump(mode="json"), create=True):
            raise DataError(
                f"{self._folder}: another command has just begun to add to it; run again"
            )
        return replace(self._planned, number=number)

    def _next(self) -> tuple[int, bool]:
        """Return the number of a new part, and whether it replaces one that has made nothing."""
        number = len(self._parts)
        is_replaced = number > 0 and has_made_nothing(self._folder, number - 1)
        return number - is_replaced, is_replaced

    def _plan(self) -> PlannedPart:
        job, plan = self._job, self._job.plan()
        pieces = plan_pieces(job.paths)
        bytes_before = bytes_before_each(pieces, plan.files)
        counts: list[int] = []
        begin = 0
        for index in range(1, len(pieces) + 1):
            size = bytes_before[index] - bytes_before[begin]
            if size >= self._sharding.shard_bytes or index == len(pieces):
                counts.append(index - begin)
                begin = index
        part = Part(
            plan=plan.model_copy(update={"files": ()}),
            num_files=len(plan.files),
            num_bytes=job.num_bytes,
            pieces=tuple(counts),
            pieces_digest=json_digest([piece_key(piece) for piece in pieces]),
            in_order=self._sharding.in_order,
        )
        sizes = {file.path: file.size for file in plan.files}
        return PlannedPart(0, part, pieces, sizes, bytes_before)

    def _check_begun(self, part: Part, wanted: Part) -> None:
        if part.pieces_digest != wanted.pieces_digest:
            raise DataError(
                f"{self._folder} was begun by a version of this program that reads the files in "
                "other pieces; delete it and prepare it again"
            )
        if part.in_order != wanted.in_order:
            was = "with" if part.in_order else "without"
            raise DataError(f"{self._folder} was begun {was} --stream; give the same")

    def _check_revision(self, part: Part) -> None:
        """Raise DataError if a split of the hub has changed since the part was begun."""
        begun, now = (parse_split(files) for files in (part.plan.source["files"], self._job.files))
        if begun is not None and now is not None and now.is_another_revision_of(begun):
            raise DataError(
                f"{self._job.files_key}={now}: {self._folder} was begun with another revision; set "
                f"it to {begun} to go on with that"
            )

    def _check_append(self, number: int, first: Part) -> None:
        """Raise DataError unless a part with this number may be added to the store."""
        folder = self._folder
        if not part_file(folder, number - 1, "shards").is_file():
            raise DataError(
                f"{folder}: its part {number - 1} is not complete, and was begun with other files "
                "or settings; finish it with the command that began it, or, if its files have "
                f"changed, delete {folder} and prepare it again"
            )
        files = self._planned.recorded.plan.source["files"]
        if any(part.plan.source["files"] == files for part in self._parts):
            raise DataError(
                f"{folder} was prepared from data.files={files} before, and one of these files or "
                f"a setting has changed since; restore it, or delete {folder} and prepare it again"
            )
        if not self._sharding.append:
            raise DataError(
                f"{folder} holds shards of other files or settings; add --append to add these "
                "files to it, or choose another folder"
            )
        if (reason := self._planned.recorded.explain_difference(first)) is not None:
            raise DataError(f"{folder} {reason}, or choose another folder")


def check_new_store(folder: AnyPath, sharding: Sharding) -> None:
    """Raise DataError if a store cannot be begun in a folder; nothing is written."""
    found = {path.name for path in entries(folder)} - {PARTS, SHARDS, "building"}
    if found:
        raise DataError(f"{folder} holds other files, such as {min(found)}; choose another folder")
    if sharding.append:
        raise DataError(f"--append: {folder} is no store in shards yet; leave --append out")


def has_made_nothing(folder: AnyPath, number: int) -> bool:
    """Return whether the command that planned a part has published nothing."""
    if part_file(folder, number, "shards").is_file():
        return False
    return not any(name.startswith(f"{number:05}-") for name in shard_names(folder))
