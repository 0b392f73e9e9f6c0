"""Make a script import the packages of the clone it stands in.

Every command in this folder imports this module before `configs`, `data`, `model`, `parallel` or
`training`. Then it uses those of its own clone, from any working directory, even if another copy is
installed or on PYTHONPATH.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@contextlib.contextmanager
def hidden_scripts() -> Iterator[None]:
    """Take this folder off the search path, for libraries that import a module named as a script.

    Modules of packages that are imported already are still found.
    """
    before = list(sys.path)
    sys.path[:] = [path for path in before if Path(path).resolve() != ROOT / "scripts"]
    try:
        yield
    finally:
        sys.path[:] = before
