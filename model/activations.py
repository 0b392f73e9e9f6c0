"""Activation functions of gated MLPs by name: elementwise functions of gate and up.

To add an activation, register a function: its name becomes a value of `model.hidden_act`.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from registry import Registry

GatedActivation = Callable[..., jax.Array]
"""(gate, up) -> the input of the down projection, in their dtype; with `limit` if it takes one."""


class _Entry(NamedTuple):
    function: GatedActivation
    takes_limit: bool


ACTIVATIONS: Registry[_Entry] = Registry("activation")


def register_activation(
    name: str, *, takes_limit: bool = False
) -> Callable[[GatedActivation], GatedActivation]:
    """Return a decorator that registers a function as the activation `name`.

    takes_limit: the function has an argument `limit`, the value of `model.swiglu_limit`.
    Raises: ValueError if the name is taken.
    """

    def register(function: GatedActivation) -> GatedActivation:
        ACTIVATIONS[name] = _Entry(function, takes_limit)
        return function

    return register


@lru_cache
def gated_activation(name: str, limit: float | None) -> GatedActivation:
    """Return the function of (gate, up) of this name, the same object for equal arguments.

    Raises: ValueError for an unknown name.
    """
    entry = ACTIVATIONS[name]
    return partial(entry.function, limit=limit) if entry.takes_limit else entry.function


@register_activation("silu")
def gated_silu(gate_BLF: jax.Array, up_BLF: jax.Array) -> jax.Array:
    """Return silu(gate) * up. Source: SwiGLU, arXiv 2002.05202."""
    return jax.nn.silu(gate_BLF) * up_BLF


@register_activation("gelu_tanh")
def gated_gelu(gate_BLF: jax.Array, up_BLF: jax.Array) -> jax.Array:
    """Return gelu(gate) * up with the tanh approximation. Source: GEGLU, arXiv 2002.05202."""
    return jax.nn.gelu(gate_BLF, approximate=True) * up_BLF


@register_activation("clamped_swiglu", takes_limit=True)
def clamped_swiglu(gate_BLF: jax.Array, up_BLF: jax.Array, *, limit: float) -> jax.Array:
    """Return (up + 1) * gate * sigmoid(1.702 gate), with gate and up clamped.

    gate is at most `limit`, and up lies between -limit and limit. Source: the model card of gpt-oss
    (arXiv 2508.10925) and its released code.
    """
    gate_BLF = jnp.minimum(gate_BLF, limit)
    up_BLF = jnp.clip(up_BLF, -limit, limit)
    return (up_BLF + 1) * gate_BLF * jax.nn.sigmoid(1.702 * gate_BLF)
