"""The checkpoint from which a run resumes, and what damage and deletion do to it."""

from types import SimpleNamespace

import pytest

from data.pipeline import Pins
from parallel.cluster.process_group import ProcessGroup
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import CheckpointError, DamageError
from training.resume import ResumePoint, Resumer


def test_batches_that_a_rollback_left_out_stay_left_out_if_its_checkpoint_is_damaged(tmp_path):
    class Older(Resumer):
        def find_again(self) -> ResumePoint:
            return ResumePoint(step=2)

    def restore(step: int, _: object) -> str:
        if step == 4:
            raise DamageError("checkpoint 4 is damaged")
        return f"state of {step}"

    checkpoints = SimpleNamespace(
        restore=restore,
        set_aside=lambda step: tmp_path / f"{step}.damaged",
        latest_step=2,
        group=SimpleNamespace(num_processes=1),
    )
    point, state = Older(checkpoints, None, None, 9, "").restore(ResumePoint(4, skipped=((4, 6),)))
    assert (point.step, point.skipped, state) == (2, ((4, 6),), "state of 2")


class Listed:
    """Checkpoints whose list of steps is that of the last `reload`, as orbax keeps it."""

    config, group = CheckpointConfig(), ProcessGroup()

    def __init__(self, *steps: int):
        self.kept, self.listed = list(steps), list(steps)

    @property
    def latest_step(self) -> int | None:
        return self.listed[-1] if self.listed else None

    def record(self, step: int) -> dict:
        raise DamageError(f"checkpoint {step} has no record")

    def set_aside(self, step: int) -> None:
        raise FileNotFoundError(step)

    def reload(self) -> None:
        self.listed = list(self.kept)

    def leftovers(self) -> tuple[list, list]:
        return [], []


def test_a_checkpoint_that_somebody_deletes_is_passed_over():
    checkpoints = Listed(4)
    checkpoints.kept.clear()
    dataset = SimpleNamespace(pins=Pins())
    resumer = Resumer(checkpoints, dataset, None, 9, "")
    assert resumer.find() == ResumePoint()
    with pytest.raises(CheckpointError, match="no checkpoint of a training step is left; start"):
        resumer.find_again()  # in a rollback


def test_a_checkpoint_of_parameters_alone_is_not_restored_as_a_state():
    """It would lack the state of the optimizer, and count as damaged."""
    with pytest.raises(CheckpointError, match="no checkpoint of a training step is left; start"):
        Resumer(Listed(0), None, None, 9, "").restore(ResumePoint(0))
