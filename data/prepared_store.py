"""Find and open a store that exists, sharded or not."""

import fcntl
import time
from pathlib import Path

from data.block_cache import BlockCache
from data.bucket_path import AnyPath, BucketPath, to_path
from data.files import suffix_of
from data.formats.pieces import known_suffixes
from data.shard_list import is_sharded
from data.sharded_store import ShardedStore
from data.store import INFO, Store


def prepared_folder(files: str | tuple[str, ...] | None) -> AnyPath | None:
    """Return the folder that the files of a source name, if it is a store itself."""
    if not isinstance(files, str) or files.startswith("hf://"):
        return None
    folder = to_path(files)
    if isinstance(folder, BucketPath):  # each question is a request, and may be refused
        if set("*?[") & set(files) or suffix_of(files) in known_suffixes():
            return None
    elif (folder / "building").is_dir():
        _wait_for_plan(folder)
    return folder if (folder / INFO).is_file() or is_sharded(folder) else None


def _wait_for_plan(folder: Path, seconds: float = 600.0) -> None:
    """Wait until a store in shards that is just being begun says what it will hold."""
    end = time.monotonic() + seconds
    while not is_sharded(folder) and time.monotonic() < end:
        try:
            with open(folder / "building" / "shards.lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return  # no process prepares it
        except BlockingIOError:
            time.sleep(0.5)
        except OSError:
            return  # a folder of other files that has this name


def open_any(folder: AnyPath, cache: BlockCache | None = None) -> Store | ShardedStore:
    """Open a store, sharded or not. Raises: DataError."""
    return ShardedStore(folder, cache) if is_sharded(folder) else Store(folder, cache)
