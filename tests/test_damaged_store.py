"""A run whose store is damaged ends with one line; with a new store it resumes bit-equal."""

import shutil
from pathlib import Path

import pytest
from runs import losses, run

pytestmark = pytest.mark.usefixtures("signals")


def flip_every_block(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), 512):
        content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_store_ends_the_run_with_one_line_and_a_new_one_resumes_bit_equal(
    undisturbed, half, tmp_path, capsys
):
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    flip_every_block(tokens)
    capsys.readouterr()
    assert run(half) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert line.startswith(f"error: {tokens}: tokens ") and line.endswith(
        f" differ from what was written; delete {tokens.parent} and prepare the data again"
    )
    assert f" of {tmp_path}/a.txt (bytes " in line
    assert list(losses(tmp_path / "run")) == [1, 2, 3]  # no step was trained on it
    shutil.rmtree(tokens.parent)
    assert run(half) == 0
    assert losses(tmp_path / "run") == losses(undisturbed / "run")
