"""Identity of a run directory: which run it is, and whether it was copied or moved since."""

import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from safe_files import replace_file
from training.bucket_runs import IDENTITY_FILE, bucket_of
from training.logs import log

TRACKERS_FILE = "trackers.json"
"""Ids under which trackers know the run of a directory."""


class RunIdentity(BaseModel, frozen=True, extra="forbid"):
    """Content of `run.json`.

    run_id: random; a copy of the directory gets another one when it trains. origins: ids of the
    runs of which this one is a copy, the oldest first. directory, host, inode: where it trained
    last.
    """

    run_id: str
    origins: tuple[str, ...] = ()
    directory: str
    host: str
    inode: int

    def check_record(self, record: Mapping[str, Any]) -> None:
        """Warn about a checkpoint that neither this run nor one of its origins has saved."""
        by = record.get("run_id")  # older checkpoints do not say
        if by is not None and by not in (self.run_id, *self.origins):
            log.warning(
                "checkpoint %d was saved by run %s, and this is run %s: the directory holds files "
                "of two runs; training continues from that checkpoint",
                record["step"],
                by,
                self.run_id,
            )


def identify_run(directory: Path) -> tuple[RunIdentity, str | None]:
    """Return the identity of a locked run directory, and a line if it was copied or moved.

    A directory that was renamed stays the same run. A copy, also one whose original is gone or not
    visible from this host, becomes a run of its own. Mount points with other names do not matter.
    """
    before, line = _read(directory), None
    where, inode = str(directory.resolve()), directory.stat().st_ino
    if (bucket := bucket_of(directory)) is not None:  # its local folders come and go
        where, inode = str(bucket), 0
    now = RunIdentity(
        run_id=secrets.token_hex(8), directory=where, host=socket.gethostname(), inode=inode
    )
    if before is not None:
        change = _find_change(before, now)
        if change is None or change == "moved":
            now = now.model_copy(update={"run_id": before.run_id, "origins": before.origins})
        else:
            now = now.model_copy(update={"origins": (*before.origins, before.run_id)})
            # A tracker shows the copy as a run of its own.
            (directory / TRACKERS_FILE).unlink(missing_ok=True)
        if change is not None:
            line = f"run directory {where} was {change} from {before.host}:{before.directory}"
        if now.run_id != before.run_id:
            line = f"{line} (run {before.run_id}); it continues as run {now.run_id}"
    if now != before:
        replace_file(directory / IDENTITY_FILE, now.model_dump_json(indent=1) + "\n")
    return now, line


def _find_change(before: RunIdentity, now: RunIdentity) -> str | None:
    """Return "moved", "copied" or "copied or moved"; None: the directory is where it was."""
    origin, path = Path(before.directory), Path(now.directory)
    if origin == path or _is_same(origin, path):
        return None
    if _has_run(origin, before.run_id):
        return "copied"
    return "moved" if now.inode and now.inode == before.inode else "copied or moved"


def _read(directory: Path) -> RunIdentity | None:
    """Return what `run.json` says; None if there is none, or it is not readable as one."""
    try:
        return RunIdentity.model_validate_json((directory / IDENTITY_FILE).read_bytes())
    except FileNotFoundError:  # a new run, or one of an earlier version
        return None
    except (OSError, ValidationError) as error:
        reason = str(error).partition("\n")[0]
        log.warning(
            "%s is not readable (%s); the run gets a new id", directory / IDENTITY_FILE, reason
        )
        return None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _has_run(directory: Path, run_id: str) -> bool:
    """Return whether a directory holds this run now."""
    try:
        found = RunIdentity.model_validate_json((directory / IDENTITY_FILE).read_bytes())
    except (OSError, ValidationError):
        return False
    return found.run_id == run_id
