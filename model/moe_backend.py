"""How tokens reach their experts, and how experts multiply them: the choice, with its reason."""

from dataclasses import dataclass

from model.config import ModelConfig
from parallel.experts.exchange import ExchangeMethod
from parallel.experts.expert import EXPERT_AXES
from parallel.experts.grouped_matmul import choose_form
from parallel.sharding.partition import PartitionManager


@dataclass(frozen=True)
class ExpertChoice:
    """How tokens meet experts, and why: exchange and form are names, reason is one line."""

    exchange: ExchangeMethod
    form: str
    reason: str


def choose_experts(
    config: ModelConfig, manager: PartitionManager, *, dropless: bool = False
) -> ExpertChoice:
    """Exchange and grouped matmul of the sparse layers on this mesh, with the reasons.

    dropless: whatever the capacity of the configuration.
    Raises: ValueError for a grouped matmul that cannot take the rows of the exchange, or does not
    run here.
    """
    moe, platform = config.moe, str(manager.mesh.devices.flat[0].platform)
    dropless |= moe.capacity_factor is None
    devices = manager.axis_size(EXPERT_AXES[moe.expert_rule][0].axes[0])
    exchange, why = _exchange_of(config, platform, devices, dropless)
    if exchange == "dense":
        return ExpertChoice("dense", "einsum", f"{why}; every expert sees every token")
    if exchange == "alltoall" and dropless and devices > 1:
        rows = moe.num_experts / moe.num_experts_per_tok
        why += f", with room for all: {rows:.3g} times the rows that exist"
    form, reason = str(moe.grouped_matmul), "as configured"
    if form == "auto":
        form, reason = choose_form(platform, uniform=not dropless and exchange == "alltoall")
    if form == "padded" and exchange == "ragged":
        raise ValueError(
            "model.moe.grouped_matmul=padded needs as many rows for every expert, which "
            "exchange=ragged does not give; use another form, or alltoall"
        )
    if form == "pallas" and platform != "tpu":
        raise ValueError(
            f"model.moe.grouped_matmul=pallas runs on TPU only, these devices are {platform}; use "
            "auto"
        )
    return ExpertChoice(exchange, form, f"{why}; grouped matmul {reason}")


def _exchange_of(
    config: ModelConfig, platform: str, devices: int, dropless: bool
) -> tuple[ExchangeMethod, str]:
    """How tokens get to experts that `devices` devices share, and why."""
    moe = config.moe
    if moe.exchange == "dense":
        return "dense", "exchange as configured"
    if devices == 1:
        return "alltoall", "all experts are on every device, nothing travels"
    if moe.exchange == "ragged" and platform == "cpu":
        return "ragged", "emulated: cpu has no ragged_all_to_all, so all rows are gathered"
    if moe.exchange != "auto":
        return moe.exchange, "exchange as configured"
    if platform == "cpu":
        return "alltoall", "cpu has no ragged_all_to_all"
    if dropless and moe.exchange_chunks == 1 and moe.grouped_matmul != "padded":
        return "ragged", "nothing is dropped, and only rows that exist travel"
    how = "hop by hop under the matmuls" if moe.exchange_chunks > 1 else "in one collective"
    return "alltoall", f"buffers of equal size travel {how}"
