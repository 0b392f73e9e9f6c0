"""GLM-4.5: half of every head rotated, and DeepSeek-V3's router."""

from model.families.base import Family, register
from model.families.deepseek import EXPERTS, router
from model.families.rope import Rope
from model.families.rules import Bias, FixedKey, Key, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS

GLM4_MOE = register(
    Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        rules=(
            *dimensions(eps=1e-5, kv_heads=8),
            Rope(partial=0.5),
            FixedKey("hidden_act", ("silu",)),
            Bias("attention_bias", ("qkv",)),
            Key("use_qk_norm", "qk_norm", False),
            *router(),
            Key("n_shared_experts", "moe.num_shared_experts", 1),
            Key("first_k_dense_replace", "moe.first_k_dense_replace", 1),
            Key("norm_topk_prob", "moe.norm_topk_prob", True),
        ),
        fields={"moe.router": "sigmoid", "moe.router_bias": True},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP, *EXPERTS),
    )
)
