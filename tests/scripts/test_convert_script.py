"""`scripts/convert.py`: exit codes, one line per mistake, and several processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import ROOT
from hf_files import (
    CONFIG,
    SMALL,
    assert_bit_equal,
    convert,
    random_tensors,
    tensors_of,
    write_file,
    write_model,
)
from process_groups import free_address

from configs import conversion
from training.checkpoint_tools import open_checkpoints
from training.hugging_face.new_directory import MARKER


@pytest.mark.slow
def test_two_processes_import_what_one_does(tmp_path) -> None:
    source, run = write_model(tmp_path / "hf"), tmp_path / "one"
    assert convert("from-hf", source, run, *SMALL) == 0
    command = [sys.executable, str(ROOT / "scripts/convert.py"), "from-hf", str(source)]
    command += [str(tmp_path / "run"), "mesh.tp=2", "mesh.ep=2", "run.compilation_cache=null"]
    command += ["--coordinator", free_address(), "--num-processes", "2", "--process-id"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [subprocess.Popen([*command, str(n)], env=environment) for n in range(2)]
    assert [process.wait(600) for process in started] == [0, 0]
    records = []
    for directory in (run, tmp_path / "run"):
        with open_checkpoints(directory) as checkpoints:
            records.append(checkpoints.record(0))
    ours, theirs = (
        {name: value for name, value in record["fingerprints"].items() if "table" not in name}
        for record in records
    )
    del ours["params.head.kernel"], theirs["params.head.kernel"]  # these have other padding
    assert ours == theirs and len(ours) > 10
    assert convert("to-hf", tmp_path / "run", tmp_path / "out") == 0
    assert_bit_equal(tensors_of(tmp_path / "out"), random_tensors())


def remove_tensor(directory: Path) -> None:
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    write_file(directory / "model.safetensors", tensors)


def add_tensor(directory: Path) -> None:
    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    write_file(directory / "model.safetensors", random_tensors() | extra)


def change_shape(directory: Path) -> None:
    other = {"model.norm.weight": np.zeros(31, np.float32)}
    write_file(directory / "model.safetensors", random_tensors() | other)


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def cut_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def garble_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"#" + content[9:])


def remove_file(directory: Path) -> None:
    write_model(directory, files=2)
    (directory / "model.safetensors").unlink()
    (directory / "model-00002-of-00002.safetensors").unlink()


def index_names_nothing(directory: Path) -> None:
    write_model(directory, files=2)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))


def only_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def broken_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def change(**keys):
    def damage(directory: Path) -> None:
        (directory / "config.json").write_text(json.dumps(CONFIG | keys))

    return damage


def unscaled_fp8(directory: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = random_tensors()
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    write_file(directory / "model.safetensors", tensors)


def wrong_scales(directory: Path) -> None:
    unscaled_fp8(directory)
    scales = {"model.layers.0.self_attn.q_proj.weight_scale_inv": np.ones((2, 1), np.float32)}
    tensors = tensors_of(directory) | scales
    write_file(directory / "model.safetensors", tensors)
    change(quantization_config={"quant_method": "fp8"})(directory)


def other_head(directory: Path) -> None:
    change(tie_word_embeddings=True)(directory)


def tokenizer_of(content):
    def damage(directory: Path) -> None:
        pytest.importorskip("tokenizers")
        (directory / "tokenizer.json").write_text(content)

    return damage


def index_of(value):
    def damage(directory: Path) -> None:
        write_model(directory, files=2)
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.norm.weight"] = value
        path.write_text(json.dumps(index))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tensor, "missing: model.layers.1.mlp.experts.3.up_proj.weight"),
        (add_tensor, "unknown: model.layers.0.self_attn.q_proj.bias"),
        (change_shape, r"wrong shape: model.norm.weight \(31,\) instead of \(32,\)"),
        (truncate, "model.safetensors is truncated: .* ends at byte"),
        (cut_header, "is not a complete safetensors file"),
        (garble_header, "has a damaged header"),
        (remove_file, "files that are missing: model-00002-of-00002.safetensors"),
        (index_names_nothing, "tensors that their files do not hold: model.layers.9.weight"),
        (only_pickle, "only safetensors are read"),
        (no_config, "has no config.json"),
        (broken_config, "config.json cannot be read"),
        (change(architectures=["FancyForCausalLM"]), "architecture FancyForCausalLM is not supp"),
        (change(logit_scale=0.5), "logit_scale=0.5 is not supported for Qwen3MoeForCausalLM"),
        (change(hidden_act="gelu"), "hidden_act='gelu' is not supported; only 'silu' is"),
        (change(rope_scaling={"rope_type": "dynamic", "factor": 2}), "rope type 'dynamic'"),
        (change(quantization_config={"quant_method": "gptq"}), "weights quantized by 'gptq'"),
        (other_head, "lm_head.weight differs from model.embed_tokens.weight; set tie_word_embed"),
        (tokenizer_of("{}"), "is not a Hugging Face tokenizer.json: it has no 'model'"),
        (tokenizer_of("null"), "is not a Hugging Face tokenizer.json: it holds no JSON object"),
        (index_of(None), "has no map of names to files"),
        (index_of(["a"]), "has no map of names to files"),
        (change(quantization_config={"quant_method": ["fp8"]}), "are not supported, only mxfp4"),
        (unscaled_fp8, "wrong type: .*layers.0.self_attn.q_proj.weight is F8_E4M3 without scales"),
        (wrong_scales, r"wrong type: .* has scales \(2, 1\) for a weight \(64, 32\)"),
        (
            change(quantization_config={"quant_method": "fp8", "weight_block_size": None}),
            "weight_block_size=None of quantization_config is not supported",
        ),
        (change(quantization_config="fp8"), "weights quantized by 'fp8' are not supported"),
        (change(num_hidden_layers=0), "num_hidden_layers=0 is not a whole number of at least 1"),
        (change(num_hidden_layers="3"), "num_hidden_layers='3' is not a whole number"),
        (change(hidden_size=None), "config.json has no hidden_size; add it"),
        (change(architectures=7), "architecture 7 is not supported"),
        (change(num_nextn_predict_layers="1"), "num_nextn_predict_layers='1' is not a whole"),
        (change(mlp_only_layers=[1]), r"mlp_only_layers=\[1\] is not supported"),
        (change(num_key_value_heads=3), "is not divisible by"),
    ],
)
def test_what_is_damaged_or_not_supported_is_one_line(tmp_path, capsys, damage, message) -> None:
    damage(write_model(tmp_path / "hf"))
    capsys.readouterr()
    assert convert("from-hf", tmp_path / "hf", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_not_empty_is_refused(tmp_path, capsys) -> None:
    source, run = write_model(tmp_path / "hf"), tmp_path / "run"
    assert convert("from-hf", source, run, *SMALL) == 0
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").write_text("")
    for arguments in (("from-hf", source), ("to-hf", run)):
        assert convert(*arguments, tmp_path / "old") == 2
        assert "is not empty; give a new directory" in capsys.readouterr().err


def test_an_interrupted_conversion_is_completed_by_the_same_command(tmp_path, monkeypatch) -> None:
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    run, out = tmp_path / "run", tmp_path / "out"
    reading = "from-hf", write_model(tmp_path / "hf"), run, *SMALL
    for arguments, last, late in (
        (reading, run / "config.yaml", "copy_companions"),
        (("to-hf", run, out), out / "config.json", "write_config"),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(conversion, late, interrupt)
            convert(*arguments)
        assert (last.parent / MARKER).exists() and not last.exists()
        assert convert(*arguments) == 0
        assert last.exists() and not (last.parent / MARKER).exists()
    assert_bit_equal(tensors_of(out), random_tensors())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.vocab_size=x", "mesh.tp=2"), "model.vocab_size"),
        (("mesh=5",), "mesh"),
        (("model=null",), "model"),
    ],
)
def test_an_override_of_the_wrong_type_is_one_line(tmp_path, capsys, overrides, message) -> None:
    write_model(tmp_path / "hf")
    assert convert("from-hf", tmp_path / "hf", tmp_path / "run", *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_overrides_may_follow_options(tmp_path, capsys) -> None:
    source, run = write_model(tmp_path / "hf"), tmp_path / "run"
    assert convert("from-hf", source, run, "--process-id", "0", "data.seed=7", "mesh=5") == 2
    assert "mesh" in capsys.readouterr().err
    for wrong, message in [
        (("from-hf", source, run, "--unknown", "data.seed=7"), "--unknown: unknown option"),
        (("to-hf", run, "x", "y"), "unrecognized arguments: y"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            convert(*wrong)
        assert message in capsys.readouterr().err


def test_a_tied_head_on_disk_that_equals_the_embedding_is_left_out(tmp_path) -> None:
    tensors = random_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    config = CONFIG | {"tie_word_embeddings": True}
    source, run = write_model(tmp_path / "hf", tensors, config), tmp_path / "run"
    assert convert("from-hf", source, run, *SMALL) == 0
    assert convert("to-hf", run, tmp_path / "out") == 0
    del tensors["lm_head.weight"]
    assert_bit_equal(tensors_of(tmp_path / "out"), tensors)
