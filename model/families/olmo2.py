"""OLMo 2: norms only after attention and MLP; one norm spans all query heads, one all key heads."""

from model.families.base import Family, register
from model.families.rope import Rope
from model.families.rules import Bias, FixedKey, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER
from model.families.tensors import vector

OLMO2 = register(
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        rules=(
            *dimensions(eps=1e-5),
            Rope(),
            FixedKey("hidden_act", ("silu",)),
            Bias("attention_bias", ("qkv", "o")),
        ),
        fields={"norm_placement": "post", "qk_norm": True, "qk_norm_across_heads": True},
        tensors=(
            *OUTER,
            *vector(
                "model.layers.{layer}.post_attention_layernorm.weight",
                "*.attention_post_norm.scale",
            ),
            *vector(
                "model.layers.{layer}.post_feedforward_layernorm.weight", "*.mlp_post_norm.scale"
            ),
            *ATTENTION,
            *DENSE_MLP,
        ),
    )
)
