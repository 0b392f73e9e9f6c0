"""A checkpoint that this machine cannot read is not taken for a damaged one."""

import contextlib
from types import SimpleNamespace

import pytest

from training import checkpoint_tools as tools
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import CheckpointError, DamageError

BUSY, BROKEN = CheckpointError("the disk is busy"), DamageError("checkpoint 4 is damaged")


def checkpoints(error: Exception, of: str) -> SimpleNamespace:
    """Return checkpoints 2 and 4; the record or the arrays of the latter give an error."""

    def record(step: int) -> dict:
        if (step, of) == (4, "record"):
            raise error
        return {
            "leaves": {"params.a": [[2], "float32"]},
            "metrics": {},
            "saved": "2026-11-20T08:00:00Z",
        }

    def read(step: int, *_: object) -> None:
        if (step, of) == (4, "arrays"):
            raise error

    return SimpleNamespace(steps=[2, 4], record=record, read=read, leftovers=lambda: ([], []))


@pytest.mark.parametrize("of", ["record", "arrays"])
def test_a_damaged_newest_checkpoint_is_deleted_on_request(of, tmp_path):
    found, policy = checkpoints(BROKEN, of), CheckpointConfig(keep=1)
    assert len(tools.find_damage(found, 4)) == 1
    plan = tools.plan_prune(tmp_path, found, policy, damaged=True)
    assert plan.kept == {2: "kept"}
    assert plan.deleted == [tmp_path / "checkpoints" / "4"]


@pytest.mark.parametrize("of", ["record", "arrays"])
def test_an_unreadable_checkpoint_stops_verify_and_prune(of, tmp_path):
    found, policy = checkpoints(BUSY, of), CheckpointConfig(keep=1)
    with pytest.raises(CheckpointError, match="the disk is busy"):
        tools.find_damage(found, 4)
    with pytest.raises(CheckpointError, match="the disk is busy"):
        tools.plan_prune(tmp_path, found, policy, damaged=True)


@pytest.mark.parametrize(("error", "state"), [(BROKEN, "damaged"), (BUSY, "unreadable")])
def test_a_list_tells_them_apart(error, state, tmp_path, monkeypatch):
    for step in ("2", "4"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    monkeypatch.setattr(
        tools, "open_checkpoints", lambda _: contextlib.nullcontext(checkpoints(error, "record"))
    )
    assert [entry.state for entry in tools.list_entries(tmp_path)] == ["whole", state]


def test_the_loss_of_a_later_evaluation_counts_for_the_best_checkpoint(tmp_path):
    """A signal saves step 2 before its evaluation, whose loss the next process writes."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "loss": 1.0, "eval_loss": 0.1}\n{"step": 4, "loss": 1.0, "eval_loss": 0.9}\n'
    )
    policy = CheckpointConfig(keep=1, keep_best=1)
    plan = tools.plan_prune(tmp_path, checkpoints(BUSY, "nothing"), policy, damaged=False)
    assert plan.kept == {2: "kept", 4: "kept"}
