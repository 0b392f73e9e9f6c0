"""Choice of the exchange method and the grouped matmul of sparse layers, with its reason."""

from dataclasses import dataclass

from model.config import ModelConfig
from parallel.experts.expert import EXPERT_AXES
from parallel.experts.grouped_matmul import GROUPED_MATMULS, choose_grouped_matmul
from parallel.experts.names import ExchangeMethod
from parallel.sharding.partition import PartitionManager


@dataclass(frozen=True)
class MoEBackend:
    """Exchange method and grouped matmul of the sparse layers; reason is one line."""

    exchange: ExchangeMethod
    grouped_matmul: str
    reason: str


def choose_experts(
    config: ModelConfig, manager: PartitionManager, *, dropless: bool = False
) -> MoEBackend:
    """Choose exchange and grouped matmul of the sparse layers on this mesh, with the reasons.

    dropless: ignore the expert capacity of the configuration.
    Raises: ValueError for a configured grouped matmul that does not support the row layout of the
    exchange, or this platform.
    """
    moe, platform = config.moe, str(manager.mesh.devices.flat[0].platform)
    dropless |= moe.capacity_factor is None
    devices = manager.axis_size(EXPERT_AXES[moe.expert_rule][0].axes[0])
    exchange, why = _choose_exchange(config, platform, devices, dropless)
    if exchange == "dense":
        return MoEBackend("dense", "einsum", f"{why}; every expert computes every token")
    if exchange == "alltoall" and dropless and devices > 1:
        rows = moe.num_experts / moe.num_experts_per_tok
        why += f", buffers without dropped tokens hold {rows:.3g} times the assigned rows"
    name, reason = moe.grouped_matmul, "as configured"
    if name == "auto":
        uniform = not dropless and exchange == "alltoall"
        name, reason = choose_grouped_matmul(platform, uniform=uniform)
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
    return MoEBackend(exchange, name, f"{why}; {name}: {reason}")


def _choose_exchange(
    config: ModelConfig, platform: str, devices: int, dropless: bool
) -> tuple[ExchangeMethod, str]:
    """Choose the exchange between `devices` devices that share the experts, and give the reason."""
    moe = config.moe
    if moe.exchange == "dense":
        return "dense", "exchange as configured"
    if devices == 1:
        return "alltoall", "every device has all experts, so nothing is exchanged"
    if moe.exchange == "ragged" and platform == "cpu":
        return "ragged", "emulated by an all-gather of all rows: cpu has no ragged_all_to_all"
    if moe.exchange != "auto":
        return moe.exchange, "exchange as configured"
    if platform == "cpu":
        return "alltoall", "cpu has no ragged_all_to_all"
    uniform = moe.grouped_matmul != "auto" and GROUPED_MATMULS[moe.grouped_matmul].is_uniform
    if dropless and moe.exchange_chunks == 1 and not uniform:
        return "ragged", "no token is dropped, and only assigned rows are sent"
    how = "collective permutes during the matmuls" if moe.exchange_chunks > 1 else "one collective"
    return "alltoall", f"buffers of equal size are sent by {how}"
