"""Text of any size is read in bounded memory: large texts in parts, lines up to a limit."""

import bz2
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, slow
from hypothesis import given
from hypothesis import strategies as st

from data.config import SourceConfig
from data.files import DataError
from data.formats import text
from data.formats.base import Document, DocumentError, FileRange, read_documents
from data.formats.pieces import plan_pieces
from data.prepare import prepare
from data.store_job import StoreJob
from data.tokenizers.byte_level import ByteTokenizer


def read(*ranges: FileRange) -> list[Document | DocumentError]:
    return [document for entry in ranges for document in read_documents(entry, "text")]


def whole(path: Path, format: str) -> FileRange:
    return FileRange(str(path), format, 0, path.stat().st_size)


def pieces(content: bytes, size: int) -> list[str]:
    """The documents by definition: a line belongs to the multiple of `size` that it starts in."""
    found: dict[int, bytes] = {}
    at = 0
    for line in content.splitlines(True):
        found[at // size] = found.get(at // size, b"") + line
        at += len(line)
    return [piece.decode() for piece in found.values()]


LINES = st.lists(st.sampled_from(["", "a", "žluť", "x" * 30, "y" * 7]), min_size=1, max_size=30)


@given(lines=LINES, size=st.integers(40, 90), block=st.integers(1, 50), closed=st.booleans())
def test_a_large_text_is_cut_at_the_ends_of_lines_however_it_is_stored(
    tmp_path_factory, lines, size, block, closed
):
    content = "\n".join([*lines, "end" + "\n" * closed]).encode()
    folder = tmp_path_factory.mktemp("large")
    (plain := folder / "a.txt").write_bytes(content)
    (folder / "b.txt.gz").write_bytes(gzip.compress(content))
    (folder / "c.bz2").write_bytes(bz2.compress(content))
    begins = range(0, len(content), size)
    parts = [FileRange(str(plain), "text", at, min(at + size, len(content))) for at in begins]
    stored = [parts, *([whole(folder / name, "text")] for name in ("a.txt", "b.txt.gz", "c.bz2"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MAX_BYTES", size)
        patch.setattr(text, "_BLOCK", block)
        for ranges in stored:
            assert [document.text for document in read(*ranges)] == pieces(content, size)


def test_only_a_text_above_the_limit_is_cut_in_the_plan(tmp_path):
    path, size = tmp_path / "a.txt", text.MAX_BYTES
    for length, ends in [
        (size, [size]),
        (size + 1, [size, size + 1]),
        (10**12, [*range(size, 10**12, size), 10**12]),
    ]:
        with open(path, "wb") as file:
            file.truncate(length)  # a sparse file
        ranges = [entry for piece in plan_pieces([str(path)]) for entry in piece.ranges]
        assert [entry.end for entry in ranges] == ends
        assert [entry.begin for entry in ranges] == [0, *ends[:-1]]
    path.rename(tmp_path / "a.txt.gz")
    assert len(plan_pieces([str(tmp_path / "a.txt.gz")])) == 1


def test_bytes_that_are_not_utf8_are_at_their_offset_in_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_BYTES", 50)
    (path := tmp_path / "a.txt").write_bytes(b"x" * 59 + b"\n" + b"y" * 30 + b"\xff")
    first, error = read(whole(path, "text"))
    assert first.text == "x" * 59 + "\n"
    assert error.detail == "byte 0xff at offset 90"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_text_line_above_the_limit_is_an_error_with_its_place(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(text, "MAX_BYTES", 50)
    monkeypatch.setattr(text, "_BLOCK", 8)
    content = b"a\n" + b"b" * 200 + b"\nc\n"
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    (error,) = read(whole(path, "text"))
    assert (error.kind, error.location) == ("too long", str(path))
    assert error.detail == "the line at offset 2 has more than 50 bytes"


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    block=st.integers(1, 70),
    piece_bytes=st.integers(1, 100),
)
def test_a_json_line_above_the_limit_is_an_error_and_all_others_are_read(
    tmp_path_factory, sizes, block, piece_bytes
):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [json.dumps({"text": "x" * size}) for size in sizes]
    path.write_text("\n".join(lines) + "\n")
    expected = []
    for number, line in enumerate(lines, 1):
        what = "too long" if len(line) > 40 else json.loads(line)["text"] or "empty"
        expected.append((f"{path}:{number}", what))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MAX_BYTES", 40)
        patch.setattr(text, "_BLOCK", block)
        pieces = plan_pieces([str(path)], piece_bytes)
        found = read(*(entry for piece in pieces for entry in piece.ranges))
    got = [getattr(one, "kind", None) or getattr(one, "text", None) for one in found]
    assert list(zip((one.location for one in found), got, strict=True)) == expected


def test_a_line_that_is_too_long_stops_the_preparation_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "' + "b" * 100 + '"}\n')
    source = SourceConfig(files=str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError) as refused:
        prepare(StoreJob("text", source, ByteTokenizer(), "raise"), cache=tmp_path / "cache")
    assert str(refused.value) == (
        f"{tmp_path / 'a.jsonl'}:2: too long: the line has more than 100 bytes; divide it into "
        "several documents, or use data.on_error=skip"
    )


READ = """
import resource, sys
from data.formats.base import FileRange, read_documents
from data.formats import records, text
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
path, format, end = sys.argv[1], sys.argv[2], int(sys.argv[3])
before, kinds = peak(), []
for document in read_documents(FileRange(path, format, 0, end), "text"):
    kinds.append(getattr(document, "kind", "text"))
    del document
print(*kinds[-2:], peak() - before)
"""


@pytest.mark.parametrize(
    ("name", "last"),
    [("a.txt", "too long"), ("a.jsonl", "too long text"), slow("b.txt", "text text")],
)
@pytest.mark.costly
def test_a_file_of_a_gibibyte_is_read_in_a_fraction_of_its_size(tmp_path, name, last):
    path, size = tmp_path / name, 2**30
    with open(path, "wb") as file:
        if name == "b.txt":  # many lines
            block = (b"x" * 1023 + b"\n") * 2**10
            for _ in range(size // len(block)):
                file.write(block)
        else:  # one line without an end, and in JSON lines a document after it
            file.truncate(size)
            if name == "a.jsonl":
                file.seek(size)
                file.write(b'\n{"text": "last"}\n')
    command = [sys.executable, "-c", READ, str(path), path.suffix[1:].replace("txt", "text")]
    command.append(str(path.stat().st_size))
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *kinds, peak = run.stdout.rsplit(" ", 1)
    assert kinds == [last]
    # The text that is read, the document that is cut from it, and its characters.
    assert int(peak) < 4 * text.MAX_BYTES < size / 2, f"{int(peak) >> 20} MiB"
