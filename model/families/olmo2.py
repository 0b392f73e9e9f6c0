"""OLMo 2: norms after attention and MLP only, and one norm over all heads of queries, or keys."""

from model.families.base import Family, register
from model.families.rope import Rope
from model.families.rules import Bias, Only, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER
from model.families.tensors import vector

OLMO2 = register(
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        rules=(
            *dimensions(eps=1e-5),
            Rope(),
            Only("hidden_act", ("silu",)),
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
