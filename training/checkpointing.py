"""Checkpointing of a training run: when to save, what the record says, how a run ends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.pipeline import Dataset
from training.checkpoint import Checkpoints
from training.checkpoint_policy import SaveSchedule
from training.goodput import Goodput
from training.resume import ResumePoint, make_record
from training.spikes import TrainingError
from training.step import TrainState


class Checkpointing:
    """Saves the state on schedule, on request and after a failed save.

    Args:
        checkpoints: the checkpoints of the run directory.
        schedule: cadence of saves.
        dataset: its order and position belong to the record.
        process: description of this process for the record.
        directory: run directory.
        goodput: ledger of wall time.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        schedule: SaveSchedule,
        *,
        dataset: Dataset,
        process: Mapping[str, Any],
        directory: Path,
        goodput: Goodput,
    ):
        self._checkpoints, self._schedule, self._dataset = checkpoints, schedule, dataset
        self._process, self._directory, self._goodput = process, directory, goodput

    def wants_save(self, step: int) -> bool:
        """Return whether this process asks all processes for a save."""
        return self._schedule.wants_save(step)

    def is_due(self, step: int) -> bool:
        """Return whether all processes save after this step, without a request."""
        return self._schedule.is_due(step) or self._checkpoints.needs_retry(step)

    @property
    def ended_step(self) -> int | None:
        """Step whose save has ended in this process and is not yet reported."""
        return self._checkpoints.ended_step

    def save(
        self,
        state: TrainState,
        step: int,
        resume_point: ResumePoint,
        *,
        pending: tuple[str, ...] = (),
        eval_loss: float | None = None,
    ) -> dict[str, float]:
        """Start an asynchronous save; return the metric `save_blocked`, in seconds.

        Args:
            state: the state after `step`.
            step: number of finished steps.
            resume_point: where this process began.
            pending: the parts of the step that the next process must finish.
            eval_loss: evaluation loss of the step.

        Raises:
            TrainingError: the run directory was deleted.
        """
        if self._checkpoints.group.is_primary and not (self._directory / ".lock").exists():
            raise TrainingError(
                f"run.dir={str(self._directory)!r} was deleted during the run; nothing can be "
                "saved; start again with another run.dir"
            )
        self._schedule.saved()
        record = make_record(resume_point, self._process, self._dataset, step, pending)
        with self._goodput.spend("checkpoint"):
            record["goodput"] = self._goodput.seconds
            return {"save_blocked": self._checkpoints.save(state, step, record, eval_loss)}

    def poll(self, ended_on_all: int | None) -> None:
        """Report a save that has ended on every process, without waiting."""
        self._checkpoints.poll(ended_on_all)

    def finish(self) -> None:
        """Wait for the last save. Raises: CheckpointError if it failed."""
        self._checkpoints.group.set_phase("the last save")
        self._checkpoints.finish_last()

    def set_eval_loss(self, step: int, eval_loss: float | None) -> None:
        """Set the evaluation loss of a step that is already saved."""
        self._checkpoints.set_eval_loss(step, eval_loss)
