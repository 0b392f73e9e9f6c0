"""Grouped matmul: every row times the matrix of its group, by one of several implementations.

In a mixture of experts the rows are tokens sorted by expert and the matrices are expert kernels.
Rows lie in a `RowLayout`; group sizes are traced. All functions work on local arrays, inside
`jax.shard_map` or outside of it. To add an implementation, subclass `GroupedMatmulImpl` and
register it: its name becomes a value of `model.moe.grouped_matmul`.

Letters: R rows, E groups (experts of this device), C rows per group of a `uniform` layout,
D features in, F features out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from parallel.experts import grouped_kernels
from parallel.experts.row_layout import LayoutKind, RowGroups
from parallel.linear.ring import pcast_varying
from registry import Registry


class GroupedMatmulImpl(ABC):
    """One implementation of the grouped matmul and its gradients, without state.

    For the rows r of group e: forward y_r = x_r w_e; dgrad dx_r = g_r w_e^T; wgrad dw_e = sum over
    r of x_r^T g_r. Sums are accumulated in float32 and rounded once. Rows outside of every group
    are finite: their y and dx must be finite too, and they must not contribute to dw.
    """

    layouts: ClassVar[tuple[LayoutKind, ...]]
    """Row layouts that the implementation accepts, the preferred one first."""
    platforms: ClassVar[tuple[str, ...]] = ("cpu", "gpu", "tpu")
    package: ClassVar[str | None] = None
    """Optional package that the implementation needs, of the extra `gpu`."""

    @property
    def is_uniform(self) -> bool:
        """The implementation needs the same number of rows for every group."""
        return self.layouts[0] == "uniform"

    @abstractmethod
    def multiply(self, x_RD: Array, w_EDF: Array, groups: RowGroups, transpose_w: bool) -> Array:
        """Return the forward result `R F`; with `transpose_w`, dgrad: rows `R F` -> `R D`."""

    @abstractmethod
    def wgrad(self, x_RD: Array, g_RF: Array, groups: RowGroups) -> Array:
        """Return the gradient of the matrices, `E D F`."""


GROUPED_MATMULS: Registry[GroupedMatmulImpl] = Registry("grouped matmul")


def register_grouped_matmul(name: str) -> Callable[[type], type]:
    """Return a class decorator that registers a `GroupedMatmulImpl` under `name`.

    Raises: ValueError if the name is taken.
    """

    def register(cls: type[GroupedMatmulImpl]) -> type[GroupedMatmulImpl]:
        GROUPED_MATMULS[name] = cls()
        return cls

    return register


# Choice for dropless rows, whose groups differ in size. Measured and predicted in November 2026:
# CPU with 2 cores, float32, 8 groups, 8192 rows, D 512, F 1408, forward and backward, against a
# dense matmul of the same FLOPs; TPU from schedules of v5p, bfloat16, 16 groups, 65536 rows,
# D 2048, F 768.
_DROPLESS = {
    "cpu": (
        "blocked",
        "loops over the blocks in use take 1.1 times a dense matmul, ragged_dot 9.5 times",
    ),
    "gpu": (
        "blocked",
        "its work follows the rows; XLA may turn ragged_dot into one matmul of all rows per expert "
        "(openxla/xla #40189); not measured",
    ),
    "tpu": (
        "pallas",
        "kernels over the blocks in use take about 1.7 ms where ragged_dot takes 12.8, whose "
        "weight gradient is one matmul of all rows per expert (libtpu 0.0.42)",
    ),
}
_HOPPER = 9  # the only compute capability for which tokamax 0.0.17 has a kernel for dw too


def choose_grouped_matmul(
    platform: str, *, uniform: bool, compute_capability: tuple[int, int] = (0, 0)
) -> tuple[str, str]:
    """Return the name of the fastest implementation on a platform, and the reason in one line.

    platform: as jax names it. uniform: all groups have the same number of rows (expert capacity).
    compute_capability: of CUDA GPUs, (0, 0) if it is not known.
    Raises: ValueError for a platform without measurements.
    """
    if platform not in _DROPLESS:
        raise ValueError(
            f"grouped matmul on platform {platform!r}: no measurements to choose by; set "
            f"model.moe.grouped_matmul to {', '.join(GROUPED_MATMULS)}"
        )
    if uniform:
        return "padded", "groups of equal capacity are one batched matmul"
    if compute_capability[0] == _HOPPER and find_spec("tokamax") is not None:
        return "tokamax", "a kernel for each of y, dx and dw; a third of the matmul peak on an H200"
    return _DROPLESS[platform]


def grouped_matmul(x_RD: Array, w_EDF: Array, groups: RowGroups, *, impl: str) -> Array:
    """Multiply each row by the matrix of its group: `R F` in x's dtype, accumulated in float32.

    Reverse-mode differentiable in x and w; equations in `GroupedMatmulImpl`. Residuals are the
    arguments. Inside shard_map the arguments may vary over different mesh axes.
    Communication: none forward; a gradient is all-reduced over the axes on which its argument is
    replicated and another argument varies.
    Raises: ValueError for an unknown implementation, a layout that it does not accept, and shapes
    or dtypes that do not match.
    """
    chosen = GROUPED_MATMULS[impl]
    if groups.layout.kind not in chosen.layouts:
        raise ValueError(
            f"grouped matmul {impl} accepts row layouts {', '.join(chosen.layouts)}, got "
            f"{groups.layout.kind}; use another implementation or layout"
        )
    _check_arrays(x_RD, w_EDF, groups)
    arrays = (x_RD, w_EDF, groups)
    # A custom gradient must have the type of its argument, so all arguments vary over all axes.
    axes = set().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(arrays)))
    return _multiply(
        chosen, *jax.tree.map(partial(pcast_varying, axes=tuple(sorted(axes))), arrays)
    )


def _check_arrays(x_RD: Array, w_EDF: Array, groups: RowGroups) -> None:
    layout, sizes_E = groups.layout, groups.sizes_E
    want = (layout.rows, *w_EDF.shape[1:2]), (layout.groups, *w_EDF.shape[1:]), (layout.groups,)
    if (x_RD.shape, w_EDF.shape, sizes_E.shape) != want or w_EDF.ndim != 3:
        raise ValueError(
            f"grouped matmul of rows {x_RD.shape}, matrices {w_EDF.shape} and sizes "
            f"{sizes_E.shape}: {layout} needs (R, D), (E, D, F) and (E,); correct the shapes"
        )
    if x_RD.dtype != w_EDF.dtype or sizes_E.dtype != jnp.int32:
        raise ValueError(
            f"grouped matmul of {x_RD.dtype} rows, {w_EDF.dtype} matrices and {sizes_E.dtype} "
            "sizes: rows and matrices must have one dtype, sizes int32; cast them first"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(impl: GroupedMatmulImpl, x_RD: Array, w_EDF: Array, groups: RowGroups) -> Array:
    return impl.multiply(x_RD, w_EDF, groups, False)


def _multiply_forward(impl: GroupedMatmulImpl, *arrays: Any) -> tuple[Array, Any]:
    return _multiply(impl, *arrays), arrays


def _multiply_backward(impl: GroupedMatmulImpl, residuals: Any, g_RF: Array) -> Any:
    x_RD, w_EDF, groups = residuals
    return impl.multiply(g_RF, w_EDF, groups, True), impl.wgrad(x_RD, g_RF, groups), None


_multiply.defvjp(_multiply_forward, _multiply_backward)


def _einsum(dims: str, x: Array, y: Array) -> Array:
    """Return the product accumulated in float32 or wider and rounded once to x's dtype."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(dims, x, y, preferred_element_type=wide).astype(x.dtype)


@register_grouped_matmul("reference")
class _Reference(GroupedMatmulImpl):
    """Every row times every matrix, masked: E times the work. For tests."""

    layouts = ("packed", "blocks", "uniform")

    def multiply(self, x_RD: Array, w_EDF: Array, groups: RowGroups, transpose_w: bool) -> Array:
        member_ER1 = groups.members_RE.T[..., None]
        if transpose_w:
            return jnp.sum(jnp.where(member_ER1, _einsum("rf,edf->erd", x_RD, w_EDF), 0), axis=0)
        return _einsum("erd,edf->rf", jnp.where(member_ER1, x_RD, 0), w_EDF)

    def wgrad(self, x_RD: Array, g_RF: Array, groups: RowGroups) -> Array:
        x_ERD = jnp.where(groups.members_RE.T[..., None], x_RD, 0)
        return _einsum("erd,rf->edf", x_ERD, g_RF)


@register_grouped_matmul("padded")
class _Padded(GroupedMatmulImpl):
    """One batched matmul over groups of equal capacity; padding rows cost as much as used rows."""

    layouts = ("uniform",)

    def multiply(self, x_RD: Array, w_EDF: Array, groups: RowGroups, transpose_w: bool) -> Array:
        x_ECD = x_RD.reshape(groups.layout.groups, -1, x_RD.shape[1])
        dims = "ecf,edf->ecd" if transpose_w else "ecd,edf->ecf"
        return _einsum(dims, x_ECD, w_EDF).reshape(groups.layout.rows, -1)

    def wgrad(self, x_RD: Array, g_RF: Array, groups: RowGroups) -> Array:
        count = groups.layout.groups
        x_ECD, g_ECF = (rows.reshape(count, -1, rows.shape[1]) for rows in (x_RD, g_RF))
        used_EC1 = (jnp.arange(x_ECD.shape[1]) < groups.sizes_E[:, None])[..., None]
        if x_RD.shape[1] < g_RF.shape[1]:
            x_ECD = jnp.where(used_EC1, x_ECD, 0)
        else:
            g_ECF = jnp.where(used_EC1, g_ECF, 0)
        return _einsum("ecd,ecf->edf", x_ECD, g_ECF)


@register_grouped_matmul("ragged_dot")
class RaggedDot(GroupedMatmulImpl):
    """`lax.ragged_dot_general`, XLA's own grouped matmul."""

    layouts = ("packed", "uniform", "blocks")

    def multiply(  # noqa: D102 - the base class says it
        self, x_RD: Array, w_EDF: Array, groups: RowGroups, transpose_w: bool
    ) -> Array:
        # Rounded inside: a float32 result would be written to memory and read once more.
        spans_E = groups.spans_E
        y_RF = self._dot(
            x_RD, w_EDF, spans_E, _ragged_rows(((1,), (2 if transpose_w else 1,)), [0])
        )
        # libtpu's kernel leaves the rows after the last group uninitialised.
        used_R = jnp.arange(groups.layout.rows) < jnp.sum(spans_E)
        return jnp.where(used_R[:, None], y_RF, 0)

    def wgrad(  # noqa: D102 - the base class says it
        self, x_RD: Array, g_RF: Array, groups: RowGroups
    ) -> Array:
        # XLA turns this mode into E masked matmuls on CPU, on NVIDIA (openxla/xla #40189) and with
        # libtpu before 0.0.50 (read off programs of libtpu 0.0.42.1 and 0.0.50.1, November 2026).
        if groups.layout.kind != "packed":
            x_RD = jnp.where(jnp.any(groups.members_RE, axis=1)[:, None], x_RD, 0)
        return self._dot(x_RD, g_RF, groups.spans_E, _ragged_rows(((0,), (0,)), []))

    def _dot(
        self, x: Array, y: Array, spans_E: Array, numbers: lax.RaggedDotDimensionNumbers
    ) -> Array:
        return lax.ragged_dot_general(x, y, spans_E, numbers)


def _ragged_rows(contracted: Any, group_dims: list[int]) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=group_dims,
    )


@register_grouped_matmul("blocked")
class _Blocked(GroupedMatmulImpl):
    """Loops over groups and over their blocks of rows: the time follows the sizes, not R."""

    layouts = ("blocks",)

    def multiply(self, x_RD: Array, w_EDF: Array, groups: RowGroups, transpose_w: bool) -> Array:
        starts_E, blocks_E = groups.starts_E, groups.spans_E // groups.layout.block
        dims = "rf,df->rd" if transpose_w else "rd,df->rf"

        def add_group(e: Array, y_RF: Array) -> Array:
            w_DF = lax.dynamic_index_in_dim(w_EDF, e, keepdims=False)

            def step(y_RF: Array, row: Array, rows: int) -> Array:
                y_rF = _einsum(dims, lax.dynamic_slice_in_dim(x_RD, row, rows), w_DF)
                return lax.dynamic_update_slice_in_dim(y_RF, y_rF, row, 0)

            return self._over_blocks(starts_E[e], blocks_E[e], groups, step, y_RF)

        shape = (groups.layout.rows, w_EDF.shape[1 if transpose_w else 2])
        zeros_RF = jnp.zeros_like(x_RD, shape=shape)
        return lax.fori_loop(0, groups.layout.groups, add_group, zeros_RF)

    def wgrad(self, x_RD: Array, g_RF: Array, groups: RowGroups) -> Array:
        starts_E, blocks_E = groups.starts_E, groups.spans_E // groups.layout.block
        wide = jnp.promote_types(x_RD.dtype, jnp.float32)
        shape = (x_RD.shape[1], g_RF.shape[1])

        def add_group(e: Array, dw_EDF: Array) -> Array:
            def step(sum_DF: Array, row: Array, rows: int) -> Array:
                x_rD, g_rF = (lax.dynamic_slice_in_dim(y, row, rows) for y in (x_RD, g_RF))
                used_r1 = (row + jnp.arange(rows) < starts_E[e] + groups.sizes_E[e])[:, None]
                x_rD = jnp.where(used_r1, x_rD, 0)
                dims = (((0,), (0,)), ((), ()))
                return sum_DF + lax.dot_general(x_rD, g_rF, dims, preferred_element_type=wide)

            # The sum of one group stays in the cache while its blocks pass.
            zeros_DF = jnp.zeros_like(x_RD, shape=shape, dtype=wide)
            sum_DF = self._over_blocks(starts_E[e], blocks_E[e], groups, step, zeros_DF)
            return lax.dynamic_update_index_in_dim(dw_EDF, sum_DF.astype(x_RD.dtype), e, 0)

        zeros_EDF = jnp.zeros_like(x_RD, shape=(groups.layout.groups, *shape))
        return lax.fori_loop(0, groups.layout.groups, add_group, zeros_EDF)

    def _over_blocks(
        self, first: Array, count: Array, groups: RowGroups, step: Callable[..., Any], carry: Any
    ) -> Any:
        """Run step(carry, row, rows) over `count` blocks from row `first`, up to 512 rows each."""
        block = groups.layout.block
        most = min(512, groups.layout.rows) // block
        for blocks_per_step in sorted({1, max(1, most)}, reverse=True):
            times, rows = count // blocks_per_step, blocks_per_step * block
            carry = lax.fori_loop(
                0,
                times,
                lambda i, carry, first=first, rows=rows: step(carry, first + i * rows, rows),
                carry,
            )
            first, count = first + times * rows, count - times * blocks_per_step
        return carry


@register_grouped_matmul("pallas")
class _Pallas(GroupedMatmulImpl):
    """TPU kernels over the blocks in use, `grouped_kernels`."""

    layouts = ("blocks",)
    platforms = ("tpu",)

    def multiply(self, x_RD: Array, w_EDF: Array, groups: RowGroups, transpose_w: bool) -> Array:
        steps = grouped_kernels.grid_steps(groups, min_steps=0)
        return grouped_kernels.gmm(x_RD, w_EDF, steps, transpose_w=transpose_w)

    def wgrad(self, x_RD: Array, g_RF: Array, groups: RowGroups) -> Array:
        # An empty group has a step too, which writes the zeros of its gradient.
        steps = grouped_kernels.grid_steps(groups, min_steps=1)
        return grouped_kernels.tgmm(x_RD, g_RF, steps, num_groups=groups.layout.groups)
