"""Phi-3 and Phi-4: q, k and v in one tensor, and gate and up in one tensor."""

from model.families.base import Family, Fields, register
from model.families.layer_rules import LayerTypes, every_layer
from model.families.rope import Rope
from model.families.rules import Condition, FixedKey, dimensions
from model.families.shared import OUTER, PRE_NORMS
from model.families.tensors import linear


def _find_other_head_size(fields: Fields) -> str | None:
    """Return why transformers cannot load this size of a head, or None if it can.

    With longrope it computes the size as hidden_size / num_attention_heads.
    """
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    size = fields.get("head_dim") or hidden // heads
    if fields["rope_scaling"]["type"] != "longrope" or size * heads == hidden:
        return None
    return (
        f"with rope type longrope, hidden_size={hidden} must be num_attention_heads={heads} times "
        f"head_dim={size}"
    )


PHI3 = register(
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        rules=(
            *dimensions(eps=1e-5),
            Rope(partial=1.0, types=("default", "longrope")),
            Condition(_find_other_head_size),
            LayerTypes(every_layer, listed=False),
            FixedKey("hidden_act", ("silu",)),
            FixedKey("attention_bias", (False,)),
            FixedKey("mlp_bias", (False,), optional=True),
            FixedKey("lm_head_bias", (False,), optional=True),
            FixedKey("full_attn_mod", (1,), optional=True),
            FixedKey("interpolate_factor", (1,), optional=True),
        ),
        fields={},
        tensors=(
            *OUTER,
            *PRE_NORMS,
            *linear("model.layers.{layer}.self_attn.qkv_proj", "*.attention.qkv", "q", "k", "v"),
            *linear("model.layers.{layer}.self_attn.o_proj", "*.attention.o"),
            *linear("model.layers.{layer}.mlp.gate_up_proj", "layers.mlp.gate_up", "gate", "up"),
            *linear("model.layers.{layer}.mlp.down_proj", "layers.mlp.down"),
        ),
    )
)
