"""Overrides that YAML reads as something else, names with dots, and plugins that do not import."""

import pytest

from configs.reading import ConfigError, apply_overrides, import_plugins
from configs.schema import load_config

ANOTHER_VALUE = """write a text that looks like another value as {}='"TEXT"'"""


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.sample_prompt=User: hello", ANOTHER_VALUE.format("training.sample_prompt")),
        ("run.dir=2026_11_28", ANOTHER_VALUE.format("run.dir")),
        ("run.dir=2026-11-28", ANOTHER_VALUE.format("run.dir")),
        ("data.eos_token=[EOS]", ANOTHER_VALUE.format("data.eos_token")),
        ("training.sample_prompt=[INST] hi", """such characters as KEY='"TEXT"'"""),
        ("data.global_batch_size={0:16,100:32}", "; write a space after each colon"),
    ],
)
def test_a_value_that_yaml_reads_as_another_has_a_hint(tmp_path, override, hint):
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "config.yaml", [override])
    assert hint in str(refused.value)
    if "TEXT" not in hint:
        return
    key, _, text = override.partition("=")
    tree = {}
    apply_overrides(tree, [f'{key}="{text}"'])  # as the hint says
    assert [*next(iter(tree.values())).values()] == [text]


def test_an_override_finds_sections_with_dots_in_their_names():
    tree = {"data": {"sources": {"c4.en": {"weight": 1}, "c4": {"weight": 1}}}}
    apply_overrides(
        tree, ["data.sources.c4.en.weight=2", "data.sources.c4.files=a", "data.sources.new.files=b"]
    )
    assert tree["data"]["sources"] == {
        "c4.en": {"weight": 2},
        "c4": {"weight": 1, "files": "a"},
        "new": {"files": "b"},
    }


def test_the_remedy_for_a_plugin_depends_on_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plugin_without_its_needs.py").write_text("import not_installed_here\n")
    with pytest.raises(ConfigError, match="put the folder of the module on PYTHONPATH"):
        import_plugins({"plugins": ["not_there.plugin"]})
    with pytest.raises(
        ConfigError, match="failed with ModuleNotFoundError: No module named 'not_in"
    ):
        import_plugins({"plugins": ["plugin_without_its_needs"]})


@pytest.mark.parametrize("key", ["model.remat", "model.attention", "model.moe.grouped_matmul"])
def test_an_unknown_name_lists_auto_too(tmp_path, key):
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"use one of .*, or auto"):
        load_config(tmp_path / "config.yaml", ["model.moe.num_experts=4", f"{key}=other"])
