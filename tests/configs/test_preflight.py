"""Preflight facts change with every byte of the code and every value of the configuration."""

import json
from pathlib import Path

import jax
import pytest
from runs import write_config
from test_architecture import PACKAGES

from configs import preflight
from configs.preflight import describe_machine, describe_program
from configs.schema import Config, load_config
from data.pipeline import Dataset
from training.dotted_keys import flatten


def changed(config: Config, *overrides: str, folder: Path) -> dict[str, tuple]:
    """Facts that these overrides change."""
    one = describe_program(config)
    other = describe_program(load_config(folder / "tiny.yaml", overrides))
    return {
        key: (one.get(key), other.get(key))
        for key in one.keys() | other.keys()
        if one.get(key) != other.get(key)
    }


@pytest.fixture
def config(tmp_path) -> Config:
    return load_config(write_config(tmp_path))


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A small source tree instead of this repository."""
    root = tmp_path / "program"
    for name in ("train.py", "model/layers.py", "model/attention/ring.py", "data/rows.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    monkeypatch.setattr(preflight, "_ROOT", root)
    return root


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "train.py").write_text("# train.px\n"),
        lambda root: (root / "model/attention/ring.py").write_text("# model/attention/ring.py\n "),
        lambda root: (root / "data/rows.py").rename(root / "data/row.py"),
        lambda root: (root / "data/more.py").touch(),
        lambda root: (root / "registry.py").touch(),
        lambda root: (root / "model/layers.py").unlink(),
    ],
)
def test_the_code_hash_changes_with_a_byte_a_name_or_a_file(config, sources, change):
    before = describe_program(config)["code"]
    assert describe_program(config)["code"] == before
    change(sources)
    assert describe_program(config)["code"] != before


@pytest.mark.parametrize("room", sorted(PACKAGES))
def test_the_code_hash_covers_every_package(config, sources, room):
    before = describe_program(config)["code"]
    (sources / room / "deep").mkdir(parents=True)
    (sources / room / "deep" / "more.py").touch()
    assert describe_program(config)["code"] != before


def test_files_that_are_not_sources_do_not_change_the_hash(config, sources):
    before = describe_program(config)["code"]
    (sources / "model" / "__pycache__").mkdir()
    (sources / "model" / "__pycache__" / "layers.pyc").write_text("x")
    (sources / "notes.md").write_text("x")
    assert describe_program(config)["code"] == before


def test_changed_values_are_found_by_key_path(config, tmp_path):
    overrides = ["optimizer.learning_rate=3e-3", "training.guard.max_bad_steps=7"]
    assert changed(config, *overrides, folder=tmp_path) == {
        "optimizer.learning_rate": (1e-2, 3e-3),
        "training.guard.max_bad_steps": (config.training.guard.max_bad_steps, 7),
    }


def test_every_configuration_value_is_a_json_fact(config):
    facts = describe_program(config)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["mesh.tp"] == 2 and facts["cluster.peer_timeout"] == 60
    assert facts["version of jax"] == jax.__version__ and "version of python" in facts
    assert not any(isinstance(value, dict) and value for value in facts.values())


def test_flatten_names_leaves_by_their_path():
    tree = {"a": 1, "b": {"c": [2, {"d": 3}], "e": {"f": None}}, "g": {}}
    assert flatten(tree) == {"a": 1, "b.c": [2, {"d": 3}], "b.e.f": None, "g": {}}


def test_machine_facts_are_devices_and_data(config, tmp_path):
    facts = describe_machine(Dataset(config.data), jax.local_devices())
    assert facts["devices"] == "8 x cpu"
    other = describe_machine(Dataset(config.data), jax.local_devices()[:4])
    assert {key for key in facts if facts[key] != other[key]} == {"devices"}
    (tmp_path / "a.txt").write_text("def g(x): return x\n" * 300)
    other = describe_machine(Dataset(config.data), jax.local_devices())
    assert {key for key in facts if facts[key] != other[key]} == {
        "text of source text",
        "order of the data",
    }
