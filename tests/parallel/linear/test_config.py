"""A config of tensor parallelism refuses what cannot hold, and survives jit and JSON."""

import json
from types import MappingProxyType
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.linear.collective_matmul import Overlap
from parallel.linear.config import MatrixMultiplyMethod, TensorParallelConfig
from parallel.sharding import axes as ax
from parallel.sharding.mesh import MeshConfig, build_mesh, mesh_from_dict, mesh_to_dict
from parallel.sharding.partition import PartitionAxis
from parallel.sharding.residual import residual_rules

ALL_GATHER, REDUCE_SCATTER = MatrixMultiplyMethod
NAMES = ("dp", "fsdp", "ep", "sp", "tp")


def mesh(**sizes: int) -> Mesh:
    config = MeshConfig(**sizes)
    return build_mesh(config, jax.devices()[: config.num_devices])


def full_config(on: Mesh) -> TensorParallelConfig:
    """One with no field at its default."""
    rules = residual_rules("sequence", PartitionAxis(tensor_parallel_axis="sp"))
    return TensorParallelConfig(
        on,
        "sp",
        REDUCE_SCATTER,
        True,
        True,
        partition_axis=rules.register("__STATE__", ("tp", "sp"), None),
        overlap="ring",
        kind_overlaps={"qkv": "none"},
    )


def put(array, on: Mesh, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(on, spec))


def test_the_mesh_of_the_context_is_taken_and_a_given_one_kept() -> None:
    ambient, given_mesh = mesh(tp=8), mesh(tp=2)
    with jax.set_mesh(ambient):
        assert TensorParallelConfig().mesh is ambient
        assert TensorParallelConfig(matmul_method=ALL_GATHER).mesh is ambient
        assert TensorParallelConfig(given_mesh).mesh is given_mesh
    with jax.sharding.use_abstract_mesh(ambient.abstract_mesh):
        assert TensorParallelConfig().mesh == ambient.abstract_mesh
    assert TensorParallelConfig().mesh is None


def test_while_jax_traces_the_mesh_of_the_context_splits_and_multiplies() -> None:
    ambient = mesh(tp=8)
    configs = []

    @jax.jit
    def total(x):
        config = TensorParallelConfig(matmul_method=ALL_GATHER)
        configs.append(config)
        assert config.manager.resolve(ax.ColumnWise, shape=(8, 16)) == P(("fsdp", "sp"), "tp")
        island = jax.shard_map(
            lambda block: lax.psum(block, config.axis_name),
            mesh=config.mesh,
            in_specs=P("tp"),
            out_specs=P(None),
        )
        return island(x)

    with jax.set_mesh(ambient):
        np.testing.assert_array_equal(total(put(jnp.arange(8.0), ambient, P("tp"))), [28.0])
    assert configs[0].mesh == ambient.abstract_mesh
    with pytest.raises(ValueError, match=r"is abstract and has no devices.*outside of jax.jit"):
        configs[0].to_dict()


def test_inside_shard_map_no_mesh_is_taken() -> None:
    ambient, seen = mesh(tp=8), []

    def body(block):
        seen.append(TensorParallelConfig().mesh)
        return block

    with jax.set_mesh(ambient):
        x = put(jnp.arange(8.0), ambient, P("tp"))
        jax.jit(jax.shard_map(body, in_specs=P("tp"), out_specs=P("tp"))).trace(x)
    assert seen == [None]


def test_what_a_config_cannot_hold_is_refused() -> None:
    on = mesh(tp=2)
    auto = Mesh(on.devices, on.axis_names)
    with jax.set_mesh(auto), pytest.raises(ValueError, match="are Auto"):
        TensorParallelConfig()
    with pytest.raises(ValueError, match=r"overlap='rings' is not an overlap; use one of none, ri"):
        TensorParallelConfig(on, overlap="rings")
    with pytest.raises(ValueError, match=r"qkv='twice' is not an overlap"):
        TensorParallelConfig(on, kind_overlaps={"qkv": "twice"})
    with pytest.raises(ValueError, match=r"kind_overlaps=3 is not a mapping; give one overlap"):
        TensorParallelConfig(on, kind_overlaps=3)
    with pytest.raises(ValueError, match=r"has no mesh, so no axis resolves; pass mesh="):
        _ = TensorParallelConfig().manager


def test_a_method_may_be_its_name() -> None:
    config = TensorParallelConfig(mesh(tp=2), matmul_method="all_gather")
    assert config == TensorParallelConfig(mesh(tp=2), matmul_method=ALL_GATHER)
    assert hash(config) == hash(TensorParallelConfig(mesh(tp=2), matmul_method=ALL_GATHER))


def test_equal_configs_are_one_key_and_different_ones_are_not() -> None:
    first, second = full_config(mesh(tp=4, sp=2)), full_config(mesh(tp=4, sp=2))
    assert first == second
    assert len({first, second}) == 1
    for change in (
        {"mesh": mesh(tp=2, sp=4)},
        {"axis_name": "tp"},
        {"matmul_method": ALL_GATHER},
        {"reduce_output": False},
        {"reduce_scatter_output": False},
        {"partition_axis": PartitionAxis()},
        {"overlap": "none"},
        {"kind_overlaps": {"qkv": "ring"}},
    ):
        assert first.replace(**change) != first, change
        assert hash(first.replace(**change)) is not None


def test_a_later_change_of_the_callers_mapping_changes_no_config() -> None:
    kinds = {"qkv": "ring"}
    config = TensorParallelConfig(kind_overlaps=kinds)
    kinds["qkv"] = "none"
    assert config.kind_overlaps == {"qkv": "ring"}


def test_equal_configs_share_a_graphdef_and_a_compiled_function() -> None:
    class Holder(nnx.Module):
        def __init__(self, config):
            self.config = config
            self.weight = nnx.Param(jnp.ones(2))

    configs = [full_config(mesh(tp=4, sp=2)) for _ in range(2)]
    definitions = [nnx.split(Holder(config))[0] for config in configs]
    assert definitions[0] == definitions[1]
    assert hash(definitions[0]) == hash(definitions[1])
    traces = []

    def body(x, config):
        traces.append(config)
        return x

    function = jax.jit(body, static_argnums=1)
    for config in configs:
        function(1.0, config)
    assert len(traces) == 1


def test_for_kind_gives_each_kind_its_overlap() -> None:
    config = TensorParallelConfig(mesh(tp=2), overlap="ring", kind_overlaps={"qkv": "none"})
    assert config.for_kind("qkv").overlap == "none"
    assert config.for_kind("output") == config
    assert config.for_kind("qkv").for_kind("output").kind_overlaps == {"qkv": "none"}


def test_replace_refuses_an_unknown_field_and_names_the_nearest() -> None:
    assert TensorParallelConfig().replace(overlap="ring").overlap == "ring"
    with pytest.raises(ValueError, match=r"unknown key 'axis_nam'; did you mean axis_name\?"):
        TensorParallelConfig().replace(axis_nam="tp")


def test_every_config_survives_a_dict_and_json() -> None:
    for config in (
        TensorParallelConfig(),
        TensorParallelConfig(mesh(tp=8)),
        TensorParallelConfig(mesh(), partition_axis=PartitionAxis.reference()),
        full_config(mesh(dp=2, tp=2, sp=2)),
        *(TensorParallelConfig(overlap=overlap) for overlap in get_args(Overlap)),
    ):
        data = config.to_dict()
        assert json.loads(config.to_json(indent=1)) == data
        for same in (
            TensorParallelConfig.from_dict(data),
            TensorParallelConfig.from_json(config.to_json(sort_keys=True)),
        ):
            assert same == config
            assert hash(same) == hash(config)
    assert TensorParallelConfig.from_dict({}) == TensorParallelConfig()


def test_json_brings_back_tuples_enums_and_read_only_tables() -> None:
    config = TensorParallelConfig.from_json(full_config(mesh(sp=2)).to_json())
    assert config.matmul_method is REDUCE_SCATTER
    assert config.partition_axis.rules["__STATE__"] == ("tp", "sp")
    assert isinstance(config.partition_axis.rules, MappingProxyType)
    assert isinstance(config.kind_overlaps, MappingProxyType)


def test_a_mesh_comes_back_with_its_order_and_axis_types() -> None:
    grid = np.array(jax.devices()[::-1]).reshape(2, 4)
    on = Mesh(grid, ("dp", "tp"), axis_types=(AxisType.Auto, AxisType.Explicit))
    same = mesh_from_dict(json.loads(json.dumps(mesh_to_dict(on))))
    assert same == on
    assert [device.id for device in same.devices.flat] == list(range(7, -1, -1))
    assert same.axis_types == (AxisType.Auto, AxisType.Explicit)


def test_devices_of_another_machine_are_refused_unless_a_mesh_is_given() -> None:
    data = full_config(mesh(sp=8)).to_dict()
    data["mesh"]["device_ids"][3] = 4096
    with pytest.raises(ValueError, match=r"no cpu devices \[4096\], only \[0, 1,.*pass mesh="):
        TensorParallelConfig.from_dict(data)
    here = mesh(sp=2)
    assert TensorParallelConfig.from_dict(data, mesh=here) == full_config(here)
    assert TensorParallelConfig.from_json(json.dumps(data), mesh=here) == full_config(here)
    data["mesh"]["platform"] = "abacus"
    with pytest.raises(ValueError, match=r"this machine has no abacus devices; pass mesh="):
        TensorParallelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis_nams": ["tp"]}, r"mesh: unknown key 'axis_nams'; did you mean axis_names\?"),
        ({"axis_sizes": [1, 1, 1, 1, 4]}, r"do not match devices \[0, 1\]; give one size"),
        ({"device_ids": [0, 0]}, r"do not match devices \[0, 0\].*different ids"),
        ({"axis_types": ["Explicit"]}, r"one size and type per axis"),
        ({"axis_types": ["Implicit"] * 5}, r"axis type 'Implicit' is unknown; use Auto, Explicit"),
    ],
)
def test_a_mesh_that_does_not_hold_together_is_refused(change, message: str) -> None:
    data = TensorParallelConfig(mesh(tp=2)).to_dict()
    data["mesh"].update(change)
    with pytest.raises(ValueError, match=message):
        TensorParallelConfig.from_dict(data)


def test_what_is_not_a_config_is_refused() -> None:
    data = TensorParallelConfig(mesh(tp=2)).to_dict()
    for key in data["mesh"]:
        short = {name: value for name, value in data["mesh"].items() if name != key}
        with pytest.raises(ValueError, match=f"mesh: key '{key}' is missing"):
            TensorParallelConfig.from_dict({"mesh": short})
    with pytest.raises(ValueError, match=r"unknown key 'overlaps'; did you mean overlap\?"):
        TensorParallelConfig.from_dict({"overlaps": "ring"})
    with pytest.raises(ValueError, match=r"unknown key 'zzz'; its keys are mesh, axis_name"):
        TensorParallelConfig.from_dict({"zzz": 1})
    with pytest.raises(ValueError, match=r"\[1\] is not a mapping; its keys are"):
        TensorParallelConfig.from_json("[1]")
    with pytest.raises(ValueError, match=r"matmul_method 'AllGather' is not"):
        TensorParallelConfig.from_dict({"matmul_method": "AllGather"})
    with pytest.raises(ValueError, match=r"PartitionAxis: unknown key 'rule'; did you mean rules"):
        TensorParallelConfig.from_dict({"partition_axis": {"rule": {}}})
    with pytest.raises(ValueError, match=r"PartitionAxis.rules=3 is not a mapping of rules"):
        PartitionAxis.from_dict({"rules": 3})


axis_rules = st.none() | st.sampled_from(NAMES) | st.lists(st.sampled_from(NAMES)).map(tuple)


@given(st.dictionaries(st.text(), axis_rules), st.dictionaries(st.text(), axis_rules))
def test_partition_tables_survive_json(rules, generation_rules) -> None:
    table = PartitionAxis(rules=rules, generation_rules=generation_rules)
    assert PartitionAxis.from_dict(json.loads(json.dumps(table.to_dict()))) == table
