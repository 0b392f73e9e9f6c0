"""Import and export of model directories: bit-equal round trips, tokenizers, quantized weights."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import slow
from hf_files import (
    CONFIG,
    SMALL,
    assert_bit_equal,
    convert,
    params_of,
    random_tensors,
    tensors_of,
    write_model,
)
from runs import run as train

from configs import conversion
from configs.conversion import export_model
from configs.runs import load_run, longest_rows
from configs.schema import dump_config
from data.chat import encode_chat
from data.chat_jinja import find_chat_template
from data.pipeline import Dataset
from data.tokenizers.base import open_tokenizer, save_tokenizer
from training import checkpoint, stored_arrays
from training.hugging_face.companions import export_companions


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


def test_experts_fused_in_one_tensor_are_read_too(tmp_path) -> None:
    tensors = random_tensors("F32")
    fused = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in (1, 2):
        at = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: np.stack([tensors[f"{at}.{e}.{part}_proj.weight"] for e in range(4)])
            for part in ("gate", "up", "down")
        }
        fused[f"{at}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        fused[f"{at}.down_proj"] = parts["down"]
    write_model(tmp_path / "separate", tensors)
    write_model(tmp_path / "fused", fused)
    for name in ("separate", "fused"):
        assert convert("from-hf", tmp_path / name, tmp_path / f"{name}-run", *SMALL) == 0
    want, got = (params_of(tmp_path / f"{name}-run") for name in ("separate", "fused"))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert convert("to-hf", tmp_path / "fused-run", tmp_path / "out") == 0
    assert_bit_equal(tensors_of(tmp_path / "out"), fused)


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


def test_an_export_may_change_the_type(imported, tmp_path) -> None:
    assert convert("to-hf", imported[1], tmp_path / "out", "--dtype", "float32") == 0
    want = {name: x.astype(np.float32) for name, x in random_tensors().items()}
    assert_bit_equal(tensors_of(tmp_path / "out"), want)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "float32"


def test_a_large_export_is_several_files_with_an_index(imported, tmp_path, monkeypatch) -> None:
    limit = 20_000
    write = partial(conversion.write_tensors, max_bytes=limit)
    monkeypatch.setattr(conversion, "write_tensors", write)
    export_model(imported[1], tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert count > 2
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    sizes = {name: x.nbytes for name, x in random_tensors().items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for file in files:
        assert sum(sizes[name] for name, at in index["weight_map"].items() if at == file) <= limit
    assert_bit_equal(tensors_of(tmp_path / "out"), random_tensors())


def test_an_export_holds_one_chunk_at_a_time(tmp_path, monkeypatch) -> None:
    limit = 2048
    monkeypatch.setattr(stored_arrays, "_CHUNK_BYTES", limit)
    overrides = ("mesh.tp=2", "mesh.fsdp=2", "data.sequence_length=64", "data.global_batch_size=4")
    assert convert("from-hf", write_model(tmp_path / "hf"), tmp_path / "run", *overrides) == 0
    sizes, read = [], checkpoint.read_chunks

    def counted(*arguments):
        for start, values in read(*arguments):
            sizes.append(values.nbytes)
            yield start, values

    monkeypatch.setattr(checkpoint, "read_chunks", counted)
    export_model(tmp_path / "run", tmp_path / "out")
    assert_bit_equal(tensors_of(tmp_path / "out"), random_tensors())
    stacks = jax.tree.leaves(params_of(tmp_path / "run"))
    assert max(sizes) <= limit < max(x.nbytes for x in stacks) / 4
    assert sum(sizes) == sum(x.nbytes for x in stacks)


def test_the_run_directory_of_an_import_is_its_argument_alone(imported) -> None:
    directory, run = imported
    with pytest.raises(ValueError, match=r"run.dir: the run directory is the argument .*; remove"):
        conversion.import_config(directory, run, ["run.dir=runs/other"])


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


def test_an_export_names_the_tokens_of_a_run_with_a_folder_of_tokenizer_files(tmp_path) -> None:
    chats = pytest.importorskip("chats")
    source = write_model(tmp_path / "hf", config=CONFIG | {"vocab_size": 320})
    chats.write_model_directory(source, chats.HEADS, generation={"eos_token_id": [2], "top_p": 0.5})
    run = tmp_path / "run"
    assert convert("from-hf", source, run, *SMALL) == 0
    (run / "hugging_face.json").unlink()  # as in a run that began with training.init_from
    shutil.rmtree(run / "tokenizer")
    save_tokenizer(open_tokenizer(str(source)), run)
    assert convert("to-hf", run, tmp_path / "out") == 0
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["bos_token_id"] == chats.SPECIAL.index(chats.BOS)
    assert config["eos_token_id"] == [0, 2, 256]  # of documents, of turns, and of config.json
    (tmp_path / "again").mkdir()
    export_companions(run, None, tmp_path / "again")
    assert not (tmp_path / "again/config.json").exists()


def test_an_export_names_the_tokens_of_another_tokenizer_than_that_of_the_source(tmp_path) -> None:
    chats = pytest.importorskip("chats")
    config = CONFIG | {"vocab_size": 320, "eos_token_id": 4, "bos_token_id": 1}
    source = write_model(tmp_path / "hf", config=config)
    chats.write_model_directory(source, chats.HEADS)
    run = tmp_path / "run"
    assert convert("from-hf", source, run, *SMALL, "data.tokenizer=bytes") == 0
    save_tokenizer(open_tokenizer("bytes"), run)  # as train.py does
    assert convert("to-hf", run, tmp_path / "out") == 0
    for name in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / "out" / name).read_text())
        assert found["eos_token_id"] == 256 and found["bos_token_id"] is None


def test_an_export_has_the_positions_of_the_model_that_the_run_started_from(
    imported, tmp_path
) -> None:
    source, run = imported
    config = load_run(run).config
    longest = json.loads((source / "config.json").read_text())["max_position_embeddings"]
    assert longest > config.data.row_length
    (later := tmp_path / "later").mkdir()
    training = config.training.model_copy(update={"init_from": str(run)})
    (later / "config.yaml").write_text(
        dump_config(config.model_copy(update={"training": training}))
    )
    for start, wanted in ((run, longest), (source, longest), (tmp_path / "gone", 0)):
        training = config.training.model_copy(update={"init_from": str(start)})
        changed = config.model_copy(update={"training": training})
        found = longest_rows(tmp_path / "last", changed)
        assert found == max(wanted, config.data.row_length)
    training = config.training.model_copy(update={"init_from": f"{later}/checkpoints/3"})
    changed = config.model_copy(update={"training": training})
    assert longest_rows(tmp_path / "last", changed) == longest


def test_an_export_has_the_positions_of_rows_that_became_longer(imported, tmp_path) -> None:
    source, run = imported
    shutil.copytree(run, tmp_path / "run")
    longest = json.loads((source / "config.json").read_text())["max_position_embeddings"]
    config = load_run(run).config
    data = config.data.model_copy(update={"sequence_length": 4 * longest})
    text = dump_config(config.model_copy(update={"data": data}))
    for place, wanted in ((run, longest), (tmp_path / "run", 4 * longest)):
        if place != run:
            (place / "config.yaml").write_text(text)
        assert convert("to-hf", place, tmp_path / f"out{wanted}") == 0
        written = json.loads((tmp_path / f"out{wanted}" / "config.json").read_text())
        assert written["max_position_embeddings"] == wanted


def test_documents_of_an_imported_run_do_not_end_like_a_message(tmp_path) -> None:
    chats = pytest.importorskip("chats")
    pytest.importorskip("jinja2")
    config = CONFIG | {"vocab_size": 320, "eos_token_id": 4}
    source = write_model(tmp_path / "hf", config=config)
    chats.write_model_directory(source, chats.CHATML, adds_bos=False, eos_token="<|im_end|>")
    texts = ["the cat sat on the mat", "what is one and one?"]
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    values = [f"data.files={tmp_path}/*.txt", f"data.cache_dir={tmp_path}/cache"]
    values += [*SMALL, "data.eval_fraction=0", "data.sequence_length=8"]
    run = tmp_path / "run"
    assert convert("from-hf", source, run, *values) == 0
    opened = load_run(run)
    assert opened.config.data.eos_token is None
    store = Dataset(opened.config.data).sources[0].store
    end, turn_end = (chats.SPECIAL.index(token) for token in (chats.EOS, "<|im_end|>"))
    first, last = ([*opened.tokenizer.encode(text).tolist(), end] for text in texts)
    assert store.tokens[:].tolist() == [*first, *last]
    assert opened.tokenizer.eos_ids == (end, turn_end)
    talk = [("user", "what is one?"), ("assistant", "two")]
    template = find_chat_template("auto", opened.tokenizer).template
    chat = encode_chat(opened.tokenizer, talk, template)
    learned = chat.ids[chat.loss_mask.astype(bool)].tolist()
    answer = [*opened.tokenizer.encode("two").tolist(), turn_end]
    assert learned[: len(answer)] == answer and len(learned) <= len(answer) + 1  # a line break


QWEN3_FP8 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 20]},
}
GPT_OSS_MXFP4 = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}


def outer_tensors(config, rng):
    """Tensors of a model beside its linears and MLPs."""
    D, V = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
    shapes |= {"model.norm.weight": (D,)}
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (D,)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def attention_shapes(config):
    """Shapes (out, in) of the linears of attention."""
    D, h = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    return {"q_proj": (heads, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, heads)}


def qwen3_fp8(rng):
    """(tensors as stored, tensors in float32)."""
    config = QWEN3_FP8
    D, F, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    plain = outer_tensors(config, rng)
    shapes = {f"self_attn.{name}": shape for name, shape in attention_shapes(config).items()}
    shapes |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    stored, decoded = {}, {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        plain |= {f"{at}self_attn.{name}_norm.weight": rng.standard_normal(h) for name in "qk"}
        for name, (rows, columns) in shapes.items():
            weight = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
            scale = rng.uniform(0.5, 2, (-(-rows // 16), -(-columns // 20))).astype(np.float32)
            full = np.kron(scale, np.ones((16, 20), np.float32))[:rows, :columns]
            stored |= {f"{at}{name}.weight": weight, f"{at}{name}.weight_scale_inv": scale}
            decoded[f"{at}{name}.weight"] = weight.astype(np.float32) * full
    plain = {name: x.astype(ml_dtypes.bfloat16) for name, x in plain.items()}
    return plain | stored, plain | decoded


def gpt_oss_mxfp4(rng):
    """(tensors as stored, tensors in float32)."""
    config = GPT_OSS_MXFP4
    D, F = config["hidden_size"], config["intermediate_size"]
    H, E = config["num_attention_heads"], config["num_local_experts"]
    plain = outer_tensors(config, rng)
    half = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([half, -half])  # the sign bit is the highest, so code 8 is -0.0
    stored, decoded = {}, {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, shape in attention_shapes(config).items():
            plain[f"{at}self_attn.{name}.weight"] = rng.standard_normal(shape)
            plain[f"{at}self_attn.{name}.bias"] = rng.standard_normal(shape[:1])
        plain[f"{at}self_attn.sinks"] = rng.standard_normal(H)
        plain[f"{at}mlp.router.weight"] = rng.standard_normal((E, D))
        plain[f"{at}mlp.router.bias"] = rng.standard_normal(E)
        for name, rows, columns in (("gate_up_proj", 2 * F, D), ("down_proj", D, F)):
            name = f"{at}mlp.experts.{name}"
            plain[f"{name}_bias"] = rng.standard_normal((E, rows))
            blocks = rng.integers(0, 256, (E, rows, columns // 32, 16), dtype=np.uint8)
            scales = rng.integers(120, 130, (E, rows, columns // 32), dtype=np.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            both = np.stack([values[blocks % 16], values[blocks // 16]], axis=-1)
            scaled = both.reshape(E, rows, -1, 32) * 2.0 ** (scales[..., None] - 127.0)
            decoded[name] = scaled.reshape(E, rows, columns).swapaxes(1, 2).astype(np.float32)
    plain = {name: x.astype(ml_dtypes.bfloat16) for name, x in plain.items()}
    return plain | stored, plain | decoded


@pytest.mark.parametrize(
    ("config", "make", "mesh"),
    [
        (QWEN3_FP8, qwen3_fp8, ("mesh.tp=2", "mesh.fsdp=2")),
        slow(GPT_OSS_MXFP4, gpt_oss_mxfp4, ("mesh.tp=2", "mesh.ep=2")),
    ],
)
def test_quantized_weights_are_decoded_on_one_device_and_on_a_mesh(
    config, make, mesh, tmp_path
) -> None:
    stored, decoded = make(np.random.default_rng(0))
    write_model(tmp_path / "hf", stored, config)
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    write_model(tmp_path / "plain", decoded, plain)
    assert convert("from-hf", tmp_path / "plain", tmp_path / "want", *SMALL) == 0
    want = params_of(tmp_path / "want")
    for name, values in (("one", ()), ("mesh", mesh)):
        assert convert("from-hf", tmp_path / "hf", tmp_path / name, *values, *SMALL) == 0
        jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path / name), want)
    assert convert("to-hf", tmp_path / "one", tmp_path / "out") == 0
    bfloat16 = {name: x.astype(ml_dtypes.bfloat16) for name, x in decoded.items()}
    assert_bit_equal(tensors_of(tmp_path / "out"), bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
