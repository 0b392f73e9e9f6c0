"""The figures of a report as JSON values: curves, axes, marks and expert loads of every run."""

import base64
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from reporting.curves import SMOOTHING, reduce_series, spread
from reporting.event_files import read_images
from reporting.run_record import RunRecord, Series
from training.goodput import Goodput
from training.writers.groups import grouped_name

MAIN_INTERVALS = 500
"""Intervals of the curves that matter most; a curve has two points per interval."""
_MAIN = ("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second")
_POINTS, _FEWEST, _MOST = 40_000, 60, 250  # intervals of all other curves together, and of one
_AXIS_POINTS, _HEAT_COLUMNS, _MARKS, _IMAGES, _IMAGE_BYTES = 300, 120, 100, 12, 600_000
_LAYER = re.compile(r"moe/layer_(\d+)/(\w+)")
_GOODPUT = "goodput/"


def figures(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the figures of all runs: JSON values, of a size that does not grow with the steps."""
    num_others = sum(len(curve_names(run)) for run in runs) or 1
    others = int(np.clip(_POINTS // num_others, _FEWEST, _MOST))
    return {"smoothing": SMOOTHING, "runs": [_figures_of(run, others) for run in runs]}


def curve_names(run: RunRecord) -> list[str]:
    """Return the metrics that are drawn as curves; those by layer are heat maps."""
    return [
        name for name in run.metrics if not _LAYER.match(name) and not name.startswith(_GOODPUT)
    ]


def _figures_of(run: RunRecord, others: int) -> dict[str, Any]:
    curves = {
        name: curve(run.metrics[name], MAIN_INTERVALS if name in _MAIN else others)
        for name in curve_names(run)
    }
    steps = run.metrics["loss"].steps if "loss" in run.metrics else np.zeros(1, int)
    return {
        "name": run.name,
        "firstStep": int(steps[0]),
        "lastStep": run.last_step,
        "curves": curves,
        "axes": axes(run),
        "marks": marks(run),
        "heat": heat_maps(run),
        "images": load_images(run),
    }


def curve(series: Series, intervals: int) -> list[list[Any]]:
    """Return the lists [steps, values], followed by [steps, means] if the curve was reduced."""
    reduced = reduce_series(series, intervals)
    parts = [reduced.points]
    if reduced.means is not reduced.points:
        parts.append(reduced.means)
    return [column for part in parts for column in (part.steps.tolist(), _numbers(part.values))]


def _numbers(values: np.ndarray, digits: int = 8) -> list[float | int | None]:
    """Return values with `digits` significant digits; None for those that are not finite."""
    shown = [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]
    return [int(x) if x is not None and x == int(x) and abs(x) < 1e15 else x for x in shown]


def axes(run: RunRecord) -> dict[str, list[Any]]:
    """Return the tokens and the hours of steps up to some steps, which the page interpolates."""
    speed, time = run.metrics.get("tokens_per_second"), run.metrics.get("step_time")
    if speed is None or time is None or not np.array_equal(speed.steps, time.steps):
        return {"step": [], "tokens": [], "hours": []}
    seconds = np.nan_to_num(time.values)
    totals = np.cumsum(np.nan_to_num(speed.values) * seconds), np.cumsum(seconds) / 3600
    kept = spread(range(len(seconds)), _AXIS_POINTS)
    tokens, hours = (_numbers(total[kept]) for total in totals)
    return {"step": time.steps[kept].tolist(), "tokens": tokens, "hours": hours}


def marks(run: RunRecord) -> list[dict[str, Any]]:
    """Return restarts, rollbacks, spikes and skipped steps, of each kind at most 100."""
    skipped = run.skipped_steps()
    spikes = np.setdiff1d(run.spikes(), skipped)
    found = [("skipped", int(step), f"step {step}: the update was skipped") for step in skipped]
    found += [("spike", int(step), f"step {step}: a loss or gradient spike") for step in spikes]
    for event in run.log.events:
        if event.kind in ("restart", "rollback") and event.step is not None:
            found.append((event.kind, event.step, f"{event.time} {event.text}"))
    chosen = []
    for kind in dict.fromkeys(kind for kind, _, _ in found):
        some = [mark for mark in found if mark[0] == kind]
        chosen += [some[n] for n in spread(range(len(some)), _MARKS)]
    return [{"kind": kind, "step": step, "text": text} for kind, step, text in chosen]


def heat_maps(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return the metrics of sparse layers as matrices, layers by columns of steps.

    A value is the largest of its column of steps; None if there is none that is finite.
    """
    by_metric: dict[str, dict[str, Series]] = {}
    for name, series in run.metrics.items():
        if found := _LAYER.match(name):
            by_metric.setdefault(found[2], {})[found[1]] = series
    maps = {}
    for metric, layers in by_metric.items():
        steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
        edges = np.unique(np.linspace(0, len(steps), _HEAT_COLUMNS + 1).astype(int))[:-1]
        rows = [
            _numbers(_column_maxima(layers[label], steps, edges), 4) for label in sorted(layers)
        ]
        maps[metric] = {"steps": steps[edges].tolist(), "layers": sorted(layers), "values": rows}
    return maps


def _column_maxima(series: Series, steps: np.ndarray, edges: np.ndarray) -> np.ndarray:
    values = np.full(len(steps), -np.inf)
    values[np.searchsorted(steps, series.steps)] = np.nan_to_num(series.values, nan=-np.inf)
    return np.maximum.reduceat(values, edges)


def load_images(run: RunRecord) -> list[list[Any]]:
    """Return [step, data URL] of images of the load of every expert, from the event files."""
    images = read_images(run.directory / "tensorboard", "moe/load")
    if not images:
        return []
    largest = max(map(len, images.values()))
    steps = spread(list(images), max(1, min(_IMAGES, _IMAGE_BYTES // largest)))
    return [
        [step, f"data:image/png;base64,{base64.b64encode(images[step]).decode()}"] for step in steps
    ]


def goodput_of(run: RunRecord) -> dict[str, float]:
    """Return the seconds by label up to the end of the run, or to its last line if that is later.

    Empty if neither `goodput.json` nor a line has them.
    """
    of_last_line = {
        name.removeprefix(_GOODPUT): series.last
        for name, series in run.metrics.items()
        if name.startswith(_GOODPUT)
    }
    return max(Goodput.saved_in(run.directory), of_last_line, key=lambda x: sum(x.values()))


def group_of(name: str) -> str:
    """Return the group of a metric, such as train."""
    return grouped_name(name).partition("/")[0]
