"""Mixtral: Mistral with experts; the router takes the top k before its softmax."""

from model.families.base import Family, register
from model.families.layer_rules import LayerTypes, every_layer
from model.families.rope import Rope
from model.families.rules import ExpertWidth, FixedKey, Key, dimensions
from model.families.shared import ATTENTION, OUTER, PRE_NORMS, experts
from model.families.tensors import weight

MIXTRAL = register(
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        rules=(
            *dimensions(eps=1e-5, kv_heads=8, width=ExpertWidth()),
            Rope(theta=1e6),
            LayerTypes(every_layer, listed=False),
            FixedKey("hidden_act", ("silu",)),
            Key("num_local_experts", "moe.num_experts", 8, other="num_experts"),
            Key("num_experts_per_tok", "moe.num_experts_per_tok", 2),
        ),
        fields={"moe.router": "topk_softmax"},
        tensors=(
            *OUTER,
            *PRE_NORMS,
            *ATTENTION,
            *weight("model.layers.{layer}.block_sparse_moe.gate", "sparse_layers.mlp.router"),
            *experts("model.layers.{layer}.block_sparse_moe.experts", "w1", "w3", "w2"),
            *weight("model.layers.{layer}.mlp.gate", "sparse_layers.mlp.router"),
            *experts("model.layers.{layer}.mlp.experts"),
        ),
    )
)
