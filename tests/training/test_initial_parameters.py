"""`training.init_from`: the parameters of another run, on any mesh, and what differs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ONE_DEVICE, slow, tensor_parallel
from flax import nnx
from runs import kept_signals, losses, read_lines, refusal, run, write_config

from model.config import BlockSizes, ModelConfig, MoEConfig, OperationConfigs
from model.mla_config import MLAConfig
from model.plan import make_plan
from model.rope import RopeScaling
from model.transformer import Transformer
from parallel.cluster.process_group import ProcessGroup
from safe_files import json_digest
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.fingerprint import leaf_name
from training.initial_parameters import SHAPE_KEYS, _open_checkpoint, _remedy

pytestmark = pytest.mark.usefixtures("signals")
QUIET = ("training.sample_tokens=0", "training.eval_every=100", "checkpoint.every=100")
FRESH = ("training.steps=1", *QUIET, "optimizer.learning_rate=1e-30")


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """Folder of a first stage of four steps, with checkpoints 2 and 4; read-only."""
    folder = tmp_path_factory.mktemp("first")
    with kept_signals():
        assert run(write_config(folder), "training.steps=4", *QUIET[:2]) == 0
    return folder


def stored(run_directory: Path, step: int, part: str = "params") -> dict[str, np.ndarray]:
    """Return the arrays of one part of a checkpoint by name."""
    checkpoints = Checkpoints(run_directory / "checkpoints", CheckpointConfig(), read_only=True)
    mesh = tensor_parallel(ONE_DEVICE).manager.mesh
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    names = [name for name in checkpoints.record(step)["leaves"] if name.startswith(f"{part}.")]
    arrays = {name: np.asarray(checkpoints.read(step, name, sharding)) for name in names}
    checkpoints.close()
    return {name.removeprefix(f"{part}."): x for name, x in arrays.items()}


def log_of(folder: Path) -> str:
    return (folder / "run" / "log.txt").read_text()


def said_differences(folder: Path) -> list[str]:
    """Return what the log says about how the model of the source differs."""
    lines = [part for part in log_of(folder).splitlines() if "init_from: " in part]
    return [line.partition("init_from: ")[2] for line in lines]


@pytest.mark.parametrize(
    "mesh", [slow(("mesh.dp=1", "mesh.tp=1")), ("mesh.tp=1", "mesh.fsdp=4"), ()]
)
@pytest.mark.costly
def test_a_second_stage_starts_from_the_parameters_of_the_first_on_every_mesh(
    first, tmp_path, mesh
):
    config = write_config(tmp_path)
    assert run(config, f"training.init_from={first}/run", *FRESH, *mesh) == 0
    assert f"initialised parameters from checkpoint 4 of {first}/run in" in log_of(tmp_path)
    # The learning rate is below the precision of float32: the step changes no parameter.
    wanted, found = stored(first / "run", 4), stored(tmp_path / "run", 1)
    assert wanted.keys() == found.keys()
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def test_the_second_stage_has_its_own_step_optimizer_and_schedule(first, tmp_path):
    config = write_config(tmp_path)
    stage = (f"training.init_from={first}/run", *QUIET)
    schedule = ("optimizer.schedule=cosine", "optimizer.warmup_steps=3")
    assert run(config, *stage, *schedule, "training.steps=2") == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-2 / 2, 1e-2])
    assert lines[0]["loss"] < 0.9 * losses(first / "run")[1]


def test_one_checkpoint_can_be_named(first, tmp_path):
    config = write_config(tmp_path)
    assert run(config, f"training.init_from={first}/run/checkpoints/2", *FRESH) == 0
    wanted, found = stored(first / "run", 2), stored(tmp_path / "run", 1)
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
    assert f"from checkpoint 2 of {first}/run in" in log_of(tmp_path)


def test_the_moving_average_starts_from_the_same_parameters(first, tmp_path):
    config = write_config(tmp_path)
    assert run(config, f"training.init_from={first}/run", *FRESH, "optimizer.ema_decay=0.5") == 0
    wanted, found = stored(first / "run", 4), stored(tmp_path / "run", 1, "ema")
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def test_other_dtypes_of_parameters_are_cast_and_said(first, tmp_path):
    config = write_config(tmp_path)
    assert run(config, f"training.init_from={first}/run", *FRESH, "model.param_dtype=bfloat16") == 0
    assert said_differences(tmp_path) == ["model.param_dtype was 'float32', is 'bfloat16'"]
    wanted, found = stored(first / "run", 4), stored(tmp_path / "run", 1)
    for name, array in found.items():
        assert array.dtype.name == "bfloat16"
        assert np.array_equal(wanted[name].astype(array.dtype), array), name


def test_every_key_of_the_model_that_differs_is_one_line(first, tmp_path):
    config = write_config(tmp_path)
    other = ("model.rope_theta=5e5", "model.rms_norm_eps=1e-6", "model.moe.router_z_loss_coef=0")
    assert run(config, f"training.init_from={first}/run", *FRESH, *other) == 0
    assert said_differences(tmp_path) == [
        "model.rope_theta was 10000.0, is 500000.0",
        "model.rms_norm_eps was 1e-05, is 1e-06",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.hidden_size=64",),
            "(264, 32) embed.table, but the model of this run has (264, 64); set "
            "model.hidden_size=32",
        ),
        (
            ("model.vocab_size=300", "model.rope_theta=5e5"),
            "(264, 32) embed.table, but the model of this run has (300, 32); set "
            "model.vocab_size=264",
        ),
        (
            ("model.qk_norm=true",),
            "k_norm.scale, but the model of this run has (1, 8); set model.qk_norm=false",
        ),
        (
            ("model.tie_word_embeddings=true",),
            "(32, 264) head.kernel, but the model of this run has none; set "
            "model.tie_word_embeddings=false",
        ),
        (
            ("model.mla={}", "model.num_key_value_heads=4"),
            "no layers.attention.down.kernel.kv_a, but the model of this run has (1, 32, 576); set "
            "model.mla=null",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_other_shapes_are_refused_with_the_key_to_set(first, tmp_path, capsys, overrides, message):
    config = write_config(tmp_path)
    error = refusal(capsys, config, f"training.init_from={first}/run", *overrides)
    assert f"training.init_from: checkpoint 4 of {first}/run: it has " in error and message in error
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere", "training.init_from=/nowhere does not exist; give a run "),
        (
            "Qwen/Qwen3-0.6B",
            "download it first: hf download Qwen/Qwen3-0.6B --local-dir FOLDER",
        ),
        ("FIRST/run/checkpoints/3", "checkpoints/3 holds no checkpoint (found: 2, 4); give"),
        ("OWN/run", "/run is run.dir itself, which the run overwrites; give another run.dir"),
    ],
)
def test_what_is_no_checkpoint_is_refused(first, tmp_path, capsys, path, message):
    config = write_config(tmp_path)
    path = path.replace("FIRST", str(first)).replace("OWN", str(tmp_path))
    assert message in refusal(capsys, config, f"training.init_from={path}")


def test_a_run_that_starts_anew_from_itself_is_refused_before_it_is_moved(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "training.steps=1", *QUIET) == 0
    before = sorted(path.name for path in tmp_path.rglob("*"))
    same = f"training.init_from={tmp_path}/run"
    message = refusal(capsys, config, "checkpoint.resume=never", same)
    assert "is run.dir itself" in message
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_run_may_start_from_one_inside_its_directory_unless_that_is_moved_aside(tmp_path, capsys):
    config = write_config(tmp_path)
    assert run(config, "training.steps=1", *QUIET, f"run.dir={tmp_path}/all/first") == 0
    inside = (f"run.dir={tmp_path}/all", f"training.init_from={tmp_path}/all/first", *QUIET)
    message = refusal(capsys, config, "checkpoint.resume=never", *inside)
    assert "is in run.dir, which checkpoint.resume=never moves aside; give another" in message
    assert run(config, "training.steps=1", *inside) == 0


def edit_record(checkpoint: Path, edit: Callable[[dict], dict]) -> None:
    """Replace the record of a checkpoint."""
    file = checkpoint / "_CHECKPOINT_METADATA"
    metadata = json.loads(file.read_bytes())
    record = edit(metadata["custom_metadata"]["record"])
    metadata["custom_metadata"] = {"record": record, "sha256": json_digest(record)}
    file.write_text(json.dumps(metadata))


def with_another_fingerprint(record: dict) -> dict:
    prints = record["fingerprints"] | {"params.embed.table": "0" * 16}
    return record | {"fingerprints": prints}


def test_a_damaged_source_is_an_error_and_stays_where_it_is(first, tmp_path, capsys):
    shutil.copytree(first / "run", tmp_path / "damaged")
    edit_record(tmp_path / "damaged" / "checkpoints" / "4", with_another_fingerprint)
    config = write_config(tmp_path)
    assert run(config, f"training.init_from={tmp_path}/damaged", *FRESH) == 1
    error = capsys.readouterr().err
    assert "params.embed.table: fingerprint mismatch; name another checkpoint" in error
    assert error.count("\n") == 1
    assert (tmp_path / "damaged" / "checkpoints" / "4").is_dir()


def test_a_damaged_checkpoint_0_of_a_run_is_said_to_be_its_own(first, tmp_path, capsys):
    config = write_config(tmp_path)
    shutil.copytree(first / "run", tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (2, 4):
        shutil.rmtree(checkpoints / str(step), ignore_errors=True)
    shutil.copytree(first / "run" / "checkpoints" / "4", checkpoints / "0")
    edit_record(checkpoints / "0", lambda record: with_another_fingerprint(record) | {"step": 0})
    assert run(config) == 1
    error = capsys.readouterr().err
    assert "run.dir: checkpoint 0 is damaged: " in error
    assert error.endswith("; convert the model again, into a new run.dir\n")


def test_an_unreadable_record_of_checkpoint_0_is_said_to_be_the_runs_own(first, tmp_path):
    shutil.copytree(first / "run", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "4"
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{")
    for is_own, begin in ((True, "run.dir: "), (False, f"training.init_from={checkpoint}: ")):
        with pytest.raises(ValueError) as error:
            _open_checkpoint(checkpoint, ProcessGroup(), None, is_own=is_own)
        assert str(error.value).startswith(begin), error.value


def test_a_resumed_run_does_not_read_its_source_again(first, tmp_path):
    shutil.copytree(first / "run", tmp_path / "source")
    config = write_config(tmp_path)
    stage = (f"training.init_from={tmp_path}/source", *QUIET[:2])
    assert run(config, *stage, f"run.dir={tmp_path}/whole") == 0
    assert run(config, *stage, "training.steps=2") == 0
    shutil.rmtree(tmp_path / "source")
    assert run(config, *stage) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    log = log_of(tmp_path)
    assert "resumed from step 2" in log
    line = f"init_from={tmp_path}/source is not read: the run goes on from its checkpoint 2\n"
    assert log.count(line) == 1


def with_parameters_only(record: dict) -> dict:
    parts = {key: record[key] for key in ("fingerprints", "config")}
    leaves = {name: leaf for name, leaf in record["leaves"].items() if name.startswith("params.")}
    return parts | {"step": 0, "leaves": leaves}


def test_checkpoint_0_of_parameters_only_starts_its_own_run_and_others(first, tmp_path):
    shutil.copytree(first / "run", tmp_path / "imported")
    folder = tmp_path / "imported" / "checkpoints"
    shutil.rmtree(folder / "2")
    (folder / "4").rename(folder / "0")
    edit_record(folder / "0", with_parameters_only)
    config, wanted = write_config(tmp_path), stored(first / "run", 4)
    assert run(config, f"training.init_from={tmp_path}/imported", *FRESH) == 0
    assert run(config, f"run.dir={tmp_path}/imported", *FRESH, "training.init_from=/nowhere") == 0
    for directory in (tmp_path / "run", tmp_path / "imported"):
        found = stored(directory, 1)
        assert all(np.array_equal(wanted[name], found[name]) for name in wanted)
        log = (directory / "log.txt").read_text()
        assert f"initialised parameters from checkpoint 0 of {tmp_path}/imported in" in log


EVERYTHING = ModelConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    qk_norm=True,
    moe=MoEConfig(num_experts=4, router="sigmoid", first_k_dense_replace=1, num_shared_experts=1),
)
LATENT = EVERYTHING.model_copy(
    update={
        "mla": MLAConfig(
            q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
        "num_key_value_heads": 4,
        "qk_norm": False,
    }
)
# Another value for every field of the model.
OTHER_VALUES = {
    "vocab_size": 80,
    "pad_vocab_to_multiple_of": 64,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "hidden_act": "gelu_tanh",
    "swiglu_limit": 7.0,
    "biases": ("router",),
    "norm_placement": "post",
    "norm_offset": 1.0,
    "embedding_multiplier": 2.0,
    "rope_theta": 2e4,
    "rope_local_theta": 1e3,
    "rope_scaling": RopeScaling(type="linear", factor=2.0),
    "rope_layers": (True, False),
    "partial_rotary_factor": 0.5,
    "qk_norm": False,
    "qk_norm_across_heads": True,
    "query_pre_attn_scalar": 9.0,
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "attn_logit_softcapping": 5.0,
    "attention_sinks": True,
    "attention_dropout": 0.1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 5.0,
    "initializer_range": 0.1,
    "mup_base_width": 16,
    "matmul_dtype": "int8",
    "matmul_products": ("forward",),
    "matmul_scales": "tensor",
    "dtype": "float32",
    "param_dtype": "bfloat16",
    "attention": "vanilla",
    "operation_configs": OperationConfigs({"flash_attn2": BlockSizes(block_q=8)}),
    "scan_ring_attention": True,
    "zigzag": False,
    "mtp_loss_weights": (0.5,),
    "remat": "none",
    "loss_chunk": 8,
    "mla.q_lora_rank": None,
    "mla.kv_lora_rank": 24,
    "mla.qk_nope_head_dim": 16,
    "mla.qk_rope_head_dim": 8,
    "mla.v_head_dim": 16,
    "mla.rope_interleave": True,
    "mla.norm_eps": 1e-5,
    "moe.num_experts": 8,
    "moe.num_experts_per_tok": 1,
    "moe.moe_intermediate_size": 16,
    "moe.num_shared_experts": 2,
    "moe.shared_expert_gate": True,
    "moe.first_k_dense_replace": 2,
    "moe.decoder_sparse_step": 3,
    "moe.router": "softmax",
    "moe.norm_topk_prob": False,
    "moe.n_group": 2,
    "moe.topk_group": 2,
    "moe.routed_scaling_factor": 2.0,
    "moe.router_aux_loss_coef": 0.1,
    "moe.router_z_loss_coef": 0.1,
    "moe.bias_update_speed": 0.1,
    "moe.router_bias": True,
    "moe.exchange": "dense",
    "moe.capacity_factor": 2.0,
    "moe.exchange_chunks": 2,
    "moe.dispatch_dtype": "int8",
    "moe.grouped_matmul": "padded",
    "moe.expert_rule": "alt",
}


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    tp = tensor_parallel(ONE_DEVICE)

    def parameters():
        rngs = nnx.Rngs(params=jax.random.key(0))
        return nnx.to_pure_dict(
            nnx.state(Transformer(make_plan(model, tp, lengths=[8]), rngs=rngs))
        )

    with jax.set_mesh(tp.mesh):
        tree = jax.eval_shape(parameters)
    return {leaf_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def base_of(key: str) -> ModelConfig:
    return LATENT if key.startswith("mla.") else EVERYTHING


def with_value(key: str, value) -> ModelConfig:
    base = base_of(key)
    section, _, name = key.rpartition(".")
    if not section:
        return base.model_copy(update={name: value})
    values = {name: value} | ({"n_group": 2} if name == "topk_group" else {})  # no more than exist
    return base.model_copy(update={section: getattr(base, section).model_copy(update=values)})


def test_every_field_of_the_model_has_another_value_here():
    sections = {"moe": MoEConfig, "mla": MLAConfig}
    fields = {name for name in ModelConfig.model_fields if name not in sections}
    fields |= {
        f"{name}.{key}" for name, section in sections.items() for key in section.model_fields
    }
    assert OTHER_VALUES.keys() == fields
    assert all(with_value(key, value) != base_of(key) for key, value in OTHER_VALUES.items())


@pytest.mark.release
def test_the_keys_that_decide_shapes_are_those_that_change_them():
    wanted = {id(base): shapes_of(base) for base in (EVERYTHING, LATENT)}
    changing = [
        key
        for key, value in OTHER_VALUES.items()
        if shapes_of(with_value(key, value)) != wanted[id(base_of(key))]
    ]
    # Another padding of the vocabulary fits, see tests/training/test_vocabulary_rows.py.
    assert sorted(changing) == sorted([*SHAPE_KEYS, "pad_vocab_to_multiple_of"])


@pytest.mark.parametrize("before", [0.1, 0.0])
def test_a_router_bias_that_no_longer_moves_is_kept_by_its_own_key(before):
    differences = {"moe.bias_update_speed": (before, 0.1 - before)}
    remedy = _remedy(differences, has_adapters=False)
    wanted = "moe.router_bias=true" if before else "moe.bias_update_speed=0.0"
    assert remedy == f"set model.{wanted}"
