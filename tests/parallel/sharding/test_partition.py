"""Rules resolve to the documented specs; impossible layouts are refused by name."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallel.sharding import axes as ax
from parallel.sharding.devices import find_devices
from parallel.sharding.mesh import AXIS_NAMES, MeshConfig, build_mesh
from parallel.sharding.partition import PartitionAxis, PartitionManager
from parallel.sharding.residual import residual_rules


def manager(layout="hidden", **sizes: int) -> PartitionManager:
    config = MeshConfig(**sizes)
    mesh = build_mesh(config, jax.devices()[: config.num_devices])
    return PartitionManager(residual_rules(layout), mesh)


def test_impossible_layouts_are_refused_by_name() -> None:
    rules = manager(tp=8)
    with pytest.raises(ValueError, match=r"kernel \(16, 20\): dim 1 = 20 is not divisible by tp"):
        rules.resolve(ax.ColumnWise, shape=(16, 20), name="kernel")
    with pytest.raises(ValueError, match="'tp' twice"):
        rules.resolve([ax.HEAD, ax.VOCAB])
    with pytest.raises(ValueError, match="does not have 2 dims"):
        rules.resolve(ax.ColumnWise, shape=(8,))


def test_constrain_moves_to_the_resolved_layout() -> None:
    rules = manager("sequence", tp=4, sp=2)
    with jax.set_mesh(rules.mesh):
        x = rules.constrain(jnp.arange(2 * 16 * 4.0).reshape(2, 16, 4), ax.ResidualSharding)
    assert x.sharding.spec == P(("dp", "fsdp", "ep"), ("sp", "tp"), None)
    assert x.addressable_shards[0].data.shape == (2, 2, 4)


def test_constrain_needs_no_mesh_in_context() -> None:
    rules = manager(dp=2, tp=4)
    on_mesh = jax.device_put(np.ones((4, 2, 8)), rules.sharding([ax.BATCH, None, None]))
    want = rules.resolve(ax.HiddenStateSharding, shape=on_mesh.shape)
    for x in (on_mesh, np.ones((4, 2, 8)), jnp.ones((4, 2, 8))):
        for method in (rules.constrain, rules.shard):

            def move(x, method=method):
                return method(2 * x, ax.HiddenStateSharding)

            dx = jax.jit(jax.grad(lambda x, move=move: jnp.sum(jnp.sin(move(x)))))(x)
            np.testing.assert_allclose(dx, 2 * np.cos(2 * np.asarray(x)), rtol=1e-6)
            for y in (move(x), jax.jit(move)(x)):
                assert y.sharding.spec == want and np.all(np.asarray(y) == 2)


def test_a_mesh_has_all_five_axes_and_takes_exactly_its_devices() -> None:
    config = MeshConfig(tp=2, sp=2)
    mesh = build_mesh(config, jax.devices()[:4])
    assert mesh.axis_names == AXIS_NAMES
    assert dict(mesh.shape) == {"dp": 1, "fsdp": 1, "ep": 1, "sp": 2, "tp": 2}
    with pytest.raises(ValueError, match="needs 4 devices, got 8"):
        build_mesh(config, jax.devices())


def test_simulated_devices_are_reported() -> None:
    devices, notice = find_devices(4)
    assert len(devices) == 4
    assert notice == "found no accelerator; simulating 4 devices on the CPU"
    with pytest.raises(ValueError, match="needs 9 CPU devices"):
        find_devices(9)


def test_a_mesh_axis_that_no_rule_names_is_refused() -> None:
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match="mesh axis 'model' of size 8 is not in the rules"):
        PartitionManager(PartitionAxis(), mesh)


def test_unknown_modes_are_refused() -> None:
    rules = manager(dp=2, sp=2, tp=2)
    with pytest.raises(
        ValueError, match="mode 'decode' is unknown; use one of __autoregressive__, "
    ):
        rules.resolve(ax.HiddenStateSharding, mode="decode")
    with pytest.raises(ValueError, match=r"mode 3 is no dim of \(2, 4, 4\)"):
        rules.resolve(ax.HiddenStateSharding, mode=3, shape=(2, 4, 4))


def test_a_rule_table_is_immutable_and_can_be_copied() -> None:
    given = dict(PartitionAxis().rules)
    table = PartitionAxis(rules=given)
    given[ax.BATCH] = None
    assert table == PartitionAxis()
    assert copy.deepcopy(table) == pickle.loads(pickle.dumps(table)) == table
    with pytest.raises(ValueError, match="'tp' is a mesh axis and cannot have a rule"):
        table.register("tp", None, override=True)
