"""Hugging Face model directories made by hand, without transformers or safetensors."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from conftest import ROOT

from configs.runs import load_run
from training.hugging_face.model_directory import ModelDirectory
from training.hugging_face.tensor_files import DTYPES

sys.path.insert(0, str(ROOT / "scripts"))
import convert as script

SMALL = ("data.sequence_length=32", "data.global_batch_size=8", "run.compilation_cache=null")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
    "torch_dtype": "bfloat16",
}


def shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """The tensors of this configuration, written down independently of the tables."""
    D, F, M = config["hidden_size"], config["intermediate_size"], config["moe_intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], D),
        "model.norm.weight": (D,),
        "lm_head.weight": (config["vocab_size"], D),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {at + "input_layernorm.weight": (D,), at + "post_attention_layernorm.weight": (D,)}
        found |= {at + f"self_attn.{name}_proj.weight": (heads, D) for name in "qkv"}
        found |= {at + f"self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
        found[at + "self_attn.o_proj.weight"] = (D, heads)
        mlps = {at + "mlp.": F}
        if layer not in config["mlp_only_layers"]:
            found[at + "mlp.gate.weight"] = (config["num_experts"], D)
            mlps = {at + f"mlp.experts.{e}.": M for e in range(config["num_experts"])}
        for name, width in mlps.items():
            found |= {name + f"{part}_proj.weight": (width, D) for part in ("gate", "up")}
            found[name + "down_proj.weight"] = (D, width)
    return found


def random_tensors(dtype: str = "BF16", config: Mapping[str, Any] = CONFIG) -> dict[str, Any]:
    """Random tensors; router weights are float32, as some models store them."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / 8).astype(
            DTYPES["F32" if name.endswith("mlp.gate.weight") else dtype]
        )
        for name, shape in shapes(config).items()
    }


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file as its specification says."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, end = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape)}
        header[name]["data_offsets"] = [end, end := end + math.prod(x.shape) * x.dtype.itemsize]
    text = json.dumps(header).encode()
    parts = [x.tobytes() for x in tensors.values()]
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def write_model(
    directory: Path,
    tensors: Mapping[str, np.ndarray] | None = None,
    config: Mapping[str, Any] = CONFIG,
    files: int = 1,
) -> Path:
    """Write a model directory in one or several files."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(config=config) if tensors is None else tensors
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(directory / "model.safetensors", tensors)
        return directory
    where = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(tensors.items())[number::files])
        write_file(directory / name, part)
        where |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def convert(*arguments: object) -> int:
    """Run scripts/convert.py in this process and return its exit code."""
    return script.main(list(map(str, arguments)))


def params_of(run: Path, step: int | None = None):
    """The parameters of a checkpoint, on the mesh of the run."""
    opened = load_run(run)
    with jax.set_mesh(opened.program.tp.manager.mesh):
        return jax.tree.map(np.asarray, opened.load_params(step)[1])


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a model directory, decoded."""
    source = ModelDirectory(directory)
    return {name: np.array(source.open(name)) for name in source.names}


def assert_bit_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype and got[name].tobytes() == x.tobytes(), name
