"""Permutation of token assignments into rows sorted by group, and the sum back.

An assignment is a (token, expert) pair: assignment a belongs to token a // K. It has one row of a
buffer, or none if it is dropped. A missing row or assignment is an index one past the end, which
reads as zero. All functions work on the arrays of one device and never communicate. Gradients
gather too, because scatters are slow on every platform.

Letters: T tokens, K assignments per token, A = T K assignments, R rows, E groups, D features.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from parallel.experts.row_layout import RowGroups, RowLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Permutation:
    """Row of each assignment, R if it was dropped; assignment in each row, A if it is empty."""

    row_A: jax.Array
    assignment_R: jax.Array

    @property
    def inverse(self) -> "Permutation":
        """The permutation that takes rows back to their assignments."""
        return Permutation(self.assignment_R, self.row_A)


def sort_by_group(
    groups_A: jax.Array, layout: RowLayout, capacity: int | None = None
) -> tuple[Permutation, RowGroups]:
    """Assign a row to each assignment: sorted by group, within a group in order of assignment.

    groups_A: group of each assignment; outside 0 .. E - 1: none. Assignments beyond the capacity of
    their group, the rows of a `uniform` group, or the end of the buffer are dropped.
    """
    count, groups = groups_A.shape[0], layout.groups
    known_A = jnp.where((groups_A >= 0) & (groups_A < groups), groups_A, groups)
    order_A = jnp.argsort(known_A, stable=True).astype(jnp.int32)
    sorted_A = known_A[order_A]
    # compare_all: the default is a loop, slow on a TPU.
    find = partial(jnp.searchsorted, method="compare_all")
    first_E = find(sorted_A, jnp.arange(groups + 1)).astype(jnp.int32)
    sizes_E = jnp.diff(first_E)
    limits = [capacity, layout.rows // groups if layout.kind == "uniform" else None]
    for limit in (rows for rows in limits if rows is not None):
        sizes_E = jnp.minimum(sizes_E, limit)
    starts_E = RowGroups(layout, sizes_E).starts_E
    sizes_E = jnp.clip(layout.rows - starts_E, 0, sizes_E)
    # Rows to assignments, without a scatter: the group of a row is the last one that starts before.
    row_R = jnp.arange(layout.rows, dtype=jnp.int32)
    group_R = jnp.clip(find(starts_E, row_R, side="right") - 1, 0, groups - 1)
    rank_R = row_R - starts_E[group_R]
    found_R = jnp.clip(first_E[group_R] + rank_R, 0, max(count - 1, 0))
    assignment_R = jnp.where(rank_R < sizes_E[group_R], order_A[found_R], count)
    # Assignments to rows: the rank within the group is the sorted position less the group's first.
    position_A = jnp.argsort(order_A).astype(jnp.int32)
    own_A = jnp.minimum(known_A, groups - 1)
    rank_A = position_A - first_E[own_A]
    kept_A = (known_A < groups) & (rank_A < sizes_E[own_A])
    row_A = jnp.where(kept_A, starts_E[own_A] + rank_A, layout.rows)
    permutation = Permutation(row_A, assignment_R.astype(jnp.int32))
    return permutation, RowGroups(layout, sizes_E.astype(jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def permute_blocks(x_TD: jax.Array, permutation: Permutation, count: int) -> list[jax.Array]:
    """Copy each token to the rows of its assignments: `T D` -> `count` blocks `R/count D`.

    An empty row holds an arbitrary token, and its cotangent is ignored. Blocks that travel one by
    one are gathered one by one: cut out of one array, they would be copied again.
    """
    per_token = max(permutation.row_A.shape[0] // x_TD.shape[0], 1)
    token_R = jnp.minimum(permutation.assignment_R // per_token, x_TD.shape[0] - 1)
    return [x_TD[token_r] for token_r in jnp.split(token_R, count)]


def _permute_forward(
    x_TD: jax.Array, permutation: Permutation, count: int
) -> tuple[list[jax.Array], Any]:
    like_T0 = jnp.zeros((x_TD.shape[0], 0), x_TD.dtype)
    return permute_blocks(x_TD, permutation, count), (permutation, like_T0)


def _permute_backward(count: int, residuals: Any, blocks: list[jax.Array]) -> Any:
    permutation, like_T0 = residuals
    return unpermute(blocks, permutation, like_T0.shape[0]), None


permute_blocks.defvjp(_permute_forward, _permute_backward)


def permute(x_TD: jax.Array, permutation: Permutation) -> jax.Array:
    """Copy each token to the rows of its assignments, in one block: `T D` -> `R D`."""
    return permute_blocks(x_TD, permutation, 1)[0]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def unpermute(blocks: list[jax.Array], permutation: Permutation, num_tokens: int) -> jax.Array:
    """Sum the rows of each token's assignments: blocks of rows -> `T D`.

    The transpose of `permute_blocks`. Sums are accumulated in float32 and rounded once. A dropped
    assignment adds nothing. The cotangent of an empty row is that of an arbitrary token.
    """
    # Without the barriers libtpu moves reshapes between the casts and the sum, and then writes
    # float32 copies of all rows.
    y_RD = lax.optimization_barrier(jnp.concatenate(blocks))
    row_KT = permutation.row_A.reshape(num_tokens, -1).T
    kept_KT = row_KT < y_RD.shape[0]
    rows_KTD, total_TD = y_RD[jnp.where(kept_KT, row_KT, 0)], jnp.zeros((), jnp.float32)
    # A sum of K terms: libtpu estimates less time for it than for a sum over a dimension.
    for rows_TD, kept_T in zip(rows_KTD, kept_KT, strict=True):
        total_TD += jnp.where(kept_T[:, None], rows_TD.astype(jnp.float32), 0.0)
    return lax.optimization_barrier(total_TD.astype(y_RD.dtype))


def _unpermute_forward(
    blocks: list[jax.Array], permutation: Permutation, num_tokens: int
) -> tuple[jax.Array, Any]:
    return unpermute(blocks, permutation, num_tokens), (permutation, len(blocks))


def _unpermute_backward(num_tokens: int, residuals: Any, g_TD: jax.Array) -> Any:
    permutation, count = residuals
    return permute_blocks(g_TD, permutation, count), None


unpermute.defvjp(_unpermute_forward, _unpermute_backward)


@jax.custom_vjp
def permute_weights(weights_A: jax.Array, permutation: Permutation) -> jax.Array:
    """Return the weight of each row's assignment, `A` -> `R`; 0 for an empty row."""
    return take_or_zero(weights_A, permutation.assignment_R)


def _weights_forward(weights_A: jax.Array, permutation: Permutation) -> tuple[jax.Array, Any]:
    return permute_weights(weights_A, permutation), permutation


def _weights_backward(permutation: Any, g_R: jax.Array) -> tuple[jax.Array, None]:
    return take_or_zero(g_R, permutation.row_A), None


permute_weights.defvjp(_weights_forward, _weights_backward)


def take_or_zero(values: jax.Array, index: jax.Array) -> jax.Array:
    """Return the entries at these indices; zeros for an index past the end."""
    return values.at[index].get(mode="fill", fill_value=0)
