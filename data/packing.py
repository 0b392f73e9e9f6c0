"""Split documents into training and held-out tokens, and pack them into rows.

The split of a store is the same in every run. In an epoch every token is an input exactly once, and
every token that has a successor in its document predicts it exactly once, also across rows.
Documents of one row differ in `segment_ids`, and `positions` start at 0 in each. The model keeps
them apart, unless `data.attend_across_documents` is set.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from data.checked_array import CheckedArray
from data.config import Packing
from data.files import DataError
from data.store import Store

# Part of the name of a packed store; raise it when the split or the packing changes.
PACK_VERSION = 2
# The same for conversations, stores with a loss mask. Until version 2, long ones were divided.
CONVERSATION_PACK_VERSION = 3
# A longer document is split into parts: few enough to be fast, small enough for a fair sample.
MAX_PART_TOKENS = 65536


class TooLittleTextError(DataError):
    """Store that is too small to be split, or to make one row."""


@dataclass(frozen=True)
class TokenSpans:
    """Spans of the token stream, each within one document and split: int64 (P,), ascending."""

    start: np.ndarray
    """First token."""
    length: np.ndarray
    """Tokens. The token after a span is of another document or of the other split."""


class RowSpans(NamedTuple):
    """Spans of the token stream that make up one row."""

    start: np.ndarray
    """int64 (S,): first token of each span."""
    length: np.ndarray
    """int64 (S,): tokens of each span."""
    goes_on: bool
    """The last span is cut, so that the next token of the stream is the last target of the row."""


class Rows(Protocol):
    """Rows in memory or on disk."""

    @property
    def num_rows(self) -> int:
        """Number of rows (R)."""

    def spans(self, row: int) -> RowSpans:
        """Return the spans of a row."""


@dataclass(frozen=True)
class PackedRows:
    """Spans of the token stream that make up each row, in memory."""

    row_begin: np.ndarray
    """int64 (R + 1,): spans row_begin[r] .. row_begin[r + 1] - 1 make up row r."""
    start: np.ndarray
    """int64 (S,): first token of each span."""
    length: np.ndarray
    """int32 (S,): tokens of each span."""
    goes_on: np.ndarray
    """bool (R,): the last span of the row is cut, so that the next token of the stream is its last
    target."""

    @property
    def num_rows(self) -> int:
        """Number of rows (R)."""
        return len(self.goes_on)

    def spans(self, row: int) -> RowSpans:
        """Return the spans of a row."""
        part = slice(self.row_begin[row], self.row_begin[row + 1])
        length = self.length[part].astype(np.int64)
        return RowSpans(self.start[part], length, bool(self.goes_on[row]))


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash uint64 values one to one, with the finaliser of splitmix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def split_documents(ends: np.ndarray, fraction: float) -> tuple[TokenSpans, TokenSpans]:
    """Return the training and the held-out spans; together they hold every token once.

    A document is held out whole or not at all, unless it is longer than `fraction` of all tokens or
    than MAX_PART_TOKENS; then parts of it are held out. The result depends on the arguments alone.

    ends: (D,), D > 0, ascending: where documents end.
    Raises: DataError when either split would have no token with a successor.
    """
    ends = np.asarray(ends, np.int64)
    num_tokens = int(ends[-1])
    train, held_out = _split_parts(ends, fraction, _part_tokens(num_tokens, fraction))
    if fraction and min(p.length.max(initial=0) for p in (train, held_out)) < 2:
        raise TooLittleTextError(
            f"{num_tokens} tokens in {len(ends)} document(s) are too few for training and for "
            f"data.eval_fraction={fraction:g} of them held out; give more text, or change "
            "data.eval_fraction"
        )
    return train, held_out


def split_conversations(ends: np.ndarray, fraction: float) -> tuple[TokenSpans, TokenSpans]:
    """Return the training and the held-out spans, each one a whole conversation.

    Conversations are held out until they have `fraction` of all tokens, so at least one is. The
    choice equals that of `split_documents` if that function divides none of them.

    ends: (D,), D > 0, ascending: where conversations end.
    Raises: DataError when no conversation would be left for training.
    """
    ends = np.asarray(ends, np.int64)
    train, held_out = _split_parts(ends, fraction, int(ends[-1]))
    if fraction and (len(ends) == 1 or held_out.length.sum() < fraction * ends[-1]):
        what, remedy = f"all {len(ends)} conversations", "lower data.eval_fraction"
        if len(ends) == 1:
            what, remedy = "the only conversation", "set data.eval_fraction=0"
        raise TooLittleTextError(
            f"data.eval_fraction={fraction:g} would hold out {what}, because each is held out "
            f"whole or not at all; give more conversations, or {remedy}"
        )
    return train, held_out


def count_divided(ends: np.ndarray, fraction: float) -> int:
    """Count the documents (D,) that `split_documents` may divide, so that a part is held out."""
    ends = np.asarray(ends, np.int64)
    if not fraction:
        return 0
    longest = _part_tokens(int(ends[-1]), fraction)
    return int(np.count_nonzero(np.diff(ends, prepend=0) > longest))


def _part_tokens(num_tokens: int, fraction: float) -> int:
    """Return the length from which a document is divided: at most D + 1 / fraction parts result."""
    # One token alone would have no target.
    return min(max(math.ceil(fraction * num_tokens), 2), MAX_PART_TOKENS)


def _split_parts(
    ends: np.ndarray, fraction: float, part_tokens: int
) -> tuple[TokenSpans, TokenSpans]:
    """Return training and held-out spans; documents longer than `part_tokens` may be divided."""
    lengths = np.diff(ends, prepend=0)
    num_tokens = int(ends[-1])
    if fraction == 0:
        nothing = np.empty(0, np.int64)
        return TokenSpans(ends - lengths, lengths), TokenSpans(nothing, nothing)
    parts = -(-lengths // part_tokens)
    first = np.cumsum(parts) - parts
    document = np.repeat(np.arange(len(ends)), parts)
    part = np.arange(len(document)) - first[document]
    start = (ends - lengths)[document] + part * part_tokens
    # Keys are distinct and so are their hashes: the sort has no ties.
    order = np.argsort(_mix((document << 32 | part).astype(np.uint64)))
    sizes = np.diff(start, append=num_tokens)[order]
    reached = np.searchsorted(np.cumsum(sizes), math.ceil(fraction * num_tokens))
    # Enough tokens, one of them with its successor, but never all.
    num_held = min(max(int(reached), int(np.argmax(sizes > 1))) + 1, len(order) - 1)
    held = np.zeros(len(order), bool)
    held[order[:num_held]] = True
    # Join neighbours of the same document and split.
    begins = np.flatnonzero((part == 0) | (held != np.roll(held, 1)))
    start, held = start[begins], held[begins]
    length = np.diff(start, append=num_tokens)
    return TokenSpans(start[~held], length[~held]), TokenSpans(start[held], length[held])


def pack_split(spans: TokenSpans, row_length: int) -> PackedRows:
    """TokenSpans end to end, cut at every row; only the last row has padding."""
    # Places on the line of all spans end to end: where spans begin, where rows begin.
    ends = np.cumsum(spans.length)
    num_tokens = int(ends[-1]) if len(ends) else 0
    begins = ends - spans.length
    cuts = np.concatenate([begins, np.arange(0, num_tokens, row_length)])
    cuts.sort(kind="stable")  # merges two ascending runs; np.unique would hash
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    span = np.searchsorted(begins, cuts, side="right") - 1
    row_ends = np.arange(0, num_tokens + row_length, row_length).clip(max=num_tokens)
    row_begin = np.searchsorted(cuts, row_ends)
    last = row_begin[1:] - 1
    return PackedRows(
        row_begin,
        spans.start[span] + cuts - begins[span],
        np.diff(cuts, append=num_tokens).astype(np.int32),
        row_ends[1:] < ends[span[last]],
    )


def pack_best_fit(spans: TokenSpans, row_length: int) -> PackedRows:
    """Pack whole spans, the longest first, each into the fullest row that has room for it.

    A span longer than a row fills rows; its remainder is packed like a span. Of equally full rows
    the first is taken.
    """
    full, rest = np.divmod(spans.length, row_length)
    num_full = int(full.sum())
    # NumPy sorts 16-bit integers by radix.
    small = np.min_scalar_type(row_length)
    order = np.argsort((row_length - rest).astype(small), kind="stable")[: np.count_nonzero(rest)]
    row_of_rest = num_full + _best_fit(rest[order], row_length)
    nth = np.arange(num_full) - np.repeat(np.cumsum(full) - full, full)
    start = np.repeat(spans.start, full) + nth * row_length
    goes_on = (nth + 1) * row_length < np.repeat(spans.length, full)
    num_rows = int(row_of_rest.max(initial=num_full - 1)) + 1
    by_row = np.argsort(row_of_rest, kind="stable")
    order, row_of_rest = order[by_row], row_of_rest[by_row]
    return PackedRows(
        np.concatenate(
            [
                np.arange(num_full),
                num_full + np.searchsorted(row_of_rest, np.arange(num_full, num_rows + 1)),
            ]
        ),
        np.concatenate([start, (spans.start + full * row_length)[order]]),
        np.concatenate([np.full(num_full, row_length), rest[order]]).astype(np.int32),
        np.concatenate([goes_on, np.zeros(num_rows - num_full, bool)]),
    )


def _best_fit(lengths: np.ndarray, row_length: int) -> np.ndarray:
    """Return the row of each item; lengths (N,) descend, none is above `row_length`.

    All items of one length and all rows with the same room are handled at once: the fullest row
    takes items until it has no room for another. There are O(row_length * log(row_length)) such
    moves for any number of items.
    """
    row = np.empty(len(lengths), np.int64)
    rooms: list[int] = []
    rows_by_room: dict[int, list[np.ndarray]] = {}

    def put_back(rows: np.ndarray, room: int) -> None:
        if len(rows):
            if room not in rows_by_room:
                insort(rooms, room)
            rows_by_room.setdefault(room, []).append(rows)

    num_rows = done = 0
    firsts = np.flatnonzero(np.diff(lengths, prepend=-1)).tolist()
    for first, end in pairwise([*firsts, len(lengths)]):
        length = int(lengths[first])
        while done < end:
            index = bisect_left(rooms, length)
            room = rooms.pop(index) if index < len(rooms) else row_length
            each = room // length
            wanted = -(-(end - done) // each)
            if room in rows_by_room:
                parts = rows_by_room.pop(room)
                rows = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
            else:
                rows = np.arange(num_rows, num_rows + wanted)
                num_rows += wanted
            taken, left = rows[:wanted], rows[wanted:]
            count = min(end - done, each * len(taken))
            row[done : done + count] = np.repeat(taken, each)[:count]
            done += count
            in_last = count - each * (len(taken) - 1)
            put_back(left, room)
            put_back(taken[:-1], room - each * length)
            put_back(taken[-1:], room - in_last * length)
    return row


def pack_pairs(
    ends: np.ndarray, row_length: int, eval_fraction: float
) -> tuple[PackedRows, PackedRows]:
    """Return training and held-out rows of preference pairs: one row per document.

    Rows 2p and 2p + 1 are the two conversations of a pair. A pair with a document longer than a row
    is left out. The split depends on the arguments alone, and never divides a pair.

    ends: (2P,), ascending: where documents end.
    Raises: DataError when too few pairs are left.
    """
    ends = np.asarray(ends, np.int64)
    lengths = np.diff(ends, prepend=0)
    pairs = np.flatnonzero(lengths.reshape(-1, 2).max(axis=1) <= row_length)
    num_held = math.ceil(eval_fraction * len(pairs))
    if len(pairs) < 1 + (eval_fraction > 0):
        raise TooLittleTextError(
            f"{len(pairs)} of {len(lengths) // 2} preference pairs fit data.sequence_length="
            f"{row_length}, too few for data.eval_fraction={eval_fraction:g}; raise the length, or "
            "give more pairs"
        )
    held = np.zeros(len(pairs), bool)
    held[np.argsort(_mix(pairs.astype(np.uint64)))[: min(num_held, len(pairs) - 1)]] = True

    def rows(chosen: np.ndarray) -> PackedRows:
        documents = (2 * chosen[:, None] + np.arange(2)).ravel()
        return PackedRows(
            np.arange(len(documents) + 1),
            (ends - lengths)[documents],
            lengths[documents].astype(np.int32),
            np.zeros(len(documents), bool),
        )

    return rows(pairs[~held]), rows(pairs[held])


PACKERS: dict[Packing, Callable[[TokenSpans, int], PackedRows]] = {
    "split": pack_split,
    "best_fit": pack_best_fit,
}


def count_bytes(store: Store, rows: Rows, numbers: Sequence[int]) -> float:
    """Return the UTF-8 bytes of text in these rows that contributes to the loss.

    A document that is only partly in the rows counts in proportion to its tokens in the loss.
    """
    total = 0.0
    for row in numbers:
        spans = rows.spans(row)
        documents = [bisect_right(store.ends, start) for start in spans.start.tolist()]
        begins = np.array([store.ends[n - 1] if n else 0 for n in documents])
        ends = np.array([store.ends[n] for n in documents])
        num_bytes = np.array([store.num_bytes[n] for n in documents])
        here, whole = spans.length, ends - begins
        if store.loss_mask is not None:
            here = count_loss_tokens(store.loss_mask, spans.start, spans.start + spans.length)
            whole = count_loss_tokens(store.loss_mask, begins, ends)
        total += float((num_bytes * (here / np.maximum(whole, 1))).sum())
    return total


def count_loss_tokens(mask: CheckedArray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Count the tokens with mask 1 from each of `begins` up to each of `ends` (N,): int64 (N,)."""
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    return np.array([np.count_nonzero(mask[a:b]) for a, b in spans])
