"""Layouts for tests of expert layers, with their rows computed by loops."""

import numpy as np

from parallel.experts.row_layout import RowLayout

GROUPS, BOUND = 4, 40
# TPU kernels need blocks of 16 rows at least; smaller ones give more blocks to test.
LAYOUTS = {
    "packed": RowLayout("packed", 1, BOUND, GROUPS),
    "blocks": RowLayout.blocks(BOUND, GROUPS, 4),
    "uniform": RowLayout("uniform", 1, BOUND * GROUPS, GROUPS),
}


def starts_of(layout: RowLayout, sizes) -> list[int]:
    """Return the first row of each group, from the words of the layout's docstring."""
    if layout.kind == "uniform":
        return [e * (layout.rows // layout.groups) for e in range(layout.groups)]
    starts, row = [], 0
    for size in sizes:
        row += -row % layout.block
        starts.append(row)
        row += size
    return starts


def member_rows(layout: RowLayout, sizes) -> np.ndarray:
    """Return whether a row belongs to any group."""
    member = np.zeros(layout.rows, bool)
    for start, size in zip(starts_of(layout, sizes), sizes, strict=True):
        member[start : start + size] = True
    return member
