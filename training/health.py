"""Expert load of mixture-of-experts layers: metrics, text bars, an image, warnings.

Everything is computed on the host from the arrays of one step, summed over devices.
Letters: N MoE layers, E experts, S steps.
  load_NE     assignments per expert, dropped ones included
  dropped_N   fraction of assignments dropped because of expert capacity
  entropy_N   mean entropy of the router probabilities, in nats
  bias_NE     router bias; absent if only a loss balances the load
  balance_N   balance loss
  z_N         router z-loss
`layers` are the indices of the N MoE layers in the model; dense layers lie between them.
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
# Image: maximum cells per side, and pixels per side of a cell.
_MAX_CELLS, _MIN_PIXELS, _MAX_PIXELS = 512, 8, 32
_WHITE, _BLUE, _RED = (np.array(rgb) for rgb in ((255, 255, 255), (0, 64, 192), (192, 0, 0)))
# Steps without a fault after which it is reported again, and steps between repeated reports.
_COOLDOWN_STEPS, _REPEAT_STEPS = 20, 100
_BALANCE_REMEDY = "raise model.moe.router_aux_loss_coef or model.moe.bias_update_speed"


class HealthLimits(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Limits of the expert load beyond which a warning is logged."""

    max_load: PositiveFloat = 4.0
    """Largest load of an expert over the mean load of its layer."""
    max_dropped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Largest fraction of dropped assignments of a layer."""
    max_dead: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Largest fraction of a layer's experts without a token."""


def load_metrics(arrays: Mapping[str, np.ndarray], layers: Sequence[int]) -> dict[str, float]:
    """Return the metrics `moe/...` over all layers and `moe/layer_03/...` of each layer.

    Over all layers: the maxima of load_max_over_mean and bias_range, the sum of dead_experts, the
    dropped fraction of all assignments, and means of the others.
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
    """Return a line of bars per layer, one bar per expert; of many layers the 8 least even.

    A bar of half height is the mean load, a full bar twice the mean or more, a dot no token. With
    more than `width` experts a bar is the maximum of several.
    """
    ratio_NE = _over_mean(load_NE)
    num_layers, num_experts = ratio_NE.shape
    worst_N = ratio_NE.max(-1)
    dead_N = (ratio_NE == 0).sum(-1)
    mark_NE = _grouped_max(ratio_NE, width, axis=1)
    mark_NE = np.where(
        mark_NE == 0, _DEAD_MARK, _MARKS[np.floor(4 * mark_NE.clip(0, 2) + 0.5).astype(int)]
    )
    notes = []
    if num_layers > _MAX_LINES:
        notes.append(f"the {_MAX_LINES} least even of {num_layers} layers")
    if num_experts > width:
        notes.append(f"a bar is the maximum of {math.ceil(num_experts / width)} experts")
    lines = [", ".join(notes)] if notes else []
    labels = _labels(layers, num_layers)
    digits = len(f"{worst_N.max():.2f}")
    for index in sorted(np.argsort(-worst_N, kind="stable")[:_MAX_LINES]):
        # The vertical lines keep an empty bar visible.
        lines.append(
            f"layer {labels[index]} |{''.join(mark_NE[index])}| "
            f"max/mean {worst_N[index]:{digits}.2f}  dead {dead_N[index]} of {num_experts}"
        )
    return lines


def heat_map(history: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
    """Return an image (height, width, 3), uint8, of loads `N E` or `S N E`; layers are rows.

    White is the mean load of a layer, blue a quarter of it or less, red four times or more, black
    no token. A cell has 8 to 32 pixels per side. With more than 512 experts or layers it is the
    maximum of several.
    """
    load_NE = np.asarray(history, np.float64)
    if load_NE.ndim == 3:
        load_NE = load_NE.sum(0)
    ratio_NE = _over_mean(load_NE)
    for axis in (0, 1):
        ratio_NE = _grouped_max(ratio_NE, _MAX_CELLS, axis)
    is_dead_NE = ratio_NE == 0
    # Logarithmic: half and twice the mean are equally far from white.
    shift_NE = np.clip(np.log2(np.where(is_dead_NE, 1, ratio_NE)) / 2, -1, 1)[..., None]
    colour = _WHITE + np.abs(shift_NE) * (np.where(shift_NE < 0, _BLUE, _RED) - _WHITE)
    colour[is_dead_NE] = 0
    pixels = int(np.clip(_MAX_CELLS // max(ratio_NE.shape), _MIN_PIXELS, _MAX_PIXELS))
    return colour.round().astype(np.uint8).repeat(pixels, axis=0).repeat(pixels, axis=1)


class HealthWatch:
    """Warns about layers beyond a limit, without a warning at every step.

    A fault is reported when it appears, every 100 steps while it lasts, and when it reappears after
    20 steps without it.
    """

    def __init__(self, layers: Sequence[int], limits: HealthLimits):
        self._layers, self._limits = layers, limits
        self._step = 0
        self._seen: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    def warnings(self, arrays: Mapping[str, np.ndarray]) -> list[str]:
        """Return the warnings after one more step, at most one per limit."""
        self._step += 1
        lines = []
        for limit, line in _faults(arrays, self._layers, self._limits).items():
            is_new = self._step - self._seen.get(limit, -math.inf) > _COOLDOWN_STEPS
            if is_new or self._step - self._reported[limit] >= _REPEAT_STEPS:
                self._reported[limit] = self._step
                lines.append(line)
            self._seen[limit] = self._step
        return lines


class ExpertHealth:
    """Reports the load of experts: metrics of every step, warnings, bars and an image at times."""

    def __init__(
        self,
        is_sparse: Sequence[bool],
        limits: HealthLimits,
        log_every: int,
        last_step: int,
        writers: MetricsWriter,
    ):
        self._layers = [n for n, sparse in enumerate(is_sparse) if sparse]
        self._log_every, self._last_step = log_every, last_step
        self._writers, self._watch = writers, HealthWatch(self._layers, limits)

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
        return load_metrics(arrays, self._layers)


def _faults(
    arrays: Mapping[str, np.ndarray], layers: Sequence[int], limits: HealthLimits
) -> dict[str, str]:
    """Return, for each limit that a layer exceeds, a line with the worst layer and a remedy."""
    load_NE = arrays["load_NE"]
    # A step without tokens says nothing about the router.
    dead_N = np.where(load_NE.any(-1), (load_NE == 0).mean(-1), 0.0)
    checks = (
        (
            "max_load",
            _over_mean(load_NE).max(-1),
            "largest over mean expert load",
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
                f"layer {label}: {meaning} is {value_N[worst]:.4g}, above "
                f"training.health.{name}={limit:g} (worst of {count} such layers among "
                f"{len(layers)} MoE layers); {remedy}"
            )
    return faults


def _labels(layers: Sequence[int], num_layers: int) -> list[str]:
    """Return layer indices with leading zeros, so that names sort as numbers do."""
    assert len(layers) == num_layers, f"{len(layers)} numbers for {num_layers} layers"
    digits = len(str(max(layers)))
    return [f"{layer:0{digits}}" for layer in layers]


def _over_mean(load_NE: np.ndarray) -> np.ndarray:
    """Return load over the mean of the layer, float64; 0 in a layer without assignments."""
    load_NE = load_NE.astype(np.float64)
    mean_N1 = load_NE.mean(-1, keepdims=True)
    return np.divide(load_NE, mean_N1, out=np.zeros_like(load_NE), where=mean_N1 > 0)


def _grouped_max(values: np.ndarray, most: int, axis: int) -> np.ndarray:
    """Return the maxima of equal groups of neighbours, at most `most` along the axis."""
    length = values.shape[axis]
    return np.maximum.reduceat(values, np.arange(0, length, math.ceil(length / most)), axis)
