"""Output directories of conversions: marked until they are complete, replaced after a kill.

A marker file tells such a directory from one of the user's. The file that completes the directory
is written last, so a directory without it is incomplete for every reader.
"""

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

MARKER = ".incomplete"
_LOCK = ".lock"  # of a run directory
_TEXT = (
    "An interrupted conversion left the files of this directory. The same command deletes them and "
    "begins again.\n"
)


@dataclass(frozen=True)
class NewDirectory:
    """A directory that a conversion fills.

    last: name of the file that completes it. files: patterns of everything that a conversion writes
    there.
    """

    path: Path
    last: str
    files: tuple[str, ...]

    def check(self) -> None:
        """Raise ValueError unless it is missing, empty, or left by a killed conversion."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give a new directory")
        names = sorted(path.name for path in self._entries())
        if not names:
            return
        if not (self.path / MARKER).exists() or self.last in names:
            raise ValueError(f"{self.path} exists and is not empty; give a new directory")
        if others := [n for n in names if not any(fnmatch(n, form) for form in self.files)]:
            raise ValueError(
                f"{self.path} holds {others[0]} beside the files of an interrupted conversion; "
                "move it elsewhere to begin again, or give a new directory"
            )

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Create the directory, empty it, and mark it as incomplete until the block has ended.

        Raises:
            ValueError: it may not be filled, or another process fills it.
            OSError: the disk is full or cannot be written; the directory stays incomplete.
        """
        self.check()
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / MARKER, "a") as marker:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"{self.path} is being written by another process; give a new directory"
                ) from error
            self.check()  # the other process may have ended just now
            for path in self._entries():
                is_folder = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path) if is_folder else path.unlink()
            marker.truncate(0)
            marker.write(_TEXT)
            marker.flush()
            yield
            (self.path / MARKER).unlink()

    def _entries(self) -> list[Path]:
        """Return what the directory holds but the lock of a run and the marker."""
        return [path for path in self.path.iterdir() if path.name not in (MARKER, _LOCK)]
