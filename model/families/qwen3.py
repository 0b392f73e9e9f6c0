"""Qwen3, dense and with experts: a norm on every query and key head."""

from dataclasses import replace

from model.families.base import Family, register
from model.families.layer_rules import SWITCHED_WINDOW, DenseLayers, every_layer
from model.families.rope import Rope
from model.families.rules import Bias, FixedKey, Key, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS, experts
from model.families.tensors import weight

QWEN3 = register(
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        rules=(
            *dimensions(eps=1e-6, kv_heads=32, head_dim=128),
            Rope(),
            SWITCHED_WINDOW,
            FixedKey("hidden_act", ("silu",)),
            Bias("attention_bias", ("qkv", "o")),
        ),
        fields={"qk_norm": True},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP),
    )
)
QWEN3_MOE = register(
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        rules=(
            *dimensions(eps=1e-6, kv_heads=4),
            Rope(),
            replace(SWITCHED_WINDOW, pattern=every_layer, listed=False),
            FixedKey("hidden_act", ("silu",)),
            Bias("attention_bias", ("qkv", "o")),
            Key("num_experts", "moe.num_experts", 128, other="num_local_experts"),
            Key("num_experts_per_tok", "moe.num_experts_per_tok", 8),
            Key("moe_intermediate_size", "moe.moe_intermediate_size", 768, written="expert_size"),
            Key("norm_topk_prob", "moe.norm_topk_prob", False),
            Key("decoder_sparse_step", "moe.decoder_sparse_step", 1),
            DenseLayers(),
        ),
        fields={"qk_norm": True, "moe.router": "softmax"},
        tensors=(
            *OUTER,
            *PRE_NORMS,
            *ATTENTION,
            *DENSE_MLP,
            *weight("model.layers.{layer}.mlp.gate", "sparse_layers.mlp.router"),
            *experts("model.layers.{layer}.mlp.experts"),
        ),
    )
)
