"""Damage to the newest checkpoint: noticed, or without effect; never a wrong state in silence."""

import argparse
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
from soak_run import ROOT, SECONDS, run_undisturbed, tell, write_config

from configs.build import build_program, open_devices
from configs.schema import load_config
from data.pipeline import Dataset
from training.checkpoint import Checkpoints
from training.fingerprint import fingerprints, leaf_name
from training.logs import logging_to
from training.resume import Resumer

TRIAL_SECONDS = 60.0
DAMAGES = ("flip", "truncate", "delete", "garbage", "empty")


def contents(state: Any) -> dict[str, tuple[Any, ...]]:
    """Shape, dtype and bytes of every array of a state, by its dotted path."""
    return {
        leaf_name(path): (x.shape, str(x.dtype), np.asarray(x).tobytes())
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


class Restorer:
    """Restores as a starting trainer does, and compares with the undamaged original."""

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
        """One damaged folder of checkpoints: what a trainer would go on from, and what it says."""
        lines = directory.with_suffix(".log")
        with jax.set_mesh(self._program.tp.manager.mesh), logging_to(lines, None):
            try:
                with contextlib.closing(
                    Checkpoints(directory, self.config.checkpoint)
                ) as checkpoints:
                    result = self._newest(checkpoints)
            except Exception as error:  # whatever it is, the trainer would have ended with it
                result = {"crash": f"{type(error).__name__}: {error}".partition("\n")[0]}
        return {**result, "told": lines.read_text().splitlines()}

    def _newest(self, checkpoints: Checkpoints) -> dict[str, Any]:
        config, abstract = self.config, self._program.abstract_state
        resumer = Resumer(checkpoints, self._rows, abstract, config.training.steps)
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
    """One trial per path; its result is the file PATH.json."""
    restorer = Restorer(config, original)
    for path in paths:
        directory = Path(path.strip())
        partial = directory.with_suffix(".partial")
        partial.write_text(json.dumps(restorer.trial(directory)))
        partial.rename(directory.with_suffix(".json"))


def classify(result: dict[str, Any], newest: int) -> str:
    """`detected` and `harmless` are good; all others are not."""
    for bad in ("hang", "crash"):
        if bad in result:
            return bad
    if result["wrong"]:
        return "silently wrong"
    if result["step"] == newest:
        return "harmless"
    # Whoever reads the log must learn of it.
    named = any(re.search(rf"checkpoint {newest}\b", line) for line in result["told"])
    return "detected" if named else "silent fallback"


def file_kind(path: Path) -> str:
    """The place of a file in a checkpoint, without what is random in names."""
    parts = ["*" if re.fullmatch(r"[0-9a-f]{32}", part) else part for part in path.parts]
    return "/".join(parts) or "(all of it)"


def all_damages(checkpoint: Path) -> list[tuple[Path, str]]:
    """Every (file or folder, kind of damage) that makes sense; a flip counts three times."""
    cells = [(Path("."), "empty")]
    for path in sorted(checkpoint.rglob("*")):
        place = path.relative_to(checkpoint)
        if path.is_dir() or not path.stat().st_size:
            cells.append((place, "delete"))
        else:
            cells += [(place, how) for how in (*DAMAGES, "flip", "flip")]
    return cells


def damage(path: Path, how: str, rng: random.Random) -> None:
    """Does it to a file, or to a folder with all that is in it."""
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
    """A process that reads folders from its stdin."""
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


def await_trial(process: subprocess.Popen[str], directory: Path, seconds: float) -> dict[str, Any]:
    """Hands a folder over, and waits for the result."""
    assert process.stdin is not None
    answer, limit = directory.with_suffix(".json"), time.monotonic() + seconds
    with contextlib.suppress(BrokenPipeError):  # its end is noticed below
        process.stdin.write(f"{directory}\n")
        process.stdin.flush()
    while not answer.exists():
        if process.poll() is not None:
            return {"crash": f"the process ended with {process.returncode}"}
        if time.monotonic() > limit:
            return {"hang": seconds}
        time.sleep(0.005)
    return json.loads(answer.read_text())


def soak_corruptions(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Damages the newest of three checkpoints, and restores."""
    config = write_config(folder, checkpoint__every=10, training__steps=30)
    run_undisturbed(config, folder / "run")
    original, newest, rng = folder / "run" / "checkpoints", 30, random.Random(args.seed)
    cells: list[tuple[Path, str]] = []
    table: dict[str, dict[str, Counter[str]]] = {}
    bad: list[str] = []
    with contextlib.ExitStack() as stack:
        process: subprocess.Popen[str] | None = None
        for number in range(args.times):
            if not cells:
                cells = all_damages(original / str(newest))
                rng.shuffle(cells)
            place, how = cells.pop()
            directory = folder / f"trial-{number}"
            shutil.copytree(original, directory)
            damage(directory / str(newest) / place, how, rng)
            limit = TRIAL_SECONDS
            if process is None or process.poll() is not None:
                stack.close()
                process, limit = stack.enter_context(restoring(config, original)), SECONDS
            result = await_trial(process, directory, limit)
            verdict, kind = classify(result, newest), file_kind(place)
            if "hang" in result:
                process = None
            table.setdefault(kind, {}).setdefault(how, Counter())[verdict] += 1
            if verdict not in ("detected", "harmless"):
                bad.append(f"trial {number}: {how} {place}: {verdict}: {json.dumps(result)}")
                tell(bad[-1])
            else:
                shutil.rmtree(directory)
            if (number + 1) % 10 == 0:
                tell(f"{number + 1}/{args.times} corruptions, {len(bad)} bad")
    verdicts = sum((cell for row in table.values() for cell in row.values()), Counter[str]())
    tell(render(table))
    return {
        "ok": not bad,
        "trials": args.times,
        "verdicts": dict(verdicts),
        "table": {kind: {how: dict(c) for how, c in row.items()} for kind, row in table.items()},
        "bad": bad[:20],
    }


def render(table: dict[str, dict[str, Counter[str]]]) -> str:
    """One line per kind of file: detected + harmless of all, by kind of damage."""
    width = max(map(len, table))
    lines = [f"{'detected+harmless/all':<{width}}" + "".join(f"{how:>12}" for how in DAMAGES)]
    for kind, row in sorted(table.items()):
        cells = [row.get(how, Counter[str]()) for how in DAMAGES]
        shown = [f"{c['detected']}+{c['harmless']}/{c.total()}" if c else "-" for c in cells]
        lines.append(f"{kind:<{width}}" + "".join(f"{cell:>12}" for cell in shown))
    return "\n".join(lines)
