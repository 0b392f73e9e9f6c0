"""Checkpoints: save on one mesh and restore on another, refusals, failures."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache, partial

import jax
import numpy as np
import pytest
from conftest import MESHES, ROOT
from orbax.checkpoint import v1

from configs.build import build_program
from configs.schema import load_config
from parallel.cluster.config import ClusterConfig, ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from parallel.sharding.mesh import MeshConfig
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import CheckpointError, DamageError
from training.logs import logging_to
from training.save_barrier import FailedSaveError, SaveBarrier
from training.state import TrainState
from training.step import Program

GRID = MeshConfig(dp=2, tp=2)
TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.intermediate_size=64",
    "data.sequence_length=16",
]


@cache
def program_on(mesh: MeshConfig, *overrides: str) -> Program:
    sizes = [f"mesh.{name}={size}" for name, size in mesh.model_dump().items()]
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *sizes, *overrides])
    return build_program(config, jax.devices()[: mesh.num_devices])


def abstract_on(mesh: MeshConfig, *overrides: str) -> TrainState:
    with jax.set_mesh(program_on(mesh, *overrides).tp.mesh):
        return program_on(mesh, *overrides).abstract_state


def numbered_state(mesh: MeshConfig, offset: int = 0) -> TrainState:
    """Return a state of distinct numbers, in the optimizer's moments too."""
    count = [offset]

    def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
        size = int(np.prod(x.shape, dtype=int))
        values = np.arange(count[0], count[0] + size).reshape(x.shape).astype(x.dtype)
        count[0] += size
        return jax.device_put(values, x.sharding)

    return jax.tree.map(fill, abstract_on(mesh))


@pytest.fixture
def open_at(tmp_path):
    """Open the checkpoints of one directory; close all at the end."""
    opened = []

    def open_at(**values) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / "checkpoints", CheckpointConfig(**values)))
        return opened[-1]

    yield open_at
    for checkpoints in opened:
        checkpoints.close()


def save(checkpoints: Checkpoints, step: int, metadata: dict | None = None) -> TrainState:
    state = numbered_state(GRID, offset=step)
    checkpoints.save(state, step, metadata or {})
    checkpoints.finish()
    assert checkpoints.latest_step == step
    return state


@pytest.mark.parametrize("name", [*MESHES, "one device"])
@pytest.mark.costly
def test_a_checkpoint_is_restored_bit_equal_on_every_mesh(name, open_at):
    saved = save(open_at(), 3)
    wanted = abstract_on(MESHES.get(name, MeshConfig()))
    restored = open_at().restore(3, wanted)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for got, was, want in zip(*map(jax.tree.leaves, (restored, saved, wanted)), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(was).tobytes()
        assert (got.sharding, got.shape, got.dtype) == (want.sharding, want.shape, want.dtype)


def test_an_empty_directory_has_no_latest_step(open_at):
    assert open_at().latest_step is None


def test_only_the_newest_checkpoints_are_kept(open_at, tmp_path):
    checkpoints = open_at(keep=2)
    for step in (2, 4, 6, 8):
        save(checkpoints, step)
        assert checkpoints.latest_step == step
    checkpoints.close()
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [6, 8]
    reopened = open_at(keep=2)
    assert reopened.latest_step == 8
    for step in kept:
        got = reopened.restore(step, abstract_on(GRID)).params["norm"]["scale"]
        np.testing.assert_array_equal(got, numbered_state(GRID, step).params["norm"]["scale"])


def test_the_record_is_read_back_unchanged(open_at):
    given = {"order_hash": "ab" * 32, "nested": {"list": [1, 2.5, None, True, "ü"]}}
    save(open_at(), 7, given)
    record = open_at().record(7)
    assert {name: record[name] for name in given} == given == json.loads(json.dumps(given))
    assert record["leaves"].keys() == record["fingerprints"].keys()


def test_a_checkpoint_copied_under_another_step_number_is_refused(open_at, tmp_path):
    save(open_at(), 3)
    shutil.copytree(tmp_path / "checkpoints" / "3", tmp_path / "checkpoints" / "5")
    checkpoints = open_at()
    assert checkpoints.latest_step == 5
    for read in (checkpoints.record, lambda step: checkpoints.restore(step, abstract_on(GRID))):
        with pytest.raises(DamageError, match="checkpoint 5 is damaged: checksum mismatch"):
            read(5)


def test_intact_arrays_of_another_step_do_not_fit_the_record(open_at, tmp_path):
    """The file format has no objection: only the fingerprints tell them apart."""
    for step in (3, 4):
        save(open_at(), step)
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder / "3" / "state")
    shutil.copytree(folder / "4" / "state", folder / "3" / "state")
    with pytest.raises(DamageError, match=r"checkpoint 3 is damaged: .*: fingerprint mismatch"):
        open_at().restore(3, abstract_on(GRID))


def test_a_saved_step_is_not_saved_again(open_at):
    checkpoints = open_at()
    save(checkpoints, 5, {"time": "first"})
    checkpoints.save(numbered_state(GRID), 5, {"time": "second"})
    checkpoints.finish()
    assert checkpoints.record(5)["time"] == "first"


def test_buffers_may_be_donated_after_save_returns(open_at):
    """The next step donates them while the save is still writing."""
    checkpoints, state = open_at(), numbered_state(GRID, offset=11)
    wanted = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(state)]
    checkpoints.save(state, 1, {})
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    checkpoints.finish()
    restored = jax.tree.leaves(checkpoints.restore(1, abstract_on(GRID)))
    for got, want in zip(restored, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_after_failed_saves_the_waits_double_up_to_the_cadence(open_at, monkeypatch):
    checkpoints, step, waits = open_at(every=4), 10, []

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    for _ in range(5):
        monkeypatch.setattr(checkpoints._saver, "save_checkpointables_async", fail)
        checkpoints.save(numbered_state(GRID), step, {})
        due = next(n for n in range(1, 99) if checkpoints.needs_retry(step + n))
        waits.append(due)
        step += due
    assert waits == [1, 2, 4, 4, 4]
    save(checkpoints, step)
    assert not checkpoints.needs_retry(step + 99)


def test_a_bucket_that_stays_out_of_reach_after_a_failed_save_does_not_end_the_run(
    open_at, monkeypatch, tmp_path
):
    checkpoints = open_at()
    save(checkpoints, 1)

    start = checkpoints._saver.save_checkpointables_async

    def lose(step, *given, **values):
        start(step, *given, **values).result()  # orbax lists it
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
        raise OSError(28, "No space left on device")

    def fail(*_, **__):
        raise CheckpointError("the checkpoints cannot be listed: out of reach")

    with monkeypatch.context() as patch, logging_to(tmp_path / "log.txt", None):
        patch.setattr(checkpoints._saver, "save_checkpointables_async", lose)
        patch.setattr(checkpoints, "_open", fail)
        for step in (2, 3):
            checkpoints.save(numbered_state(GRID), step, {})
            assert checkpoints.steps == [1] and checkpoints.needs_retry(step + 2)
        with pytest.raises(CheckpointError, match="the newest checkpoint is that of step 1;"):
            checkpoints.finish_last()
        checkpoints.close()  # once more: the run ends like this
    logged = (tmp_path / "log.txt").read_text()
    assert logged.count("out of reach; trying again at the next save") == 1
    save(checkpoints, 5)
    assert checkpoints.steps == [1, 5] and not checkpoints.needs_retry(99)


def test_every_save_is_logged_once(open_at, tmp_path):
    checkpoints = open_at()
    with logging_to(tmp_path / "log.txt", None):
        checkpoints.poll(checkpoints.ended_step)
        for step in (4, 5):
            checkpoints.save(numbered_state(GRID), step, {})
        for _ in range(2):
            checkpoints.poll(checkpoints.ended_step)
            checkpoints.finish()
    logged = [line.split(" ", 2)[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert logged == ["saved step 4", "saved step 5"]


# Override of the model -> part of the message about the first parameter that differs.
DIFFERENCES = {
    "model.hidden_size=64": "embed.table, but this configuration has float32 (264, 64)",
    "model.vocab_size=272": "embed.table, but this configuration has float32 (272, 32)",
    "model.tie_word_embeddings=true": "for head.kernel, but this configuration has nothing",
    "model.param_dtype=bfloat16": "but this configuration has bfloat16 (264, 32)",
    "model.num_hidden_layers=2": "has float32 (1, 32, 32) for layers.attention.o.kernel",
    "model.intermediate_size=96": "has float32 (1, 64, 32) for layers.mlp.down.kernel",
}


@pytest.mark.parametrize("override", DIFFERENCES)
def test_another_model_is_refused_with_the_first_differing_parameter(override, open_at):
    checkpoints = open_at()
    save(checkpoints, 2)
    with pytest.raises(ValueError) as error:
        checkpoints.check(2, abstract_on(GRID, override))
    assert DIFFERENCES[override] in str(error.value)
    assert str(error.value).startswith("checkpoint 2 has ")
    assert str(error.value).endswith("give another run.dir") and "\n" not in str(error.value)


def test_a_missing_parameter_is_named(open_at):
    checkpoints, tied = open_at(), program_on(GRID, "model.tie_word_embeddings=true")
    with jax.set_mesh(tied.tp.mesh):
        checkpoints.save(tied.init(), 2, {})
    checkpoints.finish()
    with pytest.raises(
        ValueError, match=r"has nothing for head\.kernel, but this configuration has "
    ):
        checkpoints.check(2, abstract_on(GRID))


def test_a_checkpoint_with_adapters_needs_them(open_at):
    checkpoints, adapted = open_at(), program_on(GRID, "lora.rank=2", "lora.targets=[qkv,o]")
    with jax.set_mesh(adapted.tp.mesh):
        checkpoints.save(adapted.init(), 2, {})
    checkpoints.finish()
    with pytest.raises(ValueError, match=r"has adapters, but lora\.rank is 0; restore the"):
        checkpoints.check(2, abstract_on(GRID))
    with pytest.raises(ValueError, match=r"has nothing for layers\.mlp\.down\.lora_a, but this"):
        checkpoints.check(2, abstract_on(GRID, "lora.rank=2", "lora.targets=[qkv,o,mlp]"))


def test_adapters_need_a_checkpoint_with_adapters_also_if_the_base_is_rounded(open_at):
    checkpoints = open_at()
    save(checkpoints, 2)
    with pytest.raises(ValueError, match=r"has no adapters, but lora\.rank is set; to go on"):
        checkpoints.check(2, abstract_on(GRID, "lora.rank=2", "lora.base_dtype=bfloat16"))


def test_the_same_model_on_another_mesh_passes_the_check(open_at):
    checkpoints = open_at()
    save(checkpoints, 2)
    checkpoints.check(2, abstract_on(MESHES["fsdp8"]))


def test_an_unreadable_checkpoint_raises_with_the_reason(open_at, tmp_path):
    save(open_at(), 2)
    stored = (tmp_path / "checkpoints" / "2" / "state").rglob("*")
    largest = max((path for path in stored if path.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    # In a child process: a failed read of orbax leaves tasks of a closed event loop behind, which
    # would warn in a later test.
    child = [sys.executable, "-c", RESTORE, str(tmp_path / "checkpoints")]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "training")))
    done = subprocess.run(
        child, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120
    )
    assert re.fullmatch(r"checkpoint 2 cannot be read: .+\n", done.stdout), done.stderr[-2000:]


RESTORE = """
import os, sys
import conftest, test_checkpoint as tests
from training.checkpoint_record import CheckpointError
try:
    checkpoints = tests.Checkpoints(sys.argv[1], tests.CheckpointConfig())
    checkpoints.restore(2, tests.abstract_on(tests.GRID))
except CheckpointError as error:
    print(error, flush=True)
os._exit(0)
"""


class Alone(ProcessGroup):
    """Process 0 of two; the other one never answers."""

    def __init__(self) -> None:
        super().__init__(2, 0, ClusterConfig(peer_timeout=1))


def test_a_save_that_fails_while_the_others_do_not_answer_ends_all_with_the_reason(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path, CheckpointConfig(), group=Alone())) as saver:
        saver._pending = 7, partial(os.mkdir, tmp_path)
        with pytest.raises(
            ProcessGroupError, match=r"^checkpoint 7 was not saved: FileExistsError: .*other proc"
        ):
            saver.finish()
        saver._pending = None


class Pair(ProcessGroup):
    """Process 0 of two; the other one reports `other` about every save."""

    def __init__(self) -> None:
        super().__init__(2, 0)
        self.hosts = ["host-0", "host-1"]
        self.own: list = []
        self.other: list = []

    def start_all_gather(self, tag, value):
        self.own = value

    def wait_all_gather(self, tag, timeout=None):
        return [self.own, self.other]


def test_a_save_that_fails_in_another_process_is_given_up_and_retried(tmp_path):
    group, log = Pair(), tmp_path / "log.txt"
    with logging_to(log, None):
        checkpoints = Checkpoints(tmp_path / "0", CheckpointConfig(every=50), group=group)
        group.other = [True, None]
        for step in (1, 2):
            checkpoints.save(numbered_state(GRID), step, {})
            while checkpoints.ended_step is None:
                time.sleep(0.01)
            checkpoints.poll(step)
            assert checkpoints.ended_step == step, "the other process still saves"
            assert not checkpoints.needs_retry(step + 1)
            if step == 1:
                group.other = [False, "OSError: No space left on device"]
                checkpoints.poll(1)
                assert checkpoints.needs_retry(2) and checkpoints.ended_step is None
                group.other = [True, None]
        assert (
            "checkpoint 1 was not saved: process 1 on host-1: OSError: No space left on device; "
            "training continues, next try after step 2" in log.read_text()
        )
        group.other = [False, None]
        checkpoints.close()
        assert "saved step 2" in log.read_text()


def test_a_barrier_after_a_failure_waits_for_nobody():
    barrier = SaveBarrier(v1.Context())
    barrier(key="begin", timeout_ms=1000)
    assert not barrier.has_failed
    with pytest.raises(FailedSaveError) as failed:
        try:
            raise OSError("full")
        finally:
            barrier(key="end", timeout_ms=1000)
    assert barrier.has_failed and str(failed.value.__cause__) == "full"
