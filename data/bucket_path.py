"""Paths in buckets, with the methods of `pathlib.Path` that stores need.

A bucket has neither locks nor renames. Other guarantees take their place: an object appears whole
or not at all, `create` writes one only where there is none, and the description of a folder is
written last.
"""

import contextlib
import logging
import os
import posixpath
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from data.files import DataError, open_file_system
from safe_files import replace_file

log = logging.getLogger("torus")
T = TypeVar("T")
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs errors that it raises, with stacks
ATTEMPTS = 6
# Of the first pause between two attempts; each is twice as long as the one before.
PAUSE_SECONDS = 0.5
# Errors after which another attempt has no better chance.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError)
_FINAL_STATUS = {400, 401, 403, 404, 412, 501}
_NO_CREDENTIALS = {"NoCredentialsError", "DefaultCredentialsError", "RefreshError"}
_NO_CREDENTIALS |= {"PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
_NO_CREDENTIALS |= {"SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError"}
# Seconds without the first answer of a bucket after which a line says so.
SLOW_SECONDS = 10.0
_answered: set[str] = set()


class BucketError(OSError):
    """The service of a bucket was busy or out of reach in every attempt."""


@dataclass(frozen=True)
class BucketPath:
    """Object, or prefix of objects, such as `gs://bucket/texts`.

    All methods ask again, with growing pauses, while the service is busy or cannot be reached.
    They raise FileNotFoundError for what does not exist, BucketError if no attempt succeeds, and
    OSError for a refusal, such as of expired credentials.
    """

    url: str

    def __truediv__(self, name: str) -> "BucketPath":
        return BucketPath(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "BucketPath":
        """Prefix that holds this path."""
        return BucketPath(self.url.rstrip("/").rpartition("/")[0])

    @property
    def suffix(self) -> str:
        """Suffix of the last part, such as ".json"."""
        return posixpath.splitext(self.name)[1]

    def with_suffix(self, suffix: str) -> "BucketPath":
        """Return the path with another suffix."""
        return BucketPath(posixpath.splitext(self.url)[0] + suffix)

    def read_bytes(self) -> bytes:
        """Return the content of the object."""
        return self._ask(lambda system, name: bytes(system.cat_file(name)))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of the object as text."""
        return self.read_bytes().decode(encoding)

    def read_range(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` up to `end`, or fewer where the object ends."""

        def ask(system: Any, name: str) -> bytes:
            try:
                return bytes(system.cat_file(name, start=begin, end=end))
            except Exception as error:
                if _status(error) != 416 and "InvalidRange" not in repr(error):
                    raise
                return b""  # the object ends before

        return self._ask(ask)

    def size(self) -> int:
        """Return the bytes of the object."""
        return int(self._ask(lambda system, name: _fresh(system).info(name)["size"]))

    def exists(self) -> bool:
        """Return whether there is such an object, or one below this prefix."""
        return self._type() is not None

    def is_file(self) -> bool:
        """Return whether there is such an object."""
        return self._type() == "file"

    def is_dir(self) -> bool:
        """Return whether there are objects below this prefix."""
        return self._type() == "directory"

    def _type(self) -> str | None:
        try:  # `exists` and `isfile` of fsspec are false after any error
            return str(self._ask(lambda system, name: _fresh(system).info(name)["type"]))
        except FileNotFoundError:
            return None

    def iterdir(self) -> Iterator["BucketPath"]:
        """Yield the objects and prefixes directly below; none if there is no such prefix."""
        try:
            names = self._ask(lambda system, name: _fresh(system).ls(name, detail=False))
        except FileNotFoundError:
            return
        for name in sorted(names):
            last = str(name).rstrip("/").rpartition("/")[2]
            # Consoles mark a folder by an object that has its name.
            if last and not self.url.rstrip("/").endswith(str(name).rstrip("/")):
                yield self / last

    def create(self, content: bytes) -> bool:
        """Write the object if there is none; return whether this call has written it."""

        def write(system: Any, name: str) -> bool:
            try:
                system.pipe_file(name, content, mode="create")
            except FileExistsError:
                return False
            except Exception as error:
                if _status(error) != 412:
                    raise
                return False
            return True

        # An attempt whose answer was lost may have written it.
        return self._ask(write) or self.read_bytes() == content

    def overwrite(self, content: bytes) -> None:
        """Write the object, also over another one."""
        self._ask(lambda system, name: system.pipe_file(name, content))

    def upload(self, source: Path) -> None:
        """Copy a file to this object, and compare the sizes."""
        self._ask(lambda system, name: system.put_file(str(source), name))
        if (size := self.size()) != (wanted := source.stat().st_size):
            raise OSError(f"{self} has {size} bytes after the copy of {source}, with {wanted}")

    def delete(self) -> None:
        """Delete the object, if there is one."""
        try:
            self._ask(lambda system, name: system.rm_file(name))
        except FileNotFoundError:
            return

    def find(self) -> dict[str, int]:
        """Return the bytes of all objects below this prefix, by their names relative to it."""

        def ask(system: Any, name: str) -> dict[str, int]:
            prefix, found = name.rstrip("/") + "/", _fresh(system).find(name, detail=True)
            return {
                each.removeprefix(prefix): int(info["size"])
                for each, info in sorted(found.items())
                if each.startswith(prefix)
            }

        return self._ask(ask)

    def copy(self, target: "BucketPath") -> None:
        """Copy the object within the service."""
        other = open_file_system(target.url)[1]
        self._ask(lambda system, name: system.cp_file(name, other))

    def _ask(self, request: Callable[[Any, str], T]) -> T:
        """Return the answer to a request, which takes the file system and the name there."""
        with _told_if_slow(self.url):
            return self._ask_often(request)

    def _ask_often(self, request: Callable[[Any, str], T]) -> T:
        system, name = open_file_system(self.url)
        pause = PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return request(system, name)
            except DataError:
                raise
            except _FINAL as error:
                kind = next(kind for kind in _FINAL if isinstance(error, kind))
                raise kind(f"{self}: {error}") from error
            except Exception as error:  # each library behind fsspec has exceptions of its own
                if _status(error) == 404:
                    raise FileNotFoundError(f"{self} does not exist") from error
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                if type(error).__name__ in _NO_CREDENTIALS:
                    raise OSError(f"{self}: {reason}; log in to the service first") from error
                if _status(error) in _FINAL_STATUS:
                    raise OSError(f"{self}: {reason}") from error
                if attempt == ATTEMPTS:
                    raise BucketError(f"{self}: {reason}") from error
            time.sleep(pause * random.uniform(0.5, 1.5))  # not all hosts at once
            pause *= 2
        raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def _told_if_slow(url: str) -> Iterator[None]:
    """Log a line if the first answer of a bucket takes long, as without network or credentials."""
    bucket = "/".join(url.split("/")[:3])
    if bucket in _answered:
        yield
        return
    text = f"waiting for an answer of {bucket}; check the network and the credentials if none comes"
    timer = threading.Timer(SLOW_SECONDS, _warn, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
        _answered.add(bucket)
    finally:
        timer.cancel()


def _warn(text: str) -> None:
    if log.handlers:
        log.warning("%s", text)
    else:  # before the run has a log, and in scripts
        print(text, file=sys.stderr, flush=True)


def _fresh(system: Any) -> Any:
    """Return the file system without what it remembers of earlier listings."""
    system.invalidate_cache()
    return system


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of gcsfs, s3fs or aiohttp; None without one."""
    if str(error).startswith("Forbidden"):  # as gcsfs says it
        return 403
    for value in (getattr(error, "code", None), getattr(error, "status", None)):
        if str(value).isdecimal():
            return int(str(value))
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return None if found is None else int(found)
    return None if error.__cause__ is None else _status(error.__cause__)  # as s3fs wraps it


AnyPath = Path | BucketPath


def to_path(text: str | os.PathLike[str] | BucketPath) -> AnyPath:
    """Return the path of a folder or file on a disk (`~` is expanded), or in a bucket."""
    if isinstance(text, BucketPath):
        return text
    given = os.fspath(text)
    return BucketPath(given.rstrip("/")) if "://" in given else Path(given).expanduser()


def write_file(path: AnyPath, content: str | bytes) -> None:
    """Write a file that has all of its old content or all of the new one, whatever happens."""
    if isinstance(path, BucketPath):
        path.overwrite(content.encode() if isinstance(content, str) else content)
    else:
        replace_file(path, content)
