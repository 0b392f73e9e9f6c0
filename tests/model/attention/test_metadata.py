"""Metadata of attention is filled in, places arrays by the rules, and survives JSON."""

import dataclasses
import enum
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from model.attention.metadata import OperationMetadata
from model.attention.registry import layer_spec, operation_names
from model.config import BlockSizes, ModelConfig
from parallel.sharding import axes as ax
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionAxis, PartitionManager
from parallel.sharding.residual import residual_rules

BATCH = ("dp", "fsdp", "ep")


def mesh(**sizes: int) -> Mesh:
    config = MeshConfig(**sizes)
    return build_mesh(config, jax.devices()[: config.num_devices])


def metadata(**fields) -> OperationMetadata:
    return OperationMetadata(**{"runtime_dtype": jnp.float32, "_stored_mesh": mesh(), **fields})


def full_metadata(on: Mesh) -> OperationMetadata:
    """One with no field at its default, but the softmax dtype, which has one legal value."""
    rules = residual_rules("sequence", PartitionAxis(sequence_parallel_axis="ep"))
    rules = dataclasses.replace(rules, expert_parallel_axis="sp")
    return OperationMetadata(
        *(jnp.bfloat16, jnp.float32, "ep", "tpu", "cuda", rules),
        PartitionManager(rules, on, frozenset({ax.KV_HEAD})),
        operation_configs={"ring": BlockSizes(block_q=128), "vanilla": BlockSizes()},
        _stored_mesh=on,
        scan_ring_attention=True,
        softmax_scale=0.1,
        dropout_prob=0.25,
        **{"blocksize_q": 512, "blocksize_k": 256, "blocksize_b": 1},
    )


@pytest.mark.parametrize("unset", [ax.NOT_GIVEN, ax.EMPTY_VAL, ax.EMPTY_VAL(), ..., None])
def test_every_mark_of_absence_counts_as_not_given(unset) -> None:
    names = {f.name for f in dataclasses.fields(OperationMetadata)}
    names -= {"base_config", "_stored_mesh"}
    assert OperationMetadata(**dict.fromkeys(names, unset), _stored_mesh=mesh()) == metadata()


def test_a_model_configuration_fills_in_what_the_model_uses() -> None:
    config = ModelConfig(
        dtype="bfloat16",
        attention_dropout=0.25,
        scan_ring_attention=True,
        operation_configs={"ring": {"block_q": 128}, "flash_attn2": {}},
    )
    manager = PartitionManager(residual_rules("sequence"), mesh(tp=2))
    filled = OperationMetadata.from_config(config).replace(partition_manager=manager)
    assert filled == OperationMetadata(
        jnp.bfloat16,
        partition_manager=manager,
        dropout_prob=0.25,
        softmax_scale=32**-0.5,
        scan_ring_attention=True,
        operation_configs={"ring": BlockSizes(block_q=128)},
    )


@pytest.mark.parametrize(("scalar", "scale"), [(None, 32**-0.5), (144.0, 1 / 12)])
def test_the_scale_of_scores_is_the_same_for_the_choice_and_the_call(scalar, scale) -> None:
    config = ModelConfig(query_pre_attn_scalar=scalar)
    assert layer_spec(config, "full_attention").scale == pytest.approx(scale)
    assert OperationMetadata.from_config(config).softmax_scale == config.softmax_scale
    assert layer_spec(config, "sliding_attention").scale == config.softmax_scale
    assert OperationMetadata.from_config(ModelConfig()).runtime_dtype == ModelConfig().dtype


def test_metadata_is_a_static_pytree_and_an_argument_of_jit() -> None:
    full, traces = full_metadata(mesh(tp=2)), []
    leaves, structure = jax.tree.flatten(full)
    again = jax.tree.unflatten(structure, leaves)
    assert leaves == [] and again == full and again is not full

    @jax.jit
    def scaled(x: jax.Array, settings: OperationMetadata) -> jax.Array:
        traces.append(settings)
        return x * settings.softmax_scale

    assert scaled(1.0, full) == scaled(1.0, again) == np.float32(0.1)
    assert traces == [full]
    again.softmax_scale = 0.5
    assert scaled(1.0, again) == 0.5 and scaled(1.0, full) == np.float32(0.1)
    assert [settings.softmax_scale for settings in traces] == [0.1, 0.5]


def test_rules_that_are_given_leave_those_of_the_base_config_unread() -> None:
    on = mesh(tp=2)
    theirs = PartitionManager(PartitionAxis.reference(), on)
    base = SimpleNamespace(partition_manager=theirs)
    assert OperationMetadata.from_config(base).partition_axis == PartitionAxis.reference()
    assert OperationMetadata.from_config(base).mesh == on
    rules = residual_rules("hidden")
    ours = OperationMetadata(jnp.float32, base_config=base, partition_axis=rules, _stored_mesh=on)
    assert ours.partition_manager == PartitionManager(rules, on)


def test_platforms_are_names_or_enums_by_name_and_never_missing() -> None:
    class Backend(enum.Enum):
        TPU = "a value that is not read"
        CUDA = "nor is this"

    given = metadata(platform=Backend.TPU, backend=Backend.CUDA)
    assert (given.platform, given.backend) == ("tpu", "cuda")
    assert metadata(platform="CUDA").platform == metadata(platform="rocm").platform == "gpu"
    assert metadata(backend="GPU").platform == "cpu"
    assert OperationMetadata(jnp.float32).platform == jax.default_backend()
    with pytest.raises(ValueError, match=r"backend=7 is unknown; use one of"):
        metadata(backend=7)


def test_the_mesh_is_the_base_configs_then_the_stored_then_that_of_the_context() -> None:
    base, stored, context = mesh(tp=2), mesh(sp=2), mesh(dp=2)
    config = SimpleNamespace(mesh=base)
    with jax.set_mesh(context):
        assert metadata(base_config=config, _stored_mesh=stored).mesh is base
        assert metadata(_stored_mesh=stored).mesh is stored
        assert metadata(_stored_mesh=None).mesh == context
        assert metadata(base_config=SimpleNamespace(mesh=None), _stored_mesh=None).mesh == context
    late = metadata(_stored_mesh=None)
    assert late.partition_manager is ax.NOT_GIVEN
    for ask in (lambda: late.mesh, lambda: late.get_shardings(ax.MODE_TRAIN)):
        with pytest.raises(ValueError, match=r"no mesh.*set metadata.mesh = mesh, or call jax.set"):
            ask()
    with jax.set_mesh(context):
        assert late.mesh == context
        assert late.get_shardings(ax.MODE_TRAIN).query == P(BATCH, "sp", "tp", None)
    late.mesh = stored
    assert late.mesh is stored and late.partition_manager.mesh is stored


def test_a_mesh_other_than_the_base_configs_is_refused() -> None:
    on, other = mesh(tp=2), mesh(sp=2)
    filled = OperationMetadata.from_config(SimpleNamespace(mesh=on))
    filled.mesh = on
    with pytest.raises(ValueError, match=r"'sp', 2.*would be ignored: base_config.mesh.*'tp', 2"):
        filled.mesh = other
    with pytest.raises(ValueError, match=r"would be ignored.*or replace base_config too"):
        filled.replace(mesh=other)
    assert filled.replace(mesh=other, base_config=None).mesh is other
    moved = filled.replace(base_config=SimpleNamespace(mesh=other))
    assert moved.mesh is other and moved.partition_manager.mesh is other
    assert filled.mesh is on


def test_while_jax_traces_the_mesh_is_abstract_and_cannot_be_written() -> None:
    said = []

    def body(x: jax.Array) -> jax.Array:
        said.append(OperationMetadata(jnp.float32))
        return x

    on = mesh(tp=2, sp=2)
    with jax.set_mesh(on):
        jax.jit(body).trace(jnp.zeros(()))
    assert isinstance(said[0].mesh, AbstractMesh) and said[0].platform == "cpu"
    rules = metadata(_stored_mesh=on).get_shardings(ax.MODE_TRAIN)
    assert said[0].get_shardings(ax.MODE_TRAIN) == rules
    with pytest.raises(ValueError, match=r"is abstract and has no devices to write"):
        said[0].to_json()
    bare = AbstractMesh((2,), ("tp",), axis_types=(AxisType.Explicit,))
    assert metadata(_stored_mesh=bare).platform == jax.default_backend()
    manager = PartitionManager(PartitionAxis(), on)
    metadata(partition_manager=manager, _stored_mesh=on.abstract_mesh)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"runtime_dtype": "floaty"}, r"runtime_dtype='floaty' is not a dtype; use float32"),
        (
            {"runtime_softmax_dtype": "int32"},
            r"runtime_softmax_dtype=int32 is not a floating-point dtype",
        ),
        ({"softmax_scale": 0.0}, r"softmax_scale=0.0: use a number above 0, or none"),
        ({"softmax_scale": float("nan")}, r"softmax_scale=nan: use"),
        ({"softmax_scale": float("inf")}, r"softmax_scale=inf: use"),
        ({"softmax_scale": "1"}, r"softmax_scale='1': use"),
        ({"dropout_prob": 1.0}, r"dropout_prob=1.0: use at least 0 and less than 1"),
        ({"dropout_prob": -0.1}, r"dropout_prob=-0.1: use"),
        ({"dropout_prob": True}, r"dropout_prob=True: use"),
        ({"blocksize_q": 0}, r"blocksize_q=0: use a whole number of at least 1, or none"),
        ({"blocksize_k": 1.5}, r"blocksize_k=1.5: use"),
        ({"blocksize_b": True}, r"blocksize_b=True: use"),
        ({"scan_ring_attention": 1}, r"scan_ring_attention=1: use true or false"),
        ({"operation_configs": 3}, r"operation_configs=3 is not a mapping; its keys are names"),
        ({"operation_configs": {"rings": {}}}, r"unknown attention operation 'rings'"),
        ({"operation_configs": {"ring": 3}}, r"operation_configs.ring=3 is not a mapping"),
        (
            {"operation_configs": {"ring": {"block_qq": 1}}},
            r"_configs.ring: unknown key 'block_qq'",
        ),
        ({"operation_configs": {"ring": {"block_q": 0}}}, r"_configs.ring.block_q=0: use a whole"),
        ({"operation_configs": {"ring": {"block_q": "8"}}}, r"ring.block_q='8': use a whole"),
        (
            {
                "sequence_axis_name": "sp",
                "partition_axis": PartitionAxis(sequence_parallel_axis="x"),
            },
            r"sequence_axis_name='sp', but the rules call that axis 'x'; give partition_axis=",
        ),
    ],
)
def test_illegal_fields_are_refused_on_one_line(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        metadata(**fields)
    assert "\n" not in str(refusal.value)


def test_rules_and_meshes_that_contradict_each_other_are_refused() -> None:
    manager = PartitionManager(PartitionAxis.reference(), mesh(tp=2))
    with pytest.raises(ValueError, match=r"partition_axis and partition_manager.partition_axis"):
        metadata(partition_axis=PartitionAxis(), partition_manager=manager, _stored_mesh=None)
    with pytest.raises(ValueError, match=r"partition_manager is on the mesh .*'tp', 2.*give one"):
        metadata(partition_manager=manager, _stored_mesh=mesh(sp=2))
    own = OperationMetadata(jnp.float32, partition_manager=manager)
    assert own.mesh == manager.mesh and own.partition_axis == manager.partition_axis
    named = metadata(sequence_axis_name="rows", _stored_mesh=None)
    assert named.partition_axis.sequence_parallel_axis == "rows"


def test_replace_changes_implied_fields_too() -> None:
    on, other = mesh(tp=2), mesh(sp=2)
    full = full_metadata(on)
    assert full.replace() == full
    assert full.replace(dropout_prob=0.0).dropout_prob == 0.0
    assert full.replace(softmax_scale=None).softmax_scale is None
    moved = full.replace(mesh=other)
    assert moved.mesh is other and moved.partition_manager.mesh is other
    assert moved.partition_manager.replicate == frozenset({ax.KV_HEAD})
    assert (moved.platform, moved.backend) == ("cpu", "cpu")
    assert full.replace(mesh=other, platform="gpu").platform == "gpu"
    ruled = full.replace(partition_axis=PartitionAxis())
    assert ruled.sequence_axis_name == "sp"
    assert ruled.partition_manager == PartitionManager(PartitionAxis(), on, frozenset({ax.KV_HEAD}))
    assert (ruled.platform, ruled.backend) == ("tpu", "cuda")
    manager = PartitionManager(PartitionAxis.reference(), other)
    managed = full.replace(partition_manager=manager)
    assert managed.partition_manager is manager and managed.mesh is other
    assert managed.partition_axis == PartitionAxis.reference()
    assert full.replace(partition_axis=None).partition_axis == PartitionAxis()
    with pytest.raises(ValueError, match=r"unknown key 'dropout'; did you mean dropout_prob\?"):
        full.replace(dropout=0.1)
    assert full == full_metadata(on)


def test_replace_does_not_read_the_base_config_again() -> None:
    base = SimpleNamespace(softmax_scale=0.5, attn_dtype="bfloat16")
    filled = OperationMetadata.from_config(base)
    assert filled.replace(softmax_scale=None).softmax_scale is None
    assert filled.replace(blocksize_q=8).base_config is base
    assert filled.replace(runtime_dtype=None).runtime_dtype == jnp.float32


positive = st.none() | st.integers(1, 2**20)
SETTINGS = st.fixed_dictionaries(
    {
        "runtime_dtype": st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
        "platform": st.sampled_from(["cpu", "gpu", "tpu"]),
        "backend": st.sampled_from(["cpu", "cuda", "rocm", "tpu"]),
        "partition_axis": st.sampled_from(
            [PartitionAxis(), PartitionAxis.reference(), residual_rules("hidden")]
        ),
        "operation_configs": st.none()
        | st.dictionaries(
            st.sampled_from(operation_names()),
            st.builds(BlockSizes, block_q=positive, block_k=positive),
        ),
        "_stored_mesh": st.sampled_from([{"tp": 8}, {"dp": 2, "sp": 2}, {}]),
        "scan_ring_attention": st.booleans(),
        "softmax_scale": st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
        "dropout_prob": st.floats(0, 1, exclude_max=True),
        **dict.fromkeys(("blocksize_q", "blocksize_k"), positive),
        "blocksize_b": st.sampled_from([None, 1]),
    }
)


@settings(max_examples=40, deadline=None)
@given(SETTINGS)
def test_every_metadata_survives_a_dict_and_json(fields) -> None:
    one = OperationMetadata(**{**fields, "_stored_mesh": mesh(**fields["_stored_mesh"])})
    data = one.to_dict()
    assert json.loads(one.to_json(indent=1)) == data
    assert OperationMetadata.from_dict(data) == one
    assert OperationMetadata.from_json(one.to_json(sort_keys=True)) == one
    assert one.replace() == one


def test_no_field_is_lost_in_json() -> None:
    full, plain = full_metadata(mesh(tp=2)), OperationMetadata(jnp.float32)
    data = full.to_dict()
    same = {name for name, value in plain.to_dict().items() if data[name] == value}
    assert same == {"runtime_softmax_dtype"}
    assert "base_config" not in data and data["partition_manager"] == {"replicate": [ax.KV_HEAD]}
    assert OperationMetadata.from_json(full.to_json()) == full
    assert OperationMetadata.from_json(plain.to_json()) == plain
    assert OperationMetadata.from_dict({}) == plain
    base = SimpleNamespace(attn_dtype="bfloat16", mesh=mesh(sp=2), softmax_scale=0.5)
    filled = OperationMetadata.from_config(base)
    same = OperationMetadata.from_json(filled.to_json())
    assert same == filled and same.base_config is None and same.mesh == base.mesh


def test_a_mesh_of_another_machine_can_take_the_place_of_the_written_one() -> None:
    data, here = full_metadata(mesh(tp=8)).to_dict(), mesh(tp=2)
    data["mesh"]["device_ids"][3] = 4096
    with pytest.raises(ValueError, match=r"no cpu devices \[4096\].*pass mesh="):
        OperationMetadata.from_dict(data)
    same = OperationMetadata.from_json(json.dumps(data), mesh=here)
    assert same == full_metadata(here).replace(platform="cpu", backend="cpu")


def test_data_that_is_not_metadata_is_refused() -> None:
    for data, message in (
        ({"dropout": 0.1}, r"OperationMetadata: unknown key 'dropout'; did you mean dropout_prob"),
        ({"base_config": {}}, r"unknown key 'base_config'"),
        ({"partition_axis": {"rule": {}}}, r"PartitionAxis: unknown key 'rule'; did you mean"),
        ({"partition_manager": {"mesh": 1}}, r"partition_manager: unknown key 'mesh'"),
        ({"partition_manager": {"replicate": []}}, r"attention has no mesh"),
        ({"mesh": {"axis_names": ["tp"]}}, r"mesh: key 'axis_sizes' is missing"),
        ([1], r"\[1\] is not a mapping; its keys are runtime_dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            OperationMetadata.from_dict(data)
