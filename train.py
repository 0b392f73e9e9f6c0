# PYTHON_ARGCOMPLETE_OK
"""Train a sharded transformer: `python train.py --config configs/tp8.yaml [key=value ...]`.

Exit codes: 0 finished, 2 invalid input, 75 stopped by a signal and resumable, 76 a process was lost
or made no progress (start all processes again), 77 a device computes wrongly, 1 any other failure.
"""

import argparse
import contextlib
import logging
import os
import shlex
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until StopRequest is installed: no traceback

import jax

from configs.build import (
    build_program,
    build_sharding_table,
    describe_parameters,
    open_devices,
)
from configs.command_line import CommandLine
from configs.preflight import describe_machine, describe_program
from configs.reading import ConfigError
from configs.reference import as_text, find_sections
from configs.schema import Config, dump_config, fill_mesh, load_config
from data.bucket_path import BucketError
from data.files import DataError
from data.pipeline import Dataset, Pins
from data.tokenizers.base import Tokenizer, document_bos, open_tokenizer, with_bos, without_ends
from exit_codes import (
    EXIT_BAD_INPUT,
    EXIT_DEVICE_FAULT,
    EXIT_FAILED,
    EXIT_PROCESS_LOST,
    EXIT_STOPPED,
)
from model.generation.generator import Generator
from model.generation.sampling import SamplingConfig
from model.router import describe_router_warnings
from parallel.cluster.config import ProcessGroupError
from parallel.cluster.distributed import initialize, select_cluster
from parallel.cluster.process_group import ProcessGroup
from parallel.cluster.signals import StoppedEarly, StopRequest
from parallel.planning.sharding_table import render
from training.bucket_runs import bucket_of
from training.checkpoint_record import CheckpointError
from training.config import RunSettings
from training.config_changes import library_versions
from training.directory import check_not_in_use, check_run_directory_of, run_directory
from training.logs import aligned, log
from training.memory_errors import memory_error
from training.optimizers import describe_unread_keys
from training.recheck import DeviceFault
from training.schedules import describe_schedule_warnings
from training.session import check_reference, open_run
from training.spikes import TrainingError
from training.step import Program
from training.writers.registry import check_writers


@contextlib.contextmanager
def open_session(
    config: Config, stop: StopRequest, group: ProcessGroup, command: str
) -> Iterator[Callable[[], int]]:
    """Open data, devices, program and run directory, and yield the function that trains.

    command: the command line of this process.

    Raises:
        ValueError: The configuration, the data or the run directory cannot be used.
    """
    directory = run_directory(config.run.dir)
    if group.num_processes == 1 and bucket_of(directory) is None:
        check_not_in_use(directory)
    if group.is_primary:
        check_reference(config.run, config.training, config.checkpoint)
        check_writers(config.training.writers)
    devices, notice = open_devices(config)
    config = fill_mesh(config, len(devices))
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.eos_token)
    _check_vocabulary(config, tokenizer)
    _check_prompt(config, tokenizer)
    try:
        report = _say if group.is_primary else _say_nothing
        dataset = Dataset(config.data, tokenizer, report=report)
        pins = group.broadcast("parts of data", lambda: asdict(dataset.pins))
        dataset.pin(Pins(**pins))  # a part may have been added since another process looked
    except BucketError:
        raise
    except OSError as error:
        raise ValueError(f"data: {error}; check data.files and data.cache_dir") from error
    group.check_equal("preflight", describe_machine(dataset, jax.local_devices()))
    program = build_program(config, devices)
    table = build_sharding_table(config, program)
    generator = Generator(
        program.definition,
        program.plan,
        sampling=SamplingConfig(temperature=config.training.sample_temperature),
        seed=config.training.seed,
        num_tokens=tokenizer.vocab_size,
    )

    def sample(params: Any, prompt: str, tokens: int) -> str:
        ids = with_bos(tokenizer.encode(prompt), dataset.bos_id)
        (text,) = generator(params, [ids], max_new_tokens=tokens, stop_ids=tokenizer.eos_ids)
        return tokenizer.decode(without_ends(text, dataset.bos_id, tokenizer.eos_ids))

    settings = _run_settings(config, command)
    with (
        jax.set_mesh(program.tp.manager.mesh),
        open_run(program, dataset, settings, generate=sample, stop=stop, group=group) as trainer,
    ):
        for line in aligned(_describe_start(config, program, dataset, table, notice)):
            log.info("%s", line)
        log.debug("sharding of every tensor:\n%s", render(table))
        yield trainer.train


def _describe_start(
    config: Config, program: Program, dataset: Dataset, table: Any, notice: str | None
) -> list[str]:
    """Return the first lines of the log. notice: about the devices."""
    problems = [
        *describe_schedule_warnings(config.optimizer, config.training.steps),
        *config.optimizer.warnings(config.model.param_dtype),
        *describe_unread_keys(config.optimizer),
        *describe_router_warnings(config.model.moe),
    ]
    return [
        *([f"devices: {notice}"] if notice else []),
        *program.plan.describe(),
        *program.describe_objective(),
        config.optimizer.describe(config.model.param_dtype),
        *dataset.summaries(),
        dataset.describe_epochs(config.training.steps),
        *(f"warning: {line}" for line in [*dataset.warnings(), *problems]),
        *describe_parameters(program, table),
    ]


def _say(line: str) -> None:
    """Print a line at once. If stdout is closed, the run goes on."""
    with contextlib.suppress(BrokenPipeError):
        print(line, flush=True)


def _say_nothing(line: str) -> None:
    pass


def _check_prompt(config: Config, tokenizer: Tokenizer) -> None:
    bos_id = document_bos(tokenizer, config.data.add_bos)
    prompt = config.training.sample_prompt
    if config.training.sample_tokens and not with_bos(tokenizer.encode(prompt), bos_id).size:
        raise ValueError(
            f"training.sample_prompt={prompt!r} has no token; give another, or set "
            "training.sample_tokens=0"
        )


def _check_vocabulary(config: Config, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the "
            f"{tokenizer.vocab_size} ids of data.tokenizer={config.data.tokenizer}; set "
            f"model.vocab_size={tokenizer.vocab_size}"
        )


def _run_settings(config: Config, command: str) -> RunSettings:
    sections = config.run, config.training, config.checkpoint
    return RunSettings(*sections, dump_config(config), command, _versions())


def print_plan(config: Config) -> None:
    """Print every choice between implementations and its reason, without data or arrays.

    Raises:
        ValueError: The configuration cannot run on the devices of this machine.
    """
    devices, notice = open_devices(config)
    program = build_program(config, devices)
    lines = [
        *program.plan.describe(),
        *program.describe_objective(),
        config.optimizer.describe(config.model.param_dtype),
    ]
    print(*aligned([*([f"devices: {notice}"] if notice else []), *lines]), sep="\n")


def print_sharding(config: Config) -> None:
    """Print the sharding of every tensor, without data or arrays.

    Raises:
        ValueError: The configuration cannot run on the devices of this machine.
    """
    devices, _ = open_devices(config)
    print(render(build_sharding_table(config, build_program(config, devices))))


def open_cluster(config: Config, args: argparse.Namespace) -> ProcessGroup:
    """Connect to the processes of this run, as the command line or the environment names them.

    Without either, the group is this process alone, monitored for stalls.

    Raises:
        ValueError: The arguments do not describe a cluster.
        ProcessGroupError: A process is missing, or runs another program.
    """
    given = (args.coordinator, args.num_processes, args.process_id)
    cluster = select_cluster(given, config.cluster, os.environ, detect=args.distributed)
    if cluster is None:
        alone = ProcessGroup(config=config.cluster)
        alone.monitor_alone()
        return alone
    group = initialize(cluster, config.cluster, config.mesh.given_devices)
    if not group.is_primary:
        log.addHandler(logging.NullHandler())  # until its own log file is open
    group.check_equal("preflight", describe_program(config))
    return group


def train(config: Config, args: argparse.Namespace) -> int:
    """Run one process of a training run, and return its exit code."""
    group = ProcessGroup()
    stop = StopRequest().install(_show_notice, lambda: group.phase if group.is_connected else None)
    try:
        with contextlib.ExitStack() as stack:
            try:
                group = open_cluster(config, args)
                if group.num_processes == 1:
                    stack.callback(group.close)
                    stop.has_nothing_to_save = True
                run = stack.enter_context(open_session(config, stop, group, args.command))
            except BucketError:  # the next start may succeed
                raise
            except (ValueError, OSError) as error:
                return _end(group, EXIT_BAD_INPUT, error)
            code = run()
            if group.num_processes > 1:
                group.set_phase(None)
                group.barrier("end")  # process 0 may take long to close its writers
                jax.distributed.shutdown()  # before the group stops watching for lost processes
                group.close()
            return code
    except StoppedEarly as stopped:
        print(stopped)
        return EXIT_STOPPED
    except ProcessGroupError as error:
        return _end(group, error.exit_code, error)
    except DeviceFault as error:
        return _end(group, EXIT_DEVICE_FAULT, error)
    except (CheckpointError, TrainingError, DataError, OSError) as error:
        return _end(group, EXIT_FAILED, error)
    except BaseException as error:
        is_from_jax = isinstance(error, jax.errors.JaxRuntimeError)
        if is_from_jax and (explained := memory_error(error, group.phase, None)):
            return _end(group, EXIT_FAILED, explained)
        if group.num_processes == 1:
            raise
        traceback.print_exc()
        # Without this message the other processes would wait. A runtime error other than memory may
        # be the loss of another process.
        is_memory = "RESOURCE_EXHAUSTED" in str(error)
        code = EXIT_PROCESS_LOST if is_from_jax and not is_memory else EXIT_FAILED
        group.abort(f"{type(error).__name__}: {error}".partition("\n")[0], code)
        return code


def _versions() -> dict[str, str]:
    """Return the versions of the program and of its libraries, by name."""
    project = Path(__file__).with_name("pyproject.toml").read_text()
    return {"torus": tomllib.loads(project)["project"]["version"], **library_versions()}


class _ShowVersion(argparse.Action):
    """Prints the versions of the program and of its libraries, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        torus, *libraries = (f"{name} {found}" for name, found in _versions().items())
        print(f"{torus} ({', '.join(libraries)})")
        parser.exit()


class _ShowReference(argparse.Action):
    """Prints the reference of the configuration, or of one section, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, section: Any, *__: Any) -> None:
        try:
            print(as_text(find_sections(section)))
        except ConfigError as error:
            parser.error(str(error))
        parser.exit()


def _show_notice(text: str) -> None:
    """Show the answer to a signal, also before the log of the run is open."""
    if log.handlers:
        log.info("%s", text)
    else:
        print(text, flush=True)


def _end(group: ProcessGroup, code: int, error: Exception) -> int:
    # One write, because other processes may write to the same terminal.
    sys.stderr.write(f"error: {error}\n")
    group.abort(str(error), code)
    return code


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train. Invalid input is reported on one line."""
    parser = CommandLine(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; see configs/")
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="print all versions, and exit"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every key with its value, and exit"
    )
    parser.add_argument(
        "--print-plan",
        action="store_true",
        help="print every choice between implementations with its reason, and exit",
    )
    parser.add_argument(
        "--print-sharding", action="store_true", help="print the sharding of every tensor, and exit"
    )
    parser.add_argument(
        "--help-config",
        action=_ShowReference,
        nargs="?",
        metavar="SECTION",
        help="print every key of the configuration, or of a section, with its meaning, and exit",
    )
    many = parser.add_argument_group(
        "several processes (detected without these options under SLURM and GKE)"
    )
    many.add_argument(
        "--distributed", action="store_true", help="detect the processes of a Cloud TPU slice"
    )
    many.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    many.add_argument("--num-processes", type=int, help="processes of the run")
    many.add_argument("--process-id", type=int, help="number of this process, from 0")
    parser.add_overrides("training.steps=100")
    args = parser.parse_intermixed_args(argv)
    args.command = shlex.join(["python", "train.py", *(sys.argv[1:] if argv is None else argv)])
    try:
        config = load_config(args.config, args.overrides)
        if args.print_config:
            print(dump_config(config), end="")
            return 0
        if args.print_plan:
            print_plan(config)
            return 0
        if args.print_sharding:
            print_sharding(config)
            return 0
        if not any(override.startswith("run.dir=") for override in args.overrides):
            check_run_directory_of(Path(args.config), config.run.dir)
    except BrokenPipeError:  # an OSError, but no mistake of the user: see below
        raise
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return train(config, args)


if __name__ == "__main__":
    try:
        exit_code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of what an option prints has gone, as with `| head`
        os._exit(128 + signal.SIGPIPE)
    if exit_code not in (0, EXIT_STOPPED):
        # At a normal exit, the threads of a failed save or the processes of a failed run could wait
        # for each other for minutes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
