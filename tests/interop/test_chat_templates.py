"""Chat templates: text, ids and masks of assistant tokens equal those of transformers."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

import transformers
from chats import TAGS, TEMPLATES, write_model_directory

from data.chat import encode_chat, encode_chat_prompt
from data.chat_jinja import find_chat_template
from data.tokenizers.base import open_tokenizer

TALKS = {
    "short": [("user", "the cat"), ("assistant", "sat on the mat")],
    "long": [
        ("user", " what is one? "),
        ("assistant", "two\n"),
        ("user", "é"),
        ("assistant", "𝄞 x"),
    ],
}


def both(tmp_path, template):
    folder = write_model_directory(tmp_path, template)
    ours = open_tokenizer(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return ours, find_chat_template("auto", ours).template, theirs


def as_dicts(talk):
    return [{"role": role, "content": content} for role, content in talk]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_of_a_conversation_and_of_its_prompt_equal_those_of_transformers(tmp_path, name, talk):
    ours, template, theirs = both(tmp_path, TEMPLATES[name])
    talk = TALKS[talk]
    wanted = theirs.apply_chat_template(as_dicts(talk), tokenize=True, return_dict=True)
    assert encode_chat(ours, talk, template).ids.tolist() == wanted["input_ids"]
    wanted = theirs.apply_chat_template(
        as_dicts(talk[:1]), tokenize=True, return_dict=True, add_generation_prompt=True
    )
    assert encode_chat_prompt(ours, talk[:1], template).tolist() == wanted["input_ids"]


@pytest.mark.parametrize("talk", TALKS)
def test_masks_of_generation_tags_equal_those_of_transformers(tmp_path, talk):
    ours, template, theirs = both(tmp_path, TAGS)
    wanted = theirs.apply_chat_template(
        as_dicts(TALKS[talk]),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    found = encode_chat(ours, TALKS[talk], template)
    assert found.loss_mask.astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.parametrize("name", ["heads", "chatml"])
def test_text_without_a_template_gets_the_same_bos(tmp_path, name):
    ours, _, theirs = both(tmp_path, TEMPLATES[name])
    text = "the cat sat"
    assert [ours.bos_id, *ours.encode(text)] == theirs(text)["input_ids"]
