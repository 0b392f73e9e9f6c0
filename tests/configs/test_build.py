"""A built program: its sharding table equals what devices hold, and its choices have reasons."""

import re

import jax
import pytest
from conftest import MESHES, ROOT
from jax.sharding import PartitionSpec as P

from configs.build import build_program, build_sharding_table, open_devices
from configs.schema import Config, load_config
from parallel.planning.sharding_table import Row
from parallel.sharding.mesh import MeshConfig
from training.step import Program

TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.intermediate_size=64",
    "data.sequence_length=16",
    "data.global_batch_size=16",
    "training.gradient_accumulation=2",
]


def build(mesh: MeshConfig, *overrides: str) -> tuple[Config, Program]:
    sizes = [f"mesh.{name}={size}" for name, size in mesh.model_dump().items()]
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *sizes, *overrides])
    return config, build_program(config, jax.devices()[: mesh.num_devices])


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


@pytest.mark.parametrize(
    ("name", "moments"), [*((name, "null") for name in MESHES), ("dp2-fsdp2-tp2", "int8")]
)
@pytest.mark.costly
def test_the_table_counts_every_byte_of_the_state_on_every_device(name, moments):
    config, program = build(MESHES[name], f"optimizer.moments_dtype={moments}")
    table = build_sharding_table(config, program)
    with jax.set_mesh(program.tp.manager.mesh):
        state = program.init()
    held = dict.fromkeys(program.tp.manager.mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    rows = [*table["parameters"], *table["optimizer"]]
    assert set(held.values()) == {sum(row.bytes_per_device for row in rows)}
    assert all(row.axes != "?" for row in rows), "a parameter without semantic axes"


def test_a_parameter_is_a_row_with_its_shard_shape():
    config, program = build(MeshConfig(dp=2, tp=4), "model.tie_word_embeddings=true")
    table = build_sharding_table(config, program)
    rows = by_name(table["parameters"])
    assert "head.kernel" not in rows
    down = rows["layers.mlp.down.kernel"]
    assert down.axes == "RowWise: stack TP [FSDP SP]" and down.spec == P(None, "tp", ("fsdp", "sp"))
    assert (down.shape, down.local_shape) == ((2, 64, 32), (2, 16, 32))
    assert [item.mesh_axis for item in down.replicated] == ["dp"]
    moments = by_name(table["optimizer"])["{mu,nu}.layers.mlp.down.kernel"]
    assert moments.count == 2 and moments.bytes_per_device == 2 * down.bytes_per_device


def test_activations_are_those_of_a_microbatch():
    config, program = build(MeshConfig(dp=2, tp=4))
    rows = by_name(build_sharding_table(config, program)["activations"])
    assert rows["x_BLD"].shape == (8, 16, 32) and rows["x_BLD"].local_shape == (4, 4, 32)
    assert rows["logits_CV"].shape == (128, 264) and rows["logits_CV"].local_shape == (64, 66)


def test_replicated_keys_and_values_have_a_reason_and_a_cost():
    kv_heads = ("model.num_key_value_heads=2", "parallel.replicate_kv=true")
    config, program = build(MeshConfig(tp=8), *kv_heads)
    rows = by_name(build_sharding_table(config, program)["activations"])
    found = rows["kv_BLKh"]
    assert found.spec[2] is None and found.even_bytes * 8 == found.bytes_per_device
    assert "KV_HEAD = 2 does not divide over tp = 8" in found.replicated[0].reason
    assert rows["q_BLHh"].replicated == ()


@pytest.mark.parametrize("group", ["experts", "attention"])
def test_losses_of_routers_are_left_out_where_a_group_freezes_them(group) -> None:
    experts = ("model.moe.num_experts=4", "model.moe.num_experts_per_tok=2")
    losses = ("model.moe.router_aux_loss_coef=0.1", "model.moe.router_z_loss_coef=0.2")
    frozen = f"optimizer.groups={{{group}: {{learning_rate: 0}}}}"
    moe = build(MeshConfig(), *experts, *losses, frozen)[1].plan.model.moe
    want = (0.0, 0.0) if group == "experts" else (0.1, 0.2)
    assert (moe.router_aux_loss_coef, moe.router_z_loss_coef) == want


def test_auto_overlap_is_none_on_cpu_with_a_reason() -> None:
    _, program = build(MeshConfig(tp=4, fsdp=2))
    assert set(program.tp.kind_overlaps.values()) == {"none"}
    reasons = {choice.reason for choice in dict(program.plan.overlap).values()}
    (reason,) = reasons
    assert reason.startswith("link bandwidth unknown; ")


def test_every_kind_of_linear_has_its_own_overlap() -> None:
    overrides = "parallel.overlap=bidirectional", "parallel.overlap_qkv=split"
    _, program = build(MeshConfig(tp=4), *overrides, "parallel.overlap_o=auto")
    assert program.tp.overlap == "bidirectional"
    want = {"qkv": "split", "o": "none", "mlp": "bidirectional", "head": "bidirectional"}
    assert dict(program.tp.kind_overlaps) == want


def test_blocks_that_cannot_be_halved_are_refused() -> None:
    odd = "parallel.overlap=split", "data.sequence_length=12", "data.global_batch_size=2"
    with pytest.raises(
        ValueError, match=r"overlap_qkv=split\) sends half blocks, but .* is odd; make it even"
    ):
        build(MeshConfig(tp=4), *odd)
    build(MeshConfig(tp=2), *odd)
    shorter = "data.sequence_length={0: 12, 2: 24}", "data.global_batch_size=2"
    with pytest.raises(ValueError, match=r"sends half blocks, but .* is odd"):
        build(MeshConfig(tp=4), "parallel.overlap=split", *shorter)


@pytest.mark.parametrize(
    ("override", "mesh", "why"),
    [
        ("parallel.overlap=split", MeshConfig(fsdp=4), "one device on tp"),
        ("parallel.residual=replicated", MeshConfig(tp=4), "a replicated residual stream"),
        ("parallel.residual=hidden", MeshConfig(tp=4), "no estimate for residual hidden"),
    ],
)
def test_an_overlap_without_effect_has_a_reason(override, mesh, why) -> None:
    _, program = build(mesh, override)
    choices = [choice for kind, choice in program.plan.overlap if kind != "fsdp"]
    assert {choice.overlap for choice in choices} == {"none"}
    assert all(why in choice.reason for choice in choices)
    # Nobody asked for the default.
    assert any("was asked for" in choice.reason for choice in choices) == ("split" in override)


@pytest.mark.parametrize(
    ("mesh", "named", "want"),
    [
        (MeshConfig(fsdp=4), "auto", ("none", "link bandwidth unknown")),
        (MeshConfig(fsdp=4), "none", ("none", "as parallel.overlap_fsdp says")),
        (MeshConfig(fsdp=4), "ring", ("ring", "as parallel.overlap_fsdp says")),
        (MeshConfig(sp=4), "split", ("split", "as parallel.overlap_fsdp says")),
        (MeshConfig(dp=4), "ring", ("none", "one device on fsdp and sp gathers nothing")),
        (MeshConfig(fsdp=2, tp=2), "ring", ("none", "tp has several devices")),
        (MeshConfig(fsdp=8), "hypercube", ("none", "over 8 devices cannot be cut into 3")),
    ],
)
def test_the_overlap_of_fsdp_is_the_configured_one_or_has_a_reason(mesh, named, want) -> None:
    small = ("model.hidden_size=16", "model.num_attention_heads=2", "model.num_key_value_heads=2")
    _, program = build(mesh, f"parallel.overlap_fsdp={named}", *small * (named == "hypercube"))
    choice = dict(program.plan.overlap)["fsdp"]
    assert program.tp.fsdp_overlap == choice.overlap == want[0]
    assert want[1] in choice.reason


def test_fsdp_overlaps_as_the_linears_do_unless_it_is_named() -> None:
    mesh = MeshConfig(fsdp=4)
    _, program = build(mesh, "parallel.overlap=ring")
    assert program.tp.fsdp_overlap == "ring"
    assert dict(program.plan.overlap)["fsdp"].reason == "as parallel.overlap says"
    _, program = build(mesh, "parallel.overlap=ring", "parallel.overlap_fsdp=none")
    assert program.tp.fsdp_overlap == "none"
    _, program = build(MeshConfig(dp=4))
    assert "fsdp" not in dict(program.plan.overlap)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("lora.rank=2", "training.init_from=x"), "frozen kernels have no gradients"),
        (("model.hidden_size=36", "model.head_dim=8"), "have no halves"),
    ],
)
def test_kernels_that_no_ring_can_gather_have_a_reason(overrides, why) -> None:
    _, program = build(MeshConfig(fsdp=4), "parallel.overlap_fsdp=split", *overrides)
    choice = dict(program.plan.overlap)["fsdp"]
    assert choice.overlap == program.tp.fsdp_overlap == "none" and why in choice.reason


@pytest.mark.parametrize(
    ("length", "kinds", "line"),
    [
        (64, "full_attention", "rows in zigzag order"),
        (68, "full_attention", "rows in natural order: they are no multiple of 2 * mesh.sp=8"),
        (64, "sliding_attention", None),
    ],
)
def test_the_plan_says_how_rows_are_ordered_for_ring_attention(length, kinds, line) -> None:
    keys = ("model.attention=ring", f"model.layer_types=[{kinds}]", "model.sliding_window=8")
    keys = keys if "sliding" in kinds else keys[:2]
    plan = build(MeshConfig(sp=4), *keys, f"data.sequence_length={length}")[1].plan
    lines = [text for text in plan.describe() if "order" in text]
    assert [text.startswith(line) for text in lines] == [True] if line else lines == []


def test_adapters_are_not_trained_on_losses_that_only_routers_can_lower() -> None:
    experts = ("model.moe.num_experts=4", "model.moe.router_z_loss_coef=0.1")
    moe = build(MeshConfig(), *experts)[1].config.moe
    assert moe.router_aux_loss_coef > 0 and moe.router_z_loss_coef > 0
    moe = build(MeshConfig(), *experts, "lora.rank=2", "training.init_from=x")[1].config.moe
    assert moe.router_aux_loss_coef == moe.router_z_loss_coef == 0


def test_attention_across_documents_reaches_the_plan() -> None:
    for across in (True, False):
        _, program = build(MeshConfig(), f"data.attend_across_documents={str(across).lower()}")
        assert program.plan.attend_across_documents is across
        assert any(line.startswith("documents: ") for line in program.plan.describe()) is across


@pytest.mark.parametrize(
    ("overrides", "law"),
    [
        (["model.attention=sdpa", "model.attn_logit_softcapping=3.0"], "native: has no soft_cap"),
        (["model.attention=ragged_page_attention_v2"], "native: works on pages only, has no seg"),
    ],
    ids=str,
)
def test_attention_that_lacks_a_feature_is_refused_before_tracing(overrides, law) -> None:
    with pytest.raises(ValueError, match=re.escape(f"cannot serve this layer or call ({law}")):
        build(MeshConfig(), *overrides)


def test_the_plan_says_that_ep_only_splits_the_batch_of_a_dense_model() -> None:
    found = ["experts none: mesh.ep=2 splits the batch alone"]
    for mesh, wanted in ((MeshConfig(ep=2), found), (MeshConfig(fsdp=2), [])):
        lines = build(mesh)[1].plan.describe()
        assert [line for line in lines if line.startswith("experts")] == wanted


def test_the_plan_names_the_choices_of_shorter_rows_and_of_dropless_experts() -> None:
    experts = ["model.moe.num_experts=4", "model.moe.num_experts_per_tok=2"]
    experts += ["model.moe.capacity_factor=1.0", "model.moe.moe_intermediate_size=16"]
    lengths = "data.sequence_length={0: 16, 8: 32, 16: 2048}", "training.steps=20"
    _, program = build(MeshConfig(ep=2), *experts, *lengths)
    lines = [line for line in program.plan.describe() if line.startswith(("attention", "experts"))]
    assert [re.sub(":.*", "", line) for line in lines] == [
        "attention flash_attn2 for full_attention, rows of 2048 tokens",
        "attention vanilla for full_attention, rows of 16, 32 tokens",
        "experts alltoall, padded for 2 layers of 4, 2 per token (softmax)",
        "experts alltoall, blocked in evaluation and generation, where no token is dropped",
    ]


@pytest.fixture
def jax_cache():
    """Restores the options of jax's compilation cache."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_are_loaded_only_from_a_folder_closed_to_others(
    tmp_path, jax_cache, caplog
):
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("open", "new"):
        folder = str(tmp_path / name)
        open_devices(
            load_config(ROOT / "configs" / "tp8.yaml", [f"run.compilation_cache={folder}"])
        )
        used = None if name == "open" else folder
        assert jax.config.values["jax_compilation_cache_dir"] == used
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert [record.getMessage() for record in caplog.records] == [
        f"run.compilation_cache is not used, every start compiles: {tmp_path / 'open'} has mode "
        "0777, so other users may put files there; delete it, so that it is created with mode "
        "0700, or give another folder"
    ]


def test_a_compilation_cache_in_a_bucket_is_not_taken_for_a_folder(
    tmp_path, jax_cache, caplog, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    jax.config.update("jax_compilation_cache_dir", None)
    place = "run.compilation_cache=gs://bucket/xla"
    open_devices(load_config(ROOT / "configs" / "tp8.yaml", [place]))
    assert jax.config.values["jax_compilation_cache_dir"] is None and not [*tmp_path.iterdir()]
    assert "gs://bucket/xla is not on a disk; give a folder of this machine" in caplog.text
