"""AdamW with a schedule: which parameters decay, how fast they move."""

from typing import Any, Literal

import jax
import optax
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat


class OptimizerConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """AdamW (arXiv 1711.05101), clipped by global norm."""

    learning_rate: PositiveFloat = 3e-4
    """Peak of the schedule."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine to the end; flat, then linear down (wsd); flat."""
    warmup_steps: NonNegativeInt = 100
    """Linear up to the peak."""
    decay_steps: NonNegativeInt = 0
    """Last steps of a wsd schedule that go down; 0: a tenth of the run."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end over its peak."""
    weight_decay: NonNegativeFloat = 0.1
    """Per unit of learning rate; matrices only, never norms or biases."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global gradient norm; null: no clipping."""


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate of optimizer step 0 .. steps - 1."""
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = min(config.warmup_steps, steps)
    # The first step already moves: learning rate peak / warmup, not 0.
    rise = optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup - 1))
    if config.schedule == "constant":
        return optax.join_schedules([rise, optax.constant_schedule(peak)], [warmup])
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(1, steps - warmup), config.final_fraction)
        return optax.join_schedules([rise, after], [warmup])
    decay = min(config.decay_steps or max(1, steps // 10), steps - warmup)
    down = optax.linear_schedule(peak, final, max(1, decay))
    return optax.join_schedules(
        [rise, optax.constant_schedule(peak), down], [warmup, steps - decay]
    )


def decays(params: Any) -> Any:
    """True for kernels and the embedding table, false for norm scales, biases and sinks."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        return not any(getattr(key, "key", None) in ("scale", "bias", "sinks") for key in path)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW."""
    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decays,
    )
    # identity holds the place of the clipping, so that the state has one structure either way.
    no_clip = config.clip_norm is None
    clip = optax.identity() if no_clip else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, adamw)
