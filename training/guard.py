"""Guard against loss and gradient spikes: whether a step may update the parameters.

A step with a non-finite loss or gradient norm never updates; a spike does not if so configured. The
functions are pure functions of replicated scalars, so that all devices decide alike. The step obeys
the decision (`training/step.py`); the host warns, rolls back or stops (`training/spikes.py`).
"""

from dataclasses import dataclass
from typing import Literal, Self

import jax
import jax.numpy as jnp
from pydantic import BaseModel, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

# Length of the running statistics in steps: short enough to follow a falling loss.
MEMORY = 128
# Number of steps before a deviation means anything.
WARMUP = 20
# Lower bound of the standard deviation, in nats and in e-folds of the norm: less is rounding.
_FLOOR = 1e-3
# Upper bound of a deviation, in the same units, so that its square stays finite and decays.
_LIMIT = 1e3


class GuardConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Reaction to loss and gradient spikes, and rechecks of the devices.

    A step that is not finite is always skipped.
    """

    on_spike: Literal["off", "warn", "skip", "rollback"] = "warn"
    """off: nothing; warn: log a warning; skip: the step updates nothing; rollback: skip, restore
    the newest checkpoint and leave out the batches since then."""
    max_z: PositiveFloat = 6.0
    """Standard deviations above the mean of the last steps that make a spike. With normal noise
    and 128 steps, one step in 10^8 exceeds 6; real spikes reach tens."""
    max_bad_steps: PositiveInt = 10
    """Skipped steps in a row after which the run ends, at least 2 with rollback; also the most
    rollbacks to a checkpoint."""
    recheck_every: NonNegativeInt = 0
    """Steps between rechecks of the devices, which end the run with code 77 if one computes
    wrongly; 0: never. Replicas of the state are compared bit for bit, and the gradients of one
    microbatch are computed twice; see docs/checkpoints.md for what that finds. A recheck takes
    about as long as the forward and backward passes of two to three microbatches. On NVIDIA GPUs
    it needs XLA_FLAGS=--xla_gpu_deterministic_ops=true."""

    @model_validator(mode="after")
    def _check_rollback(self) -> Self:
        if self.on_spike == "rollback" and self.max_bad_steps == 1:
            raise ValueError(
                "training.guard.max_bad_steps=1 ends the run at the first spike, before "
                "training.guard.on_spike=rollback; use 2 or more"
            )
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GuardState:
    """Scalars: mean and variance of loss and log gradient norm over `count` good steps.

    `bad_steps` counts skipped steps in a row, `skipped_steps` those since step 0.
    """

    loss_mean: jax.Array
    loss_var: jax.Array
    grad_mean: jax.Array
    grad_var: jax.Array
    count: jax.Array
    bad_steps: jax.Array
    skipped_steps: jax.Array


def fresh_guard() -> GuardState:
    """Return the state before the first step."""
    statistics = [jnp.zeros((), jnp.float32) for _ in range(4)]
    counters = [jnp.zeros((), jnp.int32) for _ in range(3)]
    return GuardState(*statistics, *counters)


def judge(
    guard: GuardState, loss: jax.Array, grad_norm: jax.Array, config: GuardConfig
) -> tuple[jax.Array, GuardState, dict[str, jax.Array]]:
    """Return (whether the step may update, the guard after it, metrics); all scalars.

    The metrics are `loss_z` and `grad_z`, in standard deviations above earlier good steps (0 below
    their mean and during warm-up), `bad_steps` and `skipped_steps`.
    """
    loss, norm = loss.astype(jnp.float32), grad_norm.astype(jnp.float32)
    log_norm = jnp.log(norm)  # norms vary by factors, not by differences
    is_warm = guard.count >= WARMUP
    loss_z = jnp.where(is_warm, _rise(loss, guard.loss_mean, guard.loss_var), 0.0)
    grad_z = jnp.where(is_warm, _rise(log_norm, guard.grad_mean, guard.grad_var), 0.0)
    is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if config.on_spike in ("skip", "rollback"):
        is_good &= jnp.maximum(loss_z, grad_z) <= config.max_z
    # A batch without unmasked tokens has gradient 0 and stays out of the statistics.
    is_counted = is_good & jnp.isfinite(log_norm)
    count = guard.count + is_counted.astype(jnp.int32)
    # A plain mean until the memory is full: the initial zeros have no weight.
    weight = jnp.maximum(1 / (guard.count + 1), 1 / MEMORY)

    def update_moments(
        x: jax.Array, mean: jax.Array, var: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # Not E[x^2] - E[x]^2, which would cancel in float32.
        delta = jnp.clip(x - mean, -_LIMIT, _LIMIT)
        spread = (1 - weight) * (var + weight * delta * delta)
        return (
            jnp.where(is_counted, mean + weight * delta, mean),
            jnp.where(is_counted, spread, var),
        )

    bad_steps = jnp.where(is_good, 0, guard.bad_steps + 1)
    skipped_steps = guard.skipped_steps + (~is_good).astype(jnp.int32)
    after = GuardState(
        *update_moments(loss, guard.loss_mean, guard.loss_var),
        *update_moments(log_norm, guard.grad_mean, guard.grad_var),
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
    """Return standard deviations above the mean; 0 below it."""
    return jnp.maximum((x - mean) / jnp.maximum(jnp.sqrt(var), _FLOOR), 0.0)
