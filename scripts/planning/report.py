"""Print a plan on one screen, and as JSON."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from configs.schema import Config
from parallel.planning.memory import MemoryUse
from parallel.planning.prediction import CollectiveTime, PartTime
from parallel.sharding.mesh import AXIS_NAMES
from planning.gpus import GpuPlan
from planning.search import Ranked
from planning.step import StepPlan
from units import format_bytes, milliseconds, three_digits

Plan = StepPlan | GpuPlan

_GIB = 2**30
_KINDS = ("matmul", "other", "kernels", "exposed", "dma_wait")
_SHOWN = ("matmul", "vector", "kernels", "exposed", "HBM wait")
_COMPARISONS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}

FIGURES = ("hbm", "step_time", "tokens_per_second", "mfu", "exposed")
"""Figures of a plan that fits: memory as a share of the chip's, seconds, tokens/s over all chips,
MFU, and exposed communication as a share of the step."""


def holds(plan: Plan, condition: tuple[str, str, float]) -> bool:
    """Return whether a condition (figure, comparison, number) holds for a plan that fits."""
    name, sign, limit = condition
    return bool(_COMPARISONS[sign](getattr(plan, name), limit))


def mesh_name(config: Config) -> str:
    """Return the axes of a mesh that have more than one device, such as "fsdp4 x tp2"."""
    sizes = " x ".join(
        f"{axis}{size}" for axis in AXIS_NAMES if (size := getattr(config.mesh, axis)) > 1
    )
    return sizes or "of one device"


def describe(config: Config) -> str:
    """Return the mesh and what else distinguishes one candidate from another."""
    parts = config.training.gradient_accumulation
    return (
        f"mesh {mesh_name(config)}, residual {config.parallel.residual}, remat "
        f"{config.model.remat}" + (f", {parts} microbatches" if parts > 1 else "")
    )


def verdict(plan: StepPlan) -> str:
    """Return one line that says whether the step fits in the memory of the chips."""
    available = plan.chip.hbm_bytes / _GIB
    where = f"{plan.topology} ({_slices(plan)}, {plan.topology.num_chips} chips)"
    needed = plan.bytes
    if plan.fits:
        assert needed is not None
        share = needed / plan.chip.hbm_bytes
        percent = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        return (
            f"fits on {where}: {format_bytes(needed)} of {available:.2f} GiB per chip ({percent})"
        )
    much = "more" if needed is None else f"{format_bytes(needed)} per chip, more"
    return f"does not fit on {where}: it needs {much} than the {available:.2f} GiB of a chip"


def _slices(plan: StepPlan) -> str:
    count = plan.topology.num_slices
    return plan.topology.gcloud if count == 1 else f"{count} x {plan.topology.gcloud}"


def render(plan: StepPlan, *, tokens: float | None, price: float | None) -> Iterator[str]:
    """Yield the lines of a plan that fits, after its verdict.

    Args:
        plan: The plan.
        tokens: Tokens of the whole training run, or None.
        price: Price of one chip for an hour, in any currency, or None.
    """
    prediction = plan.compiled.prediction
    yield (
        f"step {milliseconds(prediction.total)} ms (predicted), {plan.tokens_per_second:,.0f} "
        f"tokens/s, MFU {plan.mfu:.3f}"
    )
    if tokens is not None:
        yield cost_line(plan, tokens, price)
    yield ""
    yield from memory_table(plan.compiled.memory)
    yield ""
    yield from _parts_table(plan)
    yield ""
    yield from _collectives_table(prediction.collectives)


def run_cost(plan: Plan, tokens: float, price: float | None) -> dict[str, float]:
    """Return days, chip-hours and cost of a run of this many tokens."""
    seconds = tokens / plan.tokens_per_second
    hours = seconds / 3600 * plan.num_chips
    cost = {} if price is None else {"cost": hours * price}
    return {"tokens": tokens, "days": seconds / 86400, "chip_hours": hours, **cost}


def cost_line(plan: Plan, tokens: float, price: float | None) -> str:
    """Return the days, chip-hours and cost of a run as a line."""
    found = run_cost(plan, tokens, price)
    cost = (
        "" if price is None else f", costs {three_digits(found['cost'])} at {price:g} per chip-hour"
    )
    return (
        f"{tokens:,.0f} tokens take {three_digits(found['days'])} days, "
        f"{three_digits(found['chip_hours'])} chip-hours{cost}"
    )


def memory_table(memory: MemoryUse) -> Iterator[str]:
    """Yield the memory of one chip by class, and its largest temporary buffers."""
    unit, name = (_GIB, "GiB") if memory.total >= _GIB else (2**20, "MiB")
    yield f"{'memory per chip at its peak':<34}{name:>8}{'share':>8}"
    for name, size in memory.classes.items():
        yield f"  {name:<32}{size / unit:>8.2f}{size / memory.total:>8.1%}"
    yield f"  {'total':<32}{memory.total / unit:>8.2f}"
    if memory.assigned is not None:
        yield (
            f"  {'held against the chip':<32}{memory.assigned / unit:>8.2f}  "
            "(without the program and what is unassigned)"
        )
    yield "largest buffers"
    for buffer in memory.largest[:5]:
        times = f"{buffer.count} x " if buffer.count > 1 else ""
        direction = "backward" if buffer.is_backward else "forward"
        whole = format_bytes(buffer.count * buffer.bytes)
        yield f"  {whole:>9}  {buffer.kind}: {times}{buffer.shape} of {buffer.scope}, {direction}"


def _parts_table(plan: StepPlan) -> Iterator[str]:
    prediction = plan.compiled.prediction
    yield f"{'time, ms':<24}" + "".join(f"{name:>10}" for name in (*_SHOWN, "total", "share"))
    whole = prediction.total
    for name, part in prediction.parts.items():
        yield _part_line(name, part, whole)
    sums = PartTime(*(sum(getattr(p, kind) for p in prediction.parts.values()) for kind in _KINDS))
    yield _part_line("total", sums, whole)
    peak = plan.chip.peak_flops
    if prediction.matmul:
        rate = prediction.matmul_flops / prediction.matmul / peak
        yield f"  matmuls run at {rate:.0%} of peak"


def _part_line(name: str, part: PartTime, whole: float) -> str:
    times = "".join(f"{getattr(part, kind) * 1e3:>10.1f}" for kind in (*_KINDS, "total"))
    return f"  {name:<22}{times}{part.total / whole:>10.1%}"


def _collectives_table(collectives: Sequence[CollectiveTime]) -> Iterator[str]:
    yield f"{'collectives':<46}{'count':>7}{'GiB sent':>10}{'hidden ms':>11}{'exposed ms':>12}"
    found: dict[tuple[str, str], CollectiveTime] = {}
    for one in collectives:
        total = found.setdefault((one.axes, one.kind), CollectiveTime(one.kind, one.axes, ""))
        total.count += one.count
        total.bytes += one.bytes
        total.seconds += one.seconds
        total.exposed += one.exposed
    for (axes, kind), total in sorted(found.items(), key=lambda item: -item[1].exposed):
        name = kind if kind.endswith(axes) else f"{kind} over {axes}"  # "... between slices"
        yield (
            f"  {name:<44}{total.count:>7.0f}{total.bytes / _GIB:>10.2f}"
            f"{total.hidden * 1e3:>11.1f}{total.exposed * 1e3:>12.1f}"
        )
    if not found:
        yield "  none"


def proposal(plan: StepPlan, advice: Ranked | None) -> str:
    """Return the change that makes a plan fit, as options of scripts/plan.py."""
    if advice is None or advice.plan is None:
        return (
            "found no change that fits, of those that keep the model and its batch; use a larger "
            "slice, a smaller batch, or model.param_dtype=bfloat16"
        )
    words = [*advice.candidate.overrides]
    if advice.plan.topology != plan.topology:
        words.insert(0, f"--topology {advice.plan.topology}")
    step = f"step {milliseconds(advice.seconds)} ms"
    return f"try {' '.join(words)}\n  {verdict(advice.plan)}, {step}"


def search_table(found: Sequence[Ranked]) -> Iterator[str]:
    """Yield the compiled candidates as lines, and the best as overrides."""
    yield f"{'search':<56}{'step ms':>9}{'MFU':>7}{'exposed':>9}{'GiB':>8}{'estimate':>10}"
    for ranked in found:
        assert ranked.plan is not None
        prediction = ranked.plan.compiled.prediction
        yield (
            f"  {describe(ranked.candidate.config):<54}{milliseconds(ranked.seconds):>9}"
            f"{ranked.plan.mfu:>7.3f}{prediction.exposed / prediction.total:>9.1%}"
            f"{(ranked.plan.bytes or 0) / _GIB:>8.1f}{milliseconds(ranked.estimate.seconds):>10}"
        )
    if found:
        best = " ".join(found[0].candidate.overrides)
        yield f"best: {best or 'the configuration as it is'}"
    else:
        yield "  no candidate fits"


def as_json(plan: StepPlan) -> dict[str, Any]:
    """Return a plan as values for JSON: bytes and seconds."""
    result: dict[str, Any] = {
        "topology": str(plan.topology),
        "chips": plan.topology.num_chips,
        "fits": plan.fits,
        "hbm_bytes": plan.bytes,
        "hbm_available_bytes": int(plan.chip.hbm_bytes),
        "verdict": verdict(plan),
        "plan": list(plan.choices),
    }
    if (memory := plan.memory) is not None:
        result["memory"] = dict(memory.classes)
        result["largest"] = [asdict(buffer) for buffer in memory.largest]
    if not plan.fits:
        return result
    prediction = plan.compiled.prediction
    return {
        **result,
        **{name: getattr(plan, name) for name in FIGURES},
        "parts": {name: asdict(part) for name, part in prediction.parts.items()},
        "collectives": [asdict(one) for one in prediction.collectives],
        "matmul_flops": prediction.matmul_flops,
        "model_flops": plan.flops,
    }


def ranked_json(ranked: Ranked) -> dict[str, Any]:
    """Return a candidate and its plan as values for JSON."""
    return {
        "overrides": list(ranked.candidate.overrides),
        "estimated_seconds": ranked.estimate.seconds,
        **({} if ranked.plan is None else as_json(ranked.plan)),
    }
