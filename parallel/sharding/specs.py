"""Queries on PartitionSpecs: the mesh axes of an entry, and the dim that an axis splits."""

from typing import Any, Final, Literal

from jax.sharding import PartitionSpec as P

SplitDim = Literal[-2, -1]
"""The dim of activations `... L D` that the tensor-parallel axis splits."""

ROWS: Final = -2
FEATURES: Final = -1


def mesh_axes_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of one PartitionSpec entry, outermost first."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def without_axis(entry: Any, *axis_names: str) -> Any:
    """Return one PartitionSpec entry with these mesh axes removed."""
    kept = tuple(name for name in mesh_axes_of(entry) if name not in axis_names)
    return kept[0] if len(kept) == 1 else kept or None


def split_dim(spec: P, axis_name: str, *, rank: int | None = None) -> SplitDim | None:
    """Return the dim of activations `... L D` that `axis_name` splits.

    Args:
        spec: Layout of the activations. The spec of an array type always has one entry per dim.
        axis_name: The tensor-parallel mesh axis.
        rank: Number of dims, for a spec that omits trailing unsharded dims. The default takes the
            last entry for the features.

    Returns:
        `ROWS` (-2), `FEATURES` (-1), or None if the axis splits no dim.

    Raises:
        ValueError: The axis splits a dim before `L`, or another axis splits the same dim inside
            of it, so that local blocks are not contiguous. Also if the spec has more entries than
            dims.
    """
    rank = len(spec) if rank is None else rank
    if len(spec) > rank:
        raise ValueError(f"spec {spec} has more entries than the {rank} dims of the activations")
    split = [dim for dim, entry in enumerate(spec) if axis_name in mesh_axes_of(entry)]
    if not split:
        return None
    if mesh_axes_of(spec[split[0]])[-1] != axis_name:
        raise ValueError(
            f"activations of type {spec} have {axis_name} outside of another mesh axis; reshard "
            f"them so that {axis_name} comes last in its entry"
        )
    if split[0] < rank - 2:
        raise ValueError(
            f"activations of type {spec} are split over {axis_name} before dim -2; reshard them "
            f"so that {axis_name} splits rows (dim -2) or features (dim -1)"
        )
    return FEATURES if split[0] == rank - 1 else ROWS
