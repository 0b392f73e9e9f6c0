"""scripts/prepare_data.py writes sharded stores, adds to them, verifies and mends them."""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import inspect_data
import prepare_data

from data.formats.shards import plan_shards


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    for name in ("data.prepare.plan_shards", "data.shard_plan.plan_shards"):
        monkeypatch.setattr(name, partial(plan_shards, shard_bytes=100))


def write_texts(folder: Path, count: int) -> str:
    folder.mkdir()
    for n in range(count):
        (folder / f"{n}.txt").write_text(f"{folder.name} {n} " * 20)
    return f"data.files={folder}/*.txt"


def prepare(tmp_path: Path, *arguments: str) -> int:
    return prepare_data.main(
        [*arguments, f"data.cache_dir={tmp_path}/cache", "data.sequence_length=32", "--workers=0"]
    )


def test_a_store_is_made_extended_verified_and_mended(tmp_path, capsys) -> None:
    one, two = write_texts(tmp_path / "one", 6), write_texts(tmp_path / "two", 3)
    out = f"--out={tmp_path}/store"
    assert prepare(tmp_path, out, "--shard-gb=0.0000003", one) == 0
    text = capsys.readouterr().out
    assert "text: 2 shards; 6 documents" in text and "training rows of 32" in text
    assert f"to train on it, set data.files={tmp_path}/store" in text
    assert prepare(tmp_path, out, one) == 0 and "already prepared" in capsys.readouterr().out
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
    assert prepare(tmp_path, files) == 0 and "already prepared" in capsys.readouterr().out
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
