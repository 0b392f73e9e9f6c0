"""Moments that are stored in bfloat16 or 8 bits and rounded stochastically.

bfloat16 has 8 bits of precision: a moment that changes by less than 0.2 % per step would not change
at all if it were rounded to the nearest value.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from training.fingerprint import mix_bits
from training.optimizers.stochastic_rounding import (
    EightBits,
    from_eight_bits,
    to_bfloat16,
    to_eight_bits,
)


class RoundedState(NamedTuple):
    """The number of updates, and the state of an optimizer with its moments in fewer bits."""

    updates: jax.Array
    inner: Any


def with_rounded_moments(
    inner: optax.GradientTransformationExtraArgs,
    dtype: Literal["bfloat16", "int8"],
    never_negative: Collection[str] = (),
    exact: Collection[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Return the same optimizer with arrays of its state in fewer bits, and scalars as they are.

    An update computes in float32 and rounds afterwards. The choice between up and down is a
    function of the number of the update and of the place in the array: equal on every mesh and
    after a resume. `inner` must keep its state where `is_good` is false.

    never_negative: fields of the state whose values are never negative.
    exact: fields of the state that are stored as they are.
    """

    def stored(state: Any, updates: jax.Array) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        rounded = []
        for number, (path, x) in enumerate(leaves):
            seed = mix_bits(updates * jnp.uint32(len(leaves)) + jnp.uint32(number))
            names = {getattr(key, "name", None) for key in path}
            if not _is_moment(x) or names & {*exact}:
                rounded.append(x)
            elif dtype == "bfloat16":
                rounded.append(to_bfloat16(x, seed))
            else:
                is_signed = not names & {*never_negative}
                rounded.append(to_eight_bits(x, seed, is_signed=is_signed))
        return jax.tree.unflatten(structure, rounded)

    def init(params: Any) -> RoundedState:
        updates = jnp.zeros((), jnp.uint32)
        return RoundedState(updates, stored(inner.init(params), updates))

    def update(
        grads: Any, state: RoundedState, params: Any = None, *, is_good: Any = True, **options: Any
    ) -> tuple[Any, RoundedState]:
        before = jax.tree.map(_loaded, state.inner, is_leaf=lambda x: isinstance(x, EightBits))
        # optax computes in the dtype of gradients and parameters, which may be bfloat16.
        grads, params = jax.tree.map(_in_float32, (grads, params))
        changes, after = inner.update(grads, before, params, is_good=is_good, **options)
        made = state.updates + jnp.asarray(is_good, jnp.uint32)
        return changes, RoundedState(made, stored(after, state.updates))

    return optax.GradientTransformationExtraArgs(init, update)


def _loaded(x: Any) -> jax.Array:
    if isinstance(x, EightBits):
        return from_eight_bits(x)
    return x.astype(jnp.float32) if _is_moment(x) else x


def _in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _is_moment(x: jax.Array) -> bool:
    return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)
