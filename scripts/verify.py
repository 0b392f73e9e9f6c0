# PYTHON_ARGCOMPLETE_OK
"""Verify that every mesh of eight devices computes what one device computes.

The configuration is scaled down: small sizes, every choice of its structure kept. Then a training
step runs on eight simulated CPU devices for every factorisation over dp, fsdp, tp, sp and ep, every
residual layout and overlap method, in float32 and bfloat16. Loss and gradients are compared with
one device, beside a rounding bound (scripts/verification/bounds.py). Results are kept in --output,
and the same command continues there. Exit codes: 0 all within their bounds, 1 past a bound, 2 bad
input or no case that can run, 130 interrupted.
"""

import argparse
import json
from pathlib import Path

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
from verification.cases import DEVICES, find_cases, spread
from verification.results import Results
from verification.run import Verification, report
from verification.scaling import scale_down
from verification.table import HEADER, closing_lines, line_of, lines_by_mesh, summary

from configs.build import open_devices
from configs.command_line import CommandLine, on_disk, one_line_errors, run_script
from configs.schema import load_config
from exit_codes import EXIT_DONE, EXIT_FAILED


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandLine(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="run N cases, spread over meshes and methods"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the cases (0)")
    parser.add_argument(
        "--mesh", default="", help="only meshes with these axes, like tp4 or dp2-sp4"
    )
    parser.add_argument(
        "--output", type=on_disk, help="folder of the results (runs/verify/NAME_OF_CONFIG)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--by-mesh", action="store_true", help="add the largest errors of a mesh")
    parser.add_overrides("mesh.tp=2")
    return parser.parse_intermixed_args(argv)


def verify(options: argparse.Namespace) -> bool:
    """Run the cases, print the table, and return whether all are within their bounds.

    Raises:
        ValueError: The configuration or an option is wrong, or no case can run.
    """
    if options.sample is not None and options.sample < 1:
        raise ValueError(f"--sample {options.sample}: use at least 1")
    full = load_config(options.config, options.overrides)
    small = scale_down(full)
    mesh = small.mesh.model_copy(update={"dp": DEVICES})
    devices, _ = open_devices(small.model_copy(update={"mesh": mesh}))
    cases = find_cases(small, full, devices, options.mesh)
    if not cases.cases and not cases.refusals:
        raise ValueError(
            f"--mesh {options.mesh}: no mesh of {DEVICES} devices has these axes; try tp4, or "
            "dp2-sp4"
        )
    chosen = spread(cases.cases, options.seed)[: options.sample]
    output = options.output or Path("runs", "verify", Path(options.config).stem)
    results = Results(output, full)
    if results.notice:
        report(results.notice)
    if not options.json:
        print(HEADER)
    done = []
    for case, result in Verification(full, small, devices, results).run(chosen):
        done.append((case, result))
        if not options.json:
            print(line_of(case, result), flush=True)
    if options.json:
        print(json.dumps(summary(cases, done)))
    else:
        print(*(lines_by_mesh(done) if options.by_mesh else ()), sep="\n")
        print(*closing_lines(cases, done), sep="\n")
    if not done:
        raise ValueError(
            f"{options.config}: no case ran, because every mesh is refused; change what the "
            "refusals name"
        )
    return all(result.comparison.is_within for _, result in done)


@one_line_errors()
def main(argv: list[str] | None = None) -> int:
    """Verify a configuration, and return the exit code."""
    options = parse(argv)
    jax.config.update("jax_platforms", "cpu")
    return EXIT_DONE if verify(options) else EXIT_FAILED


if __name__ == "__main__":
    run_script(main, interrupted="interrupted; the same command continues")
