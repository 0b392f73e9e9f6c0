"""A disk that is full, read-only, or emptied under a run: what the run does about it."""

import argparse
import contextlib
import hashlib
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from soak_run import (
    SoakError,
    Trainer,
    differences,
    other_arrays,
    run_undisturbed,
    tell,
    write_config,
)

STEPS = 200
DISK_BYTES = 64 * 2**20
# Fewer than the arrays of a checkpoint take, more than the other files of a run.
FILE_BYTES = 200 * 2**10
# What is left when a disk is full: a few lines, no checkpoint.
ROOM_BYTES = 64 * 2**10


class _Skipped(Exception):
    """This machine does not let us do that."""


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A file system of its own in memory. Raises: _Skipped if this process may not mount one."""
    path.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    mount(*options)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def mount(*arguments: str) -> None:
    """Raises: _Skipped if it is refused."""
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise _Skipped("there is no command `mount`") from error
    if done.returncode:
        raise _Skipped(f"mount: {done.stderr.strip()}")


def digests(checkpoints: Path) -> dict[str, str]:
    """Of every file of every finished checkpoint."""
    return {
        str(path.relative_to(checkpoints)): hashlib.sha256(path.read_bytes()).hexdigest()
        for step in checkpoints.iterdir()
        if step.name.isdigit()
        for path in step.rglob("*")
        if path.is_file()
    }


def fill(disk: Path, room: int) -> Path:
    """A file that leaves so many bytes."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free) > room:
            file.write(bytes(min(2**20, free - room)))
    return filler


def common_problems(trainer: Trainer, code: int, codes: tuple[int, ...]) -> list[str]:
    """Of a process that has ended."""
    told = [] if code in codes else [f"exit code {code}"]
    # Threads of a save that failed call back into an event loop that orbax has closed, and
    # tensorstore prints that: noise of theirs, which nobody outside can hold back.
    frames = re.findall(r'^ *File "(.*?)"', trainer.out + trainer.err, re.MULTILINE)
    if any(not frame.endswith("asyncio/base_events.py") for frame in frames):
        told.append("a traceback")
    if code and trainer.err.count("\n") != 1:
        told.append("not one line on stderr")
    return told


def until_failed_twice(trainer: Trainer) -> bool:
    """A save that failed, and its next try too; False if the run ended before."""
    return trainer.until(lambda: trainer.out.count("was not saved") >= 2)


def under_way(trainer: Trainer) -> int:
    """Waits until there are checkpoints to lose. The characters of stdout until then."""
    if not trainer.until(lambda: trainer.out.count("saved step") >= 2):
        raise SoakError(f"the run ended before it was disturbed: {trainer.err[-500:]}")
    return trainer.out.rindex("\n") + 1


def no_room(
    config: Path, directory: Path, begin: Callable[[Trainer], Any], end: Callable[[Trainer], Any]
) -> dict[str, Any]:
    """A run with no room for a while: it goes on, saves again, and nothing saved is lost."""
    with Trainer(config, directory) as trainer:
        since = under_way(trainer)
        begin(trainer)
        before = digests(directory / "checkpoints")
        problems = [] if until_failed_twice(trainer) else ["no second try of a save was seen"]
        end(trainer)
        problems += common_problems(trainer, trainer.finish(), (0,))
        after = digests(directory / "checkpoints")
        damaged = [name for name in before if after.get(name) != before[name]]
        problems += [f"an earlier checkpoint was damaged: {name}" for name in damaged]
        wanted = config.parent / "undisturbed"
        problems += differences(wanted, directory)[0][:3]
        problems += other_arrays(wanted, directory, STEPS)[:3]
        return report(trainer, problems, since)


def report(trainer: Trainer, problems: list[str], since: int = 0) -> dict[str, Any]:
    """What a scenario came to. since: characters of stdout before it was disturbed."""
    said = unusual(trainer, since) + trainer.err.splitlines()
    return {"ok": not problems, "exit": trainer.codes[0], "said": said[:4], "problems": problems}


def unusual(trainer: Trainer, since: int) -> list[str]:
    """The lines of stdout that a run without trouble would not have."""
    lines = trainer.out[since:].splitlines()
    return [line for line in lines if not re.match(r"step +\d|saved step \d", line)]


def file_limit(config: Path) -> dict[str, Any]:
    """No file may grow beyond a limit, for a while: needs no rights."""

    def limit(trainer: Trainer, size: int) -> None:
        number = resource.RLIMIT_FSIZE
        resource.prlimit(trainer.processes[0].pid, number, (size, resource.RLIM_INFINITY))

    return no_room(
        config,
        config.parent / "file_limit",
        lambda trainer: limit(trainer, FILE_BYTES),
        lambda trainer: limit(trainer, resource.RLIM_INFINITY),
    )


def full_disk(config: Path, room: int = ROOM_BYTES) -> dict[str, Any]:
    """A disk without room for a checkpoint, for a while."""
    disk = config.parent / f"disk-{room}"
    with small_disk(disk):
        return no_room(
            config,
            disk / "run",
            lambda trainer: fill(disk, room),
            lambda trainer: (disk / "filler").unlink(),
        )


def full_to_the_last_byte(config: Path) -> dict[str, Any]:
    """A disk without room for a line, for a while."""
    return full_disk(config, 0)


def read_only(config: Path) -> dict[str, Any]:
    """A run directory that cannot be written: exit code 2 and one line."""
    disk = config.parent / "read_only"
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:  # whom permissions do not stop
            stack.enter_context(small_disk(disk))
            run_undisturbed(config, disk / "run", "training.steps=20")
            mount("-o", "remount,ro", str(disk))
        else:
            disk.mkdir()
            disk.chmod(0o555)
            stack.callback(disk.chmod, 0o755)
        trainer = stack.enter_context(Trainer(config, disk / "run"))
        problems = common_problems(trainer, trainer.finish(), (2,))
        if "cannot be written" not in trainer.err:
            problems.append("stderr does not say what is wrong")
        return report(trainer, problems)


def deleted(config: Path, name: str) -> dict[str, Any]:
    """The run's folder, or one in it, goes away at once: somebody is told, on one line.

    Either it stops, or its last checkpoint is that of a run that nobody disturbed.
    """
    directory = config.parent / f"deleted-{name or 'run'}"
    with Trainer(config, directory) as trainer:
        since = under_way(trainer)
        gone = config.parent / f"gone-{directory.name}"
        os.rename(directory / name, gone)
        shutil.rmtree(gone)
        code = trainer.finish()
        problems = common_problems(trainer, code, (0, 1))
        if not code and not unusual(trainer, since):
            problems.append("exit code 0, and nobody was told")
        if not code:
            problems += other_arrays(config.parent / "undisturbed", directory, STEPS)[:3]
        return report(trainer, problems, since)


def soak_disk(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Every scenario; those that this machine does not allow are skipped, and say why."""
    config = write_config(folder, training__steps=STEPS, checkpoint={"every": 10, "keep": 100})
    run_undisturbed(config, folder / "undisturbed")
    scenarios: dict[str, Callable[[], dict[str, Any]]] = {
        "file_limit": lambda: file_limit(config),
        "full_disk": lambda: full_disk(config),
        "full_to_the_last_byte": lambda: full_to_the_last_byte(config),
        "read_only": lambda: read_only(config),
        "checkpoints_deleted": lambda: deleted(config, "checkpoints"),
        "run_deleted": lambda: deleted(config, ""),
    }
    results: dict[str, dict[str, Any]] = {}
    for name, scenario in scenarios.items():
        try:
            results[name] = scenario()
        except _Skipped as reason:
            results[name] = {"ok": True, "skipped": str(reason)}
        except SoakError as error:
            results[name] = {"ok": False, "problems": [str(error)]}
        tell(f"{name}: {results[name]}")
    return {"ok": all(result["ok"] for result in results.values()), "scenarios": results}
