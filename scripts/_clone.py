"""Make a script import the packages of the clone it stands in.

Every command in this folder imports this module before `configs`, `data`, `model`, `parallel` or
`training`. Then it uses those of its own clone, from any working directory, even if another copy is
installed or on PYTHONPATH.

Ctrl-C during the imports that follow ends a command without a traceback.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def _interrupt(number: int, frame: Any) -> None:
    """Exit while the command still imports its modules, and raise KeyboardInterrupt after that."""
    if not hasattr(sys.modules["__main__"], "main"):
        os._exit(128 + signal.SIGINT)
    signal.default_int_handler(number, frame)


_is_command = Path(sys.argv[0]).resolve().parent == ROOT / "scripts"  # otherwise a test imports it
if _is_command and multiprocessing.parent_process() is None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # `&` in a script ignores it
        signal.signal(signal.SIGINT, _interrupt)
