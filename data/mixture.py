"""Deterministic mixture of sources: which source provides row n of the run.

Among the first n rows, the first source provides floor(n * share), evenly spaced. The second source
provides its share of the remaining rows in the same way, and so on. All arithmetic is on integers,
so every machine computes the same order. A source of weight 0 has no influence.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Weight = float | Fraction


@dataclass(frozen=True)
class _Phase:
    """Weights that hold from `first_row` until the next phase."""

    first_row: int
    before: tuple[int, ...]
    """Rows of each source in all earlier phases."""
    shares: tuple[tuple[int, int, int], ...]
    """(source, p, q): the source provides p of q of the rows that earlier sources leave; the last
    source provides all of them."""

    def counts(self, row: int) -> tuple[int, ...]:
        counts, left = list(self.before), row - self.first_row
        for source, p, q in self.shares:
            taken = left * p // q
            counts[source] += taken
            left -= taken
        return tuple(counts)


class Mixture:
    """Endless sequence of rows over sources.

    weights_by_phase: (first row, weight of every source), ascending from row 0.
    Raises: ValueError when all weights of a phase are 0.
    """

    def __init__(
        self, names: Sequence[str], weights_by_phase: Sequence[tuple[int, Mapping[str, Weight]]]
    ):
        firsts = [first for first, _ in weights_by_phase]
        assert firsts[0] == 0 and firsts == sorted(set(firsts)), firsts
        self._firsts = firsts
        self._phases: list[_Phase] = []
        before = (0,) * len(names)
        for first, weights in weights_by_phase:
            if self._phases:
                before = self._phases[-1].counts(first)
            shares = _shares([weights[name] for name in names])
            if not shares:
                raise ValueError(
                    f"data.sources: every weight is 0 from row {first} on ({', '.join(names)}); "
                    "give at least one of them a weight above 0"
                )
            self._phases.append(_Phase(first, before, shares))

    def locate(self, row: int) -> tuple[int, int]:
        """Return (source, index among the rows of that source) of a row."""
        phase = self._phase(row)
        left = row - phase.first_row
        for source, p, q in phase.shares:
            taken = left * p // q
            if (left + 1) * p // q > taken:
                return source, phase.before[source] + taken
            left -= taken
        raise AssertionError("the last source provides every remaining row")

    def counts(self, row: int) -> tuple[int, ...]:
        """Return how many of the rows before this one each source provides."""
        return self._phase(row).counts(row)

    def _phase(self, row: int) -> _Phase:
        return self._phases[bisect_right(self._firsts, row) - 1]


def _shares(weights: Sequence[Weight]) -> tuple[tuple[int, int, int], ...]:
    # As written, not as stored: 0.7 is 7/10.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple((n, p, sum(whole[n:])) for n, p in enumerate(whole) if p)
