"""Documents cut into rows: what is held out, what a row holds, which part of it is learned.

A store is split into training and held-out pieces, once and for all runs; the pieces are packed
into rows. Packing loses and doubles nothing: over an epoch every token is an input exactly once,
and every token with its successor in the document is learned exactly once, a successor in the next
row too. Documents that share a row do not see each other: they differ in `segment_ids`, and
`positions` start at 0 in each.
Refuses to shuffle and to keep rows on disk: their order, and their files, are others'.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from data.config import Packing
from data.source import DataError
from data.store import Store

FIELDS = ("tokens", "targets", "positions", "segment_ids", "loss_mask")
# Part of a pack's name: another way to split or pack needs another number.
PACK_VERSION = 2
# A longer document is held out in parts: few enough to be quick, small enough to be a fair sample.
MAX_UNIT_TOKENS = 65536


@dataclass(frozen=True)
class Pieces:
    """Stretches of the token stream, each of one document: int64 (P,), ascending."""

    start: np.ndarray
    """First token."""
    length: np.ndarray
    """Tokens. The successor of a piece's last token is another document, or the other split."""


@dataclass(frozen=True)
class PackedRows:
    """Which stretches of the stream make up each row."""

    row_begin: np.ndarray
    """int64 (R + 1,): stretches row_begin[r] .. row_begin[r + 1] - 1 make up row r."""
    start: np.ndarray
    """int64 (S,): first token."""
    length: np.ndarray
    """int32 (S,): tokens."""
    goes_on: np.ndarray
    """bool (R,): the last stretch of the row ends inside a piece, so that the next token of the
    stream is its last target. Every other stretch ends where its piece ends."""

    @property
    def num_rows(self) -> int:
        """Rows (R)."""
        return len(self.goes_on)


def _mix(values: np.ndarray) -> np.ndarray:
    """Uniform bits from any bits (uint64), one to one: the finaliser of splitmix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def split_documents(ends: np.ndarray, fraction: float) -> tuple[Pieces, Pieces]:
    """Training and held-out pieces, together every token once, the same in every run.

    ends: (D,), D > 0, ascending: where documents end. A document is held out whole or not at all,
        unless it is longer than `fraction` of all tokens or MAX_UNIT_TOKENS: then parts of it are.
    Raises: DataError when either split would hold no token together with its successor.
    """
    ends = np.asarray(ends, np.int64)
    lengths = np.diff(ends, prepend=0)
    num_tokens = int(ends[-1])
    held_tokens = math.ceil(fraction * num_tokens)
    if fraction == 0:
        nothing = np.empty(0, np.int64)
        return Pieces(ends - lengths, lengths), Pieces(nothing, nothing)
    # No more than D + 1 / fraction units. One token alone would have no target.
    unit = min(max(held_tokens, 2), MAX_UNIT_TOKENS)
    parts = -(-lengths // unit)
    first = np.cumsum(parts) - parts
    document = np.repeat(np.arange(len(ends)), parts)
    part = np.arange(len(document)) - first[document]
    start = (ends - lengths)[document] + part * unit
    # Different keys have different hashes, so no sort has ties to break.
    order = np.argsort(_mix((document << 32 | part).astype(np.uint64)))
    sizes = np.diff(start, append=num_tokens)[order]
    reached = np.searchsorted(np.cumsum(sizes), held_tokens)
    # Enough tokens, among them one with its successor; never all.
    num_held = min(max(int(reached), int(np.argmax(sizes > 1))) + 1, len(order) - 1)
    held = np.zeros(len(order), bool)
    held[order[:num_held]] = True
    # Neighbours of one document and one split become one piece again.
    begins = np.flatnonzero((part == 0) | (held != np.roll(held, 1)))
    start, held = start[begins], held[begins]
    length = np.diff(start, append=num_tokens)
    train, held_out = Pieces(start[~held], length[~held]), Pieces(start[held], length[held])
    if min(p.length.max(initial=0) for p in (train, held_out)) < 2:
        raise DataError(
            f"{num_tokens} tokens in {len(ends)} document(s) are too few for training and for "
            f"data.eval_fraction={fraction:g} of them held out; give more text, or change it"
        )
    return train, held_out


def pack_split(pieces: Pieces, row_length: int) -> PackedRows:
    """Pieces end to end, cut at every row; only the last row has padding."""
    # Places on the line of all pieces end to end: where pieces begin, where rows begin.
    ends = np.cumsum(pieces.length)
    num_tokens = int(ends[-1]) if len(ends) else 0
    begins = ends - pieces.length
    cuts = np.concatenate([begins, np.arange(0, num_tokens, row_length)])
    cuts.sort(kind="stable")  # two ascending runs: one merge; np.unique hashes them
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    piece = np.searchsorted(begins, cuts, side="right") - 1
    row_ends = np.arange(0, num_tokens + row_length, row_length).clip(max=num_tokens)
    row_begin = np.searchsorted(cuts, row_ends)
    last = row_begin[1:] - 1
    return PackedRows(
        row_begin,
        pieces.start[piece] + cuts - begins[piece],
        np.diff(cuts, append=num_tokens).astype(np.int32),
        row_ends[1:] < ends[piece[last]],
    )


def pack_best_fit(pieces: Pieces, row_length: int) -> PackedRows:
    """Whole pieces, the longest first, each into the fullest row that still has room for it.

    A piece longer than a row fills rows; what remains of it is packed like a piece. Of rows that
    are equally full the first one takes it.
    """
    full, rest = np.divmod(pieces.length, row_length)
    num_full = int(full.sum())
    # Sixteen bits are sorted by radix.
    small = np.min_scalar_type(row_length)
    order = np.argsort((row_length - rest).astype(small), kind="stable")[: np.count_nonzero(rest)]
    row_of_rest = num_full + _best_fit(rest[order], row_length)
    nth = np.arange(num_full) - np.repeat(np.cumsum(full) - full, full)
    start = np.repeat(pieces.start, full) + nth * row_length
    goes_on = (nth + 1) * row_length < np.repeat(pieces.length, full)
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
        np.concatenate([start, (pieces.start + full * row_length)[order]]),
        np.concatenate([np.full(num_full, row_length), rest[order]]).astype(np.int32),
        np.concatenate([goes_on, np.zeros(num_rows - num_full, bool)]),
    )


def _best_fit(lengths: np.ndarray, row_length: int) -> np.ndarray:
    """The row of each item; lengths (N,) descending, none above `row_length`.

    All items of a length and all rows with the same room are handled at once: a row that takes an
    item is the fullest one, so it takes items until it has no room for another. Rows change hands
    O(row_length * log(row_length)) times, whatever the number of items.
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
            place = bisect_left(rooms, length)
            room = rooms.pop(place) if place < len(rooms) else row_length
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


PACKERS: dict[Packing, Callable[[Pieces, int], PackedRows]] = {
    "split": pack_split,
    "best_fit": pack_best_fit,
}


def count_bytes(store: Store, rows: PackedRows, numbers: Sequence[int]) -> float:
    """UTF-8 bytes of learned text in these rows.

    Of a document that is in them in part, in proportion to its learned tokens.
    """
    total = 0.0
    for row in numbers:
        part = slice(rows.row_begin[row], rows.row_begin[row + 1])
        starts, lengths = rows.start[part], rows.length[part]
        documents = np.searchsorted(store.ends, starts, side="right")
        begins = np.where(documents > 0, store.ends[documents - 1], 0)
        here, whole = lengths, store.ends[documents] - begins
        if store.learned is not None:
            here = count_learned(store.learned, starts, starts + lengths)
            whole = count_learned(store.learned, begins, store.ends[documents])
        total += float((store.num_bytes[documents] * (here / np.maximum(whole, 1))).sum())
    return total


def count_learned(learned: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Learned tokens of each stretch from `begins` up to `ends` (N,): int64 (N,)."""
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    return np.array([np.count_nonzero(learned[a:b]) for a, b in spans])


def read_row(
    store: Store,
    rows: PackedRows,
    row: int,
    *,
    row_length: int,
    eos_id: int,
    vocab_size: int,
    out: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """The fields of one row, each (L,): int32, `loss_mask` float32.

    A target that is another document's, or the other split's, is `eos_id` with loss_mask 0.
    Padding is `eos_id` too, with segment -1 and loss_mask 0.

    out: arrays to fill, returned; None: fresh ones.
    Raises: DataError when an id is not in the vocabulary.
    """
    if out is None:
        out = {name: np.empty(row_length, np.int32) for name in FIELDS[:-1]}
        out["loss_mask"] = np.empty(row_length, np.float32)
    first, last = rows.row_begin[row], rows.row_begin[row + 1]
    lengths = rows.length[first:last].astype(np.int64)
    goes_on = bool(rows.goes_on[row])
    num_tokens = int(lengths.sum())
    # The successor of the last token, if it is a target, is read as if it were in the row.
    lengths[-1] += goes_on
    ends = lengths.cumsum()
    line = np.arange(num_tokens + goes_on)
    positions = line - (ends - lengths).repeat(lengths)
    places = positions + rows.start[first:last].repeat(lengths)
    ids = np.asarray(store.tokens)[places]
    if ids.max() >= vocab_size:
        wrong = int(np.argmax(ids >= vocab_size))
        raise DataError(
            f"{getattr(store, 'folder', 'store')}: token {places[wrong]} has id {ids[wrong]}, not "
            f"below the vocabulary's {vocab_size}: a damaged store, or another tokenizer; delete "
            "the folder, it will be made again"
        )
    learned = 1 if store.learned is None else np.asarray(store.learned)[places[1:]] != 0
    closing = ends[: len(ends) - goes_on] - 1
    num_targets = num_tokens - 1 + goes_on
    out["tokens"][:num_tokens] = ids[:num_tokens]
    out["targets"][:num_targets] = ids[1:]
    out["targets"][closing] = eos_id
    out["positions"][:num_tokens] = positions[:num_tokens]
    out["segment_ids"][:num_tokens] = np.arange(len(ends)).repeat(lengths)[:num_tokens]
    out["loss_mask"][:num_targets] = learned
    out["loss_mask"][closing] = 0
    if num_tokens < row_length:
        out["tokens"][num_tokens:] = eos_id
        out["targets"][num_tokens:] = eos_id
        out["positions"][num_tokens:] = np.arange(row_length - num_tokens)
        out["segment_ids"][num_tokens:] = -1
        out["loss_mask"][num_tokens:] = 0
    return out
