"""Matmuls that move data around a ring of devices while they multiply, and their plain twins.

Every function here runs inside `jax.shard_map` on local blocks; `axis_name` is the ring, n its
size, s this device's index on it. Two families, each onto rows (dim -2, tokens) or onto features
(dim -1), each as `overlap="none"` (one collective, one matmul) or `overlap="ring"` (n - 1 hops,
each under one of n partial matmuls). Every hop is a `ppermute` to the next device; the derivative
is the same ring backwards. It refuses to know what the numbers mean: no model word in here.

Letters: R rows, D in features, F out features; n the size of the ring.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

Overlap = Literal["none", "ring"]
"""How communication of a linear is hidden under its own matmuls."""


def _check_overlap(overlap: str) -> None:
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap {overlap!r}: use {', '.join(get_args(Overlap))}")


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x typed as differing along these manual axes; no data moves, the derivative is an all-sum."""
    missing = tuple(name for name in axes if name not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """Blocks of x along `dim` from all devices of these axes, in order.

    Axes of size one are left out: XLA:CPU would run a collective even over a single device.
    """
    names = (axes,) if isinstance(axes, str) else axes
    larger = tuple(name for name in names if lax.axis_size(name) > 1)
    if larger:
        x = lax.all_gather(x, larger, axis=dim % x.ndim, tiled=True)
    return vary(x, names)


def reduce_scatter(x: jax.Array, axis_name: str, dim: int) -> jax.Array:
    """The sum of x over the axis, each device keeping its block along `dim`."""
    if lax.axis_size(axis_name) == 1:
        return x
    return lax.psum_scatter(x, axis_name, scatter_dimension=dim % x.ndim, tiled=True)


def _shift_up(x: jax.Array, axis_name: str) -> jax.Array:
    """Device j's block goes to device j + 1."""
    n = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(j, (j + 1) % n) for j in range(n)])


def _block(x: jax.Array, index: jax.Array, size: int, dim: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis=dim)


def gather_matmul(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    *,
    axis_name: str,
    dim: Literal[-2, -1],
    overlap: Overlap = "none",
    precision: lax.PrecisionLike = None,
) -> tuple[jax.Array, ...]:
    """All-gathers x over the ring and multiplies it with every kernel; one gather serves all.

    dim=-2: x `... R/n D`, kernel `D F/n` -> `... R F/n`, rows in natural order.
    dim=-1: x `... R D/n`, kernel `D F/n` -> `... R F/n`, the sum over k of x_k @ kernel[rows k],
    added in float32.
    Communication: (n - 1) blocks of x per device, by one all-gather or n - 1 hops.
    """
    _check_overlap(overlap)
    n = lax.axis_size(axis_name)
    if overlap == "none" or n == 1:
        whole = all_gather(x, axis_name, dim)
        return tuple(jnp.matmul(whole, w, precision=precision) for w in kernels)
    step = _gather_rows if dim == -2 else _gather_features
    return step(x, kernels, axis_name, precision)


def _gather_rows(
    x: jax.Array, kernels: Sequence[jax.Array], axis_name: str, precision: lax.PrecisionLike
) -> tuple[jax.Array, ...]:
    n, s = lax.axis_size(axis_name), lax.axis_index(axis_name)
    rows = x.shape[-2]
    outs: list[jax.Array | None] = [None] * len(kernels)
    for hop in range(n):
        following = _shift_up(x, axis_name) if hop < n - 1 else x
        start = (s - hop) % n * rows
        for index, w in enumerate(kernels):
            y = jnp.matmul(x, w, precision=precision)
            out = outs[index]
            if out is None:
                out = jnp.tile(jnp.zeros_like(y), (*(1,) * (y.ndim - 2), n, 1))
            outs[index] = lax.dynamic_update_slice_in_dim(out, y, start, axis=y.ndim - 2)
        x = following
    return tuple(out for out in outs if out is not None)


def _gather_features(
    x: jax.Array, kernels: Sequence[jax.Array], axis_name: str, precision: lax.PrecisionLike
) -> tuple[jax.Array, ...]:
    n, s = lax.axis_size(axis_name), lax.axis_index(axis_name)
    features = x.shape[-1]
    sums: list[jax.Array | None] = [None] * len(kernels)
    for hop in range(n):
        following = _shift_up(x, axis_name) if hop < n - 1 else x
        for index, w in enumerate(kernels):
            part = jnp.matmul(
                x,
                _block(w, (s - hop) % n, features, 0),
                precision=precision,
                preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
            )
            total = sums[index]
            sums[index] = part if total is None else total + part
        x = following
    return tuple(total.astype(x.dtype) for total in sums if total is not None)


def matmul_scatter(
    x: jax.Array,
    kernel: jax.Array,
    *,
    axis_name: str,
    dim: Literal[-2, -1],
    overlap: Overlap = "none",
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Multiplies and reduce-scatters the product over the ring.

    dim=-2: x `... R F/n`, kernel `F/n D` -> `... R/n D`; dim=-1: -> `... R D/n`.
    Communication: (n - 1) blocks of the result per device, by one reduce-scatter or n - 1 hops.
    """
    _check_overlap(overlap)
    n = lax.axis_size(axis_name)
    if overlap == "none" or n == 1:
        return reduce_scatter(jnp.matmul(x, kernel, precision=precision), axis_name, dim)
    s = lax.axis_index(axis_name)
    size = (x.shape[-2] if dim == -2 else kernel.shape[-1]) // n

    def chunk(k: int) -> jax.Array:
        # What is added at device s in step k still makes n - 1 - k hops: it belongs to s - 1 - k.
        owner = (s - 1 - k) % n
        if dim == -2:
            return jnp.matmul(_block(x, owner, size, x.ndim - 2), kernel, precision=precision)
        return jnp.matmul(x, _block(kernel, owner, size, 1), precision=precision)

    y = chunk(0)
    for k in range(1, n):
        y = _shift_up(y, axis_name) + chunk(k)
    return y
