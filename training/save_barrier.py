"""Barrier of orbax's threads that notices a save that has failed in this process alone.

orbax writes a checkpoint in threads of every process, with barriers in between. A process that
fails, because of a full disk, goes to the barrier at the end of the save. The others wait for it at
an earlier one, so that all of them would wait until the barriers time out after 20 minutes.
"""

import dataclasses
import sys
from typing import Any

from orbax.checkpoint import multihost, v1


class FailedSaveError(Exception):
    """A save has failed in this process; the cause says why."""


class SaveBarrier:
    """The barriers of one orbax checkpointer; after a failure it needs another one."""

    def __init__(self) -> None:
        self.has_failed = False
        """Whether a save has failed in this process."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes are at this barrier.

        Raises: FailedSaveError if orbax is handling a failure. Then nobody else will come.
        """
        if (failure := sys.exc_info()[1]) is not None:
            self.has_failed = True
            raise FailedSaveError from failure
        try:
            multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
        except BaseException:
            self.has_failed = True
            raise

    def __deepcopy__(self, memo: object) -> "SaveBarrier":
        """Return this object: orbax copies its options."""
        return self

    @property
    def context(self) -> v1.Context:
        """Options with which orbax uses these barriers."""
        # Process 0 creates the directories before it returns. If it failed to do so in a thread,
        # the others would wait for a signal of it for minutes.
        options = _AsyncOptions(barrier=self, create_directories_asynchronously=False)
        return v1.Context(async_options=options)


@dataclasses.dataclass(kw_only=True)
class _AsyncOptions(v1.options.AsyncOptions):
    """orbax's options with a barrier, for which version 1 of its interface has no field yet."""

    barrier: SaveBarrier

    def v0(self) -> Any:
        return dataclasses.replace(super().v0(), barrier_sync_fn=self.barrier)
