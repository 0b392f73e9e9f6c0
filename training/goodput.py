"""Goodput: every second of wall time has one label, and `step` is the useful one.

The ledger covers all processes that have trained the run, one after another. The time between the
end of one and the start of the next is not counted. Process 0 measures its main thread.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safe_files import replace_file
from training.logs import log
from units import format_duration

_FILE = "goodput.json"
# start_up: from the start of a process to its first compile or step. checkpoint: training blocked
# by a save. evaluation: samples included. lost: steps that are trained again or were skipped.
LABELS = ("start_up", "compile", "step", "data_wait", "checkpoint", "evaluation", "lost", "other")
_WORDS = {"start_up": "start-up", "step": "steps", "data_wait": "data wait"}


def _process_age() -> float:
    if sys.platform != "linux":
        return 0.0
    # The second field, a name, may contain blanks and brackets; the 22nd is the start in ticks.
    ticks = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[22 - 3]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


_BEGAN = time.perf_counter() - _process_age()


def process_seconds() -> float:
    """Return the age of this process; outside Linux, the time since this import."""
    return time.perf_counter() - _BEGAN


class Goodput:
    """Ledger of a run's wall time, earlier processes included; not thread-safe.

    Args:
        before: `seconds` of the earlier processes, from `saved_in`, metrics.jsonl or a checkpoint.
        clock: returns the age of this process in seconds.
        show_phase: called with the phase or label whenever `spend` begins.
    """

    def __init__(
        self,
        before: Mapping[str, float] | None = None,
        *,
        clock: Callable[[], float] = process_seconds,
        show_phase: Callable[[str], None] | None = None,
    ):
        self._show_phase = show_phase
        self._clock, self._seconds = clock, dict.fromkeys(LABELS, 0.0) | dict(before or {})
        self._before = dict(self._seconds)
        # The label of the innermost `spend`; None outside, where time counts as `_idle`.
        self._label: str | None = None
        self._idle, self._since = "start_up", 0.0

    @contextlib.contextmanager
    def spend(self, label: str, *, phase: str | None = None) -> Iterator[None]:
        """Count the time of the context under a label, and not under an enclosing one.

        phase: what to show, if not the label.
        Time outside any context is `start_up` until the first `compile` or `step`, then `other`.
        """
        assert label in LABELS, label
        outer = self._switch(label)
        if self._show_phase is not None:
            self._show_phase(phase or label)
        if label in ("compile", "step"):
            self._idle = "other"
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, label: str | None) -> str | None:
        now = self._clock()
        self._seconds[self._label or self._idle] += now - self._since
        outer, self._label, self._since = self._label, label, now
        return outer

    def lose(self, seconds: float) -> None:
        """Move seconds from `step` to `lost`; at most all of them, and nothing if negative.

        After a restore these are `seconds["step"]` minus the value in the checkpoint's record.
        """
        seconds = min(max(seconds, 0.0), self.seconds["step"])
        # First the seconds of this process, then those of earlier ones.
        earlier = max(0.0, seconds - (self._seconds["step"] - self._before["step"]))
        for ledger, lost in ((self._seconds, seconds), (self._before, earlier)):
            ledger["step"] -= lost
            ledger["lost"] += lost

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by label up to now; JSON values."""
        self._switch(self._label)
        return dict(self._seconds)

    def save(self, directory: Path) -> None:
        """Write the seconds to `goodput.json` of a run directory, for the next process."""
        try:
            replace_file(directory / _FILE, json.dumps(self.seconds) + "\n")
        except OSError as error:
            log.warning("%s was not written: %s", directory / _FILE, error.strerror)

    @staticmethod
    def saved_in(directory: Path) -> dict[str, float]:
        """Return the seconds that the last process saved; empty without a readable file."""
        path = directory / _FILE
        try:
            return {label: float(value) for label, value in json.loads(path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s is not read: %s", path, error)
            return {}

    @property
    def share(self) -> float:
        """Fraction of all seconds that are labelled `step`."""
        seconds = self.seconds
        return seconds["step"] / (sum(seconds.values()) or 1.0)

    def summary(self) -> str:
        """Return `goodput 91.2 % of 1 h 02 min: steps 56 min 34 s, compile 2 min 1 s, ...`."""
        total, _, parts = _breakdown(self.seconds).partition(": ")
        earlier = " with earlier processes" if any(self._before.values()) else ""
        return f"goodput {100 * self.share:.1f} % of {total}{earlier}: {parts}"

    def this_process(self) -> str:
        """Return the breakdown of this process alone: `9.4 s: start-up 5.0 s, ...`."""
        return _breakdown({label: y - self._before[label] for label, y in self.seconds.items()})


def _breakdown(seconds: Mapping[str, float]) -> str:
    """Return the total and its parts, the largest first, without those that round to 0."""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    parts = [f"{_WORDS.get(label, label)} {format_duration(y)}" for label, y in ranked if y >= 0.05]
    return f"{format_duration(sum(seconds.values()))}: {', '.join(parts)}"
