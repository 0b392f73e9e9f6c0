"""Batch size, row length and tokens of every step, when both may change during a run.

Documents are packed into rows of the largest length of the run. A step with shorter rows takes
consecutive parts of packed rows, so that a change neither skips nor repeats a token. The steps of
`data.repack_at` divide a run into parts, each with packed rows of its own largest length. The
packed rows of every length have an order of their own, in which a later part with the same length
goes on.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data.config import DataConfig, value_at, values_by_step


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
    """Index of its first token, counted over all packed rows of this length in their order."""


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
            packed = value_at(config.row_lengths, step) * config.rows_per_item
            first = self.tokens_read(packed, step)
            if step in config.row_lengths:  # the rest of a row that was read in part is left out
                first += -first % packed
            size, length = value_at(sizes, step), value_at(lengths, step)
            phase = BatchPhase(step, size, length, packed, first)
            self._check(phase, config)
            self.phases.append(phase)

    def _check(self, phase: BatchPhase, config: DataConfig) -> None:
        longest = phase.packed_length // config.rows_per_item
        longer = [
            step
            for step, length in values_by_step(config.sequence_length).items()
            if step >= max(1, phase.first_step) and length == longest
        ]
        anew = ""
        if longer and longer[0] not in config.repack_at and config.rows_per_item == 1:
            repack_at = sorted({*config.repack_at, longer[0]})
            anew = f", or pack rows anew at step {longer[0]}: data.repack_at='{repack_at}'"
        if phase.packed_length % phase.length:
            raise ValueError(
                f"data.sequence_length={phase.length} does not divide {phase.packed_length}, the "
                "length of the rows from which it is cut: the largest data.sequence_length of "
                f"these steps; use a divisor{anew}"
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
                f"{next(later, 'with')} another data.global_batch_size before that step{anew}"
            )

    def at(self, step: int) -> BatchPhase:
        """Return the phase of a zero-based step."""
        return self.phases[bisect_right(self.phases, step, key=lambda p: p.first_step) - 1]

    def first_token(self, step: int) -> int:
        """Return the index of the first token of a step, over all packed rows of its length."""
        phase = self.at(step)
        return phase.first_token + (step - phase.first_step) * phase.batch_size * phase.length

    def tokens_read(self, packed_length: int, step: int) -> int:
        """Return the index after the last token of packed rows of a length in earlier steps."""
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
        """Return the index of the first packed row that begins at this step or later.

        It counts the packed rows of the length that the step reads.
        """
        return -(-self.first_token(step) // self.at(step).packed_length)

    def end_row(self, step: int) -> int:
        """Return the index after the last packed row from which this step or an earlier one reads.

        It counts the packed rows of the length that the step reads.
        """
        packed_length = self.at(step).packed_length
        return -(-self.tokens_read(packed_length, step + 1) // packed_length)


def batch_number(step: int, skipped: Iterable[Sequence[int]]) -> int:
    """Return the batch of a zero-based step when the ascending ranges [first, last) are skipped."""
    for first, last in skipped:
        if step >= first:
            step += last - first
    return step
