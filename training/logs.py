"""Log lines of a run, on the screen and in a file."""

import contextlib
import logging
import os
import re
import resource
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

log = logging.getLogger("torus")


@contextlib.contextmanager
def logging_to(path: Path, console: Console | None, *, silent: bool = False) -> Iterator[None]:
    """Log to the screen and, with time stamps, append to `path`.

    `log.debug` goes to the file alone: it is for text too long for a screen.

    Args:
        path: the log file.
        console: the terminal of a live progress bar; None prints plain lines on stdout.
        silent: log to the file only.
    """
    screen = _RichHandler(console) if console is not None else _ScreenHandler(sys.stdout)
    file = _FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    screen.setLevel(logging.INFO)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    handlers = [file] if silent else [screen, file]
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()


class _ScreenHandler(logging.StreamHandler[TextIO]):
    """Stdout handler that survives a closed pipe, such as `| head`."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)
            return
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), self.stream.fileno())


class _FileHandler(logging.FileHandler):
    """File handler that survives a full disk and warns once."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._has_warned:
            self._has_warned = True
            error = sys.exc_info()[1]
            print(f"log lines are lost: cannot write {self.baseFilename}: {error}", file=sys.stderr)


class _RichHandler(logging.Handler):
    """Handler that prints above a live progress bar; wraps a long line between words."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if "\n" not in text:  # not a generated text, which stays as it is
            label = re.match(r"\S+ {2,}", text)
            indent = " " * (len(label[0]) if label else 2)
            text = textwrap.fill(
                text, self._console.width, subsequent_indent=indent, break_on_hyphens=False
            )
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def aligned(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines with their first words, without a colon, as a column of labels."""
    pairs = [line.split(" ", 1) for line in lines]
    width = max((len(label.rstrip(":")) for label, _ in pairs), default=0)
    for label, text in pairs:
        yield f"{label.rstrip(':'):{width}}  {text}"


def printable(text: str) -> str:
    """Return a generated text with U+FFFD for the control characters that would reach a terminal.

    Ends of lines and tabs stay.
    """
    return re.sub(r"\r(?!\n)|[^\r\n\t\x20-\x7e\xa0-\U0010ffff]", "\ufffd", text)


def peak_memory() -> int:
    """Return the peak host memory of this process in bytes."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def silence_orbax() -> None:
    """Hide what orbax prints besides the exception that it raises.

    Its threads log tracebacks. After a read that fails, it closes its event loop while tensorstore
    still reads other arrays, each of which reports that.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


class _UnraisableHook:
    """Reports an exception that no code receives, but not those of closed event loops."""

    def __init__(self, before: Callable[[Any], None]):
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._before(unraisable)
