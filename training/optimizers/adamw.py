"""AdamW (arXiv 1711.05101)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from training.optimizers.config import OptimizerConfig
from training.optimizers.parameters import decay_weights
from training.optimizers.registry import keep_if_bad, register, tree_where


@register(
    "adamw",
    obeys_is_good=True,
    never_negative=("nu",),
    decays_by_group=True,
    width_powers=(1, 1),
)
def adamw(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW with decoupled weight decay of matrices."""
    return optax.chain(
        _scale_by_adam(config),
        decay_weights(config),
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
