"""Fingerprints of arrays, independent of the mesh, that reveal damage in storage.

The bits of each element are mixed with its index in the global array, and the results are summed
modulo 2^32. Mixing is one-to-one, so the change of any one element changes the sum. Two lanes with
different indices reveal swaps and several changes too.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.ring import pcast_varying

# Odd factors lose no bit in a product modulo 2^32; one per dim of the second lane.
_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D)


def mix_bits(bits: jax.Array) -> jax.Array:
    """Permute uint32 values. Source: finaliser of MurmurHash3 (public domain)."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of every element as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _add_both(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    return a[0] + b[0], a[1] + b[1]


def fingerprint(x: jax.Array) -> jax.Array:
    """Return the fingerprint of an array: two sums of mixed bits, uint32 (2,), replicated.

    Communication: an all-reduce of 8 bytes over the mesh axes of x.
    """
    return _sums(x, x.shape)


def _sums(x: jax.Array, shape: tuple[int, ...], start: jax.Array | None = None) -> jax.Array:
    """Return uint32 (2,), the share of a block in the fingerprint of an array of this shape.

    start: index of the first element of the block in the array; None: zeros.
    """
    bits, spec = _bits(x), jax.typeof(x).sharding.spec
    lanes, dims = [], range(x.ndim)
    for lane in range(2):
        position = jnp.zeros(x.shape, jnp.uint32, out_sharding=P(*spec))
        stride = 1
        for dim in reversed(range(x.ndim)):
            step = stride % 2**32 if lane == 0 else _ODD[dim]
            index = lax.broadcasted_iota(jnp.uint32, x.shape, dim, out_sharding=P(*spec))
            if start is not None:
                index += start[dim]
            position += index * np.uint32(step)
            stride *= shape[dim]
        lanes.append(mix_bits(bits ^ mix_bits(position + np.uint32(lane))))
    # One reduction of both lanes: XLA for CPU would materialise each lane for a separate one.
    zeros = (np.uint32(0), np.uint32(0))
    return jnp.stack(lax.reduce(tuple(lanes), zeros, _add_both, dims))


def device_fingerprints(tree: Any) -> jax.Array:
    """Return fingerprints of the blocks that each device holds: uint32 (devices, leaves, 2).

    Devices are in the order of `mesh.devices.flat`, and the result is replicated. Every device
    reads its own copy of a replicated array, so copies that differ have different fingerprints.
    Call it inside of jit.

    Communication: an all-gather of 8 bytes per device and leaf.
    """
    leaves = jax.tree.leaves(tree)
    specs = tuple(jax.typeof(x).sharding.spec for x in leaves)
    axes = jax.typeof(leaves[0]).sharding.mesh.axis_names
    island = jax.shard_map(
        partial(_block_fingerprints, axes=axes), in_specs=specs, out_specs=P(axes)
    )
    return jax.sharding.reshard(island(*leaves), P())


def _block_fingerprints(*blocks: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return uint32 (1, leaves, 2) of local blocks, varying over all axes."""
    found = []
    for block in blocks:
        found.append(_sums(pcast_varying(block, axes), block.shape))
    return jnp.stack(found)[None]


@jax.jit
def _fingerprints(leaves: list[jax.Array]) -> list[jax.Array]:
    return [fingerprint(x) for x in leaves]


_block_sums = jax.jit(_sums, static_argnums=1)


class RunningFingerprint:
    """The fingerprint of an array whose blocks become known one after another."""

    def __init__(self, shape: tuple[int, ...], sharding: Any):
        """Begin with no block. sharding: one device, which does the work."""
        self._shape, self._sharding, self._mesh = shape, sharding, sharding.mesh
        self._lanes = np.zeros(2, np.uint32)

    def add(self, start: tuple[int, ...], block: np.ndarray) -> None:
        """Add a block that begins at index `start`."""
        placed = jax.device_put(block, self._sharding)
        with jax.set_mesh(self._mesh):
            self._lanes += np.asarray(_block_sums(placed, self._shape, np.array(start, np.uint32)))

    @property
    def digits(self) -> str:
        """The 16 hexadecimal digits of the blocks so far."""
        return _digits(self._lanes)


def _digits(lanes: np.ndarray) -> str:
    return "".join(f"{int(lane):08x}" for lane in lanes)


def leaf_name(path: Any) -> str:
    """Return the dotted path of a leaf, such as `params.layers.mlp.down.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def fingerprints(tree: Any) -> dict[str, str]:
    """Return 16 hexadecimal digits for every array of a tree on one mesh, by dotted path."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True)
    with jax.set_mesh(leaves[0].sharding.mesh):
        found = jax.device_get(_fingerprints(list(leaves)))
    return {leaf_name(path): _digits(lanes) for path, lanes in zip(paths, found, strict=True)}
