"""What a run tells: one JSON object per logged step, tensorboardX scalars, lines for a person."""

import contextlib
import json
import logging
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import summary

from parallel.sharding.chips import CHIPS
from training.board import Board
from training.step import Program

log = logging.getLogger("torus")


@contextlib.contextmanager
def logging_to(path: Path, console: Console | None, *, silent: bool = False) -> Iterator[None]:
    """Lines to the screen, unless silent, and, with times, to `path`, which keeps what it has.

    `log.debug` is for what is too long for a screen: it goes to `path` alone.
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
    """Goes on without a reader that has had enough, such as `head`: all lines are in the file."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError):
            super().handleError(record)
            return
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())


class _FileHandler(logging.FileHandler):
    """Goes on without what a full disk does not take, and says so once."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            print(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


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
        kept, steps, last = [], set[int](), 0
        for line, entry in _read(self._path):
            last = entry["step"]
            if 0 < last <= resumed_step:
                kept.append(line)
                steps.add(last)
        if missing := resumed_step - len(steps):
            log.warning("%s lacks %d of %d steps", self._path, missing, resumed_step)
        if last and not resumed_step:
            log.warning("no checkpoint is left of steps 1 to %d: they are trained again", last)
        replace_text(self._path, "".join(kept))
        self._unwritten = b""
        self._board = Board(directory / "tensorboard", resumed_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one line; floats read back bit-equal (shortest exact decimal of the double)."""
        self._append(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._board.add(step, summary.scalar(name, value))

    def amend(self, step: int, values: dict[str, float]) -> None:
        """Adds to the line of the last step, which another process wrote."""
        lines = self._path.read_text().splitlines(True)
        last = json.loads(lines[-1]) if lines else {}
        if last.get("step") == step:
            lines.pop()
        else:  # a full disk did not take it, or somebody removed it
            last = {"step": step}
        text = "".join([*lines, json.dumps({**last, **values}) + "\n"])
        replace_text(self._path, text)
        for name, value in values.items():
            self._board.add(step, summary.scalar(name, value))

    def _append(self, text: str) -> None:
        """Writes what there is room for; the rest waits for the next call."""
        told, self._unwritten = bool(self._unwritten), self._unwritten + text.encode()
        try:
            with open(self._path, "ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            if not told:
                log.warning("%s cannot be written: %s; its lines wait", self._path, error.strerror)

    def write_text(self, step: int, name: str, text: str) -> None:
        """Shows a text in tensorboard."""
        self._board.add(step, summary.text(name, f"```\n{text}\n```"))

    def write_image(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        """Shows an image in tensorboard: uint8, height x width x 3 colours."""
        self._board.add(step, summary.image(name, image_HWC, dataformats="HWC"))

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: Any) -> None:
        self._append("")
        self._board.close()


def peak_memory() -> int:
    """Bytes of host memory of this process at its peak."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def last_goodput(path: Path) -> dict[str, float]:
    """The ledger in the last line of a `metrics.jsonl` that has one; empty if none has."""
    _, last = next(iter(deque(_read(path, '"goodput/'), maxlen=1)), ("", {}))
    return {k.removeprefix("goodput/"): y for k, y in last.items() if k.startswith("goodput/")}


def evaluations(path: Path) -> dict[int, float]:
    """The evaluation losses of a `metrics.jsonl`, by step."""
    return {entry["step"]: entry["eval_loss"] for _, entry in _read(path, '"eval_loss"')}


def _read(path: Path, mark: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole lines of a `metrics.jsonl` with this mark, and what they say; what a crash left of
    others is passed over."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if mark not in line or not line.endswith("\n"):
                continue
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and type(entry.get("step")) is int:
                    yield line, entry


def replace_text(path: Path, text: str) -> None:
    """Writes a file anew: whoever reads it, and whatever happens, it is the old or the new one."""
    replacement = path.with_suffix(".tmp")
    replacement.write_text(text)
    os.replace(replacement, path)


class Unwritten(Metrics):
    """Of a process that does not write them: they are the same in all."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, values: dict[str, float]) -> None:
        """Nothing."""

    def amend(self, step: int, values: dict[str, float]) -> None:
        """Nothing."""

    def write_text(self, step: int, name: str, text: str) -> None:
        """Nothing."""

    def write_image(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        """Nothing."""

    def __exit__(self, *_: Any) -> None:
        pass


class Display:
    """A progress bar with ETA on a terminal, plain lines in a log."""

    def __init__(self, stop: int, log_every: int, *, silent: bool = False):
        self._start, self._stop, self._every = 0, stop, log_every
        self._times: list[float] = []
        self._console = Console(soft_wrap=True)
        self._progress: Progress | None = None
        if self._console.is_terminal and not silent:
            self._progress = Progress(
                TextColumn("[bold]training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=stop)

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

    def begin(self, step: int) -> None:
        """Steps are counted from here on."""
        self._start = step
        self._times.clear()
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

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


class Clock:
    """Wall time per step, and what follows from it."""

    def __init__(self, program: Program):
        self._program = program
        mesh = program.tp.manager.mesh
        chip = CHIPS.get(mesh.devices.flat[0].device_kind)
        self._peak = chip.peak_flops * mesh.size if chip else None
        self._waited = self._blocked = 0.0
        self.restart()

    def restart(self) -> None:
        """What happened since the last reading was not training."""
        self._time = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The host needs a batch, and cannot go on without it."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """The host has nothing to do until the devices are done."""
        begin = time.perf_counter()
        yield
        self._blocked += time.perf_counter() - begin

    def read(self, rows: int, length: int) -> dict[str, float]:
        """Seconds since the last reading, tokens per second, the share of the time that went by
        waiting for data, the seconds in which the devices were not awaited, and MFU where the peak
        is known; of a step of `rows` x `length` tokens."""
        now = time.perf_counter()
        step_time, self._time = now - self._time, now
        waited, self._waited = self._waited, 0.0
        blocked, self._blocked = self._blocked, 0.0
        tokens = rows * length
        values = {
            "step_time": step_time,
            "tokens_per_second": tokens / step_time,
            "data_wait": waited / step_time,
            "host_time": max(0.0, step_time - blocked),
        }
        if self._peak is not None:
            flops = self._program.config.flops_per_token(length) * tokens
            values["mfu"] = flops / self._peak / step_time
        return values
