"""Profiles of training steps: what devices and host did, for xprof, TensorBoard and Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from pydantic import BaseModel, PositiveInt

from training.clock import StepClock
from training.logs import log


class ProfileConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Which steps are profiled; SIGUSR2 profiles the next ones at any time."""

    start: PositiveInt | None = None
    """First profiled step; null: none, except after SIGUSR2."""
    steps: PositiveInt = 3
    """Number of profiled steps."""


class Profiler:
    """Writes a trace of some steps of this process into a folder of its own.

    The devices wait for the host at the end of a profile, and at no other step.

    Args:
        config: Which steps.
        directory: Run directory; a profile is a folder below its `profiles`.
        is_requested: Returns whether a profile was asked for since the last call.
        clock: Clock of the steps; it does not count the seconds in which the trace is written.
    """

    def __init__(
        self,
        config: ProfileConfig,
        directory: Path,
        is_requested: Callable[[], bool],
        clock: StepClock,
    ):
        self._config, self._directory, self._clock = config, directory, clock
        self._is_requested = is_requested
        self._steps = range(0)
        """The steps of the profile that is being taken."""
        self._num_ended = 0
        """Those of them that have ended."""

    def begin_step(self, step: int) -> None:
        """Start a profile if one begins with this step."""
        if self._steps:  # a request waits for the end of this profile
            return
        if not (self._is_requested() or step == self._config.start):
            return
        try:
            jax.profiler.start_trace(self._path(step), create_perfetto_trace=True)
        except (OSError, RuntimeError) as error:
            log.warning("no profile of step %d: %s", step, error)
            return
        self._steps, self._num_ended = range(step, step + self._config.steps), 0

    def end_step(self, step: int, metrics: Any) -> None:
        """Write the profile if it ends with this step. metrics: arrays of the step."""
        self._num_ended += 1
        if self._steps and step == self._steps[-1]:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        """Write the profile that is being taken, if any."""
        if not self._steps:
            return
        steps, self._steps = self._steps, range(0)
        path = self._path(steps[0])
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            log.warning("the profile %s was not written: %s", path, error)
        else:
            log.info(
                "profile of %d steps from step %d: %s; open perfetto_trace.json.gz in it with "
                "ui.perfetto.dev, or the folder with xprof",
                self._num_ended,
                steps[0],
                path,
            )
        self._clock.restart()

    def _path(self, step: int) -> Path:
        process = f"-process-{jax.process_index()}" if jax.process_count() > 1 else ""
        return self._directory / "profiles" / f"step-{step}{process}"
