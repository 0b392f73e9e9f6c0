"""Rows to the experts that they were assigned to, and back: sorting on one device, hops over ep.

Every function runs inside `jax.shard_map` on local blocks. An item is one assignment of a token to
an expert; a place is a row of a buffer. What is in no place, or holds no item, has an index one
past the end: reads there give zeros. It refuses to know what is done with a row. Letters: T tokens
of this device, K items per token, A items (T K), R rows, E groups, n devices that share the
experts, D features.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import get_abstract_mesh

from parallel.experts.grouped_matmul import RowLayout
from parallel.linear.ring import all_gather

ExchangeMethod = Literal["dense", "alltoall", "ragged"]
"""How tokens meet experts of other devices. dense: every expert sees every token, the oracle;
alltoall: buffers of equal size for every pair of devices; ragged: as many rows as there are."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Places:
    """Where items lie: `place_A` of every item, `item_R` of every row, rows in use per group."""

    place_A: jax.Array
    item_R: jax.Array
    sizes_E: jax.Array


def place(groups_A: jax.Array, layout: RowLayout, limit: int | None = None) -> Places:
    """Rows for items by their group (outside of 0 .. E - 1: none), in order within each.

    Items beyond the rows of a `uniform` group, or the limit of any, or the whole buffer, get no
    place: dropped.
    """
    count, groups = groups_A.shape[0], layout.groups
    known_A = jnp.where((groups_A >= 0) & (groups_A < groups), groups_A, groups)
    order_A = jnp.argsort(known_A, stable=True).astype(jnp.int32)
    sorted_A = known_A[order_A]
    # By comparing with all: the default is a loop, slow on a TPU.
    find = partial(jnp.searchsorted, method="compare_all")
    first_E = find(sorted_A, jnp.arange(groups + 1)).astype(jnp.int32)
    sizes_E = jnp.diff(first_E)
    limits = [limit, layout.rows // groups if layout.kind == "uniform" else None]
    for most in (rows for rows in limits if rows is not None):
        sizes_E = jnp.minimum(sizes_E, most)
    starts_E = layout.starts(sizes_E)
    sizes_E = jnp.clip(layout.rows - starts_E, 0, sizes_E)
    # From rows to items without a scatter: the group of a row is the last that begins before it.
    row_R = jnp.arange(layout.rows, dtype=jnp.int32)
    group_R = jnp.clip(find(starts_E, row_R, side="right") - 1, 0, groups - 1)
    rank_R = row_R - starts_E[group_R]
    found_R = jnp.clip(first_E[group_R] + rank_R, 0, max(count - 1, 0))
    item_R = jnp.where(rank_R < sizes_E[group_R], order_A[found_R], count)
    # And back: an item's rank is its position among the sorted ones less that of its group's first.
    position_A = jnp.argsort(order_A).astype(jnp.int32)
    own_A = jnp.minimum(known_A, groups - 1)
    rank_A = position_A - first_E[own_A]
    placed_A = (known_A < groups) & (rank_A < sizes_E[own_A])
    place_A = jnp.where(placed_A, starts_E[own_A] + rank_A, layout.rows)
    return Places(place_A, item_R.astype(jnp.int32), sizes_E.astype(jnp.int32))


@jax.custom_vjp
def to_places(x_TD: jax.Array, places: Places) -> jax.Array:
    """Tokens `T D` -> rows `R D`: row r is the token of its item; without one, any token.

    Item a is of token a // K. What is made of rows without items must have no cotangent, as by
    `from_places`. The derivative gathers too: a scatter of rows is slow everywhere.
    """
    tokens = x_TD.shape[0]
    return x_TD[jnp.minimum(places.item_R // _items_per_token(places, tokens), tokens - 1)]


def _items_per_token(places: Places, tokens: int) -> int:
    return max(places.place_A.shape[0] // tokens, 1)


def _to_places_forward(x_TD: jax.Array, places: Places) -> tuple[jax.Array, Any]:
    return to_places(x_TD, places), (places, jnp.zeros((x_TD.shape[0], 0), x_TD.dtype))


def _to_places_backward(residuals: Any, g_RD: jax.Array) -> tuple[jax.Array, None]:
    places, like = residuals
    ones_TK = jnp.ones((like.shape[0], _items_per_token(places, like.shape[0])), jnp.float32)
    return _weighted_sum(g_RD, ones_TK, places).astype(like.dtype), None


to_places.defvjp(_to_places_forward, _to_places_backward)


def _weighted_sum(y_RD: jax.Array, weights_TK: jax.Array, places: Places) -> jax.Array:
    """sum over k of weight * row, in float32; nothing for items without a place."""
    T, K = weights_TK.shape
    place_TK, total = places.place_A.reshape(T, K), jnp.zeros((), jnp.float32)
    # Item by item: all items at once would be written down, T K D numbers.
    for k in range(K):
        there_T = place_TK[:, k] < y_RD.shape[0]
        rows_TD = y_RD[jnp.where(there_T, place_TK[:, k], 0)].astype(jnp.float32)
        total += rows_TD * jnp.where(there_T, weights_TK[:, k], 0.0)[:, None]
    return total


@jax.custom_vjp
def from_places(y_RD: jax.Array, weights_TK: jax.Array, places: Places) -> jax.Array:
    """Rows `R D` -> tokens `T D`: the weighted sum of a token's items, added up in float32.

    Items without a place add nothing, whatever their weight. Result in y's dtype.
    """
    return _weighted_sum(y_RD, weights_TK, places).astype(y_RD.dtype)


def _from_places_forward(
    y_RD: jax.Array, weights_TK: jax.Array, places: Places
) -> tuple[jax.Array, Any]:
    return from_places(y_RD, weights_TK, places), (y_RD, weights_TK, places)


def _from_places_backward(residuals: Any, g_TD: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    y_RD, weights_TK, places = residuals
    T, K = weights_TK.shape
    g_RD = to_places(g_TD, places)
    # Row by row first: of an item without a place there is nothing to gather.
    dweight_R = jnp.sum(y_RD.astype(jnp.float32) * g_RD.astype(jnp.float32), axis=-1)
    dweights_TK = _read(dweight_R, places.place_A).reshape(T, K)
    weight_R = _read(weights_TK.reshape(-1), places.item_R)
    dy_RD = g_RD.astype(jnp.float32) * weight_R[:, None]
    return dy_RD.astype(y_RD.dtype), dweights_TK.astype(weights_TK.dtype), None


from_places.defvjp(_from_places_forward, _from_places_backward)


def _read(values: jax.Array, index: jax.Array) -> jax.Array:
    """Entries at these indices; zeros one past the end."""
    return values.at[index].get(mode="fill", fill_value=0)


def axis_count(axes: tuple[str, ...]) -> int:
    """Devices of these axes together; 1 if there are none."""
    return lax.axis_size(axes) if axes else 1


def exchange_blocks(x_nMD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Block i to device i, and one from each, in one collective. Its own inverse.

    Communication: (n - 1) / n of x per device.
    """
    if axis_count(axes) == 1:
        return x_nMD
    return lax.all_to_all(x_nMD, axes, split_axis=0, concat_axis=0, tiled=True)


@dataclass(frozen=True)
class Hops:
    """The same exchange as n - 1 permutes, which travel while something else is computed.

    Blocks have a position: 0 is this device's own, the others in the order in which they travel.
    """

    axes: tuple[str, ...]

    def _distances(self) -> list[int]:
        """By position; neighbours in the list share no links of a torus, or few.

        Of a power of two the bits of a distance are the axes of the torus that it takes: each is
        followed by its complement, and the two travel at the same time.
        """
        n = axis_count(self.axes)
        if n & (n - 1):
            return list(range(n))
        pairs = [hop for low in range(1, n // 2) for hop in (low, n - 1 - low)]
        return [0, *pairs, *([n - 1] if n > 1 else [])]

    def _target(self, rank: Any, distance: Any) -> Any:
        """Whom a device sends to.

        Pairs swap blocks (rank XOR distance) where n is a power of two, which keeps near what is
        near on a torus and both directions of its links busy; otherwise everyone sends onwards.
        """
        n = axis_count(self.axes)
        return rank ^ distance if n & (n - 1) == 0 else (rank + distance) % n

    def targets(self) -> jax.Array:
        """The device that the block of each position is for, `n`."""
        return self._target(lax.axis_index(self.axes), jnp.asarray(self._distances()))

    def sources(self) -> jax.Array:
        """The device whose block arrives at each position, `n`."""
        n, me = axis_count(self.axes), lax.axis_index(self.axes)
        distances = jnp.asarray(self._distances())
        return me ^ distances if n & (n - 1) == 0 else (me - distances) % n

    def send(self, block: jax.Array, position: int, *, back: bool = False) -> jax.Array:
        """The block for the target of this position -> that of its source; back: the way back."""
        if position == 0:
            return block
        distance = self._distances()[position]
        pairs = [(rank, self._target(rank, distance)) for rank in range(axis_count(self.axes))]
        if back:
            pairs = [(target, source) for source, target in pairs]
        # ppermute counts devices in the order of the mesh, whatever the order of its axes.
        names = [name for name in get_abstract_mesh().axis_names if name in self.axes]
        sizes = [lax.axis_size(name) for name in self.axes]
        order = np.arange(math.prod(sizes)).reshape(sizes)
        order = order.transpose([self.axes.index(name) for name in names]).ravel()
        number = {int(rank): place for place, rank in enumerate(order)}
        pairs = [(number[source], number[target]) for source, target in pairs]
        return lax.ppermute(block, tuple(names), pairs)

    def groups(self, count: int) -> list[list[int]]:
        """Positions in at most `count` groups, 2 or more: the own block, which waits for none, and
        the others, in order.
        """
        rest = list(range(1, axis_count(self.axes)))
        each = max(1, -(-len(rest) // max(count - 1, 1)))
        return [[0], *(rest[i : i + each] for i in range(0, len(rest), each))]


@dataclass(frozen=True)
class RaggedPlan:
    """Which rows go where when every pair of devices sends as many as there are.

    found_nnE, kept_nnE: rows by source, target and its groups, before and after the limit of the
    buffers.
    """

    axes: tuple[str, ...]
    rows: int
    found_nnE: jax.Array
    kept_nnE: jax.Array

    @classmethod
    def of(cls, sizes_E: jax.Array, axes: tuple[str, ...], rows: int) -> "RaggedPlan":
        """sizes_E: rows of every global group here, sorted by group. rows: of a receiving buffer.

        What does not fit is cut from the last sources, and there from the last groups.
        Communication: an all-gather of E integers.
        """
        n = axis_count(axes)
        found = all_gather(sizes_E[None], axes, 0).reshape(n, n, -1)
        # Rows that lie before, in the target's buffer: those of earlier sources and groups.
        by_target = found.transpose(1, 0, 2).reshape(n, -1)
        before = jnp.cumsum(by_target, axis=1) - by_target
        kept = jnp.clip(rows - before, 0, by_target).reshape(n, n, -1).transpose(1, 0, 2)
        return cls(axes, rows, found, kept)

    @property
    def received_nE(self) -> jax.Array:
        """Rows here by source and local group."""
        return self.kept_nnE[:, lax.axis_index(self.axes)]

    def groups_R(self) -> jax.Array:
        """The local group of every received row; the number of groups where there is none."""
        sizes = self.received_nE.reshape(-1)
        ends = jnp.cumsum(sizes)
        slot_R = jnp.searchsorted(ends, jnp.arange(self.rows), side="right", method="compare_all")
        groups = self.received_nE.shape[1]
        return jnp.where(slot_R < ends.shape[0], slot_R % groups, groups).astype(jnp.int32)

    def _offsets(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(rows kept, where they lie at the source, where at the target), each `source target`."""
        found, kept = self.found_nnE.sum(-1), self.kept_nnE.sum(-1)
        at_source = jnp.cumsum(found, axis=1) - found
        at_target = jnp.cumsum(kept, axis=0) - kept
        return kept.astype(jnp.int32), at_source.astype(jnp.int32), at_target.astype(jnp.int32)

    def send(self, x_AD: jax.Array, *, native: bool) -> jax.Array:
        """Rows sorted by global group -> the `rows` of this device's groups, by source and group.

        native: by `ragged_all_to_all`, which XLA:CPU does not have; otherwise all rows are gathered
        everywhere and each device picks its own: the same result, for more communication.
        """
        kept, at_source, at_target = self._offsets()
        return self._move(x_AD, kept, at_source, at_target, self.rows, native)

    def send_back(self, y_RD: jax.Array, rows: int, *, native: bool) -> jax.Array:
        """What `send` moved, back to where it lay; zeros for rows that were not sent."""
        kept, at_source, at_target = self._offsets()
        return self._move(y_RD, kept.T, at_target.T, at_source.T, rows, native)

    def _move(
        self,
        x: jax.Array,
        counts: jax.Array,
        at_source: jax.Array,
        at_target: jax.Array,
        rows: int,
        native: bool,
    ) -> jax.Array:
        me = lax.axis_index(self.axes)
        if native:
            into = jnp.zeros_like(x, shape=(rows, x.shape[1]))
            return lax.ragged_all_to_all(
                x,
                into,
                at_source[me],
                counts[me],
                at_target[me],
                counts[:, me],
                axis_name=self.axes,
            )
        everywhere = all_gather(x, self.axes, 0)
        row_R = jnp.arange(rows)
        # The source of a row is the one whose part it lies in; parts may leave gaps between them.
        inside_nR = (row_R >= at_target[:, me, None]) & (
            row_R < at_target[:, me, None] + counts[:, me, None]
        )
        source_R = jnp.argmax(inside_nR, axis=0)
        index_R = source_R * x.shape[0] + at_source[source_R, me] + row_R - at_target[source_R, me]
        index_R = jnp.where(inside_nR.any(axis=0), index_R, everywhere.shape[0])
        return _read(everywhere, index_R)
