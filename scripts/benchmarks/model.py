"""Predicted time and memory of a whole training step on a TPU slice that is not here."""

from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.prediction import figures
from configs.build import abstract_batch, build_program
from configs.schema import load_config
from parallel.planning.compiler import SliceCompiler, chip_of
from parallel.planning.slices import absent_devices
from training.parts import STEP_PARTS


def bench_model(path: str, topology: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Predict the training step of a configuration and print what its time consists of."""
    config = load_config(path, overrides)
    program = build_program(config, absent_devices(topology))
    mesh = program.tp.manager.mesh
    print(*program.plan.describe(), sep="\n")
    batch = abstract_batch(config, program)
    compiler = SliceCompiler(topology, mesh, STEP_PARTS)
    with jax.set_mesh(mesh):
        state = program.abstract_state
    compiled = compiler.compile(program.train_step, [state, batch])
    hbm = (compiled.memory.held + compiled.memory.temporary) / 2**30
    prediction = compiled.prediction
    num_tokens = batch["tokens"].size
    flops = program.flops_per_token(config.data.row_length) * num_tokens
    mfu = flops / prediction.total / mesh.size / chip_of(topology).peak_flops
    print(prediction.table(25))
    seconds = compiled.compile_seconds
    print(f"MFU {mfu:.3f}, {hbm:.1f} GiB per device as the sum of all buffers", end=", ")
    print(f"compiled in {seconds:.0f} CPU seconds")
    result = {"bench": "model", "config": path, "topology": topology, "mfu": mfu, "hbm_gib": hbm}
    exposed_by = {kind: seconds * 1e3 for kind, seconds in prediction.exposed_by.items()}
    return {**result, **figures(compiled), "exposed_by_ms": exposed_by}
