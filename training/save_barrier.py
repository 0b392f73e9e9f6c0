"""A save that fails in one process alone: orbax's barriers notice it, and all processes compare.

orbax writes a checkpoint in threads of every process, with barriers in between. A process that
fails, because of a full disk, goes to the barrier at the end of the save. The others wait for it at
an earlier one, so that all of them would wait until the barriers time out after 20 minutes.
"""

import dataclasses
import sys
from typing import Any

from orbax.checkpoint import multihost, v1

from parallel.cluster.config import ProcessGroupError
from parallel.cluster.process_group import ProcessGroup


class FailedSaveError(Exception):
    """A save has failed in this process; the cause says why."""


class SaveBarrier:
    """The barriers of one orbax checkpointer; after a failure it needs another one."""

    def __init__(self, options: v1.Context) -> None:
        """Create the barriers. options: other options of orbax."""
        self._options = options
        self.has_failed = False
        """Whether a save has failed in this process."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes are at this barrier.

        Raises: FailedSaveError if orbax is handling a failure: no other process will come then.
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
        """Options of orbax that include these barriers."""
        # Process 0 creates the directories before it returns. If it failed to do so in a thread,
        # the others would wait for a signal of it for minutes.
        options = _AsyncOptions(barrier=self, create_directories_asynchronously=False)
        return v1.Context(self._options, async_options=options)


@dataclasses.dataclass(kw_only=True)
class _AsyncOptions(v1.options.AsyncOptions):
    """orbax's options with a barrier, for which version 1 of its interface has no field yet."""

    barrier: SaveBarrier

    def v0(self) -> Any:
        return dataclasses.replace(super().v0(), barrier_sync_fn=self.barrier)


def compare_saves(
    group: ProcessGroup, step: int, is_saving: bool, problem: str | None
) -> tuple[bool, str]:
    """Compare a save with the other processes, and return (whether it has ended, what failed).

    It has ended when it is complete in all of them, or has failed in one. Every process calls this.

    Args:
        group: The processes that save.
        step: Step of the save.
        is_saving: Whether the save is in progress in this process.
        problem: Why it has failed in this process; None: it has not.

    Raises:
        ProcessGroupError: It failed here while other processes still wait for this one.
    """
    group.start_all_gather("saved", [is_saving, problem])
    try:
        # After a failure here, the others may wait for this process in a call of orbax.
        timeout = None if problem is None else group.config.peer_timeout
        reports = group.wait_all_gather("saved", timeout)
    except TimeoutError as error:
        raise ProcessGroupError(
            f"checkpoint {step} was not saved: {problem}; the other processes still wait for it; "
            "start all processes again"
        ) from error
    problems = [
        problem if len(reports) == 1 else f"process {number} on {host}: {problem}"
        for number, (host, (_, problem)) in enumerate(zip(group.hosts, reports, strict=True))
        if problem is not None
    ]
    return bool(problems) or not any(saving for saving, _ in reports), "; ".join(problems)
