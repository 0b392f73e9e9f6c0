"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from model.families.base import Family, register
from model.families.rope import Rope
from model.families.rules import LayerTypes, Only, after_max_window_layers, dimensions
from model.families.shared import ATTENTION, DENSE_MLP, OUTER, PRE_NORMS

QWEN2 = register(
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        rules=(
            *dimensions(eps=1e-6),
            Rope(),
            LayerTypes(
                after_max_window_layers,
                window=4096,
                switch="use_sliding_window",
                others=("max_window_layers",),
            ),
            Only("hidden_act", ("silu",)),
        ),
        fields={"biases": ("qkv",)},
        tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *DENSE_MLP),
    )
)
