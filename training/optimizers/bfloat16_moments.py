"""Moments that are stored in bfloat16 and rounded stochastically.

bfloat16 has 8 bits of precision: a moment that changes by less than 0.2 % per step would not change
at all if it were rounded to the nearest value. It is rounded up or down instead, with
probabilities that make its mean exact (arXiv 2010.06192).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


class RoundedState(NamedTuple):
    """The number of updates, and the state of an optimizer with moments in bfloat16."""

    updates: jax.Array
    inner: Any


def with_bfloat16_moments(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return the same optimizer with the arrays of its state in bfloat16, and scalars as they are.

    An update computes in float32 and rounds afterwards. The choice between up and down is a
    function of the number of the update and of the place in the array: equal on every mesh and
    after a resume. `inner` must keep its state where `is_good` is false.
    """

    def init(params: Any) -> RoundedState:
        state = jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if _is_moment(x) else x, inner.init(params)
        )
        return RoundedState(jnp.zeros((), jnp.uint32), state)

    def update(
        grads: Any, state: RoundedState, params: Any = None, *, is_good: Any = True, **options: Any
    ) -> tuple[Any, RoundedState]:
        before = jax.tree.map(lambda x: x.astype(jnp.float32) if _is_moment(x) else x, state.inner)
        # optax computes in the dtype of gradients and parameters, which may be bfloat16.
        grads, params = jax.tree.map(_in_float32, (grads, params))
        updates, after = inner.update(grads, before, params, is_good=is_good, **options)
        leaves, structure = jax.tree.flatten(after)
        for number, x in enumerate(leaves):
            if _is_moment(x):
                seed = _mixed(state.updates * jnp.uint32(len(leaves)) + jnp.uint32(number))
                leaves[number] = stochastically_rounded(x, seed)
        made = state.updates + jnp.asarray(is_good, jnp.uint32)
        return updates, RoundedState(made, jax.tree.unflatten(structure, leaves))

    return optax.GradientTransformationExtraArgs(init, update)


def stochastically_rounded(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Return float32 values as bfloat16, each rounded up or down so that its mean is exact.

    Values that bfloat16 can hold stay as they are, and so do infinities and NaN.

    seed: uint32 scalar.
    """
    noise = _mixed(_places(x) ^ seed) & 0xFFFF
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + noise
    rounded = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _is_moment(x: jax.Array) -> bool:
    return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def _places(x: jax.Array) -> jax.Array:
    """Return the number of every entry of an array, modulo 2^32, sharded as the array."""
    sharding = jax.typeof(x).sharding
    total = jnp.zeros((), jnp.uint32)
    for dim in range(x.ndim):
        stride = int(np.prod(x.shape[dim + 1 :], dtype=np.uint64)) % 2**32
        index = lax.broadcasted_iota(
            jnp.uint32, x.shape, dim, out_sharding=None if sharding.mesh.empty else sharding
        )
        total = total + index * jnp.uint32(stride)
    return total


def _mixed(x: jax.Array) -> jax.Array:
    """Return a hash of 32 bits: the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
