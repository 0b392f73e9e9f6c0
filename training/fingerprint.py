"""A number for the content of an array: equal arrays have equal ones, on every mesh.

Storage does not always notice a flipped bit. What was saved is proved to be what was restored: each
element's bits are mixed with its place in the whole array, and added up modulo 2^32. Mixing is one
to one, so a change of any one element always shows; two lanes with different places make swaps and
several changes show too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

# Odd, so that multiplying loses no bit; one for every dim of the second lane.
_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D)


def _mix(bits: jax.Array) -> jax.Array:
    """One to one on uint32. Source: finaliser of MurmurHash3 (public domain)."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _bits(x: jax.Array) -> jax.Array:
    """The elements as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _add_both(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    return a[0] + b[0], a[1] + b[1]


def fingerprint(x: jax.Array) -> jax.Array:
    """uint32 (2,), replicated. Communication: an all-reduce of two numbers over the axes of x."""
    bits, spec = _bits(x), jax.typeof(x).sharding.spec
    lanes, dims = [], range(x.ndim)
    for lane in range(2):
        place = jnp.zeros(x.shape, jnp.uint32, out_sharding=P(*spec))
        stride = 1
        for dim in reversed(range(x.ndim)):
            step = stride % 2**32 if lane == 0 else _ODD[dim]
            index = lax.broadcasted_iota(jnp.uint32, x.shape, dim, out_sharding=P(*spec))
            place += index * np.uint32(step)
            stride *= x.shape[dim]
        lanes.append(_mix(bits ^ _mix(place + np.uint32(lane))))
    # One pass over both: XLA for CPU would write each lane to memory for a sum of its own.
    zeros = (np.uint32(0), np.uint32(0))
    return jnp.stack(lax.reduce(tuple(lanes), zeros, _add_both, dims))


@jax.jit
def _fingerprints(leaves: list[jax.Array]) -> list[jax.Array]:
    return [fingerprint(x) for x in leaves]


def leaf_name(path: Any) -> str:
    """`params.layers.mlp.down.kernel` of a path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def fingerprints(tree: Any) -> dict[str, str]:
    """Of every array of a tree (all on one mesh), by its dotted path: 16 hexadecimal digits."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True)
    with jax.set_mesh(leaves[0].sharding.mesh):
        found = jax.device_get(_fingerprints(list(leaves)))
    return {
        leaf_name(path): "".join(f"{int(lane):08x}" for lane in lanes)
        for path, lanes in zip(paths, found, strict=True)
    }
