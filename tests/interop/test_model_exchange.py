"""Every family goes in and out: bit-equal tensors, and a model that transformers loads."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from conftest import ROOT
from safetensors.numpy import load_file, save_file
from tiny_models import MODELS, save_model, tokens
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from data.tokenizers.byte_level import ByteTokenizer
from model.checks import check_model
from model.config import ModelConfig
from model.families.base import IGNORED, family_of, model_config
from model.families.quantization import Mxfp4Tensor
from model.rope import RopeScaling
from training.hugging_face.companions import token_ids
from training.hugging_face.write import plan_export

sys.path.insert(0, str(ROOT / "scripts"))
import convert as script

SCALINGS = (
    RopeScaling(),
    RopeScaling(type="linear", factor=2.0),
    RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=16),
    RopeScaling(
        type="llama3",
        factor=4.0,
        original_max_position_embeddings=16,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
)
LONGROPE = {"type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}
SETTINGS = ("run.compilation_cache=null", "data.sequence_length=32", "data.global_batch_size=8")


def convert(*arguments: Any) -> None:
    assert script.main(list(map(str, arguments))) == 0


def load(directory: Path) -> Any:
    """Load a directory with transformers; every weight must come from it."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens(2, 64))).logits


def greedy(model: Any) -> list[int]:
    prompt = torch.tensor(tokens(1, 16, seed=4))
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.costly
def test_a_round_trip_is_bit_equal_and_loads(name, tmp_path) -> None:
    model = save_model(name, tmp_path / "hf")
    convert("from-hf", tmp_path / "hf", tmp_path / "run", *SETTINGS)
    convert("to-hf", tmp_path / "run", tmp_path / "out")
    want, got = (load_file(tmp_path / d / "model.safetensors") for d in ("hf", "out"))
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert got[key].dtype == x.dtype and got[key].tobytes() == x.tobytes(), key
    exported = load(tmp_path / "out")
    torch.testing.assert_close(logits(exported), logits(model), rtol=0, atol=0)
    assert greedy(exported) == greedy(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_that_torus_writes_is_the_same_model(name, tmp_path) -> None:
    model = save_model(name, tmp_path / "hf")
    convert("from-hf", tmp_path / "hf", tmp_path / "run", *SETTINGS)
    path = tmp_path / "run/hugging_face.json"
    source = json.loads(path.read_text())
    keys = json.loads((tmp_path / "hf/config.json").read_text())
    family = family_of(keys)
    others = {name: keys[name] for name in IGNORED & keys.keys()}
    source["config"] = others | family.write(model_config(family.read(keys)))
    path.write_text(json.dumps(source))
    convert("to-hf", tmp_path / "run", tmp_path / "out")
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(model), rtol=0, atol=0)


def drawn_model(rng: np.random.Generator) -> ModelConfig:
    """Return a dense model of random sizes and layers. Raises: ValueError if it is impossible."""
    width, heads = int(rng.choice([48, 64, 80])), int(rng.choice([4, 6]))
    head_dim, share = [None, 16][rng.integers(2)], [1.0, 0.5][rng.integers(2)]
    pairs = int((head_dim or width // heads) * share) // 2
    longrope = RopeScaling(
        **LONGROPE, short_factor=(1.0,) * pairs, long_factor=tuple(range(1, pairs + 1))
    )
    scaling = [*SCALINGS, longrope][rng.integers(len(SCALINGS) + 1)]
    kinds = [None, ("sliding_attention",), ("sliding_attention", "full_attention")][rng.integers(3)]
    model = ModelConfig(
        vocab_size=264,
        hidden_size=width,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=2,
        intermediate_size=96,
        head_dim=head_dim,
        layer_types=kinds,
        sliding_window=None if kinds is None else 8,
        qk_norm=bool(rng.integers(2)),
        tie_word_embeddings=bool(rng.integers(2)),
        biases=[(), ("qkv",), ("qkv", "o")][rng.integers(3)],
        partial_rotary_factor=share,
        rope_scaling=scaling,
    )
    check_model(model)
    return model


def test_transformers_builds_every_model_that_is_written() -> None:
    """Models of no source: sizes, token ids and scalings that a family refuses show here."""
    others = {"max_position_embeddings": 64, **token_ids(ByteTokenizer())}
    rng, built = np.random.default_rng(0), set()
    for _ in range(200):
        try:
            keys = plan_export(drawn_model(rng), {}, None, others=others).keys
        except ValueError:
            continue
        config = transformers.CONFIG_MAPPING[keys["model_type"]].from_dict(keys)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert model.get_input_embeddings().padding_idx is None
        built.add((keys["model_type"], json.dumps(keys["rope_scaling"])))
    assert len(built) >= 12, built


def test_mxfp4_weights_are_decoded_as_transformers_does() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 8, 4, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (3, 8, 4), dtype=np.uint8)
    want = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    stored = Mxfp4Tensor(blocks, scales)
    for expert in range(3):
        np.testing.assert_array_equal(stored[expert], want[expert].numpy())


def test_fp8_weights_of_deepseek_are_decoded_and_its_extra_layer_is_left_out(tmp_path) -> None:
    save_model("deepseek-v3", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    keys = json.loads(path.read_text())
    keys["num_nextn_predict_layers"] = 1
    keys["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    path.write_text(json.dumps(keys))
    stored, want = {}, {}
    rng = np.random.default_rng(0)
    for name, x in load_file(tmp_path / "hf/model.safetensors").items():
        want[name] = x
        if name.endswith("_proj.weight"):
            rows, columns = x.shape
            scale = rng.uniform(0.5, 2, (-(-rows // 16), -(-columns // 16))).astype(np.float32)
            full = np.kron(scale, np.ones((16, 16), np.float32))[:rows, :columns]
            stored[name] = (x / full).astype(ml_dtypes.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            want[name] = stored[name].astype(np.float32) * full
    extra = {
        name.replace("layers.3", "layers.4"): x for name, x in stored.items() if "layers.3" in name
    }
    plain = {name: x for name, x in want.items() if name not in stored}
    save_file(plain | stored | extra, tmp_path / "hf/model.safetensors")
    convert("from-hf", tmp_path / "hf", tmp_path / "run", *SETTINGS)
    convert("to-hf", tmp_path / "run", tmp_path / "out", "--dtype", "float32")
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)
