"""Progress of a tokenization: a bar on a terminal, lines in a log."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_PER_LINE = 5.0


class TokenizationProgress:
    """Progress bar with ETA on a terminal, plain lines in a log, nothing for an existing store."""

    def __init__(self, name: str):
        self._name = name
        self._begin: tuple[float, int, int] | None = None
        self._now = (0.0, 0, 0)
        self._last_line = time.monotonic()
        console = Console(stderr=True)
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._progress.add_task(name, total=None, rate="")

    def __enter__(self) -> "TokenizationProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, done: int, total: int, tokens: int) -> None:
        """Show bytes of input done, bytes in all and tokens written; first called at the start."""
        self._now = (time.monotonic(), done, tokens)
        if self._begin is None:
            self._begin = self._now
            if self._progress is not None:
                self._progress.start()
        seconds, num_bytes, num_tokens = self._since_begin()
        rate = f"{num_tokens / seconds:,.0f} tok/s" if seconds else ""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, rate=rate)
        elif num_bytes and self._now[0] - self._last_line >= SECONDS_PER_LINE:
            self._last_line = self._now[0]
            minutes, rest = divmod(round((total - done) * seconds / num_bytes), 60)
            print(
                f"{self._name}  {done / 1e6:,.0f}/{total / 1e6:,.0f} MB  {tokens:,} tokens  "
                f"{rate}  eta {minutes}:{rest:02d}",
                file=sys.stderr,
                flush=True,
            )

    def speed(self) -> str:
        """Return the megabytes of input per second, or that the store existed."""
        seconds, num_bytes, _ = self._since_begin()
        return (
            f"{num_bytes / 1e6 / seconds:.1f} MB/s"
            if num_bytes and seconds
            else "already tokenized"
        )

    def _since_begin(self) -> tuple[float, int, int]:
        if self._begin is None:
            return 0.0, 0, 0
        (t0, b0, n0), (t1, b1, n1) = self._begin, self._now
        return t1 - t0, b1 - b0, n1 - n0
