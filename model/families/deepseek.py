"""Router and experts of DeepSeek-V3, which dots.1 and GLM-4.5 took over."""

from model.families.rules import Key
from model.families.shared import experts, mlp
from model.families.tensors import linear, vector

ROUTER = (
    Key("n_routed_experts", "moe.num_experts", other="num_local_experts"),
    Key("num_experts_per_tok", "moe.num_experts_per_tok"),
    Key("moe_intermediate_size", "moe.moe_intermediate_size"),
    Key("n_group", "moe.n_group", 1),
    Key("topk_group", "moe.topk_group", 1),
    Key("routed_scaling_factor", "moe.routed_scaling_factor", 1.0),
)
"""Keys of the router of DeepSeek-V3 and of models that took it over."""
EXPERTS = (
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
