"""Optimizers by name, their configuration, and what they share.

A new optimizer is one function here, or in a plugin module: `@register("name")` before a factory

    def muon(config: OptimizerConfig, schedule: optax.Schedule, *, momentum: float = 0.95): ...

that returns an optax transformation; its keyword arguments are the keys of `optimizer.options`.
Clipping by global norm comes before it, and is not its concern.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from registry import Registry


class OptimizerConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """The optimizer, its learning-rate schedule, and clipping by global gradient norm."""

    name: str = "adamw"
    """Optimizer by name: adamw (arXiv 1711.05101), and others that are registered."""
    options: dict[str, Any] = {}
    """Options of an optimizer that has more than the keys below; adamw has none."""
    learning_rate: PositiveFloat = 3e-4
    """Peak of the schedule."""
    schedule: str = "cosine"
    """Learning rate after warm-up by name: cosine decays to the end of the run, wsd (warm-up,
    stable, decay) stays flat and then decays linearly, constant stays flat; and others that are
    registered."""
    schedule_steps: PositiveInt | None = None
    """Length of the schedule in steps; afterwards the rate stays at its final value. null:
    training.steps. To keep the schedule of a finished run that is extended, set it to the old
    training.steps."""
    warmup_steps: NonNegativeInt = 100
    """Steps of linear warm-up to the peak."""
    decay_steps: NonNegativeInt = 0
    """Steps of decay at the end of a wsd schedule; 0: a tenth of the run."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run as a fraction of the peak."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay per unit of learning rate; of matrices, not of norms or biases."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm; null: no clipping."""
    ema_decay: float | None = Field(default=None, ge=0, lt=1)
    """Decay of an exponential moving average of the parameters, which is evaluated in their place;
    null: none."""


Factory = Callable[..., optax.GradientTransformation]


@dataclass(frozen=True)
class _Entry:
    factory: Factory
    obeys_is_good: bool


OPTIMIZERS: Registry[_Entry] = Registry("optimizer")


def register(name: str, *, obeys_is_good: bool = False) -> Callable[[Factory], Factory]:
    """Register an optimizer's factory: (config, schedule, **options) -> transformation.

    Args:
        name: value of the key `optimizer.name`.
        obeys_is_good: its `update` takes a scalar `is_good`, and keeps its state where that is
            false. Otherwise its state is selected afterwards, which may need a second copy of it.
    """

    def add(factory: Factory) -> Factory:
        OPTIMIZERS[name] = _Entry(factory, obeys_is_good)
        return factory

    return add


def check_optimizer(config: OptimizerConfig) -> None:
    """Check name and options. Raises: ValueError with key path, value and what is known."""
    signature = inspect.signature(OPTIMIZERS[config.name].factory)
    try:
        signature.bind(config, None, **config.options)
    except TypeError as error:
        options = list(signature.parameters)[2:]
        raise ValueError(
            f"optimizer.options={config.options!r}: {error}; optimizer {config.name} takes "
            f"{', '.join(options) or 'no options'}"
        ) from error


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """Return the configured optimizer behind clipping by global norm.

    `update` takes a scalar `is_good`. Where it is false, the state stays as it was and the updates
    are meaningless.

    Raises:
        ValueError: unknown name or options.
    """
    check_optimizer(config)
    entry = OPTIMIZERS[config.name]
    optimizer = entry.factory(config, schedule, **config.options)
    # identity keeps the structure of the state the same without clipping.
    no_clip = config.clip_norm is None
    clip = optax.identity() if no_clip else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, optimizer if entry.obeys_is_good else keep_if_bad(optimizer))


def keep_if_bad(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the same transformation, with its state unchanged where `is_good` is false."""

    def update(
        grads: Any, state: Any, params: Any = None, *, is_good: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        updates, after = inner.update(grads, state, params)
        return updates, tree_where(is_good, after, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def tree_where(condition: Any, new: Any, old: Any) -> Any:
    """Return one of two pytrees by a scalar condition."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


_DECAYED = {"kernel", "table", "lora_a", "lora_b"}
_NOT_DECAYED = {"scale", "bias", "logit_bias", "sinks"}


def decays(params: Any) -> Any:
    """Return a tree of bools: whether weight decay applies to a parameter.

    True for kernels and embedding tables, False for norm scales, biases and attention sinks.

    Raises:
        ValueError: a parameter of an unknown kind.
    """

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        keys = {getattr(key, "key", None) for key in path}
        if not keys & (_DECAYED | _NOT_DECAYED):
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')} has an "
                "unknown kind; state in training/optimizers.py whether it decays"
            )
        return not keys & _NOT_DECAYED

    return jax.tree_util.tree_map_with_path(is_decayed, params)


@register("adamw", obeys_is_good=True)
def adamw(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW with decoupled weight decay of matrices."""
    return optax.chain(
        _scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, decays),
        keep_if_bad(optax.scale_by_learning_rate(schedule)),
    )


def _scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Return `optax.scale_by_adam` whose updates are computed from the moments that are kept.

    Updates from new moments that may then be dropped would need old and new moments at once: XLA
    for CPU copied all moments at the start of the step (seen on jax 0.10.2).
    """
    b1, b2, eps = config.beta1, config.beta2, config.eps

    def update(
        grads: Any, state: Any, params: Any = None, *, is_good: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        mu = tree_where(is_good, optax.tree.update_moment(grads, state.mu, b1, 1), state.mu)
        square = optax.tree.update_moment_per_elem_norm(grads, state.nu, b2, 2)
        nu = tree_where(is_good, square, state.nu)
        count = optax.safe_increment(state.count)
        updates = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + eps),
            optax.tree.bias_correction(mu, b1, count),
            optax.tree.bias_correction(nu, b2, count),
        )
        return updates, optax.ScaleByAdamState(tree_where(is_good, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam(b1, b2, eps).init, update)
