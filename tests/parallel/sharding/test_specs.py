"""Entries of PartitionSpecs, and the dim of activations that an axis splits."""

import pytest
from jax.sharding import PartitionSpec as P

from parallel.sharding.specs import FEATURES, ROWS, mesh_axes_of, split_dim, without_axis


def test_entries_list_their_axes_and_lose_one() -> None:
    entries = [None, "tp", "sp", ("sp", "tp"), ("dp", "sp", "tp"), ("tp",)]
    axes = [(), ("tp",), ("sp",), ("sp", "tp"), ("dp", "sp", "tp"), ("tp",)]
    assert [mesh_axes_of(entry) for entry in entries] == axes
    kept = [None, None, "sp", "sp", ("dp", "sp"), None]
    assert [without_axis(entry, "tp") for entry in entries] == kept


@pytest.mark.parametrize(
    ("spec", "rank", "dim"),
    [
        (P("dp", "sp", "tp"), None, FEATURES),
        (P("dp", "sp", ("fsdp", "tp")), 3, FEATURES),
        (P("dp", ("sp", "tp"), None), None, ROWS),
        (P("dp", ("sp", "tp")), 3, ROWS),
        (P("dp", "sp", None), None, None),
        (P("dp"), 3, None),
        (P(), None, None),
        (P(), 3, None),
        (P("tp"), None, FEATURES),
        (P("tp"), 2, ROWS),
    ],
)
def test_the_split_dim_is_where_the_axis_is(spec: P, rank: int | None, dim: int | None) -> None:
    assert split_dim(spec, "tp", rank=rank) == dim


def test_specs_that_no_linear_accepts_are_refused() -> None:
    for spec, rank in ((P("tp", None, None), None), (P("tp"), 3)):
        with pytest.raises(ValueError, match=r"split over tp before dim -2; reshard them so that"):
            split_dim(spec, "tp", rank=rank)
    with pytest.raises(ValueError, match="tp outside of another mesh axis; reshard"):
        split_dim(P("dp", ("tp", "sp"), None), "tp")
    with pytest.raises(ValueError, match="more entries than the 2 dims"):
        split_dim(P("dp", "sp", "tp"), "tp", rank=2)
