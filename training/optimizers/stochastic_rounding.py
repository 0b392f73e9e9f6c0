"""Storing values in fewer bits, rounded up or down at random so that their mean is exact.

A sum that changes by less than half the distance of two storable values would not change at all if
it were rounded to the nearest one (arXiv 2010.06192). The choice between up and down is a function
of a seed and of the place in the array, so it is the same on every mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from training.fingerprint import mix_bits

_PER_OCTAVE = 8
_SNAP = 1e-4
"""Distance from a level, in levels, up to which a value counts as this level."""


class EightBits(NamedTuple):
    """An array in 8 bits per value: a sign and a logarithm, relative to the largest of the row.

    The magnitude of a value is 0, or that of the largest times 2^(-k/8) with an integer k: 9 %
    apart. int8 reaches down to 2^-15.75 of the largest; uint8, for values that are never negative,
    to 2^-31.75.

    codes: int8 or uint8, (..., D).
    largest: float32, (...): largest magnitude along the last dimension.
    """

    codes: jax.Array
    largest: jax.Array


def to_bfloat16(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Return float32 values as bfloat16, each rounded up or down so that its mean is exact.

    Values that bfloat16 can hold stay as they are, and so do infinities and NaN.

    seed: uint32 scalar.
    """
    noise = _random_bits(x, seed) & 0xFFFF
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + noise
    rounded = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def to_eight_bits(x: jax.Array, seed: jax.Array, *, is_signed: bool) -> EightBits:
    """Return float32 values in 8 bits, each rounded up or down so that its mean is exact.

    Values that 8 bits can hold stay as they are. Below the smallest magnitude the mean is not
    exact: signed values become 0, and unsigned ones the smallest magnitude, because optimizers
    divide by them. A row with an infinity is stored as zeros, and one with a NaN as NaN and zeros.

    Communication: an all-reduce of 4 bytes per row over the axes that shard the last dimension.

    seed: uint32 scalar. x: (..., D).
    """
    count, dtype = (127, jnp.int8) if is_signed else (255, jnp.uint8)
    largest = jnp.max(jnp.abs(x), axis=-1).astype(jnp.float32)
    share = jnp.abs(x) / jnp.where(largest > 0, largest, 1.0)[..., None]
    place = count + _PER_OCTAVE * jnp.log2(share)
    lower = jnp.floor(place + _SNAP)
    fraction = (share * jnp.exp2((count - lower) / _PER_OCTAVE) - 1) / (2 ** (1 / _PER_OCTAVE) - 1)
    uniform = (_random_bits(x, seed) >> 8).astype(jnp.float32) * 2.0**-24
    code = lower + ((place - lower > _SNAP) & (uniform < fraction))
    smallest = jnp.where(lower < 1, 0.0, code) if is_signed else jnp.maximum(code, 1.0)
    code = jnp.where(share > 0, smallest, 0.0)
    return EightBits((jnp.sign(x) * code).astype(dtype), largest)


def from_eight_bits(stored: EightBits) -> jax.Array:
    """Return the values of an array in 8 bits as float32."""
    code = stored.codes.astype(jnp.float32)
    count = 127 if stored.codes.dtype == jnp.int8 else 255
    size = stored.largest[..., None] * jnp.exp2((jnp.abs(code) - count) / _PER_OCTAVE)
    return jnp.where(code == 0, 0.0, jnp.sign(code) * size)


def _random_bits(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Return 32 bits for every entry of an array, from the seed and the place of the entry."""
    return mix_bits(_places(x) ^ seed)


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
