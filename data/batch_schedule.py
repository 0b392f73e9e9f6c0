"""Batch size, row length and tokens of every step, when both may change during a run.

Rows are packed at the largest length of the run. A step with shorter rows takes consecutive parts
of long rows, so that a change neither skips nor repeats a token.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data.config import DataConfig, values_by_step


@dataclass(frozen=True)
class BatchPhase:
    """Consecutive steps with the same batch size and row length."""

    first_step: int
    """Zero-based."""
    batch_size: int
    """Rows (B)."""
    length: int
    """Tokens per row (L)."""
    first_token: int
    """Tokens of all earlier steps."""


class BatchSchedule:
    """Shape and tokens of the batch of every step, computed in constant time.

    Raises: ValueError when rows of a phase cannot be cut from the longest rows.
    """

    def __init__(self, config: DataConfig):
        sizes = values_by_step(config.global_batch_size)
        lengths = values_by_step(config.sequence_length)
        # The two rows of a preference pair count as one long row, and are cut from it.
        self.row_length = config.row_length * config.rows_per_item
        self.phases: list[BatchPhase] = []
        for step in sorted({*sizes, *lengths}):
            size = sizes[max(s for s in sizes if s <= step)]
            length = lengths[max(s for s in lengths if s <= step)]
            phase = BatchPhase(step, size, length, self.tokens_before(step))
            self._check(phase)
            self.phases.append(phase)

    def _check(self, phase: BatchPhase) -> None:
        if self.row_length % phase.length:
            raise ValueError(
                f"data.sequence_length={phase.length} does not divide the largest value, "
                f"{self.row_length}; use a divisor, since shorter rows are cut from the longest"
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
                f"{phase.first_token:,} tokens, not a multiple of that length; change it "
                f"{next(later, 'with')} another data.global_batch_size before that step"
            )

    def at(self, step: int) -> BatchPhase:
        """Return the phase of a zero-based step."""
        return self.phases[bisect_right(self.phases, step, key=lambda p: p.first_step) - 1]

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens of all earlier steps."""
        if step == 0:
            return 0
        phase = self.at(step - 1)
        return phase.first_token + (step - phase.first_step) * phase.batch_size * phase.length

    def locate_rows(self, step: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return (index of the long row, first token in it) of some rows of the batch."""
        phase, first = self.at(step), self.tokens_before(step)
        return [divmod(first + b * phase.length, self.row_length) for b in rows]

    def first_row(self, step: int) -> int:
        """Return the index of the first long row that begins at this step or later."""
        return -(-self.tokens_before(step) // self.row_length)


def batch_number(step: int, skipped: Iterable[Sequence[int]]) -> int:
    """Return the batch of a zero-based step when the ascending ranges [first, last) are skipped."""
    for first, last in skipped:
        if step >= first:
            step += last - first
    return step
