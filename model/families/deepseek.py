"""Rules and tensors of DeepSeek-V3's router and experts, which dots.1 and GLM-4.5 share.

DeepSeek models themselves are not supported: they need MLA.
"""

from model.families.rules import FixedKey, Key
from model.families.shared import experts, mlp
from model.families.tensors import vector, weight

ROUTER = (
    Key("n_routed_experts", "moe.num_experts", other="num_local_experts"),
    Key("num_experts_per_tok", "moe.num_experts_per_tok"),
    Key("moe_intermediate_size", "moe.moe_intermediate_size", written="expert_size"),
    Key("n_group", "moe.n_group", 1),
    Key("topk_group", "moe.topk_group", 1),
    Key("routed_scaling_factor", "moe.routed_scaling_factor", 1.0),
    FixedKey("scoring_func", ("sigmoid",), optional=True),
    FixedKey("topk_method", ("noaux_tc",), optional=True),
    FixedKey("moe_layer_freq", (1,), optional=True),
)
"""Keys of a router of this kind."""
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
