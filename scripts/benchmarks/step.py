"""Training steps, timed in turns on one device of this machine."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import plain
from benchmarks.measure import (
    MODEL,
    NUM_ROWS,
    ROW_LENGTH,
    medians,
    random_batch,
    ratios,
    time_in_turns,
)
from configs.build import build_program, open_devices
from configs.schema import Config
from training.optimizers import OptimizerConfig
from training.step import Program


class Step:
    """A compiled training step with the state that it updates.

    Attributes:
        compiled: The program: (state, *arguments) -> (state, metrics). It donates the state.
        compile_seconds: The time that tracing and compiling took.
        state: What the next call starts from.
        metrics: The metrics of the latest call.
    """

    def __init__(self, function: Any, state: Any, *arguments: Any):
        begin = time.perf_counter()
        self.compiled = function.lower(state, *arguments).compile()
        self.compile_seconds = time.perf_counter() - begin
        self.metrics: Any = None
        self.state, self._arguments = state, arguments

    def __call__(self) -> Any:
        """Take one step and return its state and metrics."""
        self.state, self.metrics = self.compiled(self.state, *self._arguments)
        return self.state, self.metrics


def bench_step(*, remat: str, repeats: int) -> dict[str, Any]:
    """Compare the training step with a hand-written jitted function of the same model."""
    program, notice = open_program({"remat": remat})
    print(notice)
    ours = training_step(program)
    params = jax.tree.map(lambda x: jnp.asarray(np.array(x)), ours.state.params)
    batch = {name: jnp.asarray(field[0]) for name, field in random_batch().items()}

    def plain_step(state: tuple[Any, Any]) -> tuple[tuple[Any, Any], jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(plain.loss)(params, batch, program.config)
        updates, opt_state = program.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = params, program.optimizer.init(params)
    steps = {"ours": ours, "plain": Step(jax.jit(plain_step, donate_argnums=0), state)}
    figures = _compare(steps, repeats)
    print(f"loss {float(ours.metrics['loss']):.5f} {float(steps['plain'].metrics):.5f}")
    compile_seconds = {name: step.compile_seconds for name, step in steps.items()}
    return {"bench": "step", **figures, "compile_seconds": compile_seconds, "remat": remat}


def bench_moe_step(
    *,
    experts: int,
    top_k: int,
    repeats: int,
    capacity_factor: float | None,
    grouped_matmul: str,
) -> dict[str, Any]:
    """Compare a mixture of experts with the dense model of the same active FLOPs.

    The experts of one token together are as wide as the dense MLP.
    """
    moe = {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": MODEL["intermediate_size"] // top_k,
        "capacity_factor": capacity_factor,
        "grouped_matmul": grouped_matmul,
    }
    sparse, notice = open_program({"moe": moe})
    print(notice, *sparse.plan.describe(), sep="\n")
    steps = {"moe": training_step(sparse), "dense": training_step(open_program({})[0])}
    figures = _compare(steps, repeats)
    report = jax.device_get(steps["moe"].metrics["experts"])
    load_NE = report["load_NE"]
    return {
        "bench": "moe-step",
        **figures,
        "load_max_over_mean": float((load_NE.max(-1) / load_NE.mean(-1)).max()),
        "dropped": float(report["dropped_N"].max()),
    }


def open_program(
    model: dict[str, Any], optimizer: OptimizerConfig | None = None
) -> tuple[Program, str]:
    """Return the program of the benchmark's model with these changes, and the device's name."""
    data = {"sequence_length": ROW_LENGTH, "global_batch_size": NUM_ROWS}
    sections = {"model": MODEL | model, "data": data, "optimizer": optimizer or OptimizerConfig()}
    config = Config.model_validate(sections)
    devices, notice = open_devices(config)
    return build_program(config, devices), notice or devices[0].device_kind


def training_step(program: Program, batch: dict[str, np.ndarray] | None = None) -> Step:
    """Compile the training step of a program, which always reads this batch.

    batch: as `random_batch` returns it; None: that of the benchmark's model.
    """
    with jax.set_mesh(program.tp.manager.mesh):
        batch = {
            name: jax.device_put(field, program.batch_sharding)
            for name, field in (batch or random_batch()).items()
        }
        return Step(program.train_step, program.init(), batch)


def _compare(steps: dict[str, Step], repeats: int) -> dict[str, Any]:
    """Time two steps in turns: the ratio of the first to the second, and their memory."""
    first, second = (rows := time_in_turns(steps, repeats, show=True))
    found = ratios(rows[first], rows[second])
    return {
        "ratio": statistics.median(found),
        "ratios": found,
        "seconds": medians(rows),
        "temporary_gib": {
            name: step.compiled.memory_analysis().temp_size_in_bytes / 2**30
            for name, step in steps.items()
        },
    }
