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

from data.pipeline import Rows, eval_batches, explain_change, train_batches
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
    """Batches of held-out rows per evaluation and source, always the same; fewer if there are no
    more."""
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

    def __init__(self, program: Program):
        self._program = program
        mesh = program.tp.manager.mesh
        chip = CHIPS.get(mesh.devices.flat[0].device_kind)
        self._peak = chip.peak_flops * mesh.size if chip else None
        self._waited = 0.0
        self.restart()

    def restart(self) -> None:
        """What happened since the last reading was not training."""
        self._time = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The host needs a batch, and cannot go on without it."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    def read(self, rows: int, length: int) -> dict[str, float]:
        """Seconds since the last reading, tokens per second, the share of the time that went by
        waiting for data, and MFU where the peak is known; of a step of `rows` x `length` tokens."""
        now = time.perf_counter()
        step_time, self._time = now - self._time, now
        waited, self._waited = self._waited, 0.0
        tokens = rows * length
        values = {
            "step_time": step_time,
            "tokens_per_second": tokens / step_time,
            "data_wait": waited / step_time,
        }
        if self._peak is not None:
            flops = self._program.config.flops_per_token(length) * tokens
            values["mfu"] = flops / self._peak / step_time
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
        rows.tokenizer.save(directory / "tokenizer.json")
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
    order = checkpoints.metadata(step).get("order")
    if order is None:
        raise ValueError(
            f"checkpoint {step} is not one of ours, or damaged: it has no order of data; move the "
            f"folder checkpoints/{step} away to resume from the one before"
        )
    if order != rows.order(step):
        raise ValueError(
            f"checkpoint {step} was trained on other data: "
            f"{explain_change(order, rows.order(step))}; restore it, or give another run.dir"
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
        start, steps = self.start, self.training.steps
        if start >= steps:
            log.info("step %d is the last: nothing left to train", steps)
            return state, EXIT_DONE
        with contextlib.closing(
            train_batches(
                self.rows,
                self.program.batch_sharding,
                start=start,
                stop=steps,
                accumulation=self.training.gradient_accumulation,
            )
        ) as batches:
            return self._train(state, batches, show_sample)

    def _train(
        self,
        state: TrainState,
        batches: Iterator[dict[str, jax.Array]],
        show_sample: Callable[[Any, int], None],
    ) -> tuple[TrainState, int]:
        """Every step from the one after `start` to the last, or to a signal."""
        start, steps, stop = self.start, self.training.steps, self.stop
        batch = next(batches)
        train_step, shape = self._compile(state, batch), batch["tokens"].shape
        clock = _Clock(self.program)
        previous: dict[str, jax.Array] | None = None
        for step in range(start + 1, steps + 1):
            if batch["tokens"].shape != shape:
                if previous is not None:
                    self._log(step - 1, previous, clock)
                    previous = None
                train_step, shape = self._compile(state, batch), batch["tokens"].shape
                clock.restart()
            state, values = train_step(state, batch)
            with clock.waiting():
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
                rows = self.rows
                order = {"order": rows.order(step), "order_hash": rows.order_hash(step)}
                self.checkpoints.save(state, step, order)
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

    def _compile(self, state: TrainState, batch: dict[str, jax.Array]) -> Any:
        """The step for batches of this shape."""
        begin = time.perf_counter()
        train_step = self.program.train_step.lower(state, batch).compile()
        a, b, length = batch["tokens"].shape
        log.info(
            "compiled the step for %d rows of %d in %.1f s",
            a * b,
            length,
            time.perf_counter() - begin,
        )
        return train_step

    def _log(
        self, step: int, values: dict[str, jax.Array], clock: _Clock, evaluate: Any = None
    ) -> None:
        """Reads the metrics of a step, with an evaluation of these parameters if given."""
        experts = values.get("experts")
        scalars = {name: float(y) for name, y in values.items() if name != "experts"}
        phase = self.rows.plan.at(step - 1)
        numbers = scalars | clock.read(phase.batch_size, phase.length) | self.rows.progress(step)
        self.display.step(step, numbers)
        if experts is not None:
            numbers |= self._log_experts(step, jax.device_get(experts))
        if evaluate is not None and self.rows.num_eval:
            numbers |= self._evaluate(step, evaluate)
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

    def _evaluate(self, step: int, params: Any) -> dict[str, float]:
        """Cross-entropy over held-out rows, in nats per token and bits per byte of text."""
        numbers: dict[str, float] = {}
        totals = np.zeros(3)
        for source in self.rows.sources:
            batches = eval_batches(
                source,
                self.program.batch_sharding,
                batch_size=max(self.rows.config.batch_sizes) // self.training.gradient_accumulation,
                limit=self.training.eval_batches * self.training.gradient_accumulation,
            )
            sums = [self.program.eval_step(params, batch) for batch in batches]
            nats, count = (sum(float(pair[n]) for pair in sums) for n in range(2))
            if not count:
                continue
            num_bytes = count * source.bytes_per_target
            totals += nats, count, num_bytes
            numbers[f"eval/{source.name}/loss"] = nats / count
            numbers[f"eval/{source.name}/bits_per_byte"] = nats / math.log(2) / num_bytes
        if not numbers:
            log.warning("step %d  no held-out row has a token to learn: no evaluation", step)
            return {}
        nats, count, num_bytes = totals
        numbers["eval_loss"] = nats / count
        numbers["eval_bits_per_byte"] = nats / math.log(2) / num_bytes
        parts = [
            f"{source.name} {numbers[f'eval/{source.name}/loss']:.4f}"
            for source in self.rows.sources
            if len(self.rows.sources) > 1 and f"eval/{source.name}/loss" in numbers
        ]
        log.info(
            "step %d  eval loss %.4f nats, %.3f bits per byte%s",
            step,
            numbers["eval_loss"],
            numbers["eval_bits_per_byte"],
            f" ({', '.join(parts)})" if parts else "",
        )
        return numbers
