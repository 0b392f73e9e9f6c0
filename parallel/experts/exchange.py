"""Exchange of rows between the devices that share experts.

Every function runs inside `jax.shard_map` on local blocks. `all_to_all` is one collective,
`PermuteAllToAll` the same exchange as collective permutes that overlap with computation, and
`RaggedAllToAll` sends a different number of rows to every device.

Letters: A rows to send, R rows of the receiving buffer, E groups, M rows of a block, n devices that
share the experts, D features.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from parallel.experts.permutation import take_or_zero
from parallel.linear.async_collectives import ppermute
from parallel.linear.ring import all_gather


def num_devices(axes: tuple[str, ...]) -> int:
    """Return the product of the sizes of these mesh axes; 1 for no axes."""
    return lax.axis_size(axes) if axes else 1


def all_to_all(x_nMD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Send block i to device i and receive one block from each device. It is its own inverse.

    Communication: one all-to-all of (n - 1) / n of x per device.
    """
    if num_devices(axes) == 1:
        return x_nMD
    return lax.all_to_all(x_nMD, axes, split_axis=0, concat_axis=0, tiled=True)


def target_of(rank: Any, distance: Any, n: int) -> Any:
    """Return the one of n devices that is this distance from `rank`.

    For a power of two, pairs swap blocks (rank XOR distance): neighbours on a torus stay
    neighbours, and both directions of a link are busy. Otherwise blocks go round a ring.
    """
    return rank ^ distance if n & (n - 1) == 0 else (rank + distance) % n


@dataclass(frozen=True)
class PermuteAllToAll:
    """An all-to-all as n - 1 collective permutes, which overlap with computation.

    Blocks are numbered by position: 0 is this device's own block, the others follow in the order in
    which they travel.
    distances: how far each of them travels (`target_of`), in this order; empty: 1 .. n - 1.
    """

    axes: tuple[str, ...]
    distances: tuple[int, ...] = ()

    def _distances(self) -> list[int]:
        """Return how far the block of each position travels."""
        every = range(1, num_devices(self.axes))
        distances = self.distances or every
        assert sorted(distances) == list(every), (self.distances, self.axes)
        return [0, *distances]

    def targets(self) -> jax.Array:
        """Return the device that receives the block of each position, `n`."""
        n, me = num_devices(self.axes), lax.axis_index(self.axes)
        return target_of(me, jnp.asarray(self._distances()), n)

    def sources(self) -> jax.Array:
        """Return the device whose block arrives at each position, `n`."""
        n, me = num_devices(self.axes), lax.axis_index(self.axes)
        distances = jnp.asarray(self._distances())
        # XOR is its own inverse.
        return target_of(me, distances if n & (n - 1) == 0 else -distances, n)

    def send(self, block: jax.Array, position: int, *, back: bool = False) -> jax.Array:
        """Send a block to the target of its position and return the one that arrives there.

        back: send it to the source instead, which returns results to where their rows came from.
        """
        if position == 0:
            return block
        n, distance = num_devices(self.axes), self._distances()[position]
        pairs = [(rank, target_of(rank, distance, n)) for rank in range(n)]
        if back:
            pairs = [(target, source) for source, target in pairs]
        return ppermute(block, self.axes, pairs)

    def chunks(self, count: int) -> list[list[int]]:
        """Return all positions in order, in at most `count` >= 2 chunks; the own block comes first.

        The own block is a chunk of its own, as it waits for no permute.
        """
        rest = list(range(1, num_devices(self.axes)))
        each = max(1, -(-len(rest) // max(count - 1, 1)))
        return [[0], *(rest[i : i + each] for i in range(0, len(rest), each))]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedAllToAll:
    """An all-to-all in which every pair of devices exchanges a different number of rows.

    rows: size of the receiving buffer. native: use `lax.ragged_all_to_all`, which XLA:CPU lacks;
    otherwise all rows are all-gathered and each device selects its own, with the same result.
    sent_nnE, kept_nnE: rows by source, target and local group of the target, before and after the
    buffers are full.
    """

    axes: tuple[str, ...] = field(metadata={"static": True})
    rows: int = field(metadata={"static": True})
    native: bool = field(metadata={"static": True})
    sent_nnE: jax.Array
    kept_nnE: jax.Array

    @classmethod
    def create(
        cls, sizes_E: jax.Array, axes: tuple[str, ...], *, rows: int, native: bool
    ) -> "RaggedAllToAll":
        """Share the group sizes of all devices.

        sizes_E: rows of every global group on this device. Rows beyond the receiving buffer are
        dropped: those of the last sources, and of these the last groups.
        Communication: one all-gather of E integers.
        """
        n = num_devices(axes)
        sent = all_gather(sizes_E[None], axes, 0).reshape(n, n, -1)
        # Rows of earlier sources and groups come before in the target's buffer.
        by_target = sent.transpose(1, 0, 2).reshape(n, -1)
        before = jnp.cumsum(by_target, axis=1) - by_target
        kept = jnp.clip(rows - before, 0, by_target).reshape(n, n, -1).transpose(1, 0, 2)
        return cls(axes, rows, native, sent, kept)

    @property
    def received_nE(self) -> jax.Array:
        """Rows received by source and local group."""
        return self.kept_nnE[:, lax.axis_index(self.axes)]

    def groups_R(self) -> jax.Array:
        """Return the local group of every received row; the number of groups for an empty row."""
        sizes = self.received_nE.reshape(-1)
        ends = jnp.cumsum(sizes)
        slot_R = jnp.searchsorted(ends, jnp.arange(self.rows), side="right", method="compare_all")
        groups = self.received_nE.shape[1]
        return jnp.where(slot_R < ends.shape[0], slot_R % groups, groups).astype(jnp.int32)

    def send(self, x_AD: jax.Array) -> jax.Array:
        """Send rows sorted by global group to their owners: `R D`, ordered by source and group.

        x_AD: rows, or one number per row.
        """
        return self._exchange(x_AD, *self._offsets(), self.rows)

    def send_back(self, y_RD: jax.Array, rows: int) -> jax.Array:
        """Invert `send`: `rows D`, with zeros for rows that were not sent."""
        counts, at_source, at_target = self._offsets()
        return self._exchange(y_RD, counts.T, at_target.T, at_source.T, rows)

    def _offsets(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return counts and first rows at the source and at the target, each `source target`."""
        sent, kept = self.sent_nnE.sum(-1), self.kept_nnE.sum(-1)
        at_source = jnp.cumsum(sent, axis=1) - sent
        at_target = jnp.cumsum(kept, axis=0) - kept
        return kept.astype(jnp.int32), at_source.astype(jnp.int32), at_target.astype(jnp.int32)

    def _exchange(
        self, x: jax.Array, counts: jax.Array, at_source: jax.Array, at_target: jax.Array, rows: int
    ) -> jax.Array:
        me = lax.axis_index(self.axes)
        if self.native:
            into = jnp.zeros_like(x, shape=(rows, *x.shape[1:]))
            here = at_source[me], counts[me], at_target[me], counts[:, me]
            return lax.ragged_all_to_all(x, into, *here, axis_name=self.axes)
        gathered = all_gather(x, self.axes, 0)
        row_R = jnp.arange(rows)
        # Sources fill disjoint parts of the buffer, possibly with gaps in between.
        inside_nR = (row_R >= at_target[:, me, None]) & (
            row_R < at_target[:, me, None] + counts[:, me, None]
        )
        source_R = jnp.argmax(inside_nR, axis=0)
        index_R = source_R * x.shape[0] + at_source[source_R, me] + row_R - at_target[source_R, me]
        index_R = jnp.where(inside_nR.any(axis=0), index_R, gathered.shape[0])
        return take_or_zero(gathered, index_R)
