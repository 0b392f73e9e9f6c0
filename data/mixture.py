"""Which source gives row n of the run: weights into an even order, computed, never remembered.

Of n rows the first source gives floor(n * share), spread evenly; of those left over the second one
gives its share of what remains, and so on. Integers throughout, so every machine agrees. A source
of weight 0 is as if it were not there. Refuses to know steps, epochs and batches.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

Weight = float | Fraction


@dataclass(frozen=True)
class _Phase:
    """Rows from `first_row` on, until the next phase."""

    first_row: int
    before: tuple[int, ...]
    """Rows taken from each source in all earlier phases."""
    shares: tuple[tuple[int, int, int], ...]
    """(source, p, q): of the rows left over by those before it, p of q; the last one all."""

    def counts(self, row: int) -> tuple[int, ...]:
        counts, left = list(self.before), row - self.first_row
        for source, p, q in self.shares:
            taken = left * p // q
            counts[source] += taken
            left -= taken
        return tuple(counts)


class Mixture:
    """The endless order of rows over sources.

    weights_by_phase: (first row, weight of every source), ascending, the first one from row 0.
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
        """(source, index in that source's own endless order) of a row."""
        phase = self._phase(row)
        left = row - phase.first_row
        for source, p, q in phase.shares:
            taken = left * p // q
            if (left + 1) * p // q > taken:
                return source, phase.before[source] + taken
            left -= taken
        raise AssertionError("the last source takes every row that is left")

    def counts(self, row: int) -> tuple[int, ...]:
        """How many of the rows before this one each source gives."""
        return self._phase(row).counts(row)

    def _phase(self, row: int) -> _Phase:
        return self._phases[bisect_right(self._firsts, row) - 1]


def _shares(weights: Sequence[Weight]) -> tuple[tuple[int, int, int], ...]:
    # As written, not as stored: 0.7 is 7/10.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple((n, p, sum(whole[n:])) for n, p in enumerate(whole) if p)
