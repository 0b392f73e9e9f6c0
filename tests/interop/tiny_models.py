"""Small random models of every family, made by transformers, with every feature of the family."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED = {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 3.0],
}


class Tiny(NamedTuple):
    """A model of transformers: the class of its configuration, and what differs from SIZES."""

    config: str
    changes: dict[str, Any]


MODELS = {
    "llama": Tiny("LlamaConfig", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "llama-bias": Tiny(
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "mistral": Tiny("MistralConfig", {"sliding_window": 24}),
    "mixtral": Tiny("MixtralConfig", {"num_local_experts": 8}),
    "qwen2": Tiny(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
    ),
    "qwen2-moe": Tiny(
        "Qwen2MoeConfig",
        {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 32}
        | {"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 24},
    ),
    "qwen3": Tiny("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": Tiny("Qwen3MoeConfig", {**EXPERTS, "num_experts": 8, "mlp_only_layers": [0]}),
    "phi3": Tiny("Phi3Config", {"sliding_window": 24, "num_key_value_heads": 4, "head_dim": 8}),
    "phi4-mini": Tiny(
        "Phi3Config",
        {"rope_parameters": LONG, "original_max_position_embeddings": 256},
    ),
    "gemma2": Tiny(
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24}
        | {"tie_word_embeddings": True, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": Tiny(
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 2}
        | {"tie_word_embeddings": True, "query_pre_attn_scalar": 24},
    ),
    "olmo2": Tiny("Olmo2Config", {}),
    "smollm3": Tiny("SmolLM3Config", {"num_key_value_heads": 8}),
    "gpt-oss": Tiny(
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "dots1": Tiny("Dots1Config", {**ROUTED, "n_shared_experts": 2, "routed_scaling_factor": 1.5}),
    "glm4-moe": Tiny(
        "Glm4MoeConfig",
        {**ROUTED, "head_dim": 16, "n_group": 4, "topk_group": 2, "attention_bias": True}
        | {"use_qk_norm": True, "n_shared_experts": 1},
    ),
    "deepseek-v2": Tiny(
        "DeepseekV2Config",
        {**ROUTED, **LATENT, "q_lora_rank": 24, "n_shared_experts": 2, "rms_norm_eps": 1e-3}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
        | {"rope_parameters": YARN},
    ),
    "deepseek-v2-lite": Tiny(
        "DeepseekV2Config",
        {**ROUTED, **LATENT, "q_lora_rank": None, "qk_nope_head_dim": 4, "n_shared_experts": 1},
    ),
    "deepseek-v3": Tiny(
        "DeepseekV3Config",
        {**ROUTED, **LATENT, "q_lora_rank": 24, "rope_parameters": YARN},
    ),
}
SPARSE = {"mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "dots1", "glm4-moe"}
SPARSE |= {"deepseek-v2", "deepseek-v2-lite", "deepseek-v3"}


def make_model(name: str) -> Any:
    """The model of a name in float32; no parameter has its initial value."""
    tiny = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, tiny.config)(**{**SIZES, **tiny.changes})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.ndim == 1 and "inv_freq" not in key:
            value.data += 0.1 * torch.randn(value.shape, generator=generator)
    return model.eval()


def save_model(name: str, directory: Path) -> Any:
    """Save the model of a name as transformers does, and return it."""
    model = make_model(name)
    model.save_pretrained(directory)
    return model


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Random token ids `B L`, without control tokens."""
    return np.random.default_rng(seed).integers(3, SIZES["vocab_size"], (rows, length))
