"""Permutation of assignments into rows: loops and plain indexing in numpy and autodiff."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from islands import Island, mesh_of

from parallel.experts.permutation import (
    Permutation,
    permute_blocks,
    permute_weights,
    sort_by_group,
    unpermute,
)
from parallel.experts.row_layout import RowGroups, RowLayout

A, E = 12, 4
LAYOUTS = {
    "packed": RowLayout("packed", 1, A, E),
    "packed-roomy": RowLayout("packed", 1, A + 5, E),
    "packed-small": RowLayout("packed", 1, 7, E),
    "blocks": RowLayout.blocks(A, E, 4),
    "blocks-small": RowLayout("blocks", 4, 8, E),
    "uniform": RowLayout("uniform", 1, E * A, E),
    "uniform-small": RowLayout("uniform", 1, E * 2, E),
}
TRACED = []


@partial(jax.jit, static_argnums=1)
def sort_compiled(groups_A: jax.Array, layout: RowLayout) -> tuple[Permutation, RowGroups]:
    TRACED.append(layout)
    return sort_by_group(groups_A, layout)


# Sums of at most four float32 numbers of size one, in another order.
ROUNDING = 4 * 2.0**-23


def rows_by_loop(groups_A, layout: RowLayout):
    """Give assignments, group by group, the next row while there is one."""
    count, rows = len(groups_A), layout.rows
    row_A, assignment_R, sizes_E = np.full(count, rows), np.full(rows, count), []
    row = 0
    for group in range(layout.groups):
        uniform = layout.kind == "uniform"
        each = rows // layout.groups
        first = row = group * each if uniform else -(-row // layout.block) * layout.block
        for assignment in np.flatnonzero(np.asarray(groups_A) == group):
            if row < (first + each if uniform else rows):
                row_A[assignment], assignment_R[row] = row, assignment
                row += 1
        sizes_E.append(row - first)
    return row_A, assignment_R, np.array(sizes_E)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 3, -1, E, -(2**31), 99]), min_size=A, max_size=A))
@example([2] * A)
@example([-1] * A)
@example([E] * A)
@example([0] + [E - 1] * (A - 1))
def test_rows_are_sorted_by_group_and_only_assignments_beyond_the_capacity_are_dropped(
    name, groups
) -> None:
    layout = LAYOUTS[name]
    groups_A = np.array(groups, np.int32)
    permutation, row_groups = sort_compiled(groups_A, layout)
    got = [np.asarray(y) for y in jax.tree.leaves((permutation, row_groups))]
    for array, want in zip(got, rows_by_loop(groups_A, layout), strict=True):
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, want)
    row_A, assignment_R, sizes_E = got
    kept, used = row_A < layout.rows, assignment_R < A
    np.testing.assert_array_equal(assignment_R[row_A[kept]], np.flatnonzero(kept))
    np.testing.assert_array_equal(row_A[assignment_R[used]], np.flatnonzero(used))
    # The rows that a grouped matmul takes for rows of groups.
    np.testing.assert_array_equal(RowGroups(layout, sizes_E).members_RE.any(axis=1), used)
    if "small" not in name:
        np.testing.assert_array_equal(kept, (groups_A >= 0) & (groups_A < E))
    assert TRACED.count(layout) == 1, "assignments are traced, not static"


T, K, D = 5, 3, 4


def assigned(seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return arrays of one device, and the groups of its assignments: some have none."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (T, D), "w": (T * K,), "y": (12, D)}
    shapes |= {"g_rows": (12, D), "g_tokens": (T, D), "g_weights": (12,)}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return arrays, rng.integers(-1, 3, T * K).astype(np.int32)


ROWS = {"gaps": RowLayout("blocks", 3, 12, 3), "cut": RowLayout("uniform", 1, 12, 3)}


def by_index(permutation: Permutation, arrays) -> tuple[jax.Array, ...]:
    """Index for autodiff: rows and weights of assignments, 0 in empty rows; sums of rows."""
    assignment_R, row_A = permutation.assignment_R, permutation.row_A
    used_R, found_R = assignment_R < T * K, jnp.minimum(assignment_R, T * K - 1)
    rows = jnp.where(used_R[:, None], jnp.repeat(arrays["x"], K, axis=0)[found_R], 0)
    y_AD = jnp.where((row_A < 12)[:, None], arrays["y"][jnp.minimum(row_A, 11)], 0)
    weights = jnp.where(used_R, arrays["w"][found_R], 0)
    return rows, jnp.sum(y_AD.reshape(T, K, D), axis=1), weights


def by_permutation(permutation: Permutation, arrays) -> tuple[jax.Array, ...]:
    """Move in three blocks."""
    rows = jnp.concatenate(permute_blocks(arrays["x"], permutation, 3))
    rows = jnp.where((permutation.assignment_R < T * K)[:, None], rows, 0)
    tokens = unpermute(jnp.split(arrays["y"], 3), permutation, T)
    return rows, tokens, permute_weights(arrays["w"], permutation)


def moved(way, layout: RowLayout, arrays, groups_A):
    """Return rows, sums and weights, their gradients and the permutation of one device.

    The gradient of an empty row is set to 0.
    """
    permutation, _ = sort_by_group(groups_A, layout)

    def loss(arrays):
        cotangents = [arrays[name] for name in ("g_rows", "g_tokens", "g_weights")]
        pairs = zip(way(permutation, arrays), cotangents, strict=True)
        return sum(jnp.sum(y * g) for y, g in pairs)

    gradients = jax.grad(loss)(arrays)
    used_R1 = (permutation.assignment_R < T * K)[:, None]
    gradients["y"] = jnp.where(used_R1, gradients["y"], 0)
    return way(permutation, arrays), gradients, permutation


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@pytest.mark.parametrize("layout", ROWS)
def test_permute_and_unpermute_equal_plain_indexing_on_every_device(
    layout,
) -> None:
    devices = stacked([assigned(seed) for seed in range(4)])
    got = Island(mesh_of(ep=4), partial(moved, by_permutation, ROWS[layout]), *devices).run(
        *devices
    )
    plain = jax.jit(jax.vmap(partial(moved, by_index, ROWS[layout])))
    want = jax.tree.map(np.asarray, plain(*devices))
    for a, b in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING * np.abs(b).max())
    _, gradients, permutation = got
    used = permutation.assignment_R < T * K
    kept, wanted = permutation.row_A < 12, devices[1] >= 0
    assert np.any(~used) and np.any(wanted & ~kept), "there are empty rows and dropped assignments"
    np.testing.assert_array_equal(gradients["w"] != 0, kept)


def pulled(function):
    """Return (arguments, cotangent) -> value and gradients, compiled."""

    @jax.jit
    def both(arguments, cotangent):
        value, pull = jax.vjp(function, *arguments)
        return value, pull(cotangent)

    return both


def test_dropped_assignments_and_empty_rows_add_nothing_whatever_they_hold() -> None:
    arrays, groups_A = assigned(0)
    permutation, _ = sort_compiled(groups_A, ROWS["cut"])
    kept = np.asarray(permutation.row_A) < 12
    used = np.asarray(permutation.assignment_R) < T * K
    broken = {
        **arrays,
        "w": np.where(kept, arrays["w"], np.nan),
        "y": np.where(used[:, None], arrays["y"], np.nan),
    }
    solve = jax.jit(partial(moved, by_permutation, ROWS["cut"]))
    (got, got_gradient, _), (want, gradient, _) = (solve(y, groups_A) for y in (broken, arrays))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for name in ("x", "w", "y"):
        np.testing.assert_array_equal(got_gradient[name], gradient[name])


def test_a_token_never_receives_the_cotangent_of_a_row_that_is_not_its_own() -> None:
    arrays, groups_A = assigned(1)
    permutation, _ = sort_compiled(groups_A, ROWS["gaps"])
    used = np.asarray(permutation.assignment_R) < T * K
    pull = pulled(lambda x: permute_blocks(x, permutation, 1))
    huge = np.where(used[:, None], arrays["g_rows"], 1e9).astype(np.float32)
    assert not used.all()
    (got,), (want,) = (pull((arrays["x"],), [g])[1] for g in (huge, arrays["g_rows"]))
    np.testing.assert_array_equal(got, want)


def test_bfloat16_rows_are_summed_in_float32() -> None:
    """256 + 1 + 1: every partial sum in bfloat16 would round back to 256."""
    permutation, _ = sort_compiled(np.zeros(3, np.int32), RowLayout("packed", 1, 3, 1))
    column = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)
    three = jnp.full((1, 1), 3, jnp.bfloat16)
    y, (dy,) = pulled(lambda y: unpermute([y], permutation, 1))((column,), three)
    assert y.dtype == jnp.bfloat16 and y[0, 0] == 258
    assert dy.dtype == jnp.bfloat16 and np.all(dy == 3)
    _, (dx,) = pulled(lambda x: permute_blocks(x, permutation, 1))((column[:1],), [column])
    assert dx.dtype == jnp.bfloat16 and dx[0, 0] == 258
