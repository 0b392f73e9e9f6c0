"""How well the experts of a mixture are used: numbers, a strip of text, an image, warnings.

Reads what one step told of its MoE layers, on the host; knows no model, no mesh and no device.
Letters: N MoE layers, E experts, S steps. The arrays of a step are summed over devices:
  load_NE     assignments per expert, those that capacity dropped included
  dropped_N   fraction of the assignments that capacity dropped
  entropy_N   mean entropy of the router's probabilities, in nats
  bias_NE     the router's bias; absent where balance is kept by a loss alone
  balance_N   balance loss
  z_N         router z-loss
`layers` are the true numbers of the N layers: dense layers between them have none of the above.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, PositiveFloat

from training.logs import log
from training.writers.registry import MetricsWriter

_MARKS = np.array(list(" ▁▂▃▄▅▆▇█"))
_DEAD_MARK = "·"
_MAX_LINES = 8
# Of the image: cells a side, and pixels a side of a cell.
_MAX_CELLS, _MIN_PIXELS, _MAX_PIXELS = 512, 8, 32
_WHITE, _BLUE, _RED = (np.array(rgb) for rgb in ((255, 255, 255), (0, 64, 192), (192, 0, 0)))
# Steps without a fault after which it is news again, and steps after which it is said anyway.
_WELL_STEPS, _REPEAT_STEPS = 20, 100
_BALANCE_REMEDY = "raise model.moe.router_aux_loss_coef or model.moe.bias_update_speed"


class HealthLimits(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """From when on the experts of a layer are worth a warning."""

    max_load: PositiveFloat = 4.0
    """Load of a layer's fullest expert, over the mean of its experts."""
    max_dropped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Fraction of a layer's assignments that capacity drops."""
    max_dead: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Fraction of a layer's experts without a token."""


def expert_metrics(arrays: Mapping[str, np.ndarray], layers: Sequence[int]) -> dict[str, float]:
    """Scalars of one step, `moe/...` over all layers and `moe/layer_03/...` of each.

    Overall: the worst layer's load_max_over_mean and bias_range, all dead_experts, the fraction
    dropped of all assignments, means of the rest. A layer without assignments has load 0 and
    only dead experts.
    """
    load_NE = arrays["load_NE"].astype(np.float64)
    by_layer = {
        "load_max_over_mean": _over_mean(load_NE).max(-1),
        "dead_experts": (load_NE == 0).sum(-1),
        "entropy": arrays["entropy_N"].astype(np.float64),
        "dropped": arrays["dropped_N"].astype(np.float64),
    }
    total_N = load_NE.sum(-1)
    overall = {
        "load_max_over_mean": by_layer["load_max_over_mean"].max(),
        "dead_experts": by_layer["dead_experts"].sum(),
        "entropy": by_layer["entropy"].mean(),
        "dropped": by_layer["dropped"] @ total_N / max(total_N.sum(), 1.0),
        "balance_loss": arrays["balance_N"].mean(dtype=np.float64),
        "z_loss": arrays["z_N"].mean(dtype=np.float64),
    }
    if "bias_NE" in arrays:
        by_layer["bias_range"] = np.ptp(arrays["bias_NE"].astype(np.float64), axis=-1)
        overall["bias_range"] = by_layer["bias_range"].max()
    metrics = {f"moe/{name}": float(value) for name, value in overall.items()}
    for index, label in enumerate(_labels(layers, len(load_NE))):
        for name, value_N in by_layer.items():
            metrics[f"moe/layer_{label}/{name}"] = float(value_N[index])
    return metrics


def heat_strip(load_NE: np.ndarray, layers: Sequence[int], width: int = 64) -> list[str]:
    """Lines of text, one per layer (the 8 least even ones, if there are more), a mark per expert.

    The height of a mark is load / mean: half of the line is the mean, all of it twice the mean or
    more; a dot is an expert without a token. More than `width` experts share marks.
    """
    ratio_NE = _over_mean(load_NE)
    num_layers, num_experts = ratio_NE.shape
    worst_N = ratio_NE.max(-1)
    dead_N = (ratio_NE == 0).sum(-1)
    mark_NE = _fullest(ratio_NE, width, axis=1)
    mark_NE = np.where(
        mark_NE == 0, _DEAD_MARK, _MARKS[np.floor(4 * mark_NE.clip(0, 2) + 0.5).astype(int)]
    )
    notes = []
    if num_layers > _MAX_LINES:
        notes.append(f"{_MAX_LINES} of {num_layers} layers, the least even")
    if num_experts > width:
        notes.append(f"a mark is the fullest of {math.ceil(num_experts / width)} experts")
    lines = [", ".join(notes)] if notes else []
    labels = _labels(layers, num_layers)
    digits = len(f"{worst_N.max():.2f}")
    for index in sorted(np.argsort(-worst_N, kind="stable")[:_MAX_LINES]):
        # The bars keep a mark of no height visible.
        lines.append(
            f"layer {labels[index]} |{''.join(mark_NE[index])}| "
            f"max/mean {worst_N[index]:{digits}.2f}  dead {dead_N[index]} of {num_experts}"
        )
    return lines


def heat_map(history: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
    """Loads `N E`, or `S N E` to be summed -> image (height, width, 3), uint8, layers in rows.

    White is the mean of a layer's experts, blue a quarter of it or less, red four times or more,
    black no token. A cell has 8 to 32 pixels a side and stands for the fullest of several experts
    (or layers) if there are more than 512.
    """
    load_NE = np.asarray(history, np.float64)
    if load_NE.ndim == 3:
        load_NE = load_NE.sum(0)
    ratio_NE = _over_mean(load_NE)
    for axis in (0, 1):
        ratio_NE = _fullest(ratio_NE, _MAX_CELLS, axis)
    is_dead_NE = ratio_NE == 0
    # Logarithmic: half and twice the mean are equally far from white.
    shift_NE = np.clip(np.log2(np.where(is_dead_NE, 1, ratio_NE)) / 2, -1, 1)[..., None]
    colour = _WHITE + np.abs(shift_NE) * (np.where(shift_NE < 0, _BLUE, _RED) - _WHITE)
    colour[is_dead_NE] = 0
    pixels = int(np.clip(_MAX_CELLS // max(ratio_NE.shape), _MIN_PIXELS, _MAX_PIXELS))
    return colour.round().astype(np.uint8).repeat(pixels, axis=0).repeat(pixels, axis=1)


class HealthWatch:
    """Finds layers whose experts are unwell, and does not repeat itself every step.

    A fault is told when it appears, again after 100 steps if it lasts, and when it comes back
    after 20 steps without it.
    """

    def __init__(self, layers: Sequence[int], limits: HealthLimits):
        self._layers, self._limits = layers, limits
        self._step = 0
        self._seen: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def warnings(self, arrays: Mapping[str, np.ndarray]) -> list[str]:
        """What there is to say after one more step; at most one line per limit."""
        self._step += 1
        lines = []
        for limit, line in _faults(arrays, self._layers, self._limits).items():
            is_news = self._step - self._seen.get(limit, -math.inf) > _WELL_STEPS
            if is_news or self._step - self._told[limit] >= _REPEAT_STEPS:
                self._told[limit] = self._step
                lines.append(line)
            self._seen[limit] = self._step
        return lines


class ExpertHealth:
    """Reports the load of experts: metrics of every step, warnings, bars and an image at times."""

    def __init__(
        self,
        layers: Sequence[int],
        limits: HealthLimits,
        *,
        log_every: int,
        last_step: int,
        writers: MetricsWriter,
    ):
        self._layers, self._log_every, self._last_step = layers, log_every, last_step
        self._writers, self._watch = writers, HealthWatch(layers, limits)

    def report(
        self, step: int, arrays: Mapping[str, np.ndarray], *, show: bool = False
    ) -> dict[str, float]:
        """Log warnings and, if due or `show`, the load of every expert; return the metrics."""
        for line in self._watch.warnings(arrays):
            log.warning("%s", line)
        if show or step % self._log_every == 0 or step == self._last_step:
            for line in heat_strip(arrays["load_NE"], self._layers):
                log.info("%s", line)
            self._writers.write_image(step, "moe/load", heat_map(arrays["load_NE"]))
        return expert_metrics(arrays, self._layers)


def _faults(
    arrays: Mapping[str, np.ndarray], layers: Sequence[int], limits: HealthLimits
) -> dict[str, str]:
    """Name of each limit that a layer exceeds -> a line with the worst layer and a remedy."""
    load_NE = arrays["load_NE"]
    # A step without tokens says nothing about the router.
    dead_N = np.where(load_NE.any(-1), (load_NE == 0).mean(-1), 0.0)
    checks = (
        (
            "max_load",
            _over_mean(load_NE).max(-1),
            "max/mean load of its experts",
            _BALANCE_REMEDY,
        ),
        ("max_dead", dead_N, "fraction of experts without a token", _BALANCE_REMEDY),
        (
            "max_dropped",
            arrays["dropped_N"],
            "fraction of assignments dropped",
            "raise model.moe.capacity_factor",
        ),
    )
    faults = {}
    for name, value_N, meaning, remedy in checks:
        limit = getattr(limits, name)
        count = int((value_N > limit).sum())
        if count:
            worst = int(np.nanargmax(value_N))
            label = _labels(layers, len(load_NE))[worst]
            faults[name] = (
                f"layer {label}: {meaning} is {value_N[worst]:.4g}, more than "
                f"training.health.{name}={limit:g} (so in {count} of {len(layers)} MoE layers, "
                f"here most); {remedy}"
            )
    return faults


def _labels(layers: Sequence[int], num_layers: int) -> list[str]:
    """Layer numbers of one width, so that names sort as numbers do."""
    assert len(layers) == num_layers, f"{len(layers)} numbers for {num_layers} layers"
    digits = len(str(max(layers)))
    return [f"{layer:0{digits}}" for layer in layers]


def _over_mean(load_NE: np.ndarray) -> np.ndarray:
    """Load over the mean of the layer's experts, float64; 0 in a layer without assignments."""
    load_NE = load_NE.astype(np.float64)
    mean_N1 = load_NE.mean(-1, keepdims=True)
    return np.divide(load_NE, mean_N1, out=np.zeros_like(load_NE), where=mean_N1 > 0)


def _fullest(values: np.ndarray, most: int, axis: int) -> np.ndarray:
    """Maxima of equal runs of neighbours (the last may be shorter), so that `most` suffice."""
    length = values.shape[axis]
    return np.maximum.reduceat(values, np.arange(0, length, math.ceil(length / most)), axis)
