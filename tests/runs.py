"""Whole runs of train.py inside of this process: a tiny configuration, its traces, its refusals.

A plugin of conftest.py, for its fixtures.
"""

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

TINY = """
run: {dir: FOLDER/run, compilation_cache: CACHE}
mesh: {dp: 2, tp: 2}
model:
  vocab_size: 264
  hidden_size: 32
  num_hidden_layers: 1
  num_attention_heads: 4
  num_key_value_heads: 4
  intermediate_size: 64
  dtype: float32
data:
  files: FOLDER/*.txt
  sequence_length: 32
  global_batch_size: 8
  eval_fraction: 0.05
  cache_dir: FOLDER/cache
optimizer: {schedule: constant, warmup_steps: 0, learning_rate: 1e-2}
training: {steps: 6, eval_every: 4, sample_tokens: 8}
checkpoint: {every: 2}
"""


def write_config(folder: Path, cache: str = "null") -> str:
    """A tiny run with its text and all of its traces in `folder`."""
    (folder / "a.txt").write_text("".join(f"def f{n}(x): return x * {n * n}\n" for n in range(200)))
    (folder / "tiny.yaml").write_text(TINY.replace("FOLDER", str(folder)).replace("CACHE", cache))
    return str(folder / "tiny.yaml")


def run(config: str, *arguments: str) -> int:
    """The exit code of train.py."""
    import train  # every test loads this plugin, and few of them need the trainer

    return train.main(["--config", config, *arguments])


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(directory: Path) -> dict[int, float]:
    """By step; a step that is there twice is an error."""
    lines = read_lines(directory / "metrics.jsonl")
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["loss"] for line in lines}


def refusal(capsys, config: str, *overrides: str) -> str:
    """The one line on stderr of a command that ends with exit code 2."""
    capsys.readouterr()
    assert run(config, *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith("\n")
    assert error.count("\n") == 1 and "Traceback" not in error
    return error


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """A run takes over the signals of its process, here pytest's: they are given back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def signals() -> Iterator[None]:
    """For every test with a run: its module marks itself with usefixtures."""
    with kept_signals():
        yield


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    """Folder of a run of six steps that nobody interrupted. Not to be changed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with kept_signals():  # this fixture may come before `signals`
        assert run(write_config(folder)) == 0
    return folder


@pytest.fixture
def half(tmp_path, signals) -> str:
    """Configuration of a run that stopped after three of six steps."""
    config = write_config(tmp_path)
    assert run(config, "training.steps=3") == 0
    return config
