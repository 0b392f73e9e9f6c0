"""Products of rows with the matrix of their group, by name: rows of tokens, matrices of experts.

Rows lie sorted by group in a `RowLayout`; how many each group has is a traced array. Every function
works on local arrays, inside `jax.shard_map` or outside of it: no mesh, no communication. A form is
one way to multiply; naming one that does not take a layout is an error. All but the oracle have a
derivative rule of their own, in reverse mode only; residuals are the arguments. It refuses to know
where rows come from.

Letters: R rows, E groups (experts of this device), C rows of a group in `uniform`, D features in,
F features out, N blocks of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
from jax import lax

from parallel.experts import grouped_kernels
from parallel.linear.ring import pcast_varying

LayoutKind = Literal["packed", "blocks", "uniform"]
FormName = Literal["reference", "padded", "ragged_dot", "blocked", "pallas"]


@dataclass(frozen=True)
class RowLayout:
    """Where the rows of every group lie; static.

    kind: `packed`: groups follow each other without a gap. `blocks`: every group begins at a
    multiple of `block`, and the rows between are zero. `uniform`: every group has rows / groups
    rows, of which its size says how many are real. block: 1 but for `blocks`. rows: R.
    Raises: ValueError for rows that do not divide into blocks, or into groups in `uniform`.
    """

    kind: LayoutKind
    block: int
    rows: int
    groups: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayoutKind):
            raise ValueError(f"row layout {self.kind!r}: use {', '.join(get_args(LayoutKind))}")
        if min(self.block, self.rows, self.groups) < 1:
            raise ValueError(f"{self}: block, rows and groups must be positive; use 1 or more")
        unit = self.groups if self.kind == "uniform" else self.block
        if self.rows % unit:
            raise ValueError(
                f"{self}: rows must be a multiple of {unit}; use {self.rows + -self.rows % unit}"
            )

    @staticmethod
    def blocks(bound: int, groups: int, block: int) -> "RowLayout":
        """`blocks` with as few rows as hold any sizes that sum to at most `bound`, 1 or more."""
        # Each group that is not empty may leave all rows but one of its last block unused.
        most = bound + min(bound, groups) * (block - 1)
        return RowLayout("blocks", block, most // block * block, groups)

    def spans(self, sizes_E: jax.Array) -> jax.Array:
        """Rows from the beginning of every group to the next: its own, and those between."""
        if self.kind == "uniform":
            return jnp.full_like(sizes_E, self.rows // self.groups)
        return -(-sizes_E // self.block) * self.block

    def starts(self, sizes_E: jax.Array) -> jax.Array:
        """Where the rows of every group begin, int32."""
        spans_E = self.spans(sizes_E)
        return jnp.cumsum(spans_E, dtype=jnp.int32) - spans_E

    def members(self, sizes_E: jax.Array) -> jax.Array:
        """Whether row r belongs to group e, `R E`."""
        row_R1 = jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        starts_E = self.starts(sizes_E)
        return (row_R1 >= starts_E) & (row_R1 < starts_E + sizes_E)


def grouped_matmul(
    x_RD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    *,
    layout: RowLayout,
    form: str,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
    """Each row times the matrix of its group, `R F` in x's dtype, accumulated in float32.

    For the rows r of group e: forward y_r = x_r w_e; dgrad dx_r = g_r w_e^T; wgrad dw_e = sum over
    them of x_r^T g_r. sizes_E: int32, rows of every group, as many as the layout has room for.
    Rows of no group must be finite; their results and dx are finite, and they do not count in dw.
    Arguments may vary over different mesh axes: the derivative by one that does not is summed.
    Communication: none forward. Raises: ValueError for an unknown form, a layout that it does not
    take, and arrays that do not fit together.
    """
    chosen = find_form(form)
    if layout.kind not in chosen.layouts:
        raise ValueError(
            f"grouped matmul {form} takes rows {' or '.join(chosen.layouts)}, got {layout.kind}; "
            "use another form or layout"
        )
    _check(x_RD, w_EDF, sizes_E, layout)
    # Alike, so that their derivatives have the types of the arguments.
    arrays = (x_RD, w_EDF, sizes_E)
    axes = set().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
    return chosen.function(
        layout, precision, *(pcast_varying(a, tuple(sorted(axes))) for a in arrays)
    )


def _check(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, layout: RowLayout) -> None:
    want = (layout.rows, *w_EDF.shape[1:2]), (layout.groups, *w_EDF.shape[1:]), (layout.groups,)
    if (x_RD.shape, w_EDF.shape, sizes_E.shape) != want or w_EDF.ndim != 3:
        raise ValueError(
            f"grouped matmul of rows {x_RD.shape}, matrices {w_EDF.shape} and sizes "
            f"{sizes_E.shape}: {layout} wants (R, D), (E, D, F) and (E,); mend the shapes"
        )
    if x_RD.dtype != w_EDF.dtype or sizes_E.dtype != jnp.int32:
        raise ValueError(
            f"grouped matmul of {x_RD.dtype} rows, {w_EDF.dtype} matrices and {sizes_E.dtype} "
            "sizes: rows and matrices must have one dtype, sizes int32; cast them first"
        )


class GroupedFunction(Protocol):
    """`grouped_matmul` with its static arguments first."""

    def __call__(
        self,
        layout: RowLayout,
        precision: lax.PrecisionLike,
        x_RD: jax.Array,
        w_EDF: jax.Array,
        sizes_E: jax.Array,
        /,
    ) -> jax.Array: ...


@dataclass(frozen=True)
class Form:
    """One way to multiply. layouts: kinds of rows that it takes, the one it is made for first."""

    name: str
    function: GroupedFunction
    layouts: tuple[LayoutKind, ...]


_FORMS: dict[str, Form] = {}


def _register(name: str, function: GroupedFunction, *layouts: LayoutKind) -> None:
    if name in _FORMS:
        raise ValueError(f"grouped matmul {name!r} is registered twice")
    _FORMS[name] = Form(name, function, layouts)


def list_forms() -> list[str]:
    """All names, the oracle first."""
    return list(_FORMS)


def find_form(name: str) -> Form:
    """The form of this name. Raises: ValueError listing the names."""
    if name not in _FORMS:
        raise ValueError(f"unknown grouped matmul {name!r}; registered: {', '.join(_FORMS)}")
    return _FORMS[name]


# The oracle.


def _reference(
    layout: RowLayout,
    precision: lax.PrecisionLike,
    x_RD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
) -> jax.Array:
    """Every row with every matrix, all but its own masked: E times the work."""
    member_ER1 = layout.members(sizes_E).T[..., None]
    x_ERD = jnp.where(member_ER1, x_RD, 0)
    return _einsum("erd,edf->rf", x_ERD, w_EDF, precision)


def _einsum(dims: str, x: jax.Array, y: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """Accumulated in float32 or wider, rounded once."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    out = jnp.einsum(dims, x, y, precision=precision, preferred_element_type=wide)
    return out.astype(x.dtype)


_register("reference", _reference, *get_args(LayoutKind))


# The others: two products make a form and its derivatives.

_Products = Callable[..., jax.Array]
"""(rows, matrices, sizes, layout, precision, transposed: matrices are `F D`) -> rows."""
_Outers = Callable[..., jax.Array]
"""(rows, rows, sizes, layout, precision) -> matrices; rows of no group do not count."""


def _differentiable(products: _Products, outers: _Outers) -> GroupedFunction:
    """The products of rows and matrices, and both of their derivatives from the same two."""

    @partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def multiply(
        layout: RowLayout, precision: Any, x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array
    ) -> jax.Array:
        return products(x_RD, w_EDF, sizes_E, layout, precision, False)

    def forward(layout: RowLayout, precision: Any, *arrays: jax.Array) -> tuple[jax.Array, Any]:
        return multiply(layout, precision, *arrays), arrays

    def backward(layout: RowLayout, precision: Any, residuals: Any, g_RF: jax.Array) -> Any:
        x_RD, w_EDF, sizes_E = residuals
        dx_RD = products(g_RF, w_EDF, sizes_E, layout, precision, True)
        return dx_RD, outers(x_RD, g_RF, sizes_E, layout, precision), None

    multiply.defvjp(forward, backward)
    return multiply


def _padded_products(
    x_RD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    layout: RowLayout,
    precision: Any,
    transposed: bool,
) -> jax.Array:
    """One batched matmul, whatever the sizes."""
    x_ECD = x_RD.reshape(layout.groups, -1, x_RD.shape[1])
    dims = "ecf,edf->ecd" if transposed else "ecd,edf->ecf"
    return _einsum(dims, x_ECD, w_EDF, precision).reshape(layout.rows, -1)


def _padded_outers(
    x_RD: jax.Array, g_RF: jax.Array, sizes_E: jax.Array, layout: RowLayout, precision: Any
) -> jax.Array:
    x_ECD, g_ECF = (rows.reshape(layout.groups, -1, rows.shape[1]) for rows in (x_RD, g_RF))
    real_EC1 = (jnp.arange(x_ECD.shape[1]) < sizes_E[:, None])[..., None]
    if x_RD.shape[1] < g_RF.shape[1]:
        x_ECD = jnp.where(real_EC1, x_ECD, 0)
    else:
        g_ECF = jnp.where(real_EC1, g_ECF, 0)
    return _einsum("ecd,ecf->edf", x_ECD, g_ECF, precision)


_register("padded", _differentiable(_padded_products, _padded_outers), "uniform")


def _ragged_products(
    x_RD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    layout: RowLayout,
    precision: Any,
    transposed: bool,
) -> jax.Array:
    """`lax.ragged_dot`. Rounded in it: a float32 result would be written and read once more."""
    spans_E = layout.spans(sizes_E)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    y_RF = lax.ragged_dot_general(x_RD, w_EDF, spans_E, numbers, precision=precision)
    # libtpu's kernel leaves what lies beyond the groups as it was in memory.
    used_R = jnp.arange(layout.rows) < jnp.sum(spans_E)
    return jnp.where(used_R[:, None], y_RF, 0)


def _ragged_outers(
    x_RD: jax.Array, g_RF: jax.Array, sizes_E: jax.Array, layout: RowLayout, precision: Any
) -> jax.Array:
    """Its other mode. XLA makes it E masked matmuls on the CPU, on NVIDIA and before libtpu 0.0.50.

    Read off programs compiled by libtpu 0.0.42.1 and 0.0.50.1, November 2026; NVIDIA:
    openxla/xla #40189.
    """
    if layout.kind != "packed":
        x_RD = jnp.where(jnp.any(layout.members(sizes_E), axis=1)[:, None], x_RD, 0)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    spans_E = layout.spans(sizes_E)
    return lax.ragged_dot_general(x_RD, g_RF, spans_E, numbers, precision=precision)


_register(
    "ragged_dot",
    _differentiable(_ragged_products, _ragged_outers),
    "packed",
    "uniform",
    "blocks",
)


# Blocks in loops: the time follows the sizes, not R.

# Rows that are multiplied at once where a group still has as many.
_STRIDE = 512


def _over_blocks(
    first: jax.Array,
    count: jax.Array,
    layout: RowLayout,
    step: Callable[[Any, jax.Array, int], Any],
    carry: Any,
) -> Any:
    """step(carry, row, rows) over `count` blocks from row `first`, several at a time."""
    block = layout.block
    most = min(_STRIDE, layout.rows) // block
    for many in sorted({1, max(1, most)}, reverse=True):
        times, rows = count // many, many * block
        carry = lax.fori_loop(
            0,
            times,
            lambda i, carry, first=first, rows=rows: step(carry, first + i * rows, rows),
            carry,
        )
        first, count = first + times * rows, count - times * many
    return carry


def _blocked_products(
    x_RD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    layout: RowLayout,
    precision: Any,
    transposed: bool,
) -> jax.Array:
    """Group by group, block by block; blocks that are not in use stay zero."""
    starts_E, blocks_E = layout.starts(sizes_E), layout.spans(sizes_E) // layout.block
    dims = "rf,df->rd" if transposed else "rd,df->rf"

    def group(e: jax.Array, y_RF: jax.Array) -> jax.Array:
        w_DF = lax.dynamic_index_in_dim(w_EDF, e, keepdims=False)

        def step(y_RF: jax.Array, row: jax.Array, rows: int) -> jax.Array:
            y_rF = _einsum(dims, lax.dynamic_slice_in_dim(x_RD, row, rows), w_DF, precision)
            return lax.dynamic_update_slice_in_dim(y_RF, y_rF, row, 0)

        return _over_blocks(starts_E[e], blocks_E[e], layout, step, y_RF)

    width = w_EDF.shape[1 if transposed else 2]
    return lax.fori_loop(0, layout.groups, group, jnp.zeros_like(x_RD, shape=(layout.rows, width)))


def _blocked_outers(
    x_RD: jax.Array, g_RF: jax.Array, sizes_E: jax.Array, layout: RowLayout, precision: Any
) -> jax.Array:
    """The sum of one group stays in the cache while its blocks pass."""
    starts_E, blocks_E = layout.starts(sizes_E), layout.spans(sizes_E) // layout.block
    wide = jnp.promote_types(x_RD.dtype, jnp.float32)
    shape = (x_RD.shape[1], g_RF.shape[1])

    def group(e: jax.Array, dw_EDF: jax.Array) -> jax.Array:
        def step(sum_DF: jax.Array, row: jax.Array, rows: int) -> jax.Array:
            x_rD, g_rF = (lax.dynamic_slice_in_dim(y, row, rows) for y in (x_RD, g_RF))
            real_r1 = (row + jnp.arange(rows) < starts_E[e] + sizes_E[e])[:, None]
            x_rD = jnp.where(real_r1, x_rD, 0)
            dims = (((0,), (0,)), ((), ()))
            return sum_DF + lax.dot_general(
                x_rD, g_rF, dims, precision=precision, preferred_element_type=wide
            )

        zero_DF = jnp.zeros_like(x_RD, shape=shape, dtype=wide)
        sum_DF = _over_blocks(starts_E[e], blocks_E[e], layout, step, zero_DF)
        return lax.dynamic_update_index_in_dim(dw_EDF, sum_DF.astype(x_RD.dtype), e, 0)

    return lax.fori_loop(
        0, layout.groups, group, jnp.zeros_like(x_RD, shape=(layout.groups, *shape))
    )


_register("blocked", _differentiable(_blocked_products, _blocked_outers), "blocks")


# Blocks in a grid of TPU kernels.


def _pallas_products(
    x_RD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    layout: RowLayout,
    precision: Any,
    transposed: bool,
) -> jax.Array:
    steps = grouped_kernels.steps(sizes_E, layout.block, layout.rows, at_least=0)
    return grouped_kernels.products(x_RD, w_EDF, steps, transposed=transposed, precision=precision)


def _pallas_outers(
    x_RD: jax.Array, g_RF: jax.Array, sizes_E: jax.Array, layout: RowLayout, precision: Any
) -> jax.Array:
    # A group without rows has a step too: its matrix must be written.
    steps = grouped_kernels.steps(sizes_E, layout.block, layout.rows, at_least=1)
    return grouped_kernels.outers(x_RD, g_RF, steps, groups=layout.groups, precision=precision)


_register("pallas", _differentiable(_pallas_products, _pallas_outers), "blocks")


# Of rows of which none is dropped. Measured and predicted in November 2026: the CPU with 2 cores,
# float32, 8 groups, 8192 rows, D 512, F 1408, forward and backward, against a dense matmul of as
# many FLOPs; the TPU from schedules of v5p, bfloat16, 16 groups, 65536 rows, D 2048, F 768.
_DROPLESS: dict[str, tuple[FormName, str]] = {
    "cpu": (
        "blocked",
        "loops over the blocks in use take 1.1 of a dense matmul's time, ragged_dot 9.5",
    ),
    "gpu": (
        "blocked",
        "the work follows the rows; XLA may make one matmul of all rows per expert of ragged_dot "
        "(openxla/xla #40189); not measured",
    ),
    "tpu": (
        "pallas",
        "kernels over the blocks in use need about 1.7 ms where ragged_dot needs 12.8, its kernel "
        "derivative being one matmul of all rows per expert (libtpu 0.0.42)",
    ),
}


def choose_form(platform: str, *, uniform: bool) -> tuple[FormName, str]:
    """The form to take on a platform as jax names it, and why, in one line.

    uniform: every group has the same room, and what does not fit was dropped.
    Raises: ValueError for a platform of which nothing is known.
    """
    if platform not in _DROPLESS:
        raise ValueError(
            f"grouped matmul on platform {platform!r}: no form is known to be good there; name one "
            f"of {', '.join(_FORMS)}"
        )
    if uniform:
        return "padded", "groups of equal room are one batched matmul"
    return _DROPLESS[platform]
