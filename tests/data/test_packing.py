"""Rows of the token stream against a per-token reference, for any documents and any length."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from data.packing import FIELDS, count_rows, pack_row

EOS = 256
DOCUMENTS = st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=8)
LENGTHS = st.integers(1, 8)


def stream_of(documents: list[list[int]]) -> np.ndarray:
    """Every document closed by the end of text, as the store writes it."""
    return np.array([token for d in documents for token in [*d, EOS]], np.uint16)


def document_of(documents: list[list[int]]) -> list[int]:
    """For every token of the stream, the number of its document."""
    return [number for number, d in enumerate(documents) for _ in range(len(d) + 1)]


def rows_of(stream: np.ndarray, length: int) -> list[dict[str, np.ndarray]]:
    return [pack_row(stream, row, length, EOS) for row in range(count_rows(len(stream), length))]


def joined(rows: list[dict[str, np.ndarray]], field: str) -> list[float]:
    return [value for row in rows for value in row[field].tolist()]


def reference_row(stream: np.ndarray, row: int, length: int) -> dict[str, list[float]]:
    """What a row means, one token at a time."""
    fields: dict[str, list[float]] = {name: [] for name in FIELDS}
    position, segment = 0, 0
    for place in range(row * length, row * length + length):
        closes = stream[place] == EOS
        fields["tokens"].append(int(stream[place]))
        fields["targets"].append(int(stream[place + 1]))
        fields["positions"].append(position)
        fields["segment_ids"].append(segment)
        fields["loss_mask"].append(0.0 if closes else 1.0)
        position, segment = (0, segment + 1) if closes else (position + 1, segment)
    return fields


@given(DOCUMENTS, LENGTHS)
def test_a_row_equals_the_per_token_reference(documents, length):
    stream = stream_of(documents)
    for number, row in enumerate(rows_of(stream, length)):
        assert {name: row[name].tolist() for name in row} == reference_row(stream, number, length)


@given(DOCUMENTS, LENGTHS)
def test_fields_are_rows_of_int32_and_a_float32_mask(documents, length):
    for row in rows_of(stream_of(documents), length):
        assert tuple(row) == FIELDS
        assert {row[name].shape for name in FIELDS} == {(length,)}
        assert row["loss_mask"].dtype == np.float32
        assert {row[name].dtype for name in FIELDS[:-1]} == {np.dtype(np.int32)}


@given(DOCUMENTS, LENGTHS)
def test_every_token_is_an_input_exactly_once(documents, length):
    stream = stream_of(documents).tolist()
    inputs = joined(rows_of(stream_of(documents), length), "tokens")
    assert inputs == stream[: len(inputs)]


@given(DOCUMENTS, LENGTHS)
def test_the_tail_left_out_fills_no_row(documents, length):
    stream = stream_of(documents)
    left = len(stream) - length * count_rows(len(stream), length)
    assert 1 <= left <= length


@given(DOCUMENTS, LENGTHS)
def test_targets_are_the_inputs_shifted_by_one(documents, length):
    stream = stream_of(documents).tolist()
    targets = joined(rows_of(stream_of(documents), length), "targets")
    assert targets == stream[1 : len(targets) + 1]


@given(DOCUMENTS, LENGTHS)
def test_a_target_is_masked_exactly_where_it_is_of_another_document(documents, length):
    owner = document_of(documents)
    mask = joined(rows_of(stream_of(documents), length), "loss_mask")
    assert mask == [float(owner[i] == owner[i + 1]) for i in range(len(mask))]


@given(DOCUMENTS, LENGTHS)
def test_positions_count_from_the_first_token_of_a_document_in_the_row(documents, length):
    owner = document_of(documents)
    positions = joined(rows_of(stream_of(documents), length), "positions")
    for i, position in enumerate(positions):
        row_start = i - i % length
        assert position == i - max(row_start, owner.index(owner[i]))


@given(DOCUMENTS, LENGTHS)
def test_two_tokens_of_a_row_share_a_segment_exactly_if_they_share_a_document(documents, length):
    owner = document_of(documents)
    for number, row in enumerate(rows_of(stream_of(documents), length)):
        owners = np.array(owner[number * length : (number + 1) * length])
        ids = row["segment_ids"]
        np.testing.assert_array_equal(ids[:, None] == ids, owners[:, None] == owners)


@given(st.integers(0, 40), LENGTHS)
def test_the_last_target_needs_one_token_more(num_tokens, length):
    rows = count_rows(num_tokens, length)
    assert rows == sum(1 for row in range(40) if (row + 1) * length + 1 <= num_tokens)
