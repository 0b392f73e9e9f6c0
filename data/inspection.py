"""Rows as text, statistics of sources, and histograms of document lengths."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from rich.text import Text

from data.batch import Fields
from data.config import DataConfig, values_by_step
from data.pipeline import Dataset
from data.source import Source
from data.tokenizers.base import Tokenizer

BORDER, END, OPEN, CLOSE = "┃", "⏎", "⟦", "⟧"
LEGEND = f"{BORDER} next document   {END} end token   {OPEN}not in the loss{CLOSE}"
COLOURS = ("green", "cyan")
BAR_WIDTH = 40
SAMPLED_SHARDS = 16
# Control characters, which could move the cursor or change colours, are shown as symbols.
VISIBLE: dict[int, int | str] = {
    code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"
}
VISIBLE |= {code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)}


def choose_rows(
    dataset: Dataset, *, num_rows: int, step: int, source: str | None, held_out: bool
) -> Iterator[tuple[str, Fields]]:
    """Yield (title, fields) of some rows.

    source: name of the source that provides them, from `step` on and at full length; None: the
        batch of the step.
    held_out: the first held-out rows of the source, or of every source.
    """
    chosen = [s for s in dataset.sources if source in (None, s.name)]
    rows_per_item = dataset.config.rows_per_item
    if held_out:
        for one in chosen:
            for index in range(min(num_rows, one.num_eval)):
                title = f"held-out row {index} of {one.num_eval:,} · source {one.name}"
                yield title + _member(index, rows_per_item), one.eval_row(index)
        return
    mixture, sources = dataset.rows_of(step)
    if source is not None:
        number = dataset.sources.index(chosen[0])
        one, first = sources[number], mixture.counts(dataset.schedule.first_row(step))[number]
        for row in range(first * rows_per_item, first * rows_per_item + num_rows):
            index, n = divmod(row, rows_per_item)
            part = slice(n * one.row_length, (n + 1) * one.row_length)
            fields = {name: values[part] for name, values in one.train_row(index).items()}
            yield _row_title(dataset, one, index) + _member(row, rows_per_item), fields
        return
    phase = dataset.schedule.at(step)
    batch_size = phase.batch_size
    shown = range(min(num_rows, batch_size))
    fields = dataset.read_train(step, shown)
    for number, (long_row, first_token) in enumerate(dataset.schedule.locate_rows(step, shown)):
        index, of_source = mixture.locate(long_row)
        title = f"row {number} of {batch_size} of step {step} · "
        title += _row_title(dataset, sources[index], of_source)
        title += _member(number, rows_per_item)
        if phase.length < phase.packed_length // rows_per_item:
            title += f", from its token {first_token}"
        yield title, {name: values[number] for name, values in fields.items()}


def _row_title(dataset: Dataset, source: Source, index: int) -> str:
    epoch, item = divmod(index, source.num_items)
    kind = "row" if source.rows_per_item == 1 else "pair"
    title = f"source {source.name}, {kind} {item:,} of epoch {epoch}"
    if len(dataset.config.row_lengths) > 1:
        title += f" of the rows of {source.row_length:,} tokens"
    return title


def _member(row: int, rows_per_item: int) -> str:
    """Return which conversation of its pair a row holds; empty if there are no pairs."""
    return "" if rows_per_item == 1 else (", chosen", ", rejected")[row % 2]


def count_row(fields: Fields) -> str:
    """Return one line with documents, tokens, padding and targets in the loss of a row."""
    used = fields["segment_ids"] >= 0
    tokens, learned = int(used.sum()), int(fields["loss_mask"].sum())
    return (
        f"documents {int(fields['segment_ids'].max()) + 1} · tokens {tokens} · "
        f"padding {len(used) - tokens} · "
        f"targets in the loss {learned} ({learned / max(1, tokens):.1%})"
    )


def row_text(fields: Fields, tokenizer: Tokenizer, *, by_token: bool = False) -> Text:
    """Return a row as text: colours alternate by document, brackets enclose what has no loss.

    A token is in the loss if the position before it, which predicts it, has loss_mask 1. The first
    token of a document, which nothing predicts, is shown like the second one.

    by_token: show id and text of every token.
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
        shown = _spell(run, tokenizer, by_token).translate(VISIBLE)
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
    """Return the tokens of every document with its end, int64 (D,).

    Of a store with many shards, those of the documents of `SAMPLED_SHARDS`.
    """
    stores = source.store.stores(limit=SAMPLED_SHARDS)
    return np.concatenate([np.diff(store.ends[:], prepend=0) for store in stores])


def length_histogram(lengths: np.ndarray) -> np.ndarray:
    """Return the counts of lengths 2^n .. 2^(n + 1) - 1, by n."""
    return np.bincount(np.frexp(lengths)[1])[1:]


def describe(
    source: Source, held_out: Source, config: DataConfig, step: int
) -> list[tuple[str, str]]:
    """Return (name, value) of the statistics of a source, with its weight at `step`.

    held_out: the same source with rows of the largest length, which are held-out rows.
    """
    store, packed = source.store, source.packed.info
    num_bytes, num_learned = store.text_bytes(), store.loss_tokens()
    weights = {
        name: next(w for s, w in reversed(values_by_step(of.weight).items()) if s <= step)
        for name, of in config.named_sources.items()
    }
    lengths = document_lengths(source)
    marks = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1])
    least, median, most_90, most_99, longest = (f"{value:,.0f}" for value in marks)
    weight, left_out = weights[source.name], source.num_pairs_left_out
    return [
        ("documents", f"{store.num_documents:,}"),
        ("tokens", f"{store.num_tokens:,}"),
        ("tokens in the loss", f"{num_learned:,} ({num_learned / store.num_tokens:.1%})"),
        ("bytes per token in loss", f"{num_bytes / max(1, num_learned):.3f}"),
        ("training rows", f"{packed.train_rows:,} of {source.row_length} tokens"),
        ("held-out rows", f"{held_out.num_eval:,} of {held_out.row_length} tokens"),
        ("packing efficiency", f"{packed.efficiency:.2%} ({config.packing})"),
        ("cut documents", f"{packed.cut_documents:,}"),
        *([("pairs left out", f"{left_out:,}")] if left_out else []),
        *(
            (f"skipped: {kind}", f"{skip.count:,}{skip.example(kind)}")
            for kind, skip in store.skipped.items()
        ),
        (f"weight at step {step}", f"{weight:g} ({weight / sum(weights.values()):.1%} of rows)"),
        ("lengths", f"shortest {least}, median {median}, mean {lengths.mean():,.0f}"),
        ("", f"90% {most_90}, 99% {most_99}, longest {longest}"),
    ]


def histogram_lines(counts: np.ndarray) -> Iterator[str]:
    """Yield the lines of a bar chart of `length_histogram`."""
    for exponent in range(int(np.flatnonzero(counts)[0]), len(counts)):
        count = int(counts[exponent])
        bar = "█" * max(count > 0, round(BAR_WIDTH * count / counts.max()))
        limits = f"{2**exponent:,} to {2 ** (exponent + 1) - 1:,}"
        yield f"{limits:>26} {count:>11,} {bar}".rstrip()


SIZE, MARGIN = (900, 500), (80, 40, 30, 50)  # left, top, right, bottom
PANEL_HEIGHT, GAP = 110, 30
INK, BAR, GRID, MARK = "#222222", "#3b6ea5", "#dddddd", "#c0392b"


def plot_lengths(sources: Sequence[Source], path: str | Path) -> None:
    """Write an image with the length histogram of each source, over the same axis.

    Raises: ValueError for a suffix that is no image format; OSError.
    """
    counts = [length_histogram(document_lengths(source)) for source in sources]
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
        title = f"{source.name}: {source.store.num_documents:,} documents"
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
    """Draw grid, bars and axis of one source."""
    left, ceiling, right, floor = box
    font, most = ImageFont.load_default(13), int(counts.max())
    scale = (floor - ceiling) / most
    for value in _ticks(most):
        y = floor - value * scale
        draw.line((left, y, right, y), GRID)
        draw.text((left - 6, y), f"{value:,}", INK, font, anchor="rm")
    for number, count in enumerate(counts.tolist()):
        if count:
            # A bin with one document among millions is still visible.
            y = min(floor - 1, floor - count * scale)
            draw.rectangle(
                (left + number * step + 1, y, left + (number + 1) * step - 1, floor), BAR
            )
    draw.line((left, ceiling, left, floor, right, floor), INK)


def _ticks(most: int) -> range:
    """Return round numbers from 0 to `most`, at most six."""
    sizes = (scale * 10**power for power in itertools.count() for scale in (1, 2, 5))
    step = next(size for size in sizes if most // size <= 5)
    return range(0, most + 1, step)


def _power(exponent: int) -> str:
    thousands, rest = divmod(exponent, 10)
    return f"{2**rest}{['', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi'][thousands]}"
