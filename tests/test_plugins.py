"""Extensions register from outside the packages and run through an ordinary YAML file."""

import importlib
import json
import re
import sys

import pytest
from conftest import ROOT
from hf_files import (
    CONFIG,
    SMALL,
    assert_bit_equal,
    convert,
    random_tensors,
    tensors_of,
    write_model,
)
from runs import read_lines, refusal, run, write_config

from data.chat import CHAT_TEMPLATES
from data.formats.base import FORMATS
from model.activations import ACTIVATIONS
from model.attention.registry import _OPERATIONS
from model.families.base import FAMILIES
from model.remat import REMAT_POLICIES
from training.optimizers import OPTIMIZERS
from training.schedules import SCHEDULES
from training.writers.registry import WRITERS

REGISTRIES: list[dict] = [CHAT_TEMPLATES, FORMATS, ACTIVATIONS, _OPERATIONS, FAMILIES]
REGISTRIES += [REMAT_POLICIES, OPTIMIZERS, SCHEDULES, WRITERS]
pytestmark = pytest.mark.usefixtures("signals", "registered_here")

YAML = """
plugins: [toy_plugin]
run: {dir: FOLDER/run, compilation_cache: null}
mesh: {dp: 2, tp: 2}
model:
  vocab_size: 264
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 4
  intermediate_size: 64
  dtype: float32
  attention: toy_attention
  operation_configs: {toy_attention: {block_q: 8}}
  remat: toy_remat
  hidden_act: toy_activation
data:
  files: FOLDER/*.toy
  cache_dir: FOLDER/cache
  chat_template: toy_template
  sequence_length: 32
  global_batch_size: 8
  eval_fraction: 0
optimizer:
  name: toy_optimizer
  options: {scale: 0.5}
  schedule: toy_schedule
  warmup_steps: 0
  learning_rate: 1e-2
training: {steps: 2, sample_tokens: 0, writers: [jsonl, toy_writer]}
"""


@pytest.fixture(scope="module")
def registered_here():
    """Forget what these tests register: later tests of this process list the names."""
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)
    for module in ("toy_plugin", "my_extensions"):
        sys.modules.pop(module, None)


# First, before another test imports the plugin.
def test_a_model_of_a_family_from_a_plugin_is_imported_and_exported(tmp_path):
    toy = {"architectures": ["ToyForCausalLM"], "model_type": "toy"}
    source, run = write_model(tmp_path / "hf", config=CONFIG | toy), tmp_path / "run"
    assert convert("from-hf", source, run, "plugins=[toy_plugin]", *SMALL) == 0
    assert convert("to-hf", run, tmp_path / "out") == 0
    assert_bit_equal(tensors_of(tmp_path / "out"), random_tensors())
    assert json.loads((tmp_path / "out/config.json").read_text()).items() >= toy.items()


def test_one_extension_of_every_kind_trains_two_steps(tmp_path):
    text = "".join(f"What is {n} + {n}?\nIt is {2 * n}.\n" for n in range(200))
    (tmp_path / "sums.toy").write_text(text)
    config = tmp_path / "toy.yaml"
    config.write_text(YAML.replace("FOLDER", str(tmp_path)))

    assert run(str(config)) == 0

    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([1e-2, 5e-3])
    losses = [line["loss"] for line in lines]
    assert json.loads((tmp_path / "run" / "toy.json").read_text()) == losses
    assert re.search(r"attention +toy_attention", (tmp_path / "run" / "log.txt").read_text())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("plugins=[no_such_module]", "plugins: cannot import 'no_such_module'"),
        ("plugins=no_list", "plugins='no_list' is not a list of modules"),
        ("model.remat=nothing", "model.remat: unknown remat policy 'nothing'; use one of none"),
        ("training.writers=[fax]", "training.writers"),
        ("optimizer.name=adam0", "optimizer.name: unknown optimizer 'adam0'; use one of adafactor"),
        ("optimizer.options={scale: 2}", "optimizer.options={'scale': 2}"),
    ],
)
def test_a_wrong_name_is_refused_with_its_key(capsys, tmp_path, override, words):
    assert words in refusal(capsys, write_config(tmp_path), override)


PAGE = (ROOT / "docs" / "extensions.md").read_text()


def test_the_example_of_the_page_trains(tmp_path, monkeypatch):
    example = re.search(r"```python\n# my_extensions.py\n(.*?)```", PAGE, re.DOTALL)[1]
    (tmp_path / "my_extensions.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    options = re.search(r"'(plugins=.*?)' \\\n    (.*?)\n```", PAGE, re.DOTALL)
    steps = ("training.steps=2", "training.sample_tokens=0")
    assert run(write_config(tmp_path), options[1], *options[2].split(), *steps) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-2, 5e-3])


PLACES = re.findall(r"^\| .*? \| `([\w.]+)[\[`]", PAGE, re.MULTILINE)


@pytest.mark.parametrize("place", PLACES)
def test_the_page_names_what_registers(place):
    assert len(PLACES) == len(re.findall(r"^\| an? ", PAGE, re.MULTILINE))
    module, name = place.rsplit(".", 1)
    assert hasattr(importlib.import_module(module), name)
