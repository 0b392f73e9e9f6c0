"""From files to tokens on disk: what is found, how bytes become ids, how a store is kept."""

import sysconfig
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from data.pipeline import DataConfig, Rows
from data.source import find_files
from data.store import digest_files, open_store
from data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.fixture
def texts(tmp_path) -> list[Path]:
    """Three small files, the middle one empty."""
    for name, text in {"a.txt": "alpha", "b.txt": "", "c.txt": "gamma\n"}.items():
        (tmp_path / name).write_text(text)
    return find_files(str(tmp_path / "*.txt"))


def is_built(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_the_default_corpus_is_the_standard_library_without_its_tests():
    files = find_files(None)
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
    assert found == sorted(tmp_path / name for name in names)


def test_folders_that_match_are_not_documents(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "file.txt").write_text("text")
    assert find_files(str(tmp_path / "*.txt")) == [tmp_path / "file.txt"]


def test_a_glob_that_matches_nothing_is_refused_with_a_remedy(tmp_path):
    pattern = str(tmp_path / "*.nothing")
    with pytest.raises(ValueError, match=r"matches no file; give a glob such as .*null") as error:
        find_files(pattern)
    assert f"data.files={pattern!r}" in str(error.value)


def test_files_without_a_byte_are_refused_with_a_remedy(tmp_path):
    for name in "ab":
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"2 file\(s\), all empty; give files with text") as error:
        find_files(str(tmp_path / "*"))
    assert f"data.files={str(tmp_path / '*')!r}" in str(error.value)


@pytest.mark.parametrize(("fraction", "need"), [(0.5, 17), (0.0, 9)])
def test_text_too_short_for_the_rows_is_refused_and_one_token_more_is_enough(
    tmp_path, fraction, need
):
    def rows(num_bytes: int) -> Rows:
        (tmp_path / "a.txt").write_text("x" * num_bytes)
        return Rows(
            DataConfig(
                files=str(tmp_path / "a.txt"),
                sequence_length=8,
                eval_fraction=fraction,
                cache_dir=str(tmp_path / "cache"),
            )
        )

    with pytest.raises(ValueError, match=f"data.sequence_length=8 need at least {need}; ") as error:
        rows(need - 2)  # and the end of text
    assert f"{str(tmp_path / 'a.txt')!r} holds {need - 1} tokens" in str(error.value)
    assert "give more text or shorter rows" in str(error.value)
    assert rows(need - 1).num_train == 1


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_the_round_trip_through_ids(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text.encode())) == text


@given(st.binary())
def test_bytes_survive_as_ids_and_show_as_replacements_where_they_are_not_utf8(data):
    ids = TOKENIZER.encode(data)
    assert ids.dtype == np.uint16 and ids.tolist() == list(data)
    assert TOKENIZER.decode(ids) == data.decode("utf-8", errors="replace")


def test_decoding_stops_at_the_first_id_that_is_no_byte():
    assert TOKENIZER.decode(np.array([104, 105, TOKENIZER.eos_id, 120])) == "hi"
    assert TOKENIZER.decode(np.array([104, 263, 120])) == "h"
    assert TOKENIZER.eos_id < TOKENIZER.vocab_size


def test_the_stream_holds_each_document_closed_and_leaves_out_empty_ones(texts, tmp_path):
    stream = open_store(texts, TOKENIZER, tmp_path / "cache")
    assert stream.dtype == np.uint16 and not stream.flags.writeable
    assert stream.tolist() == [*b"alpha", 256, *b"gamma\n", 256]


def test_a_store_is_built_once_and_then_read(texts, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = open_store(texts, TOKENIZER, cache)
    monkeypatch.setattr(np, "save", lambda *_: pytest.fail("built a second time"))
    stamp = (cache / is_built(cache)[0] / "tokens.npy").stat().st_mtime_ns
    np.testing.assert_array_equal(open_store(texts, TOKENIZER, cache), first)
    assert (cache / is_built(cache)[0] / "tokens.npy").stat().st_mtime_ns == stamp
    assert len(is_built(cache)) == 1


def test_a_builder_that_dies_leaves_nothing_that_is_read(texts, tmp_path, monkeypatch):
    def die(file, tokens):
        Path(file).write_bytes(b"half a store")
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "save", die)
        open_store(texts, TOKENIZER, cache)
    assert open_store(texts, TOKENIZER, cache).tolist() == [*b"alpha", 256, *b"gamma\n", 256]


def test_of_two_builders_at_once_one_store_stays_and_both_read_it(texts, tmp_path, monkeypatch):
    cache, save, others = tmp_path / "cache", np.save, []

    def overtaken(file, tokens):
        save(file, tokens)
        monkeypatch.setattr(np, "save", save)
        others.append(open_store(texts, TOKENIZER, cache))

    monkeypatch.setattr(np, "save", overtaken)
    mine = open_store(texts, TOKENIZER, cache)
    assert len(others) == 1 and len(is_built(cache)) == 1
    np.testing.assert_array_equal(mine, others[0])


def test_the_digest_changes_with_content_name_border_and_order(tmp_path):
    def digest(*files: tuple[str, str]) -> str:
        for name, text in files:
            (tmp_path / name).write_text(text)
        return digest_files([tmp_path / name for name, _ in files], TOKENIZER)

    base = digest(("a", "xy"), ("b", "z"))
    assert digest(("a", "xy"), ("b", "z")) == base
    others = [
        digest(("a", "xy"), ("b", "Z")),
        digest(("a", "xy"), ("c", "z")),
        digest(("a", "x"), ("b", "yz")),
        digest(("b", "z"), ("a", "xy")),
        digest(("a", "xy")),
    ]
    assert len({base, *others}) == 6
