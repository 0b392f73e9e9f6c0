"""Looks after checkpoints: `scripts/checkpoint.py list RUN`, show, verify, diff, prune; `--help`.

A run that was trained anywhere is read here on one CPU device: no mesh and no model is built, and
arrays come one at a time, so host memory of a few times the largest one is enough (`verify` says
how much it took). Only `prune` changes anything, and it refuses while the run is running.
Exit codes: 0 done, 1 something is damaged, 2 bad input.
"""

import argparse
import contextlib
import math
import os
import shutil
import sys
import time
import warnings
from calendar import timegm
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.status import Status
from rich.table import Table
from ruamel.yaml import YAML

from data.pipeline import explain_change
from parallel.sharding.mesh import MeshConfig, build_mesh
from training.checkpoint import Checkpoints
from training.checkpoint_errors import CheckpointError
from training.checkpoint_policy import CheckpointConfig
from training.directory import locked_run
from training.logs import peak_memory
from training.resume import flatten

EXIT_DAMAGED, EXIT_BAD_INPUT = 1, 2
NAMED = 4  # damaged arrays of a checkpoint
PAUSE = 0.3  # seconds in which a checkpoint that the run is removing loses a file


def find_run(text: str) -> Path:
    """The run directory. Raises: ValueError if it is none."""
    run = Path(text).expanduser()
    if not (run / "checkpoints").is_dir():
        raise ValueError(f"{text} holds no folder checkpoints; give a run directory of train.py")
    return run


def find_step(text: str) -> tuple[Path, int | None]:
    """(run directory, step) of `RUN@STEP`, or of `RUN`: its newest. Raises: ValueError."""
    run, at, step = text.rpartition("@")
    if at and step.isdecimal() and not Path(text).expanduser().is_dir():
        return find_run(run), int(step)
    return find_run(text), None


@contextlib.contextmanager
def opened(run: Path) -> Iterator[Checkpoints]:
    """The checkpoints of a run, which may be running."""
    folder = run / "checkpoints"
    with contextlib.closing(Checkpoints(folder, CheckpointConfig(), read_only=True)) as checkpoints:
        yield checkpoints


def choose(checkpoints: Checkpoints, run: Path, step: int | None) -> int:
    """This step, or the newest. Raises: ValueError if there is none."""
    steps = checkpoints.steps
    if not steps or step not in (None, *steps):
        wanted = "checkpoint" if step is None else f"checkpoint {step}"
        raise ValueError(f"{run} has no {wanted}; found: {', '.join(map(str, steps)) or 'none'}")
    return steps[-1] if step is None else step


def one_device() -> NamedSharding:
    """Whole arrays on the first CPU device."""
    mesh = build_mesh(MeshConfig(), jax.devices("cpu")[:1])
    return NamedSharding(mesh, PartitionSpec())


def bytes_of(leaf: Sequence[Any]) -> int:
    """Of an array, by its [shape, dtype]."""
    return math.prod(leaf[0]) * jax.numpy.dtype(leaf[1]).itemsize


def files_of(folder: Path) -> list[Path]:
    """All files in a folder, which may be going away."""
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names]


def bytes_on_disk(folder: Path) -> int:
    """Of all files in a folder."""
    total = 0
    for path in files_of(folder):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def size(num_bytes: float) -> str:
    """`1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def age(seconds: float) -> str:
    """`3 h`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def mesh_text(mesh: Mapping[str, int]) -> str:
    """`dp2 x tp4`."""
    return " x ".join(f"{axis}{count}" for axis, count in mesh.items() if count > 1) or "one device"


def tell_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal, aligned lines elsewhere. A column named `>NAME` is set right."""
    names, sides = [name.lstrip(">") for name in columns], [name[0] == ">" for name in columns]
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        table = Table()
        for name, right in zip(names, sides, strict=True):
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    for line in (names, *rows):
        cells = zip(line, widths, sides, strict=True)
        print("  ".join(f"{t:{'>' if right else '<'}{w}}" for t, w, right in cells).rstrip())


def list_run(args: argparse.Namespace) -> int:
    """One line per checkpoint, and what lies beside them."""
    run, now = find_run(args.run), time.time()
    columns = [">step", "saved (UTC)", ">age", ">on disk", ">eval loss", "record"]
    columns += ["mesh", "config", ">from", ">left out", "pending"]
    rows: list[list[str]] = []
    with opened(run) as checkpoints:
        for step in checkpoints.steps:
            folder = run / "checkpoints" / str(step)
            try:
                facts = _facts(checkpoints.record(step), now)
            except CheckpointError:
                if not folder.exists():
                    continue  # the run has just removed it
                facts = [*_changed(folder, now), "", "damaged", *[""] * 5]
            rows.append([str(step), *facts[:2], size(bytes_on_disk(folder)), *facts[2:]])
        damaged, unfinished = checkpoints.leftovers()
        for paths, what in ((damaged, "set aside: damaged"), (unfinished, "unfinished save")):
            for path in paths:
                disk = size(bytes_on_disk(path))
                rows.append([path.name, *_changed(path, now), disk, "", what, *[""] * 5])
    if rows:
        tell_table(columns, rows)
    else:
        print(f"{run} has no checkpoint yet")
    return 0


def _facts(record: Mapping[str, Any], now: float) -> list[str]:
    saved = timegm(time.strptime(record["saved"], "%Y-%m-%dT%H:%M:%SZ"))
    loss = record["metrics"].get("eval_loss")
    return [
        *_when(saved, now),
        "" if loss is None else f"{loss:.4f}",
        "whole",
        mesh_text(record["mesh"]),
        record["config_hash"][:8],
        str(record["from_step"]),
        str(sum(last - first for first, last in record["skipped"])),
        ", ".join(record["pending"]),
    ]


def _changed(folder: Path, now: float) -> list[str]:
    try:
        return _when(folder.stat().st_mtime, now)
    except FileNotFoundError:  # a save that has just been finished
        return ["", ""]


def _when(seconds: float, now: float) -> list[str]:
    return [time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)), age(max(0.0, now - seconds))]


def show_step(args: argparse.Namespace) -> int:
    """What the record of a checkpoint says."""
    run = find_run(args.run)
    with opened(run) as checkpoints:
        step = choose(checkpoints, run, args.step)
        record = checkpoints.record(step)
    disk = size(bytes_on_disk(run / "checkpoints" / str(step)))
    print(f"{run} step {step}, saved {record['saved']}, {disk} on disk")
    for name, value in record["metrics"].items():
        print(f"{name}  {value:.6f}")
    print("versions  " + ", ".join(f"{name} {v}" for name, v in record["versions"].items()))
    print(f"mesh      {mesh_text(record['mesh'])}")
    for first, last in record["skipped"]:
        print(f"left out  batches {first} to {last - 1}")
    if record["pending"]:
        print(f"pending   {', '.join(record['pending'])}: the next process makes up for it")
    print("processes")
    for process in (*record["lineage"], record):
        many = f" over {process['processes']} processes" if process.get("processes", 1) > 1 else ""
        print(
            f"  from step {process['from_step']}, began {process['began']}, "
            f"{mesh_text(process['mesh'])}{many}, config {process['config_hash'][:8]}, "
            f"jax {process['versions']['jax']}"
        )
    print(f"order     {record['order_hash'][:12]}")
    for key, value in flatten(record["order"]).items():
        is_digest = isinstance(value, str) and len(value) == 64
        print(f"  {key}: {value[:12] if is_digest else value}")
    _show_arrays(record, args.fingerprints)
    if args.config:
        print(f"\n{record['config']}", end="")
    return 0


def _show_arrays(record: Mapping[str, Any], with_fingerprints: bool) -> None:
    """The parameters, or every array with its fingerprint; and what all of them take."""
    columns = ["array", "shape", ">size"] + ["fingerprint"] * with_fingerprints
    rows, parts, count = [], Counter[str](), 0
    for name, leaf in sorted(record["leaves"].items()):
        part = name.partition(".")[0]
        parts[part] += bytes_of(leaf)
        if part == "params":
            count += math.prod(leaf[0])
        if part == "params" or with_fingerprints:
            row = [name, _leaf(leaf), size(bytes_of(leaf))]
            rows.append(row + [record["fingerprints"][name]] * with_fingerprints)
    tell_table(columns, rows)
    print(f"{count:,} parameters; " + ", ".join(f"{p} {size(n)}" for p, n in parts.items()))


def verify_run(args: argparse.Namespace) -> int:
    """Reads every array of every step, or of the given ones, and says what is damaged."""
    run, device = find_run(args.run), one_device()
    memory, largest, counts = peak_memory(), 0, Counter[str]()
    with opened(run) as checkpoints:
        for wanted in args.steps or [None]:
            choose(checkpoints, run, wanted)
        for step in args.steps or checkpoints.steps:
            begin = time.perf_counter()
            found = find_damage(checkpoints, step, device)
            if found and _is_gone(run / "checkpoints" / str(step)):
                counts["gone"] += 1
                print(f"step {step}: gone, the run has removed it")
            elif found:
                counts["damaged"] += 1
                more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
                print("\n  ".join([f"step {step}: DAMAGED", *found[:NAMED], *more]))
            else:
                counts["whole"] += 1
                sizes = list(map(bytes_of, checkpoints.record(step)["leaves"].values()))
                largest = max(largest, *sizes)
                took = f"{size(sum(sizes))} in {time.perf_counter() - begin:.1f} s"
                print(f"step {step}: whole, {len(sizes)} arrays, {took}", flush=True)
    rose = size(peak_memory() - memory)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), end="; ")
    of = f", the largest array has {size(largest)}" if largest else ""
    print(f"host memory rose by {rose} at most{of}")
    if set(counts) == {"gone"}:
        raise ValueError(f"{run}: every checkpoint went while it was read; verify the newest again")
    return EXIT_DAMAGED if counts["damaged"] else 0


def find_damage(checkpoints: Checkpoints, step: int, device: NamedSharding) -> list[str]:
    """What of a checkpoint is not what was written, one line each; empty: it is whole."""
    try:
        leaves = checkpoints.record(step)["leaves"]
    except CheckpointError as error:
        return [str(error)]
    found, done, total = [], 0, sum(map(bytes_of, leaves.values()))
    with Status("", console=Console(stderr=True)) as status:
        for name, leaf in leaves.items():
            status.update(f"step {step}: {size(done)} of {size(total)}, {name}")
            try:
                checkpoints.read(step, name, device)
            except CheckpointError as error:
                line = str(error).removeprefix(f"checkpoint {step}").lstrip(": ")
                found.append(line if line.startswith(name) else f"{name}: {line}")
            done += bytes_of(leaf)
    return found


def _is_gone(folder: Path) -> bool:
    """Whether the run was removing a checkpoint while it was read; waits for it if so."""
    left = None
    while folder.exists() and left != (left := len(files_of(folder))):
        time.sleep(PAUSE)
    return not folder.exists()


def diff_steps(args: argparse.Namespace) -> int:
    """What differs between two checkpoints: what they were made of, and their arrays."""
    (run_a, step_a), (run_b, step_b) = find_step(args.a), find_step(args.b)
    with opened(run_a) as a, opened(run_b) as b:
        step_a, step_b = choose(a, run_a, step_a), choose(b, run_b, step_b)
        before, after = a.record(step_a), b.record(step_b)
        print(f"{run_a} step {step_a} -> {run_b} step {step_b}")
        configs = [YAML(typ="safe", pure=True).load(side["config"]) for side in (before, after)]
        _tell_changes("config", *map(flatten, configs))
        _tell_changes("versions", before["versions"], after["versions"])
        _tell_changes("mesh", before["mesh"], after["mesh"])
        change = explain_change(before["order"], after["order"]) or "differs"
        print("order:", "the same" if before["order"] == after["order"] else change)
        device, rows, num_equal = one_device(), [], 0
        every = sorted(before["leaves"].keys() | after["leaves"].keys())
        names = [name for name in every if args.all or name.startswith("params.")]
        for name in names:
            old, new = before["leaves"].get(name), after["leaves"].get(name)
            if old != new:
                rows.append((math.inf, [name, f"{_leaf(old)} -> {_leaf(new)}", "", ""]))
            elif before["fingerprints"][name] == after["fingerprints"][name]:
                num_equal += 1
            else:
                most, rms = difference(a.read(step_a, name, device), b.read(step_b, name, device))
                key = math.inf if math.isnan(rms) else rms
                rows.append((key, [name, _leaf(old), f"{most:.3g}", f"{rms:.3g}"]))
    rows.sort(key=lambda row: -row[0])
    what = "arrays" if args.all else "arrays of params"
    print(f"{num_equal} of {len(names)} {what} are equal to the bit")
    if rows:
        columns = ["array", "shape", ">largest difference", ">relative RMS"]
        tell_table(columns, [row for _, row in rows[: args.limit]])
    if len(rows) > args.limit:
        print(f"and {len(rows) - args.limit} more; --limit shows them")
    return 0


def difference(a: jax.Array, b: jax.Array) -> tuple[float, float]:
    """(largest absolute difference, RMS of the differences over the RMS of `a`), in float64.

    Not a number where one of them is not finite.
    """
    flat_a, flat_b = (np.asarray(x).reshape(-1) for x in (a, b))
    most, squares, scale = 0.0, 0.0, 0.0
    with np.errstate(invalid="ignore"):
        for first in range(0, flat_a.size, 1 << 20):
            part = slice(first, first + (1 << 20))
            x, y = flat_a[part].astype(np.float64), flat_b[part].astype(np.float64)
            delta = np.abs(y - x)
            most = float(np.maximum(most, delta.max()))
            squares += float(np.sum(delta * delta))
            scale += float(np.sum(x * x))
    return most, math.sqrt(squares / scale) if scale else math.inf


def _leaf(leaf: Sequence[Any] | None) -> str:
    return "nothing" if leaf is None else f"{'x'.join(map(str, leaf[0])) or 'scalar'} {leaf[1]}"


def _tell_changes(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = (repr(side[key]) if key in side else "nothing" for side in (before, after))
        if old != new:
            lines.append(f"\n  {key}: {old} -> {new}")
    print(f"{what}:{''.join(lines) or ' the same'}")


def prune_run(args: argparse.Namespace) -> int:
    """Removes what the policy does not keep, and what saves and damage have left."""
    run = find_run(args.run)
    try:
        with contextlib.nullcontext() if args.dry_run else locked_run(run, 0):
            return _prune(run, args)
    except ValueError as error:
        raise ValueError(f"nothing was removed: {error}") from error


def _prune(run: Path, args: argparse.Namespace) -> int:
    with opened(run) as checkpoints:
        records: dict[int, Mapping[str, Any]] = {}
        for step in checkpoints.steps:
            with contextlib.suppress(CheckpointError):  # stays, and is told below
                records[step] = checkpoints.record(step)
        # The newest ones are kept only once the arrays of one of them are proved.
        device = one_device()
        while records and find_damage(checkpoints, max(records), device):
            records.pop(max(records))
        if not records:
            raise CheckpointError("no checkpoint is whole: nothing was removed")
        kept = kept_steps(records, args)
        set_aside, unfinished = checkpoints.leftovers()
        going = [*unfinished, *(set_aside if args.damaged else [])]
        for step in checkpoints.steps:
            if step in kept or (step not in records and not args.damaged):
                print(f"{step}: kept{'' if step in records else ', but damaged'}")
            else:
                going.append(run / "checkpoints" / str(step))
        freed = sum(_remove(checkpoints, path, dry_run=args.dry_run) for path in going)
    print(f"{size(freed)} {'would be ' if args.dry_run else ''}freed")
    return 0


def kept_steps(records: Mapping[int, Mapping[str, Any]], args: argparse.Namespace) -> set[int]:
    """What the policy keeps: the newest, every so many steps, the best."""
    kept = set(sorted(records)[-args.keep :])
    if args.keep_every is not None:
        kept |= {step for step in records if step % args.keep_every == 0}
    told = {step: record["metrics"].get("eval_loss", math.nan) for step, record in records.items()}
    losses = {step: loss for step, loss in told.items() if math.isfinite(loss)}
    return kept | set(sorted(losses, key=lambda step: losses[step])[: args.keep_best])


def _remove(checkpoints: Checkpoints, path: Path, *, dry_run: bool) -> int:
    """Bytes that were freed, or would be."""
    num_bytes = bytes_on_disk(path)
    if not dry_run and path.name.isdecimal():
        checkpoints.delete(int(path.name))
    elif not dry_run:
        shutil.rmtree(path)
    print(f"{path.name}: {'would go' if dry_run else 'removed'}, {size(num_bytes)}")
    return num_bytes


def at_least_one(text: str) -> int:
    """A count from the command line."""
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use at least 1")
    return count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any, text: str) -> Any:
        added = commands.add_parser(name, help=text, allow_abbrev=False)
        added.set_defaults(run_command=run)
        if name != "diff":
            added.add_argument("run", metavar="RUN", help="run directory of train.py")
        return added

    command("list", list_run, "the checkpoints, and what lies beside them")
    show = command("show", show_step, "what is known of one")
    show.add_argument("step", metavar="STEP", type=int, nargs="?", help="default: the newest")
    show.add_argument("--config", action="store_true", help="the whole configuration, as YAML")
    show.add_argument("--fingerprints", action="store_true", help="of every array")
    verify = command("verify", verify_run, "read every array, say what is damaged")
    verify.add_argument("steps", metavar="STEP", type=int, nargs="*", help="default: all")
    diff = command("diff", diff_steps, "what differs between two")
    for name in ("a", "b"):
        diff.add_argument(name, metavar="RUN[@STEP]", help="default: the newest step")
    diff.add_argument("--all", action="store_true", help="the optimizer's arrays too")
    diff.add_argument("--limit", type=at_least_one, default=20, help="of arrays that are shown")
    prune = command("prune", prune_run, "remove old ones and leftovers; the newest whole one stays")
    prune.add_argument("--keep", type=at_least_one, required=True, help="so many of the newest")
    prune.add_argument("--keep-every", type=at_least_one, help="and those of every so many steps")
    prune.add_argument("--keep-best", type=at_least_one, default=0, help="by evaluation loss")
    prune.add_argument("--damaged", action="store_true", help="remove damaged ones too")
    prune.add_argument("--dry-run", action="store_true", help="say what would go")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command, and turns what a user can mend into one line."""
    args = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    # What orbax leaves behind where a file of it is damaged; the damage itself is told.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    try:
        return args.run_command(args)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_DAMAGED if isinstance(error, CheckpointError) else EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
