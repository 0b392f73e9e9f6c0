"""Packed rows equal per-token references: each token once, documents separated."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given
from token_rows import PACKERS, inputs, loss_pairs, read, read_all, store_of

from data.batch import FIELDS, cut_row, empty_fields
from data.files import DataError
from data.packing import (
    PackedRows,
    TokenSpans,
    count_bytes,
    count_divided,
    pack_best_fit,
    pack_pairs,
    pack_split,
    split_conversations,
    split_documents,
)


def pieces_of(lengths) -> TokenSpans:
    lengths = np.asarray(lengths, np.int64)
    return TokenSpans(np.cumsum(lengths) - lengths, lengths)


@st.composite
def packed(draw):
    """A store, both its splits as rows, and how they were made."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))
    masked = draw(st.booleans())
    bits = st.lists(st.integers(0, 1), min_size=sum(lengths), max_size=sum(lengths))
    store = store_of(lengths, np.array(draw(bits), np.uint8) if masked else None)
    fraction = draw(st.sampled_from([0, 0.1, 0.3, 0.6]))
    row_length = draw(st.integers(1, 9))
    pack = PACKERS[draw(st.sampled_from(sorted(PACKERS)))]
    try:
        train, held_out = split_documents(store.ends, fraction)
    except DataError:
        train, held_out = split_documents(store.ends, 0)
    return store, pack(train, row_length), pack(held_out, row_length), row_length


@given(packed())
def test_every_token_is_an_input_exactly_once_per_epoch(case):
    store, train, held_out, length = case
    rows = read_all(store, train, length) + read_all(store, held_out, length)
    assert sorted(inputs(rows)) == store.tokens.tolist()


@given(packed())
def test_every_token_is_a_target_of_its_predecessor_exactly_once(case):
    store, train, held_out, length = case
    train_rows, local_rows = read_all(store, train, length), read_all(store, held_out, length)
    held = set(inputs(local_rows))
    owner = np.repeat(np.arange(len(store.ends)), np.diff(store.ends, prepend=0))
    expected = [
        (i - 1, i)
        for i in range(1, len(owner))
        if owner[i - 1] == owner[i]
        and (i - 1 in held) == (i in held)
        and (store.loss_mask is None or store.loss_mask[i])
    ]
    assert sorted(loss_pairs(train_rows + local_rows)) == expected


@given(packed())
def test_no_row_holds_a_token_of_the_other_split_even_where_the_loss_mask_is_0(case):
    store, train, held_out, length = case
    for rows in read_all(store, train, length), read_all(store, held_out, length):
        assert {t for row in rows for t in row["targets"]} <= {*inputs(rows), store.ends[-1]}


@given(packed())
def test_documents_of_a_row_differ_in_segment_and_count_positions_from_zero(case):
    store, train, held_out, length = case
    owner = np.repeat(np.arange(len(store.ends)), np.diff(store.ends, prepend=0))
    for row in read_all(store, train, length) + read_all(store, held_out, length):
        segment, position = -1, 0
        for n, token in enumerate(row["tokens"]):
            if token == store.ends[-1]:
                break
            before = row["tokens"][n - 1]
            same = n and token == before + 1 and owner[token] == owner[before]
            segment, position = (segment, position + 1) if same else (segment + 1, 0)
            assert (row["segment_ids"][n], row["positions"][n]) == (segment, position)


@given(packed())
def test_padding_is_the_end_of_text_in_no_segment(case):
    store, train, _, length = case
    end = int(store.ends[-1])
    for row in read_all(store, train, length):
        n = row["tokens"].index(end) if end in row["tokens"] else length
        rest = length - n
        assert row["tokens"][n:] == row["targets"][n:] == [end] * rest
        assert row["segment_ids"][n:] == [-1] * rest and row["loss_mask"][n:] == [0] * rest
        assert row["positions"][n:] == list(range(rest))


def test_an_end_of_text_inside_a_document_ends_nothing():
    store = store_of([6])
    row = read(store, pack_split(pieces_of([6]), 6), 0, 6, eos_id=2)
    assert row["segment_ids"].tolist() == [0] * 6
    assert row["loss_mask"].tolist() == [1, 1, 1, 1, 1, 0]


def test_fields_are_int32_and_the_mask_float32():
    row = read(store_of([5, 4]), pack_split(pieces_of([5, 4]), 4), 0, 4)
    assert tuple(row) == tuple(FIELDS) and all(values.shape == (4,) for values in row.values())
    assert row.pop("loss_mask").dtype == np.float32
    assert {values.dtype for values in row.values()} == {np.dtype(np.int32)}


def test_given_arrays_are_filled_and_nothing_of_the_last_row_stays_in_them():
    store = store_of([5, 4], np.array([1, 0, 1, 1, 0, 1, 1, 0, 1], np.uint8))
    rows = pack_split(pieces_of([5, 4]), 4)
    out = read(store, rows, 0, 4)
    arrays = dict(out)
    for row in 2, 0, 1:
        assert read(store, rows, row, 4, out=out) is out
        for name, fresh in read(store, rows, row, 4).items():
            assert out[name] is arrays[name]
            np.testing.assert_array_equal(out[name], fresh)


@pytest.mark.parametrize(("row", "place"), [(0, 3), (2, 7)])
def test_an_id_outside_the_vocabulary_is_refused_by_its_place(row, place):
    """Row 0 meets it as its last target, which is the first token of row 1."""
    store = store_of([8])
    store.tokens[[3, 7]] = 900
    rows = pack_split(pieces_of([8]), 3)
    with pytest.raises(DataError, match=rf"stores/tales: token {place} has id 900.*vocabulary's 9"):
        read(store, rows, row, 3)


# What is held out


def places(pieces: TokenSpans) -> list[int]:
    spans = zip(pieces.start, pieces.length, strict=True)
    return [place for start, length in spans for place in range(start, start + length)]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.floats(0.001, 0.9))
def test_the_splits_share_nothing_and_leave_nothing_out(lengths, fraction):
    ends = np.cumsum(lengths)
    try:
        train, held_out = split_documents(ends, fraction)
    except DataError as error:
        assert f"{ends[-1]} tokens in {len(ends)} document(s)" in str(error)
        assert "data.eval_fraction" in str(error)
        return
    assert sorted(places(train) + places(held_out)) == list(range(ends[-1]))
    for pieces in train, held_out:
        first, last = pieces.start, pieces.start + pieces.length - 1
        assert pieces.length.min() > 0
        np.testing.assert_array_equal(
            np.searchsorted(ends, first, side="right"), np.searchsorted(ends, last, side="right")
        )
        inside = ~np.isin(last + 1, ends)
        assert not np.isin((last + 1)[inside], first).any(), "neighbours of one document are one"


@given(st.lists(st.integers(2, 50), min_size=20, max_size=80), st.floats(0.01, 0.5))
def test_the_held_out_share_is_reached_and_passed_by_less_than_one_document(lengths, fraction):
    wanted = fraction * sum(lengths)
    assume(wanted >= max(lengths))
    held = int(split_documents(np.cumsum(lengths), fraction)[1].length.sum())
    assert wanted <= held < wanted + max(lengths)


@pytest.mark.parametrize("num_documents", range(4, 40))
def test_little_text_still_gives_something_to_evaluate_on(num_documents):
    """A share of less than a token takes half a document of three, the half with two tokens."""
    held_out = split_documents(np.arange(1, num_documents + 1) * 3, 0.001)[1]
    assert held_out.length.max() > 1


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.2])
def test_one_long_file_has_a_held_out_part_too(fraction):
    train, held_out = split_documents(np.array([10_000_000]), fraction)
    assert fraction <= held_out.length.sum() / 10_000_000 < fraction + 0.0066
    assert train.length.sum() + held_out.length.sum() == 10_000_000


def test_what_is_held_out_does_not_change_between_versions():
    """The choice of today: another one would evaluate on text that was trained on."""
    held_out = split_documents(np.arange(4, 401, 4), 0.05)[1]
    assert held_out.start.tolist() == [60, 84, 180, 224, 344]
    held_out = split_documents(np.array([100]), 0.05)[1]
    assert (held_out.start.tolist(), held_out.length.tolist()) == ([50], [5])


def test_what_is_held_out_is_no_regular_pattern():
    held_out = split_documents(np.arange(1, 100_001) * 10, 0.1)[1]
    counts = np.histogram(held_out.start, bins=100, range=(0, 1_000_000))[0]
    assert counts.sum() == 10_000 and set(held_out.length) == {10}
    assert np.var(counts) == pytest.approx(90, rel=0.4)  # binomial: 1000 * 0.1 * 0.9


@pytest.mark.parametrize("lengths", [[1], [3], [1, 1, 1, 1, 1, 1]])
def test_too_little_text_for_both_is_refused(lengths):
    with pytest.raises(DataError, match=r"too few for training and for data.eval_fraction=0.5"):
        split_documents(np.cumsum(lengths, dtype=np.int64), 0.5)


# How rows are filled

LENGTHS = st.lists(st.integers(1, 40), max_size=40)


def stretches(rows: PackedRows) -> list[list[tuple[int, int]]]:
    pairs = list(zip(rows.start.tolist(), rows.length.tolist(), strict=True))
    return [pairs[a:b] for a, b in pairwise(rows.row_begin)]


def assert_dtypes(rows: PackedRows) -> None:
    assert (rows.row_begin.dtype, rows.start.dtype) == (np.int64, np.int64)
    assert (rows.length.dtype, rows.goes_on.dtype) == (np.int32, np.bool_)


@given(LENGTHS, st.integers(1, 16))
def test_split_rows_equal_a_walk_over_the_tokens(lengths, row_length):
    rows = pack_split(pieces_of(lengths), row_length)
    walk = [(place, n) for n, place in enumerate(places(pieces_of(lengths)))]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    expected = []
    for n in range(0, len(walk), row_length):
        row = owner[n : n + row_length]
        firsts = [n + i for i in range(len(row)) if i == 0 or row[i] != row[i - 1]]
        expected.append([(i, int(np.sum(row == owner[i]))) for i in firsts])
    assert stretches(rows) == expected
    assert rows.goes_on.tolist() == [
        n < len(owner) and owner[n] == owner[n - 1]
        for n in range(row_length, len(owner) + row_length, row_length)
    ]
    assert_dtypes(rows)


def best_fit_one_by_one(lengths: list[int], row_length: int) -> list[list[tuple[int, int]]]:
    """The law of pack_best_fit, one piece at a time."""
    rows, rests, start = [], [], 0
    for length in lengths:
        while length >= row_length:
            rows.append([(start, row_length)])
            start, length = start + row_length, length - row_length
        rests += [(start, length)] if length else []
        start += length
    for start, length in sorted(rests, key=lambda rest: -rest[1]):
        room = [row_length - sum(n for _, n in row) for row in rows]
        fits = [(room[n], n) for n in range(len(rows)) if room[n] >= length]
        if fits:
            rows[min(fits)[1]].append((start, length))
        else:
            rows.append([(start, length)])
    return rows


@given(LENGTHS, st.integers(1, 24))
def test_best_fit_puts_each_piece_into_the_fullest_row_with_room(lengths, row_length):
    rows = pack_best_fit(pieces_of(lengths), row_length)
    assert stretches(rows) == best_fit_one_by_one(lengths, row_length)
    ends = {*np.cumsum(lengths).tolist()}
    assert rows.goes_on.tolist() == [sum(row[-1]) not in ends for row in stretches(rows)]
    assert_dtypes(rows)


@pytest.mark.parametrize("seed", range(4))
def test_best_fit_of_many_equal_lengths_equals_one_by_one(seed):
    """Enough for rows with the same room to be taken in parts, and to meet in another order."""
    lengths = np.random.default_rng(seed).integers(1, 41, 300).tolist()
    assert stretches(pack_best_fit(pieces_of(lengths), 64)) == best_fit_one_by_one(lengths, 64)


def test_best_fit_of_long_tailed_lengths_wastes_less_than_one_percent():
    lengths = np.random.default_rng(0).lognormal(6, 1.5, 20_000).astype(np.int64) + 1
    rows = pack_best_fit(pieces_of(lengths), 2048)
    assert lengths.sum() / (rows.num_rows * 2048) > 0.99


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_one_document_of_five_billion_tokens_is_packed(pack):
    rows = pack(pieces_of([5_000_000_000]), 2**16)
    assert rows.num_rows == -(-5_000_000_000 // 2**16)
    assert int(rows.start[-1]) + int(rows.length[-1]) == 5_000_000_000
    assert rows.goes_on[:-1].all() and not rows.goes_on[-1]


@given(st.lists(st.integers(2, 300), min_size=2, max_size=40), st.floats(0.001, 0.6))
def test_every_conversation_is_held_out_whole_or_not_at_all(lengths, fraction):
    ends = np.cumsum(lengths)
    try:
        train, held_out = split_conversations(ends, fraction)
    except DataError as error:
        assert f"would hold out all {len(lengths)} conversations, " in str(error)
        assert "lower data.eval_fraction" in str(error)
        return
    begins = np.concatenate([train.start, held_out.start])
    order = np.argsort(begins)
    np.testing.assert_array_equal(begins[order], ends - lengths)
    np.testing.assert_array_equal(np.concatenate([train.length, held_out.length])[order], lengths)
    assert len(train.start) and fraction * ends[-1] <= held_out.length.sum() < ends[-1]
    if not count_divided(ends, fraction):  # then the choice is that of earlier versions
        np.testing.assert_array_equal(held_out.start, split_documents(ends, fraction)[1].start)


def test_a_single_conversation_cannot_be_held_out():
    with pytest.raises(
        DataError, match=r"=0\.01 would hold out the only conv.*, or set data\.eval_fraction=0$"
    ):
        split_conversations(np.array([500]), 0.01)
    assert split_conversations(np.array([500]), 0)[0].length.tolist() == [500]


@pytest.mark.parametrize(
    ("first", "positions", "segments"),
    [
        (0, [0, 1, 2, 3], [0, 0, 0, 0]),
        (3, [0, 1, 0, 1], [0, 0, 1, 1]),
        (8, [0, 0, 1, 2], [0, 1, 1, 1]),
    ],
)
def test_only_the_document_that_is_cut_starts_again(first, positions, segments):
    store = store_of([5, 4, 3])
    cut = empty_fields(4)
    cut_row(read(store, pack_split(pieces_of([5, 4, 3]), 12), 0, 12), first, cut)
    assert cut["tokens"].tolist() == [*range(first, first + 4)]
    assert cut["positions"].tolist() == positions
    assert cut["segment_ids"].tolist() == segments


@pytest.mark.parametrize(
    ("learned", "by_row"),
    [(None, [12, 12, 6]), (np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 0], np.uint8), [9, 21, 0])],
)
def test_a_part_of_a_document_counts_with_its_share_of_the_bytes(learned, by_row):
    """Documents of 6 and 4 tokens with 18 and 12 bytes, in rows of 4."""
    store = store_of([6, 4], learned)
    rows = pack_split(pieces_of([6, 4]), 4)
    assert [count_bytes(store, rows, [row]) for row in range(3)] == by_row
    assert count_bytes(store, rows, range(3)) == sum(by_row)


def test_pairs_fit_a_row_up_to_its_last_place():
    lengths = [3, 4, 5, 2, 4, 4, 1, 6]
    train, held_out = pack_pairs(np.cumsum(lengths), 4, 0)
    assert train.start.tolist() == [0, 3, 14, 18] and train.length.tolist() == [3, 4, 4, 4]
    assert held_out.num_rows == 0
