"""Blocks of objects in buckets, kept on the disk and shared by all jobs of a machine.

A block is a file, written under a temporary name and renamed, so that it is whole or missing. When
the blocks take more than the limit, those that were not read for the longest time are deleted. The
cache may be deleted at any time, also while jobs use it. A disk that fails or is full makes reading
slower, and is no error.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
from pathlib import Path

from data.bucket_path import BucketPath

log = logging.getLogger("torus")
BLOCK_BYTES = 2**18
"""Bytes of a block: few enough for one row of a shuffled store, many enough for a request."""
# After a clean-up, this part of the limit is in use. Each process looks at the folder after it has
# added this part of the limit, and at its start.
_KEPT, _BETWEEN_LOOKS = 0.9, 0.05


class BlockCache:
    """A folder with blocks of objects.

    Args:
        folder: where the blocks are; created when the first is written.
        limit: bytes that the blocks of all jobs may take, approximately.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self._lock = threading.Lock()
        self._added = limit  # look at the start
        self._is_usable = limit > 0

    def __reduce__(self) -> tuple[type["BlockCache"], tuple[Path, int]]:
        return BlockCache, (self.folder, self.limit)

    def read(self, path: BucketPath, size: int, begin: int, end: int) -> bytes:
        """Return the bytes of an object from `begin` up to `end`; size: of the whole object.

        Raises: OSError when the bucket cannot be read. Fewer bytes are returned where it ends.
        """
        first, last = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        folder = self._folder_of(path)
        blocks = [self._block(path, size, folder, number) for number in range(first, last)]
        data = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return data[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def _block(self, path: BucketPath, size: int, folder: Path, number: int) -> bytes:
        begin = number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, size)
        kept = folder / str(number)
        if self._is_usable:
            with contextlib.suppress(OSError):
                data = kept.read_bytes()
                if len(data) == end - begin:
                    os.utime(kept)
                    return data
        data = path.read_range(begin, end)
        if self._is_usable and len(data) == end - begin:
            self._keep(kept, data)
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if path.parent.exists():  # else another job has just deleted the folder
                self._is_usable = False
                log.warning("%s: no more blocks are kept (%s)", self.folder, error.strerror)
            return
        with self._lock:
            self._added += len(data)
            is_due = self._added >= _BETWEEN_LOOKS * self.limit
            if is_due:
                self._added = 0
        if is_due:
            self._clean_up()

    def forget(self, path: BucketPath) -> None:
        """Delete the blocks of an object, such as after damage."""
        shutil.rmtree(self._folder_of(path), ignore_errors=True)

    def _folder_of(self, path: BucketPath) -> Path:
        return self.folder / hashlib.sha256(str(path).encode()).hexdigest()[:32]

    def _clean_up(self) -> None:
        """Delete the blocks that were read least recently, if all together are above the limit."""
        found: list[tuple[float, int, str]] = []
        with contextlib.suppress(OSError):
            for folder in os.scandir(self.folder):
                with contextlib.suppress(OSError):  # another job cleans up
                    for entry in os.scandir(folder.path):
                        stat = entry.stat()
                        found.append((stat.st_mtime, stat.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        if total <= self.limit:
            return
        for _, size, name in sorted(found):
            if total <= _KEPT * self.limit:
                break
            with contextlib.suppress(OSError):
                os.unlink(name)
                total -= size
