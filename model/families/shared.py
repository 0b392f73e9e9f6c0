"""Tensor entries that several families share."""

from model.families.layouts import Concatenated, Transposed
from model.families.tensors import Entry, linear, vector

OUTER = (
    *vector("model.embed_tokens.weight", "embed.table"),
    *vector("model.norm.weight", "norm.scale"),
    Entry("lm_head.weight", ("head.kernel",), Transposed()),
)
"""Embedding, last norm and head. A tied head has no kernel, and so no tensor."""
PRE_NORMS = (
    *vector("model.layers.{layer}.input_layernorm.weight", "*.attention_norm.scale"),
    *vector("model.layers.{layer}.post_attention_layernorm.weight", "*.mlp_norm.scale"),
)
"""Norms before attention and before the MLP."""
ATTENTION = (
    *linear("model.layers.{layer}.self_attn.q_proj", "*.attention.qkv", "q"),
    *linear("model.layers.{layer}.self_attn.k_proj", "*.attention.qkv", "k"),
    *linear("model.layers.{layer}.self_attn.v_proj", "*.attention.qkv", "v"),
    *linear("model.layers.{layer}.self_attn.o_proj", "*.attention.o"),
    *vector("model.layers.{layer}.self_attn.q_norm.weight", "*.attention.q_norm.scale"),
    *vector("model.layers.{layer}.self_attn.k_norm.weight", "*.attention.k_norm.scale"),
)
"""Projections of attention and, where a model has them, their biases and norms of q and k."""


def mlp(name: str, path: str) -> tuple[Entry, ...]:
    """Return the entries of a gated MLP with separate gate and up."""
    return (
        *linear(f"{name}.gate_proj", f"{path}.gate_up", "gate"),
        *linear(f"{name}.up_proj", f"{path}.gate_up", "up"),
        *linear(f"{name}.down_proj", f"{path}.down"),
    )


DENSE_MLP = mlp("model.layers.{layer}.mlp", "layers.mlp")


def experts(
    name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Entry, ...]:
    """Return the entries of experts: one tensor each, or fused as newer versions can write."""
    one = name + ".{expert}."
    kernels = "sparse_layers.mlp.gate_up.kernel.gate", "sparse_layers.mlp.gate_up.kernel.up"
    return (
        Entry(f"{one}{gate}.weight", kernels[:1], Transposed()),
        Entry(f"{one}{up}.weight", kernels[1:], Transposed()),
        Entry(f"{one}{down}.weight", ("sparse_layers.mlp.down.kernel",), Transposed()),
        Entry(f"{name}.gate_up_proj", kernels, Transposed(Concatenated()), stacked=True),
        Entry(f"{name}.down_proj", ("sparse_layers.mlp.down.kernel",), Transposed(), stacked=True),
    )
