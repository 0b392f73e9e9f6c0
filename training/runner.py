"""Runs compiled training steps over the batches of the dataset."""

import contextlib
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import jax

from data.pipeline import Dataset, train_batches
from data.sharded_store import wait_until
from parallel.cluster.process_group import ProcessGroup
from training.clock import StepClock
from training.config import TrainingConfig
from training.goodput import Goodput
from training.logs import log
from training.memory_errors import memory_error
from training.resume import ResumePoint
from training.spikes import TrainingError
from training.state import TrainState
from training.step import Batch, Program


def compile_lowered(lowered: Any) -> Any:
    """Return `lowered.compile()`. Raises: TrainingError if libtpu refuses its scheduling groups."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "annotation" not in str(error).lower():
            raise
        raise TrainingError(
            "this version of libtpu refuses the scheduling groups of the step; set "
            f"parallel.group_hops=false ({str(error).splitlines()[0][:300]})"
        ) from error


class StepRunner:
    """Dispatches steps from a resume point on, with a compiled program per batch shape.

    A step is dispatched and not awaited. While the devices compute it, the next batch is fetched.
    """

    def __init__(
        self,
        program: Program,
        dataset: Dataset,
        config: TrainingConfig,
        *,
        resume_point: ResumePoint,
        group: ProcessGroup,
        goodput: Goodput,
        clock: StepClock,
    ):
        self._program, self._group, self._goodput, self._clock = program, group, goodput, clock
        self._dataset, self._config, self._resume_point = dataset, config, resume_point
        self._batches = self._read_from(resume_point.step)
        self._batch = next(self._batches, None)
        self._train_step: Any = None
        self._compiled_shape: tuple[int, ...] | None = None

    def _read_from(self, step: int) -> Generator[Batch]:
        """Return the batches from a zero-based step on, as far as their rows are prepared.

        Communication: if they may not be, process 0 broadcasts how far, and the others look until
        they see as much.
        """
        last, skipped, dataset = self._config.steps, self._resume_point.skipped, self._dataset
        stop = last
        if dataset.is_in_order:
            find_stop = partial(dataset.prepared_until, step, last, skipped)
            stop = self._group.broadcast(f"rows from step {step}", find_stop)
            wait_until(lambda: find_stop() >= stop, dataset.refresh)
        return train_batches(
            dataset,
            self._program.batch_sharding,
            start=step,
            stop=stop,
            accumulation=self._config.gradient_accumulation,
            skipped=skipped,
        )

    @property
    def has_batch(self) -> bool:
        """Whether the batch of the next step is read; else its rows are being prepared."""
        return self._batch is not None

    def is_prepared(self, step: int) -> bool:
        """Look for newly prepared rows; return whether those of a step can be read."""
        self._dataset.refresh()
        return self._dataset.is_ready(self._resume_point.batch(step - 1))

    def read_on(self, step: int) -> None:
        """Read batches again, from a step on whose rows are prepared."""
        self._batches.close()
        self._batches = self._read_from(step - 1)
        self._batch = next(self._batches)
        self._clock.restart()

    @property
    def batch(self) -> Batch:
        """The batch of the next step."""
        assert self._batch is not None
        return self._batch

    @property
    def needs_compile(self) -> bool:
        """Whether the next batch has another shape than the compiled step."""
        return self.batch["tokens"].shape != self._compiled_shape

    def compile(self, state: TrainState) -> dict[str, float]:
        """Compile the step for the next batch; return the metric `compile_time`, in seconds."""
        begin = time.perf_counter()
        self._group.set_phase("compiling")
        self._train_step = None
        with self._goodput.spend("compile"):
            self._train_step = compile_lowered(self._program.train_step.lower(state, self.batch))
        parts, rows, length = self._compiled_shape = self.batch["tokens"].shape
        seconds = time.perf_counter() - begin
        log.info(
            "compiled the training step for %d rows of %d tokens in %.1f s",
            parts * rows,
            length,
            seconds,
        )
        self._clock.restart()
        return {"compile_time": seconds}

    @contextlib.contextmanager
    def explained_memory_errors(self) -> Iterator[None]:
        """Raise a TrainingError that names the largest buffer for a lack of device memory.

        A step fails when its metrics are read, so the context holds the whole loop.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            phase, program = self._group.phase, None
            if phase is not None and phase.startswith("step"):
                phase, program = f"{phase} or the one before", self._train_step
            explained = memory_error(error, phase, program)
            if explained is None:
                raise
            raise explained from error

    def run(self, step: int, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Dispatch a step and fetch the next batch; return (state, metrics), not awaited."""
        self._group.set_phase(f"step {step}")
        with self._goodput.spend("step"):
            state, metrics = self._train_step(state, self.batch)
        with self._clock.waiting_for_data(), self._goodput.spend("data_wait"):
            self._batch = next(self._batches, None)
        return state, metrics

    def close(self) -> None:
        """Stop reading batches."""
        self._batches.close()
