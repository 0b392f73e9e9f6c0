"""Plan for GPUs that are not attached.

With jax's CUDA plugin the step is compiled, and the memory and the collectives are the compiler's.
Without it nothing is compiled: parameters and optimizer are exact, all else is estimated. Times are
estimates in both cases (`planning.estimate`), because XLA gives none for GPUs.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import jax

from configs.build import abstract_batch, build_program, build_sharding_table, open_devices
from configs.schema import Config
from parallel.planning.absent_gpus import Sent, absent_gpus, collectives, has_gpu_compiler
from parallel.planning.memory import memory_use
from parallel.sharding.devices import CHIPS, gpu_share
from planning.estimate import Estimate, Machine, estimate
from planning.step import memory_classes
from training.step import Program
from units import milliseconds

_GIB = 2**30
_CLASSES = {"unassigned": "gradients, activations and temporaries"}


@dataclass(frozen=True)
class GpuNodes:
    """Nodes of several GPUs each.

    Attributes:
        name: As given: "h100-8*4".
        kind: Name of the GPU as jax reports it (`device_kind`).
        machine: Their figures.
        num_nodes: Number of nodes.
    """

    name: str
    kind: str
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
# Shares of peak, and of fsdp that is exposed. docs/plan.md states their error against public
# figures of torchtitan.
_MATMUL, _ATTENTION, _EXPOSED_FSDP = 0.65, 0.35, 0.2


def read_gpus(text: str) -> GpuNodes | None:
    """Parse "h100-8" (one node of eight GPUs) or "h100-8*4" (four); None for a TPU.

    Raises:
        ValueError: It begins like neither a GPU nor a TPU, or has another form than a GPU.
    """
    text, kinds = text.lower(), "|".join(_LINKS)
    if re.match(kinds, text) is None:
        if not text.startswith(("v", "tpu-")):
            raise ValueError(
                f"topology {text}: there is no such chip; use a TPU such as v5p-16, or a GPU: "
                + ", ".join(f"{kind}-8" for kind in _LINKS)
            )
        return None
    found = re.fullmatch(rf"({kinds})-([1-9]\d*)(?:\*([1-9]\d*))?", text)
    if found is None:
        raise ValueError(
            f"topology {text}: write the GPUs of a node such as h100-8, and h100-8*4 for four nodes"
        )
    kind, near, far = _LINKS[found[1]]
    shares = (_MATMUL, _ATTENTION, _EXPOSED_FSDP, _EXPOSED_FSDP)
    machine = Machine(CHIPS[kind], near, far, int(found[2]), *shares)
    return GpuNodes(text, kind, machine, int(found[3] or 1))


@dataclass(frozen=True)
class GpuPlan:
    """A step on GPUs.

    Attributes:
        config: The configuration.
        nodes: The GPUs.
        estimate: Time, and memory by class: the compiler's if there was one.
        collectives: Those of the compiled program; None if nothing was compiled.
        num_tokens: Tokens of a step.
        flops: FLOPs of a step over all devices, without recomputation.
    """

    config: Config
    nodes: GpuNodes
    estimate: Estimate
    collectives: tuple[Sent, ...] | None
    num_tokens: int
    flops: float

    @property
    def num_chips(self) -> int:
        """GPUs of all nodes."""
        return self.nodes.num_gpus

    @property
    def available(self) -> float:
        """Bytes of a GPU that jax allocates."""
        return self.nodes.machine.chip.usable_bytes

    @property
    def hbm(self) -> float:
        """Memory as a share of what jax allocates."""
        return self.estimate.bytes / self.available

    @property
    def fits(self) -> bool:
        """Whether the bytes are those that jax allocates or less."""
        return self.hbm <= 1

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return self.estimate.seconds

    @property
    def exposed(self) -> float:
        """Exposed communication as a share of the step."""
        return sum(self.estimate.exposed.values()) / self.step_time

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, over all GPUs."""
        return self.num_tokens / self.step_time

    @property
    def mfu(self) -> float:
        """FLOPs of the model as a share of the peak of all GPUs."""
        per_gpu = self.flops / self.nodes.num_gpus
        return per_gpu / self.estimate.seconds / self.nodes.machine.chip.peak_flops


def check_gpus(config: Config, nodes: GpuNodes) -> None:
    """Check that the mesh has as many devices as there are GPUs; needs no compiler.

    Raises:
        ValueError: It has not.
    """
    if config.mesh.num_devices != nodes.num_gpus:
        raise ValueError(
            f"mesh.* multiplies to {config.mesh.num_devices}, but {nodes.name} has "
            f"{nodes.num_gpus} GPUs; make the product {nodes.num_gpus}"
        )


def plan_gpus(config: Config, nodes: GpuNodes) -> GpuPlan:
    """Plan the training step of this configuration on these GPUs.

    Raises:
        ValueError: The mesh has another number of devices, or the step cannot be compiled.
    """
    check_gpus(config, nodes)
    guess = estimate(config, nodes.machine)
    if has_gpu_compiler():
        program, memory, sent = _compile(config, nodes)
    else:
        program, memory = _exact_state(config)
        memory, sent = {**guess.memory, **memory}, None
    guess = replace(guess, memory=MappingProxyType(memory))
    rows, length = config.data.largest_batch
    flops = program.flops_per_token(length) * rows * length
    return GpuPlan(config, nodes, guess, sent, rows * length, flops)


def _compile(config: Config, nodes: GpuNodes) -> tuple[Program, dict[str, float], tuple[Sent, ...]]:
    """Compile the step, and return its memory by class and its collectives."""
    program = build_program(config, absent_gpus(nodes.kind, nodes.num_nodes, nodes.machine.node))
    batch = abstract_batch(config, program)
    mesh = program.tp.manager.mesh
    # tokamax reads the compute capability from the default device.
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        state = program.abstract_state
        lowered = program.train_step.lower(state, batch)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"XLA failed on this step: {str(error).splitlines()[0][:300]}; uninstall jax's CUDA "
            "plugin to have an estimate, and report it to XLA"
        ) from error
    text = compiled.as_text()
    memory = memory_use(compiled, None, text, memory_classes(state, batch))
    classes = {_CLASSES.get(name, name): float(size) for name, size in memory.classes.items()}
    return program, classes, tuple(collectives(text, mesh.shape))


def _exact_state(config: Config) -> tuple[Program, dict[str, float]]:
    """Return the bytes of parameters and optimizer, from their shardings on simulated devices."""
    devices, _ = open_devices(config)
    program = build_program(config, devices)
    table = build_sharding_table(config, program)
    return program, {
        name: float(sum(row.bytes_per_device for row in table[name]))
        for name in ("parameters", "optimizer")
    }


def render(plan: GpuPlan) -> Iterator[str]:
    """Yield the plan as lines."""
    nodes, guess = plan.nodes, plan.estimate
    needed, available = guess.bytes / _GIB, plan.available / _GIB
    word = "fits" if plan.fits else "does not fit"
    how = "by estimate" if plan.collectives is None else "compiled by XLA"
    yield (
        f"{word} on {nodes.name} ({nodes.num_gpus} GPUs), {how}: {needed:.1f} of "
        f"{available:.1f} GiB that jax allocates on a GPU ({gpu_share():.0%}, from "
        "XLA_PYTHON_CLIENT_MEM_FRACTION)"
    )
    what = "memory and times are" if plan.collectives is None else "times are"
    yield f"Here {what} formulas, wrong by up to a third; see docs/plan.md."
    speed = plan.tokens_per_second
    step = f"step {milliseconds(guess.seconds)} ms (estimated)"
    yield f"{step}, {speed:,.0f} tokens/s, MFU {plan.mfu:.3f}"
    for name, size in guess.memory.items():
        yield f"  {name:<32}{size / _GIB:>8.2f} GiB"
    for name, seconds in guess.compute.items():
        yield f"  {name:<32}{milliseconds(seconds):>8} ms"
    for axis, seconds in guess.exposed.items():
        whole = milliseconds(guess.communication[axis])
        yield f"  {f'exposed over {axis}':<32}{milliseconds(seconds):>8} ms of {whole} ms"
    for sent in plan.collectives or ():
        operands = f"{sent.bytes / _GIB:.2f} GiB of operands"
        yield f"  {f'{sent.kind} over {sent.axes}':<32}{sent.count:>8} x, {operands}"


def as_json(plan: GpuPlan) -> dict[str, Any]:
    """Return the plan as values for JSON."""
    return {
        "topology": plan.nodes.name,
        "chips": plan.nodes.num_gpus,
        "fits": plan.fits,
        "estimated": plan.collectives is None,
        "hbm_bytes": plan.estimate.bytes,
        "hbm_available_bytes": plan.available,
        **{name: getattr(plan, name) for name in ("hbm", "tokens_per_second", "mfu", "exposed")},
        "step_time": plan.estimate.seconds,
        "memory": dict(plan.estimate.memory),
        "compute": dict(plan.estimate.compute),
        "communication": dict(plan.estimate.communication),
        "exposed_seconds": dict(plan.estimate.exposed),
        "collectives": None if plan.collectives is None else list(map(asdict, plan.collectives)),
    }
