"""Tokenises data before a run: `scripts/prepare_data.py --config configs/tp8.yaml`.

Every source of the configuration becomes a store in data.cache_dir, where train.py finds it. What
is there is kept; what was killed continues. Exit codes: 0 done, 2 bad input, 1 anything else.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import _clone  # noqa: F401 (first: it selects the packages below)

# No jax in any of these: worker processes import this file.
from configs.reading import ConfigError, apply_overrides, read_tree, validate
from data.config import DataConfig, OnError
from data.formats import Fault, read_documents
from data.packs import open_packs
from data.prepare import Work, build, fault_error, files_key, open_prepared, prepared_folder
from data.progress import Display
from data.schedule import BatchPlan
from data.source import Unit, find_files, plan_units
from data.store import Store
from data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
SAMPLE_BYTES, SAMPLE_UNITS = 2**28, 256


def load_data_config(path: str | None, overrides: Sequence[str]) -> DataConfig:
    """The section `data` of a configuration file, or its defaults. Raises: ValueError."""
    for override in overrides:
        if not override.startswith("data."):
            raise ConfigError(f"override {override!r}: this script reads data.key=value alone")
    tree = {} if path is None else read_tree(path)
    apply_overrides(tree, overrides)
    section = tree.get("data") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"data={section!r} is not a section; write data: with its keys")
    data = validate(section, DataConfig, "data.")
    BatchPlan(data)  # raises what is wrong with lengths and sizes
    return data


def sample_texts(units: Sequence[tuple[Unit, str]], on_error: OnError) -> Iterator[str]:
    """Texts of at most 256 MiB, from the beginnings of units that lie evenly over all.

    units: with the field to read. Raises: DataError for a broken document, if so wished.
    """
    count = min(len(units), SAMPLE_UNITS)
    for index in range(count):
        unit, field = units[index * len(units) // count]
        left = SAMPLE_BYTES // count
        for document in (d for entry in unit.entries for d in read_documents(entry, field)):
            if isinstance(document, Fault):
                if on_error == "raise" and document.kind != "empty":
                    raise fault_error(document)
                continue
            messages = document.messages or ()
            for text in [document.text] if document.text else [text for _, text in messages]:
                piece = text.encode()[:left].decode(errors="ignore")
                left -= len(piece.encode())
                yield piece
            if left <= 3:  # not even one character, perhaps
                break


def ensure_tokenizer(data: DataConfig, vocab_size: int) -> None:
    """Trains the tokenizer that data.tokenizer names, unless it is there.

    Raises: ValueError if what is there has another size, or nothing can be trained.
    """
    if data.tokenizer == "bytes":
        raise ValueError(
            "data.tokenizer=bytes is not trained; name the file to write, for example "
            "data.tokenizer=tokenizer.json"
        )
    path = Path(data.tokenizer).expanduser()
    if path.exists():
        found = open_tokenizer(data.tokenizer, data.eos_token).vocab_size
        if found > vocab_size:
            raise ValueError(
                f"--train-tokenizer {vocab_size}: data.tokenizer={path} is there and has {found} "
                f"tokens; use --train-tokenizer {found}, or name another file"
            )
        print(f"tokenizer {path} is there with {found} tokens: kept, not trained again")
        return
    units = []
    for name, source in data.named_sources.items():
        if (folder := prepared_folder(source)) is not None:
            raise ValueError(
                f"{files_key(name)}={folder} is a prepared store, which has no text to train a "
                "tokenizer on; name its files"
            )
        paths = find_files(source.files, files_key(name))
        units += [(unit, source.field) for unit in plan_units(paths)]
    print(
        f"training a tokenizer of {vocab_size} tokens on at most {SAMPLE_BYTES >> 20} MiB, spread "
        f"evenly over {min(len(units), SAMPLE_UNITS)} of {len(units)} parts of the text",
        flush=True,
    )
    begin = time.monotonic()
    found = train_tokenizer(sample_texts(units, data.on_error), vocab_size, path)
    print(f"tokenizer {path} written after {time.monotonic() - begin:.1f} s")
    if found != vocab_size:
        print(
            f"it has only {found} tokens, for no pair of tokens occurs twice any more; give it "
            "more text for more"
        )


def make(work: Work, folder: Path, workers: int) -> tuple[Store, str]:
    """Prepares a source; returns it, and what it took."""
    with Display(work.name) as display:
        store = build(work, folder, workers=workers, show=display.show)
    return store, display.speed()


def pack(store: Store, data: DataConfig) -> str:
    """Packs a store into the rows of this configuration, which train.py then finds too."""
    packs = open_packs(
        store,
        row_length=data.row_length,
        packing=data.packing,
        eval_fraction=data.eval_fraction,
        cache=Path(data.cache_dir).expanduser(),
    )
    return f"{packs.info.train_rows:,} rows of {data.row_length}"


def check(name: str, tokenizer: Tokenizer, folder: Path) -> str:
    """Reads the whole store of a source; returns the line that says so. Raises: DataError."""
    store = open_prepared(folder, tokenizer, files_key(name))
    store.verify()
    return f"{name}: {store.summary()}; whole, digest {store.digest[:16]}; {folder}"


def run(args: argparse.Namespace) -> None:
    """Everything after the command line. Raises: ValueError for what the user can mend."""
    data = load_data_config(args.config, args.overrides)
    sources = data.named_sources
    if args.workers < 0:
        raise ValueError(f"--workers {args.workers}: use 0 for this process, or more")
    if args.out is not None and len(sources) > 1:
        raise ValueError(f"--out takes one source, and there are {len(sources)}; leave it out")
    if args.train_tokenizer is not None:
        ensure_tokenizer(data, args.train_tokenizer)
    tokenizer = open_tokenizer(data.tokenizer, data.eos_token)
    for name, source in sources.items():
        work = Work(name, source, tokenizer, data.on_error)
        own = prepared_folder(source)
        if own is not None and args.out is not None:
            raise ValueError(f"--out {args.out}: {files_key(name)}={own} is a store already")
        folder = own or args.out or work.folder(Path(data.cache_dir))
        if args.verify:
            print(check(name, tokenizer, folder), flush=True)
            continue
        store, took = (
            (open_prepared(own, tokenizer, files_key(name)), "was there")
            if own is not None
            else make(work, folder, args.workers)
        )
        print(f"{name}: {store.summary()}; {pack(store, data)}; {took}; {folder}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, prepares, and turns what a user can mend into one line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file, of which data is read; default: the defaults")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes; 0: this one"
    )
    parser.add_argument(
        "--train-tokenizer", type=int, metavar="N", help="first train data.tokenizer, N tokens"
    )
    parser.add_argument(
        "--out", type=lambda text: Path(text).expanduser(), help="folder of the only source's store"
    )
    parser.add_argument("--verify", action="store_true", help="read whole stores, make none")
    parser.add_argument("overrides", nargs="*", metavar="data.key=value")
    args = parser.parse_intermixed_args(argv)
    try:
        run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("error: stopped; run again: it continues where it stopped", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
