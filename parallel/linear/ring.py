"""Collectives over a ring of devices: hop by hop, or in one call.

All functions run inside `jax.shard_map` on local blocks. `axis_name` is the mesh axis of the ring,
n its size, s the index of this device. `all_gather` and `reduce_scatter` are single collectives;
`Ring` runs computation under the hops and is the engine of the collective matmuls. This file knows
no matmul. The async functions of `async_collectives.py` can be imported from here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from parallel.linear.async_collectives import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
    shift,
)

__all__ = [
    "Compute",
    "Direction",
    "Ring",
    "add_arriving",
    "all_gather",
    "async_gather",
    "async_gather_bidirectional",
    "async_gather_split",
    "async_scatter",
    "async_scatter_split",
    "pcast_varying",
    "reduce_scatter",
]


def pcast_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Type `x` as varying over these manual axes; `lax.pcast` only where it does not vary yet.

    Moves no data. The transpose is an all-reduce of the cotangent.
    """
    missing = tuple(name for name in axes if name not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def same_type(*arrays: jax.Array) -> list[jax.Array]:
    """Type all arrays as varying over the same axes, so that their gradients are as well.

    Raises: ValueError for arrays of different dtypes.
    """
    if len({array.dtype for array in arrays}) > 1:
        raise ValueError(
            f"a ring multiplies arrays of one dtype, got {', '.join(str(a.dtype) for a in arrays)}"
            "; cast them first"
        )
    axes = set().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    return [pcast_varying(array, tuple(sorted(axes))) for array in arrays]


def all_gather(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """Concatenate the blocks of all devices of these axes along `dim`, in order.

    Axes of size one are left out: XLA:CPU would run a collective even over a single device.
    Communication per device: n - 1 blocks of the size of x.
    """
    names = (axes,) if isinstance(axes, str) else axes
    larger = tuple(name for name in names if lax.axis_size(name) > 1)
    if larger:
        x = lax.all_gather(x, larger, axis=dim % x.ndim, tiled=True)
    return pcast_varying(x, names)


def reduce_scatter(x: jax.Array, axis_name: str, dim: int) -> jax.Array:
    """Sum `x` over the axis; each device keeps its block along `dim`.

    Communication per device: (n - 1) / n of x.
    Raises: ValueError for a size that does not divide.
    """
    if lax.axis_size(axis_name) == 1:
        return x
    _check_blocks(x.shape, dim, axis_name)
    return lax.psum_scatter(x, axis_name, scatter_dimension=dim % x.ndim, tiled=True)


def _check_blocks(shape: Sequence[int], dim: int, axis_name: str | tuple[str, ...]) -> None:
    if shape[dim] % lax.axis_size(axis_name):
        raise ValueError(
            f"dim {dim % len(shape)} of {tuple(shape)} is not divisible by "
            f"{axis_name}={lax.axis_size(axis_name)}; use a size that is"
        )


Direction = Literal["ring", "bidirectional", "split", "hypercube"]
"""How blocks travel. `ring`: one way. `bidirectional`: whole blocks both ways, so the longest chain
of hops is half as long. `split`: the two halves of every block in opposite ways. `hypercube`: d
parts of every block over the d links of each of 2**d devices (`hypercube.Hypercube`)."""

Compute = Callable[[int, Any], Any]
"""Maps the position of a block, and the block, to a result."""


@dataclass(frozen=True)
class Ring:
    """Gathers and reduce-scatters around a ring of n devices, with computation under every hop.

    A block travels whole, or as two pieces if `direction` is `split`. Every piece that is here, or
    arrives, has a position: its number in order of arrival, the device's own pieces first. There
    are n positions, or 2 n for `split`. `shard` and `unshard` convert between an array in natural
    order and pieces by position. Any n >= 1 works. `dim` is the dim along which blocks are
    concatenated. Communication per device: n - 1 blocks, of which wait for one another n - 1
    (`ring`), n // 2 (`bidirectional`), or n - 1 halves (`split`).
    """

    axis_name: str | tuple[str, ...]
    """Mesh axis, or axes; consecutive devices should be physical neighbours."""
    direction: Direction
    cut_batch: bool = False
    """Cut the first dim of a block into pieces instead of `dim`."""
    fuse_halves: bool = False
    """Let `split` compute on the two halves that are here at the same time as on one block: larger
    matmuls, for two more copies."""
    order: tuple[int, ...] | None = None
    """Devices in the order of the ring, where that is not the order of the axis. Device s - k is
    then the one k places before device s."""

    @property
    def num_pieces(self) -> int:
        """The number of pieces in which a block travels."""
        return 2 if self.direction == "split" else 1

    @property
    def _sums_follow_blocks(self) -> bool:
        """Whether the sums of `gather_scatter` travel beside its blocks, not after them."""
        return self.direction != "bidirectional"

    def positions(self) -> list[tuple[int, int]]:
        """Return pairs (k, p) in the order in which device s has them: piece p of device s - k."""
        n = lax.axis_size(self.axis_name)
        if self.direction == "bidirectional":
            ways = [(way * hop, 0) for hop in range(1, n // 2 + 1) for way in (1, -1)]
            return [(0, 0), *ways[: n - 1]]
        ways = [(0, 1), (1, -1)][: self.num_pieces]
        return [(way * hop, piece) for hop in range(n) for piece, way in ways]

    def gather(self, x: Any, compute: Compute, dim: int) -> tuple[list[Any], list[Any]]:
        """Return all pieces of `x`, and `compute` of each, by position; hops run underneath.

        x: An array, or a pytree of arrays that are cut and sent alike.
        """
        hops = list(self._hops(x, compute, dim))
        return [p for pieces, _ in hops for p in pieces], [
            r for _, results in hops for r in results
        ]

    def all_gather(self, x: jax.Array, dim: int) -> jax.Array:
        """Return the blocks of all devices along `dim`, in natural order.

        The hops are tied to no computation: the compiler schedules them under any other work.
        """
        hops = self._hops(x, lambda *_: (), dim, pinned=False)
        shape = list(x.shape)
        shape[dim] *= lax.axis_size(self.axis_name)
        # Not empty: jax moves what depends on no input out of the scan over layers, and XLA then
        # copies it in every layer.
        first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
        filled = jnp.broadcast_to(first, shape)
        return self.unshard([piece for pieces, _ in hops for piece in pieces], dim, filled)

    def _hops(
        self, x: Any, compute: Compute, dim: int, pinned: bool = True
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield, hop by hop, the pieces that have arrived and the results on them."""
        n, position, hop = lax.axis_size(self.axis_name), 0, 0
        arrived = moving = self.split_pieces(x, dim)
        last = (n - 1, n - 1)
        if self.direction == "bidirectional":
            moving, last = [x, x], (n // 2, (n - 1) // 2)
        while arrived:
            hop += 1
            ahead = [
                self._send(block, up)
                for block, up, hops in zip(moving, (True, False), last, strict=False)
                if hop <= hops
            ]
            results = self._compute_on(arrived, partial(compute_at, compute, position), dim)
            # The barrier makes the next pieces wait for this hop's results. Without it libtpu
            # issues all hops first, and then computes while nothing travels.
            moving = ahead
            if pinned:
                moving, results = lax.optimization_barrier((ahead, results))
            yield arrived, results
            position, arrived = position + len(arrived), moving

    def _compute_on(
        self, pieces: list[Any], compute: Callable[[Any, int], Any], dim: int
    ) -> list[Any]:
        """Return compute(piece, index) of each; on their concatenation with `fuse_halves`."""
        if not self.fuse_halves or self.direction != "split":
            return [compute(piece, index) for index, piece in enumerate(pieces)]
        whole = jax.tree.map(lambda *leaves: self.concat_pieces(leaves, dim), *pieces)
        leaves, tree = jax.tree.flatten(compute(whole, 0))
        halves = zip(*(self.split_pieces(leaf, dim) for leaf in leaves), strict=True)
        return [jax.tree.unflatten(tree, half) for half in halves]

    def scatter(
        self,
        piece: Callable[[int], Any],
        term: Callable[[Any], jax.Array],
        *,
        dim: int,
        hide_last_hop: bool = False,
    ) -> jax.Array:
        """Return the sum over devices of term(piece(position)) that belongs to this device.

        The arguments are those of `scatter_before`.
        """
        return self.scatter_before(None, piece, term, dim=dim, hide_last_hop=hide_last_hop)[1]

    def scatter_before(
        self,
        operand: jax.Array | None,
        piece: Callable[[int], Any],
        term: Callable[[Any], jax.Array],
        *,
        dim: int,
        hide_last_hop: bool = False,
    ) -> tuple[jax.Array | None, jax.Array]:
        """Return `operand`, and the sum over devices of term(piece(position)) that ends here.

        The sum of a position ends at the device that owns the position's piece. Positions are taken
        last to first, so every sum travels against its blocks.

        operand: An operand of work that has to follow all terms but the last.
        hide_last_hop: Other work that does not need the result follows and hides the last hop.
            Otherwise `bidirectional` sends that hop under its last term.
        """
        if self.direction == "bidirectional":
            return self._scatter_both_ways(
                operand, lambda position: term(piece(position)), hide_last_hop
            )
        sums: list[jax.Array] = []
        for hop in range(lax.axis_size(self.axis_name) - 1, -1, -1):
            if hop == 0:
                operand, sums = wait(operand, sums)
            here = [piece(hop * self.num_pieces + index) for index in range(self.num_pieces)]
            terms = self._compute_on(here, lambda it, _: term(it), dim)
            sums = self._shift_and_add(sums, terms, (False, True))
        return operand, self.concat_pieces(sums, dim)

    def _scatter_both_ways(
        self, operand: jax.Array | None, term: Callable[[int], jax.Array], hide_last_hop: bool
    ) -> tuple[jax.Array | None, jax.Array]:
        n = lax.axis_size(self.axis_name)
        sums: dict[bool, jax.Array] = {}
        for late in range(n // 2):
            for up, hops in ((False, n // 2 - late), (True, (n - 1) // 2 - late)):
                if hops > 0:
                    total = term(2 * hops if up else 2 * hops - 1)
                    if up in sums:
                        total = add_arriving(self._send(sums[up], up), total)
                    sums[up] = total
        operand, sums = wait(operand, sums)
        arriving = [self._send(total, up) for up, total in sums.items()]
        own = term(0)
        if hide_last_hop or not arriving:
            return operand, reduce(lambda y, r: add_arriving(r, y), arriving, own)
        # The sum that was sent last arrives last: add it by itself, after the last term.
        return operand, reduce(lambda y, r: add_arriving(r, y), arriving[1:], own) + arriving[0]

    def gather_scatter(
        self,
        x: Any,
        compute: Compute,
        term: Callable[[Any], jax.Array],
        *,
        dim: int,
        hide_last_hop: bool = False,
    ) -> tuple[list[Any], list[Any], jax.Array]:
        """Run `gather`, then `scatter` of term(result); return pieces, results and the sum.

        With `ring` and `split` every sum follows its blocks, so both rings run at the same time.
        """
        if not self._sums_follow_blocks:
            pieces, results = self.gather(x, compute, dim)
            y = self.scatter(results.__getitem__, term, dim=dim, hide_last_hop=hide_last_hop)
            return pieces, results, y
        pieces, results = [], []
        sums: list[jax.Array] = []
        for arrived, computed in self._hops(x, compute, dim):
            if pieces:
                terms = self._compute_on(computed, lambda result, _: term(result), dim)
                sums = self._shift_and_add(sums, terms, (True, False))
            pieces, results = pieces + arrived, results + computed
        own = self._compute_on(results[: self.num_pieces], lambda result, _: term(result), dim)
        sums = self._shift_and_add(sums, own, (True, False))
        return pieces, results, self.concat_pieces(sums, dim)

    def _shift_and_add(
        self, sums: list[jax.Array], terms: list[jax.Array], ups: tuple[bool, bool]
    ) -> list[jax.Array]:
        """Send each sum one device further and add the term there; without sums, return terms."""
        if not sums:
            return terms
        return [
            add_arriving(self._send(total, up), term)
            for total, term, up in zip(sums, terms, ups, strict=False)
        ]

    def split_pieces(self, block: Any, dim: int) -> list[Any]:
        """Return the pieces in which a block travels: the block, or its parts.

        block: An array, or a pytree of arrays that are cut alike.
        """
        if self.num_pieces == 1:
            return [block]
        leaves, tree = jax.tree.flatten(block)
        parts = zip(
            *(
                jnp.split(leaf, self._cuts(leaf.shape, dim)[1:-1], axis=self._cut_dim(dim))
                for leaf in leaves
            ),
            strict=True,
        )
        return [jax.tree.unflatten(tree, part) for part in parts]

    def _cut_dim(self, dim: int) -> int:
        """Return the dim along which a block is cut into pieces."""
        return 0 if self.cut_batch else dim

    def _cuts(self, shape: Sequence[int], dim: int) -> list[int]:
        """Return where the pieces of a block of this shape begin, and where the last one ends.

        Raises: ValueError for a size that cannot be cut.
        """
        cut_dim = self._cut_dim(dim)
        if shape[cut_dim] % self.num_pieces:
            raise ValueError(
                f"overlap split halves a block of {tuple(shape)} along dim {cut_dim}: "
                "use an even size there, or overlap ring or bidirectional"
            )
        return [shape[cut_dim] * k // self.num_pieces for k in range(self.num_pieces + 1)]

    def concat_pieces(self, pieces: Sequence[jax.Array], dim: int) -> jax.Array:
        """Return the block that `split_pieces` split."""
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=self._cut_dim(dim))

    def shard(self, whole: jax.Array, dim: int) -> Callable[[int], jax.Array]:
        """Return the function position -> piece of an array in natural order along `dim`."""
        dim = dim % whole.ndim
        _check_blocks(whole.shape, dim, self.axis_name)
        self._cuts(self._block_shape(whole.shape, dim), dim)  # refuse at once what has no pieces

        def piece(position: int) -> jax.Array:
            return lax.dynamic_slice(whole, *self._place(whole.shape, dim, position))

        return piece

    def unshard(
        self, pieces: Sequence[jax.Array], dim: int, whole: jax.Array | None = None
    ) -> jax.Array:
        """Return the array in natural order along `dim` from its pieces by position.

        whole: An array of the shape of the result, to be overwritten; None: an empty one.
        """
        first, dim = pieces[0], dim % pieces[0].ndim
        if whole is None:
            cut_dim, shape = self._cut_dim(dim), list(first.shape)
            shape[cut_dim] = sum(piece.shape[cut_dim] for piece in pieces[: self.num_pieces])
            shape[dim] *= lax.axis_size(self.axis_name)
            varying = tuple(jax.typeof(first).manual_axis_type.varying)
            whole = pcast_varying(lax.empty(tuple(shape), first.dtype), varying)
        for position, piece in enumerate(pieces):
            start, _ = self._place(whole.shape, dim, position)
            whole = lax.dynamic_update_slice(whole, piece, start)
        return whole

    def _block_shape(self, shape: Sequence[int], dim: int) -> list[int]:
        """Return the shape of a block of an array of this shape."""
        sizes = list(shape)
        sizes[dim] //= lax.axis_size(self.axis_name)
        return sizes

    def _place(self, shape: Sequence[int], dim: int, position: int) -> tuple[list[Any], list[int]]:
        """Return the start indices and the sizes of a piece in a whole array of this shape."""
        offset, piece = self.positions()[position]
        cut_dim, sizes = self._cut_dim(dim), self._block_shape(shape, dim)
        start: list[Any] = [np.int32(0)] * len(sizes)  # the dtype of axis_index, under x64 too
        start[dim] = self._owner(offset) * sizes[dim]
        first, end = self._cuts(sizes, dim)[piece : piece + 2]
        start[cut_dim] = start[cut_dim] + np.int32(first)
        sizes[cut_dim] = end - first
        return start, sizes

    def _owner(self, offset: int) -> jax.Array:
        """Return the number of the device that is `offset` places before this one."""
        n, s = lax.axis_size(self.axis_name), lax.axis_index(self.axis_name)
        if self.order is None or self.order == tuple(range(n)):
            return (s - offset) % n
        owners = [self.order[(self.order.index(device) - offset) % n] for device in range(n)]
        return lax.dynamic_index_in_dim(jnp.array(owners, s.dtype), s, keepdims=False)

    def _send(self, x: Any, up: bool) -> Any:
        """Send `x` to the next device of the ring if `up`, else to the one before."""
        return shift(x, self.axis_name, up, self.order)


def wait(operand: jax.Array | None, sums: Any) -> tuple[jax.Array | None, Any]:
    """Make `operand`, if there is one, wait for the sums."""
    return (operand, sums) if operand is None else lax.optimization_barrier((operand, sums))


def compute_at(compute: Compute, first: int, piece: jax.Array, index: int) -> Any:
    """Apply `compute` to the piece whose position is first + index."""
    return compute(first + index, piece)


def add_arriving(arriving: jax.Array, term: jax.Array) -> jax.Array:
    """Return arriving + term in their dtype, rounded once.

    Written as y - (-r): libtpu fuses this form into the matmul that computes `term`, but not the
    plain sum. Casts to float32 and back would give the same value (the sum of two bfloat16 numbers
    is rounded once either way) and prevent the fusion.
    """
    return term - (-arriving)
