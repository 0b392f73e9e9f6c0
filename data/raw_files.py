"""Files of arrays, read in parts: on a disk with pread, in a bucket through the block cache.

Files on a disk are not mapped into memory: reading a mapped file that was cut short, or whose disk
fails, ends the process with SIGBUS.
"""

import os
import weakref
from pathlib import Path
from typing import Protocol

from data.block_cache import BlockCache
from data.bucket_path import AnyPath, BucketPath
from data.files import DataError


class RawFile(Protocol):
    """File of a known size."""

    @property
    def path(self) -> AnyPath:
        """Path of the file or object."""

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from `begin` on. Raises: DataError where the file ends; OSError."""

    def read_again(self, begin: int, size: int) -> bytes | None:
        """Return the bytes read again, without the local cache; None if there is no cache."""


class LocalFile:
    """File on a disk. The open file stays the same if another takes its name.

    size: bytes that it must have. remedy: what to do about damage.
    Raises: DataError when the file is missing or has another size.
    """

    def __init__(self, path: Path, size: int, remedy: str):
        self.path, self._remedy = path, remedy
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise DataError(f"{path} is missing, expected {size} bytes; {remedy}") from error
        weakref.finalize(self, os.close, self._file)
        found = os.fstat(self._file).st_size
        if found != size:
            raise DataError(f"{path} has {found} bytes, expected {size} bytes; {remedy}")
        # Readahead would read a cold disk many times, since rows are read in random order.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from `begin` on. Raises: DataError where the file ends; OSError."""
        try:
            data = os.pread(self._file, size, begin)
            while len(data) < size:
                more = os.pread(self._file, size - len(data), begin + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if len(data) < size:
            raise DataError(
                f"{self.path} was cut short while it was in use: it ends at byte "
                f"{os.fstat(self._file).st_size}, and a read needs byte {begin + size - 1}; "
                f"{self._remedy}"
            )
        return data

    def read_again(self, begin: int, size: int) -> None:
        """Return None, since nothing is cached."""


class BucketFile:
    """Object in a bucket.

    size: bytes that it must have; that is only noticed when they are read. remedy: what to do about
    damage. cache: None: every read is a request.
    """

    def __init__(self, path: BucketPath, size: int, remedy: str, cache: BlockCache | None):
        self.path, self._size, self._remedy, self._cache = path, size, remedy, cache

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes from `begin` on. Raises: DataError where the file ends; OSError."""
        end = begin + size
        try:
            if self._cache is None:
                data = self.path.read_range(begin, end)
            else:
                data = self._cache.read(self.path, self._size, begin, end)
        except FileNotFoundError as error:
            what = f"{self.path} is missing, expected {self._size} bytes"
            raise DataError(f"{what}; {self._remedy}") from error
        if len(data) < size:
            raise DataError(
                f"{self.path} ends at byte {begin + len(data)}, expected {self._size} bytes; "
                f"{self._remedy}"
            )
        return data

    def read_again(self, begin: int, size: int) -> bytes | None:
        """Return the bytes without the cache, and forget what it has; None: there is no cache."""
        if self._cache is None:
            return None
        self._cache.forget(self.path)
        return BucketFile(self.path, self._size, self._remedy, None).read(begin, size)


def open_file(path: AnyPath, size: int, remedy: str, cache: BlockCache | None) -> RawFile:
    """Open a file of an array. Raises: DataError if a file on a disk has another size."""
    if isinstance(path, BucketPath):
        return BucketFile(path, size, remedy, cache)
    return LocalFile(path, size, remedy)
