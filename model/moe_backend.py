"""Choice of the exchange method and the grouped matmul of sparse layers, with its reason."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from model.config import ModelConfig
from parallel.experts import tokamax_matmul as tokamax_matmul  # registers its implementation
from parallel.experts.exchange import target_of
from parallel.experts.expert import EXPERT_AXES
from parallel.experts.grouped_kernels import largest_block
from parallel.experts.grouped_matmul import GROUPED_MATMULS, choose_grouped_matmul
from parallel.experts.names import ExchangeMethod
from parallel.planning.links import chip_coords, order_by_links
from parallel.sharding.axes import TP
from parallel.sharding.devices import CHIPS, compute_capability
from parallel.sharding.partition import PartitionManager
from parallel.sharding.specs import mesh_axes_of


@dataclass(frozen=True)
class MoEBackend:
    """Exchange method and grouped matmul of the sparse layers; reason is one line.

    distances: order in which the exchange sends its blocks, see `PermuteAllToAll`. block: rows of a
    block of one expert.
    """

    exchange: ExchangeMethod
    grouped_matmul: str
    reason: str
    distances: tuple[int, ...] = ()
    block: int = 128  # measured: smaller blocks than a TPU's pad less on a CPU


def choose_experts(
    config: ModelConfig, manager: PartitionManager, *, dropless: bool = False
) -> MoEBackend:
    """Choose exchange and grouped matmul of the sparse layers on this mesh, with the reasons.

    dropless: ignore the expert capacity of the configuration.
    Raises: ValueError for a configured grouped matmul that does not support the row layout of the
    exchange, or this platform.
    """
    moe, platform = config.moe, str(manager.mesh.devices.flat[0].platform)
    # The layer sends in one chunk when it ignores a capacity, in evaluation and generation.
    in_chunks = moe.exchange_chunks > 1 and not dropless
    dropless |= moe.capacity_factor is None
    devices = manager.axis_size(EXPERT_AXES[moe.expert_rule][0].axes[0])
    exchange, why = _choose_exchange(config, platform, devices, dropless, in_chunks)
    if exchange == "dense":
        return MoEBackend("dense", "einsum", f"{why}; every expert computes every token")
    if exchange == "alltoall" and dropless and devices > 1:
        rows = moe.num_experts / moe.num_experts_per_tok
        why += f", buffers without dropped tokens hold {rows:.3g} times the assigned rows"
    name, reason = moe.grouped_matmul, "as model.moe.grouped_matmul says"
    if name == "auto":
        uniform = not dropless and exchange == "alltoall"
        name, reason = choose_grouped_matmul(
            platform,
            uniform=uniform,
            compute_capability=compute_capability(manager.mesh.devices.flat[0]),
        )
    D, F = config.hidden_size, config.expert_size // manager.axis_size(TP)
    block = _block_rows(D, F, config.dtype, manager)
    if name == "pallas" and block is None:
        why_not = (
            f"pallas kernels for {D} x {F} values of an expert per device do not fit into VMEM; a "
            "larger mesh.tp makes them smaller"
        )
        if moe.grouped_matmul == "pallas":
            raise ValueError(f"model.moe.grouped_matmul: {why_not}, or use ragged_dot")
        name, reason = "ragged_dot", why_not
    impl = GROUPED_MATMULS[name]
    if exchange == "ragged" and impl.is_uniform:
        raise ValueError(
            f"model.moe.grouped_matmul={name} needs the same number of rows for every expert, "
            "which exchange=ragged does not give; use another grouped_matmul, or exchange=alltoall"
        )
    if platform not in impl.platforms:
        raise ValueError(
            f"model.moe.grouped_matmul={name} runs on {', '.join(impl.platforms)} only, these "
            f"devices are {platform}; use auto"
        )
    if impl.package is not None and find_spec(impl.package) is None:
        raise ValueError(
            f"model.moe.grouped_matmul={name} needs {impl.package}, which is not installed; pip "
            'install -e ".[gpu]" with Python 3.12 or later, or use auto'
        )
    distances: tuple[int, ...] = ()
    if exchange == "alltoall" and in_chunks:
        axes = mesh_axes_of(manager.resolve(EXPERT_AXES[moe.expert_rule][0])[0])
        distances = sending_order(manager.mesh, axes)
    block = block or MoEBackend.block
    return MoEBackend(exchange, name, f"{why}; {name}: {reason}", distances, block)


def _block_rows(D: int, F: int, dtype: str, manager: PartitionManager) -> int | None:
    """Return the rows of a block of one expert of `D F` values; None: no kernel for TPUs fits."""
    device = manager.mesh.devices.flat[0]
    if device.platform != "tpu":
        return MoEBackend.block
    itemsize = jnp.dtype(dtype).itemsize
    return largest_block(D, F, itemsize=itemsize, device_kind=device.device_kind)


def _choose_exchange(
    config: ModelConfig, platform: str, devices: int, dropless: bool, in_chunks: bool
) -> tuple[ExchangeMethod, str]:
    """Choose the exchange between `devices` devices that share the experts, and give the reason."""
    moe = config.moe
    if moe.exchange == "dense":
        return "dense", "exchange as model.moe.exchange says"
    if devices == 1:
        return "alltoall", "every device has all experts, so nothing is exchanged"
    if moe.exchange == "ragged" and platform == "cpu":
        return "ragged", "emulated by an all-gather of all rows: cpu has no ragged_all_to_all"
    if moe.exchange != "auto":
        return moe.exchange, "exchange as model.moe.exchange says"
    if platform == "cpu":
        return "alltoall", "cpu has no ragged_all_to_all"
    uniform = moe.grouped_matmul != "auto" and GROUPED_MATMULS[moe.grouped_matmul].is_uniform
    if dropless and not in_chunks and not uniform:
        return "ragged", "no token is dropped, and only assigned rows are sent"
    how = "collective permutes during the matmuls" if in_chunks else "one collective"
    return "alltoall", f"buffers of equal size are sent by {how}"


def sending_order(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """Return the distances of an exchange over these axes, in an order that keeps all links busy.

    Empty for devices whose links are not known. See `PermuteAllToAll`.
    """
    chip = CHIPS.get(mesh.devices.flat[0].device_kind)
    if chip is None or not chip.ici_bandwidth:
        return ()
    coords = chip_coords(mesh.devices.flat)
    sides = [max(axis) + 1 for axis in zip(*coords, strict=True)]
    own = [mesh.axis_names.index(name) for name in axes]
    n = math.prod(mesh.devices.shape[axis] for axis in own)
    # Numbers of the devices by rank in the exchange, and by group of devices that exchange.
    grid = np.arange(len(coords)).reshape(mesh.devices.shape)
    devices = np.moveaxis(grid, own, range(len(own))).reshape(n, -1)
    routes = []
    for distance in range(1, n):
        targets = devices[target_of(np.arange(n), distance, n)]
        pairs = zip(devices.flat, targets.flat, strict=True)
        routes.append([(coords[source], coords[target]) for source, target in pairs])
    return tuple(1 + index for index in order_by_links(routes, sides, chip.wrap))
