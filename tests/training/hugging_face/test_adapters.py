"""LoRA runs on a Hugging Face model, and their adapters in PEFT's format, without PEFT."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_files import assert_bit_equal, convert, params_of, tensors_of, write_file, write_model
from runs import losses
from runs import run as train
from test_init_from import SHORT

from model.lora import adapters_of, without_adapters
from training.fingerprint import leaf_name
from training.hugging_face.tensor_files import read_header

pytestmark = pytest.mark.usefixtures("signals")
SETTINGS = ("data.sequence_length=32", "data.global_batch_size=8", "model.dtype=float32", *SHORT)
LORA = ("lora.rank=2", "lora.alpha=3", "optimizer.learning_rate=0.1")
MESH = ("mesh.fsdp=2", "mesh.tp=2", "mesh.ep=2", "model.pad_vocab_to_multiple_of=2")
SCALE, EXPERTS = 1.5, 4
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with model `hf`, a run `lora` on it, its adapters `peft`, and `merged`."""
    folder = tmp_path_factory.mktemp("lora")
    (folder / "a.txt").write_text("".join(f"def f{n}(x): return x * {n}\n" for n in range(200)))
    write_model(folder / "hf")
    base = ("from-hf", folder / "hf", folder / "base", f"data.files={folder}/*.txt")
    assert convert(*base, f"data.cache_dir={folder}/cache", *SETTINGS) == 0
    assert train_lora(folder, "lora") == 0
    assert convert("to-hf", folder / "lora", folder / "peft", "--adapters") == 0
    assert convert("to-hf", folder / "lora", folder / "merged", "--dtype", "float32") == 0
    return folder


def train_lora(folder: Path, name: str, *values: str) -> int:
    """Train adapters on the model directory."""
    values = (f"run.dir={folder}/{name}", f"training.init_from={folder}/hf", *LORA, *values)
    return train(str(folder / "base/config.yaml"), *values)


def matrices(directory: Path) -> dict[str, np.ndarray]:
    infos = read_header(directory / TENSORS)
    return {name.removeprefix("base_model.model."): np.array(x.open()) for name, x in infos.items()}


def test_a_lora_run_starts_from_a_model_directory(folder) -> None:
    log = (folder / "lora/log.txt").read_text()
    assert f"initialised parameters from {folder}/hf in" in log and "trainable of" in log
    before, after = params_of(folder / "base"), params_of(folder / "lora")
    jax.tree.map(np.testing.assert_array_equal, without_adapters(after), before)
    for path, factor in jax.tree_util.tree_leaves_with_path(adapters_of(after)):
        assert np.any(factor), leaf_name(path)


@pytest.mark.release
def test_a_lora_run_starts_alike_on_a_mesh(folder) -> None:
    assert train_lora(folder, "mesh", *MESH) == 0
    assert losses(folder / "mesh") == pytest.approx(losses(folder / "lora"), rel=1e-5)


def test_adapter_files_hold_what_was_merged(folder) -> None:
    """W + scale * B A, with the layout of experts that PEFT documents, is the merged model."""
    base, merged, found = tensors_of(folder / "hf"), tensors_of(folder / "merged"), {}
    factors = matrices(folder / "peft")
    for name in (name for name in factors if ".lora_A" in name):
        a, b = factors[name], factors[name.replace("lora_A", "lora_B")]
        module = name.removesuffix(".lora_A.weight")
        if not module.partition(".base_layer")[0].endswith(".experts"):
            found[f"{module}.weight"] = b @ a
            continue
        at, _, inner = module.partition(".base_layer")
        assert at == module or name.count(".base_layer") == 1, inner
        a, b = a.reshape(EXPERTS, -1, a.shape[1]), b.reshape(len(b), -1, EXPERTS)
        delta = np.einsum("ore,eri->eoi", b, a)
        parts = {"down": delta} if at == module else {}
        if not parts:
            parts = dict(zip(("gate", "up"), np.split(delta, 2, axis=1), strict=True))
        for part, experts in parts.items():
            for expert, one in enumerate(experts):
                found[f"{at}.{expert}.{part}_proj.weight"] = one
    adapted = {name for name in base if "_proj" in name}
    assert found.keys() == adapted
    for name, x in merged.items():
        want = base[name].astype(np.float32) + SCALE * found.get(name, np.float32(0))
        # Rounding of float32 sums in another order.
        np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_configuration_of_adapters_says_how_peft_applies_them(folder) -> None:
    keys = json.loads((folder / "peft" / CONFIG).read_text())
    assert keys["r"] == 2 and keys["lora_alpha"] == 3
    assert keys["base_model_name_or_path"] == f"{folder}/hf"
    assert keys["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    dense = [f"mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
    experts = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert keys["target_parameters"] == [dense[0], *experts, *dense[1:]]
    assert keys["rank_pattern"] == {"mlp.experts.gate_up_proj": 4}
    assert keys["alpha_pattern"] == {"mlp.experts.gate_up_proj": 6}


def import_adapters(folder: Path, name: str, *values: str) -> None:
    data = (f"data.files={folder}/*.txt", f"data.cache_dir={folder}/cache")
    given = ("from-hf", folder / "hf", folder / name, *SETTINGS, *data, *values)
    assert convert(*given, "--adapters", folder / "peft") == 0


def test_adapters_come_back_bit_equal_and_train_on(folder) -> None:
    import_adapters(folder, "one")
    want, found = (adapters_of(params_of(folder / name)) for name in ("lora", "one"))
    jax.tree.map(np.testing.assert_array_equal, found, want)
    still = ("training.steps=1", "optimizer.learning_rate=1e-30")
    assert train(str(folder / "one/config.yaml"), *still) == 0
    after = adapters_of(params_of(folder / "one", 1))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-28), after, want)


@pytest.mark.slow
def test_adapters_go_through_a_mesh_bit_equal(folder) -> None:
    import_adapters(folder, "eight", *MESH)
    assert convert("to-hf", folder / "eight", folder / "again", "--adapters") == 0
    assert_bit_equal(matrices(folder / "again"), matrices(folder / "peft"))


def change(**keys):
    def damage(directory: Path) -> None:
        content = json.loads((directory / CONFIG).read_text())
        (directory / CONFIG).write_text(json.dumps(content | keys))

    return damage


def rename(old: str, new: str):
    def damage(directory: Path) -> None:
        infos = read_header(directory / TENSORS)
        tensors = {name.replace(old, new): np.array(x.open()) for name, x in infos.items()}
        write_file(directory / TENSORS, tensors)

    return damage


def fill(name: str):
    def damage(directory: Path) -> None:
        read_header(directory / TENSORS)[f"base_model.model.{name}"].open("r+")[...] = 1

    return damage


@pytest.mark.parametrize(
    ("damage", "values", "message"),
    [
        (change(use_dora=True), (), "use_dora=True: is not supported; merge"),
        (change(use_rslora=True), (), "use_rslora=True: is not supported; merge"),
        (change(bias="all"), (), "bias='all': is not supported; merge"),
        (change(modules_to_save=["lm_head"]), (), "modules_to_save=['lm_head']: is not"),
        (change(peft_type="IA3"), (), "peft_type='IA3': only LORA is supported"),
        (change(init_lora_weights="pissa"), (), "init_lora_weights='pissa': changes the base"),
        (change(r=3, lora_alpha=4.5), (), "wrong shape: base_model.model.model.layers.0.self"),
        (change(rank_pattern={"v_proj": 8}), (), "rank 8 of base_model.model.model.layers.0.self"),
        (change(alpha_pattern={"v_proj": 8}), (), "scale 4 of base_model.model.model.layers.0."),
        (change(rank_pattern=["v_proj"]), (), "rank_pattern=['v_proj']: is no object with a whole"),
        (change(rank_pattern={"v_proj": 0}), (), "rank_pattern={'v_proj': 0}: is no object with a"),
        (change(alpha_pattern={"v_proj": "8"}), (), "alpha_pattern={'v_proj': '8'}: is no object"),
        (change(alpha_pattern={"(": 8}), (), "alpha_pattern={'(': 8}: '(' is no regular expres"),
        (change(target_parameters="up"), (), "target_parameters='up': is no list of names"),
        (None, ("lora.rank=4",), "lora.rank=4 differs from r=2 in "),
        (None, ("lora.alpha=4",), "lora.alpha=4 differs from lora_alpha=3 in "),
        (None, ("lora.targets=[q]",), "lora.targets=[q]: only "),
        (rename("self_attn.q_proj", "self_attn.x_proj"), (), "unknown: base_model.model.model."),
        (rename("layers.2.self_attn.v", "layers.9.self_attn.v"), (), "missing: base_model.model."),
        (
            rename(".layers.", ".blocks."),
            (),
            "no matrix belongs to a linear of Qwen3Moe",
        ),
        (rename("layers.0.mlp.up_proj", "lm_head"), (), "unknown: base_model.model.model.lm_head"),
        (
            fill("model.layers.1.mlp.experts.base_layer.lora_B.weight"),
            (),
            "B of base_model.model.model.layers.1.mlp.experts.base_layer is not that of",
        ),
        (lambda folder: (folder / TENSORS).unlink(), (), f"has no {TENSORS}; only safetensors"),
        (lambda folder: (folder / CONFIG).unlink(), (), f"has no {CONFIG}; give a PEFT adapter"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(folder, tmp_path, capsys, damage, values, message):
    shutil.copytree(folder / "peft", tmp_path / "peft")
    if damage is not None:
        damage(tmp_path / "peft")
    given = ("from-hf", folder / "hf", tmp_path / "run", *SETTINGS, *values)
    assert convert(*given, "--adapters", tmp_path / "peft") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "run").exists()


def test_names_of_adapters_are_those_of_the_first_model_of_a_chain_of_runs(folder, capsys) -> None:
    shutil.copytree(folder / "lora", folder / "second")
    config = (folder / "lora/config.yaml").read_text()
    second = config.replace(f"init_from: {folder}/hf", f"init_from: {folder}/lora")
    assert second != config
    (folder / "second/config.yaml").write_text(second)
    assert convert("to-hf", folder / "second", folder / "chained", "--adapters") == 0
    keys = json.loads((folder / "chained" / CONFIG).read_text())
    assert keys["base_model_name_or_path"] == f"{folder}/hf"
    assert matrices(folder / "chained").keys() == matrices(folder / "peft").keys()
    (folder / "lora").rename(folder / "moved")
    try:
        assert convert("to-hf", folder / "second", folder / "lost", "--adapters") == 2
    finally:
        (folder / "moved").rename(folder / "lora")
    message = f"training.init_from={folder}/lora of {folder}/second does not exist, and the names"
    assert message in capsys.readouterr().err
    assert not (folder / "lost").exists()


def test_a_run_without_adapters_has_none_to_write(folder, tmp_path, capsys) -> None:
    assert convert("to-hf", folder / "base", tmp_path / "out", "--adapters") == 2
    assert "checkpoint 0 of" in (error := capsys.readouterr().err) and "no adapters" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_directory_is_read_as_int8(folder) -> None:
    import_adapters(folder, "int8", "lora.base_dtype=int8")
    assert convert("to-hf", folder / "int8", folder / "merged8", "--dtype", "float32") == 0
    assert convert("to-hf", folder / "int8", folder / "peft8", "--adapters") == 0
    assert_bit_equal(matrices(folder / "peft8"), matrices(folder / "peft"))
    source, merged, base = (tensors_of(folder / name) for name in ("hf", "merged", "merged8"))
    for name, x in merged.items():
        weight = source[name].astype(np.float32)
        step = np.abs(weight).max(axis=-1, keepdims=True) / 127
        if "_proj" not in name:
            step = np.zeros(())
        assert (np.abs(base[name] - x) <= step * (0.5 + 1e-3) + 1e-6).all(), name
        assert np.any(base[name] != x) == ("_proj" in name)
