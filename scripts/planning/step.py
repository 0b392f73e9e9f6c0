"""Compile the training step of a configuration for absent devices, and read the answer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from configs.build import abstract_batch, build_program
from configs.schema import Config
from parallel.planning.compiler import CompiledProgram, SliceCompiler, chip_of
from parallel.planning.memory import MemoryUse
from parallel.planning.refusals import OutOfMemory
from parallel.planning.result_cache import ResultCache
from parallel.planning.slices import Topology, absent_devices, read_topology
from parallel.sharding.devices import Chip
from parallel.sharding.mesh import AXIS_NAMES
from planning.candidates import change
from training.parts import STEP_PARTS
from training.state import TrainState


@dataclass(frozen=True)
class StepPlan:
    """The compiler's answer about the training step of one configuration on one slice.

    Attributes:
        config: The configuration.
        topology: The slice or slices.
        chip: The data sheet of their chips.
        choices: The execution plan, line by line.
        num_tokens: Tokens of a step, over all devices.
        flops: FLOPs of a step over all devices, without recomputation.
        answer: The compiled program, or why it does not fit.
    """

    config: Config
    topology: Topology
    chip: Chip
    choices: tuple[str, ...]
    num_tokens: int
    flops: float
    answer: CompiledProgram | OutOfMemory

    @property
    def fits(self) -> bool:
        """Whether the program fits in the memory of the chips."""
        return isinstance(self.answer, CompiledProgram)

    @property
    def compiled(self) -> CompiledProgram:
        """The compiled program of a plan that fits."""
        if isinstance(self.answer, OutOfMemory):
            raise self.answer
        return self.answer

    @property
    def bytes(self) -> float | None:
        """Bytes that libtpu compares with the memory of a chip; None if it did not say."""
        if isinstance(self.answer, OutOfMemory):
            return self.answer.required
        memory = self.answer.memory
        return memory.total if memory.assigned is None else memory.assigned

    @property
    def memory(self) -> MemoryUse | None:
        """Memory of one chip by class; None if the compiler did not say."""
        return self.answer.memory

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return self.topology.num_chips

    @property
    def hbm(self) -> float:
        """Memory as a share of the chip's."""
        return (self.bytes or math.inf) / self.chip.hbm_bytes

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return self.compiled.prediction.total

    @property
    def exposed(self) -> float:
        """Exposed communication as a share of the step."""
        return self.compiled.prediction.exposed / self.step_time

    @cached_property
    def tokens_per_second(self) -> float:
        """Tokens per second, over all devices."""
        return self.num_tokens / self.compiled.prediction.total

    @cached_property
    def mfu(self) -> float:
        """FLOPs of the model as a share of the peak of all chips (PaLM, arXiv 2204.02311)."""
        per_chip = self.flops / self.topology.num_chips
        return per_chip / self.compiled.prediction.total / self.chip.peak_flops


def check_slices(config: Config, topology: Topology) -> None:
    """Check that `mesh.dcn_dp` is the number of slices; the mesh may have an automatic axis.

    Raises:
        ValueError: It is not; names the changes that fix it.
    """
    mesh, slices = config.mesh, topology.num_slices
    if mesh.dcn_dp == slices:
        return
    dp = -(-mesh.dp // slices) * slices
    change = "" if dp == mesh.dp or mesh.auto_axis == "dp" else f" mesh.dp={dp}"
    raise ValueError(
        f"mesh.dcn_dp={mesh.dcn_dp}, but {topology} has {slices} slices; set "
        f"mesh.dcn_dp={slices}{change}"
    )


def check_mesh(config: Config, topology: Topology) -> None:
    """Check that the mesh has as many devices as there are chips; needs no compiler.

    Raises:
        ValueError: It has not; names an axis that would fix it.
    """
    mesh = config.mesh
    if mesh.num_devices == topology.num_chips:
        return
    sizes = " * ".join(f"{axis} {size}" for axis in AXIS_NAMES if (size := getattr(mesh, axis)) > 1)
    raise ValueError(
        f"mesh {sizes or 'of one device'} needs {mesh.num_devices} chips, but {topology} "
        f"({topology.gcloud}) has {topology.num_chips}; {_remedy(config, topology)}"
    )


def _remedy(config: Config, topology: Topology) -> str:
    """Return a change of one axis with which the configuration has the chips of the slices."""
    chips = topology.num_chips
    for axis in ("fsdp", "dp", "tp", "sp", "ep"):
        rest = math.prod(getattr(config.mesh, other) for other in AXIS_NAMES if other != axis)
        size, remainder = divmod(chips, rest)
        if not remainder and size and change(config, {f"mesh.{axis}": size}) is not None:
            return f"set mesh.{axis}={size}"
    return f"change mesh.* so that its axes multiply to {chips}"


def memory_classes(state: TrainState, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a training step by class of memory."""
    classes = {
        "parameters": state.params,
        "optimizer": (state.step, state.opt_state, state.guard),
        "moving average": state.ema,
        "reference model": state.reference,
        "batch": batch,
    }
    return {name: tree for name, tree in classes.items() if tree is not None}


def plan_step(config: Config, topology: str, cache: ResultCache | None = None) -> StepPlan:
    """Compile the training step of this configuration for a slice that is not attached.

    Raises:
        ValueError: The configuration cannot run on this slice, or the slice is not known.
    """
    named = read_topology(topology)
    check_slices(config, named)
    check_mesh(config, named)
    program = build_program(config, absent_devices(topology))
    batch = abstract_batch(config, program)
    mesh = program.tp.manager.mesh
    with jax.set_mesh(mesh):
        state = program.abstract_state
    compiler = SliceCompiler(topology, mesh, STEP_PARTS, cache)
    answer: CompiledProgram | OutOfMemory
    try:
        answer = compiler.compile(
            program.train_step, [state, batch], classes=memory_classes(state, batch)
        )
    except OutOfMemory as error:
        answer = error
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"the compiler failed on this step: {str(error).splitlines()[0][:300]}; change "
            "model.remat, training.gradient_accumulation or the mesh, or set "
            "parallel.group_hops=false, and report it to XLA"
        ) from error
    num_tokens = batch["tokens"].size
    return StepPlan(
        config,
        named,
        chip_of(topology),
        (*program.plan.describe(), *program.describe_objective()),
        num_tokens,
        program.flops_per_token(batch["tokens"].shape[-1]) * num_tokens,
        answer,
    )
