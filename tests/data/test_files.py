"""Find input files, fingerprint them and cut them into pieces."""

import importlib
import os
import sysconfig
from itertools import pairwise
from pathlib import Path

import fsspec
import hypothesis.strategies as st
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from datasets import Dataset, disable_progress_bars
from hypothesis import given
from pyarrow import parquet

from data import files as module
from data.files import DataError, find_files, fingerprint, input_bytes
from data.formats.base import FileRange
from data.formats.pieces import known_suffixes, plan_pieces

disable_progress_bars()


@pytest.fixture
def memory():
    """An empty fsspec file system in memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def write(folder: Path, **sizes: int) -> list[str]:
    """Files `name.suffix`, written `name_suffix=size`."""
    paths = []
    for name, size in sizes.items():
        path = folder / name.replace("_", ".", 1)
        path.write_bytes(b"x" * size)
        paths.append(str(path))
    return sorted(paths)


def entries(paths, piece_bytes) -> list[FileRange]:
    return [entry for piece in plan_pieces(paths, piece_bytes) for entry in piece.ranges]


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    files = [Path(path) for path in find_files(None)]
    library = Path(sysconfig.get_paths()["stdlib"])
    assert library / "argparse.py" in files and library / "json" / "decoder.py" in files
    assert all(path.is_relative_to(library) and path.suffix == ".py" for path in files)
    folders = {name for path in files for name in path.relative_to(library).parts[:-1]}
    assert not {"test", "tests", "site-packages"} & folders
    assert sum(path.stat().st_size for path in files) > 5e6


def test_documents_are_in_the_order_of_their_paths(tmp_path):
    names = ["b.txt", "a.txt", "deep/er/c.txt", "deep/a.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_files(str(tmp_path / "**" / "*.txt"))
    assert found == sorted(str(tmp_path / name) for name in names)


def test_a_file_of_two_globs_is_one_file(tmp_path):
    paths = write(tmp_path, a_txt=1, b_txt=1)
    assert find_files([str(tmp_path / "b*"), str(tmp_path / "*.txt")]) == paths


def test_folders_that_match_are_not_documents_and_links_are(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "file.txt")
    found = [str(tmp_path / "file.txt"), str(tmp_path / "link.txt")]
    assert find_files(str(tmp_path / "*.txt")) == found


def test_hidden_files_match_only_when_named(tmp_path, memory):
    for name in [".hidden", ".git/config", "shown"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
        memory.pipe(f"/top/{name}", b"text")
    for root in [str(tmp_path), "memory:///top"]:
        assert find_files(f"{root}/**/*") == [f"{root}/shown"]
        assert find_files(f"{root}/.hid*") == [f"{root}/.hidden"]
        assert find_files(f"{root}/.git/*") == [f"{root}/.git/config"]


def test_a_file_whose_name_looks_like_a_glob_is_found_by_its_name(tmp_path):
    (path := tmp_path / "part[1].txt").write_text("text")
    assert find_files(str(path)) == [str(path)]


def test_local_paths_become_plain_and_absolute(tmp_path, monkeypatch):
    paths = write(tmp_path, a_txt=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for pattern in ["*.txt", "./a.txt", "~/*.txt", f"file://{tmp_path}/*.txt"]:
        assert find_files(pattern) == paths


def test_remote_paths_keep_their_protocol(memory):
    for name in ["b.txt", "a.txt", "deep/c.txt"]:
        memory.pipe(f"/top/{name}", b"text")
    assert find_files("memory://top/*.txt") == ["memory:///top/a.txt", "memory:///top/b.txt"]
    assert find_files("memory://top/**/c.txt") == ["memory:///top/deep/c.txt"]
    assert input_bytes(find_files("memory://top/a.txt")) == 4


@pytest.mark.parametrize("root", ["", "memory://"])
def test_a_glob_that_matches_nothing_is_refused_with_a_remedy(tmp_path, memory, root):
    pattern = f"{root}{tmp_path}/*.nothing"
    there = write(tmp_path, a_txt=1)
    for files in [pattern, [there[0], pattern]]:
        with pytest.raises(
            DataError, match=r"matches no file; give a glob such as .*null"
        ) as error:
            find_files(files, "data.sources.code.files")
        assert f"data.sources.code.files={pattern!r}" in str(error.value)


def test_the_name_of_a_dataset_on_the_hub_is_answered_with_that_of_a_split():
    with pytest.raises(DataError, match=r"name its split: user/stories:train$"):
        find_files("user/stories")


@pytest.mark.parametrize(
    "error", [OSError("offline"), RuntimeError("no\nroute"), FileNotFoundError("user/stories")]
)
@pytest.mark.parametrize("rest", ["", "@main/data/*.parquet", "/data/train.jsonl"])
def test_a_hub_that_does_not_answer_is_one_line_with_how_to_download_the_dataset(
    monkeypatch, error, rest
):
    class Hub:
        def isdir(self, path):
            raise error

    monkeypatch.setattr(module, "url_to_fs", lambda path: (Hub(), path))
    with pytest.raises(DataError) as refused:
        find_files(f"hf://datasets/user/stories{rest}")
    line = " ".join(str(error).split())
    assert str(refused.value) == (
        f"data.files='hf://datasets/user/stories{rest}': the Hugging Face hub did not answer "
        f"({type(error).__name__}: {line}); on a machine with access run "
        "`hf download --repo-type dataset user/stories --local-dir FOLDER`, and set the key to its "
        "files"
    )


def test_no_glob_at_all_is_refused():
    with pytest.raises(DataError, match=r"data.files=\[\] matches no file; give a glob"):
        find_files([])


def test_files_without_a_byte_are_refused_with_a_remedy(tmp_path):
    write(tmp_path, a_txt=0, b_txt=0)
    with pytest.raises(DataError, match=r"2 file\(s\), all empty; give files with text") as error:
        find_files(str(tmp_path / "*"))
    assert f"data.files={str(tmp_path / '*')!r}" in str(error.value)


def test_a_folder_stands_for_the_files_of_known_formats_in_it_or_else_for_all(tmp_path, memory):
    folder = tmp_path / "[a]"  # not a glob
    for name in ("b.txt", "deep/a.JSONL.gz", "deep/er/c.parquet", "README.md", ".git/config.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
        memory.pipe(f"/top/{name}", b"text")
    known = ["b.txt", "deep/a.JSONL.gz", "deep/er/c.parquet"]
    for root in (str(folder), f"{folder}/", "memory:///top"):
        place = root.rstrip("/")
        found = find_files(root, suffixes=known_suffixes())
        assert found == [f"{place}/{name}" for name in known]
        # Of a folder without them, all.
        assert find_files(root) == sorted(f"{place}/{name}" for name in [*known, "README.md"])
    assert find_files(f"{folder}/deep/er", suffixes={".txt"}) == [f"{folder}/deep/er/c.parquet"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder has no file; put the texts there"):
        find_files(str(tmp_path / "empty"))


def test_a_folder_that_datasets_saved_is_one_file_also_below_another(tmp_path, memory):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "in" / "saved")
    for folder in ("in/saved", "in"):
        found = find_files(str(tmp_path / folder), suffixes={".txt"})
        assert found == [str(tmp_path / "in" / "saved")]
    for path in (tmp_path / "in" / "saved").iterdir():
        memory.pipe(f"/saved/{path.name}", path.read_bytes())
    with pytest.raises(DataError, match=r"must be on a local disk; copy it"):
        find_files("memory://saved")


def test_a_folder_of_several_datasets_is_refused_with_their_names(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ["train", "test"]:
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"several datasets; add the name of one: test, train"):
        find_files(str(tmp_path))


def test_an_unknown_protocol_is_refused():
    with pytest.raises(DataError, match=r"nope://a: ValueError: Protocol not known: nope; correct"):
        find_files("nope://a")


@pytest.mark.parametrize(
    ("protocol", "library", "extra"), [("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")]
)
def test_a_missing_file_system_is_named_with_its_extra(monkeypatch, protocol, library, extra):
    def missing(path):
        raise ImportError(f"Install {library}")

    monkeypatch.setattr(module, "url_to_fs", missing)
    message = rf"{protocol}://b/\*\.txt needs a library \(Install {library}\); pip install -e .\.\["
    with pytest.raises(DataError, match=rf"{message}{extra}\]"):
        find_files(f"{protocol}://b/*.txt")


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch):
    paths = write(tmp_path, a_parquet=10)

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"needs the library pyarrow .*; pip install -e .\.\[data"):
        plan_pieces(paths)


def test_the_fingerprint_changes_with_path_size_and_time_and_with_nothing_else(tmp_path):
    one, two = write(tmp_path, a_txt=3, b_txt=3)
    base = fingerprint([one, two])
    seen = {base, fingerprint([one]), fingerprint([two, one])}
    Path(two).write_bytes(b"x" * 4)
    seen.add(fingerprint([one, two]))
    os.utime(two, ns=(1, 1))
    seen.add(fingerprint([one, two]))
    os.utime(two, ns=(1, 2))
    seen.add(fingerprint([one, two]))
    assert len(seen) == 6
    assert fingerprint([one, two]) == fingerprint([one, two]) != base


def test_the_fingerprint_of_a_remote_file_changes_with_a_new_version(memory):
    memory.pipe("/a.txt", b"text")
    before = fingerprint(["memory://a.txt"])
    assert fingerprint(["memory://a.txt"]) == before
    memory.pipe("/a.txt", b"TEXT")
    assert fingerprint(["memory://a.txt"]) != before


def test_the_fingerprint_of_a_datasets_folder_is_that_of_its_files(tmp_path):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    before = fingerprint([path])
    assert input_bytes([path]) == sum(f.stat().st_size for f in (tmp_path / "saved").iterdir())
    os.utime(tmp_path / "saved" / "data-00000-of-00001.arrow", ns=(1, 1))
    assert fingerprint([path]) != before


def test_formats_follow_from_the_suffix_under_a_compression_too(tmp_path):
    formats = {
        "a.jsonl": "jsonl",
        "a.NDJSON": "jsonl",
        "a.json.gz": "json",
        "a.jsonl.zst": "jsonl",
        "a.txt": "text",
        "a.py.xz": "text",
        "a.bz2": "text",
        "a": "text",
    }
    for name, format in formats.items():
        (tmp_path / name).write_bytes(b"x" * 10)
        whole = format == "text" or "." in name[2:]
        found = entries([str(tmp_path / name)], 4)
        assert {entry.format for entry in found} == {format}
        assert [(e.begin, e.end) for e in found] == (
            [(0, 10)] if whole else [(0, 4), (4, 8), (8, 10)]
        )


def test_a_table_inside_a_compression_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"is \.parquet inside \.gz; decompress it first"):
        plan_pieces(write(tmp_path, **{"a_parquet.gz": 9}))


def test_remote_array_records_are_refused(memory):
    memory.pipe("/a.array_record", b"x")
    with pytest.raises(DataError, match=r"must be on a local disk; copy it"):
        plan_pieces(["memory://a.array_record"])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 50))
def test_pieces_hold_every_byte_once_in_order_and_no_more_than_asked(
    tmp_path_factory, sizes, piece_bytes
):
    folder = tmp_path_factory.mktemp("sizes")
    paths = write(folder, **{f"{n}_jsonl": size for n, size in enumerate(sizes)})
    pieces = plan_pieces(paths, piece_bytes)
    assert pieces == plan_pieces(paths, piece_bytes)
    held = [sum(entry.end - entry.begin for entry in piece.ranges) for piece in pieces]
    assert sum(held) == sum(sizes) and all(0 < size <= piece_bytes for size in held)
    assert len(held) <= 2 * sum(sizes) / piece_bytes + 1  # two neighbours are more than one unit
    parts = [entry for piece in pieces for entry in piece.ranges]
    assert [entry.path for entry in parts] == sorted(entry.path for entry in parts)
    for a, b in pairwise(parts):
        assert b.begin == (a.end if a.path == b.path else 0)


def test_small_files_share_a_piece_and_large_texts_are_whole(tmp_path):
    paths = write(tmp_path, a_txt=3, b_txt=3, c_txt=30, d_txt=0, e_txt=3)
    pieces = plan_pieces(paths, 10)
    held = [[(Path(e.path).name, e.begin, e.end) for e in piece.ranges] for piece in pieces]
    assert held == [
        [("a.txt", 0, 3), ("b.txt", 0, 3)],
        [("c.txt", 0, 30)],
        [("d.txt", 0, 0), ("e.txt", 0, 3)],
    ]


def test_tables_are_cut_at_row_groups_records_and_rows(tmp_path):
    texts = [f"{n} " * 200 for n in range(60)]
    table = pyarrow.table({"text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10, compression="none")
    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1,uncompressed")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    Dataset(table).save_to_disk(tmp_path / "saved")
    for name, format, count in [
        ("a.parquet", "parquet", 6),
        ("a.array_record", "array_record", 60),
        ("saved", "datasets", 60),
    ]:
        paths = find_files(str(tmp_path / name))
        cut = entries(paths, input_bytes(paths) // 3 + 1)
        assert {entry.format for entry in cut} == {format} and len(cut) == 3
        assert cut[0].begin == 0 and cut[-1].end == count
        assert all(a.end == b.begin for a, b in pairwise(cut))
        assert entries(paths, 2**30) == [FileRange(paths[0], format, 0, count)]


def test_two_colons_are_part_of_a_name(tmp_path):
    for name in ("c", "c::d.txt"):
        (tmp_path / name).write_text(name)
    assert find_files(str(tmp_path / "c*d.txt")) == [str(tmp_path / "c::d.txt")]
    assert find_files(str(tmp_path / "c::d.txt")) == [str(tmp_path / "c::d.txt")]


def test_a_glob_finds_a_datasets_folder_beside_files(tmp_path):
    Dataset.from_dict({"text": ["one"]}).save_to_disk(tmp_path / "set")
    (tmp_path / "a.txt").write_text("two")
    assert find_files(str(tmp_path / "*")) == [str(tmp_path / "a.txt"), str(tmp_path / "set")]
    assert find_files(str(tmp_path / "**")) == [str(tmp_path / "a.txt"), str(tmp_path / "set")]
