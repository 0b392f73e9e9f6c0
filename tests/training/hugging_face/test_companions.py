"""Exported tokenizer files begin texts, and end answers, as the run does."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from data.chat_jinja import CHATML_JINJA
from data.tokenizers.base import IM_END, IM_START, open_tokenizer
from data.tokenizers.training import train_tokenizer
from training.hugging_face.companions import adapt_companions, export_companions

BOS = "<|begin|>"


def write_run(run: Path, settings: dict | None) -> Path:
    """Write a run whose folder of tokenizer files adds BOS to every text; return the folder."""
    folder = run / "tokenizer"
    folder.mkdir(parents=True)
    train_tokenizer(["the cat sat on the mat"] * 9, 272, folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([BOS, IM_START, IM_END])
    parts = [processors.ByteLevel(trim_offsets=False)]
    parts += [processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, tokenizer.token_to_id(BOS))])]
    tokenizer.post_processor = processors.Sequence(parts)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1, "top_p": 0.5}')
    return folder


@pytest.mark.parametrize("has_bos", [True, False])
def test_an_exported_tokenizer_adds_bos_only_if_the_run_has_it(tmp_path, has_bos) -> None:
    folder = write_run(tmp_path / "run", {"bos_token": BOS, "add_bos_token": True})
    run, out = open_tokenizer(str(folder)), tmp_path / "out"
    export_companions(tmp_path / "run", None, out)
    adapt_companions(out, run, run.bos_id if has_bos else None)
    exported = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = [*map(int, run.encode("the cat"))]
    assert exported.encode("the cat").ids == [run.bos_id] * has_bos + ids
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings == {"bos_token": BOS, "add_bos_token": has_bos}


@pytest.mark.parametrize("processor", [None, "ByteLevel", "Sequence"])
def test_an_exported_tokenizer_adds_the_bos_that_only_the_run_adds(tmp_path, processor) -> None:
    folder = write_run(tmp_path / "run", {"bos_token": BOS, "add_bos_token": False})
    content = json.loads((folder / "tokenizer.json").read_text())
    byte_level, _ = content["post_processor"]["processors"]
    if processor != "Sequence":
        content["post_processor"] = byte_level if processor else None
        (folder / "tokenizer.json").write_text(json.dumps(content))
    run, out = open_tokenizer(str(folder)), tmp_path / "out"
    export_companions(tmp_path / "run", None, out)
    adapt_companions(out, run, run.bos_id)
    exported = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = [*map(int, run.encode("the cat"))]
    assert exported.encode("the cat").ids == [run.bos_id, *ids]
    assert exported.encode("the cat", "the cat").ids == 2 * [run.bos_id, *ids]
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings == {"bos_token": BOS, "add_bos_token": True}
    assert open_tokenizer(str(out)).adds_bos


def test_a_tokenizer_without_settings_adds_no_token_to_the_texts_of_a_run(tmp_path) -> None:
    folder = write_run(tmp_path / "run", None)
    run, out = open_tokenizer(str(folder / "tokenizer.json")), tmp_path / "out"
    assert run.bos_id is None
    export_companions(tmp_path / "run", run, out)
    adapt_companions(out, run, run.bos_id)
    exported = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert exported.encode("the cat").ids == [*map(int, run.encode("the cat"))]


def test_a_run_in_chatml_replaces_the_template_of_its_base_and_ends_its_answers(tmp_path) -> None:
    folder = write_run(tmp_path / "run", {"bos_token": BOS})
    (folder / "chat_template.jinja").write_text("of the base")
    (tmp_path / "run" / "chat_template.jinja").write_text(CHATML_JINJA)
    run, out = open_tokenizer(str(folder)), tmp_path / "out"
    export_companions(tmp_path / "run", None, out)
    adapt_companions(out, run, run.bos_id)
    assert (out / "chat_template.jinja").read_text() == CHATML_JINJA
    found = json.loads((out / "generation_config.json").read_text())
    assert found == {"eos_token_id": [1, run.controls[IM_END]], "top_p": 0.5}
