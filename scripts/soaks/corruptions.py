"""Damage the newest checkpoint: a restart must detect the damage or be unaffected by it."""

import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _clone import ROOT

from configs.build import build_program, open_devices
from configs.schema import dump_config, load_config
from data.pipeline import Dataset
from soaks.processes import TIMEOUT, report, run_undisturbed, write_config
from training.checkpoint import Checkpoints
from training.fingerprint import fingerprints, leaf_name
from training.logs import logging_to
from training.resume import Resumer

TRIAL_TIMEOUT = 60.0
DAMAGES = ("flip", "truncate", "delete", "garbage", "empty")
GOOD = ("detected", "harmless")
Table = dict[str, dict[str, Counter[str]]]


def contents(state: Any) -> dict[str, tuple[Any, ...]]:
    """Return shape, dtype and bytes of every array of a state, by its dotted path."""
    return {
        leaf_name(path): (x.shape, str(x.dtype), np.asarray(x).tobytes())
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


class Restorer:
    """Restore as a starting trainer does, and compare with the undamaged original."""

    def __init__(self, config_path: Path, original: Path):
        self.config = load_config(config_path)
        devices, _ = open_devices(self.config)
        self._rows = Dataset(self.config.data)
        self._program = build_program(self.config, devices)
        with (
            jax.set_mesh(self._program.tp.manager.mesh),
            contextlib.closing(
                Checkpoints(original, self.config.checkpoint, read_only=True)
            ) as checkpoints,
        ):
            self._wanted = {
                step: (checkpoints.record(step), self._restore(checkpoints, step))
                for step in checkpoints.steps
            }

    def _restore(self, checkpoints: Checkpoints, step: int) -> dict[str, tuple[Any, ...]]:
        return contents(checkpoints.restore(step, self._program.abstract_state))

    def trial(self, directory: Path) -> dict[str, Any]:
        """Restore from a damaged folder of checkpoints.

        Returns: `step` (that the trainer would continue from, 0 for a fresh start), `wrong` (what
        differs from the original) and `log`; or `crash`.
        """
        log = directory.with_suffix(".log")
        with jax.set_mesh(self._program.tp.manager.mesh), logging_to(log, None):
            try:
                with contextlib.closing(
                    Checkpoints(directory, self.config.checkpoint)
                ) as checkpoints:
                    result = self._newest(checkpoints)
            except Exception as error:  # any exception would have ended the trainer
                result = {"crash": f"{type(error).__name__}: {error}".partition("\n")[0]}
        return {**result, "log": log.read_text().splitlines()}

    def _newest(self, checkpoints: Checkpoints) -> dict[str, Any]:
        config, abstract = self.config, self._program.abstract_state
        resumer = Resumer(
            checkpoints, self._rows, abstract, config.training.steps, dump_config(config)
        )
        origin = resumer.find()
        if not origin.step:
            return {"step": 0, "wrong": "everything: a start from scratch"}
        origin, state = resumer.restore(origin)
        record, wanted = self._wanted[origin.step]
        found, prints = contents(state), fingerprints(state)
        wrong = [name for name in wanted if found.get(name) != wanted[name]]
        wrong += [name for name, digits in record["fingerprints"].items() if prints[name] != digits]
        if checkpoints.record(origin.step) != record:
            wrong.append("record")
        return {"step": origin.step, "wrong": ", ".join(wrong)}


def serve_restores(config: Path, original: Path, paths: Iterable[str]) -> None:
    """Run one trial for each path, and write its result to the file PATH.json."""
    restorer = Restorer(config, original)
    for path in paths:
        directory = Path(path.strip())
        partial = directory.with_suffix(".partial")
        partial.write_text(json.dumps(restorer.trial(directory)))
        partial.rename(directory.with_suffix(".json"))


def classify(result: dict[str, Any], newest: int) -> str:
    """Return the verdict on a trial: one of `GOOD`, or what went wrong."""
    for bad in ("hang", "crash"):
        if bad in result:
            return bad
    if result["wrong"]:
        return "silently wrong"
    if result["step"] == newest:
        return "harmless"
    is_logged = any(re.search(rf"checkpoint {newest}\b", line) for line in result["log"])
    return "detected" if is_logged else "silent fallback"


def file_kind(path: Path) -> str:
    """Return the path of a file in a checkpoint, without the random parts of names."""
    parts = ["*" if re.fullmatch(r"[0-9a-f]{32}", part) else part for part in path.parts]
    return "/".join(parts) or "(all of it)"


def all_damages(checkpoint: Path) -> list[tuple[Path, str]]:
    """Return every (file or folder, kind of damage); a bit flip is listed three times."""
    cells = [(Path("."), "empty")]
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint)
        if path.is_dir() or not path.stat().st_size:
            cells.append((name, "delete"))
        else:
            cells += [(name, how) for how in (*DAMAGES, "flip", "flip")]
    return cells


def damage(path: Path, how: str, rng: random.Random) -> None:
    """Damage a file, or delete or empty a folder."""
    if path.is_dir():
        shutil.rmtree(path)
        if how == "empty":
            path.mkdir()
        return
    data = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "truncate":
        del data[rng.randrange(len(data)) :]
    elif how == "garbage":
        data[:] = rng.randbytes(len(data))
    else:
        data.clear()
    path.write_bytes(data)


@contextlib.contextmanager
def restoring(config: Path, original: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that restores the folders named on its stdin, and kill it at the end."""
    command = [sys.executable, str(ROOT / "scripts/soak.py"), "restore", str(config), str(original)]
    with open(config.parent / "restore.err", "a") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=err, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_trial(
    process: subprocess.Popen[str], directory: Path, seconds: float
) -> dict[str, Any]:
    """Give a folder to the process and return the result of its trial."""
    assert process.stdin is not None
    answer, limit = directory.with_suffix(".json"), time.monotonic() + seconds
    with contextlib.suppress(BrokenPipeError):  # the loop below notices that it ended
        process.stdin.write(f"{directory}\n")
        process.stdin.flush()
    while not answer.exists():
        if process.poll() is not None:
            return {"crash": f"the process ended with {process.returncode}"}
        if time.monotonic() > limit:
            return {"hang": seconds}
        time.sleep(0.005)
    return json.loads(answer.read_text())


class Trials:
    """Damaged copies of the checkpoints of a run, given one by one to a restoring process.

    Attributes:
        table: Counts of verdicts, by kind of file and of damage.
        bad: One line for each trial whose verdict is not good.
    """

    def __init__(self, config: Path, original: Path, newest: int, rng: random.Random):
        self.table: Table = {}
        self.bad: list[str] = []
        self._config, self._original, self._newest, self._rng = config, original, newest, rng
        self._cells: list[tuple[Path, str]] = []
        self._process: subprocess.Popen[str] | None = None
        self._stack = contextlib.ExitStack()

    def run(self, number: int) -> None:
        """Damage a copy, restore from it, and count the verdict."""
        newest = self._newest
        if not self._cells:
            self._cells = all_damages(self._original / str(newest))
            self._rng.shuffle(self._cells)
        name, how = self._cells.pop()
        directory = self._config.parent / f"trial-{number}"
        shutil.copytree(self._original, directory)
        damage(directory / str(newest) / name, how, self._rng)
        result = self._restore(directory)
        verdict, kind = classify(result, newest), file_kind(name)
        self.table.setdefault(kind, {}).setdefault(how, Counter())[verdict] += 1
        if verdict in GOOD:
            shutil.rmtree(directory)
        else:
            self.bad.append(f"trial {number}: {how} {name}: {verdict}: {json.dumps(result)}")
            report(self.bad[-1])

    def _restore(self, directory: Path) -> dict[str, Any]:
        """Hand a folder to the process, started again if the last one ended or hung."""
        limit = TRIAL_TIMEOUT
        if self._process is None or self._process.poll() is not None:
            self.close()
            started = restoring(self._config, self._original)
            self._process, limit = self._stack.enter_context(started), TIMEOUT
        result = wait_for_trial(self._process, directory, limit)
        if "hang" in result:
            self._process = None
        return result

    def close(self) -> None:
        """Kill the process."""
        self._stack.close()


def soak_corruptions(folder: Path, *, times: int, seed: int) -> dict[str, Any]:
    """Damage the newest of three checkpoints in a fresh copy, `times` times, and count outcomes.

    Each restore must detect the damage or return the saved arrays.
    """
    config, newest = write_config(folder, checkpoint__every=10, training__steps=30), 30
    run_undisturbed(config, folder / "run")
    rng = random.Random(seed)
    with contextlib.closing(Trials(config, folder / "run" / "checkpoints", newest, rng)) as trials:
        for number in range(times):
            trials.run(number)
            if (number + 1) % 10 == 0:
                report(f"{number + 1}/{times} corruptions, {len(trials.bad)} bad")
    table = trials.table
    verdicts = sum((cell for row in table.values() for cell in row.values()), Counter[str]())
    report(render(table))
    return {
        "ok": not trials.bad,
        "trials": times,
        "verdicts": dict(verdicts),
        "table": {kind: {how: dict(c) for how, c in row.items()} for kind, row in table.items()},
        "bad": trials.bad[:20],
    }


def render(table: Table) -> str:
    """Format the counts: one line per kind of file, one column per kind of damage."""
    width = max(map(len, table))
    lines = [f"{'detected+harmless/all':<{width}}" + "".join(f"{how:>12}" for how in DAMAGES)]
    for kind, row in sorted(table.items()):
        cells = [row.get(how, Counter[str]()) for how in DAMAGES]
        shown = [f"{c['detected']}+{c['harmless']}/{c.total()}" if c else "-" for c in cells]
        lines.append(f"{kind:<{width}}" + "".join(f"{cell:>12}" for cell in shown))
    return "\n".join(lines)
