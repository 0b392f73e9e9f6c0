"""Lists of a sharded store: what was added to it, and what each of its shards holds.

A sharded store is a folder, on a disk or in a bucket, to which files are only added:
    parts/00000.json         what the first command adds, written before its first shard
    parts/00000.shards.json  records of all shards of that part, written after the last one
    parts/00000.KEY.json     records of their packed rows, for some row length and packing
    shards/00000-00017/      shard 17 of part 0: a store (see `store.py`) with its packed rows, and
                             its record in shard.json, which is written last
A run reads the lists of the parts alone, and opens a shard when a batch needs it.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, NonNegativeInt, ValidationError

from data.bucket_path import AnyPath, BucketPath
from data.files import DataError
from data.packed_store import PackingInfo, PackSettings
from data.store import Skipped, StorePlan
from safe_files import json_digest, replace_file

PARTS, SHARDS, RECORD = "parts", "shards", "shard.json"
# Requests at a time, of files that are read in parallel.
_AT_A_TIME = 32
T = TypeVar("T")
U = TypeVar("U")
Model = TypeVar("Model", bound=BaseModel)


class Part(BaseModel, frozen=True, extra="forbid"):
    """Description of the shards that one command adds to a store.

    plan: of its stores; the files stand in the shards. num_files, num_bytes: of the input. pieces:
    how many pieces of the input each shard holds, see `plan_pieces`. pieces_digest: SHA-256 of
    them. in_order: runs read the shards one after the other.
    """

    version: Literal[1] = 1
    plan: StorePlan
    num_files: NonNegativeInt
    num_bytes: NonNegativeInt
    pieces: tuple[NonNegativeInt, ...]
    pieces_digest: str
    in_order: bool

    @property
    def digest(self) -> str:
        """SHA-256 of the part."""
        return json_digest(self.model_dump(mode="json"))

    def explain_difference(self, first: "Part") -> str | None:
        """Return why this part cannot be added to a store that begins with another; None: it can.

        Each reason ends with the setting that would agree with the store.
        """
        here, there = self.plan, first.plan
        if here.tokenizer_digest != there.tokenizer_digest:
            return f"was made with tokenizer {there.tokenizer}; set data.tokenizer to it"
        if here.encoding.bos_id != there.encoding.bos_id:
            return "has another BOS before its documents; set data.add_bos as before"
        if here.encoding.is_paired != there.encoding.is_paired:
            return "differs in data.packing=pairs; set it as before"
        if here.encoding.chat_template != there.encoding.chat_template:
            return "was made with another chat template; set data.chat_template as before"
        if self.in_order != first.in_order:
            was = "was made with" if first.in_order else "was made without"
            return f"{was} --stream; give the same"
        return None


class ShardRecord(BaseModel, frozen=True, extra="forbid"):
    """Counts of a shard; an empty one has no tokens, and no file but this record.

    digest: of its store. loss_tokens: tokens that contribute to the loss. unanswered: documents of
    which nothing is in the loss.
    """

    digest: str
    num_tokens: NonNegativeInt
    num_documents: NonNegativeInt
    loss_tokens: NonNegativeInt
    text_bytes: NonNegativeInt
    unanswered: NonNegativeInt
    is_masked: bool
    skipped: dict[str, Skipped]


class RowsRecord(BaseModel, frozen=True, extra="forbid"):
    """Packed rows of a shard. name: of their folder in `packs`; empty if it has no rows."""

    name: str
    info: dict[str, int]

    @property
    def counts(self) -> PackingInfo:
        """The counts of the rows."""
        return PackingInfo(**self.info)


NO_ROWS = RowsRecord(
    name="",
    info=asdict(
        PackingInfo(
            train_rows=0,
            train_tokens=0,
            padding=0,
            cut_documents=0,
            held_out_rows=0,
            held_out_tokens=0,
            held_out_learned=0,
        )
    ),
)


def rows_key(settings: PackSettings) -> str:
    """Return the part of the names of lists that stands for these settings."""
    return json_digest([asdict(settings), settings.versions])[:16]


def shard_name(part: int, shard: int) -> str:
    """Return the name of the folder of a shard."""
    return f"{part:05}-{shard:05}"


def part_file(folder: AnyPath, part: int, kind: str = "") -> AnyPath:
    """Return the file of a part, or one of its lists: `shards`, or a `rows_key`."""
    return folder / PARTS / (f"{part:05}.{kind}.json" if kind else f"{part:05}.json")


def rows_lists(folder: AnyPath, part: int) -> list[AnyPath]:
    """Return the lists of rows of a part, one for each setting of packing."""
    others = {part_file(folder, part).name, part_file(folder, part, "shards").name}
    found = [path for path in entries(folder / PARTS) if path.name not in others]
    return [path for path in found if path.name.startswith(f"{part:05}.")]


def is_sharded(folder: AnyPath) -> bool:
    """Return whether a folder is a sharded store."""
    return part_file(folder, 0).is_file()


def read_parts(folder: AnyPath) -> list[Part]:
    """Return the parts of a sharded store, in their order; none if it is none. Raises: DataError.

    A file that cannot be read is named with its remedy.
    """
    found: list[Part] = []
    names = {path.name for path in entries(folder / PARTS)}
    while (path := part_file(folder, len(found))).name in names:
        found.append(read_model(path, Part, f"restore it, or delete {folder} and prepare it again"))
    return found


def shard_names(folder: AnyPath) -> set[str]:
    """Return the names of the shards that are there."""
    return {path.name for path in entries(folder / SHARDS)}


def entries(folder: AnyPath) -> Iterable[AnyPath]:
    """Return what is in a folder; nothing if there is none."""
    try:
        return [*folder.iterdir()]
    except FileNotFoundError:
        return []


def read_list(path: AnyPath, kind: type[Model]) -> list[Model] | None:
    """Return the records of a list of a part; None if there is no such list. Raises: DataError."""
    remedy = f"delete {path}, and run the command that prepared the store again"
    try:
        records = _parse(path.read_bytes())["records"]
        return [kind.model_validate(record) for record in records]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, ValidationError) as error:
        raise DataError(f"{path} is damaged; {remedy}") from error


def read_model(path: AnyPath, kind: type[Model], remedy: str) -> Model:
    """Return the content of a file. Raises: DataError, FileNotFoundError."""
    try:
        return kind.model_validate(_parse(path.read_bytes()))
    except (ValueError, LookupError, TypeError, ValidationError) as error:
        raise DataError(f"{path} is damaged; {remedy}") from error


def write_list(path: AnyPath, records: Sequence[BaseModel]) -> None:
    """Write the records of all shards of a part."""
    write_tree(path, {"records": [record.model_dump(mode="json") for record in records]})


def write_tree(path: AnyPath, tree: Mapping[str, Any], *, create: bool = False) -> bool:
    """Write JSON values with their checksum; return whether they were written.

    create: only where there is no such file.
    """
    content = json.dumps({**tree, "checksum": json_digest(tree)}).encode()
    if isinstance(path, BucketPath):
        if create:
            return path.create(content)
        path.overwrite(content)
    else:
        if create and path.exists():
            return False
        replace_file(path, content)
    return True


def delete_file(path: AnyPath) -> None:
    """Delete a file of a list."""
    if isinstance(path, BucketPath):
        path.delete()
    else:
        path.unlink(missing_ok=True)


def _parse(content: bytes) -> dict[str, Any]:
    tree = json.loads(content)
    if tree.pop("checksum") != json_digest(tree):
        raise ValueError("its checksum does not match")
    found: dict[str, Any] = tree
    return found


def in_parallel(function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Return the results of a function that waits for files, in the order of the items."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(items))) as pool:
        return [*pool.map(function, items)]


def upload_folder(source: Path, target: BucketPath, last: str) -> None:
    """Copy the files of a folder to a bucket. last: the file that says that it is complete."""
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    in_parallel(lambda name: (target / name).upload(source / name), [n for n in names if n != last])
    (target / last).upload(source / last)
