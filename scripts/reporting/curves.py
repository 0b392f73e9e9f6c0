"""Curves of a bounded number of points, which keep the extremes of a long run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reporting.run_record import Series

# Smoothing averages over this fraction of the steps of the longest run, to both sides.
SMOOTHING = 0.01


@dataclass(frozen=True)
class Curve:
    """A metric as it is drawn.

    points: of every interval of steps the smallest and the largest value, in their order; all
        values if there are few. A value that is not finite is NaN.
    means: means over the same intervals, from which the smoothed curve is computed.
    """

    points: Series
    means: Series


def reduce_series(series: Series, intervals: int) -> Curve:
    """Return the curve of a metric, with at most 2 `intervals` + 2 points."""
    values = np.where(np.isfinite(series.values), series.values, np.nan)
    count = len(values)
    if count <= 2 * intervals:
        curve = Series(series.steps, values)
        return Curve(curve, curve)
    edges = np.linspace(0, count, intervals + 1).astype(int)
    owner = np.repeat(np.arange(intervals), np.diff(edges))
    is_finite = np.isfinite(values)
    num_finite = np.bincount(owner, is_finite, intervals)
    totals = np.bincount(owner, np.where(is_finite, values, 0.0), intervals)
    with np.errstate(invalid="ignore"):
        means = totals / num_finite  # NaN for an interval without a finite value
    centres = series.steps[(edges[:-1] + edges[1:]) // 2]
    # The extremes of an interval are the ends of its part of the sorted order; NaN sort last.
    order = np.lexsort((values, owner))
    lowest = order[edges[:-1]]
    highest = order[edges[:-1] + np.maximum(num_finite.astype(int) - 1, 0)]
    kept = np.unique(np.concatenate([[0, count - 1], lowest, highest]))
    return Curve(Series(series.steps[kept], values[kept]), Series(centres, means))


def smooth(series: Series, width: float) -> Series:
    """Return the series averaged with weights exp(-distance / width), both in steps.

    The average looks to both sides, so that it does not lag behind a falling loss. The page
    computes the same (`smooth` in report.js).
    """
    finite = series.finite()
    steps, values = finite.steps, finite.values
    if len(steps) < 3 or width <= 0:
        return finite
    decay = np.exp(-np.diff(steps) / width)
    total, weight = _sums(values, decay)
    back_total, back_weight = (part[::-1] for part in _sums(values[::-1], decay[::-1]))
    return Series(steps, (total + back_total - values) / (weight + back_weight - 1.0))


def _sums(values: np.ndarray, decay: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the decaying sums, up to each value, of the values and of their weights."""
    total, weight = values.copy(), np.ones(len(values))
    for n in range(1, len(values)):
        total[n] += decay[n - 1] * total[n - 1]
        weight[n] += decay[n - 1] * weight[n - 1]
    return total, weight


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of ascending steps, evenly spread, with the first and the last."""
    if len(steps) <= most or most < 2:
        return list(steps)[-most:]
    return [steps[round(n * (len(steps) - 1) / (most - 1))] for n in range(most)]
