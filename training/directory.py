"""Run directories: exclusive lock, shared file system, old runs moved aside."""

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from parallel.cluster.config import ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from safe_files import rename
from training.bucket_runs import LOCK_FILE, local_path
from training.lease import IN_USE_REMEDY
from units import format_bytes

_LOCK = LOCK_FILE
_MOVING = ".moving"  # a file in a folder into which a run is being moved


def run_directory(given: str) -> Path:
    """Return the local folder of `run.dir`. Raises: ValueError if it cannot be a run directory."""
    if "://" in given and not given.startswith(("gs://", "s3://")):
        raise ValueError(
            f"run.dir={given!r} is in no place that is supported; give a directory on a mounted "
            "file system, gs://BUCKET/NAME or s3://BUCKET/NAME"
        )
    if "://" in given and "/" not in given.partition("://")[2].strip("/"):
        raise ValueError(f"run.dir={given!r} is a whole bucket; add the name of the run to it")
    directory = local_path(given)
    path = given if "://" in given else os.path.abspath(directory)
    if set("[]*?") & set(path):
        # Saves there end without an index of their arrays, and without an error.
        raise ValueError(
            f"run.dir={path!r}: orbax reads [ ] * ? as a pattern; give a path without them"
        )
    return directory


@contextlib.contextmanager
def locked_run(
    directory: Path, required_bytes: int, group: ProcessGroup | None = None
) -> Iterator[None]:
    """Create the run directory and hold its lock for the context.

    With one process, a directory that is created here for a run that is then refused is removed
    again, unless a file in it has content. With several processes, wait for the lock: a file server
    keeps that of a lost host for a while.

    Args:
        directory: run directory.
        required_bytes: free space that the checkpoints of the run need.
        group: the processes of the run.

    Raises:
        ValueError: the directory cannot be written, has too little space, or is in use.
        ProcessGroupError: it was in use for `cluster.start_timeout`.
    """
    is_new = (group is None or group.num_processes == 1) and not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / _LOCK, "a+")
    except OSError as error:
        raise ValueError(
            f"run.dir={str(directory)!r} cannot be written: {error.strerror}; "
            "give a directory that you may write to"
        ) from error
    with lock:
        if not _lock(lock):
            in_use = _in_use(directory, lock)
            if group is None or group.num_processes == 1:
                raise ValueError(f"{in_use}; {IN_USE_REMEDY}")
            wait = group.config.start_timeout
            sys.stderr.write(f"{in_use}; waiting for it, up to {wait} s\n")
            deadline = time.monotonic() + wait
            while not _lock(lock):
                if time.monotonic() > deadline:
                    raise ProcessGroupError(f"{in_use}, for {wait} s; stop that process")
                time.sleep(1.0)
        try:
            _sign(lock)
            _check_space(directory, required_bytes)
            yield
        except ValueError:
            if is_new and not _has_content(directory):
                # On NFS the open lock file stays.
                shutil.rmtree(directory, ignore_errors=True)
            raise


def check_run_directory_of(file: Path, given: str) -> None:
    """Check that the configuration in a run directory names that directory as `run.dir`.

    Raises: ValueError if the directory was moved or copied, or the working directory is another.
    """
    folder = file.absolute().parent
    if file.name != "config.yaml" or not (folder / "checkpoints").is_dir():
        return
    if (named := run_directory(given).resolve()) != folder.resolve():
        raise ValueError(
            f"--config {file}: its run.dir={given} is {named} from here, not the directory of this "
            f"file; add run.dir={folder} to continue the run here, or run.dir={named}"
        )


def check_not_in_use(directory: Path) -> None:
    """Raise ValueError at once if another process of this machine holds a run directory.

    `locked_run` decides; this check comes before data are read and a model is built.
    """
    try:
        lock = open(directory / _LOCK, "r+")
    except OSError:  # none has run here, or `locked_run` will say what is wrong
        return
    with lock:
        if not _lock(lock):
            raise ValueError(f"{_in_use(directory, lock)}; {IN_USE_REMEDY}")


def _in_use(directory: Path, lock: IO[str]) -> str:
    """Return who holds the lock of a run directory, as `_sign` has written it there."""
    lock.seek(0)
    return f"run.dir={str(directory)!r} is in use by {lock.read(200) or 'another process'}"


def _sign(lock: IO[str]) -> None:
    """Write into a lock which process holds it."""
    with contextlib.suppress(OSError):  # the disk is full: `_check_space` says so
        # Past the buffer, which would repeat a failed write when the file is closed.
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} of {socket.gethostname()}".encode())


def _check_space(directory: Path, required_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < required_bytes:
        raise ValueError(
            f"run.dir={str(directory)!r} has {format_bytes(free)} free, but its checkpoints "
            f"need {format_bytes(required_bytes)}; free some space, lower checkpoint.keep, "
            "or give another run.dir"
        )


def _has_content(directory: Path) -> bool:
    """Return whether a file has content, other than the hidden ones of this module."""
    files = (path for path in directory.rglob("[!.]*") if not path.is_dir())
    return any(path.lstat().st_size for path in files)


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ValueError(
            f"run.dir={os.path.dirname(file.name)!r} cannot be locked: {error.strerror}; mount the "
            "file system with locks (Lustre: -o flock), or give another run.dir"
        ) from error
    return True


def check_shared_filesystem(directory: Path, group: ProcessGroup) -> None:
    """Check that all processes see the run directory of process 0.

    Raises:
        ValueError: on a process that sees another directory.
    """
    token = group.broadcast("directory", lambda: f"{time.time_ns()} {os.getpid()}")
    marker = directory / ".shared"
    if group.is_primary:
        marker.write_text(token)
    group.barrier("token")
    if not marker.exists() or marker.read_text() != token:
        raise ValueError(
            f"run.dir={str(directory)!r} on {group.hosts[group.process_id]} is not that "
            "of process 0; give a directory on a file system that all hosts share"
        )


def move_aside(directory: Path) -> Path | None:
    """Move the files of an old run to `NAME.old-K`; return it, or None if there were none.

    The lock file stays, because this process holds it.

    Raises:
        ValueError: the directory holds files but no run, or cannot be moved.
    """
    directory = directory.resolve()
    old = [path for path in directory.iterdir() if path.name != _LOCK] if directory.exists() else []
    if not old:
        return None
    if not any((directory / name).exists() for name in ("config.yaml", "checkpoints")):
        raise ValueError(
            f"checkpoint.resume=never would move {str(directory)!r}, but its files are not "
            "those of a run; give another run.dir"
        )
    number, before = 1, directory
    while (target := directory.with_name(f"{directory.name}.old-{number}")).exists():
        number, before = number + 1, target
    if (before / _MOVING).exists() and not any((before / path.name).exists() for path in old):
        target = before  # this move was interrupted
    else:
        target.mkdir()
    marker = target / _MOVING
    try:
        marker.touch()
        # What is left is known as a run by its config.yaml.
        for path in sorted(old, key=lambda path: path.name == "config.yaml"):
            rename(path, target / path.name)
        marker.unlink()
    except OSError as error:
        if not any(path != marker for path in target.iterdir()):
            shutil.rmtree(target)
        raise ValueError(
            f"run.dir={str(directory)!r} cannot be moved to {str(target)!r}: {error.strerror}; "
            "move it by hand, or give another run.dir"
        ) from error
    return target
