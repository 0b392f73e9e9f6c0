"""config.json of real models to `ModelConfig` and back; tables without gaps or doubles."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from model import families
from model.checks import check_model
from model.config import ModelConfig
from model.families.base import (
    FAMILIES,
    Family,
    FamilyError,
    family_of,
    find_family,
    mathematics,
    model_config,
)
from model.families.tensors import find_pieces
from model.rope import RopeScaling

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
LATENT = {"num_key_value_heads": 8}


def keys(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **changes}


def read(architecture: str, **changes: Any) -> ModelConfig:
    found = keys(architecture, **changes)
    return model_config(family_of(found).read(found))


UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
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
    "Qwen2MoeForCausalLM": (
        {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 48},
        {"biases": ("qkv",), "moe.num_shared_experts": 3, "moe.shared_expert_gate": True},
    ),
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
    "DeepseekV2ForCausalLM": (
        {**ROUTED, **LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {
            "mla.q_lora_rank": 1536,
            "mla.rope_interleave": True,
            "mla.norm_eps": 1e-6,
            "head_size": 192,
            "moe.router": "softmax",
            "moe.norm_topk_prob": False,
            "moe.router_bias": False,
            "moe.n_group": 4,
            "moe.routed_scaling_factor": 1.0,
        },
    ),
    "DeepseekV3ForCausalLM": (
        {**ROUTED, **LATENT, "q_lora_rank": None, "rope_interleave": False, "head_dim": 64},
        {
            "mla.q_lora_rank": None,
            "mla.kv_lora_rank": 512,
            "mla.rope_interleave": False,
            "head_dim": None,
            "moe.router_bias": True,
            "moe.n_group": 8,
            "moe.topk_group": 4,
            "moe.routed_scaling_factor": 2.5,
        },
    ),
    "Glm4MoeForCausalLM": (
        ROUTED,
        {"partial_rotary_factor": 0.5, "qk_norm": False, "moe.norm_topk_prob": True},
    ),
}


BUILT_IN = {
    family.architecture
    for module in families.__all__
    for family in vars(getattr(families, module)).values()
    if isinstance(family, Family)
}


def test_every_family_has_a_case() -> None:
    assert BUILT_IN == FIELDS.keys() <= FAMILIES.keys()


# Parameters that released models are known for, without multi-token-prediction layers. Their
# config.json files, as their makers published them, are in the folder `released`.
RELEASED: dict[str, int | float] = {
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-3.2-1B": 1_235_814_400,
    "SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-4-mini-instruct": 3_836_021_760,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-270m": 268_098_176,
    "OLMo-2-0425-1B": 1_484_916_736,
    "SmolLM3-3B": 3_075_098_624,
    "gpt-oss-20b": 20_914_757_184,
    "dots.llm1.inst": 142_774_381_696,
    "GLM-4.5-Air": 106e9,  # as announced
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-R1": 671_026_419_200,
}


def released(name: str) -> dict[str, Any]:
    path = Path(__file__).parent / "released" / f"{name}.json"
    return json.loads(path.read_text("utf-8"))


def test_every_family_has_a_released_model() -> None:
    assert {released(name)["architectures"][0] for name in RELEASED} == BUILT_IN


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_has_the_parameters_that_it_is_known_for(name) -> None:
    found = released(name)
    model = model_config(family_of(found).read(found))
    tolerance = 0 if isinstance(RELEASED[name], int) else 0.01
    assert math.isclose(model.num_parameters, RELEASED[name], rel_tol=tolerance)
    again = model_config(family_of(found).read(family_of(found).write(model)))
    assert mathematics(again) == mathematics(model)


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


TRAINED_AS = [
    {"dtype": "float32", "param_dtype": "bfloat16", "remat": "full", "initializer_range": 0.01},
    {"matmul_dtype": "int8", "matmul_products": ("wgrad",), "matmul_scales": "tensor"},
    {"mup_base_width": 16, "attention_dropout": 0.1, "loss_chunk": 128},
]


@pytest.mark.parametrize("changes", TRAINED_AS, ids=lambda changes: next(iter(changes)))
def test_a_model_is_written_however_it_was_trained(changes) -> None:
    model = read("LlamaForCausalLM")
    trained = model.model_copy(update=changes)
    assert trained != model and mathematics(trained) == mathematics(model)
    assert find_family(trained) is find_family(model)


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
        if (mla := model.mla) is None:
            widths = {"qkv.kernel.q": heads, "qkv.kernel.k": kv, "qkv.kernel.v": kv}
            found |= {at + name: (N, D, width) for name, width in widths.items()}
            found[at + "o.kernel"] = (N, heads, D)
        else:
            H, R, rank = model.num_attention_heads, mla.kv_lora_rank, mla.q_lora_rank
            found |= {
                at + "down.kernel.kv_a": (N, D, R + mla.qk_rope_head_dim),
                at + "kv_a_norm.scale": (N, R),
                at + "kv_b.kernel": (N, R, H * (mla.qk_nope_head_dim + mla.v_head_dim)),
                at + "o.kernel": (N, H * mla.v_head_dim, D),
                at + ("q.kernel" if rank is None else "q_b.kernel"): (N, rank or D, heads),
            }
            if rank is not None:
                found |= {at + "down.kernel.q_a": (N, D, rank), at + "q_a_norm.scale": (N, rank)}
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


@pytest.mark.parametrize("architecture", FIELDS)
def test_a_bias_of_the_router_on_disk_is_no_bias_on_the_choice_of_experts(architecture) -> None:
    choice = "sparse_layers.mlp.router.bias"
    names = {e.name for e in FAMILIES[architecture].tensors if choice in e.paths}
    assert all(name.endswith("e_score_correction_bias") for name in names)


@pytest.mark.parametrize(
    ("architecture", "changes", "written"),
    [
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": None}, {"query_pre_attn_scalar": 8}),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": None}, {"query_pre_attn_scalar": 8}),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}, {"moe_intermediate_size": 96}),
        ("Dots1ForCausalLM", {"moe_intermediate_size": None}, {"moe_intermediate_size": 96}),
    ],
)
def test_a_null_of_ours_is_written_as_its_value(architecture, changes, written) -> None:
    (name,) = changes
    given, _ = FIELDS[architecture]
    model = read(architecture, **given, head_dim=8)
    if name in type(model).model_fields:
        model = model.model_copy(update=changes)
    else:
        model = model.model_copy(update={"moe": model.moe.model_copy(update=changes)})
    assert FAMILIES[architecture].write(model).items() >= written.items()


def test_a_null_that_has_no_meaning_is_not_written() -> None:
    model = read("GptOssForCausalLM").model_copy(update={"swiglu_limit": None})
    with pytest.raises(FamilyError, match=r"model\.swiglu_limit=None has no value of swiglu_limit"):
        FAMILIES["GptOssForCausalLM"].write(model)


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
    # transformers, too, reads the key of the model before that of rope_scaling.
    scaling |= {"original_max_position_embeddings": 512}
    assert model == read(
        "Phi3ForCausalLM", rope_scaling=scaling, original_max_position_embeddings=1024
    )


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
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "softcapping=50.0 is not supp"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": ["yarn"]}}, "rope type .* is not supported"),
        ("LlamaForCausalLM", {"rope_parameters": [1]}, "rope_parameters=.* is not supported"),
        ("MistralForCausalLM", {"sliding_window": "8"}, "sliding_window='8' is not a whole number"),
        ("LlamaForCausalLM", {"architectures": [["a"]]}, "architecture .* is not supported"),
        ("Gemma2ForCausalLM", {"layer_types": 5}, "layer_types has 5, but"),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope=True is not supported"),
        ("Phi3ForCausalLM", {"full_attn_mod": 2}, "full_attn_mod=2 is not supported"),
        ("Dots1ForCausalLM", ROUTED | {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("DeepseekV2ForCausalLM", ROUTED | {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("DeepseekV2ForCausalLM", ROUTED | {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("DeepseekV3ForCausalLM", ROUTED | {"attention_bias": True}, "attention_bias=True is not"),
        ("DeepseekV3ForCausalLM", ROUTED | {"kv_lora_rank": "512"}, "kv_lora_rank='512' is not a"),
        (
            "Qwen2MoeForCausalLM",
            {"shared_expert_intermediate_size": 100},
            "only multiples of moe_intermediate_size=1408 are",
        ),
        ("Gemma2ForCausalLM", {"layer_types": []}, "layer_types has 0 entries, but num_hidden"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"] * 3}, "has 3 entries, but"),
        ("Gemma2ForCausalLM", {"layer_types": "full_attention"}, "has 'full_attention', but"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "interval=0 is not a whole number"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "pattern=0 is not a whole number"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": "6"}, "pattern='6' is not a whole"),
        ("Dots1ForCausalLM", ROUTED | {"max_window_layers": "4"}, "max_window_layers='4' is not"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers=0 is not a whole"),
        ("LlamaForCausalLM", {"num_hidden_layers": "4"}, "num_hidden_layers='4' is not a whole"),
        ("Gemma2ForCausalLM", {"hidden_size": "wide"}, "hidden_size='wide' is not a whole number"),
        (
            "LlamaForCausalLM",
            {
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
                "max_position_embeddings": "long",
            },
            "max_position_embeddings='long' is not a whole number",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn"}}, "yarn has no factor; add it"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type=linear is not supported for this architecture; use default or longrope",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": LONGROPE, "head_dim": 16},
            "hidden_size=64 must be num_attention_heads=8 times head_dim=16",
        ),
        ("LlamaForCausalLM", UNEVEN, "hidden_size=64 is not a multiple of num_attention_heads=6"),
        ("Gemma2ForCausalLM", UNEVEN, "hidden_size=64 is not a multiple of num_attention_heads=6"),
        (
            "DeepseekV2ForCausalLM",
            UNEVEN,
            "hidden_size=64 is not a multiple of num_attention_heads=6",
        ),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "rope_scaling='linear' is not supported"),
        ("LlamaForCausalLM", {"architectures": "LlamaForCausalLM"}, "architecture 'LlamaForC"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(architecture, changes, message) -> None:
    with pytest.raises(FamilyError, match=message) as error:
        read(architecture, **changes)
    assert "\n" not in str(error.value)


def test_a_model_without_latents_is_not_written_as_one_with() -> None:
    with pytest.raises(FamilyError, match=r"the model has no mla\.q_lora_rank"):
        FAMILIES["DeepseekV3ForCausalLM"].write(read("MixtralForCausalLM"))


def test_a_model_is_written_as_a_family_that_allows_its_heads() -> None:
    uneven = read("MistralForCausalLM", **UNEVEN, sliding_window=8)
    assert find_family(uneven).architecture == "MistralForCausalLM"
    half = read("Phi3ForCausalLM", partial_rotary_factor=0.5)
    assert find_family(half).architecture == "Phi3ForCausalLM"
    scaled = half.model_copy(update={"rope_scaling": RopeScaling(type="linear", factor=2.0)})
    with pytest.raises(FamilyError, match="no Hugging Face architecture can express this model"):
        find_family(scaled)


def test_longrope_is_written_with_the_positions_that_give_its_factor() -> None:
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = {"type": "longrope", "factor": 8.0, "original_max_position_embeddings": 512, **lists}
    written = FAMILIES["Phi3ForCausalLM"].write(read("Phi3ForCausalLM", rope_scaling=scaling))
    assert written["max_position_embeddings"] == 8 * 512


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
