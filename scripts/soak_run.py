"""Processes of `train.py` on a tiny model, to be broken; how two runs differ."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import CheckpointError

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300.0  # that anything may take before it counts as hung
# What a step tells that does not depend on the clock.
EXACT = ("loss", "grad_norm", "learning_rate", "loss_z", "grad_z", "skipped_steps", "eval_loss")
CLOSE = ("loss", "eval_loss")
# Of losses on different meshes, relative: sixteen roundings of float32.
CLOSE_BOUND = 16 * 2.0**-24
DEVICES = 4
MESHES = [
    {"dp": 2, "fsdp": 1, "tp": 2},
    {"dp": 4, "fsdp": 1, "tp": 1},
    {"dp": 1, "fsdp": 4, "tp": 1},
    {"dp": 1, "fsdp": 1, "tp": 4},
    {"dp": 2, "fsdp": 2, "tp": 1},
    {"dp": 1, "fsdp": 2, "tp": 2},
]


class SoakError(Exception):
    """The harness itself cannot go on."""


def tell(line: str) -> None:
    """A line of progress."""
    print(line, flush=True)


def write_config(folder: Path, **changes: Any) -> Path:
    """A tiny run on four devices, with its text.

    changes: values by `section__key`, or whole sections.
    """
    text = folder / "text.txt"
    text.write_text("".join(f"def f{n}(x): return x * {n * n}\n" for n in range(2000)))
    config: dict[str, Any] = {
        "run": {"dir": str(folder / "unnamed"), "compilation_cache": str(folder / "xla")},
        "mesh": dict(MESHES[0]),
        "model": {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 1}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
        | {"dtype": "float32"},
        "data": {"files": str(text), "cache_dir": str(folder / "data"), "eval_fraction": 0.05}
        | {"sequence_length": 32, "global_batch_size": 8},
        "optimizer": {"schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-3},
        "training": {"steps": 300, "eval_every": 50, "eval_batches": 2, "sample_tokens": 0},
        "checkpoint": {"every": 20},
        "cluster": {"start_timeout": 30},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        if key:
            config[section][key] = value
        else:
            config[section] = value
    path = folder / "soak.yaml"
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML
    return path


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """The whole lines of metrics.jsonl."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def free_port() -> int:
    """A port of the loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Trainer:
    """train.py in one process, or in several that share the devices, and what it tells."""

    def __init__(self, config: Path, directory: Path, *overrides: str, processes: int = 1):
        self.directory = directory
        self._folder = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=config.parent))
        arguments = ["--config", str(config), f"run.dir={directory}", *overrides]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        identities: list[list[str]] = [[]]
        if processes > 1:
            environment["JAX_NUM_CPU_DEVICES"] = str(DEVICES // processes)
            arguments += ["--coordinator", f"127.0.0.1:{free_port()}"]
            arguments += ["--num-processes", str(processes)]
            identities = [["--process-id", str(number)] for number in range(processes)]
        self.processes = [
            self._start(number, [*arguments, *identity], environment)
            for number, identity in enumerate(identities)
        ]

    def _start(
        self, number: int, arguments: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with (
            open(self._folder / f"out.{number}", "w") as out,
            open(self._folder / f"err.{number}", "w") as err,
        ):
            return subprocess.Popen(
                [sys.executable, "train.py", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        """What process 0, which talks for all, wrote to stdout so far."""
        return (self._folder / "out.0").read_text()

    @property
    def errors(self) -> list[str]:
        """What each process wrote to stderr so far."""
        return [(self._folder / f"err.{n}").read_text() for n in range(len(self.processes))]

    @property
    def err(self) -> str:
        """What all of them wrote to stderr so far."""
        return "".join(self.errors)

    @property
    def step(self) -> int:
        """The last step in its metrics; 0 before this process writes any."""
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return 0
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            tail = file.read().decode()
        found = re.findall(r'^\{"step": (\d+),.*\}\n', tail, re.MULTILINE)
        return int(found[-1]) if found else 0

    def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> bool:
        """Waits for it; False if a process ended before. Raises: SoakError if it hangs."""
        limit = time.monotonic() + seconds
        while not condition():
            if self._has_ended(any):
                return False
            self._check_time(limit, seconds)
        return not self._has_ended(any)

    def sleep(self, seconds: float) -> bool:
        """False if a process ended meanwhile."""
        end = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() >= end)

    def kill(self, *numbers: int) -> None:
        """SIGKILL of these processes, or of all, and their end."""
        killed = [self.processes[n] for n in numbers or range(len(self.processes))]
        for process in killed:
            process.kill()
        for process in killed:
            process.wait()

    def finish(self, seconds: float = SECONDS) -> int:
        """Waits for the end of all: 0, or the first other exit code. Raises: SoakError."""
        limit = time.monotonic() + seconds
        while not self._has_ended(all):
            self._check_time(limit, seconds)
        return next((code for code in self.codes if code), 0)

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of the processes that have ended."""
        return [process.poll() for process in self.processes]

    def _has_ended(self, quantifier: Callable[[Iterable[bool]], bool]) -> bool:
        return quantifier(code is not None for code in self.codes)

    def _check_time(self, limit: float, seconds: float) -> None:
        if time.monotonic() > limit:
            self.kill()
            raise SoakError(f"nothing happened for {seconds:.0f} s; {self._folder}")
        time.sleep(0.002)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()


def run_undisturbed(
    config: Path, directory: Path, *overrides: str, processes: int = 1, seconds: float = SECONDS
) -> None:
    """A whole run. Raises: SoakError if it fails."""
    with Trainer(config, directory, *overrides, processes=processes) as trainer:
        if trainer.finish(seconds):
            raise SoakError(f"an undisturbed run failed: {trainer.err[-2000:]}")


def differences(wanted: Path, found: Path, bound: float = 0.0) -> tuple[list[str], float]:
    """What is not the same in the metrics of two runs, and the greatest relative difference.

    bound: 0 demands equal bits of everything; else of losses only, relative.
    """
    lines, others = read_metrics(wanted), read_metrics(found)
    if not lines:
        raise SoakError(f"{wanted} has no step to compare with")
    steps, other_steps = ([line["step"] for line in part] for part in (lines, others))
    if steps != other_steps:
        counts, other_counts = Counter(steps), Counter(other_steps)
        wrong = [n for n in sorted({*counts, *other_counts}) if counts[n] != other_counts[n]]
        return [f"{found.name}: steps lost or repeated, or out of order: {wrong[:9]}"], 0.0
    greatest, told = 0.0, []
    for a, b in zip(lines, others, strict=True):
        for key in EXACT if not bound else CLOSE:
            if a.get(key) == b.get(key):
                continue
            is_pair = key in a and key in b
            distance = abs(a[key] - b[key]) / abs(a[key] or 1.0) if is_pair else float("inf")
            greatest = max(greatest, distance)
            if not distance <= bound:
                told.append(f"{found.name}: step {a['step']}: {key} {b.get(key)}, not {a.get(key)}")
    return told, greatest


def other_arrays(wanted: Path, found: Path, step: int) -> list[str]:
    """The arrays that are not the same in the checkpoints of a step, by their fingerprints."""
    prints = [_fingerprints(directory, step) for directory in (wanted, found)]
    if not prints[0]:
        raise SoakError(f"{wanted} has no checkpoint {step} to compare with")
    return [
        f"{found.name}: checkpoint {step}: {name} differs"
        for name in sorted({*prints[0], *prints[1]})
        if prints[0].get(name) != prints[1].get(name)
    ]


def _fingerprints(directory: Path, step: int) -> dict[str, str]:
    """Of every array in the checkpoint of a step; none if it is not there."""
    with contextlib.closing(
        Checkpoints(directory / "checkpoints", CheckpointConfig(), read_only=True)
    ) as checkpoints:
        try:
            return checkpoints.record(step)["fingerprints"]
        except CheckpointError:
            return {}
