"""AdamW with a schedule: which parameters decay, how fast they move, their moving average."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
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
    ema_decay: float | None = Field(default=None, ge=0, lt=1)
    """Of a moving average of the parameters, kept beside them from their initial values on; null:
    none."""


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
) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, then AdamW.

    `update` takes `is_good`, a scalar: where it is false the state stays as it was, and the updates
    mean nothing.
    """
    adamw = optax.chain(
        _adam(config),
        optax.add_decayed_weights(config.weight_decay, decays),
        _held(optax.scale_by_learning_rate(schedule)),
    )
    # identity holds the place of the clipping, so that the state has one structure either way.
    no_clip = config.clip_norm is None
    clip = optax.identity() if no_clip else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, adamw)


def where(is_good: Any, new: Any, old: Any) -> Any:
    """One of two pytrees, leaf by leaf. is_good: a scalar."""
    return jax.tree.map(lambda a, b: jnp.where(is_good, a, b), new, old)


def _adam(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, whose updates are made of the moments that are kept.

    Made of new moments that may then be dropped, they would need old and new at once: XLA for CPUs
    copied all moments at the start of the step.
    """
    b1, b2, eps = config.beta1, config.beta2, config.eps

    def update(
        grads: Any, state: Any, params: Any = None, *, is_good: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        mu = where(is_good, optax.tree.update_moment(grads, state.mu, b1, 1), state.mu)
        square = optax.tree.update_moment_per_elem_norm(grads, state.nu, b2, 2)
        nu = where(is_good, square, state.nu)
        count = optax.safe_increment(state.count)
        updates = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + eps),
            optax.tree.bias_correction(mu, b1, count),
            optax.tree.bias_correction(nu, b2, count),
        )
        return updates, optax.ScaleByAdamState(where(is_good, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam(b1, b2, eps).init, update)


def _held(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same, but its state stays where `is_good` is false."""

    def update(
        grads: Any, state: Any, params: Any = None, *, is_good: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        updates, after = inner.update(grads, state, params)
        return updates, where(is_good, after, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def update_count(opt_state: Any) -> jax.Array:
    """How many updates an optimizer of `make_optimizer` has made, which is what its schedule reads.

    Less than the number of steps if some were skipped.
    """
    return optax.tree.get(opt_state, "ScaleByScheduleState").count


def start_average(params: Any) -> Any:
    """The moving average before the first step: float32, whatever the parameters are.

    In bfloat16 the small steps of an average would round away.
    """
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def move_average(average: Any, params: Any, decay: float) -> Any:
    """The moving average after an update that led to `params`."""
    return jax.tree.map(
        lambda mean, x: mean + (1 - decay) * (x.astype(jnp.float32) - mean), average, params
    )
