"""Gemma 2 and 3 (text): norms before and after each branch, scaled embeddings, mixed windows."""

from model.families.base import Family, register
from model.families.layer_rules import LayerTypes, full_every
from model.families.rope import Rope, RopeOfLayerTypes
from model.families.rules import (
    HEADS_DIVIDE_HIDDEN,
    Bias,
    FixedKey,
    IgnoredKeys,
    Key,
    Named,
    ScaledEmbedding,
    dimensions,
)
from model.families.shared import ATTENTION, DENSE_MLP, OUTER
from model.families.tensors import vector

_RULES = (
    *dimensions(eps=1e-6, tied=True, kv_heads=4, head_dim=256),
    HEADS_DIVIDE_HIDDEN,
    ScaledEmbedding(),
    Named("hidden_activation", "hidden_act", (("gelu_pytorch_tanh", "gelu_tanh"),)),
    IgnoredKeys(("hidden_act", "sliding_window_size")),
    Key("query_pre_attn_scalar", default=256, whole=True, written="head_size"),
    Bias("attention_bias", ("qkv", "o")),
    FixedKey("use_bidirectional_attention", (False,)),
)
_FIELDS = {"norm_placement": "both", "norm_offset": 1.0}
_NORMS = (
    *vector("model.layers.{layer}.input_layernorm.weight", "*.attention_norm.scale"),
    *vector("model.layers.{layer}.post_attention_layernorm.weight", "*.attention_post_norm.scale"),
    *vector("model.layers.{layer}.pre_feedforward_layernorm.weight", "*.mlp_norm.scale"),
    *vector("model.layers.{layer}.post_feedforward_layernorm.weight", "*.mlp_post_norm.scale"),
)

GEMMA2 = register(
    Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        rules=(
            *_RULES,
            Rope(),
            LayerTypes(full_every(2), window=4096),
            Key("attn_logit_softcapping", default=50.0, nullable=True),
            Key("final_logit_softcapping", default=30.0, nullable=True),
        ),
        fields=_FIELDS,
        tensors=(*OUTER, *_NORMS, *ATTENTION, *DENSE_MLP),
    )
)
GEMMA3 = register(
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        rules=(
            *_RULES,
            LayerTypes(
                full_every(6),
                window=4096,
                others=("sliding_window_pattern", "_sliding_window_pattern"),
            ),
            RopeOfLayerTypes(theta=1e6, local_theta=1e4),
            FixedKey("attn_logit_softcapping", (None,)),  # transformers reads it, and ignores it
            Key("final_logit_softcapping", default=None),
        ),
        fields={**_FIELDS, "qk_norm": True},
        tensors=(*OUTER, *_NORMS, *ATTENTION, *DENSE_MLP),
    )
)
