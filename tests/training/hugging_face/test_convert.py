"""`scripts/convert.py` and its parts, on model directories made by hand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, ROOT, tensor_parallel
from flax import nnx
from hf_files import CONFIG, random_tensors, write_file, write_model
from model_runs import abstract_model
from process_groups import free_address
from runs import run as train

from configs.conversion import export_model
from configs.runs import load_run
from model.config import ModelConfig
from model.families.quantization import Fp8Tensor, Mxfp4Tensor
from training.checkpoint_tools import open_checkpoints
from training.fingerprint import leaf_name
from training.hugging_face import read as reading
from training.hugging_face.model_directory import ModelDirectory
from training.hugging_face.read import read_config, read_parameters
from training.hugging_face.tensor_files import create_file, read_header

sys.path.insert(0, str(ROOT / "scripts"))
import convert as script

SMALL = ("data.sequence_length=32", "data.global_batch_size=8", "run.compilation_cache=null")


def abstract(config: ModelConfig, mesh=ONE_DEVICE):
    tp = tensor_parallel(mesh)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.sharding.NamedSharding(tp.mesh, x.sharding.spec)
        ),
        nnx.to_pure_dict(nnx.state(abstract_model(config, tp, 32))),
    )


def read(directory: Path, mesh=ONE_DEVICE, **changes) -> dict[str, np.ndarray]:
    config = ModelConfig.model_validate(read_config(directory) | changes)
    params = read_parameters(directory, config, abstract(config, mesh))
    paths = jax.tree_util.tree_leaves_with_path(params)
    return {leaf_name(path): np.asarray(x) for path, x in paths}


def convert(*arguments: object) -> int:
    return script.main(list(map(str, arguments)))


def params_of(run: Path, step: int | None = None):
    """The parameters of a checkpoint, on the mesh of the run."""
    opened = load_run(run)
    with jax.set_mesh(opened.program.tp.manager.mesh):
        return jax.tree.map(np.asarray, opened.load_params(step)[1])


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    source = ModelDirectory(directory)
    return {name: np.array(source.open(name)) for name in source.names}


def assert_bit_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype and got[name].tobytes() == x.tobytes(), name


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> tuple[Path, Path]:
    """(model directory in three files, run directory)."""
    folder = tmp_path_factory.mktemp("imported")
    source = write_model(folder / "hf", files=3)
    (source / "generation_config.json").write_text('{"eos_token_id": [256, 300]}')
    (source / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    cache = f"data.cache_dir={folder}/cache"
    assert convert("from-hf", source, folder / "run", cache, *SMALL) == 0
    return source, folder / "run"


def test_every_array_is_the_tensor_that_its_name_says(tmp_path) -> None:
    tensors = random_tensors("F32")
    got = read(write_model(tmp_path, tensors))
    layer2 = {n.removeprefix("model.layers.2."): x for n, x in tensors.items() if "layers.2" in n}
    q = layer2["self_attn.q_proj.weight"]
    np.testing.assert_array_equal(got["sparse_layers.attention.qkv.kernel.q"][1], q.T)
    for expert in range(4):
        down = layer2[f"mlp.experts.{expert}.down_proj.weight"]
        np.testing.assert_array_equal(got["sparse_layers.mlp.down.kernel"][1, expert], down.T)
        up = layer2[f"mlp.experts.{expert}.up_proj.weight"]
        np.testing.assert_array_equal(got["sparse_layers.mlp.gate_up.kernel.up"][1, expert], up.T)
    gate = tensors["model.layers.0.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(got["layers.mlp.gate_up.kernel.gate"][0], gate.T)
    np.testing.assert_array_equal(got["embed.table"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(got["head.kernel"], tensors["lm_head.weight"].T)
    norm = layer2["post_attention_layernorm.weight"]
    np.testing.assert_array_equal(got["sparse_layers.mlp_norm.scale"][1], norm)


def test_experts_fused_in_one_tensor_are_read_too(tmp_path) -> None:
    tensors = random_tensors("F32")
    want = read(write_model(tmp_path / "separate", tensors))
    fused = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in (1, 2):
        at = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([tensors[f"{at}.{e}.{part}_proj.weight"] for e in range(4)])
            for part in ("gate", "up", "down")
        }
        fused[f"{at}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        fused[f"{at}.down_proj"] = parts["down"]
    write_model(tmp_path / "fused", fused)
    assert_bit_equal(read(tmp_path / "fused"), want)
    assert convert("from-hf", tmp_path / "fused", tmp_path / "run") == 0
    assert convert("to-hf", tmp_path / "run", tmp_path / "out") == 0
    assert_bit_equal(tensors_of(tmp_path / "out"), fused)


@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "ep2-fsdp2-sp2"])
def test_a_mesh_reads_what_one_device_reads(tmp_path, monkeypatch, mesh) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 1500)  # several parts, the last ones overlapping
    write_model(tmp_path)
    padding = {"pad_vocab_to_multiple_of": 8}
    want = read(tmp_path, **padding)
    assert not want["embed.table"][301:].any() and not want["head.kernel"][:, 301:].any()
    assert_bit_equal(read(tmp_path, MESHES[mesh], **padding), want)


def test_a_round_trip_is_bit_equal(imported, tmp_path) -> None:
    source, run = imported
    assert convert("to-hf", run, tmp_path / "out") == 0
    assert_bit_equal(tensors_of(tmp_path / "out"), random_tensors())
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        ours, theirs = ((d / name).read_text() for d in (tmp_path / "out", source))
        assert json.loads(ours) == json.loads(theirs)


def test_a_round_trip_over_eight_devices_takes_padding_off(tmp_path) -> None:
    source = write_model(tmp_path / "hf")
    assert convert("from-hf", source, tmp_path / "run", "mesh.tp=8", "data.sequence_length=64") == 0
    config = load_run(tmp_path / "run").config
    assert config.model.padded_vocab_size == 304
    export_model(tmp_path / "run", tmp_path / "out")
    assert_bit_equal(tensors_of(tmp_path / "out"), random_tensors())


@pytest.mark.slow
def test_two_processes_import_what_one_does(imported, tmp_path) -> None:
    source, run = imported
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


def test_an_export_may_change_the_type_and_needs_several_files(imported, tmp_path) -> None:
    assert convert("to-hf", imported[1], tmp_path / "out", "--dtype", "float32") == 0
    want = {name: x.astype(np.float32) for name, x in random_tensors().items()}
    assert_bit_equal(tensors_of(tmp_path / "out"), want)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float32"


def test_training_starts_from_an_imported_run(imported, signals, tmp_path) -> None:
    _, run = imported
    (tmp_path / "a.txt").write_text("def f(x): return x\n" * 400)
    values = ["training.steps=1", "training.sample_tokens=0", f"data.files={tmp_path}/a.txt"]
    values += ["optimizer.learning_rate=1e-30", "optimizer.schedule=constant"]
    assert train(str(run / "config.yaml"), *values) == 0
    assert "initialised parameters from checkpoint 0 of" in (run / "log.txt").read_text()
    before, after = params_of(run, 0), params_of(run, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), before, after)


def test_a_run_that_was_not_imported_can_be_exported(half, tmp_path, capsys) -> None:
    run = Path(half).parent / "run"
    assert convert("to-hf", run, tmp_path / "out") == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["eos_token_id"] == 256
    assert convert("from-hf", tmp_path / "out", tmp_path / "again") == 0
    jax.tree.map(np.testing.assert_array_equal, params_of(run), params_of(tmp_path / "again"))
    assert convert("to-hf", run, tmp_path / "ema", "--ema") == 2
    assert "has no moving average" in capsys.readouterr().err
    assert not (tmp_path / "ema").exists()


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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tensor, "missing: model.layers.1.mlp.experts.3.up_proj.weight"),
        (add_tensor, "unknown: model.layers.0.self_attn.q_proj.bias"),
        (change_shape, r"wrong shape: model.norm.weight \(31,\) instead of \(32,\)"),
        (truncate, "model.safetensors is truncated: .* ends at byte"),
        (cut_header, "is no complete safetensors file"),
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


def test_a_directory_that_is_not_empty_is_refused(imported, tmp_path, capsys) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").write_text("")
    for arguments in (("from-hf", imported[0]), ("to-hf", imported[1])):
        assert convert(*arguments, tmp_path / "old") == 2
        assert "is not empty; give a new directory" in capsys.readouterr().err


def test_a_created_file_holds_the_tensors_at_their_places(tmp_path) -> None:
    tensors = {"b": ("BF16", (3, 5)), "a": ("F32", (7,)), "empty": ("F32", (0, 4))}
    infos = create_file(tmp_path / "x.safetensors", tensors)
    infos["a"].open("r+")[...] = np.arange(7)
    assert read_header(tmp_path / "x.safetensors") == infos
    np.testing.assert_array_equal(infos["a"].open(), np.arange(7))
    assert not infos["b"].open().any() and infos["empty"].open().shape == (0, 4)
    assert all(info.offset % 2 == 0 for info in infos.values())


def test_mxfp4_weights_are_decoded() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(120, 134, (2, 6, 3), dtype=np.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-v for v in values]
    want = np.empty((2, 96, 6))
    for expert, row, group, byte in np.ndindex(blocks.shape):
        scale = 2.0 ** (int(scales[expert, row, group]) - 127)
        for high in (0, 1):
            both = int(blocks[expert, row, group, byte])
            nibble = both >> 4 if high else both & 15
            want[expert, group * 32 + 2 * byte + high, row] = values[nibble] * scale
    stored = Mxfp4Tensor(blocks, scales)
    assert stored.shape == want.shape
    for expert in range(2):
        np.testing.assert_array_equal(stored[expert], want[expert])


def test_fp8_blocks_are_decoded() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5, 7)).astype(np.float32)
    scale = np.array([[1.0, 2.0, 4.0], [0.5, 3.0, 7.0]], np.float32)
    encoded = weight.astype(ml_dtypes.float8_e4m3fn)
    want = np.array(
        [[float(encoded[i, j]) * scale[i // 4, j // 3] for j in range(7)] for i in range(5)],
        np.float32,
    )
    np.testing.assert_array_equal(Fp8Tensor(encoded, scale, (4, 3))[...], want)
