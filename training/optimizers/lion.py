"""Lion: steps by the sign of a momentum (arXiv 2302.06675)."""

import optax

from training.optimizers.config import OptimizerConfig
from training.optimizers.parameters import decay_weights
from training.optimizers.registry import register


@register(
    "lion",
    moments=1,
    never_negative=(),
    decays_by_group=True,
    reads=("beta1", "beta2"),
    width_powers=(1, 1),
)
def lion(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return Lion with decoupled weight decay; `beta1` mixes the step, `beta2` the momentum."""
    return optax.chain(
        optax.scale_by_lion(config.beta1, config.beta2),
        decay_weights(config),
        optax.scale_by_learning_rate(schedule),
    )
