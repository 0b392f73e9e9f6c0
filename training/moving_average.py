"""Exponential moving average of the parameters."""

from typing import Any

import jax
import jax.numpy as jnp


def init_ema(params: Any) -> Any:
    """Return the moving average before the first step.

    It is float32: bfloat16 would round its small steps away.
    """
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def update_ema(ema: Any, params: Any, decay: float) -> Any:
    """Return the moving average after an update that led to `params`."""
    return jax.tree.map(
        lambda mean, x: mean + (1 - decay) * (x.astype(jnp.float32) - mean), ema, params
    )
