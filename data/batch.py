"""Fields of a batch, defined once: how each is computed from the tokens of a row.

To add a field, add a `BatchField` to `FIELDS`; every batch then holds an array of that name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.checked_array import CheckedArray
from data.files import DataError
from data.packing import Rows
from data.store import Store

Fields = dict[str, np.ndarray]
"""Arrays by field name: each (L,) of one row, or (rows, L)."""


class RowTokens(NamedTuple):
    """Tokens of one row and their documents.

    n is `num_tokens` plus one if the row's last document continues: then the next token of the
    document follows as the last target.
    """

    num_tokens: int
    """Tokens of the row; the other places (L - num_tokens) are padding."""
    ids: np.ndarray
    """(n,): token ids."""
    positions: np.ndarray
    """(n,): position in the part of the document that is in the row."""
    segments: np.ndarray
    """(n,): number of the document in the row."""
    is_learned: np.ndarray | int
    """(n - 1,) or 1: whether the token after each place contributes to the loss."""
    last_of_span: np.ndarray
    """Places whose next token is of another document or split, so that they have no target."""
    eos_id: int


def _fill_tokens(row: RowTokens, out: np.ndarray) -> None:
    out[: row.num_tokens] = row.ids[: row.num_tokens]
    out[row.num_tokens :] = row.eos_id


def _fill_targets(row: RowTokens, out: np.ndarray) -> None:
    out[: len(row.ids) - 1] = row.ids[1:]
    out[row.last_of_span] = row.eos_id
    out[row.num_tokens :] = row.eos_id


def _fill_positions(row: RowTokens, out: np.ndarray) -> None:
    out[: row.num_tokens] = row.positions[: row.num_tokens]
    if row.num_tokens < len(out):
        out[row.num_tokens :] = np.arange(len(out) - row.num_tokens)


def _fill_segment_ids(row: RowTokens, out: np.ndarray) -> None:
    out[: row.num_tokens] = row.segments[: row.num_tokens]
    out[row.num_tokens :] = -1


def _fill_loss_mask(row: RowTokens, out: np.ndarray) -> None:
    out[: len(row.ids) - 1] = row.is_learned
    out[row.last_of_span] = 0
    out[row.num_tokens :] = 0


def _restart_positions(values: np.ndarray, segments: np.ndarray) -> None:
    values[segments == segments[0]] -= values[0]


def _restart_segments(values: np.ndarray, segments: np.ndarray) -> None:
    values[segments >= 0] -= max(0, int(segments[0]))


@dataclass(frozen=True)
class BatchField:
    """One array of a batch."""

    dtype: type[np.generic]
    fill: Callable[[RowTokens, np.ndarray], None]
    """Writes the field of a row into an array (L,)."""
    restart: Callable[[np.ndarray, np.ndarray], None] | None = None
    """Adjusts the field of a shorter row that is cut from a longer one, given the segments of that
    cut. None: the values of the longer row."""


FIELDS = {
    "tokens": BatchField(np.int32, _fill_tokens),
    "targets": BatchField(np.int32, _fill_targets),
    "positions": BatchField(np.int32, _fill_positions, _restart_positions),
    "segment_ids": BatchField(np.int32, _fill_segment_ids, _restart_segments),
    "loss_mask": BatchField(np.float32, _fill_loss_mask),
}


def empty_fields(*shape: int) -> Fields:
    """Return an uninitialised array of this shape for every field."""
    return {name: np.empty(shape, field.dtype) for name, field in FIELDS.items()}


def read_row(
    store: Store,
    rows: Rows,
    row: int,
    *,
    row_length: int,
    eos_id: int,
    vocab_size: int,
    out: Fields | None = None,
) -> Fields:
    """Read the fields of one row, each (L,).

    A target of another document or split is `eos_id` with loss_mask 0. Padding is `eos_id` too,
    with segment -1 and loss_mask 0.

    out: arrays to fill and return; None: new ones.
    Raises: DataError when an id is not in the vocabulary.
    """
    out = empty_fields(row_length) if out is None else out
    tokens = _read_tokens(store, rows, row, eos_id, vocab_size)
    for name, field in FIELDS.items():
        field.fill(tokens, out[name])
    return out


def _read_tokens(store: Store, rows: Rows, row: int, eos_id: int, vocab_size: int) -> RowTokens:
    spans = rows.spans(row)
    num_tokens = int(spans.length.sum())
    # The next token of a document that continues is read as if it were in the row.
    lengths = spans.length.copy()
    lengths[-1] += spans.goes_on
    ends = lengths.cumsum()
    # int32 as in the batch, so that they are copied and not converted.
    positions = np.arange(num_tokens + spans.goes_on, dtype=np.int32)
    segments = np.zeros(len(positions), np.int32)
    if len(ends) > 1:
        positions -= (ends - lengths).astype(np.int32).repeat(lengths)
        segments = np.arange(len(ends), dtype=np.int32).repeat(lengths)
    parts = _join(spans.start.tolist(), lengths.tolist())
    ids = _read_parts(store.tokens, parts)
    if ids.max() >= vocab_size:
        wrong = int(np.argmax(ids >= vocab_size))
        place = spans.start[segments[wrong]] + positions[wrong]
        raise DataError(
            f"{getattr(store, 'folder', 'store')}: token {place} has id {ids[wrong]}, not "
            f"below the vocabulary's {vocab_size}: the store is damaged or of another tokenizer; "
            "delete the folder and prepare it again"
        )
    mask = store.loss_mask
    return RowTokens(
        num_tokens,
        ids,
        positions,
        segments=segments,
        is_learned=1 if mask is None else _read_parts(mask, parts)[1:] != 0,
        last_of_span=ends[: len(ends) - spans.goes_on] - 1,
        eos_id=eos_id,
    )


def _join(starts: list[int], lengths: list[int]) -> list[slice]:
    """Return the spans as slices of the token stream, neighbours as one."""
    parts = [slice(starts[0], starts[0] + lengths[0])]
    for start, length in zip(starts[1:], lengths[1:], strict=True):
        begin, end = (parts.pop().start, start) if parts[-1].stop == start else (start, start)
        parts.append(slice(begin, end + length))
    return parts


def _read_parts(array: CheckedArray, parts: Sequence[slice]) -> np.ndarray:
    return array[parts[0]] if len(parts) == 1 else np.concatenate([array[part] for part in parts])


def cut_row(row: Fields, first: int, out: Fields) -> None:
    """Fill a shorter row from a longer one; the document that is cut starts again at position 0."""
    length = len(out["tokens"])
    segments = row["segment_ids"][first : first + length]
    for name, field in FIELDS.items():
        out[name][:] = row[name][first : first + length]
        if field.restart is not None:
            field.restart(out[name], segments)
