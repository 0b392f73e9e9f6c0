"""The ledger of wall time: every second of a run has one label, and `step` is the useful one.

It adds up the lives of a run's processes. The time from the death of one to the start of the next
has no label, and is in no total: no process spent it. It measures one host; no file, no thread.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

# start_up: from the start of a process to its first compile or step. checkpoint: blocked by one.
# evaluation: samples too. lost: work that is done again, and steps that changed nothing.
LABELS = ("start_up", "compile", "step", "data_wait", "checkpoint", "evaluation", "lost", "other")
_WORDS = {"start_up": "start-up", "step": "steps", "data_wait": "data wait"}


def _age() -> float:
    if sys.platform != "linux":
        return 0.0
    # The second field, a name, may hold blanks and brackets; the 22nd is the start, in ticks.
    ticks = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[22 - 3]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


_BEGAN = time.perf_counter() - _age()


def process_seconds() -> float:
    """Since this process began, imports included; elsewhere than on Linux, since this import."""
    return time.perf_counter() - _BEGAN


class Goodput:
    """Where the time of a run went, that of its earlier processes included. For one thread.

    before: `seconds` as metrics.jsonl keeps them. clock: seconds since this process began.
    """

    def __init__(
        self,
        before: Mapping[str, float] | None = None,
        *,
        clock: Callable[[], float] = process_seconds,
    ):
        self._clock, self._seconds = clock, dict.fromkeys(LABELS, 0.0) | dict(before or {})
        self._before = dict(self._seconds)
        # The label of the innermost `spend`; None outside of all, which counts as `_idle`.
        self._label: str | None = None
        self._idle, self._since = "start_up", 0.0

    @contextlib.contextmanager
    def spend(self, label: str) -> Iterator[None]:
        """What is done inside has this label, and takes its time away from the label outside.

        Outside of all: `start_up` until the first `compile` or `step` begins, then `other`.
        """
        assert label in LABELS, label
        outer = self._switch(label)
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
        """That much of `step` was in vain; no more than there is, and nothing if negative.

        Back to a checkpoint, that is `seconds["step"]` of now less that of its record.
        """
        seconds = min(max(seconds, 0.0), self.seconds["step"])
        # First what this process did, then what those before it did.
        earlier = max(0.0, seconds - (self._seconds["step"] - self._before["step"]))
        for ledger, lost in ((self._seconds, seconds), (self._before, earlier)):
            ledger["step"] -= lost
            ledger["lost"] += lost

    @property
    def seconds(self) -> dict[str, float]:
        """By label, up to now; JSON values."""
        self._switch(self._label)
        return dict(self._seconds)

    @property
    def share(self) -> float:
        """Of all seconds, those of `step`."""
        seconds = self.seconds
        return seconds["step"] / (sum(seconds.values()) or 1.0)

    def summary(self) -> str:
        """`goodput 91.2 % of 1 h 02 min: steps 56 min 34 s, compile 2 min 1 s, start-up 31 s`."""
        return f"goodput {100 * self.share:.1f} % of {_story(self.seconds)}"

    def this_process(self) -> str:
        """Of this process alone, after its first step for one: `9.4 s: start-up 5.0 s, ...`."""
        return _story({label: y - self._before[label] for label, y in self.seconds.items()})


def _story(seconds: Mapping[str, float]) -> str:
    """The total, and what it is made of: by size, without what reads as 0."""
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    parts = [f"{_WORDS.get(label, label)} {_duration(y)}" for label, y in ranked if y >= 0.05]
    return f"{_duration(sum(seconds.values()))}: {', '.join(parts)}"


def _duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
