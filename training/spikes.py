"""Handling of loss and gradient spikes on the host: warn, roll back, or end the run.

`training/guard.py` decides on the devices whether a step updates the parameters. Here its metrics
are read, one step later.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from data.batch_schedule import batch_number
from training.goodput import Goodput
from training.guard import GuardConfig
from training.logs import log
from training.resume import ResumePoint, Resumer


class TrainingError(Exception):
    """Training cannot continue; the message is one line with the reason and the remedy."""


@dataclass
class Rollback(Exception):
    """A spike at `step` asks for the parameters of an older checkpoint."""

    step: int


class SpikeHandler:
    """Reacts to steps that the guard reports, by the policy `training.guard`."""

    def __init__(self, guard: GuardConfig, resumer: Resumer, goodput: Goodput):
        self._guard, self._resumer, self._goodput = guard, resumer, goodput
        self._checkpoints = resumer.checkpoints
        self._num_rollbacks = Counter[int]()

    def handle_spike(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn about a step with a spike or a non-finite loss; do nothing for other steps.

        Raises:
            Rollback: the policy is rollback, and there is a checkpoint.
            TrainingError: `guard.max_bad_steps` steps in a row were skipped.
        """
        guard, z = self._guard, max(metrics["loss_z"], metrics["grad_z"])
        is_finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
        is_spike = z > guard.max_z and guard.on_spike != "off"
        if is_finite and not is_spike:
            return
        is_applied = is_finite and guard.on_spike == "warn"
        if not is_applied:
            seconds = metrics["step_time"]  # with waits, which are counted as such
            waited = metrics.get("data_wait", 0.0) * seconds + metrics.get("save_blocked", 0.0)
            self._goodput.lose(seconds - waited)
        log.warning(
            "step %d: loss %.4g, grad norm %.4g: %s; %s",
            step,
            metrics["loss"],
            metrics["grad_norm"],
            f"{metrics['loss_z']:.1f} and {metrics['grad_z']:.1f} standard deviations above their "
            "means"
            if is_finite
            else "not finite",
            "the update was applied (training.guard.on_spike=warn)"
            if is_applied
            else "the update was skipped",
        )
        is_last = metrics["bad_steps"] >= guard.max_bad_steps
        if not is_last and not (guard.on_spike == "rollback" and is_finite):
            return
        self._checkpoints.finish()  # a save in progress may still fail
        newest = self._checkpoints.latest_step
        if is_last:
            raise TrainingError(
                f"{guard.max_bad_steps} updates in a row were skipped, up to step {step} with loss "
                f"{metrics['loss']:.4g}; the newest complete checkpoint is "
                f"{'none' if newest is None else newest}; lower optimizer.learning_rate, or check "
                "the data of these steps"
            )
        if newest:  # not checkpoint 0, which holds only parameters
            raise Rollback(step)

    def roll_back(self, step: int, resume_point: ResumePoint) -> ResumePoint:
        """Return the newest checkpoint, with the batches from there to the spike left out.

        Raises:
            TrainingError: too many rollbacks to the same checkpoint.
            CheckpointError: no checkpoint can be restored.
        """
        self._checkpoints.finish()
        last_batch, skipped = resume_point.batch(step - 1), resume_point.skipped
        found = self._resumer.find_again()
        self._num_rollbacks[found.step] += 1
        limit = self._guard.max_bad_steps
        if self._num_rollbacks[found.step] > limit:
            raise TrainingError(
                f"the loss spiked {self._num_rollbacks[found.step]} times after checkpoint "
                f"{found.step}, the newest complete one, whatever batches were left out; lower "
                "optimizer.learning_rate, or resume from an older checkpoint"
            )
        # The checkpoint may be older than earlier rollbacks: keep what they left out.
        first_batch = batch_number(found.step, skipped)
        log.warning(
            "back to step %d; batches %d to %d are left out", found.step, first_batch, last_batch
        )
        # `found` lists the process that saved the checkpoint, which may be this one.
        lineage = min(found.lineage, resume_point.lineage, key=len)
        return replace(found, skipped=skipped, lineage=lineage).without(first_batch, last_batch)
