"""Runs in buckets, `run.dir=gs://bucket/run` or `s3://bucket/run`.

Checkpoints are written to the bucket by all processes. The small files of a run (log, metrics,
configuration) are in a folder of this machine, which process 0 copies to the bucket every 30
seconds and at the end, and from it at the start. A lease takes the place of a lock.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec.config

from data.bucket_path import AnyPath, BucketPath
from parallel.cluster.process_group import ProcessGroup
from safe_files import replace_file
from training.checkpoint_record import COMMIT_FILE
from training.lease import EXPIRY_SECONDS, RENEW_SECONDS, Lease
from training.logs import log

CHECKPOINTS, LEASE, LOCK_FILE = "checkpoints", "lease", ".lock"
_URL_FILE, _FETCH_LOCK, _TRAINS_LOCK = ".bucket", ".fetching", ".trains"
IDENTITY_FILE = "run.json"
BEFORE_SAVES = ("metrics.jsonl", IDENTITY_FILE, "config.yaml")
"""Files that are copied before each save; the others follow."""
_OF_A_RUN = {"config.yaml", CHECKPOINTS, "log.txt", "metrics.jsonl", IDENTITY_FILE}
# Folders that a run only adds to.
_LARGE = ("tensorboard/", "profiles/", "wandb/", "mlruns/")
_COPY_SECONDS = 30.0
_AT_A_TIME = 32


def local_path(text: str) -> Path:
    """Return the local folder of a run, or of one of its checkpoints: RUN/checkpoints/STEP.

    For a run in a bucket, it is in the cache of the user, and may be incomplete; see `fetch`.
    """
    if "://" not in text:
        return Path(text).expanduser()
    for name in ("gs", "gcs", "s3"):  # orbax would see checkpoints that are deleted
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
    """Return the names of the small files of a run. Raises: ValueError if it is none."""
    below = {path.name for path in bucket.iterdir()} - {LEASE}
    if below and not below & _OF_A_RUN:
        raise ValueError(
            f"{bucket} holds objects such as {min(below)}, which are not those of a run; give "
            "another run.dir"
        )
    names: list[str] = []
    for name in sorted(below - {CHECKPOINTS}):
        inside = [each for each in (bucket / name).find() if not each.endswith("/")]
        names += [f"{name}/{each}" for each in inside] if inside else [name]
    return names


def fetch(directory: Path, only: Callable[[str], bool] = lambda name: True) -> set[str]:
    """Copy the small files of a run from its bucket to this machine.

    Local files that continue those of the bucket are kept, as are files of the same run that the
    bucket lacks: a killed process could not copy them.

    only: returns whether a file is wanted, by its name.
    Returns: the names of files that are now as in the bucket.
    Raises: OSError when the bucket cannot be read; ValueError when it holds no run.
    """
    bucket = bucket_of(directory)
    assert bucket is not None
    names = [name for name in _small_files(bucket) if only(name)]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        contents = dict(
            zip(names, pool.map(lambda n: (bucket / n).read_bytes(), names), strict=True)
        )
    longer: set[str] = set()
    before = _read(directory / IDENTITY_FILE)
    is_same_run = before is not None and contents.get(IDENTITY_FILE) == before
    for name in _names_in(directory):
        if name not in contents and only(name) and not is_same_run:
            (directory / name).unlink(missing_ok=True)
    for name, content in contents.items():
        kept = _read(directory / name) if is_same_run else None
        if kept is None or not kept.startswith(content):
            replace_file(directory / name, content)
        elif len(kept) > len(content):
            longer.add(name)
    return contents.keys() - longer


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _names_in(directory: Path) -> list[str]:
    """Return the names of the files of a folder that belong to the run; some may be vanishing."""
    found = []
    for parent, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = Path(parent).relative_to(directory)
        found += [str(below / name) for name in names if not name.startswith(".")]
    return found


def open_local(text: str, *, with_events: bool = False) -> Path:
    """Return the local folder of a run that is only read, with its small files up to date.

    If a process of this machine trains the run, its files are newer than those of the bucket.

    with_events: the files of TensorBoard, too.
    """
    folder = local_path(text)
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    if "://" in text and bucket_of(run) is not None:
        with open(run / _FETCH_LOCK, "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_training(run):
                events = ("tensorboard/",) if with_events else ()
                fetch(run, only=lambda name: _is_small(name) or name.startswith(events))
    return folder


def _is_training(run: Path) -> bool:
    """Return whether a process of this machine trains a run."""
    for name, kind in ((LOCK_FILE, fcntl.LOCK_SH), (_TRAINS_LOCK, fcntl.LOCK_EX)):
        with open(run / name, "a") as lock:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _is_small(name: str) -> bool:
    return not name.startswith(_LARGE)


def move_tree(source: BucketPath, target: BucketPath, without: Collection[str] = ()) -> None:
    """Move all objects below a prefix; those of folders in `without` stay.

    A checkpoint has its last file only while it is whole, at both places.
    """
    names = [name for name in source.find() if name.partition("/")[0] not in without]
    commits = [name for name in names if name.rpartition("/")[2] == COMMIT_FILE]
    others = [name for name in names if name not in {*commits}]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for part in (others, commits):
            [*pool.map(lambda name: (source / name).copy(target / name), part)]
        for part in (commits, others):
            [*pool.map(lambda name: (source / name).delete(), part)]


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
    _small_files(bucket)  # raises for what is no run
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
        lease = None
        if names is None:
            lease = Lease(bucket / LEASE, _folder_id(directory))
            lease.acquire(group)
            stack.callback(lease.release)
            stack.enter_context(_repeating(RENEW_SECONDS, partial(_renew, lease, group)))
            equal = fetch(directory, only=_is_small)
        else:  # readers of this machine leave the folder alone
            lock = stack.enter_context(open(directory / _TRAINS_LOCK, "a"))
            fcntl.flock(lock, fcntl.LOCK_SH)
            equal = fetch(directory, only=lambda name: name in names)
        copies = _Copies(directory, bucket, names, equal, lease)
        stack.callback(copies.update)
        stack.enter_context(_repeating(_COPY_SECONDS, copies.update))
        yield copies.publish


def _folder_id(directory: Path) -> str:
    """Return a random id of a local folder, which tells it from one of another machine."""
    path = directory / ".folder"
    if (found := _read(path)) is None:
        found = secrets.token_hex(16).encode()
        replace_file(path, found)
    return found.decode()


@contextlib.contextmanager
def _repeating(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call a function in a thread, again and again during the context."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(seconds):
            try:
                function()
            except Exception as error:  # the next call may succeed
                log.warning("a run in a bucket: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=repeat, name="bucket", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _renew(lease: Lease, group: ProcessGroup) -> None:
    """Renew a lease; end all processes at once if another run has taken it."""
    if not lease.renew():
        seconds = f"{EXPIRY_SECONDS:.0f} s"
        reason = f"another process took {lease.folder}, which was not renewed for {seconds}"
        log.error("error: %s", reason)
        group.abort(reason, 1)
        os._exit(1)


class _Copies:
    """Copies of the files of a folder in a bucket."""

    def __init__(
        self,
        directory: Path,
        bucket: BucketPath,
        names: Collection[str] | None,
        equal: Collection[str],
        lease: Lease | None,
    ):
        """Copy files of a folder. names: which; None: all. equal: those that are in the bucket."""
        self._directory, self._bucket, self._names = directory, bucket, names
        self._lease = lease
        self._lock = threading.Lock()
        self._known = {name: x for name, x in self._states().items() if name in equal}

    def _states(self) -> dict[str, tuple[int, int]]:
        """Return size and time of every file by its name."""
        found = {}
        for name in _names_in(self._directory):
            if self._names is None or name in self._names:
                with contextlib.suppress(OSError):  # it was replaced meanwhile
                    stat = (self._directory / name).stat()
                    found[name] = stat.st_size, stat.st_mtime_ns
        return found

    def update(self) -> None:
        """Copy what has changed, and delete what is gone. A failure is logged, and tried again."""
        with self._lock:
            if not (self._directory / _URL_FILE).exists():
                return  # the folder was deleted; its files in the bucket stay
            try:
                self._check_lease()
            except OSError as error:
                log.warning("files of the run were not copied to %s: %s", self._bucket, error)
                return
            states, problem = self._states(), None
            for name in [*states, *(self._known.keys() - states.keys())]:
                try:
                    self._update_file(name, states.get(name))
                except FileNotFoundError:  # it is being replaced
                    continue
                except OSError as error:
                    problem = error
            if problem is not None:
                log.warning("files of the run were not copied to %s: %s", self._bucket, problem)

    def publish(self) -> None:
        """Copy what must not be older than a checkpoint. Raises: OSError; no save begins then."""
        if self._lease is None:
            return
        with self._lock:
            self._check_lease()
            states = self._states()
            for name in BEFORE_SAVES:
                if name in states:
                    self._update_file(name, states[name])

    def _check_lease(self) -> None:
        """Raise OSError if another process may have the run: its files must not be replaced."""
        if self._lease is not None:
            self._lease.check()

    def _update_file(self, name: str, state: tuple[int, int] | None) -> None:
        if state is None:
            (self._bucket / name).delete()
            del self._known[name]
        elif self._known.get(name) != state:
            (self._bucket / name).overwrite((self._directory / name).read_bytes())
            self._known[name] = state
