"""Runs of train.py on preference pairs: they learn, keep their reference, and resume bit-equal."""

import json
from pathlib import Path

import numpy as np
import pytest
from runs import kept_signals, losses, read_lines, refusal, run, write_config
from test_initial_parameters import stored

from configs.schema import load_config
from model.lora import is_adapter
from training.early_stop import evaluation_metrics

pytestmark = pytest.mark.usefixtures("signals")
DPO = (
    "training.objective=dpo",
    "data.packing=pairs",
    "data.sequence_length=80",
    "data.eval_fraction=0.2",
    "training.eval_every=100",
    "training.sample_tokens=0",
    "checkpoint.every=4",
    "optimizer.learning_rate=3e-3",
)
LORA = ("lora.rank=4", "optimizer.learning_rate=1e-2", "mesh.dp=1", "mesh.tp=1")
WORDS = "sea hill lamp road bird stone".split()


def write_pairs(folder: Path) -> str:
    """Write pairs whose chosen answer begins with yes; return the configuration of their run."""
    config = write_config(folder)
    with (folder / "pairs.jsonl").open("w") as out:
        for n in range(40):
            word = WORDS[n % 6]
            pair = {"prompt": f"{word}?", "chosen": f"yes {word}", "rejected": f"no {word}"}
            out.write(json.dumps(pair) + "\n")
    text = Path(config).read_text()
    Path(config).write_text(text.replace("*.txt", "pairs.jsonl"))
    return config


@pytest.fixture(
    scope="module",
    params=[pytest.param((), id="full", marks=pytest.mark.release), pytest.param(LORA, id="lora")],
)
def options(request, undisturbed):
    """Overrides of a run of twelve steps that begins with the parameters of another."""
    return (*DPO, *request.param, f"training.init_from={undisturbed}/run", "training.steps=12")


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory) -> Path:
    """Directory of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    with kept_signals():
        assert run(write_pairs(folder), *options) == 0
    return folder / "run"


def test_a_run_learns_to_tell_separable_answers_apart(whole):
    lines = read_lines(whole / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(np.log(2), rel=1e-3)
    assert lines[0]["dpo/margin"] == pytest.approx(0, abs=1e-3)
    last = lines[-1]
    assert last["dpo/accuracy"] == last["eval_accuracy"] == 1
    assert last["dpo/margin"] > 0.3 and last["eval_margin"] > 0.3
    difference = last["dpo/reward_chosen"] - last["dpo/reward_rejected"]
    assert last["dpo/margin"] == pytest.approx(difference, abs=1e-5)
    assert last["eval/text/loss"] == last["eval_loss"] < lines[0]["loss"]
    evaluated = {name for name in last if name.startswith("eval")}
    assert evaluated == {*evaluation_metrics("dpo", ["text"])}
    log = (whole / "log.txt").read_text()
    assert "dpo with beta 0.1; the reference model is a frozen copy of " in log
    assert "accuracy 100.0%" in log


@pytest.mark.slow
def test_a_run_resumes_bit_equal_from_its_own_reference(whole, options, tmp_path):
    config, resumed = write_pairs(tmp_path), tmp_path / "run"
    assert run(config, *options, "training.steps=6") == 0
    without_source = [option for option in options if "init_from" not in option]
    assert run(config, *without_source) == 0
    assert losses(whole) == losses(resumed) and len(losses(whole)) == 12
    for part in ("params", "reference"):
        found, again = stored(whole, 12, part), stored(resumed, 12, part)
        assert found.keys() == again.keys() and found
        for name, array in found.items():
            np.testing.assert_array_equal(again[name], array)
    assert "resumed from step 6" in (resumed / "log.txt").read_text()


def test_the_reference_is_what_the_trained_parameters_were(whole, undisturbed):
    reference, first = stored(whole, 12, "reference"), stored(undisturbed / "run", 6)
    params = stored(whole, 12)
    if load_config(whole / "config.yaml").lora.rank:
        assert reference.keys() == {*filter(is_adapter, params)}
        for name, array in reference.items():  # a fresh adapter changes nothing
            assert np.any(array) == ("lora_a" in name)
        return
    assert reference.keys() == first.keys() == params.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(reference[name], array)
        assert np.any(params[name] != array)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            DPO,
            "training.objective=dpo has no training.init_from, so that the reference model",
        ),
        (DPO[:1], "learns from preference pairs, but data.packing=split; set data.packing=pairs"),
        (DPO[1:2], "data.packing=pairs reads preference pairs, but training.objective=sft; set"),
        (("training.dpo.beta=0.2",), "training.dpo has no effect with training.objective=sft"),
        (
            ("training.label_smoothing=0.1", *DPO),
            "training.label_smoothing=0.1 has no effect with training.objective=dpo; remove it or "
            "set training.dpo.label_smoothing",
        ),
        (
            ("training.z_loss=0.1", *DPO),
            "training.z_loss=0.1 has no effect with training.objective=dpo",
        ),
        ((*DPO, "training.dpo.label_smoothing=0.5"), "training.dpo.label_smoothing"),
        (
            (*DPO, "mesh.dp=1", "training.gradient_accumulation=8"),
            "data.global_batch_size / training.gradient_accumulation=1 is odd, but with data.packi",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, capsys, overrides, message):
    config = write_pairs(tmp_path)
    before = {*tmp_path.iterdir()}
    assert message in refusal(capsys, config, *overrides)
    assert {*tmp_path.iterdir()} == before  # neither a run directory nor a store of tokens
