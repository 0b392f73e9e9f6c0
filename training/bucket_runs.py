"""Runs in buckets, `run.dir=gs://bucket/run`.

Checkpoints are written to the bucket by all processes. The small files of a run (log, metrics,
configuration) are in a folder of this machine, which process 0 copies to the bucket every 30
seconds and at the end, and from it at the start. A lease takes the place of a lock.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec.config

from data.bucket_path import AnyPath, BucketPath
from parallel.cluster.config import ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from safe_files import replace_file
from training.logs import log

CHECKPOINTS, LEASE, LOCK_FILE = "checkpoints", "lease", ".lock"
_URL_FILE = ".bucket"
_COPY_SECONDS = 30.0
# A lease that was not renewed for the time of expiry belongs to a process that is gone.
RENEW_SECONDS, EXPIRY_SECONDS, LOOK_SECONDS = 15.0, 75.0, 2.0
_AT_A_TIME = 32


def local_path(text: str) -> Path:
    """Return the local folder of a run, or of one of its checkpoints: RUN/checkpoints/STEP.

    That of a run in a bucket is in the cache of the user, and may lack files; see `fetch`.
    """
    if "://" not in text:
        return Path(text).expanduser()
    for name in ("gs", "gcs"):  # orbax would see checkpoints that are deleted
        fsspec.config.conf.setdefault(name, {})["use_listings_cache"] = False
    url, step = text.rstrip("/"), None
    if found := re.fullmatch(rf"(.+)/{CHECKPOINTS}/(\d+)", url):
        url, step = found.groups()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    folder = Path(cache).expanduser() / "torus" / "runs" / name
    if not (folder / _URL_FILE).exists():
        replace_file(folder / _URL_FILE, url)
    return folder if step is None else folder / CHECKPOINTS / step


def bucket_of(directory: Path) -> BucketPath | None:
    """Return where a run is kept, if it is in a bucket."""
    with contextlib.suppress(OSError):
        return BucketPath((directory / _URL_FILE).read_text())
    return None


def checkpoint_folder(directory: Path) -> AnyPath:
    """Return the folder with the checkpoints of a run, on the disk or in a bucket."""
    bucket = bucket_of(directory)
    return directory / CHECKPOINTS if bucket is None else bucket / CHECKPOINTS


def _small_files(bucket: BucketPath) -> list[str]:
    below = [path.name for path in bucket.iterdir() if path.name not in (CHECKPOINTS, LEASE)]
    names: list[str] = []
    for name in below:
        inside = (bucket / name).find()
        names += [f"{name}/{each}" for each in inside] if inside else [name]
    return names


def fetch(directory: Path) -> None:
    """Copy the small files of a run from its bucket, over those of this machine.

    Raises: OSError when the bucket cannot be read.
    """
    bucket = bucket_of(directory)
    assert bucket is not None
    names = _small_files(bucket)
    for path in [*directory.rglob("*")]:
        is_ours = path.name.startswith(".") or not path.is_file()
        if not is_ours and str(path.relative_to(directory)) not in names:
            path.unlink()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        contents = pool.map(lambda name: (bucket / name).read_bytes(), names)
        for name, content in zip(names, contents, strict=True):
            replace_file(directory / name, content)


def open_local(text: str) -> Path:
    """Return the local folder of a run that is only read, with its small files up to date.

    If a process of this machine trains the run, its files are newer than those of the bucket.
    """
    folder = local_path(text)
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    if "://" in text and bucket_of(run) is not None:
        with open(run / LOCK_FILE, "a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fetch(run)
    return folder


def move_tree(source: BucketPath, target: BucketPath, without: Collection[str] = ()) -> None:
    """Move all objects below a prefix; those of folders in `without` stay."""
    names = [name for name in source.find() if name.partition("/")[0] not in without]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        [*pool.map(lambda name: (source / name).copy(target / name), names)]
        [*pool.map(lambda name: (source / name).delete(), names)]


def delete_tree(folder: BucketPath, first: str | None = None) -> None:
    """Delete all objects below a prefix. first: the one without which it is incomplete."""
    names = folder.find()
    if first is not None:
        (folder / first).delete()
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        [*pool.map(lambda name: (folder / name).delete(), names)]


def move_aside(directory: Path) -> BucketPath | None:
    """Move an old run to `NAME.old-K` of its bucket; return that, or None if there was none."""
    bucket = bucket_of(directory)
    assert bucket is not None
    if not any(path.name != LEASE for path in bucket.iterdir()):
        return None
    number = 1
    while (target := BucketPath(f"{bucket}.old-{number}")).exists():
        number += 1
    move_tree(bucket, target, without=(LEASE,))
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.startswith("."):
            path.unlink()
    return target


@contextlib.contextmanager
def kept_in_bucket(
    directory: Path, group: ProcessGroup, names: Collection[str] | None = None
) -> Iterator[Callable[[], None]]:
    """Copy the files of a run to its bucket during the context, and at its end.

    Yields a function that copies at once what has changed. Process 0 takes the lease, fetches the
    files before, and copies all of them. The other processes copy those in `names` alone.

    Raises:
        ValueError: the run is in use.
        ProcessGroupError: it was in use for `cluster.start_timeout`.
    """
    bucket = bucket_of(directory)
    assert bucket is not None
    with contextlib.ExitStack() as stack:
        if names is None:
            lease = Lease(bucket / LEASE, str(directory.resolve()))
            lease.acquire(group)
            stack.callback(lease.release)
            fetch(directory)
            stack.enter_context(_repeating(RENEW_SECONDS, lambda: _renew(lease, group)))
        copies = _Copies(directory, bucket, names)
        stack.callback(copies.update)
        stack.enter_context(_repeating(_COPY_SECONDS, copies.update))
        yield copies.update


@contextlib.contextmanager
def _repeating(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call a function in a thread, again and again during the context."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(seconds):
            function()

    thread = threading.Thread(target=repeat, name="bucket", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _renew(lease: "Lease", group: ProcessGroup) -> None:
    """Renew a lease; end all processes at once if another run has taken it."""
    if not lease.renew():
        reason = f"another process has taken {lease.folder}, since it was not renewed in time"
        log.error("error: %s", reason)
        group.abort(reason, 1)
        os._exit(1)


class _Copies:
    """Copies of the files of a folder in a bucket."""

    def __init__(self, directory: Path, bucket: BucketPath, names: Collection[str] | None):
        self._directory, self._bucket, self._names = directory, bucket, names
        self._known: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        if names is None:  # just fetched
            self._known = self._states()

    def _states(self) -> dict[str, tuple[int, int]]:
        """Return size and time of every file by its name."""
        found = {}
        for path in self._directory.rglob("*"):
            name = str(path.relative_to(self._directory))
            is_wanted = self._names is None or name in self._names
            if is_wanted and not path.name.startswith(".") and path.is_file():
                with contextlib.suppress(OSError):  # it was replaced meanwhile
                    stat = path.stat()
                    found[name] = stat.st_size, stat.st_mtime_ns
        return found

    def update(self) -> None:
        """Copy what has changed, and delete what is gone. A failure is logged, and tried again."""
        with self._lock:
            states = self._states()
            try:
                for name, state in states.items():
                    if self._known.get(name) != state:
                        (self._bucket / name).overwrite((self._directory / name).read_bytes())
                        self._known[name] = state
                for name in self._known.keys() - states.keys():
                    (self._bucket / name).delete()
                    del self._known[name]
            except OSError as error:
                log.warning("files of the run were not copied to %s: %s", self._bucket, error)


class Lease:
    """The right to write to a run in a bucket.

    Leases are objects with ascending numbers, each written by one process alone. The holder of the
    highest number writes the run, and renews its object. Whoever sees no renewal for the time of
    expiry creates the next number; the service lets only one of them succeed. No clocks are
    compared.
    """

    def __init__(self, folder: BucketPath, place: str):
        """Describe a lease that is not taken yet. place: local folder of this process, locked."""
        self.folder = folder
        self._owner = {"host": socket.gethostname(), "process": os.getpid(), "place": place}
        self._number = self._renewals = 0

    def acquire(self, group: ProcessGroup) -> None:
        """Take the lease; wait while nobody renews it, or with several processes.

        Raises: ValueError if another process renews it; ProcessGroupError if it does so for
        `cluster.start_timeout`.
        """
        deadline = time.monotonic() + group.config.start_timeout
        while True:
            numbers = self._numbers()
            seen = self._read(numbers[-1]) if numbers else None
            if seen is not None and not self._is_own(seen) and self._is_renewed(numbers[-1], seen):
                in_use = (
                    f"run.dir={str(self.folder).removesuffix(f'/{LEASE}')!r} is in use by process "
                    f"{seen.get('process')} of {seen.get('host')}"
                )
                if group.num_processes == 1:
                    raise ValueError(f"{in_use}; give another run.dir")
                if time.monotonic() > deadline:
                    raise ProcessGroupError(f"{in_use}; stop that process")
                continue
            number = (numbers[-1] if numbers else 0) + 1
            if self._path(number).create(self._content()):
                self._number = number
                for old in numbers:
                    self._path(old).delete()
                return

    def renew(self) -> bool:
        """Renew the lease; return whether it is still ours. A bucket that fails changes nothing."""
        self._renewals += 1
        try:
            if any(number > self._number for number in self._numbers()):
                return False
            self._path(self._number).overwrite(self._content())
        except OSError as error:
            log.warning("%s was not renewed: %s", self.folder, error)
        return True

    def release(self) -> None:
        """Give the lease back."""
        try:
            self._path(self._number).delete()
        except OSError as error:
            log.warning("%s was not given back: %s", self.folder, error)

    def _is_own(self, seen: dict[str, object]) -> bool:
        """Return whether a lease is that of an earlier process with this local folder.

        It is gone, because this process has locked the folder.
        """
        return all(seen.get(key) == self._owner[key] for key in ("host", "place"))

    def _is_renewed(self, number: int, seen: dict[str, object]) -> bool:
        """Return whether a lease is renewed, or given back, within the time of expiry."""
        log.info("%s is held by another process; waiting to see whether it lives", self.folder)
        end = time.monotonic() + EXPIRY_SECONDS
        while time.monotonic() < end:
            time.sleep(LOOK_SECONDS)
            now = self._read(number)
            if now is None:
                return False
            if now != seen:
                return True
        return False

    def _path(self, number: int) -> BucketPath:
        return self.folder / f"{number:08}.json"

    def _numbers(self) -> list[int]:
        names = (path.name.removesuffix(".json") for path in self.folder.iterdir())
        return sorted(int(name) for name in names if name.isdecimal())

    def _read(self, number: int) -> dict[str, object] | None:
        try:
            found = json.loads(self._path(number).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    def _content(self) -> bytes:
        return json.dumps({**self._owner, "renewals": self._renewals}).encode()
