"""Predict the step time on other numbers of chips, on paper, from one compiled step.

More chips of a slice go to fsdp (by formula if the compiled step has none); beyond the largest
slice, more slices go to dp. Compute is that of the compiled step. Weak scaling keeps the rows per
chip: activations and their collectives stay as they are, each chip updates fewer parameters. Strong
scaling keeps the global batch: compute and the collectives of activations shrink, those of weights
and gradients over fsdp do not, and less compute is left to hide them. Sums over dp shrink with the
shards in both. Sums between slices hide under the backward pass, two thirds of the compute, except
for those of one layer.
"""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp

from parallel.planning.device_groups import BETWEEN_SLICES
from parallel.planning.slices import GENERATIONS, Topology, read_topology
from planning.estimate import estimate, exposed_between_slices, slice_machine
from planning.step import StepPlan
from units import milliseconds

Mode = Literal["weak", "strong"]
_HOP_LATENCY = 1e-6  # seconds per hop, as in parallel/planning/collective_cost.py


@dataclass(frozen=True)
class Point:
    """The predicted step on one number of chips.

    Attributes:
        chips: Number of chips.
        rows: Global batch.
        mode: Whether the batch grows with the chips (weak) or stays (strong).
        seconds: Time of a step.
        exposed: The part of it that is exposed communication.
        tokens_per_second: Over all chips.
        mfu: FLOPs of the model as a share of the peak.
    """

    chips: int
    rows: int
    mode: Mode
    seconds: float
    exposed: float
    tokens_per_second: float
    mfu: float


def scale(plan: StepPlan, first: int, last: int) -> Iterator[Point]:
    """Yield the predicted step on n, 2n, 4n, ... chips from `first` to `last`.

    n is the number of chips of the compiled plan. Each has a step whose batch grows with the chips
    (weak scaling) and, while there is a row for every device, one with the same batch (strong).

    Raises:
        ValueError: None of these numbers is between `first` and `last`.
    """
    base = plan.topology.num_chips
    factors = []
    factor = 1
    while base * factor <= last:
        if base * factor >= first:
            factors.append(factor)
        factor *= 2
    if not factors:
        raise ValueError(
            f"--scale {first}..{last}: the compiled step has {base} chips, and no doubling of it "
            f"is in this range; start at {base}"
        )
    rows = plan.config.data.largest_batch[0] // plan.config.training.gradient_accumulation
    mesh = plan.config.mesh
    for factor in factors:
        yield _point(plan, factor, "weak")
        if mesh.dp * mesh.fsdp * mesh.ep * factor <= rows:
            yield _point(plan, factor, "strong")


def _point(plan: StepPlan, factor: int, mode: Mode) -> Point:
    prediction, config = plan.compiled.prediction, plan.config
    chips = plan.topology.num_chips * factor
    optimizer = prediction.parts.get("optimizer")
    update = 0.0 if optimizer is None else optimizer.total - optimizer.exposed
    compute = prediction.total - prediction.exposed - update
    share = 1.0 if mode == "weak" else 1 / factor
    larger = _slice(plan, chips)
    num_slices = chips // larger.num_chips
    within = larger.num_chips * plan.topology.num_slices / plan.topology.num_chips
    shards = config.mesh.fsdp * config.mesh.sp
    hops = max(0, sum(larger.sides) - sum(plan.topology.sides))
    more_slices = num_slices > plan.topology.num_slices
    exposed = 0.0
    for one in prediction.collectives:
        latency = one.count * _HOP_LATENCY * hops
        if one.axes == BETWEEN_SLICES:
            if more_slices and one.kind.startswith("all-reduce"):
                continue  # `_between_slices` counts the sums of gradients
            more, latency = 1 / within, 0.0
        elif "fsdp" in one.axes:
            more = _ring_share(round(shards * within)) / _ring_share(shards)
        elif "dp" in one.axes:
            more = 1 / within  # each device sums the gradients of its shard
        else:
            exposed += one.exposed * share  # activations
            continue
        added = one.seconds * (more - 1) + latency + one.hidden * (1 - share)
        exposed += max(0.0, one.exposed + added)
    if shards == 1 and within > 1:
        exposed += _first_shards(plan, round(within), larger)
    if more_slices:
        exposed += _between_slices(plan, num_slices, within, share * compute)
    seconds = compute * share + update / within + exposed
    tokens = plan.num_tokens * (factor if mode == "weak" else 1)
    flops = plan.flops * tokens / plan.num_tokens
    mfu = flops / chips / seconds / plan.chip.peak_flops
    rows = config.data.largest_batch[0] * (factor if mode == "weak" else 1)
    return Point(chips, rows, mode, seconds, exposed, tokens / seconds, mfu)


def _slice(plan: StepPlan, chips: int) -> Topology:
    """Return one of the equal slices with this many chips together: as few as possible."""
    generation, num_slices = plan.topology.generation, plan.topology.num_slices
    known = GENERATIONS[generation]
    while chips // num_slices > known.largest:
        num_slices *= 2
    while True:
        try:
            return read_topology(f"{generation}-{chips // num_slices * known.cores}")
        except ValueError:  # this generation has no slice of this size
            if chips // num_slices <= plan.topology.num_chips // plan.topology.num_slices:
                raise
            num_slices *= 2


def _first_shards(plan: StepPlan, shards: int, topology: Topology) -> float:
    """Return the exposed seconds of fsdp, by formula, for a compiled step that has none."""
    mesh = plan.config.mesh.model_copy(update={"fsdp": shards})
    config = plan.config.model_copy(update={"mesh": mesh})
    return estimate(config, slice_machine(plan.chip, topology)).exposed["fsdp"]


def _ring_share(size: int) -> float:
    """Return the share of an array that passes each link of a ring of this size."""
    return (size - 1) / size if size > 1 else 0.0


def _between_slices(plan: StepPlan, num_slices: int, within: float, compute: float) -> float:
    """Return the exposed seconds of the sums of gradients between slices."""
    if not plan.chip.dcn_bandwidth:
        raise ValueError(f"{plan.topology}: no bandwidth between slices is known for this chip")
    config, model = plan.config, plan.config.model
    if config.lora.rank:
        return 0.0  # adapters are small
    share = model.num_parameters * plan.topology.num_slices / (plan.topology.num_chips * within)
    size = jnp.dtype(model.param_dtype).itemsize * config.training.gradient_accumulation * share
    seconds = 2 * size * _ring_share(num_slices) / plan.chip.dcn_bandwidth
    return exposed_between_slices(seconds, compute, plan.config)


def table(points: Sequence[Point]) -> Iterator[str]:
    """Yield the points as lines."""
    names = f"{'chips':>8}{'rows':>9}  {'scaling':<8}{'step ms':>10}{'exposed':>9}"
    yield f"{names}{'tokens/s':>14}{'MFU':>8}"
    for p in sorted(points, key=lambda point: (point.mode != "weak", point.chips)):
        yield (
            f"{p.chips:>8}{p.rows:>9}  {p.mode:<8}{milliseconds(p.seconds):>10}"
            f"{p.exposed / p.seconds:>9.1%}{p.tokens_per_second:>14,.0f}{p.mfu:>8.3f}"
        )
    yield "on paper, from the compiled step (docs/plan.md); strong scaling ends at a row per device"


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw tokens per second and MFU over chips as a PNG."""
    Figure = importlib.import_module("matplotlib.figure").Figure  # only this needs the extra
    figure = Figure(figsize=(9, 4), layout="constrained")
    speed, share = figure.subplots(1, 2)
    for mode, marker in (("weak", "o"), ("strong", "s")):
        some = [point for point in points if point.mode == mode]
        chips = [point.chips for point in some]
        speed.plot(chips, [p.tokens_per_second for p in some], marker=marker, label=mode)
        share.plot(chips, [p.mfu for p in some], marker=marker, label=mode)
    first = min(points, key=lambda point: point.chips)
    ideal = [first.tokens_per_second * p.chips / first.chips for p in points if p.mode == "weak"]
    speed.plot([p.chips for p in points if p.mode == "weak"], ideal, "--", color="gray")
    speed.set(xscale="log", yscale="log", xlabel="chips", ylabel="tokens/s (predicted)")
    share.set(
        xscale="log",
        xlabel="chips",
        ylabel="MFU (predicted)",
        ylim=(0, 1.1 * max(p.mfu for p in points)),
    )
    speed.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
