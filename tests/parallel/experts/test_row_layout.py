"""Row layouts: groups start where the layout says, and `blocks` are as few as possible."""

from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_groups import BOUND, GROUPS, LAYOUTS, member_rows, starts_of

from parallel.experts.row_layout import LayoutKind, RowGroups, RowLayout


@settings(deadline=None, max_examples=100, derandomize=True)
@given(bound=st.integers(1, 60), groups=st.integers(1, 6), block=st.integers(1, 9), data=st.data())
def test_blocks_hold_any_sizes_and_are_as_few_as_that_allows(bound, groups, block, data) -> None:
    layout = RowLayout.blocks(bound, groups, block)
    cuts = data.draw(st.lists(st.integers(0, bound), min_size=groups, max_size=groups))
    sizes = np.diff(np.sort([0, *cuts]))
    assert sum(-(-size // block) for size in sizes) * block <= layout.rows
    # The worst sizes: one row in as many groups as possible, all others in the first group.
    worst = [bound - (min(bound, groups) - 1), *[1] * (min(bound, groups) - 1)]
    assert sum(-(-size // block) for size in worst) * block == layout.rows


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    kind=st.sampled_from(get_args(LayoutKind)),
    cuts=st.lists(st.integers(0, BOUND), min_size=GROUPS, max_size=GROUPS),
)
def test_groups_start_where_the_layout_says(kind, cuts) -> None:
    layout, sizes = LAYOUTS[kind], np.diff(np.sort([0, *cuts])).astype(np.int32)
    groups = RowGroups(layout, jnp.asarray(sizes))
    assert groups.starts_E.dtype == jnp.int32
    # An empty group has no rows and may start anywhere.
    want = np.array(starts_of(layout, sizes))
    np.testing.assert_array_equal(np.asarray(groups.starts_E)[sizes > 0], want[sizes > 0])
    member = np.asarray(groups.members_RE)
    np.testing.assert_array_equal(member.sum(axis=0), sizes)
    np.testing.assert_array_equal(member.any(axis=1), member_rows(layout, sizes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("heap", 1, 8, 2), "row layout 'heap': use packed, blocks, uniform"),
        (("blocks", 4, 10, 2), "rows must be a multiple of 4; use 12"),
        (("uniform", 1, 7, 2), "rows must be a multiple of 2; use 8"),
        (("packed", 0, 8, 2), "must be positive; use 1 or more"),
    ],
)
def test_an_impossible_layout_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        RowLayout(*arguments)
