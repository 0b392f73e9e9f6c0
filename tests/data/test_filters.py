"""Filters leave out the documents that a plain loop over the input leaves out."""

import itertools
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare as preparation
from data.config import SourceConfig
from data.duplicates import _SortedKeys
from data.engine import run_tasks
from data.files import DataError
from data.filters import KEY, NO_FILTERS, parse_filters, register_filter
from data.formats.pieces import plan_pieces
from data.prepare import build
from data.store import Store
from data.store_job import StoreJob
from data.tokenizers.byte_level import ByteTokenizer

SPECS = ["length:3..8", "regex:b+c", "duplicates"]


@register_filter("starts_with")
def starts_with(argument):
    return partial(_starts_with, argument)


def _starts_with(argument, text):
    return text.startswith(argument)


KEEP_ALL = lambda text: True  # noqa: E731 (worker processes cannot receive it)


def is_good(text):
    if text == "bad":
        raise KeyError("no such word")
    return "x" not in text


def write(folder: Path, texts: list[str]) -> SourceConfig:
    folder.mkdir()
    half = len(texts) // 2
    for name, part in (("a.jsonl", texts[:half]), ("b.jsonl", texts[half:])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return SourceConfig(files=str(folder / "*"))


def job_of(source: SourceConfig, specs: list[str], *, is_paired: bool = False) -> StoreJob:
    filters = parse_filters(specs)
    return StoreJob("text", source, ByteTokenizer(), "raise", is_paired=is_paired, filters=filters)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(store: Store) -> list[str]:
    ends = [0, *store.ends[:].tolist()]
    parts = (store.tokens[a : b - 1] for a, b in itertools.pairwise(ends))
    return [bytes(part.astype(np.uint8)).decode() for part in parts]


texts_of = st.lists(st.text("abc", min_size=1, max_size=9), min_size=2, max_size=60)


@given(texts=texts_of, piece_bytes=st.integers(20, 400))
@settings(max_examples=40, deadline=None)
def test_a_plain_loop_keeps_the_same_documents(tmp_path_factory, texts, piece_bytes) -> None:
    folder = tmp_path_factory.mktemp("filters")
    long, found = [t for t in texts if 3 <= len(t) <= 8], [t for t in texts if re.search("b+c", t)]
    kept = [*dict.fromkeys(t for t in long if t not in found)]
    job = job_of(write(folder / "input", texts), SPECS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "plan_pieces", partial(plan_pieces, piece_bytes=piece_bytes))
        if not kept:
            with pytest.raises(DataError, match=r"no document has a token; .*; give other filters"):
                build(job, folder / "store")
            assert not (folder / "store.building").exists()
            return
        store = build(job, folder / "store")
    assert documents(store) == kept
    counts = {kind: skip.count for kind, skip in store.info.skipped.items()}
    by_pattern = sum(t in found for t in long)
    expected = {
        "left out by length:3..8": len(texts) - len(long),
        "left out by regex:b+c": by_pattern,
        "left out by duplicates": len(long) - by_pattern - len(kept),
    }
    assert counts == {kind: count for kind, count in expected.items() if count}
    assert {path.suffix for path in store.folder.iterdir()} == {".bin", ".crc32", ".json"}
    assert "seen.bin" not in content(store.folder)


@pytest.mark.parametrize("killed_after", [0, 1, 4])
@pytest.mark.costly
def test_an_interrupted_preparation_continues_to_the_same_bytes(
    tmp_path, monkeypatch, killed_after
) -> None:
    monkeypatch.setattr(preparation, "plan_pieces", partial(plan_pieces, piece_bytes=100))
    texts = [f"text {n % 13}" for n in range(60)]
    job = job_of(write(tmp_path / "input", texts), ["duplicates", "regex:7"])

    def killed(pieces, settings):
        for number, found in enumerate(run_tasks(pieces, settings)):
            if number == killed_after:
                raise OSError("no space")
            yield found

    with pytest.raises(OSError, match="no space"):
        build(job, tmp_path / "store", engine=killed)
    if killed_after:  # what a kill between the keys and the journal leaves
        with open(tmp_path / "store.building/seen.bin", "ab") as file:
            file.write(b"x" * 37)
    store = build(job, tmp_path / "store")
    assert documents(store) == [f"text {n}" for n in range(13) if n != 7]
    together = partial(run_tasks, workers=2)
    assert content(store.folder) == content(build(job, tmp_path / "other", engine=together).folder)


def test_lost_keys_of_an_interrupted_preparation_are_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(preparation, "plan_pieces", partial(plan_pieces, piece_bytes=30))
    job = job_of(write(tmp_path / "input", ["one", "two", "three"]), ["duplicates"])

    def killed(pieces, settings):
        yield next(run_tasks(pieces, settings))
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        build(job, tmp_path / "store", engine=killed)
    (tmp_path / "store.building/seen.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"seen\.bin is cut short; delete .*store\.building"):
        build(job, tmp_path / "store")


def test_chats_and_pairs_are_compared_as_a_whole(tmp_path) -> None:
    def chat(*texts: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": role, "content": t} for role, t in zip(roles, texts, strict=True)]

    chats = [chat("q", "a"), chat("q", "b"), chat("q", "a"), chat("q\na", ""), chat("x", "y")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"text": c}) + "\n" for c in chats))
    source = SourceConfig(files=str(tmp_path / "chats.jsonl"))
    store = build(job_of(source, ["duplicates", "regex:x"]), tmp_path / "chats")
    assert store.info.num_documents == 3
    pairs = [("a", "b"), ("b", "a"), ("a", "b"), ("a", "c")]
    lines = [{"prompt": "q", "chosen": one, "rejected": two} for one, two in pairs]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = job_of(SourceConfig(files=str(tmp_path / "pairs.jsonl")), ["duplicates"], is_paired=True)
    store = build(job, tmp_path / "pairs")
    answers = [re.findall(r"assistant\n(\w)", text)[0] for text in documents(store)]
    assert answers == ["a", "b", "b", "a", "a", "c"]
    assert store.info.skipped["left out by duplicates"].count == 1  # pair


def test_functions_from_outside_decide_also_in_worker_processes(tmp_path) -> None:
    source = write(tmp_path / "input", ["good", "goxd", "other", "good"])
    specs = ["classifier:test_filters.is_good", "starts_with:go"]
    engine = partial(run_tasks, workers=1)
    store = build(job_of(source, specs), tmp_path / "store", engine=engine)
    assert documents(store) == ["good", "good"]
    source = write(tmp_path / "more", ["good", "bad"])
    law = r"b\.jsonl:1: --filter classifier:test_filters\.is_good failed \(KeyError: .*word.*\)"
    with pytest.raises(DataError, match=law):
        build(job_of(source, specs[:1]), tmp_path / "broken")


def test_other_filters_or_another_classifier_are_another_store(tmp_path, monkeypatch) -> None:
    source = write(tmp_path / "input", ["good", "bad"])
    (tmp_path / "chosen.py").write_text("def keep(text):\n    return True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    specs = [[], ["length:1.."], ["length:2.."], ["duplicates"], ["classifier:chosen.keep"]]
    keys = [job_of(source, given).key for given in specs]
    (tmp_path / "chosen.py").write_text("def keep(text):\n    return False\n")
    keys.append(job_of(source, specs[-1]).key)
    assert len(set(keys)) == 6
    build(job_of(source, ["length:1.."]), tmp_path / "store")
    with pytest.raises(DataError, match="is a store of other files or settings; choose another"):
        build(job_of(source, ["length:2.."]), tmp_path / "store")


@pytest.mark.parametrize(
    ("spec", "law"),
    [
        ("long", "there is no filter 'long'; use one of length, regex, classifier"),
        ("length:7", r"write MIN\.\.MAX characters"),
        ("length:..", r"write MIN\.\.MAX characters"),
        ("length:9..3", "write the smaller number first"),
        ("regex:(", "correct the regular expression"),
        ("classifier:keep", r"write classifier:MODULE\.FUNCTION"),
        ("classifier:no_module.keep", "put the folder of the module on PYTHONPATH"),
        ("classifier:json.no_function", "put the folder of the module on PYTHONPATH"),
        ("classifier:sys.path", "is not a function of that module"),
        ("classifier:test_filters.KEEP_ALL", "is not a function of that module"),
        ("classifier:broken_module.keep", "importing broken_module failed with SyntaxError"),
        ("duplicates:near", "duplicates has no argument"),
    ],
)
def test_a_wrong_filter_is_refused_with_the_rule(
    spec: str, law: str, tmp_path, monkeypatch
) -> None:
    (tmp_path / "broken_module.py").write_text("def keep(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=f"^--filter {re.escape(spec)}: .*{law}"):
        parse_filters([spec])


def test_without_filters_nothing_is_asked() -> None:
    assert parse_filters([]) == NO_FILTERS and not NO_FILTERS.specs


@given(st.lists(st.lists(st.integers(0, 40), max_size=9), max_size=20))
@settings(deadline=None)
def test_keys_are_found_as_in_a_set(batches) -> None:
    found, expected = _SortedKeys(), set()
    for batch in batches:
        keys = np.array([bytes([n]) + bytes(n % 3) for n in batch], KEY)
        assert found.contains(keys).tolist() == [n in expected for n in batch]
        new = sorted({*batch} - expected)
        found.add(np.array([bytes([n]) + bytes(n % 3) for n in new], KEY))
        expected |= {*new}
        sizes = [len(array) for array in found._arrays]
        assert all(2 * b <= a for a, b in itertools.pairwise(sizes))
