"""A run goes on with another padding of its vocabulary, on meshes whose tp needs it."""

import jax
import numpy as np
import pytest
from runs import losses, refusal, run, write_config
from test_initial_parameters import stored

from configs.runs import load_run
from model.config import ModelConfig
from training.stored_arrays import by_name
from training.vocabulary_rows import VocabularyRows

pytestmark = pytest.mark.usefixtures("signals")
QUIET = ("training.sample_tokens=0", "training.eval_every=9", "checkpoint.keep=9")
QUIET += ("model.vocab_size=263",)
ONE = ("mesh.dp=2", "mesh.tp=1", "model.pad_vocab_to_multiple_of=1")
FOUR = ("mesh.dp=1", "mesh.tp=4", "mesh.fsdp=2", "model.pad_vocab_to_multiple_of=4")
TWO = ("mesh.dp=1", "mesh.tp=2", "mesh.sp=2", "model.pad_vocab_to_multiple_of=2")
NUM_ROWS = {"params": 2, "opt_state": 4}  # arrays with a dim of the vocabulary


def rows_of(arrays: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Return the arrays that have a dim of this size, with that dim first."""
    found = {name: x for name, x in arrays.items() if size in x.shape}
    return {name: np.moveaxis(x, x.shape.index(size), 0) for name, x in found.items()}


def test_a_run_moves_between_meshes_that_need_other_rows(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, *QUIET, *ONE, f"run.dir={tmp_path}/whole", "training.steps=6") == 0
    assert run(config, *QUIET, *ONE, "training.steps=2") == 0
    error = refusal(capsys, config, *QUIET, *FOUR[:-1], "model.pad_vocab_to_multiple_of=1")
    assert "model.vocab_size=263" in error and "model.pad_vocab_to_multiple_of=4" in error
    for mesh, steps in ((FOUR, 3), (ONE, 6)):
        assert run(config, *QUIET, *mesh, f"training.steps={steps}") == 0
    wanted, found = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert found == pytest.approx(wanted, rel=2e-5) and wanted.keys() == set(range(1, 7))
    for part, count in NUM_ROWS.items():
        before, padded = (stored(tmp_path / "run", step, part) for step in (2, 3))
        assert len(rows_of(before, 263)) == count == len(rows_of(padded, 264)), part
        assert all(not x[263:].any() for x in rows_of(padded, 264).values())
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "model.pad_vocab_to_multiple_of 1 -> 4" in log and "the model computes" not in log


def test_the_arrays_are_those_of_the_checkpoint_on_another_mesh(tmp_path):
    config = write_config(tmp_path)
    assert run(config, *QUIET, *ONE, "training.steps=2", "optimizer.ema_decay=0.5") == 0
    for ema in (False, True):
        opened = load_run(tmp_path / "run", FOUR)
        with jax.set_mesh(opened.program.tp.manager.mesh):
            _, params = opened.load_params(ema=ema)
        arrays = {n: np.asarray(x) for n, x in by_name(params).items()}
        wanted = stored(tmp_path / "run", 2, "ema" if ema else "params")
        cut = {n: x[tuple(map(slice, wanted[n].shape))] for n, x in arrays.items()}
        assert all(np.array_equal(wanted[name], x) for name, x in cut.items())
        assert sum(x.shape != wanted[n].shape for n, x in arrays.items()) == NUM_ROWS["params"]


def test_a_run_starts_from_the_parameters_of_one_with_other_rows(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, *QUIET, *FOUR, "training.steps=2") == 0
    source = f"training.init_from={tmp_path}/run"
    for name, mesh in (("same", FOUR), ("other", TWO), ("none", ONE)):
        assert run(config, *QUIET, *mesh, source, f"run.dir={tmp_path}/{name}") == 0
    wanted = losses(tmp_path / "same")
    assert losses(tmp_path / "other") == pytest.approx(wanted, rel=2e-5)
    assert losses(tmp_path / "none") == pytest.approx(wanted, rel=2e-5)
    other = (*QUIET, *FOUR, source, f"run.dir={tmp_path}/x", "model.vocab_size=271")
    assert refusal(capsys, config, *other).endswith("; set model.vocab_size=263\n")


def test_other_vocabularies_and_other_dims_do_not_fit():
    model = ModelConfig(vocab_size=263, pad_vocab_to_multiple_of=8)
    record = {"config": "model: {vocab_size: 263, pad_vocab_to_multiple_of: 3}"}
    assert VocabularyRows.between(record, model) is None  # 264 rows both times
    other = ModelConfig(vocab_size=263, pad_vocab_to_multiple_of=16)
    rows = VocabularyRows.between(record, other)
    assert rows == VocabularyRows(264, 272)
    assert rows.stored_shape((264, 5), (272, 5)) == (264, 5)
    assert rows.stored_shape((5, 264), (5, 272)) == (5, 264)
    for saved, wanted in (((264, 5), (272, 6)), ((264, 264), (272, 272)), ((264,), (272, 5))):
        assert rows.stored_shape(saved, wanted) == wanted
    assert VocabularyRows.between(record, None) is None
    assert VocabularyRows.between({}, other) is None
    assert VocabularyRows.between({"config": "model: {vocab_size: 264}"}, other) is None
