"""The coordinate check: logits move alike at every width under muP, and not without it."""

import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import coordinate_check

from configs.schema import load_config

CONFIG = ["--config", str(ROOT / "configs" / "tp8.yaml")]
TINY = ["data.sequence_length=16", "data.global_batch_size=4", "model.num_hidden_layers=1"]
TINY += ["optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0", "run.compilation_cache=null"]


@pytest.mark.slow
def test_changes_of_logits_grow_with_the_width_without_mup_alone(tmp_path, capsys):
    picture = tmp_path / "check.png"
    widths = ["--steps", "3", "--output", str(picture), "--widths", "256", "32", "64"]
    assert coordinate_check.main([*CONFIG, *TINY, *widths]) == 0
    lines = capsys.readouterr().out.splitlines()
    powers = {}
    for line in lines[:4]:
        rule, quantity, power = re.fullmatch(
            r"(muP|without muP) +(\w[\w ]*\w) +32: .* 64: .* 256: .*width\^(-?[\d.]+)", line
        ).groups()
        powers[rule, quantity] = float(power)
    assert abs(powers["muP", "logits"]) < 0.25 < 0.5 < powers["without muP", "logits"]
    assert abs(powers["muP", "hidden states"]) < 0.25
    assert picture.read_bytes().startswith(b"\x89PNG") and len(lines) == 5


def test_a_widened_configuration_keeps_its_plugins():
    config = load_config(ROOT / "configs" / "tp8.yaml", ["plugins=[json]"])
    assert coordinate_check.widened(config, 128, 64).plugins == config.plugins == ("json",)


def test_widths_without_whole_heads_are_refused(capsys):
    assert coordinate_check.main([*CONFIG, "--widths", "64", "80"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: --widths 80: model.num_attention_heads=8 at model.hidden_size=25"
    )
    for key in ("optimizer.name=sgd", "model.tie_word_embeddings=true"):
        assert coordinate_check.main([*CONFIG, "--widths", "32", "64", "--", key]) == 2
        assert capsys.readouterr().err.startswith("error: model.mup_base_width=32: ")
    assert coordinate_check.main([*CONFIG, "a.b=1", "--widths", "64", "--steps", "2", "c.d=1"]) == 2
    assert "--widths needs two different widths" in capsys.readouterr().err
    assert coordinate_check.main([*CONFIG, "--output", "x.svg"]) == 2
    assert "--output x.svg: use a name that ends in .png" in capsys.readouterr().err
    assert coordinate_check.main([*CONFIG, "--widths", "64"]) == 2
    assert "--widths needs two different widths" in capsys.readouterr().err
