"""Reads the metrics of a step from the devices, one step late, and passes them to the writers."""

from collections.abc import Mapping
from typing import Any

import jax

from data.pipeline import Dataset
from training.clock import StepClock
from training.config import TrainingConfig
from training.goodput import Goodput
from training.health import ExpertHealth
from training.logs import log
from training.memory_use import memory_metrics
from training.noise_scale import NoiseScale
from training.norms import norm_metrics
from training.resume import ResumePoint
from training.spikes import SpikeHandler, TrainingError
from training.stragglers import StragglerMonitor
from training.writers.registry import MetricsWriter


class StepReporter:
    """Turns the arrays of a step into one line of metrics.

    The loop adds a step when it is dispatched, and finishes it after the next one is dispatched,
    so that the devices never wait for the host.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: TrainingConfig,
        *,
        writers: MetricsWriter,
        spikes: SpikeHandler,
        experts: ExpertHealth,
        stragglers: StragglerMonitor,
        goodput: Goodput,
        clock: StepClock,
    ):
        self._dataset, self._config, self._writers = dataset, config, writers
        self._spikes, self._experts, self._stragglers = spikes, experts, stragglers
        self._goodput, self._clock = goodput, clock
        self._resume_point = ResumePoint()
        self._is_first_step = True
        self._unread: tuple[int, dict[str, Any]] | None = None
        self._unwritten: tuple[int, dict[str, float]] | None = None
        self._pending_metrics: dict[str, float] = {}
        self._noise_scale = NoiseScale()

    def begin(self, resume_point: ResumePoint) -> None:
        """Start after a resume point; drop a step that a rollback left unfinished."""
        self._resume_point = resume_point
        self._unread = self._unwritten = None
        self._pending_metrics = {}
        self._noise_scale = NoiseScale()

    def add_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the metrics of a dispatched step: arrays that may not be ready."""
        assert self._unread is None, "the previous step is unfinished"
        self._unread = step, metrics

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Take metrics of this process for the next line."""
        self._pending_metrics |= metrics

    def finish_step(self, evaluation: Mapping[str, float] | None = None) -> None:
        """Read the added step, unless that is done, and write its line; no-op without one.

        Raises: Rollback or TrainingError, see `SpikeHandler.handle_spike`.
        """
        self.read_step()
        if self._unwritten is not None:
            (step, metrics), self._unwritten = self._unwritten, None
            self._writers.write(step, metrics | dict(evaluation or {}))

    def read_step(self) -> None:
        """Wait for the metrics of the added step, show them, and handle a spike."""
        if self._unread is None:
            return
        (step, arrays), self._unread = self._unread, None
        experts, norms = arrays.pop("experts", None), arrays.pop("norms")
        with self._clock.waiting_for_devices(), self._goodput.spend("step"):
            metrics = {name: float(value) for name, value in jax.device_get(arrays).items()}
        self._noise_scale.add(metrics)
        batch = self._resume_point.batch(step - 1)
        phase = self._dataset.schedule.at(batch)
        metrics |= self._clock.read(phase.batch_size, phase.length)
        metrics |= self._pending_metrics | self._dataset.progress(batch + 1)
        self._pending_metrics = {}
        self._stragglers.add(metrics["step_time"], metrics["host_time"])
        if self._is_first_step:
            log.info("first step after %s", self._goodput.this_process())
            self._is_first_step = False
        if step % self._config.log_every == 0 or step == self._config.steps:
            metrics["goodput"] = self._goodput.share
            metrics |= {f"goodput/{label}": y for label, y in self._goodput.seconds.items()}
            metrics |= self._noise_scale.take()
            metrics |= norm_metrics(jax.device_get(norms)) | memory_metrics(jax.local_devices())
        self._writers.preview(step, metrics)
        try:
            self._spikes.handle_spike(step, metrics)
        except TrainingError:  # the run ends here
            self._writers.write(step, metrics)
            raise
        if experts is not None:
            is_first = step == self._resume_point.step + 1
            metrics |= self._experts.report(step, jax.device_get(experts), show=is_first)
        self._unwritten = step, metrics
