"""Which tokens the batch of a step is made of, when batch size and row length change on the way.

Rows are packed at the greatest length of the run. A step with shorter rows takes pieces of long
rows, one after another, so that a change of either neither skips nor repeats a token.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data.config import DataConfig, phases


@dataclass(frozen=True)
class Phase:
    """Steps of one batch size and one row length."""

    first_step: int
    """Zero-based."""
    batch_size: int
    """Rows (B)."""
    length: int
    """Tokens per row (L)."""
    first_token: int
    """Tokens of all earlier steps."""


class BatchPlan:
    """Shape and place of every step's batch, computed in constant time.

    Raises: ValueError when rows of one phase cannot be cut from the rows of the longest one.
    """

    def __init__(self, config: DataConfig):
        sizes, lengths = phases(config.global_batch_size), phases(config.sequence_length)
        self.row_length = config.row_length
        self.phases: list[Phase] = []
        for step in sorted({*sizes, *lengths}):
            size = sizes[max(s for s in sizes if s <= step)]
            length = lengths[max(s for s in lengths if s <= step)]
            phase = Phase(step, size, length, self.tokens_before(step))
            self._check(phase)
            self.phases.append(phase)

    def _check(self, phase: Phase) -> None:
        if self.row_length % phase.length:
            raise ValueError(
                f"data.sequence_length={phase.length} does not divide the longest rows of "
                f"{self.row_length}, from which shorter ones are cut; use a divisor"
            )
        if phase.first_token % phase.length:
            before = self.phases[-1]
            per_step = before.batch_size * before.length
            later = (
                f"at step {phase.first_step + n}, or with"
                for n in range(1, phase.length)
                if (phase.first_token + n * per_step) % phase.length == 0
            )
            raise ValueError(
                f"data.sequence_length becomes {phase.length} at step {phase.first_step}, after "
                f"{phase.first_token:,} tokens, which are no whole number of such rows; change it "
                f"{next(later, 'with')} another data.global_batch_size before"
            )

    def at(self, step: int) -> Phase:
        """The phase that a zero-based step belongs to."""
        return self.phases[bisect_right(self.phases, step, key=lambda p: p.first_step) - 1]

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before this one."""
        if step == 0:
            return 0
        phase = self.at(step - 1)
        return phase.first_token + (step - phase.first_step) * phase.batch_size * phase.length

    def places(self, step: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """(number of the long row, first token in it) of some rows of the batch."""
        phase, first = self.at(step), self.tokens_before(step)
        return [divmod(first + b * phase.length, self.row_length) for b in rows]

    def first_row(self, step: int) -> int:
        """The first long row that begins at this step or later."""
        return -(-self.tokens_before(step) // self.row_length)


def batch_number(step: int, skipped: Iterable[Sequence[int]]) -> int:
    """The batch that a zero-based step takes when batches [first, last) are left out, ascending."""
    for first, last in skipped:
        if step >= first:
            step += last - first
    return step
