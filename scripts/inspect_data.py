"""Shows what the model is fed: `scripts/inspect_data.py --config configs/tp8.yaml --rows 4`.

First rows as text, then every source in numbers: tokens, rows, packing, lengths of documents. Reads
the section `data` alone and prepares small inputs as train.py does. Without --source and --held-out
the rows are those of the batch of one step. Exit codes: 0 done, 2 bad input.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import _clone  # noqa: F401 (first: it selects the packages below)
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from prepare_data import load_data_config
from rich.console import Console
from rich.text import Text

from data.config import DataConfig, phases
from data.pipeline import Fields, Rows, Source
from data.tokenizer import Tokenizer

EXIT_BAD_INPUT = 2
BORDER, END, OPEN, CLOSE = "┃", "⏎", "⟦", "⟧"
LEGEND = f"{BORDER} next document   {END} end token   {OPEN}not learned{CLOSE}"
COLOURS = ("green", "cyan")
BAR_WIDTH = 40
# What would move a terminal's cursor or change its colours shows as a picture of itself.
_VISIBLE: dict[int, int | str] = {
    code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"
}
_VISIBLE |= {code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)}


def choose_rows(
    rows: Rows, *, num_rows: int, step: int, source: str | None, held_out: bool
) -> Iterator[tuple[str, Fields]]:
    """(title, fields) of the rows that are asked for.

    source: the rows that it gives from `step` on, at full length; None: the batch of the step.
    held_out: the first held-out rows of it, or of every source.
    """
    chosen = [s for s in rows.sources if source in (None, s.name)]
    if held_out:
        for one in chosen:
            for index in range(min(num_rows, one.num_eval)):
                title = f"held-out row {index} of {one.num_eval:,} · source {one.name}"
                yield title, one.eval_row(index)
        return
    before = rows.mixture.counts(rows.plan.first_row(step))
    if source is not None:
        one, first = chosen[0], before[rows.sources.index(chosen[0])]
        for index in range(first, first + num_rows):
            yield _place(one, index), one.train_row(index)
        return
    batch_size = rows.plan.at(step).batch_size
    shown = range(min(num_rows, batch_size))
    fields = rows.read_train(step, shown)
    for number, (long_row, first_token) in enumerate(rows.plan.places(step, shown)):
        index, of_source = rows.mixture.locate(long_row)
        title = f"row {number} of {batch_size} of step {step} · "
        title += _place(rows.sources[index], of_source)
        if rows.plan.at(step).length < rows.plan.row_length:
            title += f", from its token {first_token}"
        yield title, {name: values[number] for name, values in fields.items()}


def _place(source: Source, index: int) -> str:
    epoch, row = divmod(index, source.packs.train.num_rows)
    return f"source {source.name}, row {row:,} of epoch {epoch}"


def count_row(fields: Fields) -> str:
    """Documents, tokens, padding and learned targets of a row."""
    used = fields["segment_ids"] >= 0
    tokens, learned = int(used.sum()), int(fields["loss_mask"].sum())
    return (
        f"documents {int(fields['segment_ids'].max()) + 1} · tokens {tokens} · "
        f"padding {len(used) - tokens} · targets learned {learned} ({learned / max(1, tokens):.1%})"
    )


def row_text(fields: Fields, tokenizer: Tokenizer, *, by_token: bool = False) -> Text:
    """A row as text: colours alternate by document, what is not learned stands in brackets.

    Whether a token is learned is told by the place before it, whose target it is; the first of a
    document, which nothing in the row predicts, shows as the second one does.
    by_token: ids and texts of single tokens.
    """
    used = fields["segment_ids"] >= 0
    ids, segments = fields["tokens"][used], fields["segment_ids"][used]
    learned = fields["loss_mask"][used] > 0
    if not len(ids):
        return Text(f"{BORDER} {len(used)} padding", "bold red")
    learned[1:] = np.where(np.diff(segments) == 0, learned[:-1], learned[1:])
    changes = (np.diff(segments) != 0) | (np.diff(learned) != 0)
    cuts = np.flatnonzero(changes) + 1
    text, before = Text(), 0
    for run, is_learned, segment in zip(
        np.split(ids, cuts), learned[[0, *cuts]], segments[[0, *cuts]].tolist(), strict=True
    ):
        if segment != before:
            text.append(BORDER, "bold red")
        before, colour = segment, COLOURS[segment % len(COLOURS)]
        shown = _spell(run, tokenizer, by_token).translate(_VISIBLE)
        text.append(
            *((shown, colour) if is_learned else (f"{OPEN}{shown}{CLOSE}", f"dim {colour}"))
        )
    if padding := int(np.count_nonzero(~used)):
        text.append(f"{BORDER} {padding} padding", "bold red")
    return text


def _spell(ids: np.ndarray, tokenizer: Tokenizer, by_token: bool) -> str:
    end = tokenizer.eos_id
    if by_token:
        texts = (END if token == end else repr(tokenizer.decode([token])) for token in ids)
        return "".join(f" {token}:{text}" for token, text in zip(ids, texts, strict=True))
    parts = np.split(ids, np.flatnonzero(ids == end) + 1)
    return END.join(tokenizer.decode(part) for part in parts)


def document_lengths(source: Source) -> np.ndarray:
    """int64 (D,): tokens of every document, its end included."""
    return np.diff(np.asarray(source.store.ends), prepend=0)


def bins_of(lengths: np.ndarray) -> np.ndarray:
    """Counts of lengths 2^n .. 2^(n + 1) - 1, by n."""
    return np.bincount(np.frexp(lengths)[1])[1:]


def describe(source: Source, config: DataConfig, step: int) -> list[tuple[str, str]]:
    """(what, how much) of a source; weight: that at `step`."""
    store, info, packs = source.store, source.store.info, source.packs.info
    num_bytes, num_learned = int(store.num_bytes.sum()), info.num_tokens
    if store.learned is not None:
        num_learned = int(np.count_nonzero(store.learned))
    weights = {
        name: next(w for s, w in reversed(phases(of.weight).items()) if s <= step)
        for name, of in config.named_sources.items()
    }
    lengths = document_lengths(source)
    marks = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1])
    least, median, most_90, most_99, longest = (f"{value:,.0f}" for value in marks)
    weight = weights[source.name]
    return [
        ("documents", f"{info.num_documents:,}"),
        ("tokens", f"{info.num_tokens:,}"),
        ("learned tokens", f"{num_learned:,} ({num_learned / info.num_tokens:.1%})"),
        ("bytes per learned token", f"{num_bytes / max(1, num_learned):.3f}"),
        ("training rows", f"{packs.train_rows:,} of {source.row_length} tokens"),
        ("held-out rows", f"{packs.held_out_rows:,}"),
        ("packing efficiency", f"{packs.efficiency:.2%} ({config.packing})"),
        ("cut documents", f"{packs.cut_documents:,}"),
        *(
            (f"skipped: {kind}", f"{skip.count:,} (first: {skip.examples[0]})")
            for kind, skip in info.skipped.items()
        ),
        (f"weight at step {step}", f"{weight:g} ({weight / sum(weights.values()):.1%} of rows)"),
        ("lengths", f"least {least}, median {median}, mean {lengths.mean():,.0f}"),
        ("", f"90% {most_90}, 99% {most_99}, longest {longest}"),
    ]


def bars(counts: np.ndarray) -> Iterator[str]:
    """The histogram of document lengths (bins_of) as lines."""
    for exponent in range(int(np.flatnonzero(counts)[0]), len(counts)):
        count = int(counts[exponent])
        bar = "█" * max(count > 0, round(BAR_WIDTH * count / counts.max()))
        limits = f"{2**exponent:,} to {2 ** (exponent + 1) - 1:,}"
        yield f"{limits:>26} {count:>11,} {bar}".rstrip()


SIZE, MARGIN = (900, 500), (80, 40, 30, 50)  # left, top, right, bottom
PANEL_HEIGHT, GAP = 110, 30
INK, BAR, GRID, MARK = "#222222", "#3b6ea5", "#dddddd", "#c0392b"


def plot_lengths(sources: Sequence[Source], path: str | Path) -> None:
    """Histograms of document lengths as a picture, one panel per source over the same axis.

    Raises: ValueError for a suffix that no picture format has; OSError.
    """
    counts = [bins_of(document_lengths(source)) for source in sources]
    first = min(int(np.flatnonzero(of_source)[0]) for of_source in counts)
    num_bins = max(len(of_source) for of_source in counts) - first
    left, top, right, bottom = MARGIN
    height = max(SIZE[1], top + bottom + len(sources) * (PANEL_HEIGHT + GAP))
    image = Image.new("RGB", (SIZE[0], height), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    panel = (height - top - bottom) / len(sources)
    step = (SIZE[0] - left - right) / num_bins
    draw.text((left, 8), "Documents by length", INK, ImageFont.load_default(17), anchor="la")
    note = f"red: rows of {sources[0].row_length:,} tokens"
    draw.text((SIZE[0] - right, 12), note, MARK, font, anchor="ra")
    for number, (source, of_source) in enumerate(zip(sources, counts, strict=True)):
        floor, ceiling = top + (number + 1) * panel, top + number * panel + GAP
        _draw_panel(draw, of_source[first:], (left, ceiling, SIZE[0] - right, floor), step)
        mark = left + step * (math.log2(source.row_length) - first)
        if left <= mark <= SIZE[0] - right:
            draw.line((mark, ceiling, mark, floor), MARK, 2)
        title = f"{source.name}: {source.store.info.num_documents:,} documents"
        draw.text((left, ceiling - 8), title, INK, font, anchor="ls")
    every = -(-num_bins // 16)
    for edge in range(num_bins + 1):
        x, floor = left + step * edge, height - bottom
        draw.line((x, floor, x, floor + (6 if edge % every == 0 else 3)), INK)
        if edge % every == 0:
            draw.text((x, floor + 8), _power(first + edge), INK, font, anchor="ma")
    draw.text((SIZE[0] / 2, height - 20), "tokens of a document", INK, font, anchor="ma")
    image.save(path)


def _draw_panel(
    draw: Any, counts: np.ndarray, box: tuple[float, float, float, float], step: float
) -> None:
    """Grid, bars and axis of one source."""
    left, ceiling, right, floor = box
    font, most = ImageFont.load_default(13), int(counts.max())
    scale = (floor - ceiling) / most
    for value in _ticks(most):
        y = floor - value * scale
        draw.line((left, y, right, y), GRID)
        draw.text((left - 6, y), f"{value:,}", INK, font, anchor="rm")
    for number, count in enumerate(counts.tolist()):
        if count:
            # A bin with one document among millions still shows.
            y = min(floor - 1, floor - count * scale)
            draw.rectangle(
                (left + number * step + 1, y, left + (number + 1) * step - 1, floor), BAR
            )
    draw.line((left, ceiling, left, floor, right, floor), INK)


def _ticks(most: int) -> range:
    """Round numbers from 0 to `most`, three to six of them where there are so many."""
    sizes = (scale * 10**power for power in itertools.count() for scale in (1, 2, 5))
    step = next(size for size in sizes if most // size <= 5)
    return range(0, most + 1, step)


def _power(exponent: int) -> str:
    thousands, rest = divmod(exponent, 10)
    return f"{2**rest}{['', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi'][thousands]}"


def check(args: argparse.Namespace, config: DataConfig) -> None:
    """Raises: ValueError for arguments that mean nothing together."""
    if args.source is not None and args.source not in config.named_sources:
        names = ", ".join(config.named_sources)
        raise ValueError(f"--source {args.source} is not in the configuration; use one of {names}")
    if args.held_out and args.step is not None:
        raise ValueError("--step means nothing with --held-out, whose rows no step takes")
    if args.held_out and not config.eval_fraction:
        raise ValueError("--held-out: data.eval_fraction=0 holds nothing out; raise it")
    for name, value in (("--rows", args.rows), ("--step", args.step or 0)):
        if value < 0:
            raise ValueError(f"{name} {value}: use at least 0")


def run(args: argparse.Namespace) -> None:
    """Everything after the command line. Raises: ValueError for what the user can mend; OSError."""
    config = load_data_config(args.config, args.overrides)
    check(args, config)
    rows, step = Rows(config), args.step or 0
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if args.rows:
        console.print(LEGEND)
    for title, fields in choose_rows(
        rows, num_rows=args.rows, step=step, source=args.source, held_out=args.held_out
    ):
        console.print(f"\n{title}\n{count_row(fields)}", style="bold")
        console.print(row_text(fields, rows.tokenizer, by_token=args.tokens))
    chosen = [source for source in rows.sources if args.source in (None, source.name)]
    for source in chosen:
        console.print(f"\nsource {source.name}", style="bold")
        for what, value in describe(source, config, step):
            console.print(f"{what:>26} {value}")
        for line in bars(bins_of(document_lengths(source))):
            console.print(line)
    if args.plot is not None:
        plot_lengths(chosen, args.plot)
        console.print(f"\n{args.plot} written")


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, shows, and turns what a user can mend into one line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file, of which data is read; default: the defaults")
    parser.add_argument("--rows", type=int, default=2, help="how many to show; 0: numbers only")
    parser.add_argument("--step", type=int, help="zero-based; default: 0")
    parser.add_argument("--source", metavar="NAME", help="this one alone, its rows in its order")
    parser.add_argument("--held-out", action="store_true", help="rows for evaluation")
    parser.add_argument("--tokens", action="store_true", help="id and text of every token")
    parser.add_argument("--plot", metavar="PNG", help="draw the lengths of documents")
    parser.add_argument("overrides", nargs="*", metavar="data.key=value")
    args = parser.parse_intermixed_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
