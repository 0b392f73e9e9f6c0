"""Schedule-free AdamW: an average of the steps in place of a decaying rate (arXiv 2405.15682).

The parameters of the run are the average x, so they are evaluated, saved and exported as those of
any other optimizer. Gradients are those at y = beta1 * x + (1 - beta1) * z, between the average and
the sequence z of AdamW's steps. Only z and the second moment are in the state; y exists during a
step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from training.optimizers.config import OptimizerConfig
from training.optimizers.parameters import decay_weights, is_router_bias, scale_groups
from training.optimizers.registry import register, tree_where


class ScheduleFreeState(NamedTuple):
    """Number of updates, sum of the squared rates, second moment, and the parameters z."""

    num_updates: jax.Array
    rate_sum: jax.Array
    nu: Any
    z: Any


def gradient_point(config: OptimizerConfig, params: Any, opt_state: Any) -> Any:
    """Return y for the parameters x and the state of the whole optimizer."""
    return _between(config, params, optax.tree.get(opt_state, "z"))


def _check(config: OptimizerConfig) -> None:
    if config.schedule != "constant":
        raise ValueError(
            f"optimizer.schedule={config.schedule}: optimizer schedule_free_adamw averages its "
            "steps instead of decaying the rate; set optimizer.schedule=constant"
        )
    if config.moments_dtype is not None:
        raise ValueError(
            f"optimizer.moments_dtype={config.moments_dtype}: the state of schedule_free_adamw "
            "includes a copy of the parameters, which must stay float32; remove moments_dtype"
        )


@register(
    "schedule_free_adamw",
    obeys_is_good=True,
    decays_by_group=True,
    point=gradient_point,
    check=_check,
)
def schedule_free_adamw(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """Return schedule-free AdamW; its updates are those of the average.

    Raises:
        ValueError: parameters of less than 32 bits, when its state is created.
    """
    decay, b2 = decay_weights(config), config.beta2

    def init(params: Any) -> ScheduleFreeState:
        if any(x.dtype.itemsize < 4 for x in jax.tree.leaves(params)):
            raise ValueError(
                "optimizer.name=schedule_free_adamw averages parameters, and an average needs "
                "float32; set model.param_dtype=float32"
            )
        nu = jax.tree.map(jnp.zeros_like, params)
        zero = jnp.zeros((), jnp.float32)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), zero, nu, jax.tree.map(jnp.copy, params))

    def update(
        grads: Any,
        state: ScheduleFreeState,
        params: Any = None,
        *,
        is_good: Any = True,
        **_: Any,
    ) -> tuple[Any, ScheduleFreeState]:
        rate = schedule(state.num_updates)
        num_updates = optax.safe_increment(state.num_updates)
        square = optax.tree.update_moment_per_elem_norm(grads, state.nu, b2, 2)
        nu = tree_where(is_good, square, state.nu)
        unbiased = optax.tree.bias_correction(nu, b2, num_updates)
        steps = jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + config.eps), grads, unbiased)
        y = _between(config, params, state.z)
        steps, _ = decay.update(steps, decay.init(params), y)
        steps = scale_groups(config, steps)
        z = jax.tree.map(lambda z, step: z - rate * step, state.z, steps)
        z = tree_where(is_good, z, state.z)
        rate_sum = state.rate_sum + rate**2
        share = jnp.where(rate_sum > 0, rate**2 / rate_sum, 0)
        updates = _with_routers_at(
            jax.tree.map(lambda z, x: share * (z - x), z, params), jnp.zeros_like, params
        )
        num_updates, rate_sum = tree_where(
            is_good, (num_updates, rate_sum), (state.num_updates, state.rate_sum)
        )
        return updates, ScheduleFreeState(num_updates, rate_sum, nu, z)

    return optax.GradientTransformationExtraArgs(init, update)


def _between(config: OptimizerConfig, x: Any, z: Any) -> Any:
    b1 = config.beta1
    y = jax.tree.map(lambda x, z: b1 * x + (1 - b1) * z, x, z)
    return _with_routers_at(y, lambda x: x, x)


def _with_routers_at(tree: Any, value: Any, x: Any) -> Any:
    """Return a tree with `value(x)` for router biases, which experts' load moves, not gradients."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, x: value(x) if is_router_bias(path) else leaf, tree, x
    )
