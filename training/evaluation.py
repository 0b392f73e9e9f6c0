"""Evaluation on the held-out split of every source, and text samples, during training."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from data.pipeline import Dataset, eval_batches
from data.source import Source
from model.activation_scale import activation_metrics
from training.clock import StepClock
from training.config import TrainingConfig
from training.goodput import Goodput
from training.logs import log, printable
from training.preference_step import PreferenceProgram
from training.state import TrainState
from training.step import Batch, Program
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
        """Return the metrics of `_evaluate`, empty if there is nothing to evaluate."""
        if not self.dataset.num_eval:
            return {}
        with self.goodput.spend("evaluation"):
            metrics = self._evaluate(state)
        if metrics:
            self._log(step, metrics)
        else:
            log.warning("step %d  no evaluation: no held-out row has a token in the loss", step)
        self.clock.restart()
        return metrics

    @property
    def _batch_size(self) -> int:
        """Rows of a batch: as many as of a training microbatch of the longest rows."""
        return self.dataset.config.longest_batch[0] // self.config.gradient_accumulation

    def _batches(self, source: Source) -> Iterator[Batch]:
        return eval_batches(
            source,
            self.program.batch_sharding,
            batch_size=self._batch_size,
            limit=self.config.eval_batches * self.config.gradient_accumulation,
        )

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        """Return the metrics of the parameters, or of their moving average if there is one.

        `eval_loss` in nats per token and `eval_bits_per_byte` of text over all sources,
        `eval/SOURCE/...` of each, and `eval_activation/KIND`, the scale of activations.
        """
        metrics: dict[str, float] = {}
        totals, params = np.zeros(3), self.program.averaged(state)
        scales: list[dict[str, jax.Array]] = []
        for source in self.dataset.sources:
            sums = [self.program.eval_step(params, batch) for batch in self._batches(source)]
            nats, count = (sum(float(of_batch[n]) for of_batch in sums) for n in range(2))
            if not count:
                continue
            scales += [of_batch[2] for of_batch in sums]
            num_bytes = source.eval_bytes(len(sums) * self._batch_size)
            totals += nats, count, num_bytes
            metrics[f"eval/{source.name}/loss"] = nats / count
            if num_bytes:  # empty answers have ends in the loss, and no text
                metrics[f"eval/{source.name}/bits_per_byte"] = nats / math.log(2) / num_bytes
        if metrics:
            nats, count, num_bytes = totals
            metrics["eval_loss"] = nats / count
            if num_bytes:
                metrics["eval_bits_per_byte"] = nats / math.log(2) / num_bytes
            metrics |= activation_metrics(scales)
        return metrics

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        log.info(
            "step %d  eval loss %.4f nats%s, %.3f bits per byte",
            step,
            metrics["eval_loss"],
            self._losses_by_source(metrics),
            metrics.get("eval_bits_per_byte", math.nan),
        )

    def _losses_by_source(self, metrics: dict[str, float]) -> str:
        """Return " (SOURCE loss, ...)", or nothing for a single source."""
        sources = self.dataset.sources
        parts = [
            f"{source.name} {metrics[f'eval/{source.name}/loss']:.4f}"
            for source in sources
            if len(sources) > 1 and f"eval/{source.name}/loss" in metrics
        ]
        return f" ({', '.join(parts)})" if parts else ""


@dataclass
class PreferenceEvaluation(Evaluation):
    """Evaluates preference pairs: `eval_loss` per pair, `eval_accuracy` and `eval_margin`."""

    program: PreferenceProgram

    def _evaluate(self, state: TrainState) -> dict[str, float]:
        """Return the metrics over all pairs, and `eval/SOURCE/...` of those of each source."""
        program = self.program
        params = program.averaged(state)
        reference = program.with_trained(state.params, state.reference)
        metrics: dict[str, float] = {}
        all_sums: list[dict[str, Any]] = []
        for source in self.dataset.sources:
            sums = [
                program.preference_sums(params, reference, batch) for batch in self._batches(source)
            ]
            metrics |= _preference_means(sums, f"eval/{source.name}/")
            all_sums += sums
        return metrics | _preference_means(all_sums, "eval_")

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        log.info(
            "step %d  eval loss %.4f%s, accuracy %.1f%%, margin %.3f",
            step,
            metrics["eval_loss"],
            self._losses_by_source(metrics),
            100 * metrics["eval_accuracy"],
            metrics["eval_margin"],
        )


def _preference_means(sums: Sequence[dict[str, Any]], prefix: str) -> dict[str, float]:
    """Return means per pair from the sums of batches; empty if there is no pair."""
    names = {"loss": "loss", "accuracy": "dpo/accuracy", "margin": "dpo/margin", "pairs": "pairs"}
    total = {name: sum(float(one[key]) for one in sums) for name, key in names.items()}
    pairs = total.pop("pairs")
    return {f"{prefix}{name}": value / pairs for name, value in total.items()} if pairs else {}


def make_evaluation(
    program: Program,
    dataset: Dataset,
    config: TrainingConfig,
    goodput: Goodput,
    clock: StepClock,
) -> Evaluation:
    """Return the evaluation of the objective of a program."""
    if isinstance(program, PreferenceProgram):
        return PreferenceEvaluation(program, dataset, config, goodput, clock)
    return Evaluation(program, dataset, config, goodput, clock)


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
        """Return whether a sample follows this step, apart from that at the end of the run."""
        every, last_step = self.config.sample_every, self.config.steps
        return every is not None and step % every == 0 and step < last_step

    def run(self, step: int, state: TrainState) -> None:
        """Generate a sample, log it and write it as `sample`."""
        config = self.config
        if not config.sample_tokens:
            return
        with self.goodput.spend("evaluation", phase="sample"):
            text = self.generate(state.params, config.sample_prompt, config.sample_tokens)
        self.writers.write_text(step, "sample", text)
        place = "" if step == config.steps else f" at step {step}"
        ended = " (the model ended it at once)" if text == config.sample_prompt else ""
        log.info("sample%s%s:\n%s", place, ended, printable(text))
        self.clock.restart()
