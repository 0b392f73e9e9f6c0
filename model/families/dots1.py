"""dots.1: a norm on every query and key head, and DeepSeek-V3's router."""

from model.families.base import Family, register
from model.families.deepseek import EXPERTS, router
from model.families.layer_rules import LayerTypes, sliding_from
from model.families.rope import Rope
from model.families.rules import Bias, FixedKey, Key, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS

DOTS1 = register(
    Family(
        architecture="Dots1ForCausalLM",
        model_type="dots1",
        rules=(
            *dimensions(eps=1e-6, kv_heads=32),
            Rope(),
            LayerTypes(sliding_from(62), window=4096, others=("max_window_layers",)),
            FixedKey("hidden_act", ("silu",)),
            Bias("attention_bias", ("qkv", "o")),
            *router(),
            Key("n_shared_experts", "moe.num_shared_experts"),
            Key("first_k_dense_replace", "moe.first_k_dense_replace", 0),
            Key("norm_topk_prob", "moe.norm_topk_prob", False),
        ),
        fields={"qk_norm": True, "moe.router": "sigmoid", "moe.router_bias": True},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP, *EXPERTS),
    )
)
