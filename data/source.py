"""Where documents come from: files on disk, by default Python's own standard library.

A document is one file, whole. Their order is the sorted order of their paths.
"""

import glob
import os
import sysconfig
from pathlib import Path

_NOT_PROSE = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}


def find_files(pattern: str | None) -> list[Path]:
    """The files of a run, sorted.

    pattern: a glob (`**` reaches into folders), or None: the `.py` files of the running
        interpreter's standard library without its tests, about 12 MB of text on every machine.
    Raises: ValueError when nothing matches or the files hold no byte.
    """
    if pattern is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            path
            for path in root.rglob("*.py")
            if not _NOT_PROSE.intersection(path.relative_to(root).parts[:-1])
        ]
        what = f"the standard library at {root}"
    else:
        names = glob.glob(os.path.expanduser(pattern), recursive=True)
        files = [Path(name) for name in names if Path(name).is_file()]
        what = f"data.files={pattern!r}"
    if not files:
        raise ValueError(
            f"{what} matches no file; give a glob such as 'texts/*.txt', or null for "
            "the standard library's source"
        )
    if not any(path.stat().st_size for path in files):
        raise ValueError(f"{what} matches {len(files)} file(s), all empty; give files with text")
    return sorted(files)
