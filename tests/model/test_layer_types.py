"""Windows, chunks, sinks, head norms and dropout give the same results on every mesh."""

import jax
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, release, slow, tensor_parallel
from model_runs import ModelRun, assert_equal_runs, batch, model_loss, run_model

from model.config import LayerKind, ModelConfig, MoEConfig, Segment
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
        slow("ring", SP8, {}),
        release("ring", SP4, {"zigzag": False}),
        ("ring", SP4, {"scan_ring_attention": True}),
        ("ulysses", SP4, {}),
    ],
    ids=str,
)
@pytest.mark.costly
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


def written_out(types: str, **sparse: int) -> ModelConfig:
    """Return a model with one letter of s, f for every layer, as in Hugging Face files."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    layers = {"layer_types": tuple(names[t] for t in types), "num_hidden_layers": len(types)}
    return CONFIG.model_copy(update={**layers, "moe": MoEConfig(**sparse)})


@pytest.mark.parametrize(
    ("types", "sparse", "segments"),
    [
        ("sf" * 12, {}, "sf*12"),
        ("f" * 24, {}, "f*24"),
        ("sssssf" * 4 + "ss", {}, "sssssf*4 s*2"),
        ("f" * 20 + "s" * 4, {}, "f*20 s*4"),
        ("sfssff", {}, "s*1 f*1 s*2 f*2"),
        ("sfs", {}, "sfs*1"),
        ("sf" * 6, {"num_experts": 4, "first_k_dense_replace": 3}, "sfs*1 FS*4 F*1"),
        ("s" * 9, {"num_experts": 4, "first_k_dense_replace": 1}, "s*1 S*8"),
        ("ssf" * 4, {"num_experts": 4, "decoder_sparse_step": 2}, "sSfSsF*2"),
    ],
)
def test_layers_are_divided_by_their_shortest_pattern(types, sparse, segments) -> None:
    """A capital letter is a sparse layer."""
    config = written_out(types, **sparse)
    found = []
    for pattern, repeats in config.segments:
        letters = [k.layer_type[0].upper() if k.is_sparse else k.layer_type[0] for k in pattern]
        found.append(f"{''.join(letters)}*{repeats}")
    assert " ".join(found) == segments


def test_layers_without_rope_are_part_of_the_pattern() -> None:
    """SmolLM3: every fourth layer has no rope."""
    changes = {"rope_layers": (True, True, True, False), "layer_types": ("full_attention",)}
    config = CONFIG.model_copy(update={**changes, "num_hidden_layers": 10})
    assert [segment.repeats for segment in config.segments] == [2, 2]
    assert [kind.has_rope for kind in config.segments[0].pattern] == [True, True, True, False]
    assert config.segments[1].pattern == (LayerKind("full_attention", False, True),)


def test_a_written_out_list_compiles_to_the_program_of_its_pattern(one_device) -> None:
    config = written_out("sfsfs")
    programs, tp = [], tensor_parallel(ONE_DEVICE)
    for types in (CONFIG.layer_types, config.layer_types):
        config = config.model_copy(update={"layer_types": types})
        with jax.set_mesh(tp.mesh):
            loss, params, _ = model_loss(config, tp, batch(B, L))
            programs.append(jax.jit(jax.value_and_grad(loss)).lower(params).as_text())
    assert programs[0] == programs[1]


def test_runs_of_equal_layers_equal_unrolled_layers(monkeypatch) -> None:
    config, tp = written_out("ssfsss"), tensor_parallel(ONE_DEVICE)
    kinds = tuple(LayerKind(kind, False) for kind in config.layer_kinds)
    segments = config.segments, (Segment(kinds, 1),)
    assert [repeats for _, repeats in segments[0]] == [2, 1, 3]
    runs = []
    for divided in segments:
        monkeypatch.setattr(ModelConfig, "segments", divided)
        runs.append(run_model(config, tp, batch(B, L), 0))
    assert_equal_runs(*runs)


@pytest.mark.slow
def test_dropout_is_a_function_of_its_key_and_off_without_one(one_device) -> None:
    losses = [run(CONFIG, ONE_DEVICE, seed).loss for seed in (0, 1)]
    assert losses[0] == one_device.loss != losses[1]
    off = run(CONFIG.model_copy(update={"attention_dropout": 0.0}), ONE_DEVICE)
    assert run(CONFIG, ONE_DEVICE, None).loss == off.loss != losses[0]


def test_visible_keys_are_counted() -> None:
    index = np.arange(20)
    sees = {
        "full_attention": index[:, None] >= index,
        "sliding_attention": (index[:, None] >= index) & (index[:, None] - index < 5),
        "chunked_attention": (index[:, None] >= index) & (index[:, None] // 7 == index // 7),
    }
    config = CONFIG.model_copy(update={"attention_chunk_size": 7})
    for kind, seen in sees.items():
        assert config.visible_keys(kind, 20) == pytest.approx(seen.sum() / 20)
