"""Run on a disk that is full, read-only, or emptied during the run."""

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

from soaks.compare import array_differences, metric_differences
from soaks.processes import SoakError, TrainerProcesses, report, run_undisturbed, write_config

STEPS = 200
DISK_BYTES = 64 * 2**20
# Smaller than the arrays of a checkpoint, larger than the other files of a run.
FILE_BYTES = 200 * 2**10
# Free space on a full disk: enough for a few log lines, not for a checkpoint.
FREE_BYTES = 64 * 2**10


class _Skipped(Exception):
    """This machine does not allow the scenario."""


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount a small file system in memory.

    Raises:
        _Skipped: This process may not mount one.
    """
    path.mkdir()
    mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path))
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def mount(*arguments: str) -> None:
    """Run `mount`.

    Raises:
        _Skipped: It is missing or refuses.
    """
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise _Skipped("there is no command `mount`") from error
    if done.returncode:
        raise _Skipped(f"mount: {done.stderr.strip()}")


def digests(checkpoints: Path) -> dict[str, str]:
    """Return the digest of every file of every finished checkpoint."""
    return {
        str(path.relative_to(checkpoints)): hashlib.sha256(path.read_bytes()).hexdigest()
        for step in checkpoints.iterdir()
        if step.name.isdigit()
        for path in step.rglob("*")
        if path.is_file()
    }


def fill(disk: Path, free_bytes: int) -> Path:
    """Fill a disk with a file until only `free_bytes` are left."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while (free := shutil.disk_usage(disk).free) > free_bytes:
            file.write(bytes(min(2**20, free - free_bytes)))
    return filler


def exit_problems(trainer: TrainerProcesses, code: int, codes: tuple[int, ...]) -> list[str]:
    """Return what is wrong with the end of a process that has to exit with one of `codes`."""
    problems = [] if code in codes else [f"exit code {code}"]
    # After a failed save, threads of tensorstore call into an event loop that orbax has closed,
    # and print a traceback that cannot be suppressed from outside.
    frames = re.findall(r'^ *File "(.*?)"', trainer.out + trainer.err, re.MULTILINE)
    if any(not frame.endswith("asyncio/base_events.py") for frame in frames):
        problems.append("a traceback")
    if code and trainer.err.count("\n") != 1:
        problems.append("not one line on stderr")
    return problems


def wait_for_checkpoints(trainer: TrainerProcesses) -> int:
    """Wait until two checkpoints exist; return the length of stdout until then."""
    if not trainer.wait_until(lambda: trainer.out.count("saved step") >= 2):
        raise SoakError(f"the run ended before it was disturbed: {trainer.err[-500:]}")
    return trainer.out.rindex("\n") + 1


def scenario_result(
    trainer: TrainerProcesses, problems: list[str], since: int = 0
) -> dict[str, Any]:
    """Return the result of a scenario.

    since: the length of stdout before the run was disturbed.
    """
    log = unusual_lines(trainer, since) + trainer.err.splitlines()
    return {"ok": not problems, "exit": trainer.codes[0], "log": log[:4], "problems": problems}


def unusual_lines(trainer: TrainerProcesses, since: int) -> list[str]:
    """Return the lines of stdout that an undisturbed run would not have."""
    lines = trainer.out[since:].splitlines()
    return [line for line in lines if not re.match(r"step +\d|saved step \d", line)]


class DiskScenarios:
    """Every way to disturb a run, each a method that returns its result.

    Attributes:
        config: The configuration file of the runs.
    """

    def __init__(self, config: Path):
        self.config, self._folder = config, config.parent

    def _without_space(
        self,
        directory: Path,
        begin: Callable[[TrainerProcesses], Any],
        end: Callable[[TrainerProcesses], Any],
    ) -> dict[str, Any]:
        """Take away all space for a while: saves fail and are retried, and nothing is lost."""
        with TrainerProcesses(self.config, directory) as trainer:
            since = wait_for_checkpoints(trainer)
            begin(trainer)
            before = digests(directory / "checkpoints")
            retried = trainer.wait_until(lambda: trainer.out.count("was not saved") >= 2)
            problems = [] if retried else ["no second attempt to save was logged"]
            end(trainer)
            problems += exit_problems(trainer, trainer.finish(), (0,))
            after = digests(directory / "checkpoints")
            damaged = [name for name in before if after.get(name) != before[name]]
            problems += [f"an earlier checkpoint was damaged: {name}" for name in damaged]
            wanted = self._folder / "undisturbed"
            problems += metric_differences(wanted, directory)[0][:3]
            problems += array_differences(wanted, directory, STEPS)[:3]
            return scenario_result(trainer, problems, since)

    def file_limit(self) -> dict[str, Any]:
        """Limit the size of files for a while; needs no privileges."""

        def limit(trainer: TrainerProcesses, size: int) -> None:
            number = resource.RLIMIT_FSIZE
            resource.prlimit(trainer.processes[0].pid, number, (size, resource.RLIM_INFINITY))

        return self._without_space(
            self._folder / "file_limit",
            lambda trainer: limit(trainer, FILE_BYTES),
            lambda trainer: limit(trainer, resource.RLIM_INFINITY),
        )

    def full_disk(self, free_bytes: int = FREE_BYTES) -> dict[str, Any]:
        """Leave no space for a checkpoint for a while."""
        disk = self._folder / f"disk-{free_bytes}"
        with small_disk(disk):
            return self._without_space(
                disk / "run",
                lambda trainer: fill(disk, free_bytes),
                lambda trainer: (disk / "filler").unlink(),
            )

    def full_to_the_last_byte(self) -> dict[str, Any]:
        """Leave no space for a log line for a while."""
        return self.full_disk(0)

    def read_only(self) -> dict[str, Any]:
        """Make the run directory read-only: exit code 2 and one error line."""
        disk = self._folder / "read_only"
        with contextlib.ExitStack() as stack:
            if os.geteuid() == 0:  # permissions do not stop root
                stack.enter_context(small_disk(disk))
                run_undisturbed(self.config, disk / "run", "training.steps=20")
                mount("-o", "remount,ro", str(disk))
            else:
                disk.mkdir()
                disk.chmod(0o555)
                stack.callback(disk.chmod, 0o755)
            trainer = stack.enter_context(TrainerProcesses(self.config, disk / "run"))
            problems = exit_problems(trainer, trainer.finish(), (2,))
            if "cannot be written" not in trainer.err:
                problems.append("stderr does not say that the directory cannot be written")
            return scenario_result(trainer, problems)

    def checkpoints_deleted(self) -> dict[str, Any]:
        """Delete the folder of checkpoints."""
        return self._deleted("checkpoints")

    def run_deleted(self) -> dict[str, Any]:
        """Delete the run directory."""
        return self._deleted("")

    def _deleted(self, name: str) -> dict[str, Any]:
        """Delete a folder of a run: it must log that, and stop or save a correct checkpoint."""
        directory = self._folder / f"deleted-{name or 'run'}"
        with TrainerProcesses(self.config, directory) as trainer:
            since = wait_for_checkpoints(trainer)
            gone = self._folder / f"gone-{directory.name}"
            os.rename(directory / name, gone)
            shutil.rmtree(gone)
            code = trainer.finish()
            problems = exit_problems(trainer, code, (0, 1))
            if not code and not unusual_lines(trainer, since):
                problems.append("exit code 0, and no log line about the deleted folder")
            if not code:
                problems += array_differences(self._folder / "undisturbed", directory, STEPS)[:3]
            return scenario_result(trainer, problems, since)


def soak_disk(folder: Path) -> dict[str, Any]:
    """Run every scenario; those that this machine does not allow are skipped with a reason."""
    config = write_config(folder, training__steps=STEPS, checkpoint={"every": 10, "keep": 100})
    run_undisturbed(config, folder / "undisturbed")
    scenarios = DiskScenarios(config)
    results: dict[str, dict[str, Any]] = {}
    for scenario in (
        scenarios.file_limit,
        scenarios.full_disk,
        scenarios.full_to_the_last_byte,
        scenarios.read_only,
        scenarios.checkpoints_deleted,
        scenarios.run_deleted,
    ):
        name = scenario.__name__
        try:
            results[name] = scenario()
        except _Skipped as reason:
            results[name] = {"ok": True, "skipped": str(reason)}
        except SoakError as error:
            results[name] = {"ok": False, "problems": [str(error)]}
        report(f"{name}: {results[name]}")
    return {"ok": all(result["ok"] for result in results.values()), "scenarios": results}
