"""Whether a step may change anything: not if its loss or gradient is not finite, nor, if so
configured, when one of them leaps up.

Pure functions of scalars that every device holds, so that all of them decide alike. What follows
from a decision is in `training/step.py` (nothing is updated) and in the loop (warn, go back, stop).
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from pydantic import BaseModel, PositiveFloat, PositiveInt

# Steps that the running statistics look back on: short enough to follow a falling loss.
MEMORY = 128
# Fewer earlier steps than this tell no deviation worth acting on.
WARMUP = 20
# Least standard deviation, in nats and in e-folds of the norm: below it differences are rounding.
_FLOOR = 1e-3
# What a deviation counts at most, in the same units, so that its square stays finite and fades.
_LIMIT = 1e3


class GuardConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """What happens when loss or gradient leap up. What is not finite is always skipped."""

    on_spike: Literal["off", "warn", "skip", "rollback"] = "warn"
    """off: nothing; warn: a line in the log; skip: the step updates nothing; rollback: nor does it,
    and the run goes back to the newest checkpoint, that of a stop included, and leaves these rows
    out."""
    max_z: PositiveFloat = 6.0
    """Standard deviations above the mean of the last steps that are a spike. Of normal noise,
    judged by 128 steps, one step in a hundred million is beyond 6; real spikes reach tens."""
    max_bad_steps: PositiveInt = 10
    """Steps in a row without an update after which the run stops."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GuardState:
    """Scalars: mean and variance of loss and of log gradient norm over `count` good steps, bad
    steps in a row, and bad steps since the start."""

    loss_mean: jax.Array
    loss_var: jax.Array
    grad_mean: jax.Array
    grad_var: jax.Array
    count: jax.Array
    bad_steps: jax.Array
    skipped_steps: jax.Array


def fresh_guard() -> GuardState:
    """Nothing seen yet."""
    statistics = [jnp.zeros((), jnp.float32) for _ in range(4)]
    counters = [jnp.zeros((), jnp.int32) for _ in range(3)]
    return GuardState(*statistics, *counters)


def judge(
    guard: GuardState, loss: jax.Array, grad_norm: jax.Array, config: GuardConfig
) -> tuple[jax.Array, GuardState, dict[str, jax.Array]]:
    """(may this step update, the guard after it, metrics); all scalars.

    metrics: `loss_z`, `grad_z`, standard deviations above the good steps before, 0 below their
    mean and before there are enough; `bad_steps` in a row; `skipped_steps` in all.
    """
    loss, norm = loss.astype(jnp.float32), grad_norm.astype(jnp.float32)
    log_norm = jnp.log(norm)  # norms scatter by factors, not by differences
    is_warm = guard.count >= WARMUP
    loss_z = jnp.where(is_warm, _rise(loss, guard.loss_mean, guard.loss_var), 0.0)
    grad_z = jnp.where(is_warm, _rise(log_norm, guard.grad_mean, guard.grad_var), 0.0)
    is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if config.on_spike in ("skip", "rollback"):
        is_good &= jnp.maximum(loss_z, grad_z) <= config.max_z
    # A batch without a token that counts has gradient 0: it tells nothing of what is usual.
    is_telling = is_good & jnp.isfinite(log_norm)
    count = guard.count + is_telling.astype(jnp.int32)
    # The plain mean of all steps until they fill the memory: nothing leans on the zeros at start.
    weight = jnp.maximum(1 / (guard.count + 1), 1 / MEMORY)

    def taken_in(x: jax.Array, mean: jax.Array, var: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Not E[x^2] - E[x]^2, which would cancel in float32.
        delta = jnp.clip(x - mean, -_LIMIT, _LIMIT)
        spread = (1 - weight) * (var + weight * delta * delta)
        return (
            jnp.where(is_telling, mean + weight * delta, mean),
            jnp.where(is_telling, spread, var),
        )

    bad_steps = jnp.where(is_good, 0, guard.bad_steps + 1)
    skipped_steps = guard.skipped_steps + (~is_good).astype(jnp.int32)
    after = GuardState(
        *taken_in(loss, guard.loss_mean, guard.loss_var),
        *taken_in(log_norm, guard.grad_mean, guard.grad_var),
        count,
        bad_steps,
        skipped_steps,
    )
    metrics = {
        "loss_z": loss_z,
        "grad_z": grad_z,
        "bad_steps": bad_steps,
        "skipped_steps": skipped_steps,
    }
    return is_good, after, metrics


def _rise(x: jax.Array, mean: jax.Array, var: jax.Array) -> jax.Array:
    """Standard deviations above the mean; 0 below it."""
    return jnp.maximum((x - mean) / jnp.maximum(jnp.sqrt(var), _FLOOR), 0.0)
