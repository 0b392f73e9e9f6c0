"""Rows of the sharding table: bytes per device, and a reason for every replica."""

import math

import jax
import jax.numpy as jnp
import pytest
from conftest import MESHES, tensor_parallel
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.linear.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from parallel.planning.sharding_table import (
    Row,
    Tensor,
    costs,
    render,
    sharding_table,
    summary,
    tensors_of_model,
    tensors_of_state,
)
from parallel.sharding import axes as ax
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionAxis, PartitionManager
from parallel.sharding.residual import residual_rules

GRID = MeshConfig(dp=2, fsdp=2, tp=2)
MESH_AXES = ("dp", "fsdp", "tp")


class Layers(nnx.Module):
    """A linear of every kind, and a parameter without semantic axes."""

    def __init__(self, tp, rngs: nnx.Rngs):
        shared = {"parallel_config": tp, "rngs": rngs}
        self.column = ColumnParallelLinear(16, {"a": 32, "b": 8}, **shared)
        self.row = RowParallelLinear(32, 16, param_dtype=jnp.bfloat16, **shared)
        self.plain = ParallelLinear(16, 3, **shared)
        self.bare = nnx.Param(jnp.zeros((8, 3), out_sharding=P("tp", None)))


def state_of(tp):
    """Return the definition of the module and its variables, all stacked along a first dim."""

    def stacked():
        keys = jax.random.split(jax.random.key(0), 3)
        return jax.vmap(lambda key: nnx.state(Layers(tp, nnx.Rngs(params=key))))(keys)

    with jax.set_mesh(tp.manager.mesh):
        return nnx.graphdef(nnx.eval_shape(lambda: Layers(tp, nnx.Rngs(0)))), jax.jit(stacked)()


def manager(mesh: MeshConfig = GRID, replicate=(), base: PartitionAxis | None = None):
    rules = residual_rules("replicated", base)
    devices = jax.devices()[: mesh.num_devices]
    return PartitionManager(rules, build_mesh(mesh, devices), frozenset(replicate))


def row(axes, shape, rules: PartitionManager, **fields) -> Row:
    fields = {"name": "x", "dtype": jnp.float32, **fields}
    return sharding_table([Tensor(axes=axes, shape=shape, **fields)], rules)[0]


def reasons(found: Row) -> dict[str, str]:
    return {item.mesh_axis: item.reason for item in found.replicated}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.costly
def test_a_row_has_the_shape_and_bytes_of_every_shard(name):
    tp = tensor_parallel(MESHES[name])
    definition, state = state_of(tp)
    rows = sharding_table(tensors_of_model(nnx.merge(definition, state)), tp.manager)
    arrays = {".".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(state)}
    assert len(rows) == len(arrays) == 9
    for found in rows:
        array = arrays[found.name]
        assert found.shape == array.shape and found.dtype == array.dtype.name
        for shard in array.addressable_shards:
            assert shard.data.shape == found.local_shape
            assert shard.data.nbytes == found.bytes_per_device


@pytest.mark.parametrize("name", MESHES)
def test_excess_is_relative_to_an_even_split(name):
    tp = tensor_parallel(MESHES[name])
    definition, state = state_of(tp)
    for found in sharding_table(tensors_of_model(nnx.merge(definition, state)), tp.manager):
        size = jnp.dtype(found.dtype).itemsize
        for dim in found.shape:
            size *= dim
        assert abs(found.even_bytes - size / tp.manager.mesh.size) <= 0.5
        copies = found.bytes_per_device * tp.manager.mesh.size // size
        for item in found.replicated:
            assert tp.manager.mesh.shape[item.mesh_axis] == item.size > 1 and item.cost > 0
            copies //= item.size
        assert copies == 1


def test_an_abstract_model_has_the_same_rows_as_an_initialised_one():
    tp = tensor_parallel(GRID)
    with jax.set_mesh(tp.manager.mesh):
        abstract = nnx.eval_shape(lambda: Layers(tp, nnx.Rngs(0)))
        build = jax.jit(lambda: nnx.state(Layers(tp, nnx.Rngs(0))))
        model = nnx.merge(nnx.graphdef(abstract), build())
    wanted = sharding_table(tensors_of_model(model), tp.manager)
    found = sharding_table(tensors_of_model(abstract), tp.manager)
    assert [r for r in found if r.name != "bare"] == [r for r in wanted if r.name != "bare"]


def test_axes_of_the_same_size_share_the_excess():
    found = row(ax.Replicated, (1000,), manager())
    assert found.bytes_per_device == 4000 and found.even_bytes == 500
    assert [item.cost for item in found.replicated] == [1167, 1166, 1167]
    found = row(ax.SRowWise, (1000,), manager(MeshConfig(dp=4, tp=2)), count=3)
    assert (found.bytes_per_device, found.even_bytes) == (6000, 1500)
    assert [(item.mesh_axis, item.size, item.cost) for item in found.replicated] == [
        ("dp", 4, 4500)
    ]


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (ax.ColumnWise, (16, 8), {"dp": "data parallelism"}),
        (ax.ColumnWise, (3, 16, 8), {"dp": "data parallelism"}),
        (ax.TokenSharding, (8, 16), {"tp": "no dim is on tp"}),
        (ax.ResidualSharding, (8, 16, 4), {"tp": "the rules leave EMBED unsharded"}),
        ([ax.BATCH, ax.HEAD_DIM], (8, 3), {"tp": "the rules leave HEAD_DIM unsharded"}),
        ([ax.BATCH, None], (8, 3), {"tp": "one of its dims has no semantic axis"}),
        (ax.AttnQSharding, (8, 16, 2, 3), {}),
        (
            ax.Replicated,
            (5,),
            dict.fromkeys(MESH_AXES, "kept whole by the rule Replicated")
            | {"dp": "data parallelism"},
        ),
        (None, (5,), dict.fromkeys(MESH_AXES, "no semantic axes")),
        (None, (), dict.fromkeys(MESH_AXES, "scalar")),
    ],
)
def test_every_mesh_axis_that_replicates_a_tensor_has_a_reason(axes, shape, expected):
    assert reasons(row(axes, shape, manager())) == expected


def test_a_batch_replicated_by_the_rules_has_a_reason():
    rules = manager(MeshConfig(fsdp=2, ep=2), base=PartitionAxis.reference())
    assert reasons(row(ax.TokenSharding, (8, 16), rules)) == {"ep": "no dim is on ep"}
    assert reasons(row(ax.TokenSharding, (8, 16), manager(MeshConfig(fsdp=2, ep=2)))) == {}


def test_nothing_is_replicated_on_one_device():
    one = manager(MeshConfig())
    assert row(ax.Replicated, (5,), one).replicated == ()
    assert summary([row(ax.Replicated, (5,), one)]) == "20 bytes per device, nothing replicated"


def test_a_dim_is_replicated_on_request_only_if_it_does_not_divide():
    rules = manager(MeshConfig(tp=8), replicate={ax.KV_HEAD})
    kv = row(ax.AttnKVSharding, (2, 4, 2, 8), rules)
    assert kv.spec == P(("dp", "fsdp", "ep"), "sp", None, None)
    assert kv.bytes_per_device == 512 and kv.even_bytes == 64
    assert reasons(kv) == {
        "tp": "KV_HEAD = 2 does not divide over tp = 8, replicated on request",
    }
    assert row(ax.AttnKVSharding, (2, 4, 8, 8), rules).replicated == ()
    with pytest.raises(ValueError, match=r"dim 2 = 2 is not divisible by tp = 8; .* one of 1, 2"):
        rules.resolve(ax.AttnQSharding, shape=(2, 4, 2, 8))


def test_of_a_dim_over_several_axes_only_the_requested_axis_is_replicated():
    rules = manager(MeshConfig(fsdp=4, sp=2), replicate={ax.FSDP})
    assert rules.resolve(ax.ColumnWise, shape=(6, 3)) == P("sp", "tp")
    assert rules.resolve(ax.ColumnWise, shape=(16, 3)) == P(("fsdp", "sp"), "tp")
    assert rules.resolve(ax.ColumnWise) == P(("fsdp", "sp"), "tp")
    assert reasons(row(ax.ColumnWise, (6, 3), rules)) == {
        "fsdp": "[FSDP SP] = 6 does not divide over fsdp x sp = 8, replicated on request"
    }
    with pytest.raises(ValueError, match=r"dim 0 = 5 is not divisible by sp = 2; .* one of 1"):
        rules.resolve(ax.ColumnWise, shape=(5, 3), name="kernel")


def test_constrain_replicates_on_request_too():
    rules = manager(MeshConfig(tp=8), replicate={ax.HEAD})
    with jax.set_mesh(rules.mesh):
        x = rules.constrain(jnp.zeros((2, 4, 3, 8)), ax.AttnQSharding)
    assert x.addressable_shards[0].data.shape == (2, 4, 3, 8)


def test_only_a_sharded_axis_can_be_replicated_on_request():
    with pytest.raises(ValueError, match="replicate=HEAD_DIM: no rule shards it; leave it out"):
        manager(replicate={ax.HEAD_DIM})
    with pytest.raises(ValueError, match="unknown semantic axis '__TYPO__'"):
        manager(replicate={"__TYPO__"})


def test_a_sharding_that_differs_from_the_semantic_axes_is_refused():
    with pytest.raises(ValueError, match=r"x has sharding .*, but RowWise: TP \[FSDP SP\] means"):
        row(ax.RowWise, (16, 16), manager(), spec=P("fsdp", "tp"))
    assert row(ax.RowWise, (16, 16), manager(), spec=P("tp", "fsdp")).local_shape == (8, 8)


def test_a_tensor_whose_shape_does_not_fit_its_axes_is_refused_by_name():
    with pytest.raises(ValueError, match=r"x \(9, 16\): dim 0 = 9 is not divisible by tp = 2"):
        row(ax.RowWise, (9, 16), manager())
    with pytest.raises(ValueError, match=r"x: shape .* does not have 2 dims"):
        row(ax.RowWise, (8,), manager())


def test_state_of_a_parameter_has_its_axes_and_is_one_row():
    rules = manager()

    def leaf(shape, *spec, dtype=jnp.float32):
        sharding = NamedSharding(rules.mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    kernel = Tensor(name="a.kernel", axes=ax.ColumnWise, shape=(16, 8), dtype=jnp.float32)
    inner = Tensor(name="kernel", axes=ax.Replicated, shape=(8,), dtype=jnp.float32)
    whole, part = leaf((16, 8), "fsdp", "tp"), leaf((16,))
    tree = {
        "count": leaf(()),
        "mean": {"a": {"kernel": whole}, "kernel": leaf((8,))},
        "square": {"a": {"kernel": whole}, "kernel": leaf((8,), dtype=jnp.bfloat16)},
        "factors": {"a": {"kernel": part}},
    }
    found = sharding_table(tensors_of_state(tree, [kernel, inner]), rules)
    assert {(r.name, r.count, r.axes) for r in found} == {
        ("count", 1, ""),
        ("factors.a.kernel", 1, "?"),
        ("{mean,square}.a.kernel", 2, "ColumnWise: [FSDP SP] TP"),
        ("mean.kernel", 1, "Replicated: _"),
        ("square.kernel", 1, "Replicated: _"),
    }
    held = sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)
    )
    assert sum(r.bytes_per_device for r in found) == held


def test_the_text_lists_every_tensor_and_the_excess_by_reason():
    rules = manager()
    tensors = [
        Tensor(name="kernel", axes=ax.ColumnWise, shape=(3, 16, 8), dtype=jnp.float32),
        Tensor(name="scale", axes=ax.Replicated, shape=(16,), dtype=jnp.float32, count=2),
    ]
    rows = sharding_table(tensors, rules)
    tokens = row([ax.BATCH, ax.QUERY_LENGTH], (8, 16), rules, name="tokens")
    text = render({"parameters": rows, "activations": [tokens]})
    lines = text.splitlines()
    kernel = "kernel ColumnWise: stack [FSDP SP] TP - fsdp+sp tp float32 3 16 8 3 8 4 384 2 192 1"
    assert kernel.split() == lines[1].split()
    assert lines[2].split()[:4] == ["scale", "x2", "Replicated:", "_"]
    assert lines[3].split() == ["total", "512", "304"]
    assert lines[4].split() == ["total", "if", "split", "evenly", "208"]
    assert lines[7].split()[:4] == ["tokens", "BATCH", "QUERY_LENGTH", "dp+fsdp+ep"]
    table = [line.split()[-2:] for line in lines if line[:1].isdigit()]
    assert table == [["229", "0"], ["0", "64"], ["38", "0"], ["37", "0"]]
    assert sum(costs(rows).values()) == 304
    assert summary(rows) == (
        "512 bytes per device, 304 bytes of it replicated (largest: 229 bytes over dp=2: data "
        "parallelism; 38 bytes over fsdp=2: kept whole by the rule Replicated)"
    )
    split = manager(MeshConfig(tp=8))
    large = row(ax.ColumnWise, (64, 256), split)
    assert summary([large, row(ax.Replicated, (2,), split)]) == (
        "8.01 KiB per device, less than 1 % of it replicated"
    )
    assert len({line.index("per device") for line in lines if "semantic axes" in line}) == 1


def test_the_text_for_one_device_has_no_reasons():
    text = render({"parameters": [row(ax.Replicated, (5,), manager(MeshConfig()))]})
    assert "reasons" in text.splitlines()[0] and "excess bytes" not in text.rsplit("\n", 2)[0]
