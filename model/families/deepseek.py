"""DeepSeek-V2 and V3: latent attention, groups of experts; dots.1 and GLM-4.5 share V3's router."""

from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.families.base import Family, Fields, Keys, Rule, register
from model.families.rope import Rope
from model.families.rules import (
    HEADS_DIVIDE_HIDDEN,
    FixedKey,
    IgnoredKeys,
    Key,
    dimensions,
    given,
    whole_number,
)
from model.families.shared import DENSE_MLP, OUTER, PRE_NORMS, experts, mlp
from model.families.tensors import linear, vector, weight

_ROUTED = (
    Key("n_routed_experts", "moe.num_experts", other="num_local_experts"),
    Key("num_experts_per_tok", "moe.num_experts_per_tok"),
    Key("moe_intermediate_size", "moe.moe_intermediate_size", written="expert_size"),
    FixedKey("moe_layer_freq", (1,), optional=True),
)


def router(groups: int = 1, best: int = 1, factor: float = 1.0) -> tuple[Rule, ...]:
    """Return the keys of a router of the kind of DeepSeek-V3; the arguments are their defaults."""
    return (
        *_ROUTED,
        Key("routed_scaling_factor", "moe.routed_scaling_factor", factor),
        Key("n_group", "moe.n_group", groups),
        Key("topk_group", "moe.topk_group", best),
        FixedKey("scoring_func", ("sigmoid",), optional=True),
        FixedKey("topk_method", ("noaux_tc",), optional=True),
    )


EXPERTS = (
    *weight("model.layers.{layer}.mlp.gate", "sparse_layers.mlp.router"),
    *vector(
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        "sparse_layers.mlp.router.bias",
        dtype="F32",
    ),
    *experts("model.layers.{layer}.mlp.experts"),
    *mlp("model.layers.{layer}.mlp.shared_experts", "sparse_layers.mlp.shared"),
)
"""Router with a bias on the choice of experts, experts, and shared experts."""


@dataclass(frozen=True)
class GroupLimited:
    """`topk_method`: whether the router of DeepSeek-V2 limits a token to its best groups."""

    names: tuple[str, ...] = ("topk_method", "n_group", "topk_group")

    def read(self, keys: Keys, fields: Fields) -> None:
        """Set the number of groups, and of those that a token may choose from."""
        method, *numbers = self.names
        FixedKey(method, ("greedy", "group_limited_greedy")).read(keys, fields)
        is_limited = keys.get(method) == "group_limited_greedy"
        for name in numbers:
            value = whole_number(name, given(keys, name, 1))
            fields[f"moe.{name}"] = value if is_limited else 1

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write the numbers and the method."""
        keys["n_group"], keys["topk_group"] = model.moe.n_group, model.moe.topk_group
        keys["topk_method"] = "greedy" if model.moe.n_group == 1 else "group_limited_greedy"


_LATENT = (
    Key("q_lora_rank", "mla.q_lora_rank", 1536, nullable=True),
    Key("kv_lora_rank", "mla.kv_lora_rank", 512, size=True),
    Key("qk_nope_head_dim", "mla.qk_nope_head_dim", 128, size=True),
    Key("qk_rope_head_dim", "mla.qk_rope_head_dim", 64, size=True),
    Key("v_head_dim", "mla.v_head_dim", 128, size=True),
    IgnoredKeys(("head_dim", "qk_head_dim")),  # they follow from the others
    Rope(),
    FixedKey("hidden_act", ("silu",)),
    FixedKey("attention_bias", (False,)),
)
_AT = "model.layers.{layer}.self_attn"
_ATTENTION = (
    *weight(f"{_AT}.q_proj", "*.attention.q"),
    *weight(f"{_AT}.q_b_proj", "*.attention.q_b"),
    *vector(f"{_AT}.q_a_layernorm.weight", "*.attention.q_a_norm.scale"),
    *vector(f"{_AT}.kv_a_layernorm.weight", "*.attention.kv_a_norm.scale"),
    *linear(f"{_AT}.q_a_proj", "*.attention.down", "q_a")[:1],
    *linear(f"{_AT}.kv_a_proj_with_mqa", "*.attention.down", "kv_a")[:1],
    *weight(f"{_AT}.kv_b_proj", "*.attention.kv_b"),
    *weight(f"{_AT}.o_proj", "*.attention.o"),
)
_TENSORS = (*OUTER, *PRE_NORMS, *_ATTENTION, *DENSE_MLP, *EXPERTS)
_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is

DEEPSEEK_V2 = register(
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        rules=(
            *dimensions(eps=1e-6, has_head_dim=False),
            HEADS_DIVIDE_HIDDEN,
            *_LATENT,
            FixedKey("mlp_bias", (False,), optional=True),
            *_ROUTED,
            Key("routed_scaling_factor", "moe.routed_scaling_factor", 1.0),
            GroupLimited(),
            FixedKey("scoring_func", ("softmax",), optional=True),
            FixedKey("norm_topk_prob", (False,)),
            Key("n_shared_experts", "moe.num_shared_experts", 2),
            Key("first_k_dense_replace", "moe.first_k_dense_replace", 0),
        ),
        fields={
            "mla.rope_interleave": True,
            "mla.norm_eps": _EPS,
            "moe.router": "softmax",
            "moe.norm_topk_prob": False,
        },
        tensors=_TENSORS,
    )
)
DEEPSEEK_V3 = register(
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        rules=(
            *dimensions(eps=1e-6, has_head_dim=False),
            *_LATENT,
            Key("rope_interleave", "mla.rope_interleave", True),
            *router(groups=8, best=4, factor=2.5),
            Key("n_shared_experts", "moe.num_shared_experts", 1),
            Key("first_k_dense_replace", "moe.first_k_dense_replace", 3),
            Key("norm_topk_prob", "moe.norm_topk_prob", True),
        ),
        fields={"mla.norm_eps": _EPS, "moe.router": "sigmoid", "moe.router_bias": True},
        tensors=_TENSORS,
    )
)
