"""Plan for GPUs that are not attached, by formulas with data-sheet figures.

XLA compiles for a GPU only where one is attached, so nothing is compiled. The bytes of parameters
and optimizer are exact; everything else is an estimate of `planning.estimate`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from configs.build import build_program, build_sharding_table, open_devices
from configs.schema import Config
from parallel.sharding.devices import CHIPS
from planning.estimate import Estimate, Machine, estimate

_GIB = 2**30


@dataclass(frozen=True)
class GpuNodes:
    """Nodes of several GPUs each.

    Attributes:
        name: As given: "h100-8*4".
        machine: Their figures.
        num_nodes: Number of nodes.
    """

    name: str
    machine: Machine
    num_nodes: int

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.machine.node * self.num_nodes


# NVLink of the data sheets (600 and 900 GB/s, both directions together) and one InfiniBand port per
# GPU (200 and 400 Gbit/s), as of November 2026. `Machine` counts half of one direction, because
# a ring on a torus has two ways.
_LINKS = {
    "a100": ("NVIDIA A100-SXM4-80GB", 150e9, 12.5e9),
    "h100": ("NVIDIA H100 80GB HBM3", 225e9, 25e9),
    "h200": ("NVIDIA H200", 225e9, 25e9),
}
# Shares of peak, and of fsdp that is exposed. docs/planning.md states their error against public
# figures of torchtitan.
_MATMUL, _ATTENTION, _EXPOSED_FSDP = 0.65, 0.35, 0.2


def read_gpus(text: str) -> GpuNodes | None:
    """Parse "h100-8" (one node of eight GPUs) or "h100-8*4" (four); None for another name."""
    found = re.fullmatch(rf"({'|'.join(_LINKS)})-([1-8])(?:\*([1-9]\d*))?", text)
    if found is None:
        return None
    kind, near, far = _LINKS[found[1]]
    machine = Machine(CHIPS[kind], near, far, int(found[2]), _MATMUL, _ATTENTION, _EXPOSED_FSDP)
    return GpuNodes(text, machine, int(found[3] or 1))


@dataclass(frozen=True)
class GpuPlan:
    """An estimated step on GPUs.

    Attributes:
        config: The configuration.
        nodes: The GPUs.
        estimate: Memory and time; parameters and optimizer are exact.
        num_tokens: Tokens of a step.
        flops: FLOPs of a step over all devices, without recomputation.
    """

    config: Config
    nodes: GpuNodes
    estimate: Estimate
    num_tokens: int
    flops: float

    @property
    def fits(self) -> bool:
        """Whether the estimated bytes are those of a GPU or less."""
        return self.estimate.bytes <= self.nodes.machine.chip.hbm_bytes

    @property
    def mfu(self) -> float:
        """FLOPs of the model as a share of the peak of all GPUs."""
        per_gpu = self.flops / self.nodes.num_gpus
        return per_gpu / self.estimate.seconds / self.nodes.machine.chip.peak_flops


def plan_gpus(config: Config, nodes: GpuNodes) -> GpuPlan:
    """Estimate the training step of this configuration on these GPUs.

    Raises:
        ValueError: The mesh has another number of devices, or cannot be built.
    """
    if config.mesh.num_devices != nodes.num_gpus:
        raise ValueError(
            f"mesh.* multiplies to {config.mesh.num_devices}, but {nodes.name} has "
            f"{nodes.num_gpus} GPUs; make the product {nodes.num_gpus}"
        )
    devices, _ = open_devices(config)
    program = build_program(config, devices)
    table = build_sharding_table(config, program)
    exact = {
        name: float(sum(row.bytes_per_device for row in table[name]))
        for name in ("parameters", "optimizer")
    }
    guess = estimate(config, nodes.machine)
    guess = replace(guess, memory=MappingProxyType({**guess.memory, **exact}))
    num_tokens = max(config.data.batch_sizes) * config.data.row_length
    flops = program.flops_per_token(config.data.row_length) * num_tokens
    return GpuPlan(config, nodes, guess, num_tokens, flops)


def render(plan: GpuPlan) -> Iterator[str]:
    """Yield the plan as lines."""
    nodes, guess = plan.nodes, plan.estimate
    needed, available = guess.bytes / _GIB, nodes.machine.chip.hbm_bytes / _GIB
    word = "fits" if plan.fits else "does not fit"
    yield (
        f"{word} on {nodes.name} ({nodes.num_gpus} GPUs), by estimate: {needed:.1f} of "
        f"{available:.1f} GiB per GPU"
    )
    yield "Formulas with data-sheet figures; nothing was compiled. See docs/planning.md."
    speed = plan.num_tokens / guess.seconds
    yield f"step {guess.seconds * 1e3:,.0f} ms, {speed:,.0f} tokens/s, MFU {plan.mfu:.3f}"
    for name, size in guess.memory.items():
        yield f"  {name:<32}{size / _GIB:>8.2f} GiB"
    for name, seconds in guess.compute.items():
        yield f"  {name:<32}{seconds * 1e3:>8.0f} ms"
    for axis, seconds in guess.exposed.items():
        whole = guess.communication[axis] * 1e3
        yield f"  {f'exposed over {axis}':<32}{seconds * 1e3:>8.0f} ms of {whole:.0f} ms"


def as_json(plan: GpuPlan) -> dict[str, Any]:
    """Return the plan as values for JSON."""
    return {
        "topology": plan.nodes.name,
        "chips": plan.nodes.num_gpus,
        "fits": plan.fits,
        "estimated": True,
        "hbm_bytes": plan.estimate.bytes,
        "hbm_available_bytes": plan.nodes.machine.chip.hbm_bytes,
        "step_time": plan.estimate.seconds,
        "mfu": plan.mfu,
        "memory": dict(plan.estimate.memory),
        "compute": dict(plan.estimate.compute),
        "exposed": dict(plan.estimate.exposed),
    }
