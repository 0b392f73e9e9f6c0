"""gpt-oss: attention sinks, biases everywhere, and experts with a clamped activation.

Gate and up are interleaved columns. The released weights of the experts are MXFP4.
"""

from model.families.base import Family, register
from model.families.layer_rules import LayerTypes, full_every
from model.families.layouts import IDENTITY, Interleaved
from model.families.rope import Rope
from model.families.rules import Bias, ExpertWidth, FixedKey, IgnoredKeys, Key, dimensions
from model.families.shared import ATTENTION, OUTER, PRE_NORMS
from model.families.tensors import Entry, vector, weight

_EXPERTS = "model.layers.{layer}.mlp.experts"
_GATE_UP = "sparse_layers.mlp.gate_up"

GPT_OSS = register(
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        rules=(
            *dimensions(eps=1e-5, kv_heads=8, head_dim=64, width=ExpertWidth()),
            Rope(
                theta=150000.0,
                scaling={
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            ),
            LayerTypes(full_every(2), window=128),
            FixedKey("hidden_act", ("silu",)),
            FixedKey("swiglu_alpha", (1.702,)),
            Key("swiglu_limit", default=7.0),
            Bias("attention_bias", ("qkv", "o"), default=True),
            Key("num_local_experts", "moe.num_experts", 128, other="num_experts"),
            Key("num_experts_per_tok", "moe.num_experts_per_tok", 4),
            IgnoredKeys(("experts_per_token", "initial_context_length")),
        ),
        fields={
            "hidden_act": "clamped_swiglu",
            "attention_sinks": True,
            "biases": ("experts", "router"),
            "moe.router": "topk_softmax",
        },
        tensors=(
            *OUTER,
            *PRE_NORMS,
            *ATTENTION,
            *vector("model.layers.{layer}.self_attn.sinks", "*.attention.sinks"),
            *weight("model.layers.{layer}.mlp.router", "sparse_layers.mlp.router"),
            *vector("model.layers.{layer}.mlp.router.bias", "sparse_layers.mlp.router.logit_bias"),
            *(
                Entry(
                    f"{_EXPERTS}.gate_up_proj{suffix}",
                    (f"{_GATE_UP}.{ours}.gate", f"{_GATE_UP}.{ours}.up"),
                    Interleaved(),
                    stacked=True,
                )
                for suffix, ours in (("", "kernel"), ("_bias", "bias"))
            ),
            *(
                Entry(
                    f"{_EXPERTS}.down_proj{suffix}",
                    (f"sparse_layers.mlp.down.{ours}",),
                    IDENTITY,
                    stacked=True,
                )
                for suffix, ours in (("", "kernel"), ("_bias", "bias"))
            ),
        ),
    )
)
