"""Batches of changing shape take every token of the run once, in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batch import FIELDS
from data.batch_schedule import BatchSchedule, batch_number
from data.config import DataConfig

ROW = 12


def schedule_of(lengths, sizes, repack_at=()) -> BatchSchedule:
    return BatchSchedule(
        DataConfig(sequence_length=lengths, global_batch_size=sizes, repack_at=repack_at)
    )


def places_of(schedule: BatchSchedule, step: int) -> list[tuple[int, int]]:
    return schedule.locate_rows(step, range(schedule.at(step).batch_size))


def first_tokens(schedule: BatchSchedule, step: int) -> list[int]:
    packed = schedule.at(step).packed_length
    return [row * packed + first for row, first in places_of(schedule, step)]


@given(
    lengths=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 4).map(lambda n: 12 * n), min_size=1, max_size=4),
    gaps=st.lists(st.integers(1, 3), min_size=8, max_size=8),
)
def test_steps_take_consecutive_tokens_through_any_changes(lengths, sizes, gaps):
    at = [0, *np.cumsum(gaps).tolist()]
    lengths = dict(zip(at, [*lengths, ROW], strict=False))
    sizes = dict(zip(at[::2], sizes, strict=False))
    schedule = schedule_of(lengths, sizes)
    token = 0
    for step in range(15):
        phase = schedule.at(step)
        assert phase.length == lengths[max(s for s in lengths if s <= step)]
        assert phase.batch_size == sizes[max(s for s in sizes if s <= step)]
        assert schedule.tokens_read(ROW, step) == token
        assert schedule.first_row(step) == -(-token // ROW)
        wanted = [token + b * phase.length for b in range(phase.batch_size)]
        assert first_tokens(schedule, step) == wanted
        token += phase.batch_size * phase.length
        assert schedule.end_row(step) == -(-token // ROW)


def test_a_row_never_reaches_over_the_end_of_a_long_one():
    schedule = schedule_of({0: 4, 3: 12}, {0: 3, 5: 6})
    for step in range(9):
        length = schedule.at(step).length
        assert all(first + length <= ROW for _, first in places_of(schedule, step))


def test_without_changes_a_batch_is_whole_rows_one_after_another():
    assert schedule_of(ROW, 3).locate_rows(5, [0, 1, 2]) == [(15, 0), (16, 0), (17, 0)]


@pytest.mark.parametrize(
    ("lengths", "sizes", "law"),
    [
        (
            {0: 8, 10: 12},
            12,
            r"data.sequence_length=8 does not divide 12, the length of the rows from which it is "
            r"cut: the largest data.sequence_length of these steps; use a divisor, or pack rows "
            r"anew at step 10: data.repack_at='\[10\]'",
        ),
        (
            {0: 4, 1: 12},
            5,
            r"becomes 12 at step 1, after 20 tokens, not a multiple of that length; "
            r"change it at step 3, or with another data.global_batch_size before",
        ),
        (
            {0: 6, 1: 12},
            {0: 1, 1: 2},
            r"becomes 12 at step 1, after 6 tokens, .* change it at step 2, or",
        ),
    ],
)
def test_rows_that_cannot_be_cut_are_refused_with_a_remedy(lengths, sizes, law):
    with pytest.raises(ValueError, match=law):
        schedule_of(lengths, sizes)


@pytest.mark.parametrize("ranges", [(), [(0, 1)], [(2, 4), (4, 5)], [(3, 3)], [(1, 4), (6, 9)]])
def test_steps_take_the_batches_outside_of_the_skipped_ranges(ranges):
    left = [n for n in range(20) if not any(first <= n < last for first, last in ranges)]
    assert [batch_number(step, ranges) for step in range(10)] == left[:10]


def test_only_the_document_that_is_cut_restarts():
    segments = np.array([3, 3, 4, 4, 4, -1, -1])
    fields = {"positions": np.array([5, 6, 0, 1, 2, 0, 1]), "segment_ids": segments.copy()}
    for name, values in fields.items():
        restart = FIELDS[name].restart
        assert restart is not None
        restart(values, segments)
    np.testing.assert_array_equal(fields["positions"], [0, 1, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(fields["segment_ids"], [0, 0, 1, 1, 1, -1, -1])


def test_the_step_that_a_refusal_names_is_accepted():
    assert schedule_of({0: 4, 3: 12}, 5).first_token(4) == 3 * 20 + 60


def test_each_length_of_packed_rows_is_read_in_an_order_of_its_own():
    """Rows of 12 tokens are taken up again where steps 0 to 2 left them, with a whole row."""
    lengths = {0: 12, 1: 4, 3: 24, 5: 12, 7: 4, 8: 24}
    schedule = schedule_of(lengths, {0: 1, 4: 2}, repack_at=[3, 5, 8])
    packed = {0: 12, 3: 24, 5: 12, 8: 24}
    found: dict[int, list[int]] = {12: [], 24: []}
    for step in range(8):
        phase = schedule.at(step)
        assert phase.packed_length == packed[max(s for s in packed if s <= step)]
        assert phase.length == lengths[max(s for s in lengths if s <= step)]
        found[phase.packed_length].append(schedule.first_token(step))
    assert found == {12: [0, 12, 16, 24, 48, 72], 24: [0, 24]}
    assert schedule.first_token(8) == 72 == schedule.tokens_read(24, 8)
    # The two rows of 4 tokens of steps 1 and 2 leave 4 tokens of their packed row unread.
    assert schedule.tokens_read(12, 5) == 20 and schedule.first_row(5) == 2
    assert schedule.end_row(2) == 2 and schedule.end_row(4) == 3
    assert schedule.tokens_read(24, 3) == 0 and schedule.tokens_read(12, 3) == 20


@pytest.mark.parametrize(
    ("lengths", "repack_at", "law"),
    [
        ({0: 8, 4: 16}, [4, 2], r"data.repack_at=\[4, 2\] is not in ascending order"),
        ({0: 8, 4: 16}, [4, 4], r"not in ascending order"),
        (
            {0: 8, 4: 16, 6: 8},
            [4, 5],
            r"data.repack_at=5 has no effect: the largest data.sequence_length is 16 before and "
            r"after that step; remove it, or change the length there",
        ),
        ({0: 8, 4: 6}, [2], r"has no effect: the largest data.sequence_length is 8"),
        (8, [2], r"8 before and after that step; write data.sequence_length='{0: OLD, 2: 8}'"),
    ],
)
def test_steps_that_repack_nothing_are_refused(lengths, repack_at, law):
    with pytest.raises(ValueError, match=law):
        schedule_of(lengths, 8, repack_at)
