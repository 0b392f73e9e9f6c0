# PYTHON_ARGCOMPLETE_OK
"""Search over configurations: a grid, or random draws, of overrides of one configuration file.

`python scripts/sweep.py --config configs/tp8.yaml --dir runs/sweep --grid
optimizer.learning_rate=1e-3,3e-3 model.hidden_size=128,256`. Every trial is an ordinary run in a
directory below `--dir`. The same command continues: finished trials are skipped, the others resume.
Ctrl-C saves and stops the current trial; a second one kills it. The table of all trials is printed,
and written as sweep.md and sweep.json, with a plot as sweep.png. Exit codes: 0 all trials are
finished, 1 a trial has failed, 2 invalid input, 75 stopped, and the same command continues.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import _clone  # noqa: F401 (first: it selects the packages below)
from sweeps.processes import State, Stopper, Supervisor
from sweeps.report import (
    RECORD,
    TABLE,
    Row,
    check_varied,
    describe,
    plot,
    ranked,
    table_lines,
    write_tables,
)
from sweeps.space import Space, grid_points, is_range, parse_space, random_points, varied_keys
from sweeps.trials import Objective, Trial, make_objective, make_trials, read_result

from configs.command_line import CommandLine, one_line_errors
from exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED


def say(line: str) -> None:
    """Print a line at once. If stdout is closed, trials continue and save."""
    with contextlib.suppress(OSError):  # the terminal was closed, or `| head` has ended
        print(line, flush=True)


def read_space(args: argparse.Namespace) -> tuple[Space, list[str]]:
    """Return the search space, and the overrides of all trials. Raises: ValueError."""
    if args.random is not None and args.random < 1:
        raise ValueError(f"--random {args.random}: use at least 1 trial")
    if args.parallel < 1:
        raise ValueError(f"--parallel {args.parallel}: use at least 1 trial at a time")
    if args.seed is not None and (args.random is None or args.seed < 0):
        raise ValueError(f"--seed {args.seed}: use it with --random N, and at least 0")
    # A range is no value of a key, wherever it stands.
    ranges = [item for item in args.overrides if is_range(item)]
    space = parse_space([*args.grid, *ranges])
    if not space:
        raise ValueError("nothing to search over: give --grid section.key=VALUE,VALUE")
    return space, [item for item in args.overrides if item not in ranges]


def prepare(args: argparse.Namespace) -> tuple[list[Trial], list[str], Objective]:
    """Return the trials, the keys that they vary, and their objective; nothing has started yet.

    Raises: ValueError for invalid input, also for an invalid configuration of one trial.
    """
    space, fixed = read_space(args)
    points = (
        grid_points(space)
        if args.random is None
        else random_points(space, args.random, args.seed or 0)
    )
    if "://" in args.dir:
        raise ValueError(f"--dir {args.dir}: a sweep is kept on a disk; give a directory there")
    varied, directory = varied_keys(space), Path(args.dir).expanduser()
    check_varied(directory, varied)
    trials = make_trials(args.config, directory, points, varied, fixed)
    return trials, varied, make_objective(args.metric, args.mode, trials)


def sweep(args: argparse.Namespace) -> int:
    """Run the trials that are not finished, and report on all. Raises: ValueError, OSError."""
    trials, varied, objective = prepare(args)
    directory = Path(args.dir).expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    numbers = {trial.name: f"[{n}/{len(trials)}] {trial.name}" for n, trial in enumerate(trials, 1)}
    finished = [trial for trial in trials if trial.is_finished]
    say(f"{len(trials)} trials in {directory}, {len(finished)} of them finished already")

    def report(trial: Trial, state: State | None, reason: str) -> None:
        if state == "finished":
            reason = describe(read_result(trial, objective), objective)
        say(f"{numbers[trial.name]}: {state or 'started'}{reason and f': {reason}'}")

    supervisor, stopper = Supervisor(args.config, args.parallel, report, say), Stopper()
    states = supervisor.run([trial for trial in trials if trial not in finished], stopper)
    states |= {trial.name: "finished" for trial in finished}
    rows = [Row(trial, states[trial.name], read_result(trial, objective)) for trial in trials]
    rows = ranked(rows, objective)
    write_tables(directory, rows, varied, objective)
    say("\n" + "\n".join(table_lines(rows, varied, objective)) + "\n")
    say(f"{directory / TABLE} and {RECORD} written")
    say(plot(directory, rows, varied, objective))
    return exit_code([*states.values()])


def exit_code(states: Sequence[State]) -> int:
    """Return the exit code of a sweep with trials in these states, and say how it continues."""
    if {"stopped", "waiting"} & {*states}:
        say("stopped; run the same command to continue")
        return EXIT_STOPPED
    return EXIT_FAILED if "failed" in states else EXIT_DONE


@one_line_errors(BrokenPipeError)
def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the sweep; invalid input is one line on stderr."""
    parser = CommandLine(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file of all trials; see configs/")
    parser.add_argument(
        "--dir", required=True, help="directory of the sweep, with one run per trial"
    )
    parser.add_argument(
        "--grid",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUES",
        help="values to try, separated by commas; with --random also a range: log:LOW:HIGH, "
        "uniform:LOW:HIGH or int:LOW:HIGH",
    )
    parser.add_argument(
        "--random", type=int, metavar="N", help="draw N trials instead of all combinations"
    )
    parser.add_argument("--seed", type=int, help="seed of --random (default 0)")
    parser.add_argument(
        "--metric",
        default="eval_loss",
        help="evaluation metric by which trials are compared (default eval_loss)",
    )
    parser.add_argument(
        "--mode",
        choices=["auto", "min", "max"],
        default="auto",
        help="which values of the metric are better; auto: high accuracy and margin, else low",
    )
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="K",
        help="trials at a time, which must fit on the devices together (default 1)",
    )
    parser.add_overrides("training.steps=200", "values for all trials")
    args = parser.parse_intermixed_args(argv)
    try:
        return sweep(args)
    except KeyboardInterrupt:  # before there is a trial to stop
        print("interrupted", file=sys.stderr)
        return EXIT_STOPPED


if __name__ == "__main__":
    sys.exit(main())
