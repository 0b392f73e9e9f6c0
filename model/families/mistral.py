"""Mistral: Llama with a sliding window in every layer, or in none."""

from model.families.base import Family, register
from model.families.layer_rules import LayerTypes, every_layer
from model.families.rope import Rope
from model.families.rules import FixedKey, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS

MISTRAL = register(
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        rules=(
            *dimensions(eps=1e-6, kv_heads=8),
            Rope(),
            LayerTypes(every_layer, listed=False, window=4096),
            FixedKey("hidden_act", ("silu",)),
        ),
        fields={},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP),
    )
)
