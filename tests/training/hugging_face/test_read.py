"""Parameters of a model directory, read onto one device and onto meshes."""

from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx
from hf_files import CONFIG, assert_bit_equal, random_tensors, write_model
from model_runs import abstract_model

from model.config import ModelConfig
from training.fingerprint import leaf_name
from training.hugging_face import read as reading
from training.hugging_face.read import read_config, read_parameters
from training.logs import log


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


@pytest.mark.parametrize("mesh", ["tp8", "dp2-fsdp2-tp2", "ep2-fsdp2-sp2"])
@pytest.mark.costly
def test_a_mesh_reads_what_one_device_reads(tmp_path, monkeypatch, mesh) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 1500)  # several parts, the last ones overlapping
    write_model(tmp_path)
    padding = {"pad_vocab_to_multiple_of": 8}
    want = read(tmp_path, **padding)
    assert not want["embed.table"][301:].any() and not want["head.kernel"][:, 301:].any()
    assert_bit_equal(read(tmp_path, MESHES[mesh], **padding), want)


def test_layers_of_multi_token_prediction_are_left_out_with_a_line(
    tmp_path, caplog, monkeypatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)  # a run of train.py switches it off
    tensors = random_tensors()
    want = read(write_model(tmp_path / "plain", tensors))
    assert not [record for record in caplog.records if record.name == log.name]
    extra = {"model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float32)}
    write_model(tmp_path / "extra", tensors | extra, CONFIG | {"num_nextn_predict_layers": 1})
    assert_bit_equal(read(tmp_path / "extra"), want)
    messages = {record.getMessage() for record in caplog.records if record.name == log.name}
    assert messages == {
        f"{tmp_path}/extra: left out 1 tensors of multi-token prediction: "
        "model.layers.3.eh_proj.weight"
    }
