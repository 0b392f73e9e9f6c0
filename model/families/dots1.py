"""dots.1: norms on the heads of queries and keys, and DeepSeek-V3's router."""

from model.families.base import Family, register
from model.families.rope import Rope
from model.families.rules import Key, LayerTypes, Only, after_max_window_layers, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS, experts, mlp
from model.families.tensors import linear, vector

DEEPSEEK_ROUTER = (
    Key("n_routed_experts", "moe.num_experts", other="num_local_experts"),
    Key("num_experts_per_tok", "moe.num_experts_per_tok"),
    Key("moe_intermediate_size", "moe.moe_intermediate_size"),
    Key("n_group", "moe.n_group", 1),
    Key("topk_group", "moe.topk_group", 1),
    Key("routed_scaling_factor", "moe.routed_scaling_factor", 1.0),
)
"""Keys of the router of DeepSeek-V3 and of models that took it over."""
DEEPSEEK_EXPERTS = (
    *linear("model.layers.{layer}.mlp.gate", "sparse_layers.mlp.router")[:1],
    *vector(
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        "sparse_layers.mlp.router.bias",
        dtype="F32",
    ),
    *experts("model.layers.{layer}.mlp.experts"),
    *mlp("model.layers.{layer}.mlp.shared_experts", "sparse_layers.mlp.shared"),
)
"""Router with a bias on the choice of experts, experts, and shared experts."""

DOTS1 = register(
    Family(
        architecture="Dots1ForCausalLM",
        model_type="dots1",
        rules=(
            *dimensions(eps=1e-6),
            Rope(),
            LayerTypes(after_max_window_layers, window=4096, others=("max_window_layers",)),
            Only("hidden_act", ("silu",)),
            Only("attention_bias", (False,)),
            *DEEPSEEK_ROUTER,
            Key("n_shared_experts", "moe.num_shared_experts"),
            Key("first_k_dense_replace", "moe.first_k_dense_replace", 0),
            Key("norm_topk_prob", "moe.norm_topk_prob", False),
        ),
        fields={"qk_norm": True, "moe.router": "sigmoid", "moe.router_bias": True},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP, *DEEPSEEK_EXPERTS),
    )
)
