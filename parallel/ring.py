"""Collectives and matmuls that move data around a ring of devices, and their plain twins.

Every function here runs inside `jax.shard_map` on local blocks; `axis_name` is the ring, n its
size, s this device's index on it. First the verbs: `async_gather*` and `async_scatter*` hop by hop,
`all_gather` and `reduce_scatter` in one collective. Then matmuls that travel, onto rows (dim -2,
tokens) or onto features (dim -1), each as `overlap="none"` (one collective, one matmul) or
`overlap="ring"` (n - 1 hops, each under one of n partial matmuls). Every hop is a `ppermute` to a
neighbour; the derivative is the same ring backwards. It refuses to know what the numbers mean: no
model word in here. The names and list orders of the async verbs are those of the published
reference `xlstm_jax.distributed.tensor_parallel`.

Letters: R rows, D in features, F out features; n the size of the ring.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

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


def _shift(x: Any, axis_name: str, up: bool = True) -> Any:
    """Every leaf of x to the next device: j to j + 1 if `up`, else to j - 1."""
    n = lax.axis_size(axis_name)
    pairs = [(j, (j + (1 if up else -1)) % n) for j in range(n)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis_name, pairs), x)


def async_gather(x: Any, axis_name: str, shift_up: bool = True) -> list[Any]:
    """All-gathers an array or a pytree by a one-way ring: a list of n shards, x itself first.

    shift_up: device j sends to j + 1, and entry i at device s is the shard of s - i; otherwise the
    other way round. Communication: n - 1 hops of x, each waiting for the one before only.
    """
    shards = [x]
    for _ in range(lax.axis_size(axis_name) - 1):
        shards.append(_shift(shards[-1], axis_name, shift_up))
    return shards


def async_gather_bidirectional(x: Any, axis_name: str, shift_up: bool = True) -> list[Any]:
    """`async_gather`, entry for entry, with half of the hops each way.

    Communication: n - 1 blocks as before, but the longest chain is n // 2 hops.
    """
    n = lax.axis_size(axis_name)
    forth, back = [x], [x]
    for _ in range(n // 2):
        forth.append(_shift(forth[-1], axis_name, shift_up))
    for _ in range((n - 1) // 2):
        back.append(_shift(back[-1], axis_name, not shift_up))
    return forth + back[:0:-1]


def async_gather_split(x: Any, axis_name: str) -> list[Any]:
    """All-gathers with the features of every leaf (last dim, even) split between two rings.

    The list has 2 n - 1 entries, as documented: x itself, whole; then for i in 1 .. n - 1 the lower
    half of the shard of s - i; then for i in 1 .. n - 1 the upper half of the shard of s + i. (The
    reference's source returns 2 n, its own shard in halves too.)
    Communication: n - 1 hops of half of x each way at once.
    """
    lower, upper = (jax.tree.map(lambda leaf, h=h: _half(leaf, h), x) for h in (0, 1))
    ups = async_gather(lower, axis_name, shift_up=True)
    downs = async_gather(upper, axis_name, shift_up=False)
    return [x, *ups[1:], *downs[1:]]


def async_scatter(xs: Sequence[Any], axis_name: str, shift_up: bool = True) -> Any:
    """Reduce-scatters by a one-way ring: partial sums travel and are added to on the way.

    xs: n arrays or pytrees; entry k at device s is its part of the sum that ends at device
    s - 1 - k (shift_up) or s + 1 + k. Returns the sum that ends here. Communication: n - 1 hops.
    Raises: ValueError if there are not n entries.
    """
    _check_shards(xs, axis_name)
    total = xs[0]
    for x in xs[1:]:
        total = jax.tree.map(jnp.add, _shift(total, axis_name, shift_up), x)
    return total


def async_scatter_split(xs: Sequence[Any], axis_name: str) -> Any:
    """`async_scatter` with the lower half of the features going up and the upper half going down.

    For entry k the two halves belong to different owners: s - 1 - k and s + 1 + k. The halves that
    end here are concatenated. Communication: n - 1 hops of half an entry each way at once.
    """
    _check_shards(xs, axis_name)
    halves = [[jax.tree.map(lambda leaf, h=h: _half(leaf, h), x) for x in xs] for h in (0, 1)]
    lower = async_scatter(halves[0], axis_name, shift_up=True)
    upper = async_scatter(halves[1], axis_name, shift_up=False)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=-1), lower, upper)


def _half(x: jax.Array, which: int) -> jax.Array:
    if x.shape[-1] % 2:
        raise ValueError(f"features of {x.shape} cannot be split in two: use an even width")
    return jnp.split(x, 2, axis=-1)[which]


def _check_shards(xs: Sequence[Any], axis_name: str) -> None:
    n = lax.axis_size(axis_name)
    if len(xs) != n:
        raise ValueError(
            f"Number of shards needs to match axis size: got {len(xs)} for {axis_name} of size {n}"
        )


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
        following = _shift(x, axis_name) if hop < n - 1 else x
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
        following = _shift(x, axis_name) if hop < n - 1 else x
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
        y = _shift(y, axis_name) + chunk(k)
    return y
