"""Arrays in files whose blocks are compared with their checksums whenever they are read.

Beside FILE.bin, FILE.crc32 holds the CRC-32 of every block as little-endian uint32: that of block n
is `zlib.crc32(block, seed + n)`, so that neither a block nor a file of another place passes for it.
A read compares the bytes that it returns. So it finds damage by a disk, by memory, and by a program
that overwrites the file during a run. It always finds up to three flipped bits and a burst of up to
32 bits in a block, and misses other damage with a probability of 2^-32 per damaged block.
"""

import hashlib
import os
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, overload
from zlib import crc32

import numpy as np

from data.block_cache import BlockCache
from data.bucket_path import AnyPath
from data.files import DataError
from data.raw_files import open_file

# Files that the store and the packed rows of one source, or of one shard, keep open.
FILES_PER_SOURCE = 10
# Most bytes of one read: below the limit of pread, and few enough for the memory of any machine.
MAX_READ = 2**24
_SEEDS = 2**32


@overload
def checksum_path(path: Path) -> Path: ...
@overload
def checksum_path(path: AnyPath) -> AnyPath: ...
def checksum_path(path: AnyPath) -> AnyPath:
    """Return the file with the checksums of an array file."""
    return path.with_suffix(".crc32")


def make_seed(identity: str, name: str) -> int:
    """Return the seed of the checksums of a file. identity: of the folder that it belongs to."""
    return crc32(f"{identity}/{name}".encode())


def allow_open_files(count: int) -> int:
    """Raise the limit of open files of this process, if `count` are more than half of it.

    Returns the limit.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and 2 * count > limit:
        wanted = 2 * count if highest == resource.RLIM_INFINITY else min(2 * count, highest)
        limit = max(limit, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, highest))
    return limit if limit != resource.RLIM_INFINITY else 2**30


class ChecksumWriter:
    """Writes the checksums of a file while that grows; close it, or use it as a context."""

    def __init__(self, path: Path, block_bytes: int, seed: int):
        self._file = open(path, "wb")
        self._block_bytes, self._seed = block_bytes, seed
        self._filled = self._number = 0
        self._checksum = self._first()

    def _first(self) -> int:
        return (self._seed + self._number) % _SEEDS

    def update(self, data: Any) -> None:
        """Add bytes, or a contiguous array, to the end of the file."""
        view, done = memoryview(data), 0
        if not view.nbytes:  # cast refuses it
            return
        view = view.cast("B")
        while done < len(view):
            part = view[done : done + self._block_bytes - self._filled]
            self._checksum = crc32(part, self._checksum)
            done, self._filled = done + len(part), self._filled + len(part)
            if self._filled == self._block_bytes:
                self._end_block()

    def _end_block(self) -> None:
        self._file.write(struct.pack("<I", self._checksum))
        self._filled, self._number = 0, self._number + 1
        self._checksum = self._first()

    def finish(self) -> None:
        """Write the checksum of the last block, bring all to the disk, and close the file."""
        if self._filled:
            self._end_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "ChecksumWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class CheckedArray:
    """One-dimensional array in a file, read-only; `array[begin:end]` reads and checks that part."""

    def __init__(
        self,
        path: AnyPath,
        dtype: Any,
        length: int,
        *,
        remedy: str,
        block_bytes: int | None = None,
        seed: int = 0,
        describe: Callable[[int, int], str] = "elements {} to {}".format,
        cache: BlockCache | None = None,
    ):
        """Open a file.

        length: elements. remedy: what to do about damage. block_bytes: of a block; None: the file
        has no checksums. seed: see `make_seed`. describe: names elements from one to another.
        cache: of what is read from a bucket.
        Raises: DataError when a file is missing or has another size.
        """
        self.path, self.dtype, self._length = path, np.dtype(dtype), length
        self._itemsize = self.dtype.itemsize
        self._size = length * self._itemsize
        self._remedy, self._describe, self._seed = remedy, describe, seed
        self._block_bytes = block_bytes
        self._kept: np.ndarray | None = None
        self._file = open_file(path, self._size, remedy, cache)
        if block_bytes is not None:
            size = 4 * -(-self._size // block_bytes)
            self._checksums = open_file(checksum_path(path), size, remedy, cache)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> np.ndarray: ...
    def __getitem__(self, key: int | slice) -> int | np.ndarray:
        """Read one element, or a part without steps. Raises: DataError; OSError."""
        if isinstance(key, slice):
            if self._kept is not None:
                return self._kept[key]
            begin, end, step = key.indices(self._length)
            assert step == 1
            return self._read(begin, end) if begin < end else np.empty(0, self.dtype)
        index = range(self._length)[key]
        return int(self[index : index + 1][0])

    def load(self) -> None:
        """If the array is small, check all of it now and keep it in memory. Raises: DataError."""
        if 0 < self._size <= MAX_READ:
            self._kept = self._read(0, self._length)

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[np.ndarray]:
        """Yield the elements from `begin` up to `end`, by default all, in parts of 16 MiB."""
        end, step = self._length if end is None else end, MAX_READ // self._itemsize
        for first in range(begin, end, step):
            yield self._read(first, min(first + step, end))

    def digest(self) -> str:
        """Return the SHA-256 of the file."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk.data)
        return digest.hexdigest()

    def _read(self, begin: int, end: int) -> np.ndarray:
        """Return the elements from `begin` up to `end`, at least one."""
        # Written for speed: a row takes several reads, and each a microsecond in the kernel.
        first, last = begin * self._itemsize, end * self._itemsize
        if last - first > MAX_READ:
            return np.concatenate(list(self.chunks(begin, end)))
        size = self._block_bytes
        if size is None:
            return np.frombuffer(self._file.read(first, last - first), self.dtype)
        number, skipped = divmod(first, size)
        count = -(-last // size) - number
        num_bytes = min(count * size, self._size - first + skipped)
        data = self._file.read(first - skipped, num_bytes)
        written = self._checksums.read(4 * number, 4 * count)
        if self._compute(data, number, count) != written:
            # A cache of this machine may be damaged, and not the store.
            data = self._file.read_again(first - skipped, num_bytes) or data
            written = self._checksums.read_again(4 * number, 4 * count) or written
            if self._compute(data, number, count) != written:
                raise self._damage(data, written, number, count)
        return np.frombuffer(data, self.dtype, end - begin, skipped)

    def _compute(self, data: bytes, number: int, count: int) -> bytes:
        """Return the checksums of consecutive blocks, of which the first has this number."""
        seed, size = self._seed + number, self._block_bytes or 0
        if count == 1:
            return crc32(data, seed % _SEEDS).to_bytes(4, "little")
        view = memoryview(data)
        return b"".join(
            [
                crc32(view[n * size : (n + 1) * size], (seed + n) % _SEEDS).to_bytes(4, "little")
                for n in range(count)
            ]
        )

    def _damage(self, data: bytes, written: bytes, number: int, count: int) -> DataError:
        """Return the error for the first block that differs from what was written."""
        assert self._block_bytes is not None
        computed = self._compute(data, number, count)
        places = range(0, 4 * count, 4)
        n = next(n // 4 for n in places if computed[n : n + 4] != written[n : n + 4])
        begin = (number + n) * self._block_bytes
        end = min(begin + self._block_bytes, self._size)
        what = self._describe(begin // self._itemsize, -(-end // self._itemsize))
        return DataError(
            f"{self.path}: {what} (bytes {begin} to {end}) differ from what was written; "
            f"{self._remedy}"
        )
