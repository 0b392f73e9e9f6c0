"""Residual layouts are data: each names the mesh axes of LENGTH and EMBED."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from parallel.sharding import axes as ax
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionManager
from parallel.sharding.residual import (
    DEFAULT_RESIDUAL,
    RESIDUAL_LAYOUTS,
    ResidualLayout,
    residual_name,
    residual_rules,
)
from parallel.sharding.specs import FEATURES, ROWS, split_dim

BATCH = ("dp", "fsdp", "ep")


def spec_of(name: str) -> P:
    config = MeshConfig(tp=4, sp=2)
    mesh = build_mesh(config, jax.devices()[: config.num_devices])
    return PartitionManager(residual_rules(name), mesh).resolve(ax.ResidualSharding)


@pytest.mark.parametrize(
    ("name", "spec", "dim"),
    [
        ("hidden", P(BATCH, "sp", "tp"), FEATURES),
        ("sequence", P(BATCH, ("sp", "tp"), None), ROWS),
        ("replicated", P(BATCH, "sp", None), None),
    ],
)
def test_each_residual_layout_is_a_rule(name: str, spec: P, dim: int | None) -> None:
    assert spec_of(name) == spec
    assert RESIDUAL_LAYOUTS[name].split_dim == split_dim(spec, "tp") == dim
    assert residual_name(residual_rules(name)) == name


def test_a_new_layout_is_one_registration(monkeypatch) -> None:
    monkeypatch.setitem(RESIDUAL_LAYOUTS, "whole", ResidualLayout(length=()))
    assert spec_of("whole") == P(BATCH, None, None)
    with pytest.raises(ValueError, match="unknown residual layout 'columns'; use one of seq"):
        residual_rules("columns")
    assert DEFAULT_RESIDUAL == "sequence"
