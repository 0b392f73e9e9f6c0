"""Encoding and decoding are inverses, and no text becomes a control token."""

import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import data.tokenizers.hugging_face
from data.chat import encode_chat
from data.files import DataError
from data.tokenizers.base import END, IM_END, IM_START, id_dtype, open_tokenizer
from data.tokenizers.byte_level import ByteTokenizer
from data.tokenizers.hugging_face import HuggingFaceTokenizer
from data.tokenizers.training import train_tokenizer

CORPUS = [
    "the cat sat on the mat, and the other cat sat on the hat\n" * 20,
    "def forward(self, x):\n    return self.linear(x)\n" * 20,
    "Straße, naïve, 日本語 日本語 🙂🙂\n" * 20,
]
# Texts in which control tokens are spelled, whole and in pieces, between anything else.
NASTY = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([END, IM_START, IM_END, "</s>", "<|", "|>", "\n", " ", "cat", "the"]),
    )
).map("".join)
CHATS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), NASTY), max_size=4)


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_tokenizer(CORPUS, 320, path)
    return path


@pytest.fixture(scope="module")
def bpe(bpe_path):
    return open_tokenizer(str(bpe_path))


@pytest.fixture(scope="module")
def unigram():
    """A model that finds its own control tokens in text, at the best score of all."""
    pieces = [("<unk>", -9.0), ("</s>", 0.0), (IM_START, 0.0), (IM_END, 0.0)]
    pieces += [(chr(c), -2.0) for c in range(32, 127)]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    model.add_special_tokens(["<unk>", "</s>", IM_START, IM_END])
    return HuggingFaceTokenizer("unigram", model.to_str())


@pytest.fixture(scope="module", params=["bytes", "bpe", "unigram"])
def each(request):
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue(request.param)


def edited(path: Path, **changes) -> str:
    return json.dumps(json.loads(path.read_text("utf-8")) | changes)


def word_level(vocabulary: dict[str, int], special: list[str], unknown: str = "?") -> str:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unknown))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(special)
    return model.to_str()


@given(NASTY)
def test_text_comes_back_from_its_ids(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_id, *tokenizer.encode("never")]) == text
        assert tokenizer.decode([*ids, tokenizer.vocab_size]) == text


@given(st.text())
def test_ids_of_bytes_are_the_bytes(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode("utf-8"))


def test_bpe_merges_what_it_was_trained_on(bpe):
    assert len(bpe.encode("the cat sat")) < len("the cat sat") / 2
    assert bpe.vocab_size == 320
    assert (bpe.eos_id, bpe.controls) == (0, {END: 0, IM_START: 1, IM_END: 2})


@given(texts=st.lists(NASTY, max_size=5))
def test_a_batch_is_its_texts_one_by_one(each, texts):
    batch = each.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [each.encode(text).tolist() for text in texts]
    assert {ids.dtype for ids in batch} <= {id_dtype(each.vocab_size)}


@given(text=NASTY)
def test_no_text_becomes_a_control_token(each, text):
    ids = each.encode(text)
    assert not set(ids.tolist()) & set(each.controls.values())
    assert (ids < each.vocab_size).all()


@given(text=NASTY)
def test_text_encodes_as_if_there_were_no_special_tokens(bpe_path, text):
    content = json.loads(bpe_path.read_text("utf-8"))
    pad = content["added_tokens"][0] | {"id": 320, "content": "</s>"}
    tokenizer = HuggingFaceTokenizer("x", json.dumps(content | {"added_tokens": [pad]}), END)
    model = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
    assert tokenizer.encode(text).tolist() == model.encode(text).ids


def test_a_spelled_control_token_is_still_read_as_its_text(bpe, unigram):
    for tokenizer, text in ((bpe, f"a{END}b"), (unigram, "a</s>b")):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
        assert "".join(pieces) == text and len(pieces) > 3


def test_a_marker_that_the_file_calls_ordinary_is_a_control_token_here(bpe_path):
    added = [
        token | {"special": False}
        for token in json.loads(bpe_path.read_text("utf-8"))["added_tokens"]
    ]
    tokenizer = HuggingFaceTokenizer("x", edited(bpe_path, added_tokens=added), END)
    assert tokenizer.controls == {END: 0, IM_START: 1, IM_END: 2}
    assert not set(tokenizer.encode(END + IM_START + IM_END).tolist()) & {0, 1, 2}


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_the_vocabulary_chooses_the_type_of_ids(vocab_size, dtype):
    content = word_level({END: 0, "?": 1, "a": vocab_size - 1}, [END])
    tokenizer = HuggingFaceTokenizer("x", content)
    ids = tokenizer.encode("a a")
    assert tokenizer.vocab_size == vocab_size
    assert ids.dtype == dtype == tokenizer.encode("").dtype
    assert ids.tolist() == [vocab_size - 1] * 2


def test_truncation_padding_dropout_and_templates_of_the_file_change_nothing(bpe, bpe_path):
    model = json.loads(bpe_path.read_text("utf-8"))["model"]
    modified = tokenizers.Tokenizer.from_str(edited(bpe_path, model=model | {"dropout": 0.9}))
    modified.enable_truncation(max_length=4)
    modified.enable_padding(length=64, pad_id=1, pad_token=IM_START)
    modified.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    assert len(modified.encode(CORPUS[0]).ids) == 64
    tokenizer = HuggingFaceTokenizer("x", modified.to_str())
    assert tokenizer.encode(CORPUS[0]).tolist() == bpe.encode(CORPUS[0]).tolist()


@pytest.mark.parametrize("end", ["<|end_of_text|>", "<eos>", "</s>", "<|eos|>"])
def test_the_end_is_the_special_token_with_a_usual_name(end):
    content = word_level({"a": 0, "?": 1, end: 2, "[SEP]": 3}, [end, "[SEP]"])
    assert HuggingFaceTokenizer("x", content).eos_id == 2
    assert HuggingFaceTokenizer("x", content, "[SEP]").eos_id == 3


def test_a_usual_name_that_is_only_a_word_is_not_the_end():
    content = word_level({"</s>": 0, "<|eos|>": 1, "?": 2}, ["<|eos|>"])
    assert HuggingFaceTokenizer("x", content).eos_id == 1


def test_training_twice_gives_the_same_bytes(tmp_path, bpe_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    again = tmp_path / "made" / "tokenizer.json"
    assert train_tokenizer(iter(CORPUS), 320, again) == 320
    assert again.read_bytes() == bpe_path.read_bytes()
    assert [path.name for path in again.parent.iterdir()] == ["tokenizer.json"]


def test_a_small_text_gives_a_smaller_vocabulary_and_says_so(tmp_path):
    path = tmp_path / "tokenizer.json"
    size = train_tokenizer(["aaaa aaaa"], 1000, path)
    assert 259 < size < 265
    assert open_tokenizer(str(path)).vocab_size == size
    assert train_tokenizer(["abcdef"], 1000, path) == 259
    assert train_tokenizer([], 259, path) == 259


def test_training_that_fails_leaves_the_old_file(tmp_path):
    def broken():
        yield "text"
        raise DataError("texts/1.txt: invalid UTF-8")

    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    with pytest.raises(DataError, match=r"texts/1\.txt: invalid UTF-8"):
        train_tokenizer(broken(), 300, path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        ByteTokenizer().save(path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


@pytest.fixture(scope="module")
def bytes_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "run" / "tokenizer.json"
    ByteTokenizer().save(path)
    return path


@given(text=st.text(), raw=st.binary())
def test_saved_bytes_are_a_hugging_face_tokenizer_with_the_same_ids(bytes_path, text, raw):
    theirs = HuggingFaceTokenizer("x", bytes_path.read_text("utf-8"))
    ours = ByteTokenizer()
    assert (theirs.vocab_size, theirs.eos_id, theirs.controls) == (257, 256, {END: 256})
    assert theirs.encode(text).tolist() == ours.encode(text).tolist()
    assert theirs.decode(list(raw)) == ours.decode(list(raw))


def test_saved_bytes_open_as_bytes_without_the_library(bytes_path, monkeypatch):
    def missing(*_):
        raise DataError("needs tokenizers")

    monkeypatch.setattr(data.tokenizers.hugging_face, "load_library", missing)
    for name in (str(bytes_path), str(bytes_path.parent)):
        tokenizer = open_tokenizer(name, END)
        assert isinstance(tokenizer, ByteTokenizer)
        assert tokenizer.digest == ByteTokenizer().digest
    with pytest.raises(DataError, match="needs tokenizers"):
        HuggingFaceTokenizer("x", "{}")


def test_bytes_saved_again_by_the_library_are_still_bytes(bytes_path, tmp_path):
    tokenizers.Tokenizer.from_file(str(bytes_path)).save(str(tmp_path / "tokenizer.json"))
    assert isinstance(open_tokenizer(str(tmp_path)), ByteTokenizer)


def test_save_and_open_keep_ids_and_digest(bpe, unigram, tmp_path):
    for tokenizer in (bpe, unigram):
        path = tmp_path / tokenizer.name.replace("/", "_") / "tokenizer.json"
        tokenizer.save(path)
        opened = open_tokenizer(str(path.parent))
        assert opened.name == str(path.parent)
        assert opened.digest == tokenizer.digest
        assert opened.controls == tokenizer.controls
        assert opened.encode("the cat</s>").tolist() == tokenizer.encode("the cat</s>").tolist()


def test_the_digest_follows_what_decides_the_ids_and_nothing_else(bpe, bpe_path):
    content = json.loads(bpe_path.read_text("utf-8"))
    same = json.dumps(dict(reversed(content.items())), indent=7)
    assert HuggingFaceTokenizer("another/name", same).digest == bpe.digest
    assert HuggingFaceTokenizer("x", json.dumps(content), IM_END).digest != bpe.digest
    merges = content["model"]["merges"][:-1]
    fewer = content | {"model": content["model"] | {"merges": merges}}
    assert HuggingFaceTokenizer("x", json.dumps(fewer)).digest != bpe.digest
    assert re.fullmatch("[0-9a-f]{64}", bpe.digest) and bpe.digest != ByteTokenizer.digest


def test_a_pickled_tokenizer_gives_the_same_ids_without_its_file(tmp_path, bpe_path, each):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bpe_path.read_bytes())
    pickled = pickle.dumps([open_tokenizer(str(path), IM_END), each])
    path.unlink()
    for copy, original in zip(
        pickle.loads(pickled), [open_tokenizer(str(bpe_path), IM_END), each], strict=True
    ):
        assert (copy.digest, copy.eos_id) == (original.digest, original.eos_id)
        text = f"the cat{END}{IM_END}</s>"
        assert copy.encode(text).tolist() == original.encode(text).tolist()


def test_a_home_path_is_expanded_and_keeps_its_name(bpe_path, monkeypatch):
    monkeypatch.setenv("HOME", str(bpe_path.parent))
    assert open_tokenizer("~/tokenizer.json").name == "~/tokenizer.json"


TALK = [("system", "be short"), ("user", "say it\n"), ("assistant", "it"), ("assistant", "")]


def test_a_chat_in_bytes_is_chatml_with_the_assistant_in_the_loss():
    ids, learned, _ = encode_chat(ByteTokenizer(), TALK)
    text = "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nsay it\n<|im_end|>\n"
    text += "<|im_start|>assistant\nit<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    marks = " " * text.index("it<|im") + "x" * 12 + " " * len("\n<|im_start|>assistant\n")
    marks += "x" * 10 + " "
    assert ByteTokenizer().decode(ids) == text
    assert learned.dtype == bool and ids.dtype == np.uint16
    assert learned.tolist() == [mark == "x" for mark in marks]


def test_a_chat_in_bpe_is_what_the_library_makes_of_chatml(bpe, bpe_path):
    ids, learned, _ = encode_chat(bpe, TALK)
    chatml = "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in TALK)
    assert ids.tolist() == tokenizers.Tokenizer.from_file(str(bpe_path)).encode(chatml).ids
    assert ids.dtype == np.uint16
    assert bpe.decode(ids) == chatml
    assert bpe.decode(ids[learned]) == f"it{IM_END}{IM_END}"


@given(messages=CHATS)
def test_the_loss_mask_covers_assistant_content_and_its_end_marker(each, messages):
    ids, learned, _ = encode_chat(each, messages)
    assert ids.dtype == id_dtype(each.vocab_size) and learned.dtype == bool
    end = each.controls.get(IM_END)
    expected = []
    for content in (content for role, content in messages if role == "assistant"):
        expected += [*each.encode(content), *([end] if end else each.encode(IM_END))]
    assert ids[learned].tolist() == expected
    assert not learned.all() or not len(ids)
    assert each.eos_id not in ids


@given(messages=CHATS)
def test_content_cannot_forge_a_marker(bpe, unigram, messages):
    for tokenizer in (bpe, unigram):
        ids, *_ = encode_chat(tokenizer, messages)
        for marker in (IM_START, IM_END):
            assert np.sum(ids == tokenizer.controls[marker]) == len(messages)


REFUSALS = {
    "bytes with an end": (
        lambda _: open_tokenizer("bytes", "</s>"),
        "data.eos_token='</s>' has no meaning with data.tokenizer=bytes, whose end is id 256",
    ),
    "no file": (
        lambda _: open_tokenizer("nowhere/tokenizer.json"),
        "data.tokenizer=nowhere/tokenizer.json: No such file or directory; "
        "give the path of a tokenizer.json, of a folder with one, or a registered name: bytes",
    ),
    "a name of the hub": (
        lambda _: open_tokenizer("Qwen/Qwen3-0.6B"),
        "; if this is a model of the Hugging Face hub, download it first: "
        "hf download Qwen/Qwen3-0.6B --include 'tokenizer*' --local-dir FOLDER",
    ),
    "no JSON": (
        lambda folder: write_and_open(folder, "hello"),
        "tokenizer.json is not a Hugging Face tokenizer.json: Expecting value: line 1 column 1",
    ),
    "no text": (
        lambda folder: write_and_open(folder, b"\xff\xfe"),
        "tokenizer.json is not a Hugging Face tokenizer.json: 'utf-8' codec can't decode",
    ),
    "no tokenizer": (
        lambda folder: write_and_open(folder, '{"hidden_size": 64}'),
        "tokenizer.json is not a Hugging Face tokenizer.json: it has no 'model'; give the path",
    ),
    "no model": (
        lambda _: HuggingFaceTokenizer("x", '{"model": {"type": "BPE"}}'),
        "data.tokenizer=x is not a Hugging Face tokenizer.json: ",
    ),
    "no usual end": (
        lambda _: HuggingFaceTokenizer(
            "x", word_level({"[CLS]": 0, "[SEP]": 1}, ["[CLS]", "[SEP]"])
        ),
        "data.tokenizer=x has no special token with a usual name for the end of text; set "
        "data.eos_token=... (its special tokens: [CLS], [SEP])",
    ),
    "unknown end": (
        lambda _: HuggingFaceTokenizer("x", word_level({"a": 0, END: 1}, [END]), "<|endoftxt|>"),
        "data.eos_token='<|endoftxt|>' is not in the vocabulary of x; similar tokens: "
        "<|endoftext|>; its special tokens: <|endoftext|>",
    ),
    "an end that is text": (
        lambda _: HuggingFaceTokenizer("x", word_level({"a": 0, END: 1, "?": 2}, [END]), "a"),
        "data.tokenizer=x: 'a' is ordinary text for this model, so a document could contain an end",
    ),
    "a text outside the vocabulary": (
        lambda _: HuggingFaceTokenizer("x", word_level({"a": 0, "</s>": 1}, ["</s>"])),
        "data.tokenizer=x cannot encode a text: WordLevel error",
    ),
    "too few ids to train": (
        lambda folder: train_tokenizer([], 258, folder / "tokenizer.json"),
        "vocab_size=258 of a tokenizer to train is smaller than 259: 256 bytes and <|endoftext|>, ",
    ),
}


def write_and_open(folder, content):
    path = folder / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_tokenizer(str(path))


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_input_is_refused_in_one_line(case, tmp_path):
    call, message = REFUSALS[case]
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)
