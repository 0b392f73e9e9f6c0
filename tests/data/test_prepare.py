"""A store depends on its input alone, not on workers, kills or concurrent processes."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare as module
from data.config import DataConfig, SourceConfig
from data.engine import run_tasks
from data.files import DataError
from data.formats.pieces import plan_pieces
from data.pipeline import Dataset
from data.prepare import prepare
from data.store import Store
from data.store_job import StoreJob
from data.tokenizers.base import Tokenizer
from data.tokenizers.byte_level import ByteTokenizer

EOS = 256
PLAIN = "first line\n"
LINES = ["grün", "a", "\U0001f40e" * 30, "b c\nd", "x" * 200]
CHAT = [("user", "Hé?"), ("assistant", "Jó."), ("user", "!")]


def write_input(folder: Path) -> SourceConfig:
    """Text, an empty file, JSON lines with a chat among them, text."""
    folder.mkdir(exist_ok=True)
    chat = [{"role": role, "content": content} for role, content in CHAT]
    (folder / "a.txt").write_text(PLAIN)
    (folder / "b.txt").write_text("")
    (folder / "c.jsonl").write_text(
        "".join(json.dumps({"text": value}) + "\n" for value in [*LINES, chat])
    )
    (folder / "d.txt").write_text(PLAIN * 2)
    return SourceConfig(files=str(folder / "*"))


@pytest.fixture
def source(tmp_path) -> SourceConfig:
    return write_input(tmp_path / "input")


def make(
    source: SourceConfig,
    cache: Path,
    *,
    tokenizer: Tokenizer | None = None,
    on_error="raise",
    **options,
) -> Store:
    job = StoreJob("text", source, tokenizer or ByteTokenizer(), on_error)
    return prepare(job, cache=cache, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_pieces_of(monkeypatch, piece_bytes: int) -> None:
    monkeypatch.setattr(module, "plan_pieces", partial(plan_pieces, piece_bytes=piece_bytes))


def test_a_store_holds_every_document_in_order_each_closed(source, tmp_path) -> None:
    store = make(source, tmp_path / "cache")
    texts = [PLAIN, *LINES]
    chat = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in CHAT]
    expected = [[*text.encode(), EOS] for text in [*texts, "".join(chat), PLAIN * 2]]
    assert store.tokens[:].tolist() == [*itertools.chain(*expected)]
    assert store.ends[:].tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
    # Of a chat, what the assistant says is learned, and how it ends; its end only if it is last.
    learned = [[1] * len(ids) for ids in expected]
    learned[6] = [0] * len(expected[6])
    begin = len((chat[0] + "<|im_start|>assistant\n").encode())
    end = begin + len("Jó.<|im_end|>".encode())
    learned[6][begin:end] = [1] * (end - begin)
    assert store.loss_mask[:].tolist() == [*itertools.chain(*learned)]
    sizes = [len(text.encode()) for text in texts] + [len("Jó.".encode()), 2 * len(PLAIN)]
    assert store.num_bytes[:].tolist() == sizes
    assert [(Path(file.path).name, file.size) for file in store.info.files] == [
        (path.name, path.stat().st_size) for path in sorted((tmp_path / "input").iterdir())
    ]
    assert store.info.skipped["empty"].count == 1
    assert store.info.skipped["empty"].examples[0].startswith(str(tmp_path / "input" / "b.txt: "))


def test_the_end_of_a_chat_is_in_the_loss_only_after_the_assistant(tmp_path) -> None:
    for role, learned in (("assistant", 1), ("user", 0)):
        roles = ("user", "assistant", role)
        messages = [{"role": said, "content": "x"} for said in roles]
        path = tmp_path / f"{role}.jsonl"
        path.write_text(json.dumps({"text": messages}))
        store = make(SourceConfig(files=str(path)), tmp_path / "cache")
        assert (store.tokens[-1], store.loss_mask[-1]) == (EOS, learned)


@given(piece_bytes=st.integers(1, 700))
@settings(max_examples=20)
def test_the_size_of_pieces_does_not_change_the_bytes(tmp_path_factory, piece_bytes) -> None:
    folder = tmp_path_factory.mktemp("units")
    source = write_input(folder / "input")
    whole = make(source, folder / "whole")
    with pytest.MonkeyPatch.context() as patch:
        in_pieces_of(patch, piece_bytes)
        cut = make(source, folder / "cut")
    assert content(cut.folder) == content(whole.folder)


def test_workers_do_not_change_the_bytes(source, tmp_path, monkeypatch) -> None:
    in_pieces_of(monkeypatch, 64)
    alone = make(source, tmp_path / "alone")
    together = make(source, tmp_path / "together", engine=partial(run_tasks, workers=2))
    assert content(together.folder) == content(alone.folder)
    # Their errors are those of one process.
    (tmp_path / "input" / "c.jsonl").write_text('{"text": "a"}\n{"text": \n')
    for workers in (0, 2):
        law = r"c\.jsonl:2: invalid JSON: .*; correct the file, or use data\.on_error=skip$"
        with pytest.raises(DataError, match=law):
            make(source, tmp_path / "broken", engine=partial(run_tasks, workers=workers))


KILLED = """
import multiprocessing, os, signal, sys
from functools import partial
from pathlib import Path
from data import prepare as module
from data.config import DataConfig, SourceConfig
from data.formats.pieces import plan_pieces
from data.tokenizers.byte_level import ByteTokenizer

def report(done, total, tokens):
    if done > total / 2:
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    module.plan_pieces = partial(plan_pieces, piece_bytes=64)
    source = SourceConfig(files=sys.argv[1])
    job = module.StoreJob("text", source, ByteTokenizer(), "raise")
    engine = partial(module.run_tasks, workers=2)
    module.prepare(job, cache=Path(sys.argv[2]), engine=engine, report=report)
"""


def test_a_killed_preparation_continues_to_the_same_bytes(source, tmp_path, monkeypatch) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    output = tmp_path / "output"
    with open(output, "w") as file:  # no pipe: a worker that lives would hold it open
        killed = subprocess.run(
            [sys.executable, script, source.files, tmp_path / "cache"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=file,
        )
    assert killed.returncode == -signal.SIGKILL
    workers = [int(pid) for pid in output.read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.02)
    assert [path.suffix for path in sorted((tmp_path / "cache").iterdir())] == [
        ".building",
        ".lock",
    ]
    in_pieces_of(monkeypatch, 64)
    shown = []
    store = make(source, tmp_path / "cache", report=lambda *counts: shown.append(counts))
    assert shown[0][0] > shown[0][1] / 2  # what was done was not done again
    assert content(store.folder) == content(make(source, tmp_path / "undisturbed").folder)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_two_processes_at_once_make_one_store(source, tmp_path, monkeypatch) -> None:
    """Two locks exclude each other between threads as between processes."""
    waits, stores = threading.Event(), {}
    monkeypatch.setattr(module.log, "warning", lambda *_: waits.set())

    def second() -> None:
        stores["second"] = make(source, tmp_path / "cache", report=lambda *_: pytest.fail("again"))

    thread = threading.Thread(target=second)

    def show(*_) -> None:
        if not thread.ident:
            thread.start()
        assert waits.wait(20)

    stores["first"] = make(source, tmp_path / "cache", report=show)
    thread.join(20)
    assert stores["second"].folder == stores["first"].folder


def test_an_existing_store_is_opened_and_not_made_again(source, tmp_path) -> None:
    first = make(source, tmp_path / "cache")
    inode = (first.folder / "tokens.bin").stat().st_ino
    (first.folder / "journal.jsonl").touch()  # of a kill after the renaming
    again = make(source, tmp_path / "cache", limit=1, report=lambda *_: pytest.fail("made again"))
    assert (again.folder / "tokens.bin").stat().st_ino == inode
    assert not (again.folder / "journal.jsonl").exists()


def test_everything_that_decides_the_content_decides_the_folder(source, tmp_path) -> None:
    cache = tmp_path / "cache"

    class Other(ByteTokenizer):
        digest = "other"

    def folder(source: SourceConfig, tokenizer=ByteTokenizer, on_error="raise") -> Path:
        return make(source, cache, tokenizer=tokenizer(), on_error=on_error).folder

    first = folder(source)
    assert first.parent == cache and first.name.startswith("text-")
    assert folder(source.model_copy(update={"weight": 2.0})) == first
    os.utime(tmp_path / "input" / "a.txt", ns=(1, 1))
    folders = [first, folder(source), folder(source, Other)]
    folders += [folder(SourceConfig(files=str(tmp_path / "input" / "*.txt")))]
    assert len(set(folders)) == 4
    # Without a broken document there is nothing to decide.
    assert folder(source, on_error="skip") == folders[1]


def test_what_was_skipped_is_refused_by_a_run_that_does_not_skip(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{\n')
    source = SourceConfig(files=str(tmp_path / "a.jsonl"))
    assert make(source, tmp_path / "cache", on_error="skip").info.skipped
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: .* \(invalid JSON, 1 in all\); correct the file, or"
    ):
        make(source, tmp_path / "cache")


def test_work_before_a_broken_document_is_kept_for_a_run_that_skips(tmp_path, monkeypatch) -> None:
    in_pieces_of(monkeypatch, 16)
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' * 5 + "{\n")
    source = SourceConfig(files=str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"a\.jsonl:6: invalid JSON"):
        make(source, tmp_path / "cache")
    shown = []
    store = make(
        source,
        tmp_path / "cache",
        on_error="skip",
        report=lambda done, total, tokens: shown.append(done),
    )
    assert shown[0] > 0 and store.info.num_documents == 5


def test_a_chat_without_an_assistant_is_refused(tmp_path) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": messages}))
    with pytest.raises(DataError, match=r"data\.files: no message has the role assistant, so"):
        make(SourceConfig(files=str(tmp_path / "a.jsonl")), tmp_path / "cache")


BROKEN = [
    b'{"text": "good"}\n',
    b"{\n",
    b'{"other": "x"}\n',
    b'{"text": ""}\n',
    b'{"text": 3}\n',
    b'{"text": "\xff"}\n',
    b'{"text": "also"}\n',
]


def test_broken_documents_are_skipped_and_counted(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(BROKEN) + b"{\n" * 7)
    store = make(SourceConfig(files=str(path)), tmp_path / "cache", on_error="skip")
    assert ByteTokenizer().decode(store.tokens[:]) == "good" and len(store.ends) == 2
    counts = {kind: skip.count for kind, skip in store.info.skipped.items()}
    assert counts == {
        "invalid JSON": 8,
        "missing field": 1,
        "empty": 1,
        "wrong type": 1,
        "invalid UTF-8": 1,
    }
    examples = store.info.skipped["invalid JSON"].examples
    places = [example.split(": ")[0] for example in examples]
    assert places == [f"{path}:{line}" for line in (2, 8, 9, 10, 11)]
    assert "skipped: 8 invalid JSON (first: " in store.summary()


SKIP = "or use data.on_error=skip"


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"id": 1, "content": "x"}, "content"),
        ({"title": "a long title", "body": "x"}, "body"),
        ({"id": "7", "prose": "longer"}, "prose"),
        ({"id": 1}, None),
    ],
)
def test_a_missing_field_is_answered_with_the_field_that_may_hold_the_text(
    tmp_path, record, field
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    source = SourceConfig(files=str(tmp_path / "a.jsonl"))
    for name, key in (("docs", "data.sources.docs.field"), ("text", "data.field")):
        job = StoreJob(name, source, ByteTokenizer(), "raise")
        with pytest.raises(DataError) as refused:
            prepare(job, cache=tmp_path / "cache")
        remedy = f"set {key}={field}" if field else f"correct the file, set {key}, {SKIP}"
        assert str(refused.value).endswith(f"; {remedy}")
    skipping = StoreJob("docs", source, ByteTokenizer(), "skip")
    law = r"skipped: 1 missing field \(first: .*\); set data\.sources\.docs\.field to a field with"
    with pytest.raises(DataError, match=law):
        prepare(skipping, cache=tmp_path / "cache")


def test_a_field_that_only_one_document_lacks_is_no_other_field(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"error": "no text"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*; correct the file, .*{SKIP}$"):
        make(SourceConfig(files=str(tmp_path / "a.jsonl")), tmp_path / "cache")


def test_the_field_of_data_files_is_data_field(tmp_path) -> None:
    config = DataConfig(files="a", field="content")
    assert config.named_sources == {"text": SourceConfig(files="a", field="content")}
    with pytest.raises(ValueError, match=r"data\.field=content has no effect with data\.sources"):
        DataConfig(sources={"a": SourceConfig(files="a")}, field="content")


def test_a_folder_is_read_and_its_files_of_other_formats_are_named(tmp_path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one")
    (folder / "deep" / "b.jsonl").write_text('{"text": "two"}\n')
    source = SourceConfig(files=str(folder))
    expected = [*b"one", EOS, *b"two", EOS]
    assert make(source, tmp_path / "first").tokens[:].tolist() == expected
    sizes = {"sequence_length": 2, "global_batch_size": 1}
    config = DataConfig(files=str(folder), cache_dir=str(tmp_path), **sizes)
    assert Dataset(config).warnings() == []
    (folder / "README.md").write_text("about")
    assert make(source, tmp_path / "second").tokens[:].tolist() == expected
    for _ in ("prepared", "opened again"):
        assert Dataset(config).warnings() == [
            f"data.files: 1 file of other formats in the folder left out: {folder}/"
            "README.md; give a glob to read them"
        ]


@pytest.mark.parametrize(
    ("line", "law"),
    [
        (1, "invalid JSON: "),
        (2, "missing field: no field 'text'; the fields are other"),
        (4, "wrong type: "),
        (5, "invalid UTF-8: "),
    ],
)
def test_a_broken_document_stops_the_work_with_its_place(tmp_path, line, law) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(BROKEN[0] + BROKEN[line])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {law}.*, or use data\.on_error"):
        make(SourceConfig(files=str(path)), tmp_path / "cache")
    left = [entry.suffix for entry in (tmp_path / "cache").iterdir()]
    assert left == [".lock"]  # nothing could continue the rest: mending changes the key


def test_messages_are_one_printable_line_for_any_document(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"a\\nb\\ud800": 1}\n')
    store = make(SourceConfig(files=str(path)), tmp_path / "cache", on_error="skip")
    assert store.info.skipped["missing field"].examples[0].endswith("the fields are a b\\ud800")


@pytest.mark.parametrize(
    ("line", "end"),
    [(BROKEN[3], "empty .*; give files with text"), (BROKEN[1], "; correct the files")],
)
def test_a_source_without_a_token_is_refused(line, end, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line)
    with pytest.raises(DataError, match=rf"a\.jsonl: no document has a token; skipped: 1 .*{end}$"):
        make(SourceConfig(files=str(path)), tmp_path / "cache", on_error="skip")


def test_a_large_source_is_not_prepared_by_itself(source, tmp_path) -> None:
    law = r"data\.files: 0\.0 GiB of text is not prepared; run python scripts/prepare_data\.py"
    with pytest.raises(DataError, match=law):
        make(source, tmp_path / "cache", limit=100)
    assert not (tmp_path / "cache").exists()


def test_a_prepared_store_is_a_source(source, tmp_path) -> None:
    store = make(source, tmp_path / "cache")
    named = SourceConfig(files=str(store.folder))
    assert make(named, tmp_path / "nothing").folder == store.folder
    assert not (tmp_path / "nothing").exists()

    class Other(ByteTokenizer):
        name, digest = "other.json", "0123456789abcdef01"

    law = rf"data\.files=.* tokenizer bytes \({ByteTokenizer.digest[:16]}\), but data\.tokenizer "
    with pytest.raises(DataError, match=law + r"is other\.json \(0123456789abcdef\); use the same"):
        make(named, tmp_path, tokenizer=Other())


def test_a_damaged_store_in_the_cache_is_an_error(source, tmp_path) -> None:
    store = make(source, tmp_path / "cache")
    os.truncate(store.folder / "tokens.bin", 10)
    with pytest.raises(DataError, match=r"tokens\.bin has 10 bytes, expected .*; delete"):
        make(source, tmp_path / "cache")


def test_another_store_in_the_place_of_a_cached_one_is_to_be_deleted(source, tmp_path) -> None:
    store = make(source, tmp_path / "cache")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("other words")
    other = make(SourceConfig(files=f"{tmp_path}/other/*"), tmp_path / "cache")
    for path in store.folder.iterdir():
        path.unlink()
    for path in other.folder.iterdir():
        path.rename(store.folder / path.name)
    with pytest.raises(DataError) as caught:
        make(source, tmp_path / "cache")
    line = f"{store.folder} is a store of other files or settings; delete it to prepare it again"
    assert str(caught.value) == line


class WideTokenizer(ByteTokenizer):
    """As if of 100,000 words; each byte is a large id."""

    vocab_size, eos_id, digest = 100_001, 100_000, "wide"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 70_000


def test_a_large_vocabulary_makes_wide_tokens(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    source = SourceConfig(files=str(tmp_path / "a.txt"))
    store = make(source, tmp_path, tokenizer=WideTokenizer())
    assert store.tokens.dtype == np.uint32
    assert store.tokens[:].tolist() == [70_097, 70_098, 100_000]


class DeadlyTokenizer(ByteTokenizer):
    """Kills the worker that uses it."""

    def encode(self, text: str) -> np.ndarray:
        assert multiprocessing.parent_process() is not None
        os.kill(os.getpid(), signal.SIGKILL)
        return np.empty(0)


def test_a_worker_that_dies_is_reported_and_not_waited_for(source, tmp_path) -> None:
    one = partial(run_tasks, workers=1)
    with pytest.raises(RuntimeError, match="worker process died, perhaps for lack of memory; run"):
        make(source, tmp_path, tokenizer=DeadlyTokenizer(), engine=one)


def test_progress_goes_from_nothing_to_all_bytes(source, tmp_path, monkeypatch) -> None:
    in_pieces_of(monkeypatch, 64)
    shown: list[tuple[int, int, int]] = []
    store = make(source, tmp_path / "cache", report=lambda *counts: shown.append(counts))
    done, totals, tokens = zip(*shown, strict=True)
    size = sum(path.stat().st_size for path in (tmp_path / "input").iterdir())
    assert set(totals) == {size} and (done[0], done[-1]) == (0, size)
    assert list(done) == sorted(done) and len(set(done)) > 4
    assert (tokens[0], tokens[-1]) == (0, store.info.num_tokens)


def test_files_that_change_while_they_are_read_are_not_stored(tmp_path) -> None:
    (path := tmp_path / "a.txt").write_text("long text")

    class Changing(ByteTokenizer):
        def encode_batch(self, texts):
            path.write_text("short")
            return super().encode_batch(texts)

    source, cache = SourceConfig(files=str(path)), tmp_path / "cache"
    with pytest.raises(DataError, match=r"data\.files: files changed while they were read; run"):
        make(source, cache, tokenizer=Changing(), on_error="skip")
    assert not list(cache.glob("*/tokens.bin"))
