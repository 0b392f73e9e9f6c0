"""Hugging Face model families; importing the package registers them."""

from model.families import (
    deepseek,
    dots1,
    gemma,
    glm4_moe,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    smollm3,
)

__all__ = [
    "deepseek",
    "dots1",
    "gemma",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "smollm3",
]
