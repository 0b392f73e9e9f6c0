"""`scripts/checkpoint.py verify` needs memory for the largest array, not for the checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.sharding.mesh import MeshConfig, build_mesh
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.guard import fresh_guard
from training.state import TrainState

MESH = MeshConfig(dp=2, tp=2)


def write_run(run: Path, num_arrays: int, shape: tuple[int, int]) -> Path:
    """Write a run directory with one checkpoint of equal arrays."""
    mesh, rng = build_mesh(MESH, jax.devices()[: MESH.num_devices]), np.random.default_rng(0)

    def put(values: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, P(*spec)))

    arrays = (rng.standard_normal(shape, np.float32) for _ in range(num_arrays))
    params = {str(n): put(array, None, "tp") for n, array in enumerate(arrays)}
    guard = jax.tree.map(lambda x: put(np.asarray(x)), fresh_guard())
    checkpoints = Checkpoints(run / "checkpoints", CheckpointConfig())
    checkpoints.save(TrainState(put(np.int32(1)), params, (), guard, None), 1, {})
    checkpoints.close()
    return run


def peak_of_verify(run: Path) -> int:
    """Run verify in a child process; return its peak host memory in bytes."""
    command = [sys.executable, str(ROOT / "scripts" / "checkpoint.py"), "verify", str(run)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        _, code, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(code)
    assert child.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.mark.release
def test_verify_memory_is_bounded_by_the_largest_array(tmp_path) -> None:
    large, count = 32 * 2**20, 12
    tiny_run = write_run(tmp_path / "tiny", count, (64, 48))
    large_run = write_run(tmp_path / "large", count, (large // 4096, 1024))
    assert peak_of_verify(large_run) - peak_of_verify(tiny_run) < 5 * large < count * large / 2
