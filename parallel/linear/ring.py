"""Data around a ring of devices, hop by hop, and the plain collectives that do the same.

Every function here runs inside `jax.shard_map` on local blocks; `axis_name` is the ring, n its
size, s this device's index on it. First the verbs, on arrays and pytrees: `async_gather*` and
`async_scatter*` hop by hop, `all_gather` and `reduce_scatter` in one collective. Then `Ring`, the
engine of the collective matmuls: work on each block as it arrives, sums that travel. Every hop is a
`ppermute` to a neighbour. It refuses to know what the numbers mean: no matmul in here. The names
and list orders of the async verbs are those of the published reference
`xlstm_jax.distributed.tensor_parallel`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


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
    """The sum of x over the axis, each device keeping its block along `dim`.

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


Direction = Literal["ring", "bidirectional", "split"]
"""How blocks travel: `ring` one way; `bidirectional` whole blocks both ways, the longest chain half
as long; `split` the two halves of every block in opposite ways."""

Work = Callable[[int, jax.Array], Any]
"""From the position and the block that arrived there to a result."""


@dataclass(frozen=True)
class Ring:
    """The order in which the blocks of n devices pass this one, and that of sums that travel.

    axis_name: the mesh axis; devices that follow each other should be physical neighbours.
    direction: see `Direction`.
    halve_batch: `split` halves the first dim of a block instead of the dim that is gathered.
    together: `split` works on the two halves that are here at the same time as on one block: larger
        matmuls for two copies.
    What arrives has a position, counted in order of arrival; the first are the device's own. There
    are n positions, or 2 n of half blocks (`split`). A chain gather -> work -> scatter never puts
    them in natural order; `cut` and `place` do. Any n >= 1. Communication per device: n - 1 blocks;
    one after another n - 1 (`ring`), n // 2 (`bidirectional`), n - 1 halves (`split`).
    `dim` below: along which the blocks lie in the whole.
    """

    axis_name: str
    direction: Direction
    halve_batch: bool = False
    together: bool = False

    @property
    def pieces(self) -> int:
        """Into how many pieces a block is cut before it travels."""
        return 2 if self.direction == "split" else 1

    def positions(self) -> list[tuple[int, int]]:
        """(offset, piece) by position: that piece of the block of device s - offset."""
        n = lax.axis_size(self.axis_name)
        if self.direction == "bidirectional":
            ways = [(way * hop, 0) for hop in range(1, n // 2 + 1) for way in (1, -1)]
            return [(0, 0), *ways[: n - 1]]
        return [(way * hop, piece) for hop in range(n) for piece, way in self._ways()]

    def _ways(self) -> list[tuple[int, int]]:
        return [(0, 1), (1, -1)][: self.pieces]

    def gather(self, x: jax.Array, work: Work, dim: int) -> tuple[list[jax.Array], list[Any]]:
        """All blocks of x, and the work on each, by position; hops travel under the work."""
        rounds = list(self._rounds(x, work, dim))
        return [b for blocks, _ in rounds for b in blocks], [r for _, done in rounds for r in done]

    def _rounds(
        self, x: jax.Array, work: Work, dim: int
    ) -> Iterator[tuple[list[jax.Array], list[Any]]]:
        """Hop by hop: the blocks that are here, and the results of the work on them."""
        n, position, hop = lax.axis_size(self.axis_name), 0, 0
        fresh = moving = self.cut_in_pieces(x, dim)
        last = (n - 1, n - 1)
        if self.direction == "bidirectional":
            moving, last = [x, x], (n // 2, (n - 1) // 2)
        while fresh:
            hop += 1
            ahead = [
                _shift(block, self.axis_name, up)
                for block, up, hops in zip(moving, (True, False), last, strict=False)
                if hop <= hops
            ]
            done = self._work_on(fresh, partial(_at, work, position), dim)
            # Pinned: the next blocks may be used only when this hop's work is done. Without it
            # libtpu issues all hops first and computes while nothing travels.
            moving, done = lax.optimization_barrier((ahead, done))
            yield fresh, done
            position, fresh = position + len(fresh), moving

    def _work_on(self, here: list[Any], work: Callable[[Any, int], Any], dim: int) -> list[Any]:
        """work(piece, index) on what is here at the same time, as one block if `together`."""
        if not self.together or self.pieces == 1:
            return [work(piece, index) for index, piece in enumerate(here)]
        joined = jax.tree.map(lambda *pieces: self.join(pieces, dim), *here)
        leaves, tree = jax.tree.flatten(work(joined, 0))
        parted = zip(*(self.cut_in_pieces(leaf, dim) for leaf in leaves), strict=True)
        return [jax.tree.unflatten(tree, piece) for piece in parted]

    def scatter(
        self,
        piece: Callable[[int], Any],
        part: Callable[[Any], jax.Array],
        *,
        dim: int,
        followed: bool = False,
    ) -> jax.Array:
        """The sum over devices of part(piece(position)), ending where the position is owned.

        Positions are taken last to first: every sum travels against the block that it came from.
        followed: work that does not wait for the result comes next and hides the last hop;
        otherwise (`bidirectional`) that hop travels under the last part.
        """
        if self.direction == "bidirectional":
            return self._scatter_both_ways(lambda position: part(piece(position)), followed)
        sums: list[jax.Array] = []
        for hop in range(lax.axis_size(self.axis_name) - 1, -1, -1):
            here = [piece(hop * self.pieces + index) for index in range(self.pieces)]
            parts = self._work_on(here, lambda it, _: part(it), dim)
            sums = self._pass_on(sums, parts, (False, True))
        return self.join(sums, dim)

    def _scatter_both_ways(self, part: Callable[[int], jax.Array], followed: bool) -> jax.Array:
        n = lax.axis_size(self.axis_name)
        sums: dict[bool, jax.Array] = {}
        for late in range(n // 2):
            for up, hops in ((False, n // 2 - late), (True, (n - 1) // 2 - late)):
                if hops > 0:
                    product = part(2 * hops if up else 2 * hops - 1)
                    if up in sums:
                        product = add_arriving(_shift(sums[up], self.axis_name, up), product)
                    sums[up] = product
        arriving = [_shift(total, self.axis_name, up) for up, total in sums.items()]
        total = part(0)
        if followed or not arriving:
            return reduce(lambda y, r: add_arriving(r, y), arriving, total)
        # The one that was sent last arrives last: it is added apart, after the last part.
        return reduce(lambda y, r: add_arriving(r, y), arriving[1:], total) + arriving[0]

    def gather_scatter(
        self,
        x: jax.Array,
        work: Work,
        part: Callable[[Any], jax.Array],
        *,
        dim: int,
        followed: bool = False,
    ) -> tuple[list[jax.Array], list[Any], jax.Array]:
        """`gather`, then the `scatter` of part(result); returns blocks, results and the sum.

        `ring` and `split` let a sum follow its blocks: both rings turn at the same time.
        """
        if self.direction == "bidirectional":
            blocks, results = self.gather(x, work, dim)
            y = self.scatter(results.__getitem__, part, dim=dim, followed=followed)
            return blocks, results, y
        blocks, results = [], []
        sums: list[jax.Array] = []
        for arrived, done in self._rounds(x, work, dim):
            if blocks:
                parts = self._work_on(done, lambda result, _: part(result), dim)
                sums = self._pass_on(sums, parts, (True, False))
            blocks, results = blocks + arrived, results + done
        own = self._work_on(results[: self.pieces], lambda result, _: part(result), dim)
        return blocks, results, self.join(self._pass_on(sums, own, (True, False)), dim)

    def _pass_on(
        self, sums: list[jax.Array], parts: list[jax.Array], ups: tuple[bool, bool]
    ) -> list[jax.Array]:
        """Each sum goes one device further and meets the part there."""
        if not sums:
            return parts
        return [
            add_arriving(_shift(total, self.axis_name, up), part)
            for total, part, up in zip(sums, parts, ups, strict=False)
        ]

    def cut_in_pieces(self, block: jax.Array, dim: int) -> list[jax.Array]:
        """What of a block travels by itself: the block, or its halves."""
        half_dim = self._half_dim(block.shape, dim)
        return list(jnp.split(block, self.pieces, axis=half_dim)) if self.pieces > 1 else [block]

    def _half_dim(self, shape: Sequence[int], dim: int) -> int:
        """The dim along which a block of this shape is halved. Raises: ValueError if it is odd."""
        half_dim = 0 if self.halve_batch else dim
        if shape[half_dim] % self.pieces:
            raise ValueError(
                f"overlap split halves a block of {tuple(shape)} along dim {half_dim}: use an even "
                "size there, or overlap bidirectional"
            )
        return half_dim

    def join(self, pieces: Sequence[jax.Array], dim: int) -> jax.Array:
        """A block from its pieces."""
        half_dim = 0 if self.halve_batch else dim
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=half_dim)

    def cut(self, whole: jax.Array, dim: int) -> Callable[[int], jax.Array]:
        """From an array in natural order along `dim`: position -> its piece."""
        dim, sizes = dim % whole.ndim, list(whole.shape)
        _check_blocks(sizes, dim, self.axis_name)
        sizes[dim] //= lax.axis_size(self.axis_name)
        sizes[self._half_dim(sizes, dim)] //= self.pieces

        def piece(position: int) -> jax.Array:
            return lax.dynamic_slice(whole, self._start(sizes, dim, position), sizes)

        return piece

    def place(self, blocks: Sequence[jax.Array], dim: int) -> jax.Array:
        """The whole in natural order along `dim`, from pieces by position; written in place."""
        first, dim = blocks[0], dim % blocks[0].ndim
        shape = list(first.shape)
        shape[dim] *= lax.axis_size(self.axis_name)
        shape[0 if self.halve_batch else dim] *= self.pieces
        varying = tuple(jax.typeof(first).manual_axis_type.varying)
        whole = vary(lax.empty(tuple(shape), first.dtype), varying)
        for position, block in enumerate(blocks):
            start = self._start(first.shape, dim, position)
            whole = lax.dynamic_update_slice(whole, block, start)
        return whole

    def _start(self, sizes: Sequence[int], dim: int, position: int) -> list[Any]:
        """Where a piece of these sizes lies in the whole."""
        n, s = lax.axis_size(self.axis_name), lax.axis_index(self.axis_name)
        offset, piece = self.positions()[position]
        start: list[Any] = [np.int32(0)] * len(sizes)  # of the index's type, under x64 too
        start[dim] = (s - offset) % n * sizes[dim]
        if self.halve_batch:
            start[0] = np.int32(piece * sizes[0])
        else:
            start[dim] = start[dim] * self.pieces + piece * sizes[dim]
        return start


def _at(work: Work, first: int, block: jax.Array, index: int) -> Any:
    return work(first + index, block)


def add_arriving(arriving: jax.Array, product: jax.Array) -> jax.Array:
    """arriving + product in float32, rounded to their dtype.

    Written as y - (-r): libtpu fuses this into the matmul, and not the plain sum.
    """
    wide = jnp.promote_types(product.dtype, jnp.float32)
    return (product.astype(wide) - (-arriving.astype(wide))).astype(product.dtype)
