"""scripts/prepare_data.py writes sharded stores, adds to them, verifies and mends them."""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import inspect_data
import prepare_data

from data.config import DataConfig
from data.formats.pieces import plan_pieces
from data.pipeline import Dataset


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    for name in ("data.prepare.plan_pieces", "data.shard_plan.plan_pieces"):
        monkeypatch.setattr(name, partial(plan_pieces, piece_bytes=100))


def write_texts(folder: Path, count: int) -> str:
    folder.mkdir()
    for n in range(count):
        (folder / f"{n}.txt").write_text(f"{folder.name} {n} " * 20)
    return f"data.files={folder}/*.txt"


def prepare(tmp_path: Path, *arguments: str) -> int:
    return prepare_data.main(
        ["data.sequence_length=32", *arguments, f"data.cache_dir={tmp_path}/cache", "--workers=0"]
    )


def test_rows_of_every_length_of_a_run_are_packed(tmp_path, capsys) -> None:
    text, lengths = write_texts(tmp_path / "texts", 6), "data.sequence_length={0: 32, 5: 64}"
    shown = r"\d+ training rows of 64, \d+ training rows of 32; "
    assert prepare(tmp_path, text, lengths, "data.repack_at=[5]") == 0
    assert re.search(shown, capsys.readouterr().out)
    out = f"--out={tmp_path}/store"
    assert prepare(tmp_path, out, "--shard-gb=0.0000003", text) == 0
    data = {"files": f"{tmp_path}/store", "cache_dir": f"{tmp_path}/cache", "repack_at": (5,)}
    config = DataConfig(sequence_length={0: 32, 5: 64}, **data)
    with pytest.raises(ValueError, match=r"no rows for these settings \(row_length 64.*repack_at"):
        Dataset(config)
    capsys.readouterr()
    assert prepare(tmp_path, out, text, lengths, "data.repack_at=[5]") == 0
    assert re.search(shown, capsys.readouterr().out)
    assert Dataset(config).progress(9)["data/text/epoch"] > 0


def test_a_store_is_made_extended_verified_and_mended(tmp_path, capsys) -> None:
    one, two = write_texts(tmp_path / "one", 6), write_texts(tmp_path / "two", 3)
    out = f"--out={tmp_path}/store"
    assert prepare(tmp_path, out, "--shard-gb=0.0000003", one) == 0
    text = capsys.readouterr().out
    assert "text: 2 shards; 6 documents" in text and "training rows of 32" in text
    assert f"to train on it, set data.files={tmp_path}/store" in text
    assert prepare(tmp_path, out, one) == 0 and "already tokenized" in capsys.readouterr().out
    assert prepare(tmp_path, out, two) == 2
    assert "add --append to add these files to it" in capsys.readouterr().err
    assert prepare(tmp_path, out, "--append", "--shard-gb=0.0000003", two) == 0
    assert "text: 3 shards; 9 documents" in capsys.readouterr().out
    assert prepare(tmp_path, out, "--verify", one) == 0
    assert "text: 3 shards; 9 documents" in capsys.readouterr().out
    shard = tmp_path / "store" / "shards" / "00000-00001"
    tokens = (shard / "tokens.bin").read_bytes()
    (shard / "tokens.bin").write_bytes(bytes(len(tokens)))
    assert prepare(tmp_path, out, "--verify", one) == 2
    remedy = f"delete {shard} and prepare the data again"
    assert remedy in capsys.readouterr().err
    shutil.rmtree(shard)
    assert prepare(tmp_path, out, one) == 0
    assert (shard / "tokens.bin").read_bytes() == tokens
    capsys.readouterr()
    files = f"data.files={tmp_path}/store"
    assert prepare(tmp_path, files) == 0 and "already tokenized" in capsys.readouterr().out
    assert inspect_data.main([files, "data.sequence_length=32", f"data.cache_dir={tmp_path}"]) == 0
    assert "documents 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "law"),
    [
        (["--append"], "--append needs --out FOLDER"),
        (["--stream"], "--stream needs --out FOLDER"),
        (["--shard-gb=2"], "--shard-gb needs --out FOLDER"),
        (["--shard-gb=0", "--out=OUT"], "--shard-gb 0: use a number of GB above 0"),
        (["--append", "--out=OUT"], "is no store in shards yet; leave --append out"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, law) -> None:
    files = write_texts(tmp_path / "one", 2)
    arguments = [word.replace("OUT", f"{tmp_path}/store") for word in arguments]
    assert prepare(tmp_path, *arguments, files) == 2
    error = capsys.readouterr().err
    assert law in error and error.count("\n") == 1
