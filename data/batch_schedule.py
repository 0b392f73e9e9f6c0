"""Batch size, row length and tokens of every step, when both may change during a run.

Documents are packed into rows of the largest length of the run, or of its steps up to the next one
of `data.repack_at`. A step with shorter rows takes consecutive parts of packed rows, so that a
change neither skips nor repeats a token. The rows of every packed length have an order of their
own.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
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
    packed_length: int
    """Tokens of the packed rows from which rows are cut; of both rows of a preference pair."""
    first_token: int
    """First token among those of all rows of this packed length."""


class BatchSchedule:
    """Shape and tokens of the batch of every step, computed in constant time.

    Raises: ValueError when rows of a phase cannot be cut from the packed rows.
    """

    def __init__(self, config: DataConfig):
        sizes = values_by_step(config.global_batch_size)
        lengths = values_by_step(config.sequence_length)
        self.phases: list[BatchPhase] = []
        for step in sorted({*sizes, *lengths, *config.row_lengths}):
            # The two rows of a preference pair count as one long row, and are cut from it.
            packed = _at(config.row_lengths, step) * config.rows_per_item
            first = self.tokens_read(packed, step)
            if step in config.row_lengths:  # the rest of a row that was read in part is left out
                first += -first % packed
            phase = BatchPhase(step, _at(sizes, step), _at(lengths, step), packed, first)
            self._check(phase)
            self.phases.append(phase)

    def _check(self, phase: BatchPhase) -> None:
        if phase.packed_length % phase.length:
            raise ValueError(
                f"data.sequence_length={phase.length} does not divide {phase.packed_length}, the "
                "length of the rows from which it is cut: the largest data.sequence_length of "
                "these steps; use a divisor"
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

    def first_token(self, step: int) -> int:
        """Return the first token of a step among those of rows of the length that it reads."""
        phase = self.at(step)
        return phase.first_token + (step - phase.first_step) * phase.batch_size * phase.length

    def tokens_read(self, packed_length: int, step: int) -> int:
        """Return the number of tokens of rows of a packed length that earlier steps have read."""
        for phase in reversed(self.phases):
            if phase.first_step < step and phase.packed_length == packed_length:
                steps = step - phase.first_step
                return phase.first_token + steps * phase.batch_size * phase.length
            step = min(step, phase.first_step)
        return 0

    def locate_rows(self, step: int, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Return (index of the packed row, first token in it) of some rows of the batch."""
        phase, first = self.at(step), self.first_token(step)
        return [divmod(first + b * phase.length, phase.packed_length) for b in rows]

    def first_row(self, step: int) -> int:
        """Return the first packed row, of the length that a step reads, that it begins."""
        return -(-self.first_token(step) // self.at(step).packed_length)

    def end_row(self, step: int) -> int:
        """Return the first packed row, of the length that a step reads, that it leaves unread."""
        packed_length = self.at(step).packed_length
        return -(-self.tokens_read(packed_length, step + 1) // packed_length)


def _at(values: Mapping[int, int], step: int) -> int:
    return values[max(first for first in values if first <= step)]


def batch_number(step: int, skipped: Iterable[Sequence[int]]) -> int:
    """Return the batch of a zero-based step when the ascending ranges [first, last) are skipped."""
    for first, last in skipped:
        if step >= first:
            step += last - first
    return step
