"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts and a gated shared expert."""

from dataclasses import dataclass, replace
from typing import Any

from model.config import ModelConfig
from model.families.base import Family, FamilyError, Fields, Keys, register
from model.families.layer_rules import SWITCHED_WINDOW, DenseLayers
from model.families.rope import Rope
from model.families.rules import Bias, FixedKey, Key, dimensions, given, whole_number
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS, experts, mlp
from model.families.tensors import weight
from model.segments import LayerType


@dataclass(frozen=True)
class SharedWidth:
    """`shared_expert_intermediate_size`, which must be a multiple of the width of an expert."""

    names: tuple[str, ...] = ("shared_expert_intermediate_size",)

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the number of shared experts. Raises: FamilyError."""
        name, width = self.names[0], fields["moe.moe_intermediate_size"]
        count, rest = divmod(whole_number(name, given(keys, name, 5632)), width)
        if rest:
            raise FamilyError(
                f"config.json: {name}={keys.get(name)} is not supported; only multiples of "
                f"moe_intermediate_size={width} are"
            )
        fields["moe.num_shared_experts"] = count

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the width of all shared experts together."""
        keys[self.names[0]] = model.moe.num_shared_experts * model.expert_size


def _every_second_layer(keys: Keys, count: int, window: int | None) -> list[LayerType]:
    """Return sliding attention for layers 0, 2, 4 ... below `max_window_layers`, given a window."""
    last = whole_number("max_window_layers", given(keys, "max_window_layers", 28), least=0)
    return [
        "sliding_attention" if window is not None and n % 2 == 0 and n < last else "full_attention"
        for n in range(count)
    ]


QWEN2_MOE = register(
    Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        rules=(
            *dimensions(eps=1e-6, kv_heads=16),
            Rope(),
            replace(SWITCHED_WINDOW, pattern=_every_second_layer),
            FixedKey("hidden_act", ("silu",)),
            Bias("qkv_bias", ("qkv",), default=True),
            Key("num_experts", "moe.num_experts", 60, other="num_local_experts"),
            Key("num_experts_per_tok", "moe.num_experts_per_tok", 4),
            Key(
                "moe_intermediate_size",
                "moe.moe_intermediate_size",
                1408,
                size=True,
                written="expert_size",
            ),
            SharedWidth(),
            Key("norm_topk_prob", "moe.norm_topk_prob", False),
            Key("decoder_sparse_step", "moe.decoder_sparse_step", 1),
            DenseLayers(),
        ),
        fields={"moe.router": "softmax", "moe.shared_expert_gate": True},
        tensors=(
            *OUTER,
            *PRE_NORMS,
            *ATTENTION,
            *DENSE_MLP,
            *weight("model.layers.{layer}.mlp.gate", "sparse_layers.mlp.router"),
            *experts("model.layers.{layer}.mlp.experts"),
            *mlp("model.layers.{layer}.mlp.shared_expert", "sparse_layers.mlp.shared"),
            *weight("model.layers.{layer}.mlp.shared_expert_gate", "sparse_layers.mlp.shared_gate"),
        ),
    )
)
