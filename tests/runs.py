"""Runs of train.py in this process, with a tiny configuration; a plugin of conftest.py."""

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
    """Write the configuration of a tiny run whose files are all in `folder`; return its path."""
    (folder / "a.txt").write_text("".join(f"def f{n}(x): return x * {n * n}\n" for n in range(200)))
    (folder / "tiny.yaml").write_text(TINY.replace("FOLDER", str(folder)).replace("CACHE", cache))
    return str(folder / "tiny.yaml")


def run(config: str, *arguments: str) -> int:
    """Run train.py and return its exit code."""
    import train  # every test loads this plugin; few need the trainer

    return train.main(["--config", config, *arguments])


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(directory: Path) -> dict[int, float]:
    """Return the losses of a run by step; every step occurs once."""
    lines = read_lines(directory / "metrics.jsonl")
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["loss"] for line in lines}


def refusal(capsys, config: str, *overrides: str) -> str:
    """Run a command that ends with exit code 2; return its one line on stderr."""
    capsys.readouterr()
    assert run(config, *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith("\n")
    assert error.count("\n") == 1 and "Traceback" not in error
    return error


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Restore the signal handlers of pytest that a run replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore signal handlers; modules with runs use it by `usefixtures`."""
    with kept_signals():
        yield


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    """Folder of an uninterrupted run of six steps; read-only."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with kept_signals():  # this fixture may come before `signals`
        assert run(write_config(folder)) == 0
    return folder


@pytest.fixture
def half(tmp_path, signals) -> str:
    """Configuration of a run that ended after three of six steps."""
    config = write_config(tmp_path)
    assert run(config, "training.steps=3") == 0
    return config


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not, and may wait for a slow init."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
