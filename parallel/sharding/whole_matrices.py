"""Functions of whole matrices, applied to matrices that are stored in shards.

The devices that hold shards of a stack of matrices exchange them, so that each holds some of the
matrices whole. No device computes the function of a matrix that another device computes too, as
long as there are enough matrices.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from parallel.sharding.specs import mesh_axes_of


def map_whole_matrices(
    function: Callable[[jax.Array], jax.Array], stacks: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Return `function(matrix)` for each matrix of some stacks, in shards as the stacks are.

    Args:
        function: (M, N) -> (M, N). Matrices are passed to it one after the other.
        stacks: arrays (..., M, N) with the same M and N and the same sharding, whichever it is.
            Call it inside of jit.

    Communication: an all-to-all over each of the dims M and N that is sharded, and the same back.
    Each carries the shards of a device, padded with zeros until every device has equally many
    matrices. If several replicas share the work, each all-to-all carries only their part of the
    shards, and an all-gather over the replicas restores the shards.
    """
    sharding = jax.typeof(stacks[0]).sharding
    mesh, spec = sharding.mesh, sharding.spec
    if mesh.empty:
        return _on_shards(*stacks, function=function, rows=(), columns=(), replicas=(), share=1)
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    axes = [tuple(name for name in mesh_axes_of(entry) if name in sizes) for entry in spec]
    *outer, rows, columns = axes
    holders = math.prod(sizes[name] for name in rows + columns)
    of_a_device = sum(math.prod(stack.shape[:-2]) for stack in stacks) // math.prod(
        sizes[name] for entry in outer for name in entry
    )
    idle = [name for name in sizes if all(name not in entry for entry in axes)]
    replicas = _useful(idle, sizes, -(-of_a_device // holders))
    body = partial(
        _on_shards,
        function=function,
        rows=rows,
        columns=columns,
        replicas=replicas,
        share=holders * math.prod(sizes[name] for name in replicas),
    )
    specs = (spec,) * len(stacks)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs)(*stacks)


def _on_shards(
    *shards: jax.Array,
    function: Callable[[jax.Array], jax.Array],
    rows: tuple[str, ...],
    columns: tuple[str, ...],
    replicas: tuple[str, ...],
    share: int,
) -> tuple[jax.Array, ...]:
    """Return the function of the matrices whose shards this device holds.

    Args:
        shards: (..., m, n), blocks of stacks.
        function: (M, N) -> (M, N).
        rows: mesh axes that divide M.
        columns: mesh axes that divide N.
        replicas: mesh axes whose devices hold the same shards and divide the work.
        share: number of devices that divide the matrices of these shards.
    """
    flat = [shard.reshape(-1, *shard.shape[-2:]) for shard in shards]
    joined = jnp.concatenate(flat) if len(flat) > 1 else flat[0]
    padded = jnp.pad(joined, [(0, -len(joined) % share), (0, 0), (0, 0)])
    if replicas:
        size = len(padded) // math.prod(lax.axis_size(name) for name in replicas)
        padded = lax.dynamic_slice_in_dim(padded, lax.axis_index(replicas) * size, size)
    result = lax.map(function, _exchange(padded, rows, columns))
    result = _exchange(result, rows, columns, is_back=True)
    if replicas:
        result = lax.all_gather(result, replicas, tiled=True, to="invarying")
    ends = [sum(len(part) for part in flat[: n + 1]) for n in range(len(flat))]
    parts = jnp.split(result[: ends[-1]], ends[:-1])
    return tuple(part.reshape(shard.shape) for part, shard in zip(parts, shards, strict=True))


def _useful(idle: list[str], sizes: dict[str, int], matrices: int) -> tuple[str, ...]:
    """Return the axes of replicas over which that many matrices of a device can be divided."""
    found, divided = [], 1
    for name in idle:
        if -(-matrices // (divided * sizes[name])) < -(-matrices // divided):
            found.append(name)
            divided *= sizes[name]
    return tuple(found)


def _exchange(
    stack: jax.Array, rows: tuple[str, ...], columns: tuple[str, ...], *, is_back: bool = False
) -> jax.Array:
    """Return whole matrices, fewer of them, for shards of matrices, or the other way back."""
    moves = [(columns, 2), (rows, 1)]
    for names, dim in reversed(moves) if is_back else moves:
        if names:
            dims = (dim, 0) if is_back else (0, dim)
            stack = lax.all_to_all(stack, names, *dims, tiled=True)
    return stack
