"""The state of training, as checkpoints store it."""

from dataclasses import dataclass
from typing import Any

import jax

from training.guard import GuardState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State of training: finished steps, parameters, optimizer, spike guard, moving average.

    `ema` is None unless `optimizer.ema_decay` is set. `reference` is None unless
    `training.objective` is dpo: the trained parameters as they were before the first step.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    guard: GuardState
    ema: Any
    reference: Any = None
