"""Text samples during training."""

from collections.abc import Callable
from typing import Any

from training.clock import StepClock
from training.config import TrainingConfig
from training.goodput import Goodput
from training.logs import log
from training.step import TrainState
from training.writers.registry import MetricsWriter

GenerateText = Callable[[Any, str, int], str]
"""(params, prompt, number of tokens) -> text."""


class Sampling:
    """Generates a text every `training.sample_every` steps and at the end of the run."""

    def __init__(
        self,
        generate: GenerateText,
        config: TrainingConfig,
        *,
        writers: MetricsWriter,
        goodput: Goodput,
        clock: StepClock,
    ):
        self._generate, self._config = generate, config
        self._writers, self._goodput, self._clock = writers, goodput, clock

    def is_due(self, step: int) -> bool:
        """Return whether a sample follows this step; the one at the end of the run is apart."""
        every, last_step = self._config.sample_every, self._config.steps
        return every is not None and step % every == 0 and step < last_step

    def run(self, step: int, state: TrainState) -> None:
        """Generate a sample, log it and write it as `sample`."""
        config = self._config
        if not config.sample_tokens:
            return
        with self._goodput.spend("evaluation"):
            text = self._generate(state.params, config.sample_prompt, config.sample_tokens)
        self._writers.write_text(step, "sample", text)
        log.info("sample%s:\n%s", "" if step == config.steps else f" at step {step}", text)
        self._clock.restart()
