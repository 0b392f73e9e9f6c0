"""The agreement of all processes after a training step: stop, save, and how the hosts compare."""

import signal
from dataclasses import dataclass, field

from parallel.cluster.process_group import ProcessGroup
from parallel.cluster.signals import StopRequest
from training.stragglers import StragglerMonitor


@dataclass(frozen=True)
class StepAgreement:
    """The result of `StepCoordinator.agree_on_step`, equal on all processes."""

    stop: signal.Signals | None = None
    """The signal for which every process saves and stops after this step."""
    save: bool = False
    """Whether a process wants a checkpoint, such as after SIGUSR1."""
    finished_save: int | None = None
    """The step of the checkpoint that has ended on every process, or has failed on one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`hosts/...`, compared over all processes; empty after most steps."""


class StepCoordinator:
    """Exchanges small reports among the processes every `every` steps, without waiting for them.

    A report that is sent after one step is read after the next, when those of the others have
    arrived. Only the stop signal does not wait for a report: jax's preemption service agrees on it.
    """

    def __init__(
        self, group: ProcessGroup, stop: StopRequest, stragglers: StragglerMonitor, *, every: int
    ):
        self._group, self._stop, self._stragglers = group, stop, stragglers
        self._every = every
        self._save_requested = self._is_report_pending = self._has_saved = False
        self._num_reports = 0

    def begin_step(self) -> None:
        """Let a signal that comes from now on wait for the end of the step, and save."""
        self._stop.has_nothing_to_save = False

    def agree_on_step(
        self,
        step: int,
        *,
        finished_save: int | None = None,
        save_failed: bool = False,
        wants_save: bool = False,
    ) -> StepAgreement:
        """Return what all processes do after this step. Every process calls it after every step.

        Args:
            step: The number of the step that was just dispatched.
            finished_save: The step of the checkpoint that has finished or failed in this process.
            save_failed: Whether it has failed.
            wants_save: Whether this process asks all processes for a checkpoint.
        """
        stop = self._stop.agree()
        self._save_requested |= self._stop.take_checkpoint_request()
        if self._group.num_processes == 1:
            save, self._save_requested = self._save_requested or wants_save, False
            return StepAgreement(stop, save, finished_save)
        agreement = self._read_reports(step, stop)
        if step % self._every == 0:
            self._send_report((finished_save, save_failed), wants_save)
        return agreement

    def saved(self) -> None:
        """Record that a save has begun, so that a pending `wants_save` begins no second one."""
        self._has_saved = True

    @property
    def late_stop(self) -> signal.Signals | None:
        """The signal that came after `agree_on_step`, if this process can stop alone."""
        return self._stop.signal

    def _send_report(self, ended_save: tuple[int | None, bool], wants_save: bool) -> None:
        times = self._stragglers.take_report()
        if times is None:  # no step yet in this process
            return
        self._num_reports += 1
        # wants_save is not kept for the next report: by then the save may have begun.
        report = [times, self._save_requested, wants_save, *ended_save]
        self._group.start_all_gather(f"report {self._num_reports}", report)
        self._save_requested, self._is_report_pending, self._has_saved = False, True, False

    def _read_reports(self, step: int, stop: signal.Signals | None) -> StepAgreement:
        if not self._is_report_pending:
            return StepAgreement(stop)
        self._is_report_pending = False
        reports = self._group.wait_all_gather(f"report {self._num_reports}")
        times, save_requests, wishes, finished, failed = zip(*reports, strict=True)
        # Where a save has failed in one process, the others wait for it in vain.
        ended = [save for save, has_failed in zip(finished, failed, strict=True) if has_failed]
        return StepAgreement(
            stop,
            any(save_requests) or (any(wishes) and not self._has_saved),
            ended[0] if ended else finished[0] if len(set(finished)) == 1 else None,
            self._stragglers.compare(step, list(times)),
        )
