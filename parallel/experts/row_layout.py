"""Layouts of a buffer whose rows are sorted by group, as the grouped matmul reads it.

`RowLayout` is static. `RowGroups` adds the group sizes, which are traced.

Letters: R rows, E groups (experts of this device).
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import jax
import jax.numpy as jnp

LayoutKind = Literal["packed", "blocks", "uniform"]


@dataclass(frozen=True)
class RowLayout:
    """Static layout of R rows in E groups.

    kind: `packed`: groups follow each other without a gap. `blocks`: every group starts at a
    multiple of `block`; padding rows in between are finite and belong to no group. `uniform`:
    every group has R / E rows, and its size says how many of them are used. block: 1 except for
    `blocks`. rows: R.
    Raises: ValueError if the rows do not divide into blocks, or into groups for `uniform`.
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
    def blocks(max_rows: int, groups: int, block: int) -> "RowLayout":
        """Return the smallest `blocks` layout that holds any sizes with a sum of 1 .. max_rows."""
        # Every group that is not empty may waste all rows but one of its last block.
        most = max_rows + min(max_rows, groups) * (block - 1)
        return RowLayout("blocks", block, most // block * block, groups)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowGroups:
    """Rows of each group in a buffer. sizes_E: int32, no larger than the layout has room for."""

    layout: RowLayout = field(metadata={"static": True})
    sizes_E: jax.Array

    @property
    def spans_E(self) -> jax.Array:
        """Rows from the start of each group to the start of the next, padding included."""
        if self.layout.kind == "uniform":
            return jnp.full_like(self.sizes_E, self.layout.rows // self.layout.groups)
        return -(-self.sizes_E // self.layout.block) * self.layout.block

    @property
    def starts_E(self) -> jax.Array:
        """First row of each group, int32."""
        spans_E = self.spans_E
        return jnp.cumsum(spans_E, dtype=jnp.int32) - spans_E

    @property
    def members_RE(self) -> jax.Array:
        """Whether row r belongs to group e."""
        row_R1 = jnp.arange(self.layout.rows, dtype=jnp.int32)[:, None]
        starts_E = self.starts_E
        return (row_R1 >= starts_E) & (row_R1 < starts_E + self.sizes_E)
