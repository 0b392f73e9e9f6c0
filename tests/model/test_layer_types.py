"""Windows, chunks, sinks, head norms and dropout give the same results on every mesh."""

import jax
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from flax import nnx
from model_runs import ModelRun, abstract_model, assert_equal_runs, batch, run_model

from model.config import ModelConfig
from model.rope import RopeScaling
from parallel.sharding.mesh import MeshConfig

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=48,
    dtype="float32",
    initializer_range=0.1,
    loss_chunk=8,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=5,
    attn_logit_softcapping=4.0,
    attention_sinks=True,
    attention_dropout=0.2,
    qk_norm=True,
    rope_local_theta=100.0,
    rope_scaling=RopeScaling(type="linear", factor=2.0),
)
B, L = 4, 32
SP8, SP4 = MeshConfig(sp=8), MeshConfig(tp=2, sp=4)


def run(config: ModelConfig, mesh: MeshConfig, dropout_seed: int | None = 0) -> ModelRun:
    return run_model(config, tensor_parallel(mesh), batch(B, L), dropout_seed)


@pytest.fixture(scope="module")
def one_device():
    return run(CONFIG, ONE_DEVICE)


def test_every_feature_equals_one_device_with_heads_and_rows_split(one_device) -> None:
    assert_equal_runs(run(CONFIG, MESHES["dp2-fsdp2-tp2"]), one_device)
    got = run(CONFIG, MESHES["tp4-sp2"])
    assert got.order is None, "rows this short are gathered over sp, in natural order"
    assert_equal_runs(got, one_device)


@pytest.mark.parametrize(
    ("name", "mesh", "changes"),
    [
        pytest.param("ring", SP8, {}, marks=pytest.mark.slow),
        pytest.param("ring", SP4, {"zigzag": False}, marks=pytest.mark.slow),
        ("ring", SP4, {"scan_ring_attention": True}),
        ("ulysses", SP4, {}),
    ],
    ids=str,
)
def test_rows_split_over_sp_equal_one_device(one_device, name, mesh, changes) -> None:
    config = CONFIG.model_copy(update={"attention": name, **changes})
    got = run(config, mesh)
    assert (got.order is not None) == (name == "ring" and config.zigzag)
    assert_equal_runs(got, one_device)


@pytest.mark.slow
def test_chunked_layers_equal_one_device() -> None:
    types = ("chunked_attention", "chunked_attention", "full_attention")
    config = CONFIG.model_copy(update={"layer_types": types, "attention_chunk_size": 7})
    want = run(config, ONE_DEVICE)
    assert_equal_runs(run(config, MESHES["tp4-sp2"]), want)
    assert_equal_runs(run(config.model_copy(update={"attention": "ring"}), SP4), want)


def test_an_incomplete_period_of_layer_types_equals_the_written_out_list(one_device) -> None:
    types = (*CONFIG.layer_types, CONFIG.layer_types[0])
    assert CONFIG.layer_kinds == types
    config = CONFIG.model_copy(update={"layer_types": types})
    assert_equal_runs(run(config, ONE_DEVICE), one_device)


@pytest.mark.slow
def test_dropout_is_a_function_of_its_key_and_off_without_one(one_device) -> None:
    losses = [run(CONFIG, ONE_DEVICE, seed).loss for seed in (0, 1)]
    assert losses[0] == one_device.loss != losses[1]
    off = run(CONFIG.model_copy(update={"attention_dropout": 0.0}), ONE_DEVICE)
    assert run(CONFIG, ONE_DEVICE, None).loss == off.loss != losses[0]


def test_parameters_and_visible_keys_are_counted() -> None:
    model = abstract_model(CONFIG, tensor_parallel(ONE_DEVICE))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
    assert sum(leaf.size for leaf in leaves) == CONFIG.num_parameters
    index = np.arange(20)
    sees = {
        "full_attention": index[:, None] >= index,
        "sliding_attention": (index[:, None] >= index) & (index[:, None] - index < 5),
        "chunked_attention": (index[:, None] >= index) & (index[:, None] // 7 == index // 7),
    }
    config = CONFIG.model_copy(update={"attention_chunk_size": 7})
    for kind, seen in sees.items():
        assert config.visible_keys(kind, 20) == pytest.approx(seen.sum() / 20)
