"""Rings of simulated devices for tests, and what programs on them consist of."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def ring(size: int) -> Mesh:
    """The first devices of this process in a ring."""
    return Mesh(np.array(jax.devices()[:size]), ("ring",), axis_types=(AxisType.Explicit,))


def place(mesh: Mesh, spec: P, array: np.ndarray) -> jax.Array:
    """The array laid out over the ring."""
    return jax.device_put(array, NamedSharding(mesh, spec))


def per_device(mesh: Mesh, body: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """Runs `body` on row s of every array on device s; leaf by leaf, row s is device s's answer."""
    with jax.set_mesh(mesh):
        island, placed = _island(mesh, body, arrays)
        return jax.tree.map(np.asarray, jax.jit(island)(*placed))


def program_per_device(mesh: Mesh, body: Callable[..., Any], *arrays: np.ndarray) -> Any:
    """The jaxpr of what `per_device` would run on each device."""
    with jax.set_mesh(mesh):
        island, placed = _island(mesh, body, arrays)
        (equation,) = jax.make_jaxpr(island)(*placed).jaxpr.eqns
        return equation.params["jaxpr"]


def _island(mesh: Mesh, body: Callable[..., Any], arrays: Sequence[np.ndarray]) -> tuple[Any, list]:
    def local(*rows: jax.Array) -> Any:
        return jax.tree.map(lambda y: y[None], body(*(row[0] for row in rows)))

    specs = tuple(P("ring") for _ in arrays)
    island = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ring"))
    return island, [place(mesh, P("ring"), array) for array in arrays]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a program and of the programs inside it, as often as it is called."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def collectives(compiled_text: str) -> Counter[str]:
    """Return the number of occurrences of each collective in a compiled program."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return Counter(re.findall(rf" ({names})(?:-start)?\(", compiled_text))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def primitives(function: Callable[..., Any], *args: Any) -> Counter[str]:
    """How often each primitive occurs in the traced program."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return Counter(equation.primitive.name for equation in equations(jaxpr))
