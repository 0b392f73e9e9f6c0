"""Cache of compilations for absent slices: what the compiler said of a program, by its hash.

An entry holds the scheduled program and its memory, or the refusal of one that does not fit. It
does not hold predicted times, because these are computed from the program in seconds.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from pydantic import TypeAdapter

from parallel.planning.memory import MemoryUse
from parallel.planning.refusals import OutOfMemory
from safe_files import make_private, replace_file

_LOG = logging.getLogger("torus")
# What an entry says depends on these files.
_SOURCES = (
    *("buffer_assignment", "compiler", "hlo", "hlo_parser", "memory", "refusals"),
    "result_cache",
)
# The environment of libtpu and XLA changes programs, too.
_ENVIRONMENT = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")


@dataclass(frozen=True)
class Result:
    """A compiled program.

    Attributes:
        text: The scheduled program.
        memory: What one device holds.
        compile_seconds: CPU seconds of compiling.
    """

    text: str
    memory: MemoryUse
    compile_seconds: float


@dataclass(frozen=True)
class _Refusal:
    """The arguments of `OutOfMemory`."""

    sentence: str
    required: float | None
    available: float | None
    memory: MemoryUse | None


def open_cache(directory: Path) -> "ResultCache | None":
    """Return the cache in a directory; None, with a warning, if others may write there."""
    try:
        make_private(directory)
    except (OSError, ValueError) as error:
        _LOG.warning("compiled programs are neither kept nor read: %s", error)
        return None
    return ResultCache(directory)


_ENTRY: TypeAdapter[Result | _Refusal] = TypeAdapter(Result | _Refusal)


@dataclass(frozen=True)
class ResultCache:
    """Results in a directory, one file each."""

    directory: Path

    def get(self, key: str, make: Callable[[], Result]) -> Result:
        """Return the result with this key; if there is none, make and keep it.

        Raises:
            OutOfMemory: The program did not fit, now or when it was compiled.
        """
        entry = self._read(key)
        if entry is None:
            try:
                entry = make()
            except OutOfMemory as error:
                self._write(
                    key, _Refusal(error.sentence, error.required, error.available, error.memory)
                )
                raise
            self._write(key, entry)
        if isinstance(entry, _Refusal):
            raise OutOfMemory(entry.sentence, entry.required, entry.available, entry.memory)
        return entry

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"

    def _read(self, key: str) -> Result | _Refusal | None:
        path = self._path(key)
        try:
            return _ENTRY.validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            _LOG.warning("ignoring the compiled program in %s: %s", path, reason)
            return None

    def _write(self, key: str, entry: Result | _Refusal) -> None:
        """Keep an entry; readers see all of it or nothing."""
        try:
            replace_file(self._path(key), json.dumps(_plain(entry)))
        except OSError as error:
            _LOG.warning("the compiled program is not kept in %s: %s", self.directory, error)


def program_key(
    text: str,
    topology: str,
    devices: Sequence[str],
    options: Mapping[str, Any] | None,
    classes: Mapping[str, Any],
) -> str:
    """Return the hash of everything that a result depends on.

    Args:
        text: The lowered program.
        topology: The slice.
        devices: Its devices in the order of the mesh.
        options: Compiler options.
        classes: The arguments by class, as in `SliceCompiler.compile`.
    """
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for part in (
        text,
        topology,
        *devices,
        repr(sorted((options or {}).items())),
        repr([(name, jax.tree.leaves(tree)) for name, tree in classes.items()]),
        *(_version(package) for package in ("jax", "jaxlib", "libtpu")),
        *(f"{name}={os.environ.get(name, '')}" for name in _ENVIRONMENT),
        *((folder / f"{name}.py").read_text() for name in _SOURCES),
    ):
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def _plain(x: Any) -> Any:
    """Return dataclasses and mappings as dicts, for JSON."""
    if dataclasses.is_dataclass(x):
        return {field.name: _plain(getattr(x, field.name)) for field in dataclasses.fields(x)}
    if isinstance(x, Mapping):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, tuple | list):
        return [_plain(value) for value in x]
    return x
