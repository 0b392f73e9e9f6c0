"""Estimate the memory and time of a training step by formulas, without a compiler.

Estimates rank meshes before the best are compiled, and stand in for a compiler where there is none:
for GPUs, and for more chips than the compiled slice has. They are labelled as estimates wherever
they are printed. tests/scripts/test_plan_estimates.py compares them with compiled programs.

Letters: T tokens of a microbatch on one device, D hidden size, b bytes of an activation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import jax.numpy as jnp

from configs.memory import StepShape, expert_parts, kept_per_token, resolve_remat, step_memory
from configs.schema import Config
from model.attention.pallas_flash import dq_fits
from parallel.linear.choice import least_rows_for_compute
from parallel.planning.slices import Topology
from parallel.sharding.devices import Chip

# As in compiled schedules of Llama-3-8B and Qwen3-30B-A3B on v5p (docs/predicted.md).
_VECTOR_PASSES = 200  # times that the vector work of a layer reads or writes T D values
_OPTIMIZER_BYTES = 28  # read and written per parameter by AdamW in float32
_EXPOSED = {"tp": 0.45, "dp": 1.0, "ep": 0.6, "sp": 0.1, "host": 0.8}
_EXPOSED_WITHOUT_OVERLAP = 0.9


@dataclass(frozen=True)
class Machine:
    """The devices and links that formulas count with.

    Attributes:
        chip: The data sheet of a device.
        near: Bytes/s of a link to a neighbour in the same slice or node, in one direction.
        far: Bytes/s to other slices or nodes, in one direction.
        node: Devices of one slice or node.
        matmul: Share of peak that matmuls reach.
        attention: Share of peak that attention kernels reach.
        fsdp: Share of the communication over fsdp that nothing hides, in plain collectives.
        fsdp_rings: The same in rings (`parallel.overlap_fsdp`).
    """

    chip: Chip
    near: float
    far: float
    node: int
    matmul: float
    attention: float
    fsdp: float
    fsdp_rings: float

    def bandwidth(self, size: int) -> float:
        """Return the bandwidth of a ring over `size` neighbouring devices, both ways together."""
        return 2 * self.near if size <= self.node else 2 * self.far


def slice_machine(chip: Chip, topology: Topology) -> Machine:
    """Return what formulas need of a TPU slice.

    The shares are those of compiled steps of Llama-3-8B on v5p and v5e (docs/predicted.md).
    """
    node = topology.num_chips // topology.num_slices
    far = chip.dcn_bandwidth / 2  # `bandwidth` counts two ways, as on a torus
    return Machine(chip, chip.ici_bandwidth, far, node, 0.85, 0.5, 0.8, 0.5)


@dataclass(frozen=True)
class Estimate:
    """Estimated memory and time of one training step on one device.

    Attributes:
        memory: Bytes by class.
        compute: Seconds by kind of work.
        communication: Seconds on the links by mesh axis, between slices ("dcn_dp") and to the host,
            hidden or not. "dp" has all sums of gradients over copies of a parameter.
        exposed: The part of it that no compute hides, by mesh axis.
    """

    memory: Mapping[str, float]
    compute: Mapping[str, float]
    communication: Mapping[str, float]
    exposed: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """Bytes of all classes."""
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        """Time of one step."""
        return sum(self.compute.values()) + sum(self.exposed.values())


def estimate(config: Config, machine: Machine) -> Estimate:
    """Estimate one training step of a configuration."""
    config, _ = resolve_remat(config, machine.chip)
    shape = StepShape.of(config)
    memory = step_memory(config, machine.chip)
    compute = _compute(config, shape, machine)
    communication = _communication(config, shape, machine)
    exposed = {}
    for axis, seconds in communication.items():
        if axis == "dcn_dp":
            exposed[axis] = exposed_between_slices(seconds, sum(compute.values()), config)
        else:
            exposed[axis] = _exposed_share(axis, config, machine) * seconds
    return Estimate(*map(MappingProxyType, (memory, compute, communication, exposed)))


def exposed_between_slices(seconds: float, compute: float, config: Config) -> float:
    """Return what is exposed of sums of gradients between slices: at least that of one layer.

    They hide under the backward pass, two thirds of the compute.
    """
    return max(seconds / config.model.num_blocks, seconds - 2 / 3 * compute)


def _exposed_share(axis: str, config: Config, machine: Machine) -> float:
    """Return the share of the communication over an axis that no compute hides."""
    parallel = config.parallel
    if axis == "fsdp":
        named = parallel.overlap_fsdp or parallel.overlap
        is_ring = config.mesh.tp == 1 and not config.lora.rank and named != "none"
        if is_ring and named == "auto":
            stored = config.model.hidden_size // (config.mesh.fsdp * config.mesh.sp)
            is_ring = stored >= least_rows_for_compute(machine.chip)
        return machine.fsdp_rings if is_ring else machine.fsdp
    if axis == "tp" and parallel.overlap == "none":
        return _EXPOSED_WITHOUT_OVERLAP
    return _EXPOSED[axis]


def _compute(config: Config, shape: StepShape, machine: Machine) -> dict[str, float]:
    """Return seconds by kind of work."""
    model, mesh, layers = config.model, config.mesh, config.model.num_blocks
    chip = machine.chip
    tokens = shape.microbatches * shape.tokens / mesh.tp
    matmul = 6.0 * model.num_matmul_parameters
    attention = model.flops_per_token(config.data.row_length) - matmul
    if config.lora.rank:
        matmul *= 2 / 3
    if model.remat == "full":  # heads of multi-token prediction are not recomputed
        heads = len(model.mtp_loss_weights) * model.hidden_size * model.padded_vocab_size
        matmul += 2.0 * (model.num_matmul_parameters - heads)
    elif model.remat == "attention":
        # The MLP or the experts, without their last product.
        active = model.moe.num_experts_per_tok + model.moe.num_shared_experts
        sparse = sum(model.sparse_layers)
        widths = (layers - sparse) * model.intermediate_size + sparse * active * model.expert_size
        matmul += 2.0 * model.hidden_size * 2 * widths
    # The backward pass computes the scores again: 10 FLOPs instead of 8, and in two kernels 14.
    group = model.num_attention_heads // model.num_key_value_heads
    backward = 10 if dq_fits(group, config.data.row_length // mesh.sp, model.head_size) else 14
    forward = 1
    if model.remat == "full":
        forward += 1
    if config.training.objective == "dpo":  # the reference model
        matmul += 2.0 * model.num_matmul_parameters
        forward += 1
    attention *= (backward + 4 * forward) / 12
    seconds = {
        "matmul": tokens * matmul / (machine.matmul * chip.peak_flops),
        "kernels": tokens * attention / (machine.attention * chip.peak_flops),
    }
    if chip.hbm_bandwidth:
        values = tokens * model.hidden_size * layers * _VECTOR_PASSES
        trained = 0.0 if config.lora.rank else shape.parameters
        seconds["vector"] = values * shape.b / chip.hbm_bandwidth
        seconds["optimizer"] = trained * _OPTIMIZER_BYTES / chip.hbm_bandwidth
    return seconds


def _ring(machine: Machine, size: int, moved: float, beyond: int) -> float:
    """Return the time of collectives over `size` devices that move this much.

    beyond: devices that they span.
    """
    return moved * (size - 1) / size / machine.bandwidth(beyond)


def _communication(config: Config, shape: StepShape, machine: Machine) -> dict[str, float]:
    """Return seconds on the links by mesh axis, for a ring with traffic in both directions.

    "host" is the traffic of offloaded activations.
    """
    model, mesh, parts = config.model, config.mesh, shape.microbatches
    layers, sparse = model.num_blocks, sum(model.sparse_layers)
    recomputes = model.remat == "full"
    reference = config.training.objective == "dpo"  # another forward pass
    stream = shape.tokens * model.hidden_size * shape.b
    factor = model.moe.capacity_factor or 1.0

    ring = partial(_ring, machine)
    found: dict[str, float] = {}
    if model.remat == "offload":
        kept = parts * shape.tokens * kept_per_token(config)[2] * layers * shape.b
        found["host"] = 2 * kept / machine.chip.host_bandwidth
    if mesh.tp > 1:
        # Attention, like an MLP, gathers and scatters once forward; backward, too, and gathers once
        # more. Experts send what an MLP sends for each of their rows.
        count = 5 + (1.5 if recomputes else 0) + (2 if reference else 0)
        rows = model.moe.num_experts_per_tok * factor + (model.moe.num_shared_experts > 0)
        blocks = layers + (layers - sparse) + sparse * rows
        found["tp"] = ring(mesh.tp, parts * blocks * count * stream, mesh.tp)
    # Weights forward and backward; the sum of gradients is an all-reduce on some chips.
    shards, span = mesh.fsdp * mesh.sp, mesh.num_devices // mesh.dp
    exchanging, width = expert_parts(config)
    if shards > 1:
        # Frozen kernels have no gradients.
        times = parts * ((2 if config.lora.rank else 4) + reference)
        held = 1 if config.lora.base_dtype == "int8" else shape.b
        layers_only = times * shape.layer * held
        heads = (1 + len(model.mtp_loss_weights)) * shape.head
        found["fsdp"] = ring(shards, (layers_only + times * heads * shape.b) * shards, span)
        found["fsdp"] += ring(width, times * shape.experts * held * width, span)
    if not config.lora.rank:
        found |= _gradient_sums(config, shape, ring)
    if exchanging > 1 and sparse:
        routed = shape.tokens / mesh.tp * model.moe.num_experts_per_tok * model.hidden_size
        # To the experts and back, forward and backward.
        hops = 4 * shape.b if model.moe.dispatch_dtype is None else 3 * shape.b + 1
        hops += 2 * shape.b if reference else 0
        # On a torus a quarter of the bytes of an all-gather, with switches each byte once.
        share = 1 / 4 if machine.chip.ici_bandwidth else 1 / exchanging
        moved = parts * sparse * hops * factor * routed * exchanging * share
        beyond = span if model.moe.expert_rule == "unified" else mesh.ep * mesh.sp * mesh.tp
        found["ep"] = ring(exchanging, moved, beyond)
    if mesh.sp > 1:
        heads = 2 * model.num_key_value_heads * model.head_size / mesh.tp
        moved = parts * layers * (3 + reference) * shape.tokens * heads * shape.b * mesh.sp
        found["sp"] = ring(mesh.sp, moved, mesh.sp * mesh.tp)
    return found


def _gradient_sums(
    config: Config, shape: StepShape, ring: Callable[[int, float, int], float]
) -> dict[str, float]:
    """Return seconds of the sums of gradients over copies of parameters, and between slices.

    They have the dtype of the parameters, and run for every microbatch.
    """
    model, mesh = config.model, config.mesh
    in_slice = mesh.num_devices // mesh.dcn_dp
    copies = mesh.dp // mesh.dcn_dp * mesh.ep
    exchanging, width = expert_parts(config)
    of_experts = in_slice // (mesh.tp * exchanging * width) if shape.experts else 1
    dense = shape.layer + shape.others + shape.embedding + shape.head
    summed = 2 * shape.microbatches * jnp.dtype(model.param_dtype).itemsize
    found = {}
    if copies > 1 or of_experts > 1:
        found["dp"] = ring(copies, summed * dense, in_slice)
        found["dp"] += ring(of_experts, summed * shape.experts, in_slice)
    if mesh.dcn_dp > 1:
        share = model.num_parameters / in_slice
        found["dcn_dp"] = ring(mesh.dcn_dp, summed * share, mesh.num_devices)
    return found
