"""The order over sources is a bijection, evenly spaced, and depends on the weights alone."""

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from data.mixture import Mixture

WEIGHT = st.one_of(
    st.integers(0, 9),
    st.floats(0, 50, allow_subnormal=False),
    st.sampled_from([0.7, 0.1, 1e-7, 1e12]),
)
ROWS = 300


@st.composite
def phases_of_weights(draw, max_phases=4):
    """(names, phases), some weight above 0 in each phase."""
    names = [f"source{n}" for n in range(draw(st.integers(1, 5)))]
    firsts = draw(st.sets(st.integers(1, ROWS), max_size=max_phases - 1))
    phases = []
    for first in [0, *sorted(firsts)]:
        weights = {name: draw(WEIGHT) for name in names}
        assume(any(weights.values()))
        phases.append((first, weights))
    return names, phases


@given(phases_of_weights())
def test_every_source_gives_its_own_rows_in_order_without_a_gap(case):
    names, phases = case
    mixture = Mixture(names, phases)
    taken = [0] * len(names)
    for row in range(ROWS + 50):
        assert mixture.counts(row) == tuple(taken)
        source, index = mixture.locate(row)
        assert index == taken[source]
        taken[source] += 1


@given(phases_of_weights(max_phases=1), st.integers(0, 10**15))
def test_every_count_is_within_the_number_of_sources_of_its_share(case, row):
    names, [(_, weights)] = case
    counts = Mixture(names, [(0, weights)]).counts(row)
    assert sum(counts) == row
    total = sum(weights.values())
    for name, count in zip(names, counts, strict=True):
        # The share itself is computed in floating point, so it is off by some parts in 10**15.
        share = row * weights[name] / total
        assert abs(count - share) <= len(names) + 1e-14 * row


def test_rows_of_a_source_are_spread_evenly():
    mixture = Mixture(["a", "b"], [(0, {"a": 0.25, "b": 0.75})])
    assert [mixture.locate(row)[0] for row in range(12)] == [1, 1, 1, 0] * 3


def test_a_weight_means_the_number_that_is_written():
    mixture = Mixture(["a", "b", "c"], [(0, {"a": 0.7, "b": 0.2, "c": 0.1})])
    assert mixture.counts(10**18) == (7 * 10**17, 2 * 10**17, 10**17)


@given(phases_of_weights())
def test_a_phase_changes_nothing_before_it(case):
    names, phases = case
    mixture = Mixture(names, phases)
    for n, (first, _) in enumerate(phases[1:], start=1):
        before = Mixture(names, phases[:n])
        assert all(before.locate(row) == mixture.locate(row) for row in range(first))


@given(phases_of_weights(), st.data())
def test_a_phase_takes_as_many_rows_as_a_run_of_its_own(case, data):
    names, phases = case
    first, weights = phases[-1]
    mixture, alone = Mixture(names, phases), Mixture(names, [(0, weights)])
    row = data.draw(st.integers(0, 1000))
    before = mixture.counts(first)
    assert mixture.counts(first + row) == tuple(
        a + b for a, b in zip(before, alone.counts(row), strict=True)
    )


@given(phases_of_weights(), st.data())
def test_sources_of_weight_zero_anywhere_change_nothing(case, data):
    names, phases = case
    places = data.draw(st.lists(st.integers(0, len(names)), min_size=1, max_size=3))
    more = list(names)
    for n, place in enumerate(places):
        more.insert(place, f"absent{n}")
    absent = dict.fromkeys(set(more) - set(names), 0.0)
    mixture = Mixture(names, phases)
    with_more = Mixture(more, [(first, weights | absent) for first, weights in phases])
    for row in range(ROWS + 50):
        source, index = mixture.locate(row)
        other, other_index = with_more.locate(row)
        assert (names[source], index) == (more[other], other_index)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), st.integers(2, 1000))
def test_only_relations_between_weights_matter(weights, factor):
    names = [f"source{n}" for n in range(len(weights))]
    one, other = (
        Mixture(names, [(0, {n: w * scale for n, w in zip(names, weights, strict=True)})])
        for scale in (1, factor)
    )
    assert [one.locate(row) for row in range(ROWS)] == [other.locate(row) for row in range(ROWS)]


def test_a_phase_without_any_weight_is_refused():
    weights = {"web": 1.0, "code": 0.0}
    with pytest.raises(ValueError, match=r"every weight is 0 from row 40 on \(web, code\)"):
        Mixture(["web", "code"], [(0, weights), (40, {"web": 0.0, "code": 0.0})])
