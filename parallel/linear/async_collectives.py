"""Permutes between devices, and gathers and reduce-scatters as lists of hops around a ring.

All functions run inside `jax.shard_map` on local blocks. `axis_name` is the mesh axis of the ring,
n its size, s the index of this device. Each hop is a permute to a neighbour. Names and list orders
of the async functions are those of the published reference `xlstm_jax.distributed.tensor_parallel`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import get_abstract_mesh


def ppermute(
    x: jax.Array, axes: str | tuple[str, ...], pairs: Sequence[tuple[int, int]]
) -> jax.Array:
    """Return `lax.ppermute` with devices numbered in the order of `axes`.

    jax numbers them in the order of the mesh. `lax.axis_index` numbers them in the order of `axes`.

    Args:
        x: Block to send.
        axes: Mesh axis, or axes with the outermost first.
        pairs: (source, target) of every message.
    """
    if isinstance(axes, str) or len(axes) == 1:
        return lax.ppermute(x, axes, pairs)
    names = tuple(name for name in get_abstract_mesh().axis_names if name in axes)
    sizes = [lax.axis_size(name) for name in axes]
    order = np.arange(math.prod(sizes)).reshape(sizes)
    order = order.transpose([axes.index(name) for name in names])
    number = {int(device): index for index, device in enumerate(order.flat)}
    return lax.ppermute(x, names, [(number[source], number[target]) for source, target in pairs])


def shift(
    x: Any, axis_name: str | tuple[str, ...], up: bool = True, order: Sequence[int] | None = None
) -> Any:
    """Send every leaf of `x` from device j to j + 1 if `up`, else to j - 1.

    order: Devices in the order of the ring, if that is not the order of the axis.
    """
    ring = order or range(lax.axis_size(axis_name))
    step = 1 if up else -1
    pairs = [(device, ring[(j + step) % len(ring)]) for j, device in enumerate(ring)]
    return jax.tree.map(lambda leaf: ppermute(leaf, axis_name, pairs), x)


def async_gather(x: Any, axis_name: str, shift_up: bool = True) -> list[Any]:
    """All-gather an array or pytree over a one-way ring, as a list of n shards.

    Entry 0 is `x` itself. With `shift_up`, device j sends to j + 1, and entry i at device s is the
    shard of device s - i; otherwise that of s + i. Communication: n - 1 hops of `x`, each of which
    waits for the previous one only.
    """
    shards = [x]
    for _ in range(lax.axis_size(axis_name) - 1):
        shards.append(shift(shards[-1], axis_name, shift_up))
    return shards


def async_gather_bidirectional(x: Any, axis_name: str, shift_up: bool = True) -> list[Any]:
    """Return the list of `async_gather`, with half of the hops in each direction.

    Communication: n - 1 hops of `x`; at most n // 2 of them wait for one another.
    """
    n = lax.axis_size(axis_name)
    forth, back = [x], [x]
    for _ in range(n // 2):
        forth.append(shift(forth[-1], axis_name, shift_up))
    for _ in range((n - 1) // 2):
        back.append(shift(back[-1], axis_name, not shift_up))
    return forth + back[:0:-1]


def async_gather_split(x: Any, axis_name: str) -> list[Any]:
    """All-gather with the features of every leaf (last dim, even) split between two rings.

    Returns 2 n - 1 entries, as documented: `x` whole; then, for i in 1 .. n - 1, the lower half of
    the shard of device s - i; then, for i in 1 .. n - 1, the upper half of the shard of s + i. (The
    reference's source returns 2 n entries, its own shard in halves too.)
    Communication: n - 1 hops of half of `x` in each direction at once.
    """
    lower, upper = (jax.tree.map(lambda leaf, h=h: _half(leaf, h), x) for h in (0, 1))
    ups = async_gather(lower, axis_name, shift_up=True)
    downs = async_gather(upper, axis_name, shift_up=False)
    return [x, *ups[1:], *downs[1:]]


def async_scatter(xs: Sequence[Any], axis_name: str, shift_up: bool = True) -> Any:
    """Reduce-scatter over a one-way ring: each partial sum travels and is added to on every device.

    xs: n arrays or pytrees. Entry k at device s is its term of the sum that ends at device
        s - 1 - k with `shift_up`, else at s + 1 + k.

    Returns the sum that ends here. Communication: n - 1 hops of one entry.

    Raises: ValueError if there are not n entries.
    """
    _check_shards(xs, axis_name)
    total = xs[0]
    for x in xs[1:]:
        total = jax.tree.map(jnp.add, shift(total, axis_name, shift_up), x)
    return total


def async_scatter_split(xs: Sequence[Any], axis_name: str) -> Any:
    """Reduce-scatter like `async_scatter`, the two halves of the features in opposite directions.

    The lower half of entry k belongs to the sum that ends at device s - 1 - k, its upper half to
    that of s + 1 + k. The two halves that end here are concatenated. Communication: n - 1 hops of
    half an entry in each direction at once.
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
