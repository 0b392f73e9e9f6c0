"""Trials of a sweep: a run directory for every point, whether it is finished, and its result."""

import hashlib
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config, load_config
from parallel.cluster.process_group import ProcessGroup
from sweeps.space import Point, overrides_of
from training.checkpoint_record import CheckpointError, read_record, saved_steps
from training.dotted_keys import as_yaml, flatten
from training.early_stop import EarlyStopping, check_metric, evaluation_metrics, higher_is_better
from training.goodput import Goodput
from training.writers.jsonl import last_goodput, read_values

_MAX_NAME = 120


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    """Name of its run directory: the values that are varied."""
    directory: Path
    varied: Point
    overrides: tuple[str, ...]
    """All overrides of the configuration file, `run.dir` among them."""
    config: Config

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its last step, or an early stop."""
        folder, training = self.directory / "checkpoints", self.config.training
        if not (steps := saved_steps(folder)):
            return False
        try:
            record = read_record(folder / str(steps[-1]), steps[-1])
        except CheckpointError:  # the run itself sets a damaged checkpoint aside
            return False
        # A run that was stopped at its last step evaluates when it is started again, and saves no
        # checkpoint after that.
        if record["pending"] and steps[-1] not in read_values(
            self.directory / "metrics.jsonl", "eval_loss"
        ):
            return False
        early_stop = EarlyStopping(training.early_stop, ProcessGroup())
        early_stop.begin(record.get("early_stop", {}))
        return steps[-1] >= training.steps or early_stop.last_step is not None


@dataclass(frozen=True)
class Objective:
    """The metric by which trials are compared."""

    metric: str
    higher_is_better: bool


@dataclass(frozen=True)
class Result:
    """Measurements of a trial so far."""

    by_step: dict[int, float]
    """The metric at every evaluation."""
    best: float | None
    best_step: int | None
    steps: int
    """Steps that were trained."""
    tokens_per_second: float | None
    """Median over the steps."""
    seconds: float
    """Wall time, compilation and evaluations included."""


def make_trials(
    config: str, directory: Path, points: Sequence[Point], varied: Sequence[str], fixed: list[str]
) -> list[Trial]:
    """Return a trial for every point, with its configuration checked.

    varied: the keys that have several values. fixed: overrides of all trials.
    Raises: ValueError for the first configuration that is invalid or is not that of its directory.
    """
    keys = [*(override.partition("=")[0] for override in fixed), *(points[0] if points else ())]
    if "run.dir" in keys:
        raise ValueError("run.dir: every trial has a directory of its own, below --dir; remove it")
    trials: dict[str, Trial] = {}
    for point in points:
        values = {key: point[key] for key in varied}
        name = trial_name(values)
        path = directory / name
        # In JSON, which is YAML, any path is one string. YAML has no pairs of \u escapes.
        run_dir = json.dumps(str(path), ensure_ascii=False)
        overrides = (*fixed, *overrides_of(point), f"run.dir={run_dir}")
        try:
            trial = Trial(name, path, values, overrides, load_config(config, overrides))
            _check(trial)
        except ValueError as error:
            raise ValueError(f"trial {name}: {error}" if varied else str(error)) from error
        assert name not in trials, name
        trials[name] = trial
    return list(trials.values())


def trial_name(values: Point) -> str:
    """Return the name of the directory of a trial: `learning_rate=1e-3,hidden_size=128`."""
    pairs = zip(columns([*values]), values.values(), strict=True)
    parts = [f"{column}={text}" for column, text in pairs]
    exact = ",".join(parts) or "trial"
    name = re.sub(r"[^\w.,=+-]", "_", exact)
    if name == exact and len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(exact.encode()).hexdigest()[:8]
    return f"{name[:_MAX_NAME]}-{digest}"


def columns(keys: Sequence[str]) -> list[str]:
    """Return short names of configuration keys: the last part where that is unique."""
    leaves = [key.rpartition(".")[2] for key in keys]
    return [
        leaf if leaves.count(leaf) == 1 else key for leaf, key in zip(leaves, keys, strict=True)
    ]


def _check(trial: Trial) -> None:
    """Raise ValueError if a trial would not continue the run in its directory."""
    if (mode := trial.config.checkpoint.resume) != "auto":
        raise ValueError(
            f"checkpoint.resume={mode}: a sweep continues its trials; remove it, or give another "
            "--dir"
        )
    path = trial.directory / "config.yaml"
    if not path.is_file():
        return
    before, now = (_comparable(config) for config in (load_config(path), trial.config))
    if trial.config.mesh.auto_axis is not None:  # the run has stored its size on this machine
        before, now = ({k: v for k, v in x.items() if k[:5] != "mesh."} for x in (before, now))
    changed = [key for key in {**now, **before} if now.get(key) != before.get(key)]
    if changed:
        key = changed[0]
        raise ValueError(
            f"{path} has {key}={as_yaml(before.get(key))}, and this sweep asks for "
            f"{as_yaml(now.get(key))}; give another --dir"
        )


def _comparable(config: Config) -> dict[str, object]:
    return flatten(config.model_dump(exclude={"run"}))


def make_objective(metric: str, mode: str, trials: Sequence[Trial]) -> Objective:
    """Return the objective of a sweep. Raises: ValueError if a trial has no such metric.

    mode: min, max, or auto for what the metric is known for.
    """
    for trial in trials:
        training, data = trial.config.training, trial.config.data
        if "jsonl" not in training.writers:
            raise ValueError(
                f"training.writers={as_yaml(training.writers)}: a sweep reads its results from "
                "metrics.jsonl; add jsonl"
            )
        check_metric(
            "--metric ", metric, evaluation_metrics(training.objective, data.evaluated_sources)
        )
    known = {"auto": higher_is_better(metric), "min": False, "max": True}
    return Objective(metric, known[mode])


def read_result(trial: Trial, objective: Objective) -> Result:
    """Return what the metrics.jsonl of a trial says."""
    path = trial.directory / "metrics.jsonl"
    values, rates = read_values(path, objective.metric), read_values(path, "tokens_per_second")
    finite = {step: value for step, value in values.items() if abs(value) < float("inf")}
    best_step = None
    if finite:
        sign = -1 if objective.higher_is_better else 1
        best_step = min(finite, key=lambda step: (sign * finite[step], step))
    return Result(
        values,
        None if best_step is None else finite[best_step],
        best_step,
        max(rates, default=0),
        statistics.median(rates.values()) if rates else None,
        max(sum(x.values()) for x in (last_goodput(path), Goodput.saved_in(trial.directory))),
    )
