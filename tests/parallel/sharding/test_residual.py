"""Residual layouts are data: each names the mesh axes of LENGTH and EMBED."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from parallel.sharding import axes as ax
from parallel.sharding import residual
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionManager
from parallel.sharding.residual import (
    DEFAULT_RESIDUAL,
    ResidualLayout,
    get_residual,
    register_residual,
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
    assert get_residual(name).split_dim == split_dim(spec, "tp") == dim
    assert residual_name(residual_rules(name)) == name


def test_a_new_layout_is_one_registration(monkeypatch) -> None:
    monkeypatch.setattr(residual, "_LAYOUTS", dict(residual._LAYOUTS))
    register_residual(ResidualLayout(name="whole", length=()))
    assert spec_of("whole") == P(BATCH, None, None)
    with pytest.raises(ValueError, match="'whole' is already registered"):
        register_residual(ResidualLayout(name="whole"))


def test_an_unknown_layout_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="'columns' is unknown; use one of sequence, hidden, repl"):
        residual_rules("columns")
    assert get_residual(DEFAULT_RESIDUAL).name == "sequence"
