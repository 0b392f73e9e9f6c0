"""The loop, to be read from top to bottom: restore, step, log, evaluate, save, sample.

Metrics of step n - 1 are read after step n is dispatched, so the devices never wait for the host.
A step whose loss or gradients are not finite changes nothing; a spike is answered by policy; a
signal saves and stops; what was interrupted is made up for by the next process.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from data.pipeline import Rows, train_batches
from data.schedule import batch_number
from parallel.cluster.process_group import ProcessGroup
from parallel.cluster.signals import StopRequest
from training.agreement import StepCoordinator
from training.checkpoint import CheckpointConfig, Checkpoints
from training.directory import locked_run, move_aside, prove_shared, run_directory
from training.evaluation import evaluate
from training.goodput import Goodput
from training.guard import GuardConfig
from training.health import HealthLimits, HealthWatch, expert_metrics, heat_map, heat_strip
from training.metrics import (
    Clock,
    Display,
    Metrics,
    Unwritten,
    evaluations,
    last_goodput,
    log,
    logging_to,
    peak_memory,
    replace_text,
)
from training.resume import (
    Origin,
    describe_process,
    find_again,
    find_origin,
    record_of,
    restore_newest,
    tell_changes,
)
from training.step import Program, TrainState
from training.stragglers import StragglerMonitor

EXIT_DONE, EXIT_RESUMABLE = 0, 75


class TrainingError(Exception):
    """Training cannot go on; the message says why, and what is left, on one line."""


class RunConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where a run leaves its traces."""

    dir: str = Field(default="runs/default", min_length=1)
    """Holds config.yaml, metrics.jsonl, log.txt, tensorboard/ and checkpoints/."""
    compilation_cache: str | None = ".cache/xla"
    """Folder for compiled programs, shared by runs; null: compile every time."""


class TrainingConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """How long, from which seed, and what is shown on the way."""

    steps: int = Field(default=1000, gt=0, le=10**12)
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
    guard: GuardConfig = GuardConfig()
    """What a step with an extraordinary loss or gradient does."""
    health: HealthLimits = HealthLimits()
    """When the experts of sparse layers are worth a warning."""
    sample_temperature: NonNegativeFloat = 0.7
    """0: the likeliest token every time; 1: as the model predicts."""


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
    stop: StopRequest,
    group: ProcessGroup,
) -> Iterator["Run"]:
    """Takes the run directory and finds where to go on; ready to train.

    resolved_config: YAML, saved with the run. Process 0 writes for all; the others keep a log of
    their own. Raises ProcessGroupError if another process of the run still holds the directory.
    Raises: ValueError for what the user can mend; no device has worked until then.
    """
    directory = run_directory(config.dir)
    leaves = jax.tree.leaves(program.abstract_state)
    state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    # An old checkpoint goes only after the new one is whole: one more than are kept.
    existing = len(list(directory.glob("checkpoints/[0-9]*")))
    saves = training.steps // checkpoint.every + 2
    required_bytes = max(0, min(checkpoint.keep + 1, saves) - existing) * state_bytes
    is_first, silent = group.is_primary, not group.is_primary
    with contextlib.ExitStack() as stack:
        if is_first:
            stack.enter_context(locked_run(directory, required_bytes, group))
        moved = move_aside(directory) if is_first and checkpoint.resume == "never" else None
        prove_shared(directory, group)
        display = stack.enter_context(Display(training.steps, training.log_every, silent=silent))
        log_file = "log.txt" if is_first else f"log.{group.process_id}.txt"
        stack.enter_context(logging_to(directory / log_file, display.console, silent=silent))
        checkpoints = Checkpoints(directory / "checkpoints", checkpoint, group=group)
        # However a run ends, a save that has begun is brought to its end.
        stack.push(checkpoints.on_exit)
        if checkpoint.keep_best:
            for step, loss in evaluations(directory / "metrics.jsonl").items():
                checkpoints.remember(step, {"eval_loss": loss})
        origin = find_origin(
            checkpoints, checkpoint, rows, program.abstract_state, steps=training.steps
        )
        if is_first:
            replace_text(directory / "config.yaml", resolved_config)
            rows.tokenizer.save(directory / "tokenizer.json")
        if moved is not None:
            log.info("checkpoint.resume=never: the old run was moved to %s", moved)
        if origin.step:
            tell_changes(checkpoints.record(origin.step), resolved_config)
        mesh = program.tp.manager.mesh.shape
        process = describe_process(resolved_config, mesh, group.num_processes)
        yield Run(program, rows, training, directory, checkpoints, process, display, stop, origin)


@dataclass
class _Rollback(Exception):
    """A spike that the parameters of an older checkpoint have to answer. step: its number."""

    step: int


@dataclass
class Run:
    """One run between its first and its last step."""

    program: Program
    rows: Rows
    training: TrainingConfig
    directory: Path
    checkpoints: Checkpoints
    process: dict[str, Any]
    display: Display
    stop: StopRequest
    origin: Origin
    metrics: Metrics = field(init=False)
    goodput: Goodput = field(init=False)
    _rollbacks: Counter[int] = field(default_factory=Counter)
    _told: dict[str, float] = field(default_factory=dict)
    """Of the last step, for the next line of metrics."""

    def train(self, sample: Callable[[Any, str, int], str]) -> int:
        """Trains to the last step, or to a signal. Returns the exit code.

        sample: (params, prompt, number of tokens) -> text, shown every sample_every steps and at
            the end. Raises: CheckpointError, TrainingError.
        """
        self._sample = sample
        self._watch = HealthWatch(self._sparse_layers, self.training.health)
        self._clock = Clock(self.program)
        self._group = self.checkpoints.group
        self._stragglers = StragglerMonitor(self._group)
        self._coordinator = StepCoordinator(
            self._group, self.stop, self._stragglers, every=self.training.log_every
        )
        # With what the process before told after its last checkpoint.
        ledgers = last_goodput(self.directory / "metrics.jsonl"), self.origin.goodput
        self.goodput = Goodput(max(ledgers, key=lambda seconds: sum(seconds.values())))
        while True:
            state = self._first_state()
            self.goodput.lose(self.goodput.seconds["step"] - self.origin.goodput.get("step", 0.0))
            self.display.begin(self.origin.step)
            try:
                with self._open_metrics() as self.metrics:
                    self._make_up(state)
                    state, code = self._steps(state)
                    if code == EXIT_DONE:
                        self._show_sample(state, self.training.steps)
                    if among := self._stragglers.summary():
                        log.info("%s", among)
                    log.info("%s", self.goodput.summary())
                    return code
            except _Rollback as spike:
                del state
                self._roll_back(spike.step)

    @property
    def _sparse_layers(self) -> list[int]:
        return [n for n, sparse in enumerate(self.program.config.sparse_layers) if sparse]

    def _open_metrics(self) -> Metrics:
        if not self._group.is_primary:
            return Unwritten()
        return Metrics(self.directory, self.origin.step)

    def _first_state(self) -> TrainState:
        """A fresh state, or that of the newest checkpoint that is what was written."""
        begin = time.perf_counter()
        self._group.set_phase("the first state")
        if not self.origin.step:
            state = jax.block_until_ready(self.program.init())
            log.info("initialised parameters in %.1f s", time.perf_counter() - begin)
            return state
        before = peak_memory()
        self.origin, state = restore_newest(
            self.checkpoints,
            self.origin,
            self.rows,
            self.program.abstract_state,
            steps=self.training.steps,
        )
        log.info(
            "resumed from step %d in %.1f s, host memory %.0f MiB higher at its peak",
            self.origin.step,
            time.perf_counter() - begin,
            (peak_memory() - before) / 2**20,
        )
        return state

    def _make_up(self, state: TrainState) -> None:
        """What belonged to the last step of the process before, and was interrupted."""
        step = self.origin.step
        if "evaluation" in self.origin.pending:
            evaluated = self._evaluate(step, state)
            self.checkpoints.remember(step, evaluated)
            self.metrics.amend(step, evaluated)
        if "sample" in self.origin.pending and step < self.training.steps:
            self._show_sample(state, step)

    def _steps(self, state: TrainState) -> tuple[TrainState, int]:
        start, steps = self.origin.step, self.training.steps
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
                skipped=self.origin.skipped,
            )
        ) as batches:
            return self._train(state, batches)

    def _train(
        self, state: TrainState, batches: Iterator[dict[str, jax.Array]]
    ) -> tuple[TrainState, int]:
        """Every step from the one after the origin to the last, or to a signal."""
        steps, clock = self.training.steps, self._clock
        batch = next(batches)
        train_step, shape = self._compile(state, batch), batch["tokens"].shape
        clock.restart()
        previous: dict[str, jax.Array] | None = None
        for step in range(self.origin.step + 1, steps + 1):
            if batch["tokens"].shape != shape:
                if previous is not None:
                    self._log(step - 1, previous)
                    previous = None
                train_step, shape = self._compile(state, batch), batch["tokens"].shape
                clock.restart()
            self._group.set_phase(f"step {step}")
            with self.goodput.spend("step"):
                state, values = train_step(state, batch)
            with clock.waiting(), self.goodput.spend("data_wait"):
                batch = next(batches, batch)
            if previous is not None:
                self._log(step - 1, previous)
            previous = values
            evaluating = step == steps or step % self.training.eval_every == 0
            sampling = _is_due(self.training.sample_every, step) and step < steps
            agreed = self._coordinator.agree_on_step(step, finished_save=self.checkpoints.ended)
            self._told |= agreed.metrics
            stop, stopping = agreed.stop, agreed.stop is not None
            saving = agreed.save or self._is_save_due(step)
            # What is saved is written down first: a kill after the save must not lose the line.
            if evaluating or saving or sampling or stopping:
                params = state if evaluating and not stopping else None
                numbers = self._log(step, values, params)
                previous = None
            if saving or stopping:
                evaluated = not evaluating or params is not None
                pending = _pending(evaluation=not evaluated, sample=sampling and stopping)
                self._save(state, step, pending, numbers)
            self.checkpoints.poll(agreed.finished_save)
            if sampling and not stopping:
                self._show_sample(state, step)
                clock.restart()
            if stop is not None and (step < steps or pending):
                self._group.set_phase("the last save")
                self.checkpoints.finish_last()
                log.info("stopped by %s after step %d; run again to resume", stop.name, step)
                return state, EXIT_RESUMABLE
        self._group.set_phase("the last save")
        self.checkpoints.finish_last()
        return state, EXIT_DONE

    def _compile(self, state: TrainState, batch: dict[str, jax.Array]) -> Any:
        """The step for batches of this shape."""
        begin = time.perf_counter()
        self._group.set_phase("compiling")
        with self.goodput.spend("compile"):
            train_step = self.program.train_step.lower(state, batch).compile()
        a, b, length = batch["tokens"].shape
        log.info(
            "compiled the step for %d rows of %d in %.1f s",
            a * b,
            length,
            time.perf_counter() - begin,
        )
        return train_step

    def _is_save_due(self, step: int) -> bool:
        every = self.checkpoints.config.every
        return step == self.training.steps or step % every == 0 or self.checkpoints.is_owed(step)

    def _save(
        self, state: TrainState, step: int, pending: tuple[str, ...], numbers: dict[str, float]
    ) -> None:
        if self._group.is_primary and not (self.directory / ".lock").exists():
            raise TrainingError(
                f"run.dir={str(self.directory)!r} was removed under the run; nothing can be saved"
            )
        record = record_of(self.origin, self.process, self.rows, step, pending)
        metrics = {"eval_loss": numbers["eval_loss"]} if "eval_loss" in numbers else None
        with self.goodput.spend("checkpoint"):
            record["goodput"] = self.goodput.seconds
            self._told["save_blocked"] = self.checkpoints.save(state, step, record, metrics)

    def _log(
        self, step: int, values: dict[str, jax.Array], evaluate: TrainState | None = None
    ) -> dict[str, float]:
        """Reads the metrics of a step, with an evaluation of this state if given.

        Raises: _Rollback, TrainingError when its loss or gradients are not what they should be.
        """
        experts = values.get("experts")
        with self._clock.blocked(), self.goodput.spend("step"):
            scalars = {name: float(y) for name, y in values.items() if name != "experts"}
        number = self.origin.batch(step - 1)
        phase = self.rows.plan.at(number)
        numbers = scalars | self._clock.read(phase.batch_size, phase.length) | self._told
        numbers |= self.rows.progress(number + 1)
        self._told = {}
        self._stragglers.add(numbers["step_time"], numbers["host_time"])
        if step == self.origin.step + 1 and not self._rollbacks:
            log.info("first step after %s", self.goodput.this_process())
        if step % self.training.log_every == 0 or step == self.training.steps:
            numbers["goodput"] = self.goodput.share
            numbers |= {f"goodput/{label}": y for label, y in self.goodput.seconds.items()}
        self.display.step(step, numbers)
        self._answer(step, numbers)
        if experts is not None:
            numbers |= self._log_experts(step, jax.device_get(experts))
        if evaluate is not None and self.rows.num_eval:
            numbers |= self._evaluate(step, evaluate)
            self._clock.restart()
        self.metrics.write(step, numbers)
        return numbers

    def _answer(self, step: int, numbers: dict[str, float]) -> None:
        """To a step that is not like those before it."""
        guard, z = self.training.guard, max(numbers["loss_z"], numbers["grad_z"])
        finite = math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])
        is_spike = z > guard.max_z and guard.on_spike != "off"
        if finite and not is_spike:
            return
        if not finite or guard.on_spike != "warn":
            self.goodput.lose(numbers["step_time"])
        what = f"{z:.1f} standard deviations above the mean" if finite else "not finite"
        log.warning(
            "step %d: loss %.4g, grad norm %.4g, %s: %s",
            step,
            numbers["loss"],
            numbers["grad_norm"],
            what,
            "applied (guard.on_spike=warn)"
            if finite and guard.on_spike == "warn"
            else "the update was left out",
        )
        is_last = numbers["bad_steps"] >= guard.max_bad_steps
        if not is_last and not (guard.on_spike == "rollback" and finite):
            return
        self.checkpoints.finish()  # what is being saved may fail yet
        newest = self.checkpoints.latest_step
        if is_last:
            raise TrainingError(
                f"{guard.max_bad_steps} steps in a row, up to step {step}, could not be applied: "
                f"the last loss was {numbers['loss']:.4g}; the newest whole checkpoint is "
                f"{'none' if newest is None else newest}; lower optimizer.learning_rate, or look "
                "at the data of these steps"
            )
        if newest is not None:
            raise _Rollback(step)

    def _roll_back(self, step: int) -> None:
        """Back to the newest checkpoint; the batches from there to the spike are left out."""
        self.checkpoints.finish()
        last, skipped = self.origin.batch(step - 1), self.origin.skipped
        found = find_again(
            self.checkpoints, self.rows, self.program.abstract_state, steps=self.training.steps
        )
        self._rollbacks[found.step] += 1
        if self._rollbacks[found.step] > self.training.guard.max_bad_steps:
            raise TrainingError(
                f"the loss rose {self.training.guard.max_bad_steps} times after checkpoint "
                f"{found.step}, the newest whole one, whatever batches were left out; lower "
                "optimizer.learning_rate, or go on from an older one"
            )
        # That checkpoint may be older than earlier rollbacks of this process.
        self.origin = replace(found, skipped=skipped).without(
            batch_number(found.step, skipped), last
        )
        log.warning(
            "back to step %d; batches %d to %d are left out",
            found.step,
            batch_number(found.step, skipped),
            last,
        )

    def _log_experts(self, step: int, arrays: dict[str, np.ndarray]) -> dict[str, float]:
        """The load of the experts: warnings, now and then a strip and an image; its numbers."""
        layers = self._sparse_layers
        for line in self._watch.warnings(arrays):
            log.warning("%s", line)
        if step % self.training.log_every == 0 or step in (
            self.origin.step + 1,
            self.training.steps,
        ):
            for line in heat_strip(arrays["load_NE"], layers):
                log.info("%s", line)
            self.metrics.write_image(step, "moe/load", heat_map(arrays["load_NE"]))
        return expert_metrics(arrays, layers)

    def _show_sample(self, state: TrainState, step: int) -> None:
        if self.training.sample_tokens:
            prompt, count = self.training.sample_prompt, self.training.sample_tokens
            with self.goodput.spend("evaluation"):
                text = self._sample(state.params, prompt, count)
            self.metrics.write_text(step, "sample", text)
            when = "" if step == self.training.steps else f" at step {step}"
            log.info("sample%s:\n%s", when, text)

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        """Of the mean of the parameters, if there is one."""
        with self.goodput.spend("evaluation"):
            return evaluate(
                self.program,
                self.rows,
                state.params if state.ema is None else state.ema,
                step=step,
                batches=self.training.eval_batches,
                accumulation=self.training.gradient_accumulation,
            )


def _pending(**left: bool) -> tuple[str, ...]:
    return tuple(name for name, is_left in left.items() if is_left)
