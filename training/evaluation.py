"""Evaluation on the held-out split of every source, and text samples, during training."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.pipeline import Dataset, eval_batches
from training.clock import StepClock
from training.config import TrainingConfig
from training.goodput import Goodput
from training.logs import log
from training.step import Program, TrainState
from training.writers.registry import MetricsWriter


@dataclass
class Evaluation:
    """Evaluates every `training.eval_every` steps and after the last one."""

    program: Program
    dataset: Dataset
    config: TrainingConfig
    goodput: Goodput
    clock: StepClock

    def is_due(self, step: int) -> bool:
        """Return whether this step is evaluated."""
        return step == self.config.steps or step % self.config.eval_every == 0

    def run(self, step: int, state: TrainState) -> dict[str, float]:
        """Return the metrics of the parameters, or of their moving average if there is one.

        `eval_loss` in nats per token and `eval_bits_per_byte` of text over all sources, and
        `eval/SOURCE/...` of each; empty if the held-out split has no token to predict.
        """
        if not self.dataset.num_eval:
            return {}
        with self.goodput.spend("evaluation"):
            metrics = self._evaluate(self.program.averaged(state))
        if metrics:
            self._log(step, metrics)
        else:
            log.warning("step %d  no evaluation: no held-out token to predict", step)
        self.clock.restart()
        return metrics

    def _evaluate(self, params: Any) -> dict[str, float]:
        metrics: dict[str, float] = {}
        totals = np.zeros(3)
        accumulation = self.config.gradient_accumulation
        batch_size = max(self.dataset.config.batch_sizes) // accumulation
        for source in self.dataset.sources:
            sums = [
                self.program.eval_step(params, batch)
                for batch in eval_batches(
                    source,
                    self.program.batch_sharding,
                    batch_size=batch_size,
                    limit=self.config.eval_batches * accumulation,
                )
            ]
            nats, count = (sum(float(pair[n]) for pair in sums) for n in range(2))
            if not count:
                continue
            num_bytes = source.eval_bytes(len(sums) * batch_size)
            totals += nats, count, num_bytes
            metrics[f"eval/{source.name}/loss"] = nats / count
            metrics[f"eval/{source.name}/bits_per_byte"] = nats / math.log(2) / num_bytes
        if metrics:
            nats, count, num_bytes = totals
            metrics["eval_loss"] = nats / count
            metrics["eval_bits_per_byte"] = nats / math.log(2) / num_bytes
        return metrics

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        sources = self.dataset.sources
        parts = [
            f"{source.name} {metrics[f'eval/{source.name}/loss']:.4f}"
            for source in sources
            if len(sources) > 1 and f"eval/{source.name}/loss" in metrics
        ]
        log.info(
            "step %d  eval loss %.4f nats, %.3f bits per byte%s",
            step,
            metrics["eval_loss"],
            metrics["eval_bits_per_byte"],
            f" ({', '.join(parts)})" if parts else "",
        )


GenerateText = Callable[[Any, str, int], str]
"""(params, prompt, number of tokens) -> text."""


@dataclass
class Sampling:
    """Generates a text every `training.sample_every` steps and at the end of the run."""

    generate: GenerateText
    config: TrainingConfig
    writers: MetricsWriter
    goodput: Goodput
    clock: StepClock

    def is_due(self, step: int) -> bool:
        """Return whether a sample follows this step; the one at the end of the run is apart."""
        every, last_step = self.config.sample_every, self.config.steps
        return every is not None and step % every == 0 and step < last_step

    def run(self, step: int, state: TrainState) -> None:
        """Generate a sample, log it and write it as `sample`."""
        config = self.config
        if not config.sample_tokens:
            return
        with self.goodput.spend("evaluation"):
            text = self.generate(state.params, config.sample_prompt, config.sample_tokens)
        self.writers.write_text(step, "sample", text)
        log.info("sample%s:\n%s", "" if step == config.steps else f" at step {step}", text)
        self.clock.restart()
