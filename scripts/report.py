# PYTHON_ARGCOMPLETE_OK
"""Write a report of runs as one HTML file: `scripts/report.py runs/a runs/b --output report.html`.

It overlays the curves of several runs and shows where they restarted, what they generated, and how
their configurations differ. The file needs no network. PNG images of the main charts are written
beside it. A run may still be training. Exit codes: 0 success, 2 invalid input.
"""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

import _clone  # noqa: F401 (first: it selects the packages below)
from reporting.page import render
from reporting.pictures import write_pictures
from reporting.run_record import read_runs

from configs.command_line import CommandLine, on_disk, one_line_errors, run_script
from training.bucket_runs import open_local
from units import format_bytes


def write_report(directories: list[str], output: Path, command: str) -> None:
    """Write the report and its images, and say where. Raises: ValueError, OSError."""
    if output.suffix not in (".html", ".htm"):
        raise ValueError(f"--output {output}: the report is HTML; write a name ending in .html")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: the folder does not exist; create it first")
    runs = read_runs([open_local(directory, with_events=True) for directory in directories])
    output.write_text(render(runs, command), encoding="utf-8")
    print(f"{output} written ({format_bytes(output.stat().st_size)}); open it in a browser")
    if importlib.util.find_spec("matplotlib") is None:
        print('no PNG images: they need matplotlib; pip install -e ".[report]"')
        return
    paths = write_pictures(runs, output)
    if paths:
        print(f"{', '.join(map(str, paths))} written")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory of train.py, on a disk or in a bucket"
    )
    parser.add_argument(
        "--output",
        type=on_disk,
        default=Path("report.html"),
        metavar="FILE",
        help="HTML file to write; default: report.html in the current folder",
    )
    return parser.parse_args(argv)


@one_line_errors()
def main(argv: list[str] | None = None) -> int:
    """Write the report; invalid input is one line on stderr."""
    options = parse(argv)
    arguments = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "scripts/report.py", *arguments])
    write_report(options.runs, options.output, command)
    return 0


if __name__ == "__main__":
    run_script(main)
