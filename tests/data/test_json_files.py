"""A JSON array in a .json file gives the documents of the same JSON lines; chats need no option."""

import gzip
import json

import hypothesis.strategies as st
import pyarrow
import pytest
from datasets import Dataset, disable_progress_bars
from hypothesis import given
from pyarrow import parquet

from data.files import find_files
from data.formats import json_files, text
from data.formats.base import Document, DocumentError, read_documents
from data.formats.pieces import PIECE_BYTES, plan_pieces

disable_progress_bars()

ASKED, ANSWERED = "žluťoučký?", "yes\n"
SHAREGPT = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]
OPENAI = [
    {"role": "user", "content": [{"type": "text", "text": ASKED}]},
    {"role": "assistant", "content": [{"type": "text", "text": ANSWERED}]},
]
CHAT = (("user", ASKED), ("assistant", ANSWERED))


def read(path, piece_bytes=PIECE_BYTES, field="text") -> list[Document | DocumentError]:
    pieces = plan_pieces(find_files(str(path)), piece_bytes)
    ranges = [entry for piece in pieces for entry in piece.ranges]
    return [document for entry in ranges for document in read_documents(entry, field)]


def write_table(folder, records):
    parquet.write_table(pyarrow.Table.from_pylist(records), folder / "a.parquet")
    return folder / "a.parquet"


def write_dataset(folder, records):
    Dataset.from_list(records).save_to_disk(folder / "saved")
    return folder / "saved"


def write_lines(folder, records):
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "a.jsonl"


def write_array(folder, records, **options):
    (folder / "a.json").write_text(json.dumps(records, **options))
    return folder / "a.json"


WRITERS = [write_lines, write_array, write_table, write_dataset]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("field", "chat"), [("messages", OPENAI), ("conversations", SHAREGPT)])
def test_chats_of_openai_and_sharegpt_are_read_without_an_option(tmp_path, write, field, chat):
    for name in ("text", field):
        (document,) = read(write(tmp_path, [{"id": 7, field: chat}]), field=name)
        assert document.messages == CHAT


@pytest.mark.parametrize("write", WRITERS)
def test_a_record_with_text_is_that_text_and_another_field_is_never_guessed(tmp_path, write):
    path = write(tmp_path, [{"messages": OPENAI, "text": "a"}])
    assert [document.text for document in read(path)] == ["a"]
    (error,) = read(path, field="body")
    assert (error.kind, error.suggested_field) == ("missing field", "text")


def test_messages_of_both_kinds_in_one_table_are_told_apart(tmp_path):
    found = read(write_table(tmp_path, [{"messages": OPENAI[1:]}, {"messages": SHAREGPT}]))
    assert [document.messages for document in found] == [CHAT[1:], CHAT]


VALUES = st.recursive(
    st.one_of(st.text(max_size=20), st.integers(), st.floats(allow_nan=False), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
RECORDS = st.lists(st.fixed_dictionaries({"text": st.text(min_size=1)}, optional={"x": VALUES}))


@given(
    records=RECORDS,
    indent=st.sampled_from([None, 2]),
    ascii=st.booleans(),
    block=st.integers(1, 40),
)
def test_an_array_gives_the_documents_of_its_lines_in_any_layout_and_any_block(
    tmp_path_factory, records, indent, ascii, block
):
    folder = tmp_path_factory.mktemp("array")
    content = json.dumps(records, indent=indent, ensure_ascii=ascii).encode(errors="replace")
    content = b"\xef\xbb\xbf \r\n" + content + b"\n"
    (folder / "a.json").write_bytes(content)
    (folder / "b.json.gz").write_bytes(gzip.compress(content))
    expected = [record["text"] for record in json.loads(content.decode("utf-8-sig"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_BLOCK", block)
        for name in ("a.json", "b.json.gz"):
            found = read(folder / name, piece_bytes=10)
            assert [getattr(document, "text", document) for document in found] == expected


def test_places_of_an_array_are_items_and_those_of_lines_are_lines(tmp_path):
    path = write_array(tmp_path, [{"text": "a"}, 7, {"text": ""}, {"body": "b"}], indent=1)
    assert [(one.location, getattr(one, "kind", None)) for one in read(path)] == [
        (f"{path}, item 0", None),
        (f"{path}, item 1", "wrong type"),
        (f"{path}, item 2", "empty"),
        (f"{path}, item 3", "missing field"),
    ]
    path.write_text('{"text": "a"}\n{\n')
    assert [one.location for one in read(path, piece_bytes=9)] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize(
    ("content", "kind", "detail"),
    [
        ('[{"text": "a"}', "invalid JSON", "the array has no end after 1 items"),
        ('[{"text": "a"} {', "invalid JSON", "'{' instead of ']' after 1 items"),
        ('[{"text": "a"}, {"text": ]' + " " * 99, "invalid JSON", "Expecting value after 1 items"),
        ('[{"text": "a"}, {"text": "b', "invalid JSON", "Unterminated string starting at after 1"),
        ('[{"text": "a"}]\n[]', "invalid JSON", "text after the end of the array after 1 items"),
        ('[{"text": "a"}, ' + "7" * 5000 + "]", "invalid JSON", "Exceeds the limit"),
        (b'[{"text": "a"}, {"text": "\xff"}]', "invalid UTF-8", "byte 0xff in item 0 or later"),
        ('[{"text": "a"}, {"text": "\\ud83d"}]', "invalid UTF-8", "half of a surrogate pair"),
    ],
)
def test_an_error_in_an_array_keeps_the_items_before_it(tmp_path, content, kind, detail):
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    *before, error = read(path)
    kept = [] if isinstance(content, bytes) else ["a"]
    assert [document.text for document in before] == kept
    assert error.kind == kind and detail in error.detail


def test_an_item_that_is_too_long_ends_the_array(tmp_path, monkeypatch):
    for module in (text, json_files):
        monkeypatch.setattr(module, "MAX_BYTES", 1000)
    monkeypatch.setattr(text, "_BLOCK", 100)
    path = write_array(tmp_path, [{"text": "a" * 900}, {"text": "b" * 5000}, {"text": "c"}])
    first, error = read(path)
    assert first.text == "a" * 900
    assert (error.kind, error.detail) == ("too long", "item 1 has more than 1,000 bytes")
