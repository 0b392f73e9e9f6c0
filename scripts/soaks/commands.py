"""Kill commands that make a folder; the same command again must complete it with equal bytes."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from soaks.compare import array_differences
from soaks.processes import (
    ORPHAN_SECONDS,
    TIMEOUT,
    Limit,
    SoakError,
    count_workers,
    descendants,
    find_orphans,
    is_running,
    kill_group,
    report,
    run_undisturbed,
    start_script,
    write_config,
)
from training.hugging_face.new_directory import MARKER

STORE_PIECES = 2  # tasks of a worker process, of each source
_PIECE_BYTES = 17 * 2**20  # of text: larger than data.formats.pieces.PIECE_BYTES


def _digests(folder: Path, skip: Sequence[str] = ()) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder by its path; of a folder the empty text.

    skip: patterns of paths that are left out.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not any(fnmatch(name, pattern) for pattern in skip):
            is_file = path.is_file()
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
    return found


def file_differences(wanted: Path, found: Path, skip: Sequence[str] = ()) -> list[str]:
    """Return the files that differ, are missing, or are left over in the second folder."""
    first, second = _digests(wanted, skip), _digests(found, skip)
    names = sorted({*first, *second})
    return [
        f"{name}: {'differs' if name in first and name in second else 'missing or left over'}"
        for name in names
        if first.get(name) != second.get(name)
    ]


def _snapshot(folder: Path) -> frozenset[tuple[Any, ...]]:
    """Return what changes whenever a file of a folder is written."""
    found = []
    for where, folders, files in os.walk(folder):  # passes over what is deleted meanwhile
        for path in (os.path.join(where, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                found.append((path, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return frozenset(found)


@dataclass(frozen=True)
class Job:
    """A command that makes a folder.

    Attributes:
        name: The name of the job.
        arguments: The script and its arguments.
        folder: The folder that it makes.
        differences: Returns what differs between two such folders.
        last: The file that completes the folder; None: the command may run again anyway.
        on_ray: Whether it starts a Ray cluster, whose tasks are killed, too.
    """

    name: str
    arguments: Sequence[str]
    folder: Path
    differences: Callable[[Path, Path], list[str]] = file_differences
    last: str | None = None
    on_ray: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the folder looks complete, so that the command would refuse it."""
        return self.last is not None and (self.folder / self.last).exists()


@dataclass
class CommandKills:
    """Kill a command at random moments, and count the kills and what was wrong.

    Attributes:
        job: The command.
        logs: The folder for its output.
        rng: The source of all random choices.
        limit: When enough kills are made.
        seconds: How long the command takes.
        changes: How often it changes its files.
        with_workers: Kills of a process that had worker processes.
    """

    job: Job
    logs: Path
    rng: random.Random
    limit: Limit
    seconds: float = 0.0
    changes: int = 0
    with_workers: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    @property
    def is_enough(self) -> bool:
        """Whether no further kill is to be made."""
        return self.limit.is_reached(self.phases.total())

    def make_reference(self) -> Path:
        """Run the command without a kill, and return the folder under another name.

        Raises:
            SoakError: It fails.
        """
        process, begin = start_script(self.job.arguments, self.logs), time.monotonic()
        self.wait_for(process, 0.0, None)
        self.seconds = time.monotonic() - begin
        if process.wait():
            raise SoakError(f"{self.job.name} without a kill failed: {self._read('err')}")
        report(f"{self.job.name}: {self.seconds:.1f} s, {self.changes} changes of its files")
        return self.job.folder.rename(self.job.folder.with_name(f"{self.job.name}-undisturbed"))

    def kill_task(self, process: subprocess.Popen[bytes]) -> bool:
        """Kill a process of Ray that works on a task; return False if the command ends first."""
        limit = time.monotonic() + TIMEOUT
        while process.poll() is None and time.monotonic() < limit:
            lines = descendants(process.pid)
            if tasks := [n for (n, _), line in lines.items() if "ray::_tokenize" in line]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rng.choice(tasks), signal.SIGKILL)
                    self.phases["a task"] += 1
                return True
            time.sleep(0.002)
        if process.poll() is None:
            kill_group(process)
            raise SoakError(f"{self.job.name} began no task; see {self.logs}")
        self.check_end(process)
        return False

    def wait_for(
        self, process: subprocess.Popen[bytes], seconds: float, changes: int | None
    ) -> bool:
        """Wait for some seconds or changes of the files; return False if the command ends first.

        changes: None: until the end.
        Raises: SoakError: The command does not end.
        """
        begin, seen, before = time.monotonic(), 0, _snapshot(self.job.folder)
        try:
            while process.poll() is None:
                now = _snapshot(self.job.folder)
                seen, before = seen + (now != before), now
                passed = time.monotonic() - begin
                if changes is not None and seen >= changes and passed >= seconds:
                    return True
                if passed > TIMEOUT:
                    raise SoakError(f"{self.job.name} did not end; see {self.logs}")
                time.sleep(0.001)
        except BaseException:
            kill_group(process)
            raise
        self.changes = max(self.changes, seen)
        return False

    def kill_once(self) -> bool:
        """Start the command and kill it; return False if it ended first."""
        before = _snapshot(self.job.folder)
        process = start_script(self.job.arguments, self.logs)
        if self.job.on_ray and self.rng.random() < 0.5 and not self.kill_task(process):
            return False
        if self.rng.random() < 0.3:
            moment = self.rng.uniform(0, self.seconds), 0
        else:
            moment = 0.0, self.rng.randint(1, max(1, self.changes // 2))
        if not self.wait_for(process, *moment):
            self.check_end(process)
            return False
        self.with_workers += bool(count_workers(process))
        family = descendants(process.pid)
        process.kill()
        process.wait()
        self.check_orphans(process, family)
        phase = "complete" if self.job.is_complete else "writing"
        self.phases[phase if _snapshot(self.job.folder) != before else "before a file"] += 1
        return True

    def check_end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end of the command; it has to be successful, and to leave no process."""
        if process.wait(TIMEOUT) or "Traceback" in self._read("err"):
            problem = f"exit {process.returncode}: {self._read('err')[-500:]}"
            self.mismatches.append(f"{self.job.name}: {problem}")
        self.check_orphans(process, {})

    def check_orphans(
        self, process: subprocess.Popen[bytes], family: Mapping[tuple[int, int], str]
    ) -> None:
        """Note the processes that outlive the command, and kill them.

        family: descendants of the command. Those of Ray have process groups of their own. Agents of
            Ray are left out: they look for their cluster for two minutes, and then end.
        """
        found = find_orphans([process], but="Agent")
        family = {key: line for key, line in family.items() if "gent" not in line}
        limit = time.monotonic() + ORPHAN_SECONDS
        while (left := [key for key in family if is_running(*key)]) and time.monotonic() < limit:
            time.sleep(0.05)
        found += [f"process {key[0]} outlived its parent: {family[key]}" for key in left]
        for number, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.mismatches += [f"{self.job.name}: {line.rstrip()}" for line in found]

    def one_folder(self, reference: Path) -> None:
        """Start the command again and again until the folder is complete, and compare."""
        while not self.job.is_complete:
            if self.is_enough:
                self.check_end(start_script(self.job.arguments, self.logs))
                break
            if not self.kill_once():
                break
            count = f"{self.phases.total()}/{self.limit.times}"
            report(f"{self.job.name}: kill {count}: {dict(self.phases)}")
        found = self.job.differences(reference, self.job.folder)
        self.mismatches += [f"{self.job.name}: {line}" for line in found]
        verdict = f"{len(found)} differences from" if found else "equals"
        report(f"{self.job.name}: {verdict} that without a kill")
        if found:
            self.job.folder.rename(self.logs / f"{self.job.name}-{time.monotonic_ns()}")
        else:
            shutil.rmtree(self.job.folder)

    def _read(self, name: str) -> str:
        return (self.logs / f"{name}.0").read_text()


def kill_jobs(jobs: Sequence[Job], logs: Path, limit: Limit, seed: int) -> dict[str, Any]:
    """Kill each command its share of the times; return the figures."""
    result: dict[str, Any] = {"ok": True, "kills": 0, "mismatches": []}
    for number, job in enumerate(jobs):
        share = limit.times // len(jobs) + (number < limit.times % len(jobs))
        own = Limit(share, limit.minutes / len(jobs))
        kills, folders = CommandKills(job, logs, random.Random(seed), own), 0
        reference = kills.make_reference()
        while not kills.is_enough:
            kills.one_folder(reference)
            folders += 1
        figures = {"by_phase": dict(kills.phases), "folders": folders}
        result[job.name] = figures | {"with_workers": kills.with_workers}
        result["kills"] += kills.phases.total()
        result["mismatches"] += kills.mismatches[:20]
        result["ok"] = not result["mismatches"]
    return result


def write_sources(folder: Path) -> Path:
    """Write texts and chats with some damaged lines, and the configuration that reads them."""
    for number in range(STORE_PIECES):
        line = f"def f{number}(x): return x * {number}\n"
        (folder / f"{number}.txt").write_text(line * (_PIECE_BYTES // len(line)))
    with open(folder / "chats.jsonl", "w") as file:
        for number in range(STORE_PIECES * _PIECE_BYTES // 20_000):
            texts = ("user", f"{number}?" * 1000), ("assistant", f"{number}." * 3000)
            messages = [{"role": role, "content": text} for role, text in texts]
            file.write(json.dumps({"messages": messages})[: -9 if number % 100 == 7 else None])
            file.write("\n")
    chats = {"files": f"{folder}/chats.jsonl", "field": "messages"}
    data = {"sources": {"texts": {"files": f"{folder}/*.txt"}, "chats": chats}}
    path = folder / "soak.yaml"
    path.write_text(json.dumps({"data": data | {"on_error": "skip"}}))  # JSON is YAML
    return path


def soak_prepare(
    folder: Path, *, limit: Limit, seed: int, workers: int, engine: str
) -> dict[str, Any]:
    """Kill `prepare_data.py`; its stores must equal those of a preparation without a kill.

    engine: local or ray; on Ray, its tasks are killed, too.
    """
    command = ["scripts/prepare_data.py", "--config", str(write_sources(folder))]
    made = folder / "stores"
    arguments = [*command, "--workers", str(workers), f"data.cache_dir={made}"]
    arguments += ["--engine", engine]
    job = Job("prepare", arguments, made, on_ray=engine == "ray")
    return kill_jobs([job], folder, limit, seed)


def model_differences(wanted: Path, found: Path) -> list[str]:
    """Return the differences between two models; a complete one may still have the marker."""
    return file_differences(wanted, found, [MARKER])


def run_differences(wanted: Path, found: Path) -> list[str]:
    """Return the differences between two imported runs.

    Files of checkpoints have random names, and a lock names the process that held it.
    """
    names = file_differences(wanted, found, ["checkpoints/0/*", MARKER, ".lock"])
    return names + array_differences(wanted, found, 0)


def soak_conversions(folder: Path, *, limit: Limit, seed: int) -> dict[str, Any]:
    """Kill `convert.py to-hf` and `from-hf`; what they make must look incomplete until it is."""
    model = {"vocab_size": 264, "hidden_size": 512, "num_hidden_layers": 4, "dtype": "float32"}
    model |= {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1376}
    config, run = write_config(folder, model=model), folder / "run"
    run_undisturbed(config, run, "training.steps=1")
    exported, imported = folder / "exported", folder / "imported"
    script = "scripts/convert.py"
    writing = Job(
        "to-hf",
        [script, "to-hf", str(run), str(exported)],
        exported,
        model_differences,
        last="config.json",
    )
    # The source of imports is the reference of exports.
    source = str(folder / "to-hf-undisturbed")
    rows = ["data.sequence_length=32", "data.global_batch_size=8"]
    reading = Job(
        "from-hf",
        [script, "from-hf", source, str(imported), *rows],
        imported,
        run_differences,
        last="config.yaml",
    )
    return kill_jobs([writing, reading], folder, limit, seed)
