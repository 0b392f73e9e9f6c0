"""`training.init_from` with a Hugging Face model directory, and with a run that was imported."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hf_files import write_model
from process_groups import HOST
from runs import losses, refusal, write_config
from runs import run as train

sys.path.insert(0, str(ROOT / "scripts"))
import convert as script

from training import initial_parameters
from training.hugging_face.model_directory import ModelDirectory

pytestmark = pytest.mark.usefixtures("signals")
SHORT = ("training.steps=2", "training.sample_tokens=0", "run.compilation_cache=null")


@pytest.mark.parametrize("there", ["nothing", "other"])
def test_processes_that_see_different_models_end(processes, tmp_path, monkeypatch, there):
    model, other = write_model(tmp_path / "hf"), write_model(tmp_path / "other")
    (tmp_path / "nothing").mkdir()
    file = other / "model.safetensors"
    info = ModelDirectory(other).infos["model.norm.weight"]
    info.open("r+")[0] += 1
    assert ModelDirectory(model).digest != ModelDirectory(other).digest
    assert file.stat().st_size == (model / "model.safetensors").stat().st_size
    folders, local = (model, tmp_path / there), threading.local()
    monkeypatch.setattr(initial_parameters, "open_local", lambda path: local.folder)

    def open_there(group):
        local.folder = folders[group.process_id]
        return initial_parameters.open_initial_parameters("/models/x", None, group)

    processes.add(0, 1, of=2)
    processes.connect()
    for error in processes.each(open_there):
        assert "training.init_from=/models/x" in str(error), error
        assert f"process 1 on {HOST} has" in str(error) and error.exit_code == 2


@pytest.fixture
def imported(tmp_path) -> Path:
    """A folder with model directory `hf`, and `run` with its parameters and a configuration."""
    write_config(tmp_path)
    write_model(tmp_path / "hf")
    values = [f"data.files={tmp_path}/*.txt", f"data.cache_dir={tmp_path}/cache"]
    values += ["data.sequence_length=32", "data.global_batch_size=8", "model.dtype=float32"]
    arguments = ["from-hf", f"{tmp_path}/hf", f"{tmp_path}/run", *values, *SHORT]
    assert script.main(arguments) == 0
    return tmp_path


@pytest.mark.slow
def test_a_model_directory_and_the_run_made_from_it_start_alike_on_every_mesh(imported):
    config = str(imported / "run" / "config.yaml")
    sources = {
        "directory": (f"training.init_from={imported}/hf",),
        "mesh": (f"training.init_from={imported}/hf", "mesh.fsdp=2", "mesh.tp=1", "mesh.ep=2"),
        "step": (f"training.init_from={imported}/run/checkpoints/0",),
    }
    for name, values in sources.items():
        assert train(config, *SHORT, f"run.dir={imported}/{name}", *values) == 0
    assert train(config, *SHORT, "training.init_from=/nowhere") == 0  # its own checkpoint wins
    wanted = losses(imported / "run")
    assert losses(imported / "directory") == wanted == losses(imported / "step")
    assert losses(imported / "mesh") == pytest.approx(wanted, rel=1e-5)
    logs = [(imported / name / "log.txt").read_text() for name in ("directory", "step", "run")]
    origins = (f"{imported}/hf", *[f"checkpoint 0 of {imported}/run"] * 2)
    for log, origin in zip(logs, origins, strict=True):
        assert f"initialised parameters from {origin} in" in log
    assert np.isfinite([*wanted.values()]).all()


def said_differences(run_directory: Path) -> list[str]:
    """Return what the log says about how the model of the source differs."""
    lines = (run_directory / "log.txt").read_text().splitlines()
    return [line.partition("init_from: ")[2] for line in lines if "init_from: " in line]


# Values that compute another function of the same parameters, and what the log says about them.
OTHER_FUNCTION = {
    "model.hidden_act=gelu_tanh": ["model.hidden_act was 'silu', is 'gelu_tanh'"],
    "model.norm_offset=1": ["model.norm_offset was 0.0, is 1.0"],
    "model.rope_theta=2000": ["model.rope_theta was 1000000.0, is 2000.0"],
    "model.rope_scaling={type: linear, factor: 2}": [
        "model.rope_scaling.type was 'default', is 'linear'",
        "model.rope_scaling.factor was None, is 2.0",
    ],
    "model.query_pre_attn_scalar=9": ["model.query_pre_attn_scalar was 8, is 9.0"],
    "model.attn_logit_softcapping=5": ["model.attn_logit_softcapping was None, is 5.0"],
    "model.moe.norm_topk_prob=false": ["model.moe.norm_topk_prob was True, is False"],
}
# Values that config.json spells otherwise or does not hold.
SAME_FUNCTION = (
    "model.layer_types=[full_attention, full_attention, full_attention]",
    "model.remat=none",
    "model.moe.exchange=dense",
)


def test_settings_that_change_what_config_json_computes_are_said_and_no_others(imported):
    config, same, other = str(imported / "run" / "config.yaml"), *map(imported.joinpath, "ab")
    values = (f"training.init_from={imported}/hf", *SAME_FUNCTION)
    assert train(config, *SHORT, *values, f"run.dir={same}") == 0
    assert said_differences(same) == []
    assert train(config, *SHORT, *values, f"run.dir={other}", *OTHER_FUNCTION) == 0
    assert said_differences(other) == [line for lines in OTHER_FUNCTION.values() for line in lines]


def test_another_shape_names_the_tensors_and_the_key(imported, capsys):
    config, target = str(imported / "run" / "config.yaml"), imported / "other"
    values = (f"training.init_from={imported}/hf", f"run.dir={target}")
    error = refusal(capsys, config, *values, "model.intermediate_size=64")
    assert f"training.init_from: {imported}/hf: tensors do not fit the model of this run: " in error
    assert "run: wrong shape: model.layers.0" in error
    assert error.endswith("; set model.intermediate_size=48\n")
    error = refusal(capsys, config, *values, "model.moe.first_k_dense_replace=0")
    assert error.endswith("model.moe.first_k_dense_replace=1\n")
    (imported / "hf" / "model.safetensors").unlink()
    assert "only safetensors are read" in refusal(capsys, config, *values)
