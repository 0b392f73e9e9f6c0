"""Python stacks of all threads of a process, written when a run has stalled."""

import sys
import threading
import time
import traceback
from pathlib import Path


def write_stacks(path: Path | None, reason: str) -> None:
    """Append the Python stack of every thread to a file, or write it to stderr if there is none.

    A thread that waits for a device shows the call that waits, such as `device_get`. A process that
    is stopped, or whose interpreter is held by a function of C, cannot write its stacks.
    """
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"{stamp} {reason}\n\n{format_stacks()}\n"
    if path is None:
        sys.stderr.write(text)
        sys.stderr.flush()
        return
    with open(path, "a") as file:
        file.write(text)


def format_stacks() -> str:
    """Return the Python stack of every thread of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for number, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(number, number)}:\n{stack}")
    return "\n".join(parts)
