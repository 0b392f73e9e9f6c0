"""SmolLM3: Llama in which some layers have no rope. SmolLM 1 and 2 are Llama."""

from dataclasses import replace

from model.families.base import Family, Fields, Keys, register
from model.families.layer_rules import SWITCHED_WINDOW, NoRopeLayers
from model.families.rope import Rope
from model.families.rules import Bias, FixedKey, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS
from model.segments import LayerType


def _sliding_without_rope(keys: Keys, count: int, window: int | None) -> list[LayerType]:
    """Return sliding attention for layers without rope, if there is a window."""
    fields: Fields = {"num_hidden_layers": count}
    NoRopeLayers().read(keys, fields)
    pattern = fields["rope_layers"]
    return [
        "full_attention" if window is None or pattern[n % len(pattern)] else "sliding_attention"
        for n in range(count)
    ]


SMOLLM3 = register(
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        rules=(
            *dimensions(eps=1e-6, tied=True, kv_heads=4),
            Rope(theta=2e6),
            NoRopeLayers(),
            replace(SWITCHED_WINDOW, pattern=_sliding_without_rope, window=None),
            FixedKey("hidden_act", ("silu",)),
            Bias("attention_bias", ("qkv", "o")),
            Bias("mlp_bias", ("mlp",)),
        ),
        fields={},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP),
    )
)
