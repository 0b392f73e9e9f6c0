# PYTHON_ARGCOMPLETE_OK
"""Tokenize data before a run: `scripts/prepare_data.py --config configs/tp8.yaml`.

Every source of the configuration becomes a store in data.cache_dir, where train.py finds it.
Existing stores are kept, interrupted ones are continued. Exit codes: 0 success, 2 invalid input,
1 any other failure.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import _clone  # noqa: F401 (first: it selects the packages below)

# None of these imports jax, since worker processes import this file.
from configs.command_line import CommandLine
from configs.reading import ConfigError, apply_overrides, import_plugins, read_tree, validate
from data.batch_schedule import BatchSchedule
from data.config import DataConfig
from data.filters import Filters, parse_filters
from data.packed_store import open_packed_store
from data.prepare import (
    StoreJob,
    build,
    describe_unread_files,
    open_prepared,
    prepared_folder,
    store_job,
)
from data.ray_engine import ray_engine
from data.store import Store
from data.tokenization import Engine, tokenize_shards
from data.tokenization_progress import TokenizationProgress
from data.tokenizers.base import open_tokenizer
from data.tokenizers.training import ensure_tokenizer

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def load_data_config(path: str | None, overrides: Sequence[str]) -> DataConfig:
    """Return the section `data` of a configuration file, or its defaults.

    Imports the plugins of the file. Raises: ValueError.
    """
    for override in overrides:
        if not override.startswith("data."):
            raise ConfigError(f"override {override!r}: this script accepts only data.key=value")
    tree = {} if path is None else read_tree(path)
    apply_overrides(tree, overrides)
    import_plugins(tree)
    section = tree.get("data") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"data={section!r} is not a section; write data: with its keys")
    data = validate(section, DataConfig, "data.")
    BatchSchedule(data)  # raises for lengths and sizes that do not fit together
    return data


def engine_of(args: argparse.Namespace) -> AbstractContextManager[Engine]:
    """Return the engine that the options name. Raises: ValueError."""
    workers, least = args.workers, 1 if args.engine == "ray" else 0
    if workers is not None and workers < least:
        alone = "" if least else "0 to work in this process alone, or "
        raise ValueError(f"--workers {workers}: use {alone}the number of worker processes")
    if args.engine == "ray":
        return ray_engine(args.address, workers, partial(print, flush=True))
    if args.address is not None:
        raise ValueError(f"--address {args.address} is that of a Ray cluster; add --engine ray")
    workers = (os.cpu_count() or 1) if workers is None else workers
    return nullcontext(partial(tokenize_shards, workers=workers))


def make(job: StoreJob, folder: Path, engine: Engine) -> tuple[Store, str]:
    """Prepare a source; return the store and the speed."""
    with TokenizationProgress(job.name) as progress:
        store = build(job, folder, engine=engine, report=progress.update)
    return store, progress.speed()


def pack(store: Store, data: DataConfig, eval_fraction: float) -> int:
    """Pack a store into rows, which train.py then finds too; return how many are not held out."""
    packed = open_packed_store(
        store,
        row_length=data.row_length,
        packing=data.packing,
        eval_fraction=eval_fraction,
        cache=Path(data.cache_dir).expanduser(),
    )
    return packed.info.train_rows


def verify(job: StoreJob, folder: Path) -> str:
    """Read the whole store of a source; return a line about it. Raises: DataError for damage."""
    store = open_prepared(folder, job)
    store.verify()
    return f"{title(job)}: {store.summary()}; verified, digest {store.digest[:16]}; {folder}"


def run(args: argparse.Namespace) -> None:
    """Prepare or verify every source. Raises: ValueError for what the user can correct."""
    data = load_data_config(args.config, args.overrides)
    sources = data.named_sources
    if args.out is not None and len(sources) > 1:
        raise ValueError(f"--out takes one source, and there are {len(sources)}; leave it out")
    engine_context, filters = engine_of(args), filters_of(args)
    if args.train_tokenizer is not None:
        ensure_tokenizer(data, args.train_tokenizer, lambda line: print(line, flush=True))
    tokenizer = open_tokenizer(data.tokenizer, data.eos_token)
    folders: list[tuple[StoreJob, Path]] = []
    for name, source in sources.items():
        job = replace(store_job(name, data, tokenizer), filters=filters)
        folders.append((job, folder_of(job, data, args.out)))
        if source.eval_files is not None:
            job = store_job(name, data, tokenizer, is_evaluation=True)
            folders.append((job, folder_of(job, data, None)))
    if args.verify:
        for job, folder in folders:
            print(verify(job, folder), flush=True)
        return
    with engine_context as engine:
        for job, folder in folders:
            prepare_store(job, data, folder, engine)
    if args.out is not None:
        print(f"to train on it, set {folders[0][0].files_key}={args.out}", flush=True)


def filters_of(args: argparse.Namespace) -> Filters:
    """Return the filters that the options name. Raises: ValueError."""
    if args.filter and args.out is None:
        raise ValueError(
            "--filter needs --out FOLDER, which train.py then reads as data.files=FOLDER"
        )
    if args.filter and args.verify:
        raise ValueError("--filter has no effect with --verify; leave it out")
    return parse_filters(args.filter)


def folder_of(job: StoreJob, data: DataConfig, out: Path | None) -> Path:
    """Return the folder of a store. out: given on the command line. Raises: ValueError."""
    if (prepared := prepared_folder(job.files)) is None:
        return out or job.folder(Path(data.cache_dir))
    if out is not None:
        raise ValueError(
            f"--out {out}: {job.files_key}={prepared} is a store already; leave it out"
        )
    return prepared


def prepare_store(job: StoreJob, data: DataConfig, folder: Path, engine: Engine) -> None:
    """Prepare one store, and print a line about it."""
    store, speed = (
        (open_prepared(folder, job), "already prepared")
        if prepared_folder(job.files) is not None
        else make(job, folder, engine)
    )
    count = pack(store, data, 0.0 if job.is_evaluation else data.eval_fraction_of(job.source))
    rows = f"{count:,} {'held-out' if job.is_evaluation else 'training'} rows of {data.row_length}"
    print(f"{title(job)}: {store.summary()}; {rows}; {speed}; {folder}", flush=True)
    for line in describe_unread_files(job):
        print(f"warning: {line}", flush=True)


def title(job: StoreJob) -> str:
    """Return the name of a store in the output of this script."""
    return f"{job.name} eval_files" if job.is_evaluation else job.name


def make_parser() -> CommandLine:
    """Return the parser of the command line."""
    parser = CommandLine(description=__doc__)
    parser.add_argument(
        "--config", help="YAML file, of which the section data is read; default: all defaults"
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes that tokenize; 0: this one; default: one per core. Not with --address",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="tokenize on this machine, or on all nodes of a Ray cluster (default: local)",
    )
    parser.add_argument(
        "--address",
        help="of a running Ray cluster, such as 10.0.0.1:6379 or auto; default: RAY_ADDRESS, "
        "else a cluster of this machine for this command",
    )
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="N",
        help="first train data.tokenizer with a vocabulary of N tokens",
    )
    parser.add_argument(
        "--out",
        type=lambda text: Path(text).expanduser(),
        help="folder of the store, if the configuration has one source",
    )
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="NAME:ARGUMENT",
        help="leave documents out, and count them: all without length:MIN..MAX characters, those "
        "with regex:PATTERN, those for which classifier:MODULE.FUNCTION is false, duplicates of "
        "earlier ones; may be repeated. The eval_files are not filtered",
    )
    parser.add_argument(
        "--verify", action="store_true", help="verify existing stores instead of preparing them"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="data.key=value", help="changes to the file"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; invalid input is one line on stderr."""
    args = make_parser().parse_intermixed_args(argv)
    try:
        run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("error: interrupted; run the same command again to continue", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
