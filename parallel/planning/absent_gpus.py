"""GPUs that are not attached: devices to compile for, and what their programs hold and send.

XLA compiles for a GPU from a description of it if jax's CUDA plugin is installed
(`pip install "jax[cuda13]"`); no GPU and no driver is needed. It cannot tune kernels then, so the
program may differ from the one on the machine. XLA gives no times for GPUs.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from parallel.planning.device_groups import MeshAxes
from parallel.planning.hlo import Computation, trip_count
from parallel.planning.hlo_parser import parse_hlo

# Data sheets and CUDA's tables of compute capabilities, read in November 2026.
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: 0 }}
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} threads_per_core_limit: 2048
  core_count: {cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {largest}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 1 }} device_description_str: "{kind}"
"""
_AMPERE: dict[str, float] = {
    "major": 8,
    "cores": 108,
    "units": 64,
    "clock": 1.41,
    "shared": 167936,
    "largest": 166912,
    "cache": 41943040,
}
_HOPPER: dict[str, float] = {
    "major": 9,
    "cores": 132,
    "units": 128,
    "clock": 1.98,
    "shared": 233472,
    "largest": 232448,
    "cache": 52428800,
}
_KINDS = {
    "NVIDIA A100-SXM4-80GB": {**_AMPERE, "bandwidth": 2039 * 10**9, "memory": 80 * 10**9},
    "NVIDIA H100 80GB HBM3": {**_HOPPER, "bandwidth": 3350 * 10**9, "memory": 80 * 10**9},
    "NVIDIA H200": {**_HOPPER, "bandwidth": 4800 * 10**9, "memory": 141 * 10**9},
}


def has_gpu_compiler() -> bool:
    """Return whether jax's CUDA plugin is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    names = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    return any(importlib.util.find_spec(name) is not None for name in names)


def absent_gpus(kind: str, num_nodes: int, per_node: int) -> list[jax.Device]:
    """Return the devices of nodes of GPUs that are not attached.

    Call it before anything else starts a jax backend.

    Raises:
        ValueError: The plugin cannot describe them.
    """
    # The plugin otherwise refuses to load without a driver.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    target = _TARGET.format(kind=kind, **_KINDS[kind])
    shape = f"1x{num_nodes}x{per_node}"
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape)
    except Exception as error:  # jaxlib has no exception type for errors of plugins
        raise ValueError(
            f"jax's CUDA plugin cannot describe {num_nodes} x {per_node} {kind}: "
            f'{str(error).splitlines()[0]}; install it by pip install -e ".[cuda]"'
        ) from error
    return list(found.devices)


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over the same mesh axes.

    Attributes:
        kind: "all-gather", ...
        axes: The mesh axes: "tp", "dp+fsdp".
        count: How often a step runs one.
        bytes: Operands of all of them, on one device.
    """

    kind: str
    axes: str
    count: int
    bytes: float


def collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Sent]:
    """Return the collectives of a scheduled program, the most bytes first.

    A loop counts as often as it runs; the branches of a conditional count once each.
    """
    module = parse_hlo(text)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    axes = MeshAxes(mesh_shape, module.num_partitions)

    def visit(computation: Computation, times: int) -> None:
        for x in computation.instructions:
            if x.opcode == "while":
                again = times * (trip_count(module, x, computation) or 1)
                visit(module.computations[x.calls("body") or ""], again)
            elif x.opcode in ("call", "conditional"):
                for name in (x.calls("to_apply"), *x.branches):
                    if name is not None:
                        visit(module.computations[name], times)
            elif (found := module.collective_of(x, computation)) is not None:
                inner = found.instruction
                key = found.kind, axes.label(inner, module.num_partitions)
                counts[key] += times
                sizes[key] += int(times * found.computation.operand_bytes(inner))

    visit(module.entry, 1)
    rows = [Sent(kind, label, counts[kind, label], sizes[kind, label]) for kind, label in counts]
    return sorted(rows, key=lambda row: -row.bytes)
