"""Folders of checkpoints, on a disk and in a bucket: finished, damaged, and unfinished ones.

On a disk, orbax renames a save when it is complete. In a bucket, which has no renames, it writes a
file `commit_success.txt` last.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.bucket_path import AnyPath, BucketPath
from safe_files import rename
from training.bucket_runs import delete_tree, move_tree
from training.checkpoint_record import COMMIT_FILE, CheckpointError, short_reason
from training.logs import log

_TEMPORARY = ".orbax-checkpoint-tmp"


@contextlib.contextmanager
def listing(folder: AnyPath) -> Iterator[None]:
    """Turn errors of the service of a bucket into CheckpointError."""
    try:
        yield
    except Exception as error:  # each library below orbax has exceptions of its own
        if isinstance(folder, Path):
            raise
        raise CheckpointError(f"{folder}: {short_reason(error)}") from error


def orbax_path(folder: AnyPath) -> str:
    """Return a folder as orbax takes it."""
    return os.path.abspath(folder) if isinstance(folder, Path) else folder.url


def warn_of_missing(folder: AnyPath, steps: Sequence[int]) -> bool:
    """Warn about checkpoints that are missing on a disk; return whether there are any.

    In a bucket, where this would take a request for each step, none is looked for.
    """
    if not isinstance(folder, Path):
        return False
    missing = [str(step) for step in steps if not (folder / str(step)).exists()]
    if missing:
        text = "checkpoints %s are missing from %s; another process or a person has deleted them"
        log.warning(text, ", ".join(missing), folder)
    return bool(missing)


def delete_partial(folder: AnyPath, step: int) -> None:
    """Delete what a failed save of a step has left."""
    if isinstance(folder, Path):
        for path in folder.glob(f"{step}.*tmp*"):
            shutil.rmtree(path, ignore_errors=True)
    elif not (folder / str(step) / COMMIT_FILE).exists():
        delete_tree(folder / str(step))


def rename_damaged(folder: AnyPath, step: int) -> AnyPath:
    """Rename a checkpoint to `STEP.damaged`, or `STEP.damaged-K`; return that.

    Raises: FileNotFoundError if it is gone.
    """
    number, name = 1, f"{step}.damaged"
    while (folder / name).exists():
        number += 1
        name = f"{step}.damaged-{number}"
    source, target = folder / str(step), folder / name
    if isinstance(source, BucketPath):
        if not source.exists():
            raise FileNotFoundError(str(source))
        move_tree(source, target)  # type: ignore[arg-type]
    else:
        rename(source, target)  # type: ignore[arg-type]
    return target


def delete_checkpoint(folder: AnyPath, step: int) -> None:
    """Delete a checkpoint, so that it is not taken for a finished one after a kill midway."""
    if isinstance(folder, BucketPath):
        delete_tree(folder / str(step), first=COMMIT_FILE)
        return
    target = folder / f"{step}{_TEMPORARY}"
    shutil.rmtree(target, ignore_errors=True)
    rename(folder / str(step), target)
    shutil.rmtree(target)


def find_leftovers(folder: AnyPath) -> tuple[list[AnyPath], list[AnyPath]]:
    """Return (damaged checkpoints that were set aside, saves that never finished)."""
    found: list[AnyPath] = sorted(folder.iterdir(), key=str)
    damaged = [path for path in found if ".damaged" in path.name]
    if isinstance(folder, BucketPath):
        steps = [path for path in found if path.name.isdecimal()]
        return damaged, [path for path in steps if not (path / COMMIT_FILE).exists()]
    return (
        [path for path in damaged if path.is_dir()],
        [path for path in found if _TEMPORARY in path.name and path.is_dir()],
    )
