"""The metrics writer `jsonl`: one JSON object per step in `metrics.jsonl`, and how it is read."""

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_files import replace_file
from training.logs import log
from training.spikes import TrainingError
from training.writers.registry import MetricsWriter, WriterContext, register


@register("jsonl")
class JsonLinesWriter(MetricsWriter):
    """Appends to `metrics.jsonl`; floats read back bit-equal (shortest decimal of the double)."""

    def __init__(self, context: WriterContext):
        self._path = context.directory / "metrics.jsonl"
        self._unwritten = b""

    def begin(self, resumed_step: int) -> None:
        """Keep the lines up to the resumed step; warn about missing ones.

        Raises: TrainingError if the file cannot be replaced and does not begin with these lines.
        """
        kept, steps, last = [], set[int](), 0
        for line, entry in read_lines(self._path):
            last = entry["step"]
            if 0 < last <= resumed_step:
                kept.append(line)
                steps.add(last)
        if missing := resumed_step - len(steps):
            log.warning(
                "%s: %d of the %d steps before the resume are missing; training continues without "
                "their metrics",
                self._path,
                missing,
                resumed_step,
            )
        if last and not resumed_step:
            log.warning(
                "%s has steps 1 to %d, but no checkpoint is left; training starts at step 1",
                self._path,
                last,
            )
        text = "".join(kept).encode()
        try:
            replace_file(self._path, text)
        except OSError as error:
            # On a full disk the end of the file can still be cut off.
            if not (self._path.exists() and self._path.read_bytes().startswith(text)):
                raise TrainingError(
                    f"{self._path} cannot be written: {error.strerror or error}; free space on its "
                    "disk, or make the folder writable"
                ) from error
            os.truncate(self._path, len(text))
        self._unwritten = b""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        self._append(json.dumps({"step": step, **values}) + "\n")

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the last line by one with more values."""
        lines = self._path.read_text().splitlines(True)
        last = json.loads(lines[-1]) if lines else {}
        if last.get("step") == step:
            lines.pop()
        else:  # the line was lost: a full disk, or a deleted file
            last = {"step": step}
        replace_file(self._path, "".join([*lines, json.dumps({**last, **values}) + "\n"]))

    def close(self) -> None:
        """Try once more to write lines that a full disk refused."""
        self._append("")

    def _append(self, text: str) -> None:
        """Append as much as fits on the disk; keep the rest for the next call."""
        has_warned, self._unwritten = bool(self._unwritten), self._unwritten + text.encode()
        try:
            with open(self._path, "ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            if not has_warned:
                log.warning(
                    "cannot write %s: %s; its lines are kept in memory", self._path, error.strerror
                )


def last_goodput(path: Path) -> dict[str, float]:
    """Return the seconds by label of the last line of a `metrics.jsonl` that has them."""
    _, last = next(iter(deque(read_lines(path, '"goodput/'), maxlen=1)), ("", {}))
    return {k.removeprefix("goodput/"): y for k, y in last.items() if k.startswith("goodput/")}


def read_values(path: Path, name: str) -> dict[int, float]:
    """Return the values of one metric of a `metrics.jsonl`, by step."""
    return {entry["step"]: entry[name] for _, entry in read_lines(path, json.dumps(name))}


def metrics_by_step(path: Path, names: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return some metrics of a `metrics.jsonl` by step, bit-equal to those of the run."""
    return {
        entry["step"]: {name: entry[name] for name in names if name in entry}
        for _, entry in read_lines(path)
    }


def read_lines(path: Path, substring: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the complete lines that contain `substring`, with their values.

    Lines that a crash left incomplete are skipped.
    """
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if substring not in line or not line.endswith("\n"):
                continue
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and type(entry.get("step")) is int:
                    yield line, entry
