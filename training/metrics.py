"""What a run tells: one JSON object per logged step, tensorboardX scalars, lines for a person."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

log = logging.getLogger("torus")


@contextlib.contextmanager
def logging_to(path: Path, console: Console | None) -> Iterator[None]:
    """Lines to the screen and, with times, to `path`, which keeps what it has.

    `log.debug` is for what is too long for a screen: it goes to `path` alone.
    """
    screen = _RichHandler(console) if console is not None else logging.StreamHandler(sys.stdout)
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    screen.setLevel(logging.INFO)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    for handler in (screen, file):
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in (screen, file):
            log.removeHandler(handler)
            handler.close()


class _RichHandler(logging.Handler):
    """Prints above a live progress bar."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), highlight=False, markup=False)


class Metrics:
    """The record of a run, in `metrics.jsonl` and `tensorboard/`.

    resumed_step: lines of later steps are dropped: those steps are run again.
    """

    def __init__(self, directory: Path, resumed_step: int):
        self._path = directory / "metrics.jsonl"
        kept = []
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines(True) if line.endswith("\n")]
            kept = [line for line in kept if line.strip()]
            kept = [line for line in kept if json.loads(line)["step"] <= resumed_step]
        replacement = self._path.with_suffix(".tmp")
        replacement.write_text("".join(kept))
        os.replace(replacement, self._path)
        self._file = open(self._path, "a")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one line; floats read back bit-equal (shortest exact decimal of the double)."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Shows a text in tensorboard."""
        self._board.add_text(name, f"```\n{text}\n```", step)

    def write_image(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        """Shows an image in tensorboard: uint8, height x width x 3 colours."""
        self._board.add_image(name, image_HWC, step, dataformats="HWC")

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        self._board.close()


class Display:
    """A progress bar with ETA on a terminal, plain lines in a log."""

    def __init__(self, start: int, stop: int, log_every: int):
        self._start, self._stop, self._every = start, stop, log_every
        self._times: list[float] = []
        self._console = Console(soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=stop, completed=start)

    @property
    def console(self) -> Console | None:
        """Where lines must go so that they do not tear the bar; None in a plain log."""
        return self._console if self._progress is not None else None

    def __enter__(self) -> "Display":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, step: int, values: dict[str, float]) -> None:
        """A finished step; the first, the last and every `log_every`-th make a line."""
        self._times.append(values["step_time"])
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        if step % self._every and step != self._stop and step != self._start + 1:
            return
        step_time = sum(self._times) / len(self._times)
        tokens_per_second = values["tokens_per_second"] * values["step_time"] / step_time
        self._times.clear()
        mfu = (
            f"  mfu {values['mfu'] * values['step_time'] / step_time:.1%}"
            if "mfu" in values
            else ""
        )
        waits = f"  data_wait {values['data_wait']:.0%}" if values["data_wait"] > 0.02 else ""
        log.info(
            f"step {step:>{len(str(self._stop))}}/{self._stop}  loss {values['loss']:.4f}  "
            f"grad {values['grad_norm']:.2f}  lr {values['learning_rate']:.1e}  "
            f"{tokens_per_second:,.0f} tok/s  {step_time:.3f} s/step{mfu}{waits}  "
            "eta {}:{:02d}".format(*divmod(round((self._stop - step) * step_time), 60))
        )
