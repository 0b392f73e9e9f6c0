"""Results of an evaluation, as lines of a table."""

from collections.abc import Iterator, Mapping
from typing import Any


def result_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield aligned lines with every metric of every task: task, metric, value, standard error.

    results: the entry `results` of lm-eval, metrics by `NAME,FILTER` for every task.
    """
    rows = [("task", "metric", "value", "stderr")]
    for task, metrics in results.items():
        for name, value in sorted(metrics.items()):
            metric, comma, how = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{how}")
            shown = metric if how == "none" else f"{metric} ({how})"
            rows.append((task, shown, _number(value), _number(error)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value in (None, "N/A") else str(value)
