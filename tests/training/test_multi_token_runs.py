"""Runs with multi-token prediction: resumed, started from other runs, exported, and refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from runs import kept_signals, losses, read_lines, refusal, run, write_config

from configs.conversion import export_model
from training.hugging_face.tensor_files import read_header

pytestmark = pytest.mark.usefixtures("signals")
QUIET = ("training.sample_tokens=0", "training.eval_every=100")
MTP = "model.mtp_loss_weights=[0.3]"


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """Folder of a run of four steps with a module; read-only."""
    folder = tmp_path_factory.mktemp("first")
    with kept_signals():
        assert run(write_config(folder), MTP, "training.steps=4") == 0
    return folder


def test_a_run_reports_its_modules_and_resumes_bit_equal(first, tmp_path) -> None:
    log = (first / "run" / "log.txt").read_text()
    line = "next token, and the token after it by multi-token prediction, weight 0.3"
    assert line in log and "sample" in log
    (start, *_) = lines = read_lines(first / "run" / "metrics.jsonl")
    assert start["mtp_loss_1"] == pytest.approx(math.log(264), rel=0.05)
    assert lines[-1]["mtp_loss_1"] < start["mtp_loss_1"]
    for one in lines:
        assert one["extra_loss"] == pytest.approx(0.3 * one["mtp_loss_1"], rel=1e-5)
    config = write_config(tmp_path)
    assert run(config, MTP, "training.steps=2") == 0
    assert run(config, MTP, "training.steps=4") == 0
    assert losses(tmp_path / "run") == losses(first / "run")


def test_weights_may_change_at_a_resume_and_the_number_of_modules_may_not(tmp_path, capsys) -> None:
    config = write_config(tmp_path)
    assert run(config, MTP, *QUIET, "training.steps=2") == 0
    message = refusal(capsys, config, "model.mtp_loss_weights=[0.3,0.1]", *QUIET)
    assert "was saved with model.mtp_loss_weights=[0.3], but this run has" in message
    message = refusal(capsys, config, "model.mtp_loss_weights=[]", *QUIET)
    assert "has modules of multi-token prediction" in message and "init_from" in message
    message = refusal(
        capsys, config, "model.mtp_loss_weights=[0.1]", *QUIET, "optimizer.ema_decay=0.9"
    )
    assert "has no moving average" in message
    assert run(config, "model.mtp_loss_weights=[0.1]", *QUIET, "training.steps=3") == 0
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["extra_loss"] == pytest.approx(0.1 * last["mtp_loss_1"], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "now"),
    [((MTP,), ()), ((), (MTP,)), ((MTP,), (MTP,))],
    ids=["without", "fresh", "with"],
)
@pytest.mark.costly
def test_a_run_starts_from_one_with_or_without_modules(tmp_path, first, before, now) -> None:
    source = first / "run"
    if not before:
        (tmp_path / "plain").mkdir()
        assert run(write_config(tmp_path / "plain"), *QUIET, "training.steps=4") == 0
        source = tmp_path / "plain" / "run"
    config = write_config(tmp_path)
    assert run(config, f"training.init_from={source}", *QUIET, *now, "training.steps=1") == 0
    (found,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert found["loss"] < 0.9 * math.log(264)
    assert ("mtp_loss_1" in found) == bool(now)
    is_fresh = bool(now) and not before
    log = (tmp_path / "run" / "log.txt").read_text()
    assert ("modules of multi-token prediction start" in log) == is_fresh
    if now:  # a fresh module knows nothing
        assert (found["mtp_loss_1"] > 0.9 * math.log(264)) == is_fresh


def test_another_number_of_modules_is_refused_with_the_key(first, tmp_path, capsys) -> None:
    stage = f"training.init_from={first}/run", "model.mtp_loss_weights=[0.3,0.3]"
    message = refusal(capsys, write_config(tmp_path), *stage)
    assert message.endswith("set model.mtp_loss_weights=[0.3]\n")


def test_an_export_leaves_the_modules_out(first, tmp_path) -> None:
    export_model(first / "run", tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["num_hidden_layers"] == 1
    names = read_header(tmp_path / "exported" / "model.safetensors")
    assert names and not any("mtp" in name for name in names)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("lora.rank=2", "training.init_from=x"), "with lora.rank=2; set it to []"),
        (
            ("training.objective=dpo", "data.packing=pairs", "training.init_from=x"),
            "model.mtp_loss_weights=[0.3] has no effect with training.objective=dpo; set it",
        ),
        (("model.mtp_loss_weights=[0]",), "greater than 0"),
    ],
)
def test_what_modules_cannot_do_is_refused(overrides, message, tmp_path, capsys) -> None:
    assert message in refusal(capsys, write_config(tmp_path), MTP, *overrides)


def test_initial_values_of_the_model_do_not_depend_on_modules(first, tmp_path) -> None:
    config = write_config(tmp_path)
    assert run(config, *QUIET, "training.steps=1") == 0
    assert losses(tmp_path / "run")[1] == pytest.approx(losses(first / "run")[1], rel=1e-6)
    assert np.isfinite(losses(tmp_path / "run")[1])
