"""`scripts/convert.py` needs memory for a tensor or a chunk, not for a stack of layers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import ROOT

from training.hugging_face.tensor_files import create_file

LAYERS, VOCAB, MIB = 16, 320, 2**20
TENSOR, CHUNK = 8 * MIB, 64 * MIB  # the largest tensor of the large model; what is stored as one


def write_llama(folder: Path, hidden: int) -> int:
    """Write a random Llama model in bfloat16 whose MLPs are 4 times as wide; return its bytes."""
    keys: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    keys |= {"hidden_size": hidden, "intermediate_size": 4 * hidden, "vocab_size": VOCAB}
    keys |= {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8}
    keys |= {"rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "max_position_embeddings": 64}
    names: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    names |= {f"{name}.weight": (VOCAB, hidden) for name in ("model.embed_tokens", "lm_head")}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            names[f"{at}{norm}.weight"] = (hidden,)
        names |= {f"{at}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        names |= {f"{at}mlp.{part}_proj.weight": (4 * hidden, hidden) for part in ("gate", "up")}
        names[f"{at}mlp.down_proj.weight"] = (hidden, 4 * hidden)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    infos = create_file(
        folder / "model.safetensors", {name: ("BF16", shape) for name, shape in names.items()}
    )
    rng = np.random.default_rng(0)
    for info in infos.values():
        values = rng.standard_normal(info.shape, np.float32) / 8
        info.open("r+")[...] = values.astype(ml_dtypes.bfloat16)
    return sum(info.num_bytes for info in infos.values())


def peak_of(*arguments: Any) -> int:
    """Run convert.py in a child process; return its peak host memory in bytes."""
    command = [sys.executable, ROOT / "scripts" / "convert.py", *arguments]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) as child:
        _, code, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(code)
    assert child.returncode == 0
    return usage.ru_maxrss * 1024


@pytest.mark.release
def test_memory_is_bounded_by_the_state_or_by_a_few_chunks(tmp_path) -> None:
    sizes, peaks = {}, {}
    overrides = ("model.param_dtype=bfloat16", "mesh.tp=1", "data.sequence_length=64")
    for name, hidden in (("tiny", 64), ("large", 1024)):
        source, run, out = (tmp_path / f"{name}-{kind}" for kind in ("hf", "run", "out"))
        sizes[name] = write_llama(source, hidden)
        peaks["from-hf", name] = peak_of("from-hf", source, run, *overrides)
        peaks["to-hf", name] = peak_of("to-hf", run, out)
    imports, exports = (peaks[c, "large"] - peaks[c, "tiny"] for c in ("from-hf", "to-hf"))
    report = f"{sizes} import {imports / MIB:.0f} export {exports / MIB:.0f} MiB"
    # The save of an import holds compressed copies of what it writes concurrently.
    assert imports < 2 * sizes["large"] + 16 * TENSOR, report
    assert exports < 4 * CHUNK < sizes["large"] / 2, report
