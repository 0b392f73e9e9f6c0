"""Stored arrays come back in chunks, each place once, and damage is an error."""

import jax
import numpy as np
import pytest
from conftest import MESHES
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.sharding.mesh import build_mesh
from training import checkpoint, stored_arrays
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import CheckpointError, DamageError
from training.checkpoint_tools import one_device
from training.stored_arrays import read_chunks

NAME = "params.layers.kernel"


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """(array, its checkpoints), stored in chunks of at most 256 bytes."""
    monkeypatch.setattr(stored_arrays, "_CHUNK_BYTES", 256)
    values = np.random.default_rng(0).standard_normal((3, 8, 12)).astype(np.float32)
    sharding = NamedSharding(
        build_mesh(MESHES["dp2-fsdp2-tp2"], jax.devices()), P(None, "fsdp", "tp")
    )
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), write_bytes=1)
    checkpoints.save({"params": {"layers": {"kernel": jax.device_put(values, sharding)}}}, 1, {})
    checkpoints.finish()
    yield values, checkpoints
    checkpoints.close()


def test_chunks_are_small_and_hold_every_place_once(saved):
    values, checkpoints = saved
    found, visits = np.zeros_like(values), np.zeros(values.shape, int)
    for start, block in checkpoints.chunks(1, NAME, one_device()):
        part = tuple(map(slice, start, np.add(start, block.shape)))
        assert block.nbytes <= 256
        found[part] = block
        visits[part] += 1
    np.testing.assert_array_equal(found, values)
    assert (visits == 1).all()


def test_another_fingerprint_or_a_missing_file_is_an_error(saved, tmp_path):
    chunks = read_chunks(tmp_path / "1", NAME, "0" * 16, one_device())
    with pytest.raises(DamageError, match=f"checkpoint 1 is damaged: {NAME}: fingerprint mismatch"):
        list(chunks)
    with pytest.raises(CheckpointError, match="checkpoint 2 cannot be read: "):
        list(read_chunks(tmp_path / "2", NAME, "0" * 16, one_device()))


def test_arrays_may_be_larger_than_what_is_read_or_written_at_once(saved, monkeypatch):
    values, checkpoints = saved
    monkeypatch.setattr(checkpoint, "_READ_BYTES", 1)
    array = checkpoints.read(1, NAME, one_device())
    np.testing.assert_array_equal(array, values)
    checkpoints.save({"params": {"layers": {"kernel": array}}}, 2, {})
    checkpoints.finish_last()
    np.testing.assert_array_equal(checkpoints.read(2, NAME, one_device()), values)
