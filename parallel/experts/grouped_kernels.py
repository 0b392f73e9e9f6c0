"""TPU kernels for the grouped matmul of rows in blocks.

Groups start at multiples of a block, so every block belongs to one group, and the blocks in use
come first. `gmm` multiplies rows by matrices, `tgmm` rows by rows (the weight gradient). Both walk
over `GridSteps`, which reach the chip before the kernel starts, so that the next block and matrix
are copied during the current product. Outputs vary over the same mesh axes as the rows. Gradients
are defined in `grouped_matmul.py`.

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

from parallel.experts.row_layout import RowGroups

BLOCKS = (512, 256, 128)
"""Rows of a block, best first: larger ones fill the matrix units, smaller ones need less VMEM."""
# Column counts of a tile are multiples of the lanes of a vector register, rows of its sublanes.
_LANES, _SUBLANES = 128, 16
# VMEM that a kernel may use: a core has 64 MiB or more, TPU v4 has 16, and XLA keeps some for
# itself (libtpu 0.0.42.1).
_VMEM_BYTES, _SMALL_VMEM_BYTES, _SMALL_VMEM_CHIPS = 60 << 20, 15 << 20, ("TPU v4",)
# Most rows of a tile of the weight gradient: higher tiles leave no room for wide ones.
_MAX_TILE_ROWS = 2048
# Fixed cost of a tile, in columns: each tile reads the other operand once more.
_TILE_COST = 64
# TPU v4 and v5p: a jax device has two cores, which share the tiles; other chips have one.
_CORES = 2


@dataclass(frozen=True)
class GridSteps:
    """Walk over the blocks of rows, group by group.

    group_N: group of the block. block_N: block to read. count_N: its used rows; a step with none
    repeats the previous block and multiplies nothing.
    """

    block_rows: int
    group_N: jax.Array
    block_N: jax.Array
    count_N: jax.Array

    @property
    def tables(self) -> tuple[jax.Array, ...]:
        """The leading arguments of every index map and kernel, in this order."""
        return self.group_N, self.block_N, self.count_N


def grid_steps(groups: RowGroups, *, min_steps: int) -> GridSteps:
    """Return the steps over all blocks in use of a `blocks` layout.

    min_steps: 1 gives empty groups a step too; 0 makes step i read block i.
    Raises: ValueError for a block that is not a multiple of the registers' sublanes.
    """
    layout, sizes_E = groups.layout, groups.sizes_E
    block, num_groups, num_blocks = layout.block, layout.groups, layout.rows // layout.block
    if block % _SUBLANES:
        raise ValueError(
            f"grouped matmul pallas in blocks of {block} rows: they must be a multiple of "
            f"{_SUBLANES}; use 512"
        )
    blocks_E = -(-sizes_E // block)
    first_E = jnp.cumsum(blocks_E, dtype=jnp.int32) - blocks_E
    steps_E = jnp.maximum(blocks_E, min_steps)
    ends_E = jnp.cumsum(steps_E, dtype=jnp.int32)
    step_N = jnp.arange(num_blocks + min_steps * num_groups, dtype=jnp.int32)
    # Surplus steps repeat the last one.
    live_N = jnp.maximum(jnp.minimum(step_N, ends_E[-1] - 1), 0)
    # Compared with all ends, not searched: a search is a loop on a TPU.
    group_N = jnp.sum(live_N[:, None] >= ends_E, axis=1, dtype=jnp.int32)
    group_N = jnp.minimum(group_N, num_groups - 1)
    nth_N = live_N - (ends_E - steps_E)[group_N]
    block_N = jnp.minimum(first_E[group_N] + nth_N, num_blocks - 1)
    count_N = jnp.clip(sizes_E[group_N] - nth_N * block, 0, block)
    return GridSteps(block, group_N, block_N, jnp.where(step_N < ends_E[-1], count_N, 0))


def gmm(x_RD: jax.Array, w_EDF: jax.Array, steps: GridSteps, *, transpose_w: bool) -> jax.Array:
    """Multiply every block by the matrix of its group, `R F`; blocks not in use give zeros.

    transpose_w: multiply by the transposed matrices, `R F` -> `R D`. The grid is column tiles x
    blocks: a matrix stays in VMEM while the blocks of its group pass, and rows are read once per
    column tile.
    Raises: ValueError for rows so long that not even the smallest tile fits.
    """
    (R, depth), block, item = x_RD.shape, steps.block_rows, x_RD.dtype.itemsize
    width = w_EDF.shape[1 if transpose_w else 2]
    tile = _tile(width, _most_columns(block, depth, item, _vmem_bytes()), cores=_CORES)
    if transpose_w:
        matrix = pl.BlockSpec((None, tile, depth), lambda n, i, group, *_: (group[i], n, 0))
    else:
        matrix = pl.BlockSpec((None, depth, tile), lambda n, i, group, *_: (group[i], 0, n))
    return _launch(
        partial(_gmm_kernel, transpose_w=transpose_w),
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


def _gmm_kernel(*refs: Any, transpose_w: bool) -> None:
    _, _, count_N, x, w, y = refs
    used = count_N[pl.program_id(1)] > 0

    @pl.when(used)
    def multiply() -> None:
        y[...] = _dot(x[...], w[...], (1, 1 if transpose_w else 0)).astype(y.dtype)

    @pl.when(jnp.logical_not(used))
    def clear() -> None:
        y[...] = jnp.zeros_like(y)


def tgmm(x_RD: jax.Array, g_RF: jax.Array, steps: GridSteps, *, num_groups: int) -> jax.Array:
    """Return for every group the sum over its rows of x_r^T g_r, `E D F`.

    Every group must have a step. The grid is tiles of the matrix x steps: the float32 sum stays in
    VMEM while a group passes.
    """
    (R, D), F, block, item = x_RD.shape, g_RF.shape[1], steps.block_rows, x_RD.dtype.itemsize
    tall = _tile(D, _MAX_TILE_ROWS)
    wide = _tile(F, _most_columns_of_sums(block, tall, item, _vmem_bytes()), cores=_CORES)
    return _launch(
        _tgmm_kernel,
        "grouped_outers",
        steps,
        (x_RD, g_RF),
        shape=(num_groups, D, F),
        flops=2 * R * D * F,
        grid=(pl.cdiv(F, wide), pl.cdiv(D, tall), steps.group_N.shape[0]),
        in_specs=[
            pl.BlockSpec((block, tall), lambda n, k, i, group, source, count: (source[i], k)),
            pl.BlockSpec((block, wide), lambda n, k, i, group, source, count: (source[i], n)),
        ],
        out_specs=pl.BlockSpec((None, tall, wide), lambda n, k, i, group, *_: (group[i], k, n)),
        scratch_shapes=[pltpu.VMEM((tall, wide), jnp.float32)],
    )


def _tgmm_kernel(*refs: Any) -> None:
    group_N, _, count_N, x, g, dw, sum_DF = refs
    i, last = pl.program_id(2), pl.num_programs(2) - 1
    group, count = group_N[i], count_N[i]

    @pl.when((i == 0) | (group_N[jnp.maximum(i - 1, 0)] != group))
    def begin() -> None:
        sum_DF[...] = jnp.zeros_like(sum_DF)

    @pl.when(count > 0)
    def add() -> None:
        used = lax.broadcasted_iota(jnp.int32, x.shape, 0) < count
        sum_DF[...] += _dot(jnp.where(used, x[...], jnp.zeros_like(x)), g[...], (0, 0))

    @pl.when((i == last) | (group_N[jnp.minimum(i + 1, last)] != group))
    def end() -> None:
        dw[...] = sum_DF[...].astype(dw.dtype)


def _dot(x: jax.Array, y: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Contract one dim of x with one of y in float32."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def largest_block(D: int, F: int, *, itemsize: int, device_kind: str) -> int | None:
    """Return the most rows of a block with which all products of `D F` and `F D` fit into VMEM.

    itemsize: bytes of a value of rows and matrices. device_kind: as jax names it. None: the rows
    are too long for the smallest block.
    """
    vmem = _vmem_of(device_kind)
    for block in BLOCKS:
        fits = (
            _most_columns(block, depth, itemsize, vmem) >= min(_LANES, width)
            and _most_columns_of_sums(block, _tile(depth, _MAX_TILE_ROWS), itemsize, vmem)
            >= min(_LANES, width)
            for depth, width in ((D, F), (F, D))
        )
        if all(fits):
            return block
    return None


def _most_columns(block: int, depth: int, itemsize: int, vmem: int) -> float:
    """Return the columns of a tile of `gmm` that fit into this many bytes; 0 or less: none."""
    # Arrays have two buffers each, and libtpu copies the rows; the product is float32.
    room = vmem - 3 * itemsize * block * depth
    return room / (2 * itemsize * (depth + block) + 4 * block)


def _most_columns_of_sums(block: int, tall: int, itemsize: int, vmem: int) -> float:
    """Return the columns of a tile of `tgmm` with `tall` rows that fit; 0 or less: none."""
    room = vmem - 3 * itemsize * block * tall
    return room / (2 * itemsize * (tall + block) + 8 * tall)


def _vmem_bytes() -> int:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return _vmem_of("" if device is None else device.device_kind)


def _vmem_of(device_kind: str) -> int:
    """Return the VMEM that a kernel may use; an unknown chip counts as a large one."""
    return _SMALL_VMEM_BYTES if device_kind in _SMALL_VMEM_CHIPS else _VMEM_BYTES


def _tile(width: int, most: float, *, cores: int = 1) -> int:
    """Return the columns of a tile, at most `most`; the last tile may extend past `width`.

    cores: cores that share the tiles. Raises: ValueError if not even the smallest tile fits.
    """
    sizes = [*range(_LANES, width, _LANES), width]
    fitting = [size for size in sizes if size <= most]
    if not fitting:
        raise ValueError(
            f"grouped matmul pallas: a tile of {sizes[0]} of {width} columns does not fit into "
            "VMEM; use ragged_dot, or blocks of fewer rows"
        )
    return min(fitting, key=lambda size: pl.cdiv(width, size * cores) * (size + _TILE_COST))


def _launch(
    kernel: Callable[..., None],
    name: str,
    steps: GridSteps,
    arrays: tuple[jax.Array, jax.Array],
    *,
    shape: tuple[int, ...],
    flops: int,
    grid: tuple[int, ...],
    **specs: Any,
) -> jax.Array:
    """Run a kernel on a grid whose first dim is shared by cores and whose last one is the steps."""
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
