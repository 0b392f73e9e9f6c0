"""Every example of docs/library.md runs as a user would run it, and is short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "library.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
MAX_LINES = 25

# Every block sees the names of the first block only, so no example depends on another.
PROGRAM = """
import pathlib, re, sys
sys.path.insert(0, "")
blocks = re.findall(r"```python\\n(.*?)```", pathlib.Path(sys.argv[1]).read_text(), re.DOTALL)
first = {"__name__": "__main__"}
for number, block in enumerate(blocks):
    exec(compile(block, f"block {number}", "exec"), dict(first) if number else first)
    print(number, flush=True)
"""


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_fits_on_a_screen(number: int) -> None:
    assert len(BLOCKS[number].splitlines()) <= MAX_LINES


def test_every_example_runs_after_the_first_block_alone() -> None:
    flags = {"XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in flags}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "xla-tests"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(PAGE)],
        cwd=ROOT,
        env=environment | cache | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(number) for number in range(len(BLOCKS))]
