"""`scripts/prepare_data.py` makes stores that train.py finds; invalid input is one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import prepare_data as script

from data.config import DataConfig
from data.formats.base import FileRange, read_documents
from data.formats.pieces import InputPiece
from data.pipeline import Dataset
from data.prepare import prepare
from data.store import Store
from data.store_job import StoreJob
from data.tokenizers import training
from data.tokenizers.base import open_tokenizer

TEXT = "".join(f"def f{n}(x): return x * {n}\n" for n in range(300))
NO_CLUSTER = ["--engine=ray", "--address=127.0.0.1:1"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two sources, and a configuration of a run that reads both."""
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text('{"body": "x y z"}\n{"body": ""}\n')
    (tmp_path / "config.yaml").write_text(
        f"""
model: {{hidden_size: 32}}
data:
  sources:
    code: {{files: {tmp_path}/a.txt}}
    prose: {{files: {tmp_path}/b.jsonl, field: body}}
  tokenizer: {tmp_path}/tokenizer.json
  cache_dir: {tmp_path}/cache
"""
    )
    return tmp_path


def one(folder: Path, *more: str) -> list[str]:
    """Arguments for the source a.txt alone, in this process."""
    return [
        "--workers=0",
        f"data.files={folder}/a.txt",
        f"data.cache_dir={folder}/cache",
        *more,
    ]


def refusal(capsys, *arguments: str) -> str:
    """The line on stderr of a command that is refused."""
    capsys.readouterr()
    assert script.main(list(arguments)) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    return line.removeprefix("error: ").strip()


def test_the_script_trains_a_tokenizer_and_prepares_what_training_opens(folder) -> None:
    command = [sys.executable, "scripts/prepare_data.py", "--config", folder / "config.yaml"]
    command += ["--workers", "2", "--train-tokenizer", "300"]
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE))
    assert "numpy" in imported and "jax" not in imported  # workers import all of it too
    training, written, code, prose = done.stdout.splitlines()
    assert training.startswith("training a tokenizer of 300 tokens on at most 256 MiB")
    assert written.startswith(f"tokenizer {folder}/tokenizer.json written after ")
    assert re.fullmatch(
        rf"code: 1 document, [\d,]+ tokens, \d\.\d\d bytes per token; "
        rf"\d+ training rows of \d+; [\d.]+ MB/s; "
        rf"{folder}/cache/code-\w{{16}}",
        code,
    )
    assert "; skipped: 1 empty; " in prose
    # What train.py does with the same configuration.
    data = script.load_data_config(str(folder / "config.yaml"), [])
    tokenizer = open_tokenizer(data.tokenizer, data.eos_token)
    assert tokenizer.vocab_size == 300
    for line, (name, source) in zip((code, prose), data.named_sources.items(), strict=True):
        cache = Path(data.cache_dir)
        store = prepare(StoreJob(name, source, tokenizer, "raise"), cache=cache, limit=0)
        assert str(store.folder) == line.rpartition("; ")[2]
    code_store = Store(code.rpartition("; ")[2])
    assert tokenizer.decode(code_store.tokens[:]) == TEXT
    # Again: nothing is made.
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "exists with 300 tokens: kept, not trained again" in again.stdout
    assert again.stdout.count("; already tokenized; ") == 2


def test_a_tokenizer_of_another_size_is_not_overwritten(folder, capsys) -> None:
    arguments = one(folder, f"data.tokenizer={folder}/t.json")
    assert script.main([*arguments, "--train-tokenizer", "280"]) == 0
    before = (folder / "t.json").read_bytes()
    law = r"--train-tokenizer 270: data\.tokenizer=.*t\.json exists and has 280 tokens; use"
    assert re.match(law, refusal(capsys, *arguments, "--train-tokenizer", "270"))
    assert (folder / "t.json").read_bytes() == before


def test_a_text_too_small_for_the_vocabulary_is_said(folder, capsys) -> None:
    (folder / "a.txt").write_text("hello hello")
    arguments = one(folder, f"data.tokenizer={folder}/t.json", "--train-tokenizer")
    assert script.main([*arguments, "5000"]) == 0
    size = open_tokenizer(f"{folder}/t.json").vocab_size
    assert f"the tokenizer has only {size} tokens" in capsys.readouterr().out
    assert script.main([*arguments, "5000"]) == 0
    assert "kept, not trained again" in capsys.readouterr().out


def test_what_cannot_be_trained_is_refused_before_anything_is_read(folder, capsys, monkeypatch):
    arguments = [*one(folder, f"data.tokenizer={folder}/t.json"), "--train-tokenizer"]
    for size, missing, law in (
        (258, {}, "is smaller than 259: "),
        (300, {"tokenizers": None}, "pip"),
    ):
        with monkeypatch.context() as patch:
            for name in missing:
                patch.setitem(sys.modules, name, None)
            assert script.main([*arguments, str(size)]) == 2
        out, error = capsys.readouterr()
        assert out == "" and law in error and error.count("\n") == 1


def test_the_sample_is_bounded_and_evenly_spaced(folder, monkeypatch) -> None:
    paths = [folder / f"{n}.txt" for n in range(10)]
    for n, path in enumerate(paths):
        path.write_text(f"{n}ž" * 100)
    units = [
        (InputPiece((FileRange(str(path), "text", 0, 300),)), "name", "text") for path in paths
    ]
    assert len(list(training.sample_texts(units, "raise"))) == 10
    monkeypatch.setattr(training, "SAMPLE_PIECES", 5)
    monkeypatch.setattr(training, "SAMPLE_BYTES", 50)
    sample = list(training.sample_texts(units, "raise"))
    assert sample == [f"{n}ž{n}ž{n}ž{n}" for n in (0, 2, 4, 6, 8)]  # ten bytes of each
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (folder / "chat.jsonl").write_text("{\n" + json.dumps({"text": chat}))
    entry = FileRange(
        str(folder / "chat.jsonl"), "jsonl", 0, (folder / "chat.jsonl").stat().st_size
    )
    assert len(list(read_documents(entry, "text"))) == 2
    units = [(InputPiece((entry,)), "name", "text")]
    assert list(training.sample_texts(units, "skip")) == ["ab", "cd"]
    with pytest.raises(ValueError, match=r"chat\.jsonl:1: invalid JSON"):
        list(training.sample_texts(units, "raise"))


def test_out_names_the_folder_of_the_only_source(folder, capsys) -> None:
    assert script.main(one(folder, "--out", f"{folder}/store")) == 0
    store = Store(folder / "store")
    assert not list((folder / "cache").glob("*/tokens.bin"))
    assert script.main(one(folder, "--out", f"{folder}/store")) == 0
    assert "; already tokenized; " in capsys.readouterr().out
    # The store is a source of its own.
    cache = f"data.cache_dir={folder}/cache"
    prepared = [f"data.files={folder}/store", cache, "--workers=0"]
    assert script.main(prepared) == 0
    assert str(folder / "store") in capsys.readouterr().out
    assert "is a store already" in refusal(capsys, *prepared, "--out", "x")
    (folder / "a.txt").write_text("other")
    line = refusal(capsys, *one(folder, "--out", f"{folder}/store"))
    assert line == (f"{folder}/store is a store of other files or settings; choose another folder")
    assert Store(folder / "store").digest == store.digest
    two = ["--config", f"{folder}/config.yaml", "data.tokenizer=bytes", "--out", "x"]
    assert refusal(capsys, *two) == "--out takes one source, and there are 2; leave it out"


def test_a_filtered_store_is_trained_on_by_its_folder(folder, capsys) -> None:
    (folder / "a.txt").write_text("")
    for n in range(30):
        (folder / f"{n}.txt").write_text("word " * (n % 10 + 1))
    arguments = one(folder, f"data.files={folder}/*.txt", f"data.eval_files={folder}/9.txt")
    filters = ["--filter=length:11..", "--filter", "duplicates", "--filter=regex:(word ){9}"]
    assert refusal(capsys, *arguments, *filters).startswith("--filter needs --out FOLDER, which")
    out = ["--out", f"{folder}/store"]
    line = refusal(capsys, *arguments, *filters, *out, "--verify")
    assert line == "--filter has no effect with --verify; leave it out"
    line = refusal(capsys, *arguments, *out, "--filter=small")
    assert line.startswith("--filter small: there is no filter 'small'; use one of length, regex,")
    assert script.main([*arguments, *filters, *out]) == 0
    made, held_out, remedy = capsys.readouterr().out.splitlines()
    # 29 files train: 3 of one word and of two, 3 of nine, 2 of ten, and 3 of each of 6 others.
    assert made.startswith("text: 6 documents, ")
    for part in ("6 left out by length:11..", "5 left out by regex:(word ){9}", "1 empty"):
        assert part in made
    assert "12 left out by duplicates (first: " in made and "1 document" in held_out
    assert remedy == f"to train on it, set data.files={folder}/store"
    assert Store(folder / "store").info.source["filters"] == [
        "length:11..", "regex:(word ){9}", "duplicates",
    ]  # fmt: skip
    key, value = remedy.removeprefix("to train on it, set ").split("=")
    data = script.load_data_config(None, [*arguments[1:], f"{key}={value}"])
    (source,) = Dataset(data).sources
    assert source.store.folder == folder / "store" and source.num_eval == 1


def test_validation_files_have_a_store_that_training_opens(folder, capsys) -> None:
    (folder / "held.txt").write_text("def held(): pass\n")
    arguments = one(folder, f"data.files={folder}/*.txt", f"data.eval_files={folder}/held.txt")
    assert script.main(arguments) == 0
    text, held = capsys.readouterr().out.splitlines()
    assert text.startswith("text: 1 document, ") and held.startswith("text eval_files: 1 document,")
    assert re.search(r"; \d+ training rows of \d+; ", text)
    assert re.search(r"; \d+ held-out rows of \d+; ", held)
    data = script.load_data_config(None, arguments[1:])
    (source,) = Dataset(data).sources
    assert str(source.store.folder) == text.rpartition("; ")[2]
    assert str(source.held_out[0].folder) == held.rpartition("; ")[2]
    assert script.main([*arguments, "--verify"]) == 0
    assert capsys.readouterr().out.count("; verified, digest ") == 2


def test_verify_reads_whole_stores_and_makes_none(folder, capsys) -> None:
    assert "has no store.json" in refusal(capsys, *one(folder, "--verify"))
    assert not (folder / "cache").exists()
    assert script.main(one(folder)) == 0
    assert script.main(one(folder, "--verify")) == 0
    (path,) = (folder / "cache").glob("text-*/tokens.bin")
    assert f"; verified, digest {Store(path.parent).digest[:16]}; " in capsys.readouterr().out
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert re.search(
        r"tokens \d+ to \d+ of .*a\.txt \(bytes .* differ from what was written; delete ",
        refusal(capsys, *one(folder, "--verify")),
    )


@pytest.mark.parametrize(
    ("arguments", "law"),
    [
        (
            ["model.hidden_size=3"],
            "override 'model.hidden_size=3': this script accepts only data.key=value",
        ),
        (["data.filse=x"], "data.filse: unknown key; did you mean data.files?"),
        (["data=3"], "override 'data=3': this script accepts only data.key=value"),
        (["data.files=x", "data.sources.a.files=y"], "data.files and data.sources are both given"),
        (["data.on_error=never"], "data.on_error='never': "),
        (["--config", "nothing.yaml"], "--config nothing.yaml: No such file"),
        (["--workers=-1"], "--workers -1: use 0 to work in this process alone"),
        (["--engine=ray", "--workers=0"], "--workers 0: use the number of worker processes"),
        (["--address=auto"], "--address auto is that of a Ray cluster; add --engine ray"),
        (["data.files=nothing*"], "data.files='nothing*' matches no file"),
        (["data.tokenizer=nothing.json"], "data.tokenizer=nothing.json: "),
        (["--train-tokenizer=300"], "data.tokenizer=bytes is not trained; name the file to"),
        (["--train-tokenizer=300", "--verify"], "--train-tokenizer has no effect with --verify"),
        (["--out=store", "--append", "--verify"], "--append has no effect with --verify"),
        # Before a cluster is looked for.
        ([*NO_CLUSTER, "data.files=nothing*"], "data.files='nothing*' matches no file"),
        (
            [*NO_CLUSTER, "data.files=nothing*", "data.tokenizer=t.json", "--train-tokenizer=300"],
            "data.files='nothing*' matches no file",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, law, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, *arguments).startswith(law)


def test_the_section_of_a_file_must_be_one(folder, capsys) -> None:
    (folder / "config.yaml").write_text("data: 3")
    line = refusal(capsys, "--config", f"{folder}/config.yaml")
    assert line == "data=3 is not a section; write data: with its keys"
    (folder / "config.yaml").write_text("data:\n")
    assert script.load_data_config(str(folder / "config.yaml"), []) == DataConfig()


def test_a_store_is_no_text_to_train_on(folder, capsys) -> None:
    assert script.main(one(folder, "--out", f"{folder}/store")) == 0
    arguments = [f"data.files={folder}/store", f"data.tokenizer={folder}/t.json"]
    line = refusal(capsys, *arguments, "--train-tokenizer", "300")
    assert line.startswith(f"data.files={folder}/store is a prepared store, which has no text")


def test_a_full_disk_is_one_line_and_continues(folder, capsys, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert script.main(one(folder)) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"
    assert not list((folder / "cache").glob("*/store.json"))
    assert script.main(one(folder)) == 0
