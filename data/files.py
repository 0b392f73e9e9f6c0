"""Input files of a source: find, open and fingerprint them, on local disks and object stores.

Paths go through fsspec: a local path becomes absolute, any other keeps its protocol (gs://, s3://).
Nothing here reads the content of a file.
"""

import glob
import hashlib
import importlib
import os
import posixpath
import re
import sysconfig
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

_LOCAL = LocalFileSystem()
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3", "hf": "data"}
_TEST_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}


class DataError(ValueError):
    """Data error that the user can correct; one line with place, rule and remedy."""


class DamagedFileError(Exception):
    """File whose rest cannot be read; `read_documents` turns it into a `DocumentError`."""

    def __init__(self, kind: str, detail: object):
        super().__init__(kind, detail)
        self.kind = kind
        # Libraries raise messages of several lines; a report has one line.
        self.detail = " ".join(str(detail).split())[:300]


def load_library(module: str, extra: str = "data") -> ModuleType:
    """Import an optional library. Raises: DataError when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"this data needs the library {module.split('.')[0]} ({error}); "
            f'pip install -e ".[{extra}]"'
        ) from error


def compression_of(path: str) -> str:
    """Return `.gz`, `.bz2`, `.xz` or `.zst`, or an empty string for a plain file."""
    suffix = posixpath.splitext(path.lower())[1]
    return suffix if suffix in _COMPRESSIONS else ""


def suffix_of(path: str) -> str:
    """Return the lowercase suffix of a file name, without that of a compression."""
    return posixpath.splitext(path.lower().removesuffix(compression_of(path)))[1]


def find_files(
    files: str | Sequence[str] | None, key: str = "data.files", suffixes: Container[str] = ()
) -> list[str]:
    """Return the files of a source, sorted, each once.

    files: one or several globs (`**` descends into folders; hidden files match only when named),
        folders, or None for the `.py` files of the running interpreter's standard library without
        its tests, about 12 MB of text. A folder is one written by
        `datasets.Dataset.save_to_disk`, or stands for the files in it and below that have one of
        the suffixes; if none has, for all of them.
    key: configuration key, for error messages.
    suffixes: of the files that a folder stands for, lowercase and without that of a compression.
    Raises: DataError when a glob matches nothing or all files are empty.
    """
    if files is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        what = f"the standard library at {root}"
        found = [
            str(path)
            for path in root.rglob("*.py")
            if not _TEST_FOLDERS.intersection(path.relative_to(root).parts[:-1])
        ]
    else:
        what = f"{key}={files!r}"
        patterns = [files] if isinstance(files, str) else files
        found = [path for pattern in patterns for path in _match(pattern, key, suffixes)]
    if not found:
        raise _no_match(what)
    found = sorted(set(found))
    if not input_bytes(found):
        raise DataError(f"{what} matches {len(found)} file(s), all empty; give files with text")
    return found


def cannot_lock(file: str, error: OSError) -> DataError:
    """Return the error for a file of `data.cache_dir` that cannot be locked."""
    return DataError(
        f"{file} cannot be locked: {error.strerror}; mount the file system with locks "
        "(Lustre: -o flock), or give another data.cache_dir"
    )


def _no_match(what: str, pattern: str = "") -> DataError:
    remedy = "give a glob such as 'texts/*.txt', or null for the standard library's source"
    if _is_hub_id(pattern):
        remedy += f"; for a dataset of the Hugging Face hub, name its split: {pattern}:train"
    return DataError(f"{what} matches no file; {remedy}")


def _is_hub_id(name: str) -> bool:
    """Return whether a name is like `OWNER/NAME` of the Hugging Face hub, and not like a path."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not name.endswith(".json")
    return bool(is_id) and not os.path.exists(name.partition("/")[0])


def download_remedy(name: str, patterns: str = "") -> str:
    """Return the end of an error: how to get a model of the Hugging Face hub; else "".

    patterns: options of `hf download` that choose files.
    """
    if not _is_hub_id(name):
        return ""
    return (
        "; if this is a model of the Hugging Face hub, download it first: "
        f"hf download {name} {patterns}--local-dir FOLDER"
    )


def no_answer_of_hub(place: str, dataset: str, reason: str) -> DataError:
    """Return the error for a dataset of a hub that did not answer. dataset: OWNER/NAME."""
    return DataError(
        f"{place}: the Hugging Face hub did not answer ({reason}); on a machine with access run "
        f"`hf download --repo-type dataset {dataset} --local-dir FOLDER`, and set the key to its "
        "files"
    )


def _unreachable(place: str, pattern: str, error: Exception) -> DataError:
    """Return the error of a file system that could not be asked."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if not pattern.startswith("hf://"):
        return DataError(f"{place}: {reason}; correct the glob")
    name = "/".join(pattern.removeprefix("hf://").removeprefix("datasets/").split("/")[:2])
    return no_answer_of_hub(place, name.partition("@")[0], reason)


def _match(pattern: str, key: str, suffixes: Container[str]) -> list[str]:
    """Return the files of one glob or folder, or the folder of a saved dataset that it names."""
    place = f"{key}={pattern!r}"
    system, path = open_file_system(os.path.expanduser(pattern))
    try:
        is_folder = system.isdir(path)
        if is_folder and (dataset := _saved_dataset(system, path, place)):
            return [dataset]
        if isinstance(system, LocalFileSystem):
            found = _match_local(f"{glob.escape(path)}/**/*" if is_folder else path)
        else:
            found = _match_remote(system, f"{path}/**" if is_folder else path)
    except DataError:
        raise
    except Exception as error:  # each library behind fsspec has exceptions of its own
        if isinstance(error, OSError) and not pattern.startswith("hf://"):
            raise
        raise _unreachable(place, pattern, error) from error
    if is_folder:
        known = [p for p in found if os.path.isdir(p) or suffix_of(p) in suffixes]
        found = known or found
    if not found and is_folder:
        raise DataError(f"{place}: the folder has no file; put the texts there, or name another")
    if not found:
        raise _no_match(place, pattern)
    return found


def _match_local(path: str) -> list[str]:
    # glob, because fsspec's glob reports a symbolic link as neither file nor folder.
    names = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    found = [name for name in names if os.path.isfile(name) or _is_saved_dataset(name)]
    datasets = {name for name in found if os.path.isdir(name)}
    return [name for name in found if os.path.dirname(name) not in datasets]


def _match_remote(system: Any, path: str) -> list[str]:
    infos = {path: system.info(path)} if system.isfile(path) else system.glob(path, detail=True)
    return [
        system.unstrip_protocol(name)
        for name, info in infos.items()
        if info["type"] == "file" and name.count("/.") == path.count("/.")
    ]


def _is_saved_dataset(folder: str) -> bool:
    parts = ("dataset_info.json", "state.json")
    return all(os.path.isfile(os.path.join(folder, part)) for part in parts)


def _saved_dataset(system: Any, path: str, place: str) -> str | None:
    """Return `path` if `datasets.Dataset.save_to_disk` wrote it, else None. Raises: DataError."""
    inside = {posixpath.basename(name.rstrip("/")) for name in system.ls(path, detail=False)}
    if "dataset_dict.json" in inside:
        splits = sorted(name for name in inside if system.isdir(posixpath.join(path, name)))
        raise DataError(f"{place} holds several datasets; add the name of one: {', '.join(splits)}")
    if not {"dataset_info.json", "state.json"} <= inside:
        return None
    if not isinstance(system, LocalFileSystem):
        raise DataError(
            f"{place} is a saved dataset, which must be on a local disk; copy it and name the copy"
        )
    return path


def open_file_system(path: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path, and the path's name there."""
    if "://" not in path:  # "::" may be part of a name; and url_to_fs is slow for many files
        return _LOCAL, LocalFileSystem._strip_protocol(path)
    try:
        return url_to_fs(path)
    except ImportError as error:
        extra = _EXTRAS.get(path.split("://")[0])
        remedy = f'pip install -e ".[{extra}]"' if extra else "install it"
        raise DataError(f"{path} needs a library ({error}); {remedy}") from error
    except OSError:
        raise
    except Exception as error:  # each library behind fsspec has exceptions of its own
        raise DataError(f"{path}: {type(error).__name__}: {error}; correct the path") from error


def forget_listings(path: str) -> None:
    """Ask a bucket again what it holds when the file is looked for next."""
    if "://" in path:
        open_file_system(path)[0].invalidate_cache()


def open_bytes(path: str) -> Any:
    """Open a file for reading, without decompressing it."""
    system, name = open_file_system(path)
    return system.open(name, "rb")


def fingerprint(paths: Iterable[str]) -> str:
    """Return the SHA-256 (hex) of path, size and version of each file, without reading it."""
    digest = hashlib.sha256()
    for path in paths:
        for part in _stat(path):
            digest.update(repr(part).encode())
    return digest.hexdigest()


def input_bytes(paths: Iterable[str]) -> int:
    """Return the bytes of all files as stored, compressed or not."""
    return sum(size for path in paths for _, size, _ in _stat(path))


def _stat(path: str) -> list[tuple[str, int, str]]:
    """Return name, size and version of a file, or of each file of a saved dataset."""
    system, name = open_file_system(path)
    if isinstance(system, LocalFileSystem):
        names = sorted(entry.path for entry in os.scandir(name)) if os.path.isdir(name) else [name]
        stats = [(name, os.stat(name)) for name in names]
        return [(name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in stats]
    info = system.info(name)
    if info["size"] is None:
        raise DataError(f"{path}: its server does not report the size; copy it to a local disk")
    # Other entries of `info` may differ between listing a folder and asking for one file.
    known = (info.get(tag) for tag in ("ETag", "etag", "generation", "blob_id"))
    return [(path, info["size"], str(next(filter(None, known), None) or system.ukey(name)))]
