"""Gathers and reduce-scatters over all links of a cube of devices: `overlap: hypercube`."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from parallel.linear.async_collectives import ppermute
from parallel.linear.ring import Compute, Direction, Ring, add_arriving, compute_at, wait
from parallel.linear.scheduling import scheduled_together
from parallel.sharding.specs import ROWS

# Rows of a tile of the matrix unit: pieces of whole tiles are not padded and need no copies.
_ALIGNMENT = 128


@dataclass(frozen=True)
class Hypercube(Ring):
    """A `Ring` of n = 2**d devices at the corners of a hypercube; d = 3 is a cube.

    A block travels in d pieces. At every hop the d pieces cross d different sides, so that every
    link of a device carries one piece in each direction. There are n - 1 hops, as many as in a
    ring, but a hop moves a d-th of a block, and at most d hops wait for one another. Piece p
    reaches the corners as in recursive doubling: all corners that have it send it across side p,
    then across side p + 1, and so on, one piece per hop. Sums travel the same paths in reverse. A
    hop and the computation that hides it form a scheduling group, where rows travel.

    The corner of device s is the reflected Gray code of s, so that consecutive devices are
    neighbours on the cube too: the order of `parallel.sharding.mesh.ring_order` fits both. An
    offset k in `positions` means a piece of device s ^ k. With `order`, s counts places in it.

    Communication per device: n - 1 blocks.
    """

    @property
    def num_pieces(self) -> int:
        """The number of pieces in which a block travels: d."""
        n = lax.axis_size(self.axis_name)
        if n & (n - 1):
            raise ValueError(
                f"overlap hypercube needs a power of two of devices, but {self.axis_name} has {n}; "
                "use overlap split"
            )
        return max(1, n.bit_length() - 1)

    @property
    def _sums_follow_blocks(self) -> bool:
        return False

    def _cuts(self, shape: Sequence[int], dim: int) -> list[int]:
        """See `Ring._cuts`. Pieces differ in size if d does not divide that of the block."""
        size, d = shape[self._cut_dim(dim)], self.num_pieces
        if size < d:
            raise ValueError(
                f"overlap hypercube cuts a block of {tuple(shape)} into {d} pieces along dim "
                f"{self._cut_dim(dim)}: use a size of {d} or more there, or overlap bidirectional"
            )
        unit = _ALIGNMENT if size >= d * _ALIGNMENT else 1
        return [round(size * k / d / unit) * unit for k in range(d)] + [size]

    def positions(self) -> list[tuple[int, int]]:
        """Return pairs (k, p) in the order in which device s has them: piece p of device s ^ k."""
        hops, pieces = range(lax.axis_size(self.axis_name)), range(self.num_pieces)
        return [(self._offset(hop, p), p) for hop in hops for p in pieces]

    def _owner(self, offset: int) -> jax.Array:
        s = lax.axis_index(self.axis_name)
        if self.order is None:
            return s ^ np.int32(offset)
        owners = [target for _, target in sorted(self._pairs(offset))]
        return lax.dynamic_index_in_dim(jnp.array(owners, s.dtype), s, keepdims=False)

    def _pairs(self, offset: int) -> list[tuple[int, int]]:
        """Return all pairs of devices at this offset from each other, both ways round."""
        ring = self.order or range(lax.axis_size(self.axis_name))
        return [(device, ring[place ^ offset]) for place, device in enumerate(ring)]

    def _offset(self, hop: int, piece: int) -> int:
        """Return k for the piece that arrives at this hop: it belongs to device s ^ k.

        Bit j of the hop is set if the piece has crossed side `piece` + j on its way.
        """
        d = self.num_pieces
        sides = [(piece + j) % d for j in range(d) if hop >> j & 1]
        # The Gray codes of i and i ^ (2**(side + 1) - 1) differ in the bit of that side alone.
        return reduce(lambda k, side: k ^ (2 << side) - 1, sides, 0)

    def _cross(self, x: Any, hop: int, piece: int) -> Any:
        """Exchange `x` with the neighbour across the side that a piece crosses at this hop."""
        pairs = self._pairs(self._offset(_last_step(hop), piece))
        return ppermute(x, self.axis_name, pairs)

    def _group(self, dim: int) -> AbstractContextManager[None]:
        """Return the context of a hop and its computation, a scheduling group for rows.

        Features are added up over the hops, so that the computations of all groups follow one
        another: libtpu finds no order for them.
        """
        return scheduled_together() if dim == ROWS else nullcontext()

    def _hops(
        self, x: Any, compute: Compute, dim: int, pinned: bool = True
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        n, d = lax.axis_size(self.axis_name), self.num_pieces
        arrived = [self.split_pieces(x, dim)]
        for hop in range(n):
            after = hop + 1
            with self._group(dim) if pinned else nullcontext():
                passed_on = arrived[after - _last_step(after)] if after < n else []
                ahead = [self._cross(piece, after, p) for p, piece in enumerate(passed_on)]
                results = self._compute_on(arrived[hop], partial(compute_at, compute, hop * d), dim)
            if pinned:
                ahead, results = lax.optimization_barrier((ahead, results))
            yield arrived[hop], results
            arrived.append(ahead)

    def scatter_before(
        self,
        operand: jax.Array | None,
        piece: Callable[[int], Any],
        term: Callable[[Any], jax.Array],
        *,
        dim: int,
        hide_last_hop: bool = False,
    ) -> tuple[jax.Array | None, jax.Array]:
        """See `Ring.scatter_before`. Every sum travels while the next terms are computed."""
        n, d = lax.axis_size(self.axis_name), self.num_pieces
        arrived: dict[int, list[list[jax.Array]]] = defaultdict(list)
        sums: list[jax.Array] = []
        for hop in range(n - 1, -1, -1):
            if hop == 0:
                operand, sums = wait(operand, sums)
            here = [piece(hop * d + p) for p in range(d)]
            with self._group(dim):
                moving = [self._cross(total, hop + 1, p) for p, total in enumerate(sums)]
                sums = self._compute_on(here, lambda it, _: term(it), dim)
                for others in arrived.pop(hop, []):
                    sums = [add_arriving(r, y) for r, y in zip(others, sums, strict=True)]
            if moving:
                arrived[hop + 1 - _last_step(hop + 1)].append(moving)
        for others in arrived.pop(0, []):
            # These arrive under the last terms, so they are added by themselves.
            sums = [y + r for r, y in zip(others, sums, strict=True)]
        return operand, self.concat_pieces(sums, dim)


def make_ring(axis_name: str | tuple[str, ...], direction: Direction, **options: Any) -> Ring:
    """Return the `Ring`, or `Hypercube`, of a direction; the options are the fields of `Ring`."""
    form = Hypercube if direction == "hypercube" else Ring
    return form(axis_name, direction, **options)


def _last_step(hop: int) -> int:
    """Return the largest power of two in the number of a hop: the bit of the side crossed last."""
    return 1 << hop.bit_length() - 1
