"""Text formats, tokenizers and chat templates can be added from outside `data`."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data.chat import (
    CHAT_TEMPLATES,
    ChatPiece,
    ChosenTemplate,
    encode_chat,
    register_chat_template,
)
from data.chat_jinja import find_chat_template
from data.config import DataConfig, SourceConfig
from data.engine import run_tasks
from data.files import DataError, load_library
from data.formats.base import read_documents, register_format, to_document
from data.pipeline import Dataset
from data.prepare import build
from data.store_job import StoreJob
from data.tokenizers.base import open_tokenizer, register_tokenizer
from data.tokenizers.byte_level import ByteTokenizer

CHAT = [("user", "Hi"), ("assistant", "Yes")]


@register_format("paragraphs", suffixes=(".paragraphs",), splittable=False)
def read_paragraphs(file_range, field):
    for number, text in enumerate(Path(file_range.path).read_text().split("\n\n")):
        yield to_document(file_range, number, text, field)


class UpperTokenizer(ByteTokenizer):
    name, digest = "upper:case", "upper"

    def encode(self, text):
        return super().encode(text.upper())

    def save(self, path):
        pass


@register_tokenizer("upper")
def open_upper(name, eos_token):
    return UpperTokenizer()


@register_chat_template("plain")
def plain(messages):
    for role, content in messages:
        yield f"{role}: ", False
        yield f"{content}\n", True


def test_a_store_belongs_to_the_code_of_its_template_and_readers(tmp_path, monkeypatch):
    code = tmp_path / "my_template.py"
    code.write_text(
        "from data.chat import register_chat_template\n"
        "@register_chat_template('edited')\n"
        "def edited(messages):\n"
        "    yield from ((content, True) for _, content in messages)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_template")
    for name in ("a.txt", "a.paragraphs"):
        (tmp_path / name).write_text("text")

    def job(name, template="chatml"):
        chosen, source = CHAT_TEMPLATES[template], SourceConfig(files=str(tmp_path / name))
        template = ChosenTemplate(template, chosen, template)
        return StoreJob("text", source, ByteTokenizer(), "raise", template)

    assert job("a.txt")._plugins == set() and job("a.paragraphs")._plugins == {Path(__file__)}
    keys = [job("a.txt", "edited").key for _ in range(2)]
    code.write_text(code.read_text() + "# corrected\n")
    assert keys[0] == keys[1] != job("a.txt", "edited").key
    del CHAT_TEMPLATES["edited"], sys.modules["my_template"]


def test_a_format_tokenizer_and_template_from_outside_make_the_batches_of_a_run(tmp_path):
    (tmp_path / "a.paragraphs").write_text("\n\n".join(f"text {n}" for n in range(40)))
    chats = [[{"role": role, "content": text} for role, text in CHAT]] * 40
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": c}) + "\n" for c in chats))
    files = {name: {"files": str(tmp_path / name)} for name in ("a.paragraphs", "b.jsonl")}
    config = DataConfig(
        sources={"a": files["a.paragraphs"], "b": files["b.jsonl"]},
        tokenizer="upper:case",
        chat_template="plain",
        sequence_length=8,
        eval_fraction=0.1,
        cache_dir=str(tmp_path / "cache"),
    )
    dataset = Dataset(config)
    texts, chats = (source.store for source in dataset.sources)
    assert bytes(texts.tokens[: texts.ends[0] - 1].astype(np.uint8)) == b"TEXT 0"
    assert (
        bytes(chats.tokens[: chats.ends[0] - 1].astype(np.uint8)) == b"USER: HI\nASSISTANT: YES\n"
    )
    learned = chats.tokens[: chats.ends[0]][chats.loss_mask[: chats.ends[0]] != 0]
    assert learned.tolist() == [*b"HI\nYES\n", 256] and chats.num_bytes[0] == 7
    assert dataset.read_train(0, range(4))["tokens"].shape == (4, 8)


def test_worker_processes_know_a_format_from_outside(tmp_path):
    (tmp_path / "a.paragraphs").write_text("one\n\ntwo")
    source = SourceConfig(files=str(tmp_path / "a.paragraphs"))
    job = StoreJob("text", source, ByteTokenizer(), "raise")
    assert (
        build(job, tmp_path / "store", engine=partial(run_tasks, workers=1)).info.num_documents == 2
    )


def test_a_template_decides_the_store_and_the_default_does_not_change_it(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    source = SourceConfig(files=str(tmp_path / "a.txt"))
    tokenizer = ByteTokenizer()
    chosen = [find_chat_template(name, tokenizer) for name in ("chatml", "plain")]
    default, other = (StoreJob("a", source, tokenizer, "raise", each).key for each in chosen)
    assert default == StoreJob("a", source, tokenizer, "raise").key != other


def test_a_marker_is_a_control_token_only_where_the_tokenizer_has_it():
    tokenizer = ByteTokenizer()

    def template(messages):
        return [ChatPiece("<|endoftext|>", True, is_control=True), ("<|endoftext|>", False)]

    ids, mask, num_bytes = encode_chat(tokenizer, CHAT, template)
    assert ids.tolist() == [256, *b"<|endoftext|>"]
    assert mask.tolist() == [True] + [False] * 13 and num_bytes == 0


def test_a_taken_suffix_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"'again': json already reads \.json files"):
        register_format("again", suffixes=(".json",))(read_documents)
    with pytest.raises(ValueError, match="unknown chat template 'x'; use one of chatml"):
        DataConfig(chat_template="x")
    with pytest.raises(DataError, match="or a registered name: bytes, upper"):
        open_tokenizer("nothing")
    with pytest.raises(DataError, match="needs the library nothing_there"):
        load_library("nothing_there")
