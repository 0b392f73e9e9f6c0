"""Permutation of token assignments into rows sorted by group, and the weighted sum back.

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


@jax.custom_vjp
def permute(x_TD: jax.Array, permutation: Permutation) -> jax.Array:
    """Copy each token to the rows of its assignments: `T D` -> `R D`.

    An empty row holds an arbitrary token, and its cotangent is ignored.
    """
    last = x_TD.shape[0] - 1
    return x_TD[jnp.minimum(permutation.assignment_R // _per_token(permutation, x_TD), last)]


def _per_token(permutation: Permutation, x_TD: jax.Array) -> int:
    return max(permutation.row_A.shape[0] // x_TD.shape[0], 1)


def _permute_forward(x_TD: jax.Array, permutation: Permutation) -> tuple[jax.Array, Any]:
    like_T0 = jnp.zeros((x_TD.shape[0], 0), x_TD.dtype)
    return permute(x_TD, permutation), (permutation, like_T0)


def _permute_backward(residuals: Any, g_RD: jax.Array) -> tuple[jax.Array, None]:
    permutation, like_T0 = residuals
    ones_TK = jnp.ones((like_T0.shape[0], _per_token(permutation, like_T0)), jnp.float32)
    return _weighted_sum(g_RD, ones_TK, permutation, like_T0.dtype), None


permute.defvjp(_permute_forward, _permute_backward)


def _weighted_sum(
    y_RD: jax.Array, weights_TK: jax.Array, permutation: Permutation, dtype: Any
) -> jax.Array:
    """Sum weight * row over the assignments of each token in float32; dropped ones add nothing."""
    T, K = weights_TK.shape
    # Without the barriers libtpu moves reshapes between the casts and the sum, and then writes
    # float32 copies of all rows.
    y_RD = lax.optimization_barrier(y_RD)
    row_TK, total = permutation.row_A.reshape(T, K), jnp.zeros((), jnp.float32)
    # One k at a time: all at once would write T K D numbers to memory.
    for k in range(K):
        kept_T = row_TK[:, k] < y_RD.shape[0]
        rows_TD = y_RD[jnp.where(kept_T, row_TK[:, k], 0)].astype(jnp.float32)
        total += rows_TD * jnp.where(kept_T, weights_TK[:, k], 0.0)[:, None]
    return lax.optimization_barrier(total.astype(dtype))


@jax.custom_vjp
def unpermute(y_RD: jax.Array, weights_TK: jax.Array, permutation: Permutation) -> jax.Array:
    """Sum weight * row over the assignments of each token: `R D` -> `T D` in y's dtype.

    The sum is accumulated in float32. Dropped assignments add nothing, whatever their weight.
    """
    return _weighted_sum(y_RD, weights_TK, permutation, y_RD.dtype)


def _unpermute_forward(
    y_RD: jax.Array, weights_TK: jax.Array, permutation: Permutation
) -> tuple[jax.Array, Any]:
    return unpermute(y_RD, weights_TK, permutation), (y_RD, weights_TK, permutation)


def _unpermute_backward(residuals: Any, g_TD: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    y_RD, weights_TK, permutation = residuals
    y_RD, g_RD = lax.optimization_barrier((y_RD, permute(g_TD, permutation)))
    # Row by row first: a dropped assignment has no row to gather.
    dweight_R = jnp.sum(y_RD.astype(jnp.float32) * g_RD.astype(jnp.float32), axis=-1)
    dweights_TK = take_or_zero(dweight_R, permutation.row_A).reshape(weights_TK.shape)
    weight_R = take_or_zero(weights_TK.reshape(-1), permutation.assignment_R)
    dy_RD = g_RD.astype(jnp.float32) * weight_R[:, None]
    dy_RD = lax.optimization_barrier(dy_RD.astype(y_RD.dtype))
    return dy_RD, dweights_TK.astype(weights_TK.dtype), None


unpermute.defvjp(_unpermute_forward, _unpermute_backward)


def take_or_zero(values: jax.Array, index: jax.Array) -> jax.Array:
    """Return the entries at these indices; zeros for an index past the end."""
    return values.at[index].get(mode="fill", fill_value=0)
