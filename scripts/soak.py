# PYTHON_ARGCOMPLETE_OK
"""Break real runs on purpose: `scripts/soak.py kills | corruptions | disk | ...`.

Each soak runs `train.py` or another script on simulated devices in a temporary folder. The folder
is deleted at the end, or kept and named if something is wrong. The last line of stdout is one JSON
object.
Exit codes: 0 everything is as it should be, 1 something is wrong, 2 bad command line.
"""

import argparse
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
from soaks.commands import soak_conversions, soak_prepare
from soaks.corruptions import serve_restores, soak_corruptions
from soaks.disk import soak_disk
from soaks.kills import soak_kills
from soaks.overhead import soak_overhead
from soaks.processes import Limit, SoakError, report
from soaks.store_runs import CASES
from soaks.stores import soak_stores

from configs.command_line import CommandLine


def parse(argv: list[str] | None = None) -> dict[str, Any]:
    """Parse the command line: `name`, `soak` (the function), and the options of that function."""
    parser = CommandLine(description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True, metavar="SOAK")

    def command(name: str, soak: Any, text: str) -> argparse.ArgumentParser:
        defaults = argparse.ArgumentDefaultsHelpFormatter
        added = commands.add_parser(name, help=text, description=text, formatter_class=defaults)
        added.set_defaults(soak=soak)
        return added

    kills, prepare, conversion = _add_kills(command)
    corruptions = command(
        "corruptions", soak_corruptions, "damage to the newest checkpoint is detected or harmless"
    )
    corruptions.add_argument("--times", type=int, default=200, help="number of damaged copies")
    stores = command(
        "stores", soak_stores, "damage to token stores and packed rows is detected or harmless"
    )
    stores.add_argument("--times", type=int, default=200, help="number of damaged copies")
    stores.add_argument(
        "--runs", type=int, default=len(CASES), help="runs of train.py with a damaged store"
    )
    command("disk", soak_disk, "a disk that is full, read-only, or emptied during a run")
    overhead = command("overhead", soak_overhead, "what saving checkpoints costs a training step")
    overhead.add_argument("--every", type=int, default=50, help="steps of each turn")
    overhead.add_argument(
        "--cycles", type=int, default=5, help="pairs of turns, with and without a save"
    )
    restore = command("restore", serve_restores, "internal: restore the folders named on stdin")
    restore.add_argument("config", type=Path, help="configuration of the run")
    restore.add_argument("original", type=Path, help="folder of the undamaged checkpoints")
    for added in (kills, prepare, conversion):
        added.add_argument(
            "--minutes", type=float, default=math.inf, help="time after which no kill is made"
        )
    for added in (kills, prepare, conversion, corruptions, stores):
        added.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    options = vars(parser.parse_args(argv))
    if "minutes" in options:
        options["limit"] = Limit(options.pop("times"), options.pop("minutes"))
    return options


def _add_kills(
    command: Callable[[str, Any, str], argparse.ArgumentParser],
) -> tuple[argparse.ArgumentParser, ...]:
    """Add the soaks that kill processes: of runs, of prepare_data.py and of convert.py."""
    kills = command("kills", soak_kills, "SIGKILL at random moments, then restart and compare")
    kills.add_argument("--times", type=int, default=100, help="number of kills")
    kills.add_argument("--steps", type=int, default=300, help="training steps of each run")
    kills.add_argument(
        "--processes", type=int, choices=(1, 2, 4), default=1, help="processes of each run"
    )
    kills.add_argument(
        "--change-mesh",
        action="store_true",
        help="at each restart, change the mesh and the number of processes (up to --processes)",
    )
    kills.add_argument("--sparse", action="store_true", help="train a mixture of experts")
    kills.add_argument(
        "--workers", type=int, default=0, help="data worker processes of each process"
    )
    prepare = command(
        "prepare-kills", soak_prepare, "SIGKILL prepare_data.py at random moments, then restart it"
    )
    prepare.add_argument("--times", type=int, default=100, help="number of kills")
    prepare.add_argument("--workers", type=int, default=2, help="processes that tokenize")
    prepare.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="engine of prepare_data.py"
    )
    conversion = command(
        "conversion-kills", soak_conversions, "SIGKILL convert.py at random moments, then restart"
    )
    conversion.add_argument("--times", type=int, default=30, help="number of kills")
    return kills, prepare, conversion


def main(argv: list[str] | None = None) -> int:
    """Run one soak in a temporary folder, print its JSON, and return the exit code."""
    options = parse(argv)
    name, soak = options.pop("name"), options.pop("soak")
    jax.config.update("jax_platforms", "cpu")
    if name == "restore":
        serve_restores(paths=sys.stdin, **options)
        return 0
    # Leave through the clean-up of processes and mounts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder, begin = Path(tempfile.mkdtemp(prefix="torus-soak-")), time.monotonic()
    report(f"working in {folder}")
    result: dict[str, Any] = {"ok": False}
    try:
        result = soak(folder, **options)
    except SoakError as error:
        result["problem"] = str(error)
    finally:
        if result["ok"]:
            shutil.rmtree(folder)
        else:
            report(f"kept the files of this soak: {folder}")
    print(json.dumps({"soak": name, **result, "seconds": time.monotonic() - begin}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
