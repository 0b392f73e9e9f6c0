"""Functions of whole matrices, applied to matrices that are stored in shards.

The devices that hold shards of a stack of matrices exchange them, so that each holds some of the
matrices whole. No device computes the function of a matrix that another device computes too, as
long as there are enough matrices.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.sharding.specs import mesh_axes_of

Tree = Any
Arrays = list[jax.Array]


@dataclass(frozen=True)
class _Layout:
    """The division of a stack: several arrays (..., M, N) with the same leading dims.

    Attributes:
        parts: mesh axes that divide the matrices, and for every array the dim (1 or 2) that they
            divide, or None: then these devices have the same values of it.
        replicas: mesh axes whose devices hold the same shards and divide the work.
        share: number of devices that divide the matrices of the same shards.
    """

    parts: tuple[tuple[tuple[str, ...], tuple[int | None, ...]], ...]
    replicas: tuple[str, ...]
    share: int

    def moves(self, index: int) -> Iterator[tuple[tuple[str, ...], int | None]]:
        """Yield the mesh axes that divide matrices, and which dim of this array they divide."""
        yield from ((names, dims[index]) for names, dims in self.parts)


def map_whole_matrices(
    function: Callable[..., Tree],
    stacks: Sequence[Tree],
    read: Sequence[Tree] | None = None,
    shared: Sequence[jax.Array] = (),
) -> tuple[Tree, ...]:
    """Return a function of each matrix of some stacks, in shards as the stacks are.

    Stacks with the same sizes, shardings and dtypes are computed together, so that fewer devices
    are left without a matrix. Call it inside of jit.

    Args:
        function: (matrices, *shared) -> matrices, or (matrices, matrices to read, *shared) ->
            matrices. Matrices are a tree like a stack, with one matrix of each of its arrays. The
            result has the structure, the shapes and the dtypes of the first argument. The function
            is called for the matrices of a stack one after the other.
        stacks: trees of arrays (..., M, N). The arrays of a tree may have different M and N; the
            dims before these are equal and equally sharded. The mesh axes that divide M of the
            array with the smallest shards divide M, or N, or neither of the others; likewise those
            that divide its N. No other axes divide a matrix.
        read: a tree of such arrays for each stack, which is not returned; None: there is none.
        shared: arrays that every device has whole.

    Communication: for every array an all-to-all over each of the dims M and N that is sharded, and
    the same back if it is returned. Each carries the shards of a device, padded with zeros until
    every device has equally many matrices. If several devices have the same shard and share the
    work, each all-to-all carries only their part of it, and an all-gather over these devices
    restores the shards.

    Raises:
        ValueError: Other axes divide a matrix.
    """
    trees = list(stacks) if read is None else list(zip(stacks, read, strict=True))
    alike: dict[Any, list[int]] = {}
    for index, tree in enumerate(trees):
        leaves, structure = jax.tree.flatten(tree)
        layouts = [(x.shape[-2:], jax.typeof(x).sharding, x.dtype) for x in leaves]
        alike.setdefault((structure, *layouts), []).append(index)
    results = list(stacks)
    for (structure, *_), indices in alike.items():
        kept = jax.tree.structure(stacks[indices[0]])
        arrays = [jax.tree.leaves(trees[index]) for index in indices]
        each = partial(_of_leaves, function, structure, has_read=read is not None)
        found = _map_alike(each, arrays, len(jax.tree.leaves(stacks[indices[0]])), list(shared))
        for index, leaves in zip(indices, found, strict=True):
            results[index] = jax.tree.unflatten(kept, leaves)
    return tuple(results)


def _of_leaves(
    function: Callable[..., Tree], structure: Any, leaves: Arrays, shared: Arrays, *, has_read: bool
) -> Arrays:
    """Return the arrays of the function of trees with these arrays."""
    tree = jax.tree.unflatten(structure, leaves)
    return jax.tree.leaves(function(*tree, *shared) if has_read else function(tree, *shared))


def _map_alike(
    function: Callable[[Arrays, Arrays], Arrays],
    stacks: list[Arrays],
    num_returned: int,
    shared: Arrays,
) -> list[Arrays]:
    """Return `function(matrices, shared)` of all matrices of stacks with equal sizes and layouts.

    num_returned: the number of arrays that it returns. They have the shapes and shardings of the
    first arrays of a stack.
    """
    arrays = stacks[0]
    mesh = jax.typeof(arrays[0]).sharding.mesh
    if mesh.empty:
        return _on_shards(stacks, shared, function=function, layout=_Layout((), (), 1))
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    specs = [jax.typeof(x).sharding.spec for x in arrays]

    def axes(entry: Any) -> tuple[str, ...]:
        return tuple(name for name in mesh_axes_of(entry) if name in sizes)

    def divided(dims: list[tuple[str, ...]], names: tuple[str, ...]) -> int | None:
        return next((dim for dim in (1, 2) if dims[dim - 3] == names), None)

    entries = [[axes(entry) for entry in spec] for spec in specs]
    *outer, rows, columns = max(entries, key=lambda names: len(names[-2] + names[-1]))
    if odd := {names for *_, m, n in entries for names in (m, n)} - {rows, columns, ()}:
        raise ValueError(f"matrices divided over {odd}, beside others over {rows} and {columns}")
    parts = [(names, tuple(divided(dims, names) for dims in entries)) for names in (columns, rows)]
    holders = math.prod(sizes[name] for name in rows + columns)
    of_a_device = sum(math.prod(stack[0].shape[:-2]) for stack in stacks) // math.prod(
        sizes[name] for names in outer for name in names
    )
    idle = [name for name in sizes if all(name not in names for names in (*outer, rows, columns))]
    replicas = _useful(idle, sizes, -(-of_a_device // holders))
    layout = _Layout(
        parts=tuple(part for part in parts if part[0]),
        replicas=replicas,
        share=holders * math.prod(sizes[name] for name in replicas),
    )
    return jax.shard_map(
        partial(_on_shards, function=function, layout=layout),
        mesh=mesh,
        in_specs=([specs] * len(stacks), P()),
        out_specs=[specs[:num_returned]] * len(stacks),
    )(stacks, shared)


def _on_shards(
    stacks: list[Arrays],
    shared: Arrays,
    *,
    function: Callable[[Arrays, Arrays], Arrays],
    layout: _Layout,
) -> list[Arrays]:
    """Return the function of the matrices whose shards this device holds.

    Args:
        stacks: arrays (..., m, n), blocks of those of each stack.
        shared: arrays that every device has whole.
        function: (matrices (M, N), shared) -> matrices.
        layout: how the matrices are divided.
    """
    counts = [math.prod(stack[0].shape[:-2]) for stack in stacks]
    whole = []
    for index, blocks in enumerate(zip(*stacks, strict=True)):
        flat = [block.reshape(-1, *block.shape[-2:]) for block in blocks]
        joined = jnp.concatenate(flat) if len(flat) > 1 else flat[0]
        padded = jnp.pad(joined, [(0, -len(joined) % layout.share), (0, 0), (0, 0)])
        for names, dim in [(layout.replicas, None), *layout.moves(index)]:
            if dim is not None:
                padded = lax.all_to_all(padded, names, 0, dim, tiled=True)
            elif names:
                padded = _own_part(padded, names)
        whole.append(padded)
    results = lax.map(lambda matrices: function(matrices, shared), whole)
    returned = []
    for index, result in enumerate(results):
        for names, dim in reversed([(layout.replicas, None), *layout.moves(index)]):
            if dim is not None:
                result = lax.all_to_all(result, names, dim, 0, tiled=True)
            elif names:
                result = lax.all_gather(result, names, tiled=True, to="invarying")
        ends = [sum(counts[: n + 1]) for n in range(len(counts))]
        returned.append(jnp.split(result[: ends[-1]], ends[:-1]))
    return [
        [part.reshape(block.shape) for part, block in zip(parts, stack, strict=False)]
        for parts, stack in zip(zip(*returned, strict=True), stacks, strict=True)
    ]


def _own_part(stack: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Return this device's part of a stack that the devices of some mesh axes divide."""
    size = len(stack) // math.prod(lax.axis_size(name) for name in names)
    return lax.dynamic_slice_in_dim(stack, lax.axis_index(names) * size, size)


def _useful(idle: list[str], sizes: dict[str, int], matrices: int) -> tuple[str, ...]:
    """Return the axes of replicas over which that many matrices of a device can be divided."""
    found, divided = [], 1
    for name in idle:
        if -(-matrices // (divided * sizes[name])) < -(-matrices // divided):
            found.append(name)
            divided *= sizes[name]
    return tuple(found)
