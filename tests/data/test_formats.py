"""Every format and every cut yields the same documents, and every kind of damage is reported."""

import bz2
import gzip
import itertools
import json
import lzma
import pickle
from functools import partial
from pathlib import Path

import fsspec
import hypothesis.strategies as st
import pyarrow
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from datasets import Dataset, disable_progress_bars
from hypothesis import given, settings
from pyarrow import parquet

from data.files import DamagedFileError, find_files
from data.formats import text
from data.formats.base import Document, DocumentError, FileRange, read_documents
from data.formats.pieces import PIECE_BYTES, plan_pieces

disable_progress_bars()

TEXTS = ["alpha\nbeta\r\n", "  ", "žluťoučký kůň \U0001f40e\u2028", "\ufeffmark", "x" * 3000]
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": partial(lzma.compress, preset=0),
    ".zst": zstandard.compress,
}


def read(path, piece_bytes=PIECE_BYTES, field="text") -> list[Document | DocumentError]:
    """Documents of a path, piece by piece."""
    pieces = plan_pieces(find_files(str(path)), piece_bytes)
    return [
        document
        for piece in pieces
        for entry in piece.ranges
        for document in read_documents(entry, field)
    ]


def errors(path, **options) -> list[tuple[str, str, str]]:
    """Location (without the folder), kind and detail of each error."""
    return [
        (fault.location.removeprefix(f"{Path(path).parent}/"), fault.kind, fault.detail)
        for fault in read(path, **options)
        if isinstance(fault, DocumentError)
    ]


def texts(path, **options) -> list[str | None]:
    return [found.text for found in read(path, **options) if isinstance(found, Document)]


def lines(values, field="text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: value}).encode() + b"\n" for value in values)


def write_text(folder, values):
    for index, value in enumerate(values):
        # A text file is stripped of one mark.
        (folder / f"{index}.txt").write_bytes(f"\ufeff{value}".encode())
    return folder / "*.txt"


def write_jsonl(folder, values, suffix="", field="text"):
    path = folder / f"a.jsonl{suffix}"
    data = lines(values, field)
    path.write_bytes(COMPRESS[suffix](data) if suffix else data)
    return path


def write_parquet(folder, values, field="text"):
    table = pyarrow.table({"id": [1] * len(values), field: values})
    parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def write_datasets(folder, values, field="text"):
    Dataset.from_dict({"id": [1] * len(values), field: values}).save_to_disk(folder / "saved")
    return folder / "saved"


def write_array_record(folder, values, options="group_size:2"):
    writer = ArrayRecordWriter(str(folder / "a.array_record"), options)
    for value in values:
        writer.write(value if isinstance(value, bytes) else value.encode())
    writer.close()
    return folder / "a.array_record"


WRITERS = {
    "text": write_text,
    "jsonl": write_jsonl,
    **{f"jsonl{s}": lambda f, v, s=s: write_jsonl(f, v, s) for s in COMPRESS},
    "parquet": write_parquet,
    "datasets": write_datasets,
    "array_record": write_array_record,
}


@pytest.mark.parametrize("piece_bytes", [1, 1000, PIECE_BYTES])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_format_gives_the_same_documents(tmp_path, write, piece_bytes):
    path = write(tmp_path, TEXTS)
    assert texts(path, piece_bytes=piece_bytes) == TEXTS
    assert not errors(path, piece_bytes=piece_bytes)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, write_datasets])
def test_messages_are_pairs_of_role_and_content(tmp_path, write):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "more": "c"}]
    (document,) = read(write(tmp_path, [chat], field="chat"), field="chat")
    assert document.messages == (("user", "a"), ("assistant", "b")) and document.text is None


def test_messages_of_sharegpt_and_text_parts_of_openai_are_pairs_too(tmp_path):
    sharegpt = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    openai = [{"role": "user", "content": parts, "name": None}]
    (tmp_path / "a.jsonl").write_bytes(lines([sharegpt, openai]))
    first, second = (document.messages for document in read(tmp_path / "a.jsonl"))
    assert first == (("system", "s"), ("user", "a"), ("assistant", "b"))
    assert second == (("user", "ab"),)
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    (tmp_path / "a.jsonl").write_bytes(lines([picture, [{"from": "human"}]]))
    assert [detail for *_, detail in errors(tmp_path / "a.jsonl")] == [
        "content of text[0] is a list, not text",
        "text[0] has no field 'value'; the fields are from",
    ]


def test_other_roles_are_read_as_they_are(tmp_path):
    roles = ["system", "user", "tool", "developer", "human", "narrator", "user1", "user_b", "users"]
    messages = [{"role": role, "content": "x"} for role in [*roles, "assistant"]]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": messages}))
    (found,) = read(tmp_path / "a.jsonl")
    assert [role for role, _ in found.messages] == [*roles, "assistant"]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_an_empty_document_is_an_error_of_its_own_kind(tmp_path, write):
    found = read(write(tmp_path, ["a", "", "b"]))
    assert [getattr(one, "text", None) or one.kind for one in found] == ["a", "empty", "b"]


def test_places_are_lines_from_1_and_rows_and_records_from_0(tmp_path):
    places = {
        "text": ["0.txt", "1.txt", "2.txt"],
        "jsonl": ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"],
        "jsonl.gz": ["a.jsonl.gz:1", "a.jsonl.gz:2", "a.jsonl.gz:3"],
        "parquet": [f"a.parquet, row {row}" for row in range(3)],
        "datasets": [f"saved, row {row}" for row in range(3)],
        "array_record": [f"a.array_record, record {record}" for record in range(3)],
    }
    for name, expected in places.items():
        (tmp_path / name).mkdir()
        path = WRITERS[name](tmp_path / name, ["a", "b", "c"])
        for piece_bytes in [1, PIECE_BYTES]:
            assert [
                one.location.removeprefix(f"{tmp_path / name}/") for one in read(path, piece_bytes)
            ] == expected


LINE = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).map(
        lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()
    ),
    st.sampled_from([b"", b" \r", b"{", b"7", b"{}", b'{"text": ""}', b'{"text": "\xff"}']),
)


@settings(max_examples=60)
@given(st.lists(LINE, min_size=1, max_size=12), st.booleans(), st.integers(1, 200), st.data())
def test_any_cut_of_json_lines_gives_the_documents_of_the_whole_file(
    tmp_path_factory, content, closed, piece_bytes, data
):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(b"\n".join(content) + b"\n" * closed + b"\n{")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_BLOCK", data.draw(st.integers(1, 40)))
        found = read(path, piece_bytes)
    expected = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                expected.append((f"{path}:{number}", json.loads(line)["text"]))
            except (ValueError, TypeError, KeyError):
                expected.append((f"{path}:{number}", ""))
    assert [(one.location, getattr(one, "text", "")) for one in found] == expected


def test_a_line_longer_than_pieces_is_read_once(tmp_path):
    values = ["a", "b" * 500_000, "c"]
    path = write_jsonl(tmp_path, values)
    pieces = plan_pieces([str(path)], 1000)
    assert len(pieces) > 400 and texts(path, piece_bytes=1000) == values


def test_remote_files_are_read_like_local_ones(tmp_path):
    system = fsspec.filesystem("memory")
    values = [f"{n} " * n for n in range(1, 40)]
    system.pipe("/formats/a.jsonl", lines(values) + b"{\n")
    system.pipe("/formats/b.jsonl.gz", gzip.compress(lines(values)))
    system.pipe("/formats/c.parquet", write_parquet(tmp_path, values).read_bytes())
    found = read("memory://formats/*", 100)
    assert [one.text for one in found if isinstance(one, Document)] == values * 3
    assert [one.location for one in found if isinstance(one, DocumentError)] == [
        "memory:///formats/a.jsonl:40"
    ]
    system.rm("/formats", recursive=True)


def test_a_byte_order_mark_at_the_start_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(["text"]))
    assert texts(tmp_path / "a.txt") == texts(tmp_path / "a.jsonl") == ["text"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    assert [kind for _, kind, _ in errors(tmp_path / "a.txt")] == ["empty"]


def test_documents_and_errors_cross_processes(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["a"]) + b"{\n")
    found = read(tmp_path / "a.jsonl", 4)
    assert pickle.loads(pickle.dumps(found)) == found and len(found) == 2


def test_broken_utf8_is_an_error_with_the_byte(tmp_path):
    broken = b"\xef\xbb\xbfabc\xffdef"
    (tmp_path / "a.txt").write_bytes(broken)
    expected = ("a.txt", "invalid UTF-8", "byte 0xff at offset 6")
    assert errors(tmp_path / "a.txt") == [expected]
    (tmp_path / "b.jsonl").write_bytes(lines(["a"]) + b'{"text": "\xc3"}\n' + lines(["b"]))
    expected = ("b.jsonl:2", "invalid UTF-8", "byte 0xc3 at column 11")
    assert errors(tmp_path / "b.jsonl", piece_bytes=20) == [expected]
    assert texts(tmp_path / "b.jsonl") == ["a", "b"]
    path = write_array_record(tmp_path, [b"a", b"bc\xff"])
    expected = ("a.array_record, record 1", "invalid UTF-8", "byte 0xff at offset 2")
    assert errors(path) == [expected]


def test_broken_utf8_in_a_table_is_an_error_of_its_row(tmp_path):
    column = pyarrow.array([b"a", b"b\xff", b"c"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    expected = ("a.parquet, row 1", "invalid UTF-8", "byte 0xff at offset 1")
    assert errors(tmp_path / "a.parquet") == [expected]
    assert texts(tmp_path / "a.parquet") == ["a", "c"]


def test_half_of_a_surrogate_pair_is_an_error_and_a_whole_one_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\udc0e"}\n{"text": "a\\ud83d"}\n')
    expected = ("a.jsonl:2", "invalid UTF-8", "\\ud83d is one half of a surrogate pair")
    assert errors(tmp_path / "a.jsonl") == [expected]
    assert texts(tmp_path / "a.jsonl") == ["\U0001f40e"]


USER = {"role": "user"}
BAD_LINES = {
    '{"text": "a" "b"}': ("invalid JSON", "Expecting ',' delimiter at column 14"),
    '{"text": "a"} {}': ("invalid JSON", "Extra data at column 15"),
    '{"text": "a': ("invalid JSON", "Unterminated string starting at column 10"),
    "[" * 100_000: ("invalid JSON", ""),  # deeper than Python
    "7" * 5000: ("invalid JSON", "Exceeds the limit"),
    "[1]": ("wrong type", "the line is a list, not an object"),
    '{"id": 1, "body": "a"}': ("missing field", "no field 'text'; the fields are id, body"),
    "{}": ("missing field", "no field 'text'; the fields are none"),
    json.dumps(dict.fromkeys("abcdefghijkl")): (
        "missing field",
        "a, b, c, d, e, f, g, h, i, j and 2",
    ),
    '{"text": null}': ("wrong type", "field 'text' is null, neither text nor a list of messages"),
    '{"text": 1}': ("wrong type", "field 'text' is a number, neither"),
    '{"text": ["a"]}': ("invalid message", "text[0] is a string, not role and content"),
    json.dumps({"text": [USER]}): (
        "invalid message",
        "text[0] has no field 'content'; the fields are role",
    ),
    json.dumps({"text": [USER | {"content": None}]}): (
        "invalid message",
        "content of text[0] is null, not text",
    ),
    **{
        json.dumps({"text": [USER | {"content": "a"}, {key: role, text: "b"}]}): (
            "invalid message",
            f"text[1] has the role {role!r}, probably for {usual!r}",
        )
        for role, key, text, usual in (
            ("asistant", "role", "content", "assistant"),
            ("Assistant", "role", "content", "assistant"),
            ("assistent", "from", "value", "assistant"),
            ("bot", "role", "content", "assistant"),
            ("gpt", "role", "content", "assistant"),
            ("model", "from", "value", "assistant"),
            ("usr", "role", "content", "user"),
            ("User ", "role", "content", "user"),
            ("sytem", "role", "content", "system"),
        )
    },
    '{"text": []}': ("empty", "no message has a character"),
    json.dumps({"text": [USER | {"content": ""}]}): ("empty", "no message has a character"),
}


@pytest.mark.parametrize(("line", "expected"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_an_invalid_line_is_an_error_with_its_number_and_the_next_is_read(tmp_path, line, expected):
    good = lines(["good"])
    (tmp_path / "a.jsonl").write_bytes(good + b"\n \r\n" + line.encode() + b"\n" + good)
    for piece_bytes in [max(len(good), len(line) // 2), PIECE_BYTES]:
        ((where, kind, detail),) = errors(tmp_path / "a.jsonl", piece_bytes=piece_bytes)
        assert (where, kind) == ("a.jsonl:4", expected[0]) and expected[1] in detail
        assert texts(tmp_path / "a.jsonl", piece_bytes=piece_bytes) == ["good"] * 2


@pytest.mark.parametrize("write", [write_parquet, write_datasets])
def test_a_field_missing_in_a_table_is_one_error(tmp_path, write):
    path = write(tmp_path, ["a", "b"])
    expected = (path.name, "missing field", "no field 'body'; the fields are id, text")
    assert errors(path, field="body") == [expected]


def test_a_null_and_a_number_in_a_table_are_errors_of_their_rows(tmp_path):
    ((where, kind, detail),) = errors(write_parquet(tmp_path, ["a", "b", None]))
    assert (where, kind) == ("a.parquet, row 2", "wrong type") and "'text' is null" in detail
    assert {kind for _, kind, _ in errors(tmp_path / "a.parquet", field="id")} == {"wrong type"}


def random_texts(count: int) -> list[str]:
    """Texts that do not compress into nothing."""
    return [f"{number} {pow(7, number, 10**900 + 7)}" for number in range(1000, 1000 + count)]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_truncated_stream_keeps_the_lines_before_the_cut_and_is_one_error(tmp_path, suffix):
    values = random_texts(2000)
    path = write_jsonl(tmp_path, values, suffix)
    data = path.read_bytes()
    for cut in [len(data) - 1, len(data) * 9 // 10, 3, 0]:
        path.write_bytes(data[:cut])
        # find_files refuses a lone empty file.
        entry = FileRange(str(path), "jsonl", 0, cut)
        *kept, fault = read_documents(entry, "text")
        assert [document.text for document in kept] == values[: len(kept)]
        assert len(kept) > 500 or cut < 4
        assert (fault.location, fault.kind) == (str(path), "truncated file")
        assert fault.detail == f"the {suffix} stream has no end after {len(kept)} lines"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_truncated_text_is_no_document(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"text" * 1000)[:-1])
    ((where, kind, detail),) = errors(path)
    assert (where, kind) == (path.name, "truncated file") and "bytes of text" in detail


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_cut_between_members_and_zeros_at_the_end_are_legal(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    members = [COMPRESS[suffix](lines([value])) for value in ["a", "b"]]
    for end in [b"", b"\0" * 2**18]:
        path.write_bytes(b"".join(members) + end)
        assert texts(path) == ["a", "b"] and not errors(path)
    path.write_bytes(b"\0" * 100)
    assert [kind for _, kind, _ in errors(path)] == ["corrupt file"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_flipped_byte_in_a_stream_is_one_error(tmp_path, suffix):
    if suffix == ".zst":  # its checksum is an option
        data = zstandard.ZstdCompressor(write_checksum=True).compress(lines(random_texts(300)))
    else:
        data = COMPRESS[suffix](lines(random_texts(300)))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data[:2000] + bytes([data[2000] ^ 255]) + data[2001:])
    *_, last = errors(path)
    assert last[:2] == (path.name, "corrupt file") and "\n" not in last[2]


def test_a_zstd_stream_with_a_long_window_is_read(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(lines(["a"])) + compressor.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(data)
    assert texts(tmp_path / "a.jsonl.zst") == ["a"]


def damages(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    half = len(data) // 2
    return {
        "cut": data[:half],
        "flipped": data[:half]
        + bytes(255 - byte for byte in data[half : half + 64])
        + data[half + 64 :],
        "nonsense": b"nonsense " * 100,
    }


@pytest.mark.parametrize("damage", ["cut", "flipped", "nonsense"])
def test_a_damaged_table_is_an_error_that_names_it_and_the_rows_before_are_kept(tmp_path, damage):
    values = random_texts(400)
    table = pyarrow.table({"text": values})
    for name, options in {
        "a": {},
        "b": {"compression": "none", "write_page_checksum": True},
    }.items():
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(table, path, row_group_size=100, use_dictionary=False, **options)
        path.write_bytes(damages(path)[damage])
        *kept, fault = read(path)
        assert [document.text for document in kept] == values[: len(kept)]
        assert (fault.location, fault.kind) == (str(path), "corrupt file")
        assert damage != "flipped" or (kept and f"after row {len(kept)}" in fault.detail)


@pytest.mark.parametrize("damage", ["cut", "flipped", "nonsense"])
def test_damaged_records_are_an_error_that_names_them_and_those_before_are_kept(tmp_path, damage):
    values = random_texts(400)
    path = write_array_record(tmp_path, values, "group_size:10")
    path.write_bytes(damages(path)[damage])
    *kept, fault = read(path)
    assert [document.text for document in kept] == values[: len(kept)]
    assert (fault.location, fault.kind) == (str(path), "corrupt file")
    assert damage != "flipped" or (kept and f"at record {len(kept)}; records to" in fault.detail)


@pytest.mark.parametrize("broken", ["data-00000-of-00001.arrow", "state.json"])
@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_a_damaged_datasets_folder_is_an_error_that_names_it(tmp_path, broken, content):
    path = write_datasets(tmp_path, ["a"])
    entry = FileRange(str(path), "datasets", 0, 1)
    (path / broken).unlink()
    if content is not None:
        (path / broken).write_bytes(content)
    ((where, kind),) = [(fault.location, fault.kind) for fault in read_documents(entry, "text")]
    assert (where, kind) == (str(path), "corrupt file")


def test_rows_of_a_shuffled_dataset_are_in_its_order(tmp_path):
    dataset = Dataset.from_dict({"text": list("abcdef")}).select([4, 2, 0])
    dataset.save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved", piece_bytes=300) == ["e", "c", "a"]


def test_a_deleted_file_raises_file_not_found(tmp_path):
    for format in ["text", "jsonl", "parquet", "array_record"]:
        with pytest.raises(FileNotFoundError):
            list(read_documents(FileRange(str(tmp_path / "gone"), format, 1, 2), "text"))


def test_the_report_of_damage_is_one_short_line():
    damage = DamagedFileError("corrupt file", "first\n  second " + "x" * 1000)
    assert damage.detail.startswith("first second x") and len(damage.detail) == 300


def test_lines_are_read_in_bounded_memory(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path, ["x" * 1000] * 1000)
    reads = []
    blocks = text.read_blocks
    monkeypatch.setattr(
        text,
        "read_blocks",
        lambda *args: (reads.append(block) or block for block in blocks(*args)),
    )
    entry = FileRange(str(path), "jsonl", 0, path.stat().st_size)
    list(itertools.islice(read_documents(entry, "text"), 10))
    assert len(reads) == 1 and len(reads[0]) < path.stat().st_size
