# PYTHON_ARGCOMPLETE_OK
"""Show the training data: `scripts/inspect_data.py --config configs/tp8.yaml --rows 4`.

Prints rows as text, then statistics of every source: tokens, rows, packing, document lengths. With
--sample also the scripts, duplicates and repeated lines of some documents. Reads the section `data`
and, beside the config.yaml of a run, which shards the run uses. Prepares small inputs as train.py
does. Without --source and --held-out the rows are those of the batch of one step. Exit codes: 0
success, 2 invalid input.
"""

import argparse
from pathlib import Path

import _clone  # noqa: F401 (first: it selects the packages below)
from prepare_data import load_data_config
from rich.console import Console

from configs.command_line import CommandLine, on_disk, one_line_errors, run_script
from data.config import DataConfig
from data.corpus_sample import describe_sample, sample_documents
from data.inspection import (
    LEGEND,
    VISIBLE,
    choose_rows,
    count_row,
    describe,
    document_lengths,
    histogram_lines,
    length_histogram,
    plot_lengths,
    row_text,
)
from data.pipeline import Dataset
from training.resume import pins_of_run


def check(args: argparse.Namespace, config: DataConfig) -> None:
    """Raise ValueError for arguments that cannot be combined."""
    if args.source is not None and args.source not in config.named_sources:
        names = ", ".join(config.named_sources)
        raise ValueError(f"--source {args.source} is not in the configuration; use one of {names}")
    if args.held_out and args.step is not None:
        raise ValueError(
            "--step has no meaning with --held-out: held-out rows belong to no training step; "
            "leave it out"
        )
    if args.held_out and not config.evaluated_sources:
        raise ValueError(
            "--held-out: data.eval_fraction=0 leaves the held-out split empty; raise it"
        )
    given = {"--rows": args.rows, "--step": args.step or 0, "--sample": args.sample}
    for name, value in given.items():
        if value < 0:
            raise ValueError(f"{name} {value}: use at least 0")


def run(args: argparse.Namespace) -> None:
    """Print what the arguments ask for. Raises: ValueError for invalid input; OSError."""
    config = load_data_config(args.config, args.overrides)
    check(args, config)
    # A run keeps the shards and the order with which it began, unless overrides name other data.
    other = ("data.files=", "data.eval_files=", "data.sources")
    is_own = args.config and not any(text.startswith(other) for text in args.overrides)
    pins = pins_of_run(Path(args.config).parent) if is_own else None
    dataset, step = Dataset(config, pins=pins), args.step or 0
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if args.rows:
        console.print(LEGEND)
    for title, fields in choose_rows(
        dataset, num_rows=args.rows, step=step, source=args.source, held_out=args.held_out
    ):
        console.print(f"\n{title}\n{count_row(fields)}", style="bold")
        console.print(row_text(fields, dataset.tokenizer, by_token=args.tokens))
    pairs = zip(dataset.rows_of(step)[1], dataset.sources, strict=True)
    shown = [pair for pair in pairs if args.source in (None, pair[0].name)]
    for source, held_out in shown:
        console.print(f"\nsource {source.name}", style="bold")
        for name, value in describe(source, held_out, config, step):
            console.print(f"{name:>26} {value}")
        if args.sample:
            texts = [
                *sample_documents(source.store, dataset.tokenizer, dataset.bos_id, args.sample)
            ]
            for name, value in describe_sample(texts, source.store.num_documents):
                console.print(f"{name:>26} {value.translate(VISIBLE)}")
        for line in histogram_lines(length_histogram(document_lengths(source))):
            console.print(line)
    for line in dataset.warnings():
        console.print(f"\nwarning: {line}")
    if args.plot is not None:
        plot_lengths([source for source, _ in shown], args.plot)
        console.print(f"\n{args.plot} written")


@one_line_errors()
def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; invalid input is one line on stderr."""
    parser = CommandLine(description=__doc__)
    parser.add_argument(
        "--config", help="YAML file, of which the section data is read; default: all defaults"
    )
    parser.add_argument("--rows", type=int, default=2, help="rows to show; 0: statistics only")
    parser.add_argument("--step", type=int, help="zero-based step of the batch; default: 0")
    parser.add_argument("--source", metavar="NAME", help="show only this source, its rows in order")
    parser.add_argument("--held-out", action="store_true", help="show rows of the held-out split")
    parser.add_argument("--tokens", action="store_true", help="show id and text of every token")
    parser.add_argument(
        "--sample",
        type=int,
        default=0,
        metavar="N",
        help="also look for scripts, duplicates and repeated lines in N documents of every source, "
        "evenly spread",
    )
    parser.add_argument(
        "--plot", type=on_disk, metavar="PNG", help="write an image of the document lengths"
    )
    parser.add_overrides("data.sequence_length=512")
    args = parser.parse_intermixed_args(argv)
    run(args)
    return 0


if __name__ == "__main__":
    run_script(main)
