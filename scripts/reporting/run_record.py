"""A run directory as a report reads it: metrics, configuration, log and images of the expert load.

Only files are read, with whatever a killed, half-written or old run left in them.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML, YAMLError

from reporting.run_log import RunLog, read_log
from training.dotted_keys import flatten
from training.writers.jsonl import read_lines


@dataclass(frozen=True)
class Series:
    """Values of a metric at ascending steps, both 1-D arrays of one length."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def last(self) -> float:
        """The value of the last step."""
        return float(self.values[-1])

    def finite(self) -> "Series":
        """Return the series without NaN and infinities."""
        kept = np.isfinite(self.values)
        return Series(self.steps[kept], self.values[kept])


@dataclass(frozen=True)
class RunRecord:
    """The files of a run, read once."""

    directory: Path
    name: str
    """A name that no other run of the report has."""
    metrics: Mapping[str, Series]
    """By the names of `metrics.jsonl`; no series is empty."""
    config_text: str
    """`config.yaml`, or nothing if there is none."""
    log: RunLog

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration by dotted keys; empty if `config.yaml` is missing or damaged."""
        try:
            tree = YAML(typ="safe", pure=True).load(self.config_text)
        except YAMLError:
            return {}
        return flatten(tree) if isinstance(tree, dict) else {}

    @property
    def last_step(self) -> int:
        """The last step with metrics; 0 if there is none."""
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        """The last step that the configuration asks for, if it is known."""
        steps = self.config.get("training.steps")
        return steps if isinstance(steps, int) else None

    def skipped_steps(self) -> np.ndarray:
        """Return the steps whose update was skipped."""
        bad = self.metrics.get("bad_steps")
        return np.zeros(0, int) if bad is None else bad.steps[bad.values > 0]

    def spikes(self) -> np.ndarray:
        """Return the steps of which loss or gradient norm were beyond `training.guard.max_z`."""
        if self.config.get("training.guard.on_spike") == "off":
            return np.zeros(0, int)
        limit = self.config.get("training.guard.max_z", 6.0)
        deviations = [self.metrics[name] for name in ("loss_z", "grad_z") if name in self.metrics]
        found = [series.steps[series.values > limit] for series in deviations]
        return np.unique(np.concatenate([np.zeros(0, int), *found]))


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """Return the records of run directories, with distinct names.

    Raises: ValueError for a directory that is no run, or that is given twice; OSError.
    """
    for directory in directories:
        if not any((directory / name).is_file() for name in ("metrics.jsonl", "config.yaml")):
            what = "has no metrics.jsonl" if directory.is_dir() else "is no directory"
            raise ValueError(f"{directory} {what}; give a run directory of train.py")
    names = distinct_names([directory.resolve() for directory in directories])
    return [_read_run(*pair) for pair in zip(directories, names, strict=True)]


def _read_run(directory: Path, name: str) -> RunRecord:
    config = directory / "config.yaml"
    text = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    metrics = read_metrics(directory / "metrics.jsonl")
    return RunRecord(directory, name, metrics, text, read_log(directory / "log.txt"))


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as few as distinguish it from all others.

    Raises: ValueError if a path occurs twice.
    """
    if len(set(paths)) < len(paths):
        raise ValueError(f"{max(paths, key=paths.count)} is given twice; give every run once")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def read_metrics(path: Path) -> dict[str, Series]:
    """Return the numbers of a `metrics.jsonl` by name; of a step that occurs twice, the last."""
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for _, entry in read_lines(path):
        step = entry["step"]
        for name, value in entry.items():
            if name == "step" or not isinstance(value, int | float):
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = array("q"), array("d")
            column[0].append(step)
            column[1].append(value)
    return {name: _ascending(*column) for name, column in columns.items()}


def _ascending(steps: "array[int]", values: "array[float]") -> Series:
    steps_S, values_S = np.array(steps, np.int64), np.array(values, np.float64)
    if np.all(np.diff(steps_S) > 0):
        return Series(steps_S, values_S)
    unique, index = np.unique(steps_S[::-1], return_index=True)  # of equal ones the last
    return Series(unique, values_S[::-1][index])


def config_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """Return the keys whose values are not the same in all runs, with the value of every run.

    A run without the key has None, which is also the default of many new keys. The directory of a
    run is left out: it always differs.
    """
    known = [run.config for run in runs]
    keys = dict.fromkeys(key for config in known for key in config if key != "run.dir")
    rows = [(key, [config.get(key) for config in known]) for key in keys]
    return [(key, values) for key, values in rows if any(v != values[0] for v in values[1:])]
