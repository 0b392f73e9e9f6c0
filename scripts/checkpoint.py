# PYTHON_ARGCOMPLETE_OK
"""Inspect and prune checkpoints: list, show, verify, diff, prune.

A run that was trained on any mesh is read on one CPU device, one array at a time. Only `prune`
changes anything, and it refuses while the run is training.
Exit codes: 0 done, 1 a checkpoint is damaged or cannot be read, 2 bad input.
"""

import argparse
import contextlib
import math
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
from rich.console import Console
from rich.status import Status
from rich.table import Table

from configs.command_line import CommandLine, at_least_one, one_line_errors, run_script
from data.bucket_path import AnyPath
from data.order_changes import explain_change, recorded_order
from exit_codes import EXIT_FAILED
from parallel.cluster.process_group import ProcessGroup
from training import checkpoint_tools as tools
from training.bucket_runs import bucket_of, checkpoint_folder, kept_in_bucket
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import CheckpointError
from training.directory import locked_run
from training.dotted_keys import flatten
from training.logs import peak_memory
from units import format_bytes

MAX_DAMAGED_SHOWN = 4


def list_run(args: argparse.Namespace) -> int:
    """Print one line per checkpoint, and one per leftover of a save or of damage."""
    run, now = tools.find_run(args.run), time.time()
    columns = [">step", "saved (UTC)", ">age", ">on disk", ">eval loss", "record"]
    columns += ["mesh", "config", ">from", ">left out", "pending"]
    rows = [
        [entry.name, *_when(entry.saved, now), format_bytes(entry.num_bytes), *_record_cells(entry)]
        for entry in tools.list_entries(run)
    ]
    if rows:
        print_table(columns, rows)
    else:
        print(f"{run} has no checkpoint yet")
    return 0


def _record_cells(entry: tools.Entry) -> list[str]:
    if (record := entry.record) is None:
        return ["", entry.state, *[""] * 5]
    loss = record["metrics"].get("eval_loss")
    return [
        "" if loss is None else f"{loss:.4f}",
        entry.state,
        _mesh(record["mesh"]),
        record["config_hash"][:8],
        str(record["from_step"]),
        str(sum(last - first for first, last in record["skipped"])),
        ", ".join(record["pending"]),
    ]


def _when(saved: float | None, now: float) -> list[str]:
    if saved is None:
        return ["", ""]
    return [time.strftime("%Y-%m-%d %H:%M", time.gmtime(saved)), _age(max(0.0, now - saved))]


def show_step(args: argparse.Namespace) -> int:
    """Print the record of a checkpoint, or only the configuration in it."""
    run, step = tools.find_step(args.run)
    if None not in (step, args.step):
        raise ValueError(f"{args.run} {args.step}: give the step once")
    with tools.open_checkpoints(run) as checkpoints:
        step = tools.choose_step(checkpoints, run, args.step if step is None else step)
        record = checkpoints.record(step)
    if args.config:
        print(record["config"], end="")
        return 0
    disk = format_bytes(tools.bytes_on_disk(checkpoint_folder(run) / str(step)))
    print(f"{run} step {step}, saved {record['saved']}, {disk} on disk")
    for name, value in record["metrics"].items():
        print(f"{name}  {value:.6f}")
    print("versions  " + ", ".join(f"{name} {v}" for name, v in record["versions"].items()))
    print(f"mesh      {_mesh(record['mesh'])}")
    for first, last in record["skipped"]:
        print(f"left out  batches {first} to {last - 1}")
    if record["pending"]:
        print(f"pending   {', '.join(record['pending'])}: the next process runs it")
    print("processes")
    for process in (*record["lineage"], record):
        many = f" over {process['processes']} processes" if process.get("processes", 1) > 1 else ""
        print(
            f"  from step {process['from_step']}, began {process['began']}, "
            f"{_mesh(process['mesh'])}{many}, config {process['config_hash'][:8]}, "
            f"jax {process['versions']['jax']}"
        )
    print(f"order     {record['order_hash'][:12]}")
    for key, value in flatten(record["order"]).items():
        is_digest = isinstance(value, str) and len(value) == 64
        print(f"  {key}: {value[:12] if is_digest else value}")
    _show_arrays(record, args.fingerprints)
    return 0


def _show_arrays(record: Mapping[str, Any], with_fingerprints: bool) -> None:
    """Print the parameters, or every array with its fingerprint, and the size of each part."""
    columns = ["array", "shape", ">size"] + ["fingerprint"] * with_fingerprints
    rows, sizes, num_parameters = [], Counter[str](), 0
    for name, leaf in sorted(record["leaves"].items()):
        part, num_bytes = name.partition(".")[0], tools.leaf_bytes(leaf)
        sizes[part] += num_bytes
        if part == "params":
            num_parameters += math.prod(leaf[0])
        if part == "params" or with_fingerprints:
            row = [name, _shape(leaf), format_bytes(num_bytes)]
            rows.append(row + [record["fingerprints"][name]] * with_fingerprints)
    print_table(columns, rows)
    parts = ", ".join(f"{part} {format_bytes(n)}" for part, n in sizes.items())
    print(f"{num_parameters:,} parameters; {parts}")


def verify_run(args: argparse.Namespace) -> int:
    """Read every array of the given steps, or of all, and print which are damaged."""
    run, memory = tools.find_run(args.run), peak_memory()
    largest, counts = 0, Counter[str]()
    with tools.open_checkpoints(run) as checkpoints:
        for wanted in args.steps or [None]:
            tools.choose_step(checkpoints, run, wanted)
        for step in args.steps or checkpoints.steps:
            begin = time.perf_counter()
            found = _find_damage(checkpoints, step, checkpoint_folder(run) / str(step))
            if found is None:
                counts["deleted"] += 1
                print(f"step {step}: deleted by the run meanwhile")
            elif found:
                counts["damaged"] += 1
                hidden = len(found) - MAX_DAMAGED_SHOWN
                more = [f"and {hidden} more"] if hidden > 0 else []
                lines = [f"step {step}: DAMAGED", *found[:MAX_DAMAGED_SHOWN], *more]
                print("\n  ".join(lines))
            else:
                counts["whole"] += 1
                sizes = list(map(tools.leaf_bytes, checkpoints.record(step)["leaves"].values()))
                largest = max(largest, *sizes)
                took = f"{format_bytes(sum(sizes))} in {time.perf_counter() - begin:.1f} s"
                print(f"step {step}: whole, {len(sizes)} arrays, {took}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()), end="; ")
    of_largest = f", the largest array has {format_bytes(largest)}" if largest else ""
    print(f"peak host memory rose by {format_bytes(peak_memory() - memory)}{of_largest}")
    if set(counts) == {"deleted"}:
        raise ValueError(f"{run}: every checkpoint was deleted while it was read; verify again")
    return EXIT_FAILED if counts["damaged"] else 0


def _find_damage(checkpoints: Checkpoints, step: int, folder: AnyPath) -> list[str] | None:
    """Return one line per damaged array, or None if the run deletes the checkpoint meanwhile.

    Show progress on a terminal.
    """
    with Status("", console=Console(stderr=True)) as status:

        def progress(done: int, total: int, name: str) -> None:
            status.update(f"step {step}: {format_bytes(done)} of {format_bytes(total)}, {name}")

        try:
            found = tools.find_damage(checkpoints, step, progress)
        except CheckpointError:
            if tools.was_deleted(folder):
                return None
            raise
    return None if found and tools.was_deleted(folder) else found


def diff_steps(args: argparse.Namespace) -> int:
    """Print what differs between two checkpoints: configuration, data order, arrays.

    Before that, print at which step the two runs first differ.
    """
    (run_a, step_a), (run_b, step_b) = tools.find_step(args.a), tools.find_step(args.b)
    if run_a.resolve() != run_b.resolve():
        _print_first_difference(tools.compare_steps(run_a, run_b))
    with tools.open_checkpoints(run_a) as a, tools.open_checkpoints(run_b) as b:
        step_a, step_b = tools.choose_step(a, run_a, step_a), tools.choose_step(b, run_b, step_b)
        before, after = a.record(step_a), b.record(step_b)
        print(f"{run_a} step {step_a} -> {run_b} step {step_b}")
        _print_changes("config", *map(tools.recorded_config, (before, after)))
        _print_changes("versions", before["versions"], after["versions"])
        _print_changes("mesh", before["mesh"], after["mesh"])
        orders = recorded_order(before), recorded_order(after)
        change = explain_change(*orders) or "differs"
        print("order:", "the same" if orders[0] == orders[1] else change)
        every = sorted(before["leaves"].keys() | after["leaves"].keys())
        names = [name for name in every if args.all or name.startswith("params.")]
        found = tools.compare_arrays((a, step_a), (b, step_b), names)
    what = "arrays" if args.all else "arrays of params"
    print(f"{len(names) - len(found)} of {len(names)} {what} are bit-equal")
    if found:
        columns = ["array", "shape", ">largest difference", ">relative RMS"]
        print_table(columns, [_difference_row(array) for array in found[: args.limit]])
    if len(found) > args.limit:
        print(f"and {len(found) - args.limit} more arrays differ; a larger --limit shows them")
    return 0


def _print_first_difference(found: tools.StepComparison) -> None:
    if not found.steps:
        return
    if found.first is None:
        print(f"steps: all {len(found.steps)} that both have logged are bit-equal")
        return
    num_equal = found.steps.index(found.first)
    values = (f"{name} {a!r} -> {b!r}" for name, (a, b) in found.differences.items())
    before = f"; the {num_equal} before it are bit-equal" if num_equal else ""
    print(f"steps: {found.first} is the first that differs: {', '.join(values)}{before}")


def _difference_row(array: tools.ArrayDifference) -> list[str]:
    if array.largest is None:
        return [array.name, f"{_shape(array.before)} -> {_shape(array.after)}", "", ""]
    return [
        array.name,
        _shape(array.before),
        f"{array.largest:.3g}",
        f"{array.relative_rms:.3g}",
    ]


def _print_changes(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    changes = tools.changed_values(before, after)
    lines = [f"\n  {key}: {change}" for key, change in changes.items()]
    print(f"{what}:{''.join(lines) or ' the same'}")


def prune_run(args: argparse.Namespace) -> int:
    """Delete what the policy does not keep, and the leftovers of saves and damage."""
    run = tools.find_run(args.run)
    policy = CheckpointConfig(keep=args.keep, keep_every=args.keep_every, keep_best=args.keep_best)
    with contextlib.ExitStack() as stack:
        if not args.dry_run:
            try:
                stack.enter_context(locked_run(run, 0))
                if bucket_of(run) is not None:
                    stack.enter_context(kept_in_bucket(run, ProcessGroup()))
            except ValueError as error:
                raise ValueError(f"nothing was deleted: {error}") from error
        checkpoints = stack.enter_context(tools.open_checkpoints(run))
        plan = tools.plan_prune(run, checkpoints, policy, damaged=args.damaged)
        for step, remark in sorted(plan.kept.items()):
            print(f"{step}: {remark}")
        freed = 0
        for path in plan.deleted:
            num_bytes = tools.bytes_on_disk(path)
            freed += num_bytes
            if not args.dry_run:
                tools.delete(checkpoints, path)
            print(f"{path.name}: {'would be ' * args.dry_run}deleted, {format_bytes(num_bytes)}")
    print(f"{format_bytes(freed)} {'would be ' * args.dry_run}freed")
    return 0


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, aligned lines elsewhere; a column `>NAME` is right-aligned."""
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


def _age(seconds: float) -> str:
    """Return `3 h`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _mesh(mesh: Mapping[str, int]) -> str:
    """Return `dp2 x tp4`."""
    return " x ".join(f"{axis}{count}" for axis, count in mesh.items() if count > 1) or "one device"


def _shape(leaf: Sequence[Any] | None) -> str:
    """Return `64x48 float32`."""
    return "nothing" if leaf is None else f"{'x'.join(map(str, leaf[0])) or 'scalar'} {leaf[1]}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandLine(description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Any, text: str) -> Any:
        added = commands.add_parser(name, help=text, allow_abbrev=False)
        added.set_defaults(run_command=run)
        if name != "diff":
            metavar = "RUN[@STEP]" if name == "show" else "RUN"
            added.add_argument("run", metavar=metavar, help="run directory of train.py")
        return added

    listing = command("list", list_run, "list the checkpoints, and leftovers of saves and damage")
    listing.description = (
        "Print a table of the checkpoints. from: the step at which the process that saved it "
        "began. left out: the number of batches that no step took, after loss spikes. pending: "
        "evaluations and samples that the next process runs first. config: a digest of the "
        "configuration."
    )
    show = command("show", show_step, "print the record of a checkpoint")
    show.add_argument("step", metavar="STEP", type=int, nargs="?", help="default: the newest")
    only = show.add_mutually_exclusive_group()
    only.add_argument("--config", action="store_true", help="print only the configuration, as YAML")
    only.add_argument("--fingerprints", action="store_true", help="print those of every array")
    verify = command("verify", verify_run, "read every array and find damage")
    verify.add_argument("steps", metavar="STEP", type=int, nargs="*", help="default: all")
    diff = command("diff", diff_steps, "compare two runs by step, and two of their checkpoints")
    for name in ("a", "b"):
        diff.add_argument(name, metavar="RUN[@STEP]", help="default: the newest step")
    diff.add_argument("--all", action="store_true", help="compare the optimizer state too")
    diff.add_argument("--limit", type=at_least_one, default=20, help="number of arrays shown")
    prune = command("prune", prune_run, "delete old ones and leftovers; the newest complete stays")
    prune.add_argument("--keep", type=at_least_one, required=True, help="number of newest ones")
    prune.add_argument("--keep-every", type=at_least_one, help="keep multiples of this step too")
    prune.add_argument(
        "--keep-best", type=at_least_one, default=0, help="number with the lowest evaluation loss"
    )
    prune.add_argument("--damaged", action="store_true", help="delete damaged ones too")
    prune.add_argument("--dry-run", action="store_true", help="print what would be deleted")
    return parser


@one_line_errors(CheckpointError)
def main(argv: list[str] | None = None) -> int:
    """Run one command; print an error of the user as one line."""
    args = _parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    # orbax leaves these behind after a failed read; the damage itself is reported.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    return args.run_command(args)


if __name__ == "__main__":
    run_script(main)
