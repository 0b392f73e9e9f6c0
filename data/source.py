"""Where documents come from: the files of a source, their identity, and their cut into units.

Nothing here reads content: names, sizes, times, and the footers of Parquet and ArrayRecord. Names
go through fsspec: a local path is plain and absolute, any other keeps its protocol (gs://, s3://).
The format follows from the suffix, under .gz, .bz2, .xz or .zst too; what has no known suffix is
text, one document per file. Documents are in the order of the sorted paths, and within a file in
its own.
"""

import glob
import hashlib
import importlib
import os
import posixpath
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

Format = Literal["text", "jsonl", "parquet", "array_record", "datasets"]
UNIT_BYTES = 16 * 2**20
"""Input of one task: a second of tokenisation, and small beside a machine's memory."""

_LOCAL = LocalFileSystem()
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
_NOT_PROSE = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}


class DataError(ValueError):
    """What a user can mend about data, in one line: place, what is wrong, remedy."""


class Damaged(Exception):
    """A file that cannot be read on; its reader reports it as a fault, so that policy decides."""

    def __init__(self, kind: str, detail: object):
        super().__init__(kind, detail)
        self.kind = kind
        # Libraries write several lines; a report has one.
        self.detail = " ".join(str(detail).split())[:300]


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of one file.

    begin, end: bytes of plain JSON lines (the lines that start there), row groups of Parquet,
        records of ArrayRecord, rows of datasets; of text and compressed files always all bytes.
    """

    path: str
    format: Format
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Unit:
    """The work of one task: parts of files, in order."""

    entries: tuple[Entry, ...]


def load_library(module: str, extra: str = "data") -> ModuleType:
    """An optional library. Raises: DataError when it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"this data needs the library {module.split('.')[0]} ({error}); "
            f'pip install -e ".[{extra}]"'
        ) from error


def compression_of(path: str) -> str:
    """`.gz`, `.bz2`, `.xz`, `.zst`, or nothing."""
    suffix = posixpath.splitext(path.lower())[1]
    return suffix if suffix in _COMPRESSIONS else ""


def find_files(files: str | Sequence[str] | None, key: str = "data.files") -> list[str]:
    """The files of a source, sorted, each once.

    files: a glob or several (`**` reaches into folders; hidden files match only when named), a
        folder of Hugging Face datasets, or None: the `.py` files of the running interpreter's
        standard library without its tests, about 12 MB of text on every machine.
    key: the place in the config, for messages.
    Raises: DataError when a glob matches nothing or no file holds a byte.
    """
    if files is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        what = f"the standard library at {root}"
        found = [
            str(path)
            for path in root.rglob("*.py")
            if not _NOT_PROSE.intersection(path.relative_to(root).parts[:-1])
        ]
    else:
        what = f"{key}={files!r}"
        patterns = [files] if isinstance(files, str) else files
        found = [path for pattern in patterns for path in _match(pattern, f"{key}={pattern!r}")]
    if not found:
        raise _no_match(what)
    found = sorted(set(found))
    if not input_bytes(found):
        raise DataError(f"{what} matches {len(found)} file(s), all empty; give files with text")
    return found


def _no_match(what: str) -> DataError:
    return DataError(
        f"{what} matches no file; give a glob such as 'texts/*.txt', or null for "
        "the standard library's source"
    )


def _match(pattern: str, place: str) -> list[str]:
    """Files of one glob, or the datasets folder that it names."""
    system, path = _open_system(os.path.expanduser(pattern))
    if system.isdir(path):
        return [_datasets_folder(system, path, place)]
    if isinstance(system, LocalFileSystem):
        # Not fsspec's glob, which takes links for neither file nor folder.
        names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
        found = [name for name in names if os.path.isfile(name) or _is_datasets(name)]
        inside = {name for name in found if os.path.isdir(name)}
        found = [name for name in found if os.path.dirname(name) not in inside]
    else:
        try:
            literal = {path: system.info(path)} if system.isfile(path) else None
            infos = literal or system.glob(path, detail=True)
        except ValueError as error:  # a glob that fsspec refuses
            raise DataError(f"{place}: {error}; mend the glob") from error
        found = [
            system.unstrip_protocol(name)
            for name, info in infos.items()
            if info["type"] == "file" and name.count("/.") == path.count("/.")
        ]
    if not found:
        raise _no_match(place)
    return found


def _is_datasets(folder: str) -> bool:
    parts = ("dataset_info.json", "state.json")
    return all(os.path.isfile(os.path.join(folder, part)) for part in parts)


def _datasets_folder(system: Any, path: str, place: str) -> str:
    """`path`, when datasets' `save_to_disk` wrote it."""
    inside = {posixpath.basename(name.rstrip("/")) for name in system.ls(path, detail=False)}
    if "dataset_dict.json" in inside:
        splits = sorted(name for name in inside if system.isdir(posixpath.join(path, name)))
        raise DataError(f"{place} holds several datasets; add the name of one: {', '.join(splits)}")
    if not {"dataset_info.json", "state.json"} <= inside:
        raise DataError(f"{place} is a folder; name the files in it, for example {path}/**/*.txt")
    if not isinstance(system, LocalFileSystem):
        raise DataError(f"{place} is a datasets folder, which must be on a local disk; copy it")
    return path


def _open_system(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path, and the path's name there."""
    if "://" not in path:  # "::" may be part of a name; and url_to_fs is slow, files may be many
        return _LOCAL, LocalFileSystem._strip_protocol(path)
    try:
        return url_to_fs(path)
    except ImportError as error:
        extra = _EXTRAS.get(path.split("://")[0])
        remedy = f'pip install -e ".[{extra}]"' if extra else "install it"
        raise DataError(f"{path} needs a library ({error}); {remedy}") from error
    except OSError:
        raise
    except Exception as error:  # libraries behind fsspec have errors of their own
        raise DataError(f"{path}: {type(error).__name__}: {error}; mend the path") from error


def open_bytes(path: str) -> Any:
    """The file as it lies there, open for reading."""
    system, name = _open_system(path)
    return system.open(name, "rb")


def fingerprint(paths: Iterable[str]) -> str:
    """Identity of the files without reading them: sha256 hex of path, size and version of each."""
    digest = hashlib.sha256()
    for path in paths:
        for part in _stat(path):
            digest.update(repr(part).encode())
    return digest.hexdigest()


def input_bytes(paths: Iterable[str]) -> int:
    """Bytes of all files as they lie there, compressed or not."""
    return sum(size for path in paths for _, size, _ in _stat(path))


def _stat(path: str) -> list[tuple[str, int, str]]:
    """Name, size and version of a file, or of each file in a datasets folder."""
    system, name = _open_system(path)
    if isinstance(system, LocalFileSystem):
        names = sorted(entry.path for entry in os.scandir(name)) if os.path.isdir(name) else [name]
        stats = [(name, os.stat(name)) for name in names]
        return [(name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in stats]
    info = system.info(name)
    if info["size"] is None:
        raise DataError(f"{path}: its server does not tell the size; copy it to a disk")
    # The rest of what a store says may differ between listing a folder and asking for one file.
    known = (info.get(tag) for tag in ("ETag", "etag", "generation"))
    return [(path, info["size"], str(next(filter(None, known), None) or system.ukey(name)))]


def plan_units(paths: Sequence[str], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """The files cut and grouped into units of about `unit_bytes`, in order; without reading them.

    What cannot be cut (a text, a compressed file, a row group) is one entry however long it is.
    Raises: DataError for a format that cannot be read where it lies, or without its library.
    """
    units: list[Unit] = []
    entries: list[Entry] = []
    filled = 0
    for path in paths:
        for entry, size in _pieces(path, unit_bytes):
            if entries and filled + size > unit_bytes:
                units.append(Unit(tuple(entries)))
                entries, filled = [], 0
            if entries and entries[-1] == replace(entry, begin=entries[-1].begin, end=entry.begin):
                entries[-1] = replace(entry, begin=entries[-1].begin)
            else:
                entries.append(entry)
            filled += size
    return [*units, Unit(tuple(entries))] if entries else units


def _pieces(path: str, unit_bytes: int) -> Iterator[tuple[Entry, int]]:
    """Entries of one file, and about how many bytes each is."""
    size = input_bytes([path])
    compression = compression_of(path)
    suffix = posixpath.splitext(path.lower().removesuffix(compression))[1]
    format = "datasets" if os.path.isdir(path) else _FORMATS.get(suffix, "text")
    if compression and format not in ("text", "jsonl"):
        raise DataError(f"{path} is {suffix} inside {compression}; decompress it first")
    try:
        count = _COUNTS[format](path) if format in _COUNTS else size
    except Damaged:  # its reader meets the damage again, and reports it
        count = 1
    whole = format == "text" or bool(compression)
    step = max(1, count if whole else count * unit_bytes // max(1, size))
    for begin in range(0, max(count, whole), step):
        end = min(begin + step, count)
        yield Entry(path, format, begin, end), size * (end - begin) // max(1, count)


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """The `pyarrow.parquet.ParquetFile`. Raises: Damaged when its footer is."""
    pyarrow, parquet = load_library("pyarrow"), load_library("pyarrow.parquet")
    with open_bytes(path) as file:
        try:
            table = parquet.ParquetFile(
                file, buffer_size=2**20, page_checksum_verification=True, pre_buffer=False
            )
        except (pyarrow.ArrowException, OSError) as error:
            raise Damaged("corrupt file", error) from error
        yield table


def open_array_record(path: str) -> Any:
    """The `ArrayRecordReader`. Raises: Damaged when its footer is."""
    library = load_library("array_record.python.array_record_module")
    system, name = _open_system(path)
    if not isinstance(system, LocalFileSystem):
        raise DataError(f"{path}: ArrayRecord must be on a local disk; copy it")
    os.stat(name)  # the reader is silent about a file that is not there
    # One thread: tasks are parallel already.
    reader = library.ArrayRecordReader(name, "max_parallelism:0")
    if reader.ok():
        return reader
    reason = "no ArrayRecord"
    try:
        reader.close()  # which tells why it is not well
    except RuntimeError as error:
        reason = str(error)
    raise Damaged("corrupt file", reason)


def open_dataset(path: str) -> Any:
    """The `datasets.Dataset` in a folder. Raises: Damaged when a part is missing or broken."""
    datasets = load_library("datasets")
    try:
        return datasets.load_from_disk(path)
    except Exception as error:  # of a broken state.json it is any kind
        raise Damaged("corrupt file", f"{type(error).__name__}: {error}") from error


def _num_row_groups(path: str) -> int:
    with open_parquet(path) as table:
        return table.num_row_groups


def _num_records(path: str) -> int:
    return open_array_record(path).num_records()


_COUNTS: dict[Format, Callable[[str], int]] = {
    "parquet": _num_row_groups,
    "array_record": _num_records,
    "datasets": lambda path: len(open_dataset(path)),
}
