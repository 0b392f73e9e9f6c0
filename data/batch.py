"""Fields of a batch, defined once: how each is computed from the tokens of a row.

To add a field, add a `BatchField` to `FIELDS`; every batch then holds an array of that name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.files import DataError
from data.packing import PackedRows
from data.store import Store

Fields = dict[str, np.ndarray]
"""Arrays by field name: each (L,) of one row, or (rows, L)."""


@dataclass(frozen=True)
class RowTokens:
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
    rows: PackedRows,
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


def _read_tokens(
    store: Store, rows: PackedRows, row: int, eos_id: int, vocab_size: int
) -> RowTokens:
    first, last = rows.row_begin[row], rows.row_begin[row + 1]
    lengths = rows.length[first:last].astype(np.int64)
    goes_on = bool(rows.goes_on[row])
    num_tokens = int(lengths.sum())
    # The next token of a document that continues is read as if it were in the row.
    lengths[-1] += goes_on
    ends = lengths.cumsum()
    positions = np.arange(num_tokens + goes_on) - (ends - lengths).repeat(lengths)
    indices = positions + rows.start[first:last].repeat(lengths)
    ids = np.asarray(store.tokens)[indices]
    if ids.max() >= vocab_size:
        wrong = int(np.argmax(ids >= vocab_size))
        raise DataError(
            f"{getattr(store, 'folder', 'store')}: token {indices[wrong]} has id {ids[wrong]}, not "
            f"below the vocabulary's {vocab_size}: the store is damaged or of another tokenizer; "
            "delete the folder and prepare it again"
        )
    mask = store.loss_mask
    return RowTokens(
        num_tokens,
        ids,
        positions,
        segments=np.arange(len(ends)).repeat(lengths),
        is_learned=1 if mask is None else np.asarray(mask)[indices[1:]] != 0,
        last_of_span=ends[: len(ends) - goes_on] - 1,
        eos_id=eos_id,
    )


def cut_row(row: Fields, first: int, out: Fields) -> None:
    """Fill a shorter row from a longer one; the document that is cut starts again at position 0."""
    length = len(out["tokens"])
    segments = row["segment_ids"][first : first + length]
    for name, field in FIELDS.items():
        out[name][:] = row[name][first : first + length]
        if field.restart is not None:
            field.restart(out[name], segments)
