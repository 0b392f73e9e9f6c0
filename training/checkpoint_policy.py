"""Checkpoint policy: when a run saves, and which checkpoints stay on disk."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeInt, PositiveFloat, PositiveInt


class CheckpointConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Cadence of checkpoints, which of them stay, and resuming."""

    every: PositiveInt = 200
    """Steps between checkpoints; the last step is always saved."""
    every_minutes: PositiveFloat | None = None
    """Also save this many minutes after the last checkpoint; null: by steps alone."""
    keep: PositiveInt = 3
    """Number of newest checkpoints that stay on disk."""
    keep_every: PositiveInt | None = None
    """Checkpoints whose step is a multiple of this stay for good; null: none."""
    keep_best: NonNegativeInt = 0
    """Number of checkpoints with the lowest evaluation loss that stay too."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume if there is a checkpoint; never: move an old run aside; must: fail without."""


class SaveSchedule:
    """Cadence of checkpoints."""

    def __init__(self, config: CheckpointConfig, last_step: int):
        self._every, self._last_step = config.every, last_step
        minutes = config.every_minutes
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._last_save = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether every process saves after this step: a function of the step alone."""
        return step == self._last_step or step % self._every == 0

    def wants_save(self) -> bool:
        """Return whether this process asks for a checkpoint soon.

        Processes may see wall time differently, so they then agree on one step.
        """
        return time.monotonic() - self._last_save >= self._seconds

    def saved(self) -> None:
        """Count the minutes from now on, because a save has begun."""
        self._last_save = time.monotonic()


def steps_to_keep(
    steps: Iterable[int],
    losses: Mapping[int, float],
    *,
    keep: int,
    keep_every: int | None,
    keep_best: int,
) -> set[int]:
    """Return the newest steps, the multiples of `keep_every`, and those of the lowest loss."""
    ordered = sorted(steps)
    kept = set(ordered[-keep:])
    if keep_every is not None:
        kept |= {step for step in ordered if step % keep_every == 0}
    return kept | set(best_steps(ordered, losses, keep_best))


def best_steps(steps: Iterable[int], losses: Mapping[int, float], count: int) -> list[int]:
    """Return up to `count` steps with the lowest finite evaluation loss, best first."""
    evaluated = [step for step in steps if math.isfinite(losses.get(step, math.nan))]
    return sorted(evaluated, key=lambda step: losses[step])[:count]


@dataclass(frozen=True)
class Preservation:
    """Orbax preservation policy: the checkpoints that a run keeps.

    losses: Evaluation loss by step; it may grow.
    """

    config: CheckpointConfig
    losses: Mapping[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for every checkpoint whether it stays."""
        config, steps = self.config, [info.step for info in checkpoints]
        kept = steps_to_keep(
            steps,
            self.losses,
            keep=config.keep,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
        )
        return [step in kept for step in steps]
