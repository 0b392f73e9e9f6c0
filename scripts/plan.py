# PYTHON_ARGCOMPLETE_OK
"""Plan a training step for a TPU slice that need not exist.

    python scripts/plan.py --config configs/llama3_8b_tp8.yaml --topology v5p-16

Compiles the step of train.py with libtpu (`pip install -e ".[plan]"`) and prints whether it fits,
its memory, its predicted time and its communication. A step that does not fit gets a proposal: the
change that fits and costs the least time. docs/plan.md explains the figures.

Exit codes: 0 it fits, 1 it does not fit or --fail-if holds, 2 invalid input.
"""

import argparse
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import _clone  # noqa: F401 (first: it selects the packages below)
from planning import gpus, report
from planning.scaling import plot, scale, table
from planning.search import Planner, Ranked, advise, as_it_is, search
from planning.step import StepPlan, check_mesh, check_slices, plan_step
from rich.console import Console
from rich.status import Status

from configs.command_line import (
    CommandLine,
    at_least_one,
    on_disk,
    one_line_errors,
    run_script,
)
from configs.schema import Config, fill_mesh, load_config
from exit_codes import EXIT_FAILED
from parallel.planning.result_cache import open_cache
from parallel.planning.slices import read_topology
from parallel.planning.trace import write_trace
from training.logs import aligned

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def count(text: str) -> float:
    """Parse a number of tokens such as 300B or 1.5T.

    Raises:
        argparse.ArgumentTypeError: It has another form.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text}: write a number of tokens such as 300B or 1.5T")
    return float(found[1]) * _UNITS[found[2].upper()]


def chip_range(text: str) -> tuple[int, int]:
    """Parse FIRST..LAST, numbers of chips.

    Raises:
        argparse.ArgumentTypeError: It has another form.
    """
    found = re.fullmatch(r"([1-9]\d*)\.\.([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text}: write numbers of chips such as 8..4096")
    return int(found[1]), int(found[2])


def condition(text: str) -> tuple[str, str, float]:
    """Parse a condition such as hbm>0.95.

    Raises:
        argparse.ArgumentTypeError: It has another form.
    """
    names = "|".join(report.FIGURES)
    found = re.fullmatch(rf"\s*({names})\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text}: write a figure, a comparison and a number such as hbm>0.95; figures: "
            f"{', '.join(report.FIGURES)}"
        )
    return found[1], found[2], float(found[3])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = CommandLine(description=__doc__, formatter_class=raw)
    parser.add_argument("--config", required=True, help="YAML file; see configs/")
    parser.add_argument(
        "--topology",
        required=True,
        help="v5p-16, v5p:2x2x2, v6e-64, ...; v5p-16*2 for two slices; h100-8 for GPUs",
    )
    parser.add_argument(
        "--check-mesh", action="store_true", help="check the number of chips only; needs no libtpu"
    )
    parser.add_argument("--tokens", type=count, help="tokens of the run, such as 1T: days and cost")
    parser.add_argument("--price", type=float, help="price of a chip for an hour, with --tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--trace", type=on_disk, help="file of the predicted step for ui.perfetto.dev"
    )
    parser.add_argument(
        "--fail-if",
        type=condition,
        action="append",
        default=[],
        metavar="CONDITION",
        help=f"exit with 1 if it holds, e.g. hbm>0.95; figures: {', '.join(report.FIGURES)}",
    )
    parser.add_argument("--no-advice", action="store_true", help="compile no proposal")
    parser.add_argument(
        "--search", action="store_true", help="compile other meshes, layouts, remat, microbatches"
    )
    parser.add_argument(
        "--compiles", type=at_least_one, default=5, help="stop after N that fit (5)"
    )
    parser.add_argument(
        "--scale", type=chip_range, metavar="A..B", help="extrapolate to other numbers of chips"
    )
    parser.add_argument("--plot", type=on_disk, help="draw --scale as a PNG")
    parser.add_argument("--cache", default=".cache/plan", help="folder of earlier answers")
    parser.add_overrides("mesh.tp=2")
    options = parser.parse_intermixed_args(argv)
    for given, needed in (("price", "tokens"), ("plot", "scale")):
        if getattr(options, given) is not None and getattr(options, needed) is None:
            parser.error(f"--{given} needs --{needed}")
    if options.price is not None and not options.price > 0:
        parser.error(f"--price {options.price:g}: use a number above 0")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install -e ".[plan]"')
    if options.plot is not None and options.plot.suffix != ".png":
        parser.error(f"--plot {options.plot}: the picture is a PNG; write a name ending in .png")
    names = ("fail_if", "json", "tokens", "search", "trace", "scale")
    ignored = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if options.check_mesh and ignored:
        parser.error(f"--check-mesh compiles nothing; leave out {', '.join(ignored)}")
    for path in (options.trace, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: the folder does not exist; create it first")
    return options


@one_line_errors()
def main(argv: list[str] | None = None) -> int:
    """Plan as the command line says, and return the exit code."""
    options = parse(argv)
    config = load_config(options.config, options.overrides)
    if (nodes := gpus.read_gpus(options.topology)) is not None:
        return _plan_gpus(options, fill_mesh(config, nodes.num_gpus), nodes)
    topology = read_topology(options.topology)
    check_slices(config, topology)
    config = fill_mesh(config, topology.num_chips)
    check_mesh(config, topology)
    if options.check_mesh:
        print(_chips_line(config, str(topology)), file=sys.stderr)
        return 0
    return _plan(options, config)


def _chips_line(config: Config, machines: str) -> str:
    mesh, chips = report.mesh_name(config), config.mesh.num_devices
    return f"mesh {mesh} has the {chips} chips of {machines}; memory was not checked"


def _plan(options: argparse.Namespace, config: Config) -> int:
    """Compile the step, print the answer and what was asked for besides, return the exit code."""
    plan = _planner(options.cache)(config, options.topology)
    assert plan is not None  # without `skip`, what cannot be planned is an error
    result = report.as_json(plan)
    show = (lambda *lines: None) if options.json else partial(print, sep="\n")
    show(report.verdict(plan), *aligned(plan.choices))
    code = 0 if plan.fits else EXIT_FAILED
    if plan.fits:
        show("", *report.render(plan, tokens=options.tokens, price=options.price))
        if options.tokens is not None:
            result["run"] = report.run_cost(plan, options.tokens, options.price)
        code = _check(options, plan, show)
        if options.trace is not None:
            write_trace(plan.compiled.prediction, options.trace)
            show(f"wrote {options.trace}")
        if options.scale is not None:
            result["scale"] = _scale(options, plan, show)
    else:
        for name in ("trace", "scale"):
            if getattr(options, name) is not None:
                print(f"no --{name}: the step does not fit", file=sys.stderr)
        if plan.memory is not None:
            show("", *report.memory_table(plan.memory))
        if not options.no_advice:
            advice = advise(plan, _planner(options.cache, skip=True))
            show(report.proposal(plan, advice))
            result["advice"] = None if advice is None else report.ranked_json(advice)
    if options.search:
        found = _search(options, plan)
        show("", *report.search_table(found))
        result["search"] = [report.ranked_json(ranked) for ranked in found]
    if options.json:
        print(json.dumps(result))
    return code


def _check(options: argparse.Namespace, plan: report.Plan, show: Callable[..., None]) -> int:
    """Show the conditions of --fail-if that hold, and return the exit code."""
    broken = [given for given in options.fail_if if report.holds(plan, given)]
    show(*(f"failed: {name} {sign} {limit:g} holds" for name, sign, limit in broken))
    return EXIT_FAILED if broken else 0


def _scale(
    options: argparse.Namespace, plan: StepPlan, show: Callable[..., None]
) -> list[dict[str, Any]]:
    """Show other numbers of chips, draw them if asked to, and return them."""
    points = list(scale(plan, *options.scale))
    show("", *table(points))
    if options.plot is not None:
        plot(points, options.plot, f"{Path(options.config).stem} from {plan.topology}")
        show(f"wrote {options.plot}")
    return [asdict(point) for point in points]


def _plan_gpus(options: argparse.Namespace, config: Config, nodes: gpus.GpuNodes) -> int:
    """Plan for GPUs, print the answer, and return the exit code."""
    asked = ("trace", "scale", "plot", "search")
    if given := [f"--{name}" for name in asked if getattr(options, name)]:
        raise ValueError(
            f"{', '.join(given)}: works for TPU slices only, because XLA gives no times for GPUs; "
            "leave it out"
        )
    gpus.check_gpus(config, nodes)
    if options.check_mesh:
        print(_chips_line(config, nodes.name), file=sys.stderr)
        return 0
    plan = gpus.plan_gpus(config, nodes)
    result = gpus.as_json(plan)
    show = (lambda *lines: None) if options.json else partial(print, sep="\n")
    show(*gpus.render(plan))
    if options.tokens is not None:
        show(report.cost_line(plan, options.tokens, options.price))
        result["run"] = report.run_cost(plan, options.tokens, options.price)
    code = _check(options, plan, show)
    if options.json:
        print(json.dumps(result))
    return code if plan.fits else EXIT_FAILED


def _search(options: argparse.Namespace, plan: StepPlan) -> list[Ranked]:
    """Return the compiled candidates and the plan itself that fit, the fastest first."""
    planner = _planner(options.cache, skip=True)
    found = list(search(plan.config, plan.topology, plan.chip, planner, options.compiles))
    if all(ranked.candidate.overrides for ranked in found):
        found.append(as_it_is(plan))
    return sorted(
        (ranked for ranked in found if ranked.plan is not None and ranked.plan.fits),
        key=lambda ranked: ranked.seconds,
    )


def _planner(cache: str, *, skip: bool = False) -> Planner:
    """Return a function that plans a step and shows on stderr what it compiles.

    skip: return None for a configuration that cannot be planned, and say why on stderr.
    """
    console, results = Console(stderr=True), open_cache(Path(cache))

    def planner(config: Config, topology: str) -> StepPlan | None:
        text = f"planning for {topology}: {report.describe(config)}"
        begin = time.monotonic()
        try:
            with Status(text, console=console):
                if not console.is_terminal:
                    print(text, file=sys.stderr, flush=True)
                plan = plan_step(config, topology, results)
        except ValueError as error:
            if not skip:
                raise
            print(f"  skipped: {error}", file=sys.stderr)
            return None
        took = f"{time.monotonic() - begin:.0f} s"
        # The answer about the configuration itself is on stdout.
        done = f"{report.verdict(plan)} ({took})" if skip else f"planned in {took}"
        print(f"  {done}", file=sys.stderr, flush=True)
        return plan

    return planner


if __name__ == "__main__":
    run_script(main, interrupted="interrupted; finished compilations are kept")
