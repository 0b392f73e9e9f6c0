"""The directory of a run: held by one process at a time, an old run in it moved aside."""

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from parallel.cluster.errors import ProcessGroupError
from parallel.cluster.process_group import ProcessGroup


def run_directory(given: str) -> Path:
    """The directory that `run.dir` means. Raises: ValueError if no run can be there."""
    if "://" in given:
        raise ValueError(f"run.dir={given!r} is a URL; give a directory of this machine")
    directory = Path(os.path.expanduser(given))
    if set("[]*?") & set(path := os.path.abspath(directory)):
        # Saves there would end without an index of their arrays, and without an error.
        raise ValueError(f"run.dir={path!r}: orbax takes [ ] * ? for a pattern; give another")
    return directory


@contextlib.contextmanager
def locked_run(
    directory: Path, required_bytes: int, group: ProcessGroup | None = None
) -> Iterator[None]:
    """Makes the run directory, and holds it alone for as long as the context lasts.

    required_bytes: what the checkpoints to come will take. Among several processes it waits for the
    lock: a file server keeps that of a host that was lost for a while.
    Raises: ValueError if it cannot be written, has too little room, or another run holds it;
    ProcessGroupError if that is so for `cluster.start_timeout`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")
    except OSError as error:
        raise ValueError(
            f"run.dir={str(directory)!r} cannot be written: {error.strerror}; "
            "give a directory that you own"
        ) from error
    with lock:
        in_use = f"run.dir={str(directory)!r} is in use by another process"
        if not _lock(lock):
            if group is None or group.num_processes == 1:
                raise ValueError(f"{in_use}; give another run.dir")
            wait = group.config.start_timeout
            sys.stderr.write(f"{in_use}; waiting for it, up to {wait} s\n")
            deadline = time.monotonic() + wait
            while not _lock(lock):
                if time.monotonic() > deadline:
                    raise ProcessGroupError(f"{in_use}, for {wait} s; end that one")
                time.sleep(1.0)
        free = shutil.disk_usage(directory).free
        if free < required_bytes:
            raise ValueError(
                f"run.dir={str(directory)!r} has {free / 2**20:.0f} MiB free, but its checkpoints "
                f"need {required_bytes / 2**20:.0f} MiB; free some room, lower checkpoint.keep, or "
                "give another run.dir"
            )
        yield


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_shared_filesystem(directory: Path, group: ProcessGroup) -> None:
    """Holds that all processes see the run directory that process 0 made.

    Raises: ValueError in one that does not.
    """
    token = group.broadcast("directory", lambda: f"{time.time_ns()} {os.getpid()}")
    shown = directory / ".shared"
    if group.is_primary:
        shown.write_text(token)
    group.barrier("token")
    if not shown.exists() or shown.read_text() != token:
        raise ValueError(
            f"run.dir={str(directory)!r} on {group.hosts[group.process_id]} is not that of process "
            "0; give a directory that all hosts share"
        )


def move_aside(directory: Path) -> Path | None:
    """Renames an old run directory to `NAME.old-K`; returns the new name, None if there was none.

    The lock file stays behind, with whoever holds it. Raises: ValueError if it is no run, or cannot
    be moved.
    """
    directory = directory.resolve()
    old = (
        [path for path in directory.iterdir() if path.name != ".lock"] if directory.exists() else []
    )
    if not old:
        return None
    if not any((directory / name).exists() for name in ("config.yaml", "checkpoints")):
        raise ValueError(
            f"checkpoint.resume=never would move {str(directory)!r} aside, but it has files and "
            "holds no run; give another run.dir"
        )
    number = 1
    while (target := directory.with_name(f"{directory.name}.old-{number}")).exists():
        number += 1
    target.mkdir()
    try:
        for path in old:
            path.rename(target / path.name)
    except OSError as error:
        if not any(target.iterdir()):
            target.rmdir()
        raise ValueError(
            f"run.dir={str(directory)!r} cannot be moved to {str(target)!r}: {error.strerror}; "
            "move it by hand, or give another run.dir"
        ) from error
    return target
