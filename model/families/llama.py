"""Llama 2 and 3, and models with the same architecture, such as SmolLM 1 and 2."""

from model.families.base import Family, register
from model.families.rope import Rope
from model.families.rules import HEADS_DIVIDE_HIDDEN, Bias, FixedKey, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS

LLAMA = register(
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        rules=(
            *dimensions(eps=1e-6),
            HEADS_DIVIDE_HIDDEN,
            Rope(),
            FixedKey("hidden_act", ("silu",)),
            Bias("attention_bias", ("qkv", "o")),
            Bias("mlp_bias", ("mlp",)),
        ),
        fields={},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP),
    )
)
