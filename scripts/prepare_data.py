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

# Worker processes import this file, so none of the modules below may import jax.
from configs.command_line import CommandLine, one_line_errors
from configs.reading import ConfigError, apply_overrides, import_plugins, read_tree, validate
from data.batch_schedule import BatchSchedule
from data.bucket_path import AnyPath, BucketPath, to_path
from data.config import DataConfig
from data.engine import Engine, run_tasks
from data.filters import Filters, parse_filters
from data.packed_store import PackSettings, open_packed_store, settings_of
from data.prepare import build, open_prepared
from data.prepared_store import prepared_folder
from data.ray_engine import ray_engine
from data.shard_list import is_sharded
from data.shard_plan import Sharding
from data.shard_writer import prepare_shards
from data.sharded_store import ShardedRows, ShardedStore
from data.store import Store
from data.store_job import StoreJob, describe_unread_files, store_job
from data.tokenization_progress import TokenizationProgress
from data.tokenizers.base import open_tokenizer
from data.tokenizers.training import ensure_tokenizer, find_texts
from exit_codes import EXIT_FAILED

DEFAULT_SHARD_GB = 1.0


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
    return nullcontext(partial(run_tasks, workers=workers))


def make(job: StoreJob, folder: Path, engine: Engine) -> tuple[Store, str]:
    """Prepare a source; return the store and the speed."""
    with TokenizationProgress(job.name) as progress:
        store = build(job, folder, engine=engine, report=progress.update)
    return store, progress.speed()


def make_shards(
    job: StoreJob, folder: AnyPath, engine: Engine, sharding: Sharding, data: DataConfig
) -> tuple[ShardedStore, str]:
    """Prepare the shards of a source; return the store and the speed."""
    settings, cache = pack_settings(job, data), Path(data.cache_dir)
    with TokenizationProgress(job.name) as progress:
        store = prepare_shards(
            job, folder, sharding, settings, cache=cache, engine=engine, report=progress.update
        )
    return store, progress.speed()


def pack_settings(job: StoreJob, data: DataConfig) -> list[PackSettings]:
    """Return the settings that decide the rows of a store, one for every length of rows."""
    return settings_of(data, job.source, is_evaluation=job.is_evaluation)


def count_rows(store: Store | ShardedStore, settings: PackSettings, cache: Path) -> int:
    """Return how many rows are not held out; a store is packed, so that train.py finds them."""
    if isinstance(store, ShardedStore):
        return ShardedRows(store, settings).info.train_rows
    return open_packed_store(store, settings, cache).info.train_rows


def verify(job: StoreJob, folder: AnyPath) -> str:
    """Read the whole store of a source; return a line about it. Raises: DataError for damage."""
    store = open_prepared(folder, job)
    store.verify()
    return f"{title(job)}: {store.summary()}; verified, digest {store.digest[:16]}; {folder}"


def sharding_of(args: argparse.Namespace) -> Sharding | None:
    """Return how the options cut the store into shards; None: it has none. Raises: ValueError."""
    has_size = args.shard_gb is not None
    options = {"--shard-gb": has_size, "--append": args.append, "--stream": args.stream}
    is_wanted = any(options.values()) or isinstance(args.out, BucketPath)
    if args.out is None:
        for name, value in options.items():
            if value:
                raise ValueError(f"{name} needs --out FOLDER, which train.py then reads")
        return None
    if not is_wanted and not is_sharded(args.out):
        return None
    if has_size and not 0 < args.shard_gb < 1e6:
        raise ValueError(f"--shard-gb {args.shard_gb:g}: use a number of GB above 0, such as 1")
    size = args.shard_gb if has_size else DEFAULT_SHARD_GB
    return Sharding(max(1, round(size * 1e9)), in_order=args.stream, append=args.append)


def run(args: argparse.Namespace) -> None:
    """Prepare or verify every source. Raises: ValueError for what the user can correct."""
    data = load_data_config(args.config, args.overrides)
    sources = data.named_sources
    if args.out is not None and len(sources) > 1:
        raise ValueError(f"--out takes one source, and there are {len(sources)}; leave it out")
    engine_context, filters, sharding = engine_of(args), filters_of(args), sharding_of(args)
    report, size = partial(print, flush=True), args.train_tokenizer
    if args.verify:
        for job, folder in stores_of(args, data, filters):
            report(verify(job, folder))
        return
    # What the user has to correct is found before a cluster starts, as far as possible.
    texts = find_texts(data, size, report) if size is not None else []
    folders = None if texts else stores_of(args, data, filters)
    with engine_context as engine:
        if folders is None:
            ensure_tokenizer(data, size, report, pieces=texts, engine=engine)
            folders = stores_of(args, data, filters)
        for job, folder in folders:
            prepare_store(job, data, folder, engine, sharding if folder == args.out else None)
    if args.out is not None:
        report(f"to train on it, set {folders[0][0].files_key}={args.out}")


def stores_of(
    args: argparse.Namespace, data: DataConfig, filters: Filters
) -> list[tuple[StoreJob, AnyPath]]:
    """Return the stores of every source, and their folders. Raises: ValueError."""
    tokenizer = open_tokenizer(data.tokenizer, data.eos_token)
    found: list[tuple[StoreJob, AnyPath]] = []
    for name, source in data.named_sources.items():
        job = replace(store_job(name, data, tokenizer), filters=filters)
        found.append((job, folder_of(job, data, args.out)))
        if source.eval_files is not None:
            job = store_job(name, data, tokenizer, is_evaluation=True)
            found.append((job, folder_of(job, data, None)))
    return found


def filters_of(args: argparse.Namespace) -> Filters:
    """Return the filters that the options name. Raises: ValueError."""
    if args.filter and args.out is None:
        raise ValueError(
            "--filter needs --out FOLDER, which train.py then reads as data.files=FOLDER"
        )
    without_verify = {
        "--filter": args.filter,
        "--train-tokenizer": args.train_tokenizer,
        "--append": args.append,
    }
    for name, value in without_verify.items():
        if args.verify and value:
            raise ValueError(f"{name} has no effect with --verify; leave it out")
    return parse_filters(args.filter)


def folder_of(job: StoreJob, data: DataConfig, out: AnyPath | None) -> AnyPath:
    """Return the folder of a store. out: given on the command line. Raises: ValueError."""
    if (prepared := prepared_folder(job.files)) is None:
        return out or job.folder(Path(data.cache_dir))
    if out is not None:
        raise ValueError(
            f"--out {out}: {job.files_key}={prepared} is a store already; give {job.files_key} the "
            "texts of which it was made, or leave --out out"
        )
    return prepared


def prepare_store(
    job: StoreJob, data: DataConfig, folder: AnyPath, engine: Engine, sharding: Sharding | None
) -> None:
    """Prepare one store, and print a line about it. sharding: None: it has no shards."""
    settings = pack_settings(job, data)
    store: Store | ShardedStore
    if prepared_folder(job.files) is not None:
        store, speed = open_prepared(folder, job), "already tokenized"
    elif sharding is not None:
        store, speed = make_shards(job, folder, engine, sharding, data)
    else:
        assert isinstance(folder, Path)
        store, speed = make(job, folder, engine)
    cache, kind = Path(data.cache_dir).expanduser(), "held-out" if job.is_evaluation else "training"
    rows = ", ".join(
        f"{count_rows(store, of_length, cache):,} {kind} rows of {of_length.row_length}"
        for of_length in settings
    )
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
        help="processes that read and tokenize; 0: this one; default: one per core. Not with "
        "--address",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="read and tokenize on this machine, or on all nodes of a Ray cluster (default: local)",
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
        type=to_path,
        help="folder of the store, or gs://... or s3://..., if the configuration has one source",
    )
    _add_shard_options(parser)
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
    parser.add_overrides("data.sequence_length=512")
    return parser


def _add_shard_options(parser: CommandLine) -> None:
    parser.add_argument(
        "--shard-gb",
        type=float,
        metavar="N",
        help="write a store in shards, each of about N GB (1e9 bytes) of input; in buckets always "
        f"(default: {DEFAULT_SHARD_GB:g})",
    )
    parser.add_argument(
        "--append",
        action="store_true",
        help="add these files to the sharded store --out, which holds others",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="let train.py begin with the first shard of --out; it reads the shards one after the "
        "other",
    )


@one_line_errors(OSError, RuntimeError)
def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; invalid input is one line on stderr."""
    args = make_parser().parse_intermixed_args(argv)
    try:
        run(args)
    except KeyboardInterrupt:
        print("error: interrupted; run the same command again to continue", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
