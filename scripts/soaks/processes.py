"""Start `train.py` on a tiny model, or another script, watch it, and kill it."""

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _clone import ROOT

TIMEOUT = 300.0  # seconds without progress after which something hangs
DEVICES = 4
MESHES = (
    {"dp": 2, "fsdp": 1, "tp": 2},
    {"dp": 4, "fsdp": 1, "tp": 1},
    {"dp": 1, "fsdp": 4, "tp": 1},
    {"dp": 1, "fsdp": 1, "tp": 4},
    {"dp": 2, "fsdp": 2, "tp": 1},
    {"dp": 1, "fsdp": 2, "tp": 2},
)
# How long a worker process may outlive its parent. One that still imports ends after that: a few
# seconds on an idle machine.
ORPHAN_SECONDS = 60.0
# How long killed processes may take to end on a busy machine.
KILL_SECONDS = 30.0


class SoakError(Exception):
    """The soak itself cannot continue."""


@dataclass(frozen=True)
class Limit:
    """When a soak has made enough kills: after a number of them, or some minutes."""

    times: int
    minutes: float = math.inf
    begin: float = field(default_factory=time.monotonic)

    def is_reached(self, kills: int) -> bool:
        """Whether no further kill is to be made."""
        return kills >= self.times or time.monotonic() > self.begin + 60 * self.minutes


def report(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the configuration and the text of a tiny run on four devices.

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


def start_script(
    arguments: Sequence[str], logs: Path, number: int = 0, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a script of this clone as the leader of a process group.

    stdout and stderr go to the files out.NUMBER and err.NUMBER of the folder `logs`.
    """
    with open(logs / f"out.{number}", "w") as out, open(logs / f"err.{number}", "w") as err:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def group_members(leader: int) -> dict[int, str]:
    """Return the command lines of the running processes of a process group, by their ids."""
    members = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                members[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
    return members


def descendants(ancestor: int) -> dict[tuple[int, int], str]:
    """Return the command lines of a process's running descendants, by (id, time of start)."""
    parents, lines = dict[int, int](), dict[int, tuple[int, str]]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent, *rest = (folder / "stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                line = (folder / "cmdline").read_text().replace("\0", " ").rstrip()
                lines[int(folder.name)] = int(rest[17]), line
                parents[int(folder.name)] = int(parent)
    found = {ancestor}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return {(one, lines[one][0]): lines[one][1] for one in found - {ancestor}}


def is_running(number: int, started: int) -> bool:
    """Return whether the process that had this id at this time of start still runs."""
    try:
        state, *rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state not in "ZX" and int(rest[18]) == started


def count_workers(process: subprocess.Popen[bytes]) -> int:
    """Return how many worker processes of `multiprocessing` a process has."""
    return sum("spawn_main" in line for line in group_members(process.pid).values())


def find_orphans(processes: Iterable[subprocess.Popen[bytes]], but: str = "\0") -> list[str]:
    """Return what still runs of the groups of ended processes after ORPHAN_SECONDS, and kill it.

    but: text of command lines that are left out.
    """
    limit, found = time.monotonic() + ORPHAN_SECONDS, []
    for process in processes:
        while left := {n: x for n, x in group_members(process.pid).items() if but not in x}:
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        found += [f"process {number} outlived its parent: {left[number]}" for number in left]
        kill_group(process)
    return found


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants with SIGKILL, and wait until they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # Descendants are not children of this process: their end can only be looked for.
    limit = time.monotonic() + KILL_SECONDS
    while group_members(process.pid) and time.monotonic() < limit:
        time.sleep(0.01)


class TrainerProcesses:
    """`train.py` in one process, or in several that share the devices.

    A context manager that kills them at its end. stdout and stderr go to files.

    Attributes:
        directory: The run directory.
        processes: The processes, in order of their ids.
    """

    def __init__(self, config: Path, directory: Path, *overrides: str, processes: int = 1):
        self.directory = directory
        self._folder = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=config.parent))
        arguments = ["train.py", "--config", str(config), f"run.dir={directory}", *overrides]
        environment = {}
        identities: list[list[str]] = [[]]
        if processes > 1:
            environment["JAX_NUM_CPU_DEVICES"] = str(DEVICES // processes)
            arguments += ["--coordinator", f"127.0.0.1:{_free_port()}"]
            arguments += ["--num-processes", str(processes)]
            identities = [["--process-id", str(number)] for number in range(processes)]
        self.processes = [
            start_script([*arguments, *identity], self._folder, number, **environment)
            for number, identity in enumerate(identities)
        ]

    @property
    def out(self) -> str:
        """The stdout of process 0 so far; it alone logs what concerns the whole run."""
        return (self._folder / "out.0").read_text()

    @property
    def errors(self) -> list[str]:
        """The stderr of each process so far."""
        return [(self._folder / f"err.{n}").read_text() for n in range(len(self.processes))]

    @property
    def err(self) -> str:
        """The stderr of all processes so far."""
        return "".join(self.errors)

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each process, None while it runs."""
        return [process.poll() for process in self.processes]

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl, 0 before the first."""
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return 0
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            tail = file.read().decode()
        found = re.findall(r'^\{"step": (\d+),.*\}\n', tail, re.MULTILINE)
        return int(found[-1]) if found else 0

    @property
    def is_restored(self) -> bool:
        """Whether the parameters are restored or initialised."""
        return bool(re.search(r"resumed from step|initialised parameters", self.out))

    @property
    def is_compiled(self) -> bool:
        """Whether the training step is compiled."""
        return "compiled the training step" in self.out

    @property
    def is_saving(self) -> bool:
        """Whether an unfinished checkpoint exists."""
        return any((self.directory / "checkpoints").glob("*tmp*"))

    def wait_until(self, condition: Callable[[], bool], seconds: float = TIMEOUT) -> bool:
        """Wait for a condition; return False if a process ends first.

        Raises:
            SoakError: Neither happened in time.
        """
        limit = time.monotonic() + seconds
        while not condition():
            if self._has_ended(any):
                return False
            self._check_time(limit, seconds)
        return not self._has_ended(any)

    def sleep(self, seconds: float) -> bool:
        """Wait for some seconds; return False if a process ends first."""
        end = time.monotonic() + seconds
        return self.wait_until(lambda: time.monotonic() >= end)

    def kill(self, *numbers: int) -> None:
        """Kill these processes, or all, with SIGKILL, and wait for their end."""
        killed = [self.processes[n] for n in numbers or range(len(self.processes))]
        for process in killed:
            process.kill()
        for process in killed:
            process.wait()

    def finish(self, seconds: float = TIMEOUT) -> int:
        """Wait until all processes end; return the first exit code that is not 0, or 0.

        Raises:
            SoakError: They did not end in time.
        """
        limit = time.monotonic() + seconds
        while not self._has_ended(all):
            self._check_time(limit, seconds)
        return next((code for code in self.codes if code), 0)

    def _has_ended(self, quantifier: Callable[[Iterable[bool]], bool]) -> bool:
        return quantifier(code is not None for code in self.codes)

    def _check_time(self, limit: float, seconds: float) -> None:
        if time.monotonic() > limit:
            self.kill()
            raise SoakError(f"no progress for {seconds:.0f} s; see the logs in {self._folder}")
        time.sleep(0.002)

    def __enter__(self) -> "TrainerProcesses":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            kill_group(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_undisturbed(
    config: Path, directory: Path, *overrides: str, processes: int = 1, seconds: float = TIMEOUT
) -> None:
    """Train a whole run.

    Raises:
        SoakError: It fails.
    """
    with TrainerProcesses(config, directory, *overrides, processes=processes) as trainer:
        if trainer.finish(seconds):
            raise SoakError(f"an undisturbed run failed: {trainer.err[-2000:]}")
