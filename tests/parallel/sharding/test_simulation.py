"""Simulated meshes must never hang: programs are compiled here as users compile them.

The other tests compile without optimisation, which hides the deadlock that
`parallel/sharding/devices.py` prevents. So these steps run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
AXES = ("dp", "fsdp", "tp", "sp", "ep")

PROGRAM = """
import sys
import jax, numpy as np
from configs.build import build_program, open_devices
from configs.schema import load_config

for mesh in sys.argv[1:]:
    overrides = [f"mesh.{entry}" for entry in mesh.split(",")]
    fixed = ["data.global_batch_size=8", "run.compilation_cache=null"]
    config = load_config("configs/tp8.yaml", [*fixed, *overrides])
    devices, _ = open_devices(config)
    program = build_program(config, devices)
    with jax.set_mesh(program.tp.manager.mesh):
        shape = (1, config.data.batch_sizes[0], config.data.row_length)
        names = "tokens", "targets", "positions"
        fields = dict.fromkeys(names, np.arange(shape[2], dtype=np.int32))
        fields["segment_ids"] = np.zeros(shape[2], np.int32)
        fields["loss_mask"] = np.ones(shape[2], np.float32)
        batch = {
            name: jax.device_put(np.broadcast_to(row, shape), program.batch_sharding)
            for name, row in fields.items()
        }
        losses = []
        for run in range(3):
            state = program.init()
            for step in range(4):
                state, metrics = program.train_step(state, batch)
            losses.append(float(metrics["loss"]))
        assert losses[0] == losses[1] == losses[2], losses
        print(mesh, losses[0], flush=True)
"""


def factorisations(devices: int, axes: tuple[str, ...] = AXES) -> list[dict[str, int]]:
    """Return every way to give each axis a size so that the product is `devices`."""
    if not axes:
        return [{}] if devices == 1 else []
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    return [
        {axes[0]: size, **rest}
        for size in sizes
        for rest in factorisations(devices // size, axes[1:])
    ]


EVERY = [",".join(f"{axis}={size}" for axis, size in sizes.items()) for sizes in factorisations(8)]
# Meshes where most runs hung before `prevent_deadlocks`.
HUNG = [mesh for mesh in EVERY if "fsdp=8" in mesh or "fsdp=4" in mesh]
REST = [mesh for mesh in EVERY if mesh not in HUNG]


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param(HUNG, id="hung", marks=pytest.mark.slow),
        pytest.param(REST, id="rest", marks=pytest.mark.release),
    ],
)
def test_three_runs_on_every_factorisation_of_eight_devices_end(meshes) -> None:
    assert len(EVERY) == 35
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *meshes],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150 * len(meshes),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == meshes
