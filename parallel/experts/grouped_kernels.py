"""Products of blocks of rows with the matrix of their group, as TPU kernels.

Groups of rows begin at multiples of a block, and so every block belongs to one group; blocks that
are in use come first. One kernel multiplies rows by matrices, the other rows by rows; both walk
over `Steps`, which are told to the chip before it starts, so that the next block and the next
matrix travel under the product of this one. Results are typed as varying like the rows. It refuses
rows that lie elsewhere, and to know derivatives: `parallel/experts/grouped_matmul.py` does.

Letters: R rows, E groups, D features in, F features out, N steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Columns of a tile are multiples of the lanes of a vector register, rows of its sublanes.
_LANES, _SUBLANES = 128, 16
# A core has 64 MiB of VMEM or more, TPU v4 has 16; XLA keeps some (libtpu 0.0.42.1).
_VMEM_BYTES, _SMALL_VMEM_BYTES, _SMALL_VMEM = 60 << 20, 15 << 20, ("TPU v4",)
# Rows of a tile of a sum, at most: higher ones leave no room for wide ones. And what a tile costs
# beyond its columns, in columns: it reads the other operand once more.
_LARGEST_TILE, _TILE_COST = 2048, 64
_CORES = 2  # of a chip that jax takes for one device (TPU v4, v5p); one takes the tiles in turn


@dataclass(frozen=True)
class Steps:
    """A walk over blocks, group by group.

    group_N: whose block it is. source_N: the block that is read. count_N: how many of its rows
    count; a step of none reads what is there already and multiplies nothing.
    """

    block: int
    group_N: jax.Array
    source_N: jax.Array
    count_N: jax.Array

    @property
    def tables(self) -> tuple[jax.Array, ...]:
        """What every index map and kernel sees first, in this order."""
        return self.group_N, self.source_N, self.count_N


def steps(sizes_E: jax.Array, block: int, rows: int, *, at_least: int) -> Steps:
    """The steps over groups of these sizes, rounded up to whole blocks, in a buffer of `rows`.

    at_least: steps of every group, also of one without rows (0 or 1); with 0, step i is block i.
    Raises: ValueError for a block that is no whole number of registers.
    """
    if block % _SUBLANES:
        raise ValueError(
            f"grouped matmul pallas in blocks of {block} rows: they must be a multiple of "
            f"{_SUBLANES}; use 512"
        )
    blocks_E = -(-sizes_E // block)
    first_E = jnp.cumsum(blocks_E, dtype=jnp.int32) - blocks_E
    steps_E = jnp.maximum(blocks_E, at_least)
    ends_E = jnp.cumsum(steps_E, dtype=jnp.int32)
    groups, blocks = sizes_E.shape[0], rows // block
    step_N = jnp.arange(blocks + at_least * groups, dtype=jnp.int32)
    # Steps left over stay at the last one.
    live_N = jnp.maximum(jnp.minimum(step_N, ends_E[-1] - 1), 0)
    # Compared with all ends, not searched: a search is a loop on a TPU.
    group_N = jnp.sum(live_N[:, None] >= ends_E, axis=1, dtype=jnp.int32)
    group_N = jnp.minimum(group_N, groups - 1)
    nth_N = live_N - (ends_E - steps_E)[group_N]
    source_N = jnp.minimum(first_E[group_N] + nth_N, blocks - 1)
    count_N = jnp.clip(sizes_E[group_N] - nth_N * block, 0, block)
    return Steps(block, group_N, source_N, jnp.where(step_N < ends_E[-1], count_N, 0))


def products(
    x_RD: jax.Array,
    w_EDF: jax.Array,
    steps: Steps,
    *,
    transposed: bool,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Every block times the matrix of its group, `R F`; blocks that are not in use give zeros.

    transposed: times the transpose, `R F` -> `R D`. A grid of tiles of columns by blocks: a matrix
    stays in VMEM while the blocks of its group pass, rows are read once per tile of columns.
    Raises: ValueError for rows so long that not even one tile fits.
    """
    (R, depth), block, item = x_RD.shape, steps.block, x_RD.dtype.itemsize
    width = w_EDF.shape[1 if transposed else 2]
    # Arrays have two buffers each, and libtpu copies the rows; the product is float32.
    room = _vmem_bytes() - 3 * item * block * depth
    tile = _tile(width, room / (2 * item * (depth + block) + 4 * block), cores=_CORES)
    if transposed:
        matrix = pl.BlockSpec((None, tile, depth), lambda n, i, group, *_: (group[i], n, 0))
    else:
        matrix = pl.BlockSpec((None, depth, tile), lambda n, i, group, *_: (group[i], 0, n))
    return _launch(
        partial(_products_kernel, transposed=transposed, precision=precision),
        "grouped_products",
        steps,
        (x_RD, w_EDF),
        shape=(R, width),
        flops=2 * R * depth * width,
        grid=(pl.cdiv(width, tile), R // block),
        in_specs=[
            pl.BlockSpec((block, depth), lambda n, i, group, source, count: (source[i], 0)),
            matrix,
        ],
        out_specs=pl.BlockSpec((block, tile), lambda n, i, *_: (i, n)),
    )


def _products_kernel(*refs: Any, transposed: bool, precision: lax.PrecisionLike) -> None:
    _, _, count_N, x, w, y = refs
    used = count_N[pl.program_id(1)] > 0

    @pl.when(used)
    def multiply() -> None:
        y[...] = _dot(x[...], w[...], (1, 1 if transposed else 0), precision).astype(y.dtype)

    @pl.when(jnp.logical_not(used))
    def clear() -> None:
        y[...] = jnp.zeros_like(y)


def outers(
    x_RD: jax.Array,
    g_RF: jax.Array,
    steps: Steps,
    *,
    groups: int,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """For every group the sum over its rows of x_r^T g_r, `E D F`. Every group must have a step.

    A grid of tiles of a matrix by steps: the float32 sum stays in VMEM while a group passes.
    """
    (R, D), F, block, item = x_RD.shape, g_RF.shape[1], steps.block, x_RD.dtype.itemsize
    tall = _tile(D, _LARGEST_TILE)
    room = _vmem_bytes() - 3 * item * block * tall
    wide = _tile(F, room / (2 * item * (tall + block) + 8 * tall), cores=_CORES)
    return _launch(
        partial(_outers_kernel, precision=precision),
        "grouped_outers",
        steps,
        (x_RD, g_RF),
        shape=(groups, D, F),
        flops=2 * R * D * F,
        grid=(pl.cdiv(F, wide), pl.cdiv(D, tall), steps.group_N.shape[0]),
        in_specs=[
            pl.BlockSpec((block, tall), lambda n, k, i, group, source, count: (source[i], k)),
            pl.BlockSpec((block, wide), lambda n, k, i, group, source, count: (source[i], n)),
        ],
        out_specs=pl.BlockSpec((None, tall, wide), lambda n, k, i, group, *_: (group[i], k, n)),
        scratch_shapes=[pltpu.VMEM((tall, wide), jnp.float32)],
    )


def _outers_kernel(*refs: Any, precision: lax.PrecisionLike) -> None:
    group_N, _, count_N, x, g, dw, sum_DF = refs
    i, last = pl.program_id(2), pl.num_programs(2) - 1
    group, count = group_N[i], count_N[i]

    @pl.when((i == 0) | (group_N[jnp.maximum(i - 1, 0)] != group))
    def begin() -> None:
        sum_DF[...] = jnp.zeros_like(sum_DF)

    @pl.when(count > 0)
    def add() -> None:
        real = lax.broadcasted_iota(jnp.int32, x.shape, 0) < count
        sum_DF[...] += _dot(jnp.where(real, x[...], jnp.zeros_like(x)), g[...], (0, 0), precision)

    @pl.when((i == last) | (group_N[jnp.minimum(i + 1, last)] != group))
    def end() -> None:
        dw[...] = sum_DF[...].astype(dw.dtype)


def _dot(
    x: jax.Array, y: jax.Array, contracted: tuple[int, int], precision: lax.PrecisionLike
) -> jax.Array:
    """The product over these dims, float32."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _vmem_bytes() -> int:
    """What a kernel may hold; that of most chips if the mesh does not tell which it is."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    small = device is not None and device.device_kind in _SMALL_VMEM
    return _SMALL_VMEM_BYTES if small else _VMEM_BYTES


def _tile(width: int, most: float, *, cores: int = 1) -> int:
    """Columns of a tile, at most so many; the last tile may stick out.

    cores: how many share the tiles out. Raises: ValueError if not even the smallest fits.
    """
    sizes = [*range(_LANES, width, _LANES), width]
    fitting = [size for size in sizes if size <= most]
    if not fitting:
        raise ValueError(
            f"grouped matmul pallas: a tile of {sizes[0]} of {width} columns does not fit into "
            "VMEM; use smaller blocks"
        )
    return min(fitting, key=lambda size: pl.cdiv(width, size * cores) * (size + _TILE_COST))


def _launch(
    kernel: Callable[..., None],
    name: str,
    steps: Steps,
    arrays: tuple[jax.Array, jax.Array],
    *,
    shape: tuple[int, ...],
    flops: int,
    grid: tuple[int, ...],
    **specs: Any,
) -> jax.Array:
    """Runs a kernel on a grid: cores share out its first dim, its last are the steps."""
    types = jax.typeof(arrays[0]).manual_axis_type
    out = jax.ShapeDtypeStruct(shape, arrays[0].dtype, manual_axis_type=types)
    semantics: Any = ("parallel", *("arbitrary" for _ in grid[1:]))
    moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in (*arrays, out))
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps.tables), grid=grid, **specs
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=_vmem_bytes()
        ),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        name=name,
    )(*steps.tables, *arrays)
