"""Damage the stores of running trainers: each must end with one line, and resume bit-equal.

A run is damaged while it trains or before it starts. It ends with exit code 1 and the name of the
damaged file. Until then its metrics are those of an undisturbed run. The store is deleted, the run
is started again, and it ends with the metrics and the arrays of the undisturbed run.
"""

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soaks.compare import EXACT, array_differences, metric_differences, read_metrics
from soaks.processes import TrainerProcesses, report, run_undisturbed, write_config

STEPS, FIRST_STEP = 400, 20


@dataclass(frozen=True)
class Case:
    """A run and its damage."""

    how: str
    """`flip` a bit of every block, or `truncate` to a half."""
    processes: int
    workers: int
    is_running: bool
    """Whether the run is damaged while it trains."""


CASES = (
    Case("flip", processes=1, workers=0, is_running=True),
    Case("truncate", processes=1, workers=0, is_running=True),
    Case("truncate", processes=1, workers=2, is_running=True),
    Case("flip", processes=2, workers=0, is_running=True),
    Case("flip", processes=1, workers=2, is_running=False),
    Case("truncate", processes=2, workers=2, is_running=True),
)


def damage_tokens(cache: Path, how: str) -> Path:
    """Damage the tokens of the only store of a cache; return its folder."""
    (path,) = cache.glob("*/tokens.bin")
    if how == "truncate":
        os.truncate(path, path.stat().st_size // 2)
        return path.parent
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), 4096):
        data[place] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    return path.parent


def soak_runs(folder: Path, count: int) -> list[dict[str, Any]]:
    """Run the first `count` cases, and return what happened in each."""
    if not count:
        return []
    changes = {"training__steps": STEPS, "training__eval_every": STEPS, "checkpoint__every": 25}
    config, outcomes = write_config(folder, **changes), []
    for processes in sorted({case.processes for case in CASES[:count]}):
        run_undisturbed(config, folder / f"undisturbed-{processes}", processes=processes)
    for number, case in enumerate(CASES[:count]):
        problems, seconds = _run_case(config, folder / f"run-{number}", case)
        outcomes.append({**vars(case), "ok": not problems, "seconds_to_end": round(seconds, 1)})
        report(f"{case}: ended after {seconds:.1f} s; {'; '.join(problems) or 'as it should'}")
    return outcomes


def _run_case(config: Path, directory: Path, case: Case) -> tuple[list[str], float]:
    """Return what is wrong, and the seconds from the damage to the end of the run."""
    undisturbed = config.parent / f"undisturbed-{case.processes}"
    cache = config.parent / f"data-{directory.name}"
    shutil.copytree(config.parent / "data", cache)
    options = f"data.cache_dir={cache}", f"data.num_workers={case.workers}"
    store = None if case.is_running else damage_tokens(cache, case.how)
    with TrainerProcesses(config, directory, *options, processes=case.processes) as trainer:
        if store is None:
            trainer.wait_until(lambda: trainer.step >= FIRST_STEP)
            store = damage_tokens(cache, case.how)
        begin = time.monotonic()
        trainer.finish()
        seconds = time.monotonic() - begin
        problems = _end_problems(trainer, store)
    problems += _prefix_problems(undisturbed, directory)
    shutil.rmtree(store)
    run_undisturbed(config, directory, *options, processes=case.processes)
    problems += metric_differences(undisturbed, directory)[0]
    problems += array_differences(undisturbed, directory, STEPS)
    return problems, seconds


def _end_problems(trainer: TrainerProcesses, store: Path) -> list[str]:
    """Return what is wrong with exit codes and error lines.

    A process prints one line; if several find damage at once, also the lines of the others.
    """
    problems, name = [], re.escape(str(store))
    for number, (code, err) in enumerate(zip(trainer.codes, trainer.errors, strict=True)):
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        is_named = 1 <= len(lines) <= len(trainer.codes) and all(
            re.search(rf"{name}/tokens\.bin.*; delete {name} ", line) for line in lines
        )
        if code != 1 or not is_named or "Traceback" in err:
            problems.append(f"process {number} ended with {code}: {err[-1000:]}")
    return problems


def _prefix_problems(undisturbed: Path, directory: Path) -> list[str]:
    """Return the steps before the end whose metrics are not those of an undisturbed run."""
    wanted = {line["step"]: line for line in read_metrics(undisturbed)}
    return [
        f"step {line['step']} was trained with other data"
        for line in read_metrics(directory)
        if any(line.get(key) != wanted[line["step"]].get(key) for key in EXACT)
    ]
