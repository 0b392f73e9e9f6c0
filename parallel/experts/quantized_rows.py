"""Rows that travel to their experts with one byte per number, and return in their own dtype.

Every row has a power of two as its scale, so the byte and the scale are exact in bfloat16 and in
float32. What an expert reads therefore does not depend on the mesh. DeepSeek-V3 (arXiv 2412.19437,
section 3.3) sends tokens to experts in float8 and combines their results in bfloat16; there, 128
numbers share a scale. Scales that are powers of two: OCP Microscaling Formats 1.0 (2023).

Letters: T tokens, D features.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from parallel.experts.names import RowDtype

_LARGEST: dict[RowDtype, float] = {"float8_e4m3fn": 448.0, "int8": 127.0}


def quantize_rows(
    x_TD: jax.Array, dtype: RowDtype, axis_name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the bytes of all numbers, uint8 `T D`, and the scales of the rows, float32 `T`.

    A scale is the smallest power of two with which `dtype` holds the largest number of the row.
    axis_name: mesh axis that splits D, inside `jax.shard_map`; None: D is whole. Communication:
    with `axis_name`, an all-reduce of `T`.
    """
    wide = x_TD.astype(jnp.float32)
    largest_T = jnp.max(jnp.abs(wide), axis=-1)
    if axis_name is not None:
        largest_T = lax.pmax(largest_T, axis_name)
    # Every number is a fraction of at least 1/2 and below 1, times a power of two.
    (fraction_T, power_T), (fraction, power) = jnp.frexp(largest_T), math.frexp(_LARGEST[dtype])
    # Smaller powers than 2^-126 are zero on most chips.
    power_T = jnp.maximum(power_T - power + (fraction_T > fraction), -126)
    scale_T = jnp.ldexp(jnp.float32(1), power_T)
    scaled = wide / scale_T[:, None]
    values = (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype)
    # Not every chip has float8: bytes are moved as they are.
    return lax.bitcast_convert_type(values, jnp.uint8), scale_T


def dequantize_rows(
    values_TD: jax.Array, scale_T: jax.Array, dtype: RowDtype, to: jax.typing.DTypeLike
) -> jax.Array:
    """Return the rows that `quantize_rows` rounded, in the dtype `to`, without another rounding."""
    wide = lax.bitcast_convert_type(values_TD, jnp.dtype(dtype)).astype(jnp.float32)
    return (wide * scale_T[:, None]).astype(to)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def send_quantized(
    x_TD: jax.Array,
    route: Any,
    send: Callable[[Any, jax.Array], Any],
    send_back: Callable[[Any, Any], jax.Array],
    dtype: RowDtype,
    axis_name: str | None,
) -> Any:
    """Return `send(route, x)` with x rounded to a byte per number.

    The gradient returns through `send_back` in its own dtype, as if nothing had been rounded.

    send: copies rows, or one number per row, to other places; returns a pytree of blocks of rows.
    send_back: its transpose. route: arrays that both need. axis_name: as in `quantize_rows`.
    """
    values_TD, scale_T = quantize_rows(x_TD, dtype, axis_name)
    back = partial(dequantize_rows, dtype=dtype, to=x_TD.dtype)
    return jax.tree.map(back, send(route, values_TD), send(route, scale_T))


def _forward(x_TD: jax.Array, route: Any, *static: Any) -> tuple[Any, Any]:
    return send_quantized(x_TD, route, *static), route


def _backward(
    send: Any, send_back: Any, dtype: Any, axis_name: Any, route: Any, cotangent: Any
) -> tuple[jax.Array, None]:
    return send_back(route, cotangent), None


send_quantized.defvjp(_forward, _backward)
