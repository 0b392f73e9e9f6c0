"""Adafactor: the second moment of a matrix as sums of its rows and columns (arXiv 1804.04235)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import PositiveFloat

from training.optimizers.config import OptimizerConfig
from training.optimizers.parameters import decay_weights, decays
from training.optimizers.registry import register


@register(
    "adafactor",
    moments=0,
    never_negative=("v_row", "v_col", "v"),
    decays_by_group=True,
    reads=(),
    width_powers=(1, 1),
)
def adafactor(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    *,
    decay_rate: PositiveFloat = 0.8,
    clip_rms: PositiveFloat = 1.0,
) -> optax.GradientTransformation:
    """Return Adafactor without a first moment and with absolute learning rates.

    decay_rate: the second moment decays by 1 - step ** -decay_rate. clip_rms: largest root mean
    square of the update of a matrix or vector, before the learning rate.
    """
    factored = optax.scale_by_factored_rms(decay_rate=decay_rate)
    whole = optax.scale_by_factored_rms(factored=False, decay_rate=decay_rate)
    return optax.chain(
        optax.partition({True: factored, False: whole}, _are_factored),
        _clip_by_rms(clip_rms),
        decay_weights(config),
        optax.scale_by_learning_rate(schedule),
    )


def _clip_by_rms(limit: float) -> optax.GradientTransformation:
    """Return a transformation that scales down updates with a larger root mean square.

    Every layer and every expert is scaled by itself.

    `optax.clip_by_block_rms` does it for whole arrays, which hold all layers and experts.
    """

    def update(updates: Any, params: Any) -> Any:
        def clip(x: jax.Array, is_matrix: bool) -> jax.Array:
            dims = (-2, -1) if is_matrix else (-1,)
            square = jnp.mean(jnp.square(x.astype(jnp.float32)), dims, keepdims=True)
            return (x / jnp.maximum(1.0, jnp.sqrt(square) / limit)).astype(x.dtype)

        return jax.tree.map(clip, updates, decays(params))

    return optax.stateless(update)


def _are_factored(params: Any) -> Any:
    """Return a tree of bools: whether the second moment of a parameter may be factored.

    optax factors the two largest dims of an array, if both have 128 or more. They must be the rows
    and columns of a matrix, and not stand for layers or experts.
    """

    def is_factored(x: Any, is_matrix: bool) -> bool:
        return is_matrix and max(x.shape[:-2], default=0) < min(x.shape[-2:])

    return jax.tree.map(is_factored, params, decays(params))
