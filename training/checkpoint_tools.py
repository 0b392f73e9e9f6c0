"""Inspection of checkpoints on one CPU device: inventory, verification, differences, pruning.

No mesh and no model is built, and arrays are read one at a time, so that host memory is a small
multiple of the largest array. `scripts/checkpoint.py` prints the results.
"""

import contextlib
import math
import os
import shutil
import time
from calendar import timegm
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ruamel.yaml import YAML

from data.bucket_path import AnyPath, BucketPath
from parallel.sharding.mesh import MeshConfig, build_mesh
from training.bucket_runs import checkpoint_folder, delete_tree, open_local
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig, steps_to_keep
from training.checkpoint_record import CheckpointError, DamageError
from training.dotted_keys import as_yaml, flatten
from training.writers.jsonl import metrics_by_step, read_values

_SECONDS_PER_LOOK = 0.3  # within this time a checkpoint that is being deleted loses a file


def find_run(text: str) -> Path:
    """Return the run directory. Raises: ValueError if it is not one."""
    run = open_local(text)
    if not checkpoint_folder(run).is_dir():
        below = [str(path.parent) for path in sorted(run.glob("*/checkpoints"))[:4]]
        example = f", such as {' or '.join(below)}" if below else ""
        raise ValueError(
            f"{text} has no folder checkpoints; give a run directory of train.py{example}"
        )
    return run


def find_step(text: str) -> tuple[Path, int | None]:
    """Return (run directory, step) of `RUN@STEP`, or (run directory, None) of `RUN`."""
    run, at, step = text.rpartition("@")
    if at and step.isdecimal() and not Path(text).expanduser().is_dir():
        return find_run(run), int(step)
    return find_run(text), None


@contextlib.contextmanager
def open_checkpoints(run: Path) -> Iterator[Checkpoints]:
    """Open the checkpoints of a run that may be training, without writing."""
    folder = checkpoint_folder(run)
    with contextlib.closing(Checkpoints(folder, CheckpointConfig(), read_only=True)) as checkpoints:
        yield checkpoints


def choose_step(checkpoints: Checkpoints, run: Path, step: int | None) -> int:
    """Return the given step, or the newest one. Raises: ValueError if there is none."""
    steps = checkpoints.steps
    if not steps or step not in (None, *steps):
        wanted = "checkpoint" if step is None else f"checkpoint {step}"
        raise ValueError(f"{run} has no {wanted}; found: {', '.join(map(str, steps)) or 'none'}")
    return steps[-1] if step is None else step


def leaf_bytes(leaf: Sequence[Any]) -> int:
    """Return the bytes of an array from its [shape, dtype]."""
    return math.prod(leaf[0]) * jax.numpy.dtype(leaf[1]).itemsize


def bytes_on_disk(folder: AnyPath) -> int:
    """Return the bytes of all files in a folder, or in a bucket; they may be disappearing."""
    if isinstance(folder, BucketPath):
        return sum(folder.find().values())
    total = 0
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _count_files(folder: AnyPath) -> int:
    return len(folder.find() if isinstance(folder, BucketPath) else _files(folder))


def _files(folder: Path) -> list[Path]:
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


@dataclass(frozen=True)
class Entry:
    """A folder beside or among the checkpoints of a run."""

    name: str
    state: str
    """`whole`, `damaged`, `unreadable` by this machine, `set aside: damaged` or `unfinished save`;
    of the record, not the arrays."""
    saved: float | None
    """Seconds since the epoch; None if the folder has disappeared, or is unfinished in a bucket."""
    num_bytes: int
    record: Mapping[str, Any] | None = None


def list_entries(run: Path) -> list[Entry]:
    """Return what the checkpoint folder of a run holds; arrays are not read."""
    entries: list[Entry] = []
    with open_checkpoints(run) as checkpoints:
        for step in checkpoints.steps:
            folder = checkpoint_folder(run) / str(step)
            try:
                record = checkpoints.record(step)
            except CheckpointError as error:
                if folder.exists():  # else the run has just deleted it
                    is_damaged = isinstance(error, DamageError)
                    entries.append(_entry(folder, "damaged" if is_damaged else "unreadable"))
                continue
            saved = timegm(time.strptime(record["saved"], "%Y-%m-%dT%H:%M:%SZ"))
            entries.append(Entry(str(step), "whole", saved, bytes_on_disk(folder), record))
        set_aside, unfinished = checkpoints.leftovers()
    entries += [_entry(path, "set aside: damaged") for path in set_aside]
    return entries + [_entry(path, "unfinished save") for path in unfinished]


def _entry(folder: AnyPath, state: str) -> Entry:
    saved = None
    if isinstance(folder, Path):
        with contextlib.suppress(FileNotFoundError):  # a save that has just finished
            saved = folder.stat().st_mtime
    return Entry(folder.name, state, saved, bytes_on_disk(folder))


Progress = Callable[[int, int, str], None]
"""Called with (bytes read, bytes in all, name of the next array)."""


def find_damage(checkpoints: Checkpoints, step: int, progress: Progress | None = None) -> list[str]:
    """Read every array of a checkpoint; return one line per damaged one.

    Raises:
        CheckpointError: this machine cannot read the checkpoint, which may be whole.
    """
    try:
        leaves = checkpoints.record(step)["leaves"]
    except DamageError as error:
        return [str(error)]
    found, done, total = [], 0, sum(map(leaf_bytes, leaves.values()))
    device = one_device()
    for name, leaf in leaves.items():
        if progress is not None:
            progress(done, total, name)
        try:
            checkpoints.read(step, name, device)
        except DamageError as error:
            line = str(error).removeprefix(f"checkpoint {step}").lstrip(": ")
            line = line.removeprefix("is damaged: ")
            found.append(line if line.startswith(name) else f"{name}: {line}")
        done += leaf_bytes(leaf)
    return found


def one_device() -> NamedSharding:
    """Return a sharding that puts whole arrays on the first CPU device."""
    mesh = build_mesh(MeshConfig(), jax.devices("cpu")[:1])
    return NamedSharding(mesh, PartitionSpec())


def was_deleted(folder: AnyPath) -> bool:
    """Return whether a checkpoint is deleted; wait while its files are disappearing."""
    num_files = None
    while folder.exists() and num_files != (num_files := _count_files(folder)):
        time.sleep(_SECONDS_PER_LOOK)
    return not folder.exists()


_FINGERPRINTS = ("loss", "grad_norm", "params_fingerprint")


@dataclass(frozen=True)
class StepComparison:
    """Comparison of two runs by the bits of some metrics, in the steps that both have logged."""

    steps: Sequence[int]
    """The compared steps, in order."""
    first: int | None
    """The first step that differs."""
    differences: Mapping[str, tuple[float, float]]
    """The metrics that differ in this step, of both runs."""


def compare_steps(run: Path, other: Path) -> StepComparison:
    """Compare loss, gradient norm and parameter fingerprints of two runs, bit for bit.

    A metric that one of them has not logged in a step is not compared.
    """
    a, b = (metrics_by_step(folder / "metrics.jsonl", _FINGERPRINTS) for folder in (run, other))
    steps = sorted(a.keys() & b.keys())
    for step in steps:
        pairs = {name: (a[step][name], b[step][name]) for name in a[step] if name in b[step]}
        # repr: NaN equals NaN, and 0.0 is not -0.0.
        if differences := {
            name: pair for name, pair in pairs.items() if len({*map(repr, pair)}) > 1
        }:
            return StepComparison(steps, step, differences)
    return StepComparison(steps, None, {})


@dataclass(frozen=True)
class ArrayDifference:
    """An array that differs between two checkpoints."""

    name: str
    before: Sequence[Any] | None
    """[shape, dtype]; None if the array is missing."""
    after: Sequence[Any] | None
    largest: float | None = None
    """Largest absolute difference; None if shape or dtype differ."""
    relative_rms: float = math.inf
    """RMS of the difference over the RMS of the first array."""


def compare_arrays(
    a: tuple[Checkpoints, int], b: tuple[Checkpoints, int], names: Iterable[str]
) -> list[ArrayDifference]:
    """Return the named arrays that differ, the largest relative difference first.

    Arrays with equal fingerprints are not read.
    """
    (from_a, step_a), (from_b, step_b) = a, b
    before, after = from_a.record(step_a), from_b.record(step_b)
    found, device = [], one_device()
    for name in names:
        old, new = before["leaves"].get(name), after["leaves"].get(name)
        if old != new:
            found.append(ArrayDifference(name, old, new))
        elif before["fingerprints"][name] != after["fingerprints"][name]:
            arrays = from_a.read(step_a, name, device), from_b.read(step_b, name, device)
            found.append(ArrayDifference(name, old, new, *difference(*arrays)))
    # Not a number ranks first: it is the worst difference.
    return sorted(found, key=lambda d: (not math.isnan(d.relative_rms), -d.relative_rms))


def difference(a: jax.Array, b: jax.Array) -> tuple[float, float]:
    """Return (largest absolute difference, RMS of the difference over RMS of `a`), in float64.

    NaN if an element is not finite.
    """
    flat_a, flat_b = (np.asarray(x).reshape(-1) for x in (a, b))
    largest, squares, scale = 0.0, 0.0, 0.0
    with np.errstate(invalid="ignore"):
        for first in range(0, flat_a.size, 1 << 20):
            part = slice(first, first + (1 << 20))
            x, y = flat_a[part].astype(np.float64), flat_b[part].astype(np.float64)
            delta = np.abs(y - x)
            largest = float(np.maximum(largest, delta.max()))
            squares += float(np.sum(delta * delta))
            scale += float(np.sum(x * x))
    return largest, math.sqrt(squares / scale) if scale else math.inf


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return `old -> new` for every key that differs, is added or is removed."""
    changes = {}
    for key in sorted(before.keys() | after.keys()):
        old, new = (as_yaml(side[key]) if key in side else "nothing" for side in (before, after))
        if old != new:
            changes[key] = f"{old} -> {new}"
    return changes


def recorded_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a checkpoint by dotted keys."""
    return flatten(YAML(typ="safe", pure=True).load(record["config"]))


@dataclass(frozen=True)
class PrunePlan:
    """Checkpoints that pruning keeps and deletes."""

    kept: Mapping[int, str]
    """Step -> `kept`, with a remark if it is damaged."""
    deleted: Sequence[AnyPath]


def plan_prune(
    run: Path, checkpoints: Checkpoints, policy: CheckpointConfig, *, damaged: bool
) -> PrunePlan:
    """Return what to keep by a policy, and which leftovers of saves and damage to delete.

    The newest checkpoint counts only after all of its arrays are verified.

    Args:
        run: run directory.
        checkpoints: its checkpoints.
        policy: the keys keep, keep_every and keep_best.
        damaged: delete damaged checkpoints too.

    Raises:
        CheckpointError: no checkpoint is complete, or this machine cannot read one.
    """
    records: dict[int, Mapping[str, Any]] = {}
    for step in checkpoints.steps:
        with contextlib.suppress(DamageError):  # kept with a remark below
            records[step] = checkpoints.record(step)
    while records and find_damage(checkpoints, max(records)):
        records.pop(max(records))
    if not records:
        raise CheckpointError("no checkpoint is complete: nothing was deleted")
    losses = dict.fromkeys(records, math.nan)
    # A checkpoint that precedes its evaluation, as after a signal, has no loss in its record.
    losses |= read_values(run / "metrics.jsonl", "eval_loss")
    losses |= {n: record["metrics"].get("eval_loss", losses[n]) for n, record in records.items()}
    wanted = steps_to_keep(
        records,
        losses,
        keep=policy.keep,
        keep_every=policy.keep_every,
        keep_best=policy.keep_best,
    )
    set_aside, unfinished = checkpoints.leftovers()
    deleted = [*unfinished, *(set_aside if damaged else [])]
    kept = {}
    for step in checkpoints.steps:
        if step in wanted or (step not in records and not damaged):
            kept[step] = "kept" if step in records else "kept, but damaged"
        else:
            deleted.append(checkpoint_folder(run) / str(step))
    return PrunePlan(kept, deleted)


def delete(checkpoints: Checkpoints, path: AnyPath) -> None:
    """Delete a checkpoint, or what a save or damage left behind."""
    if path.name.isdecimal():
        checkpoints.delete(int(path.name))
    elif isinstance(path, BucketPath):
        delete_tree(path)
    else:
        shutil.rmtree(path)
