"""Early stopping: end a run when a metric of its evaluations no longer improves."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt

from parallel.cluster.process_group import ProcessGroup
from training.logs import log

Mode = Literal["auto", "min", "max"]
# Metrics of an evaluation, by the objective of the run.
_METRICS = {"sft": ("loss", "bits_per_byte"), "dpo": ("loss", "accuracy", "margin")}
_HIGHER_IS_BETTER = ("accuracy", "margin")


class EarlyStopConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """When a run ends before its last step because an evaluation metric no longer improves."""

    patience: PositiveInt | None = None
    """Evaluations in a row without an improvement after which the run saves and ends; null: train
    to the last step."""
    metric: str = Field(default="eval_loss", min_length=1)
    """Metric of an evaluation: eval_loss, eval_bits_per_byte, or of one source, such as
    eval/NAME/loss; with objective=dpo also eval_accuracy and eval_margin."""
    min_delta: NonNegativeFloat = 0.0
    """An improvement is more than this better than the best value so far."""
    mode: Mode = "auto"
    """min: lower is better; max: higher is better; auto: max for accuracy and margin, else min."""


def evaluation_metrics(objective: str, sources: Iterable[str]) -> list[str]:
    """Return the metrics of an evaluation of these sources; empty without a source."""
    names = _METRICS[objective]
    by_source = [f"eval/{source}/{name}" for source in sources for name in names]
    return [*(f"eval_{name}" for name in names), *by_source] if by_source else []


def higher_is_better(metric: str, mode: Mode = "auto") -> bool:
    """Return whether a larger value of an evaluation metric is the better one."""
    return mode == "max" or (mode == "auto" and metric.endswith(_HIGHER_IS_BETTER))


def check_metric(key: str, metric: str, known: Iterable[str]) -> None:
    """Raise ValueError unless a metric is one of the evaluation; key: the text before its name."""
    if not (names := list(known)):
        raise ValueError(
            f"{key}{metric} needs an evaluation, and there is no held-out split; raise "
            "data.eval_fraction, or give eval_files"
        )
    if metric not in names:
        raise ValueError(f"{key}{metric}: unknown metric; use one of {', '.join(names)}")


def check_early_stop(config: EarlyStopConfig, metrics: Iterable[str]) -> None:
    """Check the configuration; metrics: those of an evaluation. Raises: ValueError."""
    if config.patience is not None:
        check_metric("training.early_stop.metric=", config.metric, metrics)
        return
    for name, value in config:
        if value != type(config).model_fields[name].default:
            raise ValueError(
                f"training.early_stop.{name}={value} has no effect without a patience; set "
                f"training.early_stop.patience, or remove training.early_stop.{name}"
            )


@dataclass(frozen=True)
class _Progress:
    """Evaluations so far; JSON values, in the record of every checkpoint."""

    metric: str
    higher_is_better: bool
    step: int = 0
    """Step of the last evaluation."""
    best: float | None = None
    best_step: int = 0
    num_worse: int = 0
    """Evaluations since the best one."""

    @property
    def label(self) -> str:
        """The metric and its direction, for log lines."""
        return f"{self.metric} ({'higher' if self.higher_is_better else 'lower'} is better)"

    def is_of(self, config: EarlyStopConfig) -> bool:
        """Return whether the evaluations were compared by the metric and mode of a config."""
        wanted = config.metric, higher_is_better(config.metric, config.mode)
        return (self.metric, self.higher_is_better) == wanted

    def has_ended(self, config: EarlyStopConfig) -> bool:
        """Return whether the run ends with the last evaluation."""
        return config.patience is not None and self.num_worse >= config.patience


def has_ended(config: EarlyStopConfig, record: Mapping[str, Any]) -> bool:
    """Return whether a run ends with the checkpoint of a record; see `EarlyStopping.record`."""
    if not record:
        return False
    saved = _Progress(**record)
    return saved.is_of(config) and saved.has_ended(config)


class EarlyStopping:
    """Counts the evaluations since the best one. All processes count the values of process 0."""

    def __init__(self, config: EarlyStopConfig, group: ProcessGroup):
        self._config, self._group = config, group
        self._higher_is_better = higher_is_better(config.metric, config.mode)
        self._progress = self._fresh()

    def _fresh(self) -> _Progress:
        return _Progress(self._config.metric, self._higher_is_better)

    def begin(self, record: Mapping[str, Any]) -> None:
        """Continue after a checkpoint. record: see `record`; empty for a fresh run."""
        self._progress = self._fresh()
        if self._config.patience is None or not record:
            return
        saved = _Progress(**record)
        if saved.is_of(self._config):
            self._progress = saved
        else:
            log.info(
                "early stopping counts from 0 again: its metric is now %s; until step %d it was %s",
                self._progress.label,
                saved.step,
                saved.label,
            )

    @property
    def record(self) -> dict[str, Any]:
        """The evaluations so far, for the record of a checkpoint; empty if there are none."""
        return asdict(self._progress) if self._progress.step else {}

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends, None while it goes on."""
        return self._progress.step if self._progress.has_ended(self._config) else None

    @property
    def reason(self) -> str:
        """Why the run ends, and its best step."""
        now, delta = self._progress, self._config.min_delta
        best = "no value was finite" if now.best is None else f"best {now.best:.6g}"
        return (
            f"early stopping after step {now.step}: {now.metric} has not improved"
            f"{f' by more than {delta:g}' if delta else ''} for {now.num_worse} "
            f"evaluation{'s' if now.num_worse > 1 else ''}; {best}"
            f"{'' if now.best is None else f' at step {now.best_step}'}"
        )

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the evaluation of a step, and log a line if the run ends with it.

        Communication: process 0 broadcasts its value.
        """
        if self._config.patience is None:
            return
        name, before = self._config.metric, self._progress
        value = self._group.broadcast("early stopping", lambda: metrics.get(name))
        if value is None:
            log.warning(
                "step %d: %s was not measured, so early stopping does not count this evaluation; "
                "raise training.eval_batches",
                step,
                name,
            )
            return
        is_best = self._is_improvement(value)
        self._progress = _Progress(
            name,
            self._higher_is_better,
            step,
            value if is_best else before.best,
            step if is_best else before.best_step,
            0 if is_best else before.num_worse + 1,
        )
        if self.last_step is not None:
            log.info("%s", self.reason)

    def _is_improvement(self, value: float) -> bool:
        best = self._progress.best
        if best is None or not math.isfinite(value):
            return math.isfinite(value)
        gain = value - best if self._higher_is_better else best - value
        return gain > self._config.min_delta
