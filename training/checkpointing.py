"""Checkpointing of a training run: when to save, what the record says, how a run ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.pipeline import Dataset
from training.bucket_runs import checkpoint_folder
from training.checkpoint import Checkpoints
from training.checkpoint_policy import SaveSchedule
from training.checkpoint_record import CheckpointError, amend_record
from training.goodput import Goodput
from training.logs import log
from training.resume import ResumePoint, make_record
from training.spikes import TrainingError
from training.state import TrainState


@dataclass
class Checkpointing:
    """Saves the state on schedule, on request and after a failed save."""

    checkpoints: Checkpoints
    schedule: SaveSchedule
    dataset: Dataset
    """Its order and position belong to the record."""
    process: Mapping[str, Any]
    """Description of this process for the record."""
    directory: Path
    """Run directory."""
    goodput: Goodput

    def is_due(self, step: int) -> bool:
        """Return whether all processes save after this step, without a request."""
        return self.schedule.is_due(step) or self.checkpoints.needs_retry(step)

    def save(
        self,
        state: TrainState,
        step: int,
        resume_point: ResumePoint,
        *,
        pending: tuple[str, ...] = (),
        eval_loss: float | None = None,
        early_stop: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Start an asynchronous save; return the metric `save_blocked`, in seconds.

        Args:
            state: the state after `step`.
            step: number of finished steps.
            resume_point: where this process began.
            pending: the parts of the step that the next process must finish.
            eval_loss: evaluation loss of the step.
            early_stop: evaluations so far, see `EarlyStopping.record`.

        Raises:
            TrainingError: the run directory was deleted.
        """
        if self.checkpoints.group.is_primary and not (self.directory / ".lock").exists():
            raise TrainingError(
                f"run.dir={str(self.directory)!r} was deleted during the run; nothing can be "
                "saved; start again with another run.dir"
            )
        self.schedule.saved()
        record = make_record(resume_point, self.process, self.dataset, step, pending)
        if early_stop:
            record["early_stop"] = dict(early_stop)
        with self.goodput.spend("checkpoint"):
            record["goodput"] = self.goodput.seconds
            return {"save_blocked": self.checkpoints.save(state, step, record, eval_loss)}

    def add_evaluation(
        self,
        step: int,
        eval_loss: float | None,
        early_stop: Mapping[str, Any],
        pending: Sequence[str],
    ) -> None:
        """Add to a checkpoint the evaluation from which a signal kept the process that saved it.

        Then no later start repeats it. Process 0 writes. The arguments are those of `save`.
        """
        self.checkpoints.set_eval_loss(step, eval_loss)
        if not self.checkpoints.group.is_primary:
            return
        changes: dict[str, Any] = {"pending": [*pending]}
        if early_stop:
            changes["early_stop"] = dict(early_stop)
        if eval_loss is not None:
            changes["metrics"] = {"eval_loss": eval_loss}
        try:
            amend_record(checkpoint_folder(self.directory) / str(step), step, changes)
        except (OSError, CheckpointError) as error:
            log.warning(
                "checkpoint %d: its evaluation could not be added, so the next start repeats it: "
                "%s",
                step,
                error,
            )

    def finish(self) -> None:
        """Wait for the last save. Raises: CheckpointError if it failed."""
        self.checkpoints.group.set_phase("the last save")
        self.checkpoints.finish_last()
