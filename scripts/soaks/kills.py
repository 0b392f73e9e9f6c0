"""Kill runs at random moments; after restarts they must equal an uninterrupted run."""

import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exit_codes import EXIT_PROCESS_LOST
from soaks.compare import CLOSE_BOUND, array_differences, metric_differences
from soaks.processes import (
    DEVICES,
    MESHES,
    Limit,
    SoakError,
    TrainerProcesses,
    count_workers,
    find_orphans,
    report,
    run_undisturbed,
    write_config,
)

PLANS = ("start", "restore", "steps", "save")
KILL_ALL = 0.2  # the share of kills that end all processes at once
# How long a process may outlive another. Before all have joined, start_timeout allows 30 s.
PEER_SECONDS = 60.0
SPARSE_MESH = {"dp": 1, "fsdp": 2, "ep": 2, "tp": 1}
# Experts that exchange tokens over ep and drop some; their biases change at every step.
SPARSE_MODEL = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | {
    "exchange": "alltoall",
    "capacity_factor": 1.5,
    "bias_update_speed": 0.01,
}


def phase_of(trainer: TrainerProcesses) -> str:
    """Return what a killed run was doing, judged by its log and its files."""
    if "mesh" not in trainer.out:
        return "start"
    if not trainer.is_restored:
        names = [path.name for path in (trainer.directory / "checkpoints").glob("*")]
        has_checkpoint = any(name.isdigit() for name in names)
        return "restore" if has_checkpoint else "initialise"
    if not trainer.is_compiled:
        return "compile"
    return "save" if trainer.is_saving else "steps"


def survivor_problems(trainer: TrainerProcesses, number: int, victims: Sequence[int]) -> list[str]:
    """Return what is wrong with the end of a process after others were killed.

    It has to exit with EXIT_PROCESS_LOST and one error line that names a killed process.
    """
    code, stderr = trainer.codes[number], trainer.errors[number]
    names = "|".join(map(str, victims))
    if code == EXIT_PROCESS_LOST and re.search(
        rf"^error: .*(process|missing:) ({names})\b", stderr, re.M
    ):
        return []
    # If process 0 is lost, jax may abort first, before our thread gets the interpreter.
    if code == -signal.SIGABRT and 0 in victims and "coordination service" in stderr:
        return []
    problem = f"process {number} outlived {names}: exit {code}: {stderr[-500:]}"
    return [f"{trainer.directory.name}: {problem}"]


@dataclass
class Kills:
    """Kill runs, and count the kills and what was wrong.

    Attributes:
        config: The configuration file of every run.
        limit: When enough kills are made.
        steps: Training steps of every run.
        rng: The source of all random choices.
        meshes: The meshes of the runs; each has the first, unless `change_mesh`.
        change_mesh: Change the mesh and the number of processes at each restart.
        processes: The number of processes, or its maximum.
        start, restore: Seconds to the first log line, and from there to the parameters. Both are
            measured on the way.
        longest_survival: The longest time that a process took to end after another was killed.
        with_workers: Kills of a process that had data worker processes.
    """

    config: Path
    limit: Limit
    steps: int
    rng: random.Random
    change_mesh: bool
    processes: int
    meshes: Sequence[Mapping[str, int]] = MESHES
    phases: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    start: float = 8.0
    restore: float = 1.0
    longest_survival: float = 0.0
    with_workers: int = 0

    def start_run(self, directory: Path) -> TrainerProcesses:
        """Start or restart a run."""
        counts = [n for n in range(1, self.processes + 1) if not DEVICES % n]
        mesh = self.rng.choice(self.meshes) if self.change_mesh else self.meshes[0]
        return TrainerProcesses(
            self.config,
            directory,
            f"training.steps={self.steps}",
            *(f"mesh.{axis}={size}" for axis, size in mesh.items()),
            processes=self.rng.choice(counts) if self.change_mesh else self.processes,
        )

    def wait_for_moment(self, trainer: TrainerProcesses, plan: str) -> bool:
        """Wait for the moment to kill; return False if a process ends first."""
        rng, begin = self.rng, time.monotonic()
        if plan == "start":
            return trainer.sleep(rng.uniform(0, 1.2 * self.start))
        # The last line before arrays of a checkpoint are read.
        if not trainer.wait_until(lambda: "parameters and optimizer:" in trainer.out):
            return False
        self.start = time.monotonic() - begin
        if plan == "restore":
            return trainer.sleep(rng.uniform(0, self.restore))
        if not trainer.wait_until(lambda: trainer.is_restored):
            return False
        self.restore = time.monotonic() - begin - self.start
        if not trainer.wait_until(lambda: trainer.is_compiled):
            return False
        target = trainer.step + rng.randint(1, max(1, self.steps // 5))
        if not trainer.wait_until(lambda: trainer.step >= target):
            return False
        if plan == "save":
            is_saving = trainer.wait_until(lambda: trainer.is_saving)
            return is_saving and trainer.sleep(rng.uniform(0, 0.15))
        return trainer.sleep(rng.uniform(0, 0.02))

    def kill(self, trainer: TrainerProcesses) -> str:
        """Kill one process or all, check how the others end, and return who was killed."""
        everyone = range(len(trainer.processes))
        one = [self.rng.choice(everyone)]
        victims = everyone if self.rng.random() < KILL_ALL else one
        self.with_workers += any(count_workers(trainer.processes[n]) for n in victims)
        begin = time.monotonic()
        trainer.kill(*victims)
        trainer.finish(PEER_SECONDS)
        self.longest_survival = max(self.longest_survival, time.monotonic() - begin)
        killed = f"{' and '.join(map(str, victims))} of {len(everyone)}"
        self.victims[killed] += 1
        for number in set(everyone) - set(victims):
            self.mismatches += survivor_problems(trainer, number, victims)
        orphans = find_orphans(trainer.processes)
        self.mismatches += [f"{trainer.directory.name}: {line}" for line in orphans]
        return killed

    def one_run(self, directory: Path) -> None:
        """Start a run again and again until it finishes."""
        is_over = False
        while not is_over:
            is_enough = self.limit.is_reached(self.phases.total())
            plan = None if is_enough else self.rng.choice(PLANS)
            with self.start_run(directory) as trainer:
                is_over = plan is None or not self.wait_for_moment(trainer, plan)
                if is_over:
                    code = trainer.finish()
                    if code or trainer.err:
                        problem = f"{directory.name}: exit {code}: {trainer.err[-500:]}"
                        self.mismatches.append(problem)
                    elif "nothing left to train" in trainer.out:
                        pass  # the kill came after the last save
                    elif plan and not (trainer.is_restored and trainer.is_compiled):
                        raise SoakError(f"the log has no line to wait for: {trainer.out[-500:]}")
                    continue
                killed = self.kill(trainer)
            phase = phase_of(trainer)
            self.phases[phase] += 1
            report(
                f"kill {self.phases.total()}/{self.limit.times}: {directory.name}, "
                f"process {killed}, {phase} (planned: {plan}), at step {trainer.step}"
            )


def soak_kills(
    folder: Path,
    *,
    limit: Limit,
    steps: int,
    seed: int,
    processes: int,
    change_mesh: bool,
    sparse: bool,
    workers: int,
) -> dict[str, Any]:
    """Kill and restart runs again and again, and compare each with an undisturbed run."""
    if sparse and change_mesh:
        raise SoakError(
            "--change-mesh with --sparse: roundings of another mesh may choose other experts, so "
            "losses cannot be compared; leave out one of them"
        )
    changes: dict[str, Any] = {"data__num_workers": workers}
    meshes: Sequence[Mapping[str, int]] = MESHES
    if sparse:
        changes |= {"model__moe": SPARSE_MODEL, "mesh": SPARSE_MESH}
        meshes = (SPARSE_MESH,)
    config, reference = write_config(folder, **changes), folder / "undisturbed"
    run_undisturbed(config, reference, f"training.steps={steps}", processes=processes)
    kills = Kills(config, limit, steps, random.Random(seed), change_mesh, processes, meshes)
    bound, greatest, runs = CLOSE_BOUND if change_mesh else 0.0, 0.0, 0
    while not limit.is_reached(kills.phases.total()):
        runs += 1
        directory = folder / f"run-{runs}"
        kills.one_run(directory)
        found, distance = metric_differences(reference, directory, bound)
        if not change_mesh:
            found += array_differences(reference, directory, steps)
        kills.mismatches += found
        greatest = max(greatest, distance)
        verdict = f"{len(found)} differences from" if found else "equals"
        report(f"{directory.name}: {verdict} the undisturbed run")
        if not found:
            shutil.rmtree(directory)
    return {
        "ok": not kills.mismatches,
        "kills": kills.phases.total(),
        "by_phase": dict(kills.phases),
        "by_victim": dict(kills.victims),
        "longest_survival": kills.longest_survival,
        "with_workers": kills.with_workers,
        "runs": runs,
        "bound": bound,
        "greatest_difference": greatest,
        "mismatches": kills.mismatches[:20],
    }
