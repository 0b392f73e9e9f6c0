"""Qwen2 and Qwen2.5: Llama with biases on the q, k and v projections."""

from model.families.base import Family, register
from model.families.layer_rules import SWITCHED_WINDOW
from model.families.rope import Rope
from model.families.rules import FixedKey, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS

QWEN2 = register(
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        rules=(
            *dimensions(eps=1e-6, kv_heads=32),
            Rope(),
            SWITCHED_WINDOW,
            FixedKey("hidden_act", ("silu",)),
            FixedKey("use_mrope", (False,), optional=True),
        ),
        fields={"biases": ("qkv",)},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP),
    )
)
