"""Collectives over a ring of devices: hop by hop, or in one call.

All functions run inside `jax.shard_map` on local blocks. `axis_name` is the mesh axis of the ring,
n its size, s the index of this device. `all_gather` and `reduce_scatter` are single collectives;
`async_gather*` and `async_scatter*` do the same as a list of hops, each a `ppermute` to a
neighbour; `Ring` runs computation under the hops and is the engine of the collective matmuls. This
file knows no matmul. Names and list orders of the async functions are those of the published
reference `xlstm_jax.distributed.tensor_parallel`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def pcast_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Type `x` as varying over these manual axes; `lax.pcast` only where it does not vary yet.

    Moves no data. The transpose is an all-reduce of the cotangent.
    """
    missing = tuple(name for name in axes if name not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """Concatenate the blocks of all devices of these axes along `dim`, in order.

    Axes of size one are left out: XLA:CPU would run a collective even over a single device.
    """
    names = (axes,) if isinstance(axes, str) else axes
    larger = tuple(name for name in names if lax.axis_size(name) > 1)
    if larger:
        x = lax.all_gather(x, larger, axis=dim % x.ndim, tiled=True)
    return pcast_varying(x, names)


def reduce_scatter(x: jax.Array, axis_name: str, dim: int) -> jax.Array:
    """Sum `x` over the axis; each device keeps its block along `dim`.

    Raises: ValueError for a size that does not divide.
    """
    if lax.axis_size(axis_name) == 1:
        return x
    _check_blocks(x.shape, dim, axis_name)
    return lax.psum_scatter(x, axis_name, scatter_dimension=dim % x.ndim, tiled=True)


def _check_blocks(shape: Sequence[int], dim: int, axis_name: str) -> None:
    if shape[dim] % lax.axis_size(axis_name):
        raise ValueError(
            f"dim {dim % len(shape)} of {tuple(shape)} is not divisible by "
            f"{axis_name}={lax.axis_size(axis_name)}; use a size that is"
        )


def _shift(x: Any, axis_name: str, up: bool = True) -> Any:
    """Send every leaf of `x` from device j to j + 1 if `up`, else to j - 1."""
    n = lax.axis_size(axis_name)
    pairs = [(j, (j + (1 if up else -1)) % n) for j in range(n)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis_name, pairs), x)


def async_gather(x: Any, axis_name: str, shift_up: bool = True) -> list[Any]:
    """All-gather an array or pytree over a one-way ring, as a list of n shards.

    Entry 0 is `x` itself. With `shift_up`, device j sends to j + 1, and entry i at device s is the
    shard of device s - i; otherwise that of s + i. Communication: n - 1 hops of `x`, each of which
    waits for the previous one only.
    """
    shards = [x]
    for _ in range(lax.axis_size(axis_name) - 1):
        shards.append(_shift(shards[-1], axis_name, shift_up))
    return shards


def async_gather_bidirectional(x: Any, axis_name: str, shift_up: bool = True) -> list[Any]:
    """Return the list of `async_gather`, with half of the hops in each direction.

    Communication: n - 1 hops of `x`; at most n // 2 of them wait for one another.
    """
    n = lax.axis_size(axis_name)
    forth, back = [x], [x]
    for _ in range(n // 2):
        forth.append(_shift(forth[-1], axis_name, shift_up))
    for _ in range((n - 1) // 2):
        back.append(_shift(back[-1], axis_name, not shift_up))
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
        total = jax.tree.map(jnp.add, _shift(total, axis_name, shift_up), x)
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


Direction = Literal["ring", "bidirectional", "split"]
"""How blocks travel. `ring`: one way. `bidirectional`: whole blocks both ways, so the longest chain
of hops is half as long. `split`: the two halves of every block in opposite ways."""

Compute = Callable[[int, jax.Array], Any]
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

    axis_name: str
    """Mesh axis; consecutive devices should be physical neighbours."""
    direction: Direction
    halve_batch: bool = False
    """Let `split` halve the first dim of a block instead of `dim`."""
    fuse_halves: bool = False
    """Let `split` compute on the two halves that are here at the same time as on one block: larger
    matmuls, for two more copies."""

    @property
    def num_pieces(self) -> int:
        """The number of pieces in which a block travels."""
        return 2 if self.direction == "split" else 1

    def positions(self) -> list[tuple[int, int]]:
        """Return pairs (k, p) in the order in which device s has them: piece p of device s - k."""
        n = lax.axis_size(self.axis_name)
        if self.direction == "bidirectional":
            ways = [(way * hop, 0) for hop in range(1, n // 2 + 1) for way in (1, -1)]
            return [(0, 0), *ways[: n - 1]]
        ways = [(0, 1), (1, -1)][: self.num_pieces]
        return [(way * hop, piece) for hop in range(n) for piece, way in ways]

    def gather(self, x: jax.Array, compute: Compute, dim: int) -> tuple[list[jax.Array], list[Any]]:
        """Return all pieces of `x`, and `compute` of each, by position; hops run underneath."""
        hops = list(self._hops(x, compute, dim))
        return [p for pieces, _ in hops for p in pieces], [
            r for _, results in hops for r in results
        ]

    def _hops(
        self, x: jax.Array, compute: Compute, dim: int
    ) -> Iterator[tuple[list[jax.Array], list[Any]]]:
        """Yield, hop by hop, the pieces that have arrived and the results on them."""
        n, position, hop = lax.axis_size(self.axis_name), 0, 0
        arrived = moving = self.split_pieces(x, dim)
        last = (n - 1, n - 1)
        if self.direction == "bidirectional":
            moving, last = [x, x], (n // 2, (n - 1) // 2)
        while arrived:
            hop += 1
            ahead = [
                _shift(block, self.axis_name, up)
                for block, up, hops in zip(moving, (True, False), last, strict=False)
                if hop <= hops
            ]
            results = self._compute_on(arrived, partial(_at, compute, position), dim)
            # The barrier makes the next pieces wait for this hop's results. Without it libtpu
            # issues all hops first, and then computes while nothing travels.
            moving, results = lax.optimization_barrier((ahead, results))
            yield arrived, results
            position, arrived = position + len(arrived), moving

    def _compute_on(
        self, pieces: list[Any], compute: Callable[[Any, int], Any], dim: int
    ) -> list[Any]:
        """Return compute(piece, index) of each; on their concatenation with `fuse_halves`."""
        if not self.fuse_halves or self.num_pieces == 1:
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

        The sum of a position ends at the device that owns the position's piece. Positions are taken
        last to first, so every sum travels against its blocks.

        hide_last_hop: Other work that does not need the result follows and hides the last hop.
            Otherwise `bidirectional` sends that hop under its last term.
        """
        if self.direction == "bidirectional":
            return self._scatter_both_ways(lambda position: term(piece(position)), hide_last_hop)
        sums: list[jax.Array] = []
        for hop in range(lax.axis_size(self.axis_name) - 1, -1, -1):
            here = [piece(hop * self.num_pieces + index) for index in range(self.num_pieces)]
            terms = self._compute_on(here, lambda it, _: term(it), dim)
            sums = self._shift_and_add(sums, terms, (False, True))
        return self.concat_pieces(sums, dim)

    def _scatter_both_ways(
        self, term: Callable[[int], jax.Array], hide_last_hop: bool
    ) -> jax.Array:
        n = lax.axis_size(self.axis_name)
        sums: dict[bool, jax.Array] = {}
        for late in range(n // 2):
            for up, hops in ((False, n // 2 - late), (True, (n - 1) // 2 - late)):
                if hops > 0:
                    total = term(2 * hops if up else 2 * hops - 1)
                    if up in sums:
                        total = add_arriving(_shift(sums[up], self.axis_name, up), total)
                    sums[up] = total
        arriving = [_shift(total, self.axis_name, up) for up, total in sums.items()]
        own = term(0)
        if hide_last_hop or not arriving:
            return reduce(lambda y, r: add_arriving(r, y), arriving, own)
        # The sum that was sent last arrives last: add it by itself, after the last term.
        return reduce(lambda y, r: add_arriving(r, y), arriving[1:], own) + arriving[0]

    def gather_scatter(
        self,
        x: jax.Array,
        compute: Compute,
        term: Callable[[Any], jax.Array],
        *,
        dim: int,
        hide_last_hop: bool = False,
    ) -> tuple[list[jax.Array], list[Any], jax.Array]:
        """Run `gather`, then `scatter` of term(result); return pieces, results and the sum.

        With `ring` and `split` every sum follows its blocks, so both rings run at the same time.
        """
        if self.direction == "bidirectional":
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
            add_arriving(_shift(total, self.axis_name, up), term)
            for total, term, up in zip(sums, terms, ups, strict=False)
        ]

    def split_pieces(self, block: jax.Array, dim: int) -> list[jax.Array]:
        """Return the pieces in which a block travels: the block, or its halves."""
        half_dim = self._half_dim(block.shape, dim)
        if self.num_pieces == 1:
            return [block]
        return list(jnp.split(block, self.num_pieces, axis=half_dim))

    def _half_dim(self, shape: Sequence[int], dim: int) -> int:
        """Return the dim that is halved. Raises: ValueError if its size is odd."""
        half_dim = 0 if self.halve_batch else dim
        if shape[half_dim] % self.num_pieces:
            raise ValueError(
                f"overlap split halves a block of {tuple(shape)} along dim {half_dim}: use an even "
                "size there, or overlap bidirectional"
            )
        return half_dim

    def concat_pieces(self, pieces: Sequence[jax.Array], dim: int) -> jax.Array:
        """Return the block that `split_pieces` split."""
        half_dim = 0 if self.halve_batch else dim
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=half_dim)

    def shard(self, whole: jax.Array, dim: int) -> Callable[[int], jax.Array]:
        """Return the function position -> piece of an array in natural order along `dim`."""
        dim, sizes = dim % whole.ndim, list(whole.shape)
        _check_blocks(sizes, dim, self.axis_name)
        sizes[dim] //= lax.axis_size(self.axis_name)
        sizes[self._half_dim(sizes, dim)] //= self.num_pieces

        def piece(position: int) -> jax.Array:
            return lax.dynamic_slice(whole, self._start(sizes, dim, position), sizes)

        return piece

    def unshard(self, pieces: Sequence[jax.Array], dim: int) -> jax.Array:
        """Return the array in natural order along `dim` from its pieces by position."""
        first, dim = pieces[0], dim % pieces[0].ndim
        shape = list(first.shape)
        shape[dim] *= lax.axis_size(self.axis_name)
        shape[0 if self.halve_batch else dim] *= self.num_pieces
        varying = tuple(jax.typeof(first).manual_axis_type.varying)
        whole = pcast_varying(lax.empty(tuple(shape), first.dtype), varying)
        for position, piece in enumerate(pieces):
            start = self._start(first.shape, dim, position)
            whole = lax.dynamic_update_slice(whole, piece, start)
        return whole

    def _start(self, sizes: Sequence[int], dim: int, position: int) -> list[Any]:
        """Return the start indices of a piece of these sizes in the array in natural order."""
        n, s = lax.axis_size(self.axis_name), lax.axis_index(self.axis_name)
        offset, piece = self.positions()[position]
        start: list[Any] = [np.int32(0)] * len(sizes)  # the dtype of axis_index, under x64 too
        start[dim] = (s - offset) % n * sizes[dim]
        if self.halve_batch:
            start[0] = np.int32(piece * sizes[0])
        else:
            start[dim] = start[dim] * self.num_pieces + piece * sizes[dim]
        return start


def _at(compute: Compute, first: int, piece: jax.Array, index: int) -> Any:
    return compute(first + index, piece)


def add_arriving(arriving: jax.Array, term: jax.Array) -> jax.Array:
    """Return arriving + term, added in float32 and rounded to their dtype.

    Written as y - (-r): libtpu fuses this form into the matmul that computes `term`, but not the
    plain sum.
    """
    wide = jnp.promote_types(term.dtype, jnp.float32)
    return (term.astype(wide) - (-arriving.astype(wide))).astype(term.dtype)
