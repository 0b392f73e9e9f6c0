"""The order of collectives on simulated devices, by dependencies between arrays.

XLA:CPU starts the collectives of a program in one order on all devices, but does not wait for a
loop that it has started. A later collective that needs nothing from the loop then runs beside those
of the loop. jax gives all collectives of a shard_map the same channel, so XLA may take the two for
one: it mixes their data, or the process aborts. Or they occupy all threads, and the program never
ends (seen on jax 0.10.2 with fsdp 8 and LoRA, November 2026). So whatever follows a loop must
depend on it. `lax.optimization_barrier` is no help: XLA:CPU removes it before it plans
the execution. On accelerators, whose collectives are ordered, nothing is changed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def after(values: Any, others: Any, mesh: Mesh) -> Any:
    """Return a pytree of arrays as it is, computed after another pytree on every device of a mesh.

    Communication: none.
    """
    if mesh.devices.flat[0].platform != "cpu" or mesh.size == 1:
        return values
    leaves, structure = jax.tree.flatten(values)
    before = jax.tree.leaves(lax.stop_gradient(others))
    specs = [_spec(x) for x in leaves]
    ordered = jax.shard_map(
        _wait,
        mesh=mesh,
        in_specs=(specs, [_spec(x) for x in before]),
        out_specs=specs,
        check_vma=False,  # the check does not see that replicas of a value stay equal
    )(leaves, before)
    return jax.tree.unflatten(structure, ordered)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def in_order(first: Any, second: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Return two pytrees as they are. What uses the second comes after the first is computed.

    In the backward pass the gradient of the first comes after that of the second.
    """
    return first, after(second, first, mesh)


def _forward(first: Any, second: Any, mesh: Mesh) -> tuple[Any, None]:
    return in_order(first, second, mesh), None


def _backward(mesh: Mesh, _: None, gradients: Any) -> tuple[Any, Any]:
    first, second = gradients
    return after(first, second, mesh), second


in_order.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def gradient_after(value: jax.Array, others: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """Return a value as it is; its gradient comes after the value and other arrays are computed.

    others: floating arrays, which have no gradient here.
    """
    return value


def _value(value: jax.Array, others: Sequence[jax.Array], mesh: Mesh) -> tuple[jax.Array, Any]:
    return gradient_after(value, others, mesh), (value, others)


def _gradient(mesh: Mesh, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, Any]:
    return after(gradient, residuals, mesh), jax.tree.map(jnp.zeros_like, residuals[1])


gradient_after.defvjp(_value, _gradient)


def _spec(x: jax.Array) -> P:
    return jax.typeof(x).sharding.spec


def _wait(values: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    """Return blocks of arrays, with a condition on other blocks that never holds."""
    never = jnp.zeros((), bool)
    for x in others:
        if not x.size:
            continue
        one = x.ravel()[:1]
        one = one.astype(jnp.uint8) if one.dtype == bool else one
        bits = lax.bitcast_convert_type(one, jnp.dtype(f"uint{8 * one.dtype.itemsize}"))
        never |= (lax.population_count(bits) > 64)[0]  # XLA does not know that this is false
    return [jnp.where(never, jnp.zeros((), x.dtype), x) for x in values]
