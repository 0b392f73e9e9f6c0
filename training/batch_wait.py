"""Waiting for rows that are still being prepared, in all processes of a run."""

import time

from data.pipeline import Dataset
from data.sharded_store import LINE_SECONDS, LOOK_SECONDS, WAIT_SECONDS
from parallel.cluster.process_group import ProcessGroup
from training.logs import log
from training.runner import StepRunner

_READY, _WAIT, _GIVE_UP = "ready", "wait", "give up"


class BatchWait:
    """One wait for the batch of a step; every process calls `is_over` until it is true."""

    def __init__(self, group: ProcessGroup, dataset: Dataset, runner: StepRunner):
        self._group, self._dataset, self._runner = group, dataset, runner
        self._begin, self._last_line = time.monotonic(), -LINE_SECONDS
        self._rows = -1
        self.has_failed = False
        """Whether the wait is over without rows."""

    def is_over(self, step: int) -> bool:
        """Look once, then pause; return whether the rows are there, or will not come in time.

        Communication: process 0 broadcasts what it has found.
        """
        found = self._group.broadcast(f"rows of step {step}", lambda: self._look(step))
        self.has_failed = found == _GIVE_UP
        if found == _WAIT:
            self._say(step)
            time.sleep(LOOK_SECONDS)
        return bool(found != _WAIT)

    def _look(self, step: int) -> str:
        if self._runner.is_prepared(step):
            return _READY
        rows = sum(source.num_items for source in self._dataset.sources)
        if rows != self._rows:
            self._rows, self._begin = rows, time.monotonic()
        # Without a growing store, no look finds more.
        is_late = time.monotonic() - self._begin > WAIT_SECONDS or not self._dataset.is_growing
        return _GIVE_UP if is_late else _WAIT

    def _say(self, step: int) -> None:
        if time.monotonic() - self._last_line < LINE_SECONDS:
            return
        self._last_line = time.monotonic()
        log.info(
            "step %d waits for rows of %s, which are being prepared; if no command prepares them, "
            "start that again (the run ends after %.0f minutes without a new shard)",
            step,
            self._names(),
            WAIT_SECONDS / 60,
        )

    def failure(self, step: int) -> str:
        """Return why the run ends, and what to do."""
        return (
            f"no rows for step {step}: {self._names()} had no new shard in "
            f"{WAIT_SECONDS / 60:.0f} minutes; run the command that prepares the data again, then "
            "start this run again"
        )

    def _names(self) -> str:
        growing = (source.name for source in self._dataset.sources if source.is_growing)
        return ", ".join(f"data {name}" for name in growing) or "data"
