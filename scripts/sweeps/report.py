"""The result of a sweep: a table sorted by the metric, as Markdown and JSON, and a plot."""

import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_files import replace_file
from sweeps.processes import State
from sweeps.trials import Objective, Result, Trial, columns

TABLE, RECORD, PLOT = "sweep.md", "sweep.json", "sweep.png"
_MAX_LEGEND = 8  # trials that the legend of the curves names


@dataclass(frozen=True)
class Row:
    """A trial with its state and result."""

    trial: Trial
    state: State
    result: Result


def ranked(rows: Sequence[Row], objective: Objective) -> list[Row]:
    """Return the rows, those with the best metric first and those without one last."""
    sign = -1 if objective.higher_is_better else 1

    def key(row: Row) -> tuple[bool, float]:
        best = row.result.best
        return best is None, 0.0 if best is None else sign * best

    return sorted(rows, key=key)


def describe(result: Result, objective: Objective) -> str:
    """Return one line about a trial: metric, step, tokens per second and time."""
    if result.best is None or result.best_step is None:
        return f"no {objective.metric} after {result.steps} steps"
    return (
        f"{objective.metric} {result.best:.4f} at step {result.best_step} of {result.steps}, "
        f"{result.tokens_per_second or 0:,.0f} tok/s, {result.seconds:,.0f} s"
    )


def table_lines(rows: Sequence[Row], varied: Sequence[str], objective: Objective) -> list[str]:
    """Return the lines of a Markdown table whose columns are aligned."""
    head = [*columns(varied), objective.metric, "best step", "steps", "tokens/s", "time (s)"]
    cells = [[*head, "state"], *(_cells(row, varied) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first, *rest = (
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in cells
    )
    return [first, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *rest]


def _cells(row: Row, varied: Sequence[str]) -> list[str]:
    result = row.result
    numbers = (result.best, result.best_step, result.steps, result.tokens_per_second)
    shown = [
        "" if value is None else form.format(value)
        for value, form in zip(numbers, ("{:.4f}", "{}", "{}", "{:,.0f}"), strict=True)
    ]
    values = [row.trial.varied[key].replace("|", "\\|") for key in varied]
    return [*values, *shown, f"{result.seconds:,.0f}", row.state]


def check_varied(directory: Path, varied: Sequence[str]) -> None:
    """Check that the directory has no sweep over other keys; the new tables would lack its trials.

    Raises: ValueError.
    """
    try:
        before = json.loads((directory / RECORD).read_bytes())["trials"][0]["varied"]
    except (OSError, ValueError, LookupError):
        return
    if before.keys() != {*varied}:
        raise ValueError(
            f"--dir {directory} has a sweep over {', '.join(before) or 'no key'}, and this one is "
            f"over {', '.join(varied) or 'no key'}; give another --dir"
        )


def write_tables(
    directory: Path, rows: Sequence[Row], varied: Sequence[str], objective: Objective
) -> None:
    """Write the ranked rows as `sweep.md` and `sweep.json`."""
    order = "highest" if objective.higher_is_better else "lowest"
    head = [f"# Sweep by {objective.metric}", "", f"The {order} value is the first.", ""]
    lines = [*head, *table_lines(rows, varied, objective), ""]
    replace_file(directory / TABLE, "\n".join(lines))
    record = {
        "metric": objective.metric,
        "higher_is_better": objective.higher_is_better,
        "trials": [_as_json(row) for row in rows],
    }
    replace_file(directory / RECORD, json.dumps(record, indent=1) + "\n")


def _as_json(row: Row) -> dict[str, Any]:
    trial, result = row.trial, row.result
    return {
        "name": trial.name,
        "directory": str(trial.directory),
        "overrides": list(trial.overrides),
        "varied": trial.varied,
        "state": row.state,
        "best": result.best,
        "best_step": result.best_step,
        "steps": result.steps,
        "tokens_per_second": result.tokens_per_second,
        "seconds": result.seconds,
    }


def plot(directory: Path, rows: Sequence[Row], varied: Sequence[str], objective: Objective) -> str:
    """Write `sweep.png`, and return a line about it.

    One panel has the metric of every trial by step, and one for each key has the best metric by its
    value.
    """
    measured = [row for row in rows if row.result.best is not None]
    if not measured:
        return "no plot: no trial has been evaluated"
    try:
        backends = importlib.import_module("matplotlib.backends.backend_agg")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return "no plot: pip install matplotlib, and run the same command again"
    count = 1 + len(varied)
    width = min(3, count)
    figure = figures.Figure((5 * width, 4 * math.ceil(count / width)), layout="constrained")
    axes = figure.subplots(math.ceil(count / width), width, squeeze=False).ravel()
    _plot_curves(axes[0], measured, objective)
    for axis, key, column in zip(axes[1:], varied, columns(varied), strict=False):
        _plot_key(axis, measured, key)
        axis.set(xlabel=column, ylabel=f"best {objective.metric}")
    for axis in axes[count:]:
        axis.set_axis_off()
    path = directory / PLOT
    backends.FigureCanvasAgg(figure).print_png(str(path))
    return f"{path} written"


def _plot_curves(axis: Any, rows: Sequence[Row], objective: Objective) -> None:
    """Draw the metric of every trial by step; the best trial is the thick line."""
    for place, row in enumerate(rows):
        steps, values = zip(*row.result.by_step.items(), strict=True)
        label = row.trial.name if place < _MAX_LEGEND else None
        axis.plot(steps, values, marker=".", linewidth=2.5 if place == 0 else 1, label=label)
    axis.set(xlabel="step", ylabel=objective.metric)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="x-small")


def _plot_key(axis: Any, rows: Sequence[Row], key: str) -> None:
    """Draw the best metric by the value of a key; the best trial is the large dot."""
    texts = [row.trial.varied[key] for row in rows]
    numbers = _as_numbers(texts)
    sizes = [80 if place == 0 else 25 for place in range(len(rows))]
    axis.scatter(numbers or texts, [row.result.best for row in rows], sizes)
    if numbers and min(numbers) > 0 and max(numbers) >= 10 * min(numbers):
        axis.set_xscale("log")
    axis.grid(alpha=0.3)


def _as_numbers(texts: Sequence[str]) -> list[float]:
    """Return the numbers that the texts spell; empty if one spells none."""
    try:
        return [float(text) for text in texts]
    except ValueError:
        return []
