"""Crash-safe files, digests that reveal damage, and folders that only their owner may write to.

Every package may import this. A file that is replaced, and a file or folder that gets its name when
it is complete, must be on disk before its name is: after a power cut a file system may otherwise
know the new name and not the content.
"""

import errno
import glob
import hashlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def json_digest(value: Any) -> str:
    """Return the SHA-256 (hex) of JSON values, which is stored beside them to notice damage."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that it has all of its old content or all of the new one, whatever happens.

    Other processes may write the same file at the same time; the last one wins.

    Args:
        path: the file; its folder is created if it is missing. A symbolic link is replaced itself.
        content: bytes, or text that is encoded as UTF-8.

    Raises:
        OSError: the disk is full or cannot be written; the file is as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(_partial_name(path, secrets.token_hex(8)))
    try:
        with open(partial, "xb") as file:  # not tempfile's: the umask decides the mode
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove_partials(path: Path) -> None:
    """Delete temporary files of a killed `replace_file`; no process may be writing the file."""
    for partial in path.parent.glob(_partial_name(path.with_name(glob.escape(path.name)), "*")):
        partial.unlink(missing_ok=True)


def _partial_name(path: Path, key: str) -> str:
    return f".{path.name[:200]}.{key}.tmp"


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; after the return, a power cut does not undo it. Raises: OSError."""
    os.rename(source, target)
    for folder in {source.parent, target.parent}:
        sync(folder)


def publish_folder(building: Path, folder: Path) -> None:
    """Give a complete folder its name, after its files are on disk.

    Args:
        building: the folder under its temporary name.
        folder: its name, in a folder that exists.

    Raises:
        OSError: it cannot be written, or `folder` exists and is not empty.
    """
    for path in building.rglob("*"):
        sync(path)
    sync(building)
    rename(building, folder)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names of a folder, is on disk. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a folder, and order renames on their servers.
        if error.errno not in _UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(handle)


def make_private(folder: Path) -> None:
    """Create a folder with mode 0700, or check that no other user may write to an existing one.

    This is for folders of files that are trusted when they are read, such as compiled programs. A
    sticky bit is not enough, because others may then still add files. The parents are not checked:
    by default the folder is in the clone, and a user who may write there may replace the program.

    Raises:
        ValueError: another user owns the folder or may write to it; the line has the remedy.
        OSError: it cannot be created or is no folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    # An administrator may do anything to this process anyway.
    if found.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{folder} belongs to user {found.st_uid}, who may put files there; give a folder of "
            f"user {os.geteuid()}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}, so other users may put files "
            "there; delete it, so that it is created with mode 0700, or give another folder"
        )
