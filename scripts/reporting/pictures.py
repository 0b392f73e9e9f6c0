"""The main charts of a report as PNG images, drawn with matplotlib."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reporting.curves import SMOOTHING, reduce_series, smooth
from reporting.figures import MAIN_INTERVALS, goodput_of
from reporting.run_record import RunRecord
from training.goodput import LABELS

# File name, title, and the metrics that share the chart.
_CHARTS = (
    ("loss", "loss (nats)", ("loss", "eval_loss")),
    ("grad_norm", "gradient norm", ("grad_norm",)),
    ("learning_rate", "learning rate", ("learning_rate",)),
    ("tokens_per_second", "tokens/s", ("tokens_per_second",)),
)
_COLOURS = "#2563eb #e8590c #2b8a3e #c2255c #7048e8 #0c8599 #a16207 #495057".split()
_USEFUL = "step"


def write_pictures(runs: Sequence[RunRecord], output: Path) -> list[Path]:
    """Write a PNG per main chart that has data, beside the report, and return their paths.

    Raises: OSError.
    """
    written = []
    for name, title, metrics in _CHARTS:
        if any(metric in run.metrics for run in runs for metric in metrics):
            figure, axis = _open_figure()
            _draw_curves(axis, runs, metrics)
            axis.set(xlabel="step", ylabel=title, yscale="log" if name == "grad_norm" else "linear")
            written.append(_save(figure, output, name))
    if any(goodput_of(run) for run in runs):
        figure, axis = _open_figure()
        _draw_goodput(axis, runs)
        written.append(_save(figure, output, "goodput"))
    return written


def _open_figure() -> tuple[Any, Any]:
    Figure = importlib.import_module("matplotlib.figure").Figure  # only this needs the extra
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def _save(figure: Any, output: Path, name: str) -> Path:
    path = output.with_name(f"{output.stem}_{name}.png")
    figure.savefig(path, dpi=120)
    return path


def _draw_curves(axis: Any, runs: Sequence[RunRecord], metrics: Sequence[str]) -> None:
    width = SMOOTHING * max(run.last_step for run in runs)
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        for metric in metrics:
            if metric not in run.metrics:
                continue
            curve = reduce_series(run.metrics[metric], MAIN_INTERVALS)
            points, smoothed = curve.points, smooth(curve.means, width)
            if metric.startswith("eval"):
                style = {"linestyle": "--", "marker": "o", "markersize": 3}
                axis.plot(
                    points.steps, points.values, color=colour, label=f"{run.name} eval", **style
                )
                continue
            axis.plot(points.steps, points.values, color=colour, alpha=0.25, linewidth=0.8)
            axis.plot(smoothed.steps, smoothed.values, color=colour, label=run.name)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)


def _draw_goodput(axis: Any, runs: Sequence[RunRecord]) -> None:
    labels = [_USEFUL, *(label for label in LABELS if label != _USEFUL)]
    shown = [run for run in runs if goodput_of(run)][::-1]
    starts = [0.0] * len(shown)
    for label in labels:
        shares = [
            100 * goodput_of(run).get(label, 0.0) / sum(goodput_of(run).values()) for run in shown
        ]
        axis.barh([run.name for run in shown], shares, left=starts, label=label.replace("_", " "))
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    axis.set(xlabel="share of the wall time (%)", xlim=(0, 100))
    axis.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
