"""The loop, to be read from top to bottom: restore, step, log, evaluate, save, sample.

Metrics of step n - 1 are read after step n is dispatched, so the devices never wait for the host.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from data.pipeline import Rows, eval_batches, train_batches
from parallel.distributed import StopRequest
from parallel.mesh import CHIPS
from training.checkpoint import CheckpointConfig, Checkpoints, locked_run, move_aside
from training.health import HealthLimits, HealthWatch, expert_metrics, heat_map, heat_strip
from training.metrics import Display, Metrics, log, logging_to
from training.step import Program, TrainState

EXIT_DONE, EXIT_RESUMABLE = 0, 75


class RunConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where a run leaves its traces."""

    dir: str = "runs/default"
    """Holds config.yaml, metrics.jsonl, log.txt, tensorboard/ and checkpoints/."""
    compilation_cache: str | None = ".cache/xla"
    """Folder for compiled programs, shared by runs; null: compile every time."""


class TrainingConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """How long, from which seed, and what is shown on the way."""

    steps: PositiveInt = 1000
    """Optimizer steps in all, resumed ones included."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the initial parameters."""
    gradient_accumulation: PositiveInt = 1
    """Microbatches per optimizer step; the global batch stays the same."""
    log_every: PositiveInt = 10
    """Steps between console lines; metrics.jsonl and tensorboard get every step."""
    eval_every: PositiveInt = 200
    """Steps between passes over the held-out rows; the last step is always evaluated."""
    eval_batches: PositiveInt = 8
    """Batches of held-out rows per evaluation, always the same; fewer if there are no more."""
    sample_every: PositiveInt | None = None
    """Steps between samples of text, in log and tensorboard; null: at the end only."""
    sample_prompt: str = Field(default="def ", min_length=1)
    """What a sample continues."""
    sample_tokens: NonNegativeInt = 64
    """Length of a sample; 0: none."""
    health: HealthLimits = HealthLimits()
    """When the experts of sparse layers are worth a warning."""
    sample_temperature: NonNegativeFloat = 0.7
    """0: the likeliest token every time; 1: as the model predicts."""


class _Clock:
    """Wall time per step, and what follows from it."""

    def __init__(self, program: Program, tokens_per_step: int, sequence_length: int):
        self._tokens = tokens_per_step
        mesh = program.tp.manager.mesh
        chip = CHIPS.get(mesh.devices.flat[0].device_kind)
        flops = program.config.flops_per_token(sequence_length) * tokens_per_step
        self._best_time = flops / (chip.peak_flops * mesh.size) if chip else None
        self.restart()

    def restart(self) -> None:
        """What happened since the last reading was not training."""
        self._time = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds since the last reading, tokens per second, and MFU where the peak is known."""
        now = time.perf_counter()
        step_time, self._time = now - self._time, now
        values = {"step_time": step_time, "tokens_per_second": self._tokens / step_time}
        if self._best_time is not None:
            values["mfu"] = self._best_time / step_time
        return values


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


@contextlib.contextmanager
def open_run(
    program: Program,
    rows: Rows,
    *,
    config: RunConfig,
    training: TrainingConfig,
    checkpoint: CheckpointConfig,
    resolved_config: str,
    announce: Sequence[str],
) -> Iterator["Run"]:
    """Takes the run directory and finds where to go on; ready to train.

    resolved_config: YAML, saved with the run. announce: lines to show first.
    Raises: ValueError for what the user can mend; no device has worked until then.
    """
    if "://" in config.dir:
        raise ValueError(f"run.dir={config.dir!r} is a URL; give a directory of this machine")
    directory = Path(os.path.expanduser(config.dir))
    stop = StopRequest().install()
    leaves = jax.tree.leaves(program.abstract_state)
    state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    # An old checkpoint goes only after the new one is whole: one more than are kept.
    existing = len(list(directory.glob("checkpoints/[0-9]*")))
    required_bytes = max(0, checkpoint.keep + 1 - existing) * state_bytes
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_run(directory, required_bytes))
        moved = move_aside(directory) if checkpoint.resume == "never" else None
        checkpoints = Checkpoints(directory / "checkpoints", checkpoint)
        start = _start_step(checkpoints, checkpoint, training, rows, program)
        (directory / "config.yaml").write_text(resolved_config)
        metrics = stack.enter_context(Metrics(directory, start))
        display = stack.enter_context(Display(start, training.steps, training.log_every))
        stack.enter_context(logging_to(directory / "log.txt", display.console))
        for line in announce:
            log.info("%s", line)
        if moved is not None:
            log.info("checkpoint.resume=never: the old run was moved to %s", moved)
        sparse = [n for n, is_sparse in enumerate(program.config.sparse_layers) if is_sparse]
        watch = HealthWatch(sparse, training.health)
        yield Run(
            program, rows, training, checkpoint, checkpoints, metrics, display, stop, watch, start
        )


def _start_step(
    checkpoints: Checkpoints,
    config: CheckpointConfig,
    training: TrainingConfig,
    rows: Rows,
    program: Program,
) -> int:
    step = checkpoints.latest_step
    if step is None:
        if config.resume == "must":
            raise ValueError(
                "checkpoint.resume=must, but the run directory holds no checkpoint; "
                "check run.dir, or use checkpoint.resume=auto"
            )
        return 0
    if step > training.steps:
        raise ValueError(
            f"training.steps={training.steps} but the run directory already holds step {step}; "
            "raise training.steps, or give another run.dir"
        )
    order_hash = checkpoints.metadata(step).get("order_hash")
    if order_hash is None:
        raise ValueError(
            f"checkpoint {step} is not one of ours, or damaged: it has no order_hash; move the "
            f"folder checkpoints/{step} away to resume from the one before"
        )
    if order_hash != rows.order_hash:
        raise ValueError(
            f"checkpoint {step} was trained on another data order: files, data.seed, "
            "data.sequence_length, data.global_batch_size or data.eval_fraction changed; restore "
            "them, or give another run.dir"
        )
    checkpoints.check(step, program.abstract_state)
    return step


@dataclass
class Run:
    """One run between its first and its last step."""

    program: Program
    rows: Rows
    training: TrainingConfig
    checkpoint: CheckpointConfig
    checkpoints: Checkpoints
    metrics: Metrics
    display: Display
    stop: StopRequest
    watch: HealthWatch
    start: int

    def train(self, sample: Callable[[Any, str, int], str]) -> int:
        """Trains to the last step, or to a signal. Returns the exit code.

        sample: (params, prompt, number of tokens) -> text, shown every sample_every steps and at
            the end.
        """

        def show_sample(params: Any, step: int) -> None:
            if self.training.sample_tokens:
                text = sample(params, self.training.sample_prompt, self.training.sample_tokens)
                self.metrics.write_text(step, "sample", text)
                when = "" if step == self.training.steps else f" at step {step}"
                log.info("sample%s:\n%s", when, text)

        state, code = self._steps(self._initial_state(), show_sample)
        self.checkpoints.close()
        if code == EXIT_DONE:
            show_sample(state.params, self.training.steps)
        return code

    def _initial_state(self) -> TrainState:
        begin = time.perf_counter()
        if self.start:
            state = self.checkpoints.restore(self.start, self.program.abstract_state)
            what = f"resumed from step {self.start}"
        else:
            state = jax.block_until_ready(self.program.init())
            what = "initialised parameters"
        log.info("%s in %.1f s", what, time.perf_counter() - begin)
        return state

    def _steps(
        self, state: TrainState, show_sample: Callable[[Any, int], None]
    ) -> tuple[TrainState, int]:
        start, steps, stop = self.start, self.training.steps, self.stop
        if start >= steps:
            log.info("step %d is the last: nothing left to train", steps)
            return state, EXIT_DONE
        batches = train_batches(
            self.rows,
            self.program.batch_sharding,
            start=start,
            stop=steps,
            accumulation=self.training.gradient_accumulation,
        )
        batch = next(batches)
        begin = time.perf_counter()
        train_step = self.program.train_step.lower(state, batch).compile()
        log.info("compiled the step in %.1f s", time.perf_counter() - begin)
        tokens = math.prod(batch["tokens"].shape)
        clock = _Clock(self.program, tokens, self.rows.config.sequence_length)
        previous: dict[str, jax.Array] | None = None
        for step in range(start + 1, steps + 1):
            state, values = train_step(state, batch)
            batch = next(batches, batch)
            if previous is not None:
                self._log(step - 1, previous, clock)
            previous = values
            evaluating = step == steps or step % self.training.eval_every == 0
            sampling = _is_due(self.training.sample_every, step) and step < steps
            saving = step == steps or step % self.checkpoint.every == 0
            # What is saved is written down first: a kill after the save must not lose the line.
            if evaluating or saving or sampling or stop.signal is not None:
                params = state.params if evaluating and stop.signal is None else None
                self._log(step, values, clock, params)
                previous = None
            # A signal that comes in a step whose metrics are not written waits for the next one.
            stopping = stop.signal is not None and previous is None
            if saving or stopping:
                self.checkpoints.save(state, step, {"order_hash": self.rows.order_hash})
            self.checkpoints.poll()
            if sampling and not stopping:
                show_sample(state.params, step)
                clock.restart()
            if stopping and stop.signal is not None and step < steps:
                self.checkpoints.finish()
                log.info("stopped by %s after step %d; run again to resume", stop.signal.name, step)
                return state, EXIT_RESUMABLE
        self.checkpoints.finish()
        return state, EXIT_DONE

    def _log(
        self, step: int, values: dict[str, jax.Array], clock: _Clock, evaluate: Any = None
    ) -> None:
        """Reads the metrics of a step, with an evaluation of these parameters if given."""
        experts = values.get("experts")
        scalars = {name: float(y) for name, y in values.items() if name != "experts"}
        numbers = scalars | clock.read()
        self.display.step(step, numbers)
        if experts is not None:
            numbers |= self._log_experts(step, jax.device_get(experts))
        if evaluate is not None and self.rows.num_eval:
            numbers["eval_loss"] = self._evaluate(evaluate)
            log.info(
                "step %d  eval loss %.4f nats, %.3f bits per token",
                step,
                numbers["eval_loss"],
                numbers["eval_loss"] / math.log(2),
            )
            clock.restart()
        self.metrics.write(step, numbers)

    def _log_experts(self, step: int, arrays: dict[str, np.ndarray]) -> dict[str, float]:
        """The load of the experts: warnings, now and then a strip and an image; its numbers."""
        layers = [n for n, sparse in enumerate(self.program.config.sparse_layers) if sparse]
        for line in self.watch.warnings(arrays):
            log.warning("%s", line)
        if step % self.training.log_every == 0 or step in (self.start + 1, self.training.steps):
            for line in heat_strip(arrays["load_NE"], layers):
                log.info("%s", line)
            self.metrics.write_image(step, "moe/load", heat_map(arrays["load_NE"]))
        return expert_metrics(arrays, layers)

    def _evaluate(self, params: Any) -> float:
        """Mean cross-entropy over the held-out rows, in nats per token."""
        batches = eval_batches(
            self.rows,
            self.program.batch_sharding,
            batch_size=self.rows.config.global_batch_size // self.training.gradient_accumulation,
            limit=self.training.eval_batches * self.training.gradient_accumulation,
        )
        sums = [self.program.eval_step(params, batch) for batch in batches]
        return sum(float(total) for total, _ in sums) / sum(float(count) for _, count in sums)
