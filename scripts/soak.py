"""Breaks real runs on purpose: `scripts/soak.py kills | corruptions | disk | overhead`.

Each drives processes of `train.py` on simulated devices, in a temporary folder that is deleted at
the end, and kept and named after a failure. `kills`: SIGKILL at random moments, then every step as
in a run that nobody disturbed; of several processes mostly one is killed, and the others have to
end by themselves. `corruptions`: damage to the newest checkpoint is noticed, or has
no effect. `disk`: full, read-only, deleted under a run. `overhead`: what saving costs a step. The
last line of stdout is one JSON object; the exit code is 0 if all of it is as it should be, else 1.
"""

import argparse
import json
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
from soak_corruptions import serve_restores, soak_corruptions
from soak_disk import soak_disk
from soak_run import (
    CLOSE_BOUND,
    DEVICES,
    MESHES,
    SoakError,
    Trainer,
    differences,
    other_arrays,
    read_metrics,
    run_undisturbed,
    tell,
    write_config,
)

from parallel.cluster.errors import EXIT_PROCESS_LOST

PLANS = ("start", "restore", "steps", "save")
KILL_ALL = 0.2  # of the kills of several processes
PEER_SECONDS = 60.0  # that a process may outlive another; configuration: 30 before all have met


def is_state_there(trainer: Trainer) -> bool:
    """Whether it has restored or initialised its parameters."""
    return bool(re.search(r"resumed from step|initialised parameters", trainer.out))


def is_saving(trainer: Trainer) -> bool:
    """Whether there is a checkpoint that is not finished."""
    return any((trainer.directory / "checkpoints").glob("*tmp*"))


def phase_of(trainer: Trainer) -> str:
    """What a killed process was doing, from what it left."""
    if "mesh" not in trainer.out:
        return "start"
    if not is_state_there(trainer):
        names = [path.name for path in (trainer.directory / "checkpoints").glob("*")]
        has_checkpoint = any(name.isdigit() for name in names)
        return "restore" if has_checkpoint else "initialise"
    if "compiled the step" not in trainer.out:
        return "compile"
    return "save" if is_saving(trainer) else "steps"


def survivor_problems(trainer: Trainer, number: int, victims: Sequence[int]) -> list[str]:
    """Of a process that lost others: its exit code, and a line that names one of them."""
    code, said = trainer.codes[number], trainer.errors[number]
    names = "|".join(map(str, victims))
    if code == EXIT_PROCESS_LOST and re.search(
        rf"^error: .*(process|missing:) ({names})\b", said, re.M
    ):
        return []
    # jax's own end of the loss of process 0, when our thread does not get the interpreter in time.
    if code == -signal.SIGABRT and 0 in victims and "coordination service" in said:
        return []
    told = f"process {number} outlived {names}: exit {code}: {said[-500:]}"
    return [f"{trainer.directory.name}: {told}"]


@dataclass
class Kills:
    """A count of what was done, and of what was wrong."""

    config: Path
    times: int
    steps: int
    rng: random.Random
    change_mesh: bool
    processes: int
    phases: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    # Seconds to the first line of a process, and from there to its parameters; measured on the way.
    start: float = 8.0
    restore: float = 1.0
    # The longest time that a process took to end by itself after another was killed.
    outlived: float = 0.0

    def start_run(self, directory: Path) -> Trainer:
        """Starts it, on any mesh and with any number of processes if they change."""
        counts = [n for n in range(1, self.processes + 1) if not DEVICES % n]
        mesh = self.rng.choice(MESHES) if self.change_mesh else MESHES[0]
        return Trainer(
            self.config,
            directory,
            f"training.steps={self.steps}",
            *(f"mesh.{axis}={size}" for axis, size in mesh.items()),
            processes=self.rng.choice(counts) if self.change_mesh else self.processes,
        )

    def await_moment(self, trainer: Trainer, plan: str) -> bool:
        """Until a process is to be killed; False if one ended before."""
        rng, begin = self.rng, time.monotonic()
        if plan == "start":
            return trainer.sleep(rng.uniform(0, 1.2 * self.start))
        # The last line before anything is read from a checkpoint's arrays.
        if not trainer.until(lambda: "parameters and optimizer:" in trainer.out):
            return False
        self.start = time.monotonic() - begin
        if plan == "restore":
            return trainer.sleep(rng.uniform(0, self.restore))
        if not trainer.until(lambda: is_state_there(trainer)):
            return False
        self.restore = time.monotonic() - begin - self.start
        if not trainer.until(lambda: "compiled the step" in trainer.out):
            return False
        target = trainer.step + rng.randint(1, max(1, self.steps // 5))
        if not trainer.until(lambda: trainer.step >= target):
            return False
        if plan == "save":
            return trainer.until(lambda: is_saving(trainer)) and trainer.sleep(rng.uniform(0, 0.15))
        return trainer.sleep(rng.uniform(0, 0.02))

    def kill(self, trainer: Trainer) -> str:
        """Kills one process or all; those that are left must end soon, and name it. Who it was."""
        everyone = range(len(trainer.processes))
        one = [self.rng.choice(everyone)]
        victims = everyone if self.rng.random() < KILL_ALL else one
        begin = time.monotonic()
        trainer.kill(*victims)
        trainer.finish(PEER_SECONDS)
        self.outlived = max(self.outlived, time.monotonic() - begin)
        who = f"{' and '.join(map(str, victims))} of {len(everyone)}"
        self.victims[who] += 1
        for number in set(everyone) - set(victims):
            self.mismatches += survivor_problems(trainer, number, victims)
        return who

    def one_run(self, directory: Path) -> None:
        """Starts a run again and again, until it ends."""
        is_over = False
        while not is_over:
            plan = self.rng.choice(PLANS) if self.phases.total() < self.times else None
            with self.start_run(directory) as trainer:
                is_over = plan is None or not self.await_moment(trainer, plan)
                if is_over:
                    code = trainer.finish()
                    if code or trainer.err:
                        self.mismatches.append(
                            f"{directory.name}: exit {code}: {trainer.err[-500:]}"
                        )
                    continue
                victims = self.kill(trainer)
            phase = phase_of(trainer)
            self.phases[phase] += 1
            tell(
                f"kill {self.phases.total()}/{self.times}: {directory.name}, process {victims}, "
                f"{phase} (planned: {plan}), at step {trainer.step}"
            )


def soak_kills(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Kills, restarts, and compares with a run that nobody disturbed."""
    config, reference = write_config(folder), folder / "undisturbed"
    run_undisturbed(config, reference, f"training.steps={args.steps}", processes=args.processes)
    rng = random.Random(args.seed)
    kills = Kills(config, args.times, args.steps, rng, args.change_mesh, args.processes)
    bound, greatest, runs = CLOSE_BOUND if args.change_mesh else 0.0, 0.0, 0
    while kills.phases.total() < args.times:
        runs += 1
        directory = folder / f"run-{runs}"
        kills.one_run(directory)
        told, distance = differences(reference, directory, bound)
        if not args.change_mesh:
            told += other_arrays(reference, directory, args.steps)
        kills.mismatches += told
        greatest = max(greatest, distance)
        tell(f"{directory.name}: {f'{len(told)} mismatches' if told else 'as undisturbed'}")
        if not told:
            shutil.rmtree(directory)
    return {
        "ok": not kills.mismatches,
        "kills": kills.phases.total(),
        "by_phase": dict(kills.phases),
        "by_victim": dict(kills.victims),
        "longest_outlived": kills.outlived,
        "runs": runs,
        "restarts": kills.phases.total(),
        "bound": bound,
        "greatest_difference": greatest,
        "mismatches": kills.mismatches[:20],
    }


def usual_seconds(turns: list[list[float]]) -> float:
    """Of a turn of steps: for every place in it the median of all turns, so that no hiccup counts
    and a save, always at the same place, does.
    """
    return sum(statistics.median(place) for place in zip(*turns, strict=True))


def soak_overhead(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Step time after a save against step time without one, in turns, in one run."""
    every, cycles = args.every, args.cycles
    model = {"vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 8, "dtype": "float32"}
    model |= {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 1024}
    config = write_config(
        folder,
        mesh={},
        model=model,
        data__sequence_length=128,
        data__global_batch_size=4,
        # The first save compiles: it and the steps after it are not counted.
        training__steps=2 * every * (cycles + 2),
        training__eval_every=10**9,
        checkpoint={"every": 2 * every, "keep": 1},
    )
    run = folder / "run"
    run_undisturbed(config, run, seconds=24 * 3600)
    lines = read_metrics(run)
    times = [line["step_time"] for line in lines]
    # Metrics of the step before a save are read before it: what it costs falls on those after.
    starts = [2 * every * cycle for cycle in range(2, cycles + 2)]
    saving = usual_seconds([times[n : n + every] for n in starts])
    idle = usual_seconds([times[n + every : n + 2 * every] for n in starts])
    blocked = [line["save_blocked"] for line in lines if "save_blocked" in line]
    files = (run / "checkpoints").rglob("*")
    return {
        "ok": saving / idle < 1.03,
        "every": every,
        "ratio": saving / idle,
        "seconds_per_step": idle / every,
        "seconds_per_save": saving - idle,
        "blocked_first": blocked[0],
        "blocked": statistics.median(blocked[1:]),
        "bytes": sum(path.stat().st_size for path in files),
    }


def main(argv: list[str] | None = None) -> int:
    """Parses, runs one of them in a temporary folder, and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="soak", required=True)
    kills = commands.add_parser("kills", help="SIGKILL at random moments")
    kills.add_argument("--times", type=int, default=100)
    kills.add_argument("--steps", type=int, default=300)
    kills.add_argument(
        "--processes", type=int, choices=(1, 2, 4), default=1, help="that share the devices"
    )
    kills.add_argument(
        "--change-mesh",
        action="store_true",
        help="another mesh, and another number of processes up to that, at each restart",
    )
    corruptions = commands.add_parser("corruptions", help="damage to the newest checkpoint")
    corruptions.add_argument("--times", type=int, default=200)
    commands.add_parser("disk", help="full, read-only, deleted")
    overhead = commands.add_parser("overhead", help="what saving costs a step")
    overhead.add_argument("--every", type=int, default=50)
    overhead.add_argument("--cycles", type=int, default=5, help="pairs that are compared")
    restore = commands.add_parser("restore", help="for `corruptions`: restores what stdin names")
    restore.add_argument("config", type=Path)
    restore.add_argument("original", type=Path)
    for command in (kills, corruptions):
        command.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    if args.soak == "restore":
        serve_restores(args.config, args.original, sys.stdin)
        return 0
    soaks: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
        "kills": soak_kills,
        "corruptions": soak_corruptions,
        "disk": soak_disk,
        "overhead": soak_overhead,
    }
    # What was started and mounted goes away with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder, begin = Path(tempfile.mkdtemp(prefix="torus-soak-")), time.monotonic()
    tell(f"working in {folder}")
    result: dict[str, Any] = {"ok": False}
    try:
        result = soaks[args.soak](folder, args)
    except SoakError as error:
        result["problem"] = str(error)
    finally:
        if result["ok"]:
            shutil.rmtree(folder)
        else:
            tell(f"kept for a look: {folder}")
    print(json.dumps({"soak": args.soak, **result, "seconds": time.monotonic() - begin}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
