"""config.json of real models to `ModelConfig` and back; tables without gaps or doubles."""

from typing import Any

import pytest

from model.checks import check_model
from model.config import ModelConfig
from model.families.base import (
    FAMILIES,
    FamilyError,
    family_of,
    find_family,
    mathematics,
    model_config,
)
from model.families.tensors import find_pieces

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def keys(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **changes}


def read(architecture: str, **changes: Any) -> ModelConfig:
    found = keys(architecture, **changes)
    return model_config(family_of(found).read(found))


# Fields that the defaults of each family give.
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "LlamaForCausalLM": ({}, {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "biases": ()}),
    "MistralForCausalLM": (
        {"sliding_window": 512},
        {"layer_kinds": ("sliding_attention",) * 4, "sliding_window": 512},
    ),
    "MixtralForCausalLM": (
        {},
        {"moe.num_experts": 8, "moe.router": "topk_softmax", "rope_theta": 1e6},
    ),
    "Qwen2ForCausalLM": ({}, {"biases": ("qkv",), "sliding_window": None}),
    "Qwen3ForCausalLM": ({}, {"qk_norm": True, "head_size": 128}),
    "Qwen3MoeForCausalLM": (
        {"mlp_only_layers": [0]},
        {"moe.norm_topk_prob": False, "sparse_layers": (False, True, True, True)},
    ),
    "Phi3ForCausalLM": ({}, {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}),
    "Gemma2ForCausalLM": (
        {},
        {
            "layer_kinds": ("sliding_attention", "full_attention") * 2,
            "embedding_multiplier": 8.0,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "norm_offset": 1.0,
            "norm_placement": "both",
            "hidden_act": "gelu_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "Gemma3ForCausalLM": (
        {"sliding_window_pattern": 2},
        {
            "layer_kinds": ("sliding_attention", "full_attention") * 2,
            "rope_theta": 1e6,
            "rope_local_theta": 1e4,
            "qk_norm": True,
            "final_logit_softcapping": None,
        },
    ),
    "Olmo2ForCausalLM": ({}, {"norm_placement": "post", "qk_norm_across_heads": True}),
    "SmolLM3ForCausalLM": (
        {},
        {"rope_pattern": (True, True, True, False), "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "GptOssForCausalLM": (
        {"num_local_experts": 8},
        {
            "hidden_act": "clamped_swiglu",
            "swiglu_limit": 7.0,
            "attention_sinks": True,
            "rope_scaling.type": "yarn",
            "rope_scaling.truncate": False,
            "sliding_window": 128,
        },
    ),
    "Dots1ForCausalLM": (
        ROUTED,
        {"moe.router": "sigmoid", "moe.router_bias": True, "moe.norm_topk_prob": False},
    ),
    "Glm4MoeForCausalLM": (
        ROUTED,
        {"partial_rotary_factor": 0.5, "qk_norm": False, "moe.norm_topk_prob": True},
    ),
}


def test_every_family_has_a_case() -> None:
    assert FAMILIES.keys() == FIELDS.keys()


@pytest.mark.parametrize("architecture", FIELDS)
def test_defaults_are_those_of_hugging_face(architecture) -> None:
    changes, fields = FIELDS[architecture]
    model = read(architecture, **changes)
    for path, want in fields.items():
        value: Any = model
        for name in path.split("."):
            value = getattr(value, name)
        assert value == want, path


@pytest.mark.parametrize("architecture", FIELDS)
def test_a_model_is_written_as_it_was_read(architecture) -> None:
    changes, _ = FIELDS[architecture]
    model = read(architecture, **changes)
    written = FAMILIES[architecture].write(model)
    assert written["architectures"] == [architecture]
    again = model_config(FAMILIES[architecture].read(written))
    assert mathematics(again) == mathematics(model)
    # Some family can express it, perhaps a simpler one.
    found = find_family(model)
    assert mathematics(model_config(found.read(found.write(model)))) == mathematics(model)


def leaves_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, written down independently of the model."""
    D, V, h = model.hidden_size, model.padded_vocab_size, model.head_size
    heads, kv = model.num_attention_heads * h, model.num_key_value_heads * h
    found: dict[str, tuple[int, ...]] = {"embed.table": (V, D), "norm.scale": (D,)}
    if not model.tie_word_embeddings:
        found["head.kernel"] = (D, V)
    for stack, sparse in (("layers", False), ("sparse_layers", True)):
        N = model.sparse_layers.count(sparse)
        if not N:
            continue
        at = f"{stack}.attention."
        widths = {"qkv.kernel.q": heads, "qkv.kernel.k": kv, "qkv.kernel.v": kv}
        found |= {at + name: (N, D, width) for name, width in widths.items()}
        found[at + "o.kernel"] = (N, heads, D)
        E = model.moe.num_experts
        lead, F = ((N, E), model.expert_size) if sparse else ((N,), model.intermediate_size)
        for name in ("gate", "up"):
            found[f"{stack}.mlp.gate_up.kernel.{name}"] = (*lead, D, F)
        found[f"{stack}.mlp.down.kernel"] = (*lead, F, D)
        if sparse:
            found[f"{stack}.mlp.router.kernel"] = (N, D, E)
    return found


@pytest.mark.parametrize("architecture", FIELDS)
def test_every_array_has_tensors_and_no_element_is_held_twice(architecture) -> None:
    model = read(architecture, **FIELDS[architecture][0])
    pieces = find_pieces(FAMILIES[architecture].tensors, leaves_of(model), model)
    taken: dict[str, int] = {}
    for path, parts in pieces.items():
        assert parts, path
        assert len({piece.index for piece in parts}) == len(parts)
        for piece in parts:
            count = 1
            for size in piece.shape:
                count *= size
            taken[piece.name] = taken.get(piece.name, 0) + count
    sizes = {p.name: p.stored_shape for parts in pieces.values() for p in parts}
    for name, shape in sizes.items():
        count = 1
        for size in shape:
            count *= size
        assert taken[name] == count, name


OLD = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
NEW = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}


def test_rope_is_read_in_its_old_and_its_new_spelling() -> None:
    old, new = read("LlamaForCausalLM", **OLD), read("LlamaForCausalLM", **NEW)
    assert old == new and old.rope_theta == 5e5 and old.rope_scaling.factor == 2.0
    local = {"full_attention": {"rope_theta": 3e6}, "sliding_attention": {"rope_theta": 2e4}}
    new = read("Gemma3ForCausalLM", rope_parameters=local)
    old = read("Gemma3ForCausalLM", rope_theta=3e6, rope_local_base_freq=2e4)
    assert old == new and (new.rope_theta, new.rope_local_theta) == (3e6, 2e4)


def test_a_base_of_sliding_layers_is_read_only_where_there_are_some() -> None:
    model = read("Gemma3ForCausalLM", layer_types=["full_attention"] * 4)
    check_model(model)
    assert (model.rope_theta, model.rope_local_theta) == (1e6, None)
    assert read("Gemma3ForCausalLM").rope_local_theta == 1e4


def test_longrope_gets_its_factor_from_the_lengths() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = read("Phi3ForCausalLM", rope_scaling=scaling, original_max_position_embeddings=1024)
    assert model.rope_scaling.type == "longrope" and model.rope_scaling.factor == 4.0


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("FancyForCausalLM", {}, "architecture FancyForCausalLM is not supported; supported: "),
        ("LlamaForCausalLM", {"logit_scale": 2}, "logit_scale=2 is not supported for Llama"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
            "mscale=1.0 is not supported for rope type linear",
        ),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "no sliding_window"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [2]}, "only the first layers may be dense"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "=True is not supported"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(architecture, changes, message) -> None:
    with pytest.raises(FamilyError, match=message) as error:
        read(architecture, **changes)
    assert "\n" not in str(error.value)


def test_a_missing_size_is_named() -> None:
    found = keys("LlamaForCausalLM")
    del found["hidden_size"]
    with pytest.raises(FamilyError, match=r"config.json has no hidden_size; add it"):
        family_of(found).read(found)


def test_a_model_of_no_family_is_refused_with_the_nearest() -> None:
    model = ModelConfig(attention_sinks=True)
    with pytest.raises(FamilyError, match=r"lacks model\.attention_sinks=True"):
        find_family(model)
    with pytest.raises(
        FamilyError, match=r"LlamaForCausalLM cannot express model\.attention_sinks"
    ):
        FAMILIES["LlamaForCausalLM"].write(model)
