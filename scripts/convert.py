# PYTHON_ARGCOMPLETE_OK
"""Convert Hugging Face models: `scripts/convert.py from-hf DIR RUN_DIR` and `to-hf RUN_DIR DIR`.

`from-hf` makes a run directory whose checkpoint 0 holds the parameters; train.py and generate.py
start from it. `to-hf` writes a checkpoint of a run as a model directory that transformers loads.
Both take `--adapters` for low-rank adapters in PEFT's format.
Exit codes: 0 success, 2 invalid input, 1 any other failure.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from types import TracebackType

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from configs.command_line import CommandLine, on_disk, one_line_errors, run_script
from configs.conversion import export_adapters, export_model, import_config, import_model
from exit_codes import EXIT_BAD_INPUT, EXIT_FAILED
from parallel.cluster.config import ProcessGroupError
from parallel.cluster.distributed import initialize, select_cluster
from parallel.cluster.process_group import ProcessGroup
from training.bucket_runs import open_local
from training.checkpoint_record import CheckpointError
from training.hugging_face.adapters import AdapterDirectory
from training.logs import peak_memory
from units import format_bytes

_SECONDS_PER_LINE = 5.0


class ProgressBar:
    """Progress bar with ETA on a terminal, a line every few seconds elsewhere; on stderr."""

    def __init__(self, name: str, *, silent: bool = False):
        self._name, self._silent = name, silent
        self._begin = self._last = time.monotonic()
        console = Console(stderr=True, quiet=silent)
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
        self._bar = Progress(*columns, TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task(name, total=None)
        self._is_live = console.is_terminal and not silent

    def __enter__(self) -> "ProgressBar":
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_live:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Show bytes done and bytes in all."""
        now = time.monotonic()
        if self._is_live:
            self._bar.update(self._task, completed=done, total=total)
        elif done and not self._silent and now - self._last >= _SECONDS_PER_LINE:
            self._last = now
            minutes, seconds = divmod(round((now - self._begin) * (total - done) / done), 60)
            print(
                f"{self._name}  {format_bytes(done)} of {format_bytes(total)}  "
                f"eta {minutes}:{seconds:02d}",
                file=sys.stderr,
                flush=True,
            )


def from_hf(args: argparse.Namespace) -> None:
    """Import a model directory. Raises: ValueError for invalid input."""
    directory, run = Path(args.directory).expanduser(), Path(args.run)
    if "://" in args.run:
        raise ValueError(
            f"{args.run}: a model is converted into a directory on a disk; give one, and name it "
            "as training.init_from of a run in the bucket"
        )
    adapters = None if args.adapters is None else AdapterDirectory(args.adapters)
    config = import_config(directory, run, args.overrides, adapters)
    given = (args.coordinator, args.num_processes, args.process_id)
    cluster = select_cluster(given, config.cluster, os.environ, detect=args.distributed)
    group = ProcessGroup()
    if cluster is not None:
        group = initialize(cluster, config.cluster, config.mesh.given_devices)
    begin = time.perf_counter()
    try:
        with ProgressBar("reading", silent=not group.is_primary) as bar:
            memory = peak_memory()
            imported = import_model(directory, config, group, bar.update, adapters)
    except BaseException as error:
        group.abort(f"{type(error).__name__}: {error}".partition("\n")[0], EXIT_FAILED)
        known = ValueError | OSError | CheckpointError | ProcessGroupError
        if group.num_processes > 1 and isinstance(error, known):
            # At a normal exit, the processes of a failed conversion could wait for each other.
            print(f"error: {error}", file=sys.stderr, flush=True)
            failed = getattr(error, "exit_code", EXIT_FAILED)
            os._exit(EXIT_BAD_INPUT if isinstance(error, ValueError) else failed)
        raise
    if group.is_primary:
        if imported.notice:
            print(imported.notice, file=sys.stderr)
        if not imported.has_tokenizer:
            print(
                f"warning: {directory} has no tokenizer.json; the run has data.tokenizer="
                f"{config.data.tokenizer}",
                file=sys.stderr,
            )
        print(
            f"{config.run.dir}: checkpoint 0 with {config.model.num_parameters:,} parameters in "
            f"{time.perf_counter() - begin:.1f} s; peak host memory rose by "
            f"{format_bytes(peak_memory() - memory)} (parameters on the devices of this process: "
            f"{format_bytes(imported.num_bytes)})"
        )
    if group.num_processes > 1:
        jax.distributed.shutdown()
        group.close()


def to_hf(args: argparse.Namespace) -> None:
    """Export a checkpoint. Raises: ValueError for invalid input."""
    jax.config.update("jax_platforms", "cpu")
    run, directory = open_local(args.run), args.directory.expanduser()
    with ProgressBar("writing") as bar:
        memory = peak_memory()
        export = export_adapters if args.adapters else export_model
        step = export(
            run, directory, args.step, ema=args.ema, dtype=args.dtype, progress=bar.update
        )
    rose = format_bytes(peak_memory() - memory)
    print(f"{directory}: step {step} of {run}; peak host memory rose by {rose}")


def _parser() -> CommandLine:
    parser = CommandLine(description=__doc__)
    commands = parser.add_subparsers(required=True)
    reading = commands.add_parser("from-hf", help="make a run directory", allow_abbrev=False)
    reading.set_defaults(run_command=from_hf)
    reading.add_argument("directory", metavar="DIR", help="config.json and safetensors files")
    reading.add_argument("run", metavar="RUN_DIR", help="a new directory")
    reading.add_overrides("mesh.fsdp=auto", "values for the new run")
    reading.add_argument(
        "--adapters", metavar="DIR", help="PEFT adapters of this model (default: none)"
    )
    many = reading.add_argument_group("several processes, as of train.py")
    many.add_argument("--distributed", action="store_true", help="detect a Cloud TPU slice")
    many.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    many.add_argument("--num-processes", type=int, help="processes of the import")
    many.add_argument("--process-id", type=int, help="number of this process, from 0")
    writing = commands.add_parser("to-hf", help="write a model directory", allow_abbrev=False)
    writing.set_defaults(run_command=to_hf)
    writing.add_argument("run", metavar="RUN_DIR", help="run directory of train.py")
    writing.add_argument("directory", metavar="DIR", type=on_disk, help="a new directory")
    writing.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    writing.add_argument("--ema", action="store_true", help="write the moving average")
    writing.add_argument(
        "--adapters",
        action="store_true",
        help="write the adapters of a LoRA run alone, as PEFT loads them (default: merge them)",
    )
    writing.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="type of the tensors (default: as in the model that the run was made from)",
    )
    return parser


@one_line_errors(CheckpointError, ProcessGroupError, OSError)
def main(argv: list[str] | None = None) -> int:
    """Run one command; print an error of the user as one line."""
    args = _parser().parse_commands(argv)
    args.run_command(args)
    return 0


if __name__ == "__main__":
    run_script(main)
