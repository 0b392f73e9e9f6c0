"""Stochastic gradient descent with momentum and decoupled weight decay."""

import optax

from training.optimizers.config import Fraction, OptimizerConfig
from training.optimizers.parameters import decay_weights
from training.optimizers.registry import register


@register("sgd", moments=1, never_negative=(), decays_by_group=True, reads=())
def sgd(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    *,
    momentum: Fraction = 0.9,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Return SGD. momentum: decay of the sum of gradients; 0 keeps no state."""
    return optax.chain(
        optax.trace(momentum, nesterov) if momentum else optax.identity(),
        decay_weights(config),
        optax.scale_by_learning_rate(schedule),
    )
