"""Phi-3 and Phi-4: q, k and v in one tensor, and gate and up in one tensor."""

from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.families.base import Family, FamilyError, Fields, Keys, register
from model.families.layer_rules import LayerTypes, every_layer
from model.families.rope import Rope
from model.families.rules import FixedKey, dimensions
from model.families.shared import OUTER, PRE_NORMS
from model.families.tensors import linear


@dataclass(frozen=True)
class LongRopeHeads:
    """Check of the size of heads: with longrope, transformers takes it for hidden_size / heads."""

    names: tuple[str, ...] = ()

    def read(self, keys: Keys, fields: Fields) -> None:
        """Check the size of heads. Raises: FamilyError."""
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        size = fields.get("head_dim") or hidden // heads
        if fields["rope_scaling"]["type"] == "longrope" and size * heads != hidden:
            raise FamilyError(
                f"config.json: with rope type longrope, hidden_size={hidden} must be "
                f"num_attention_heads={heads} times head_dim={size}"
            )

    def write(self, model: ModelConfig, keys: dict[str, Any]) -> None:
        """Write nothing; `read` checks what the other rules have written."""


PHI3 = register(
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        rules=(
            *dimensions(eps=1e-5),
            Rope(partial=1.0, types=("default", "longrope")),
            LongRopeHeads(),
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
