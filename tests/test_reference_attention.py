"""The reference API as a specification: attention metadata and the registry of operations.

The PartitionSpecs of `get_shardings` are the table of tests/model/attention/test_sharded.py.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from model.attention import registry
from model.attention.api import OperationRegistry
from model.attention.metadata import OperationMetadata
from model.attention.registry import Capabilities
from model.config import BlockSizes, ModelConfig
from parallel.sharding import axes as ax
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionAxis, PartitionManager

GRID = np.array(jax.devices()).reshape(2, 4)
MESH = Mesh(GRID, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
OTHER = Mesh(GRID, ("tp", "dp"), axis_types=(AxisType.Explicit,) * 2)
HEADS = np.ones((2, 4, 4, 8), np.float32)
METADATA = OperationMetadata(jnp.float32, _stored_mesh=MESH)


def mesh(**sizes: int) -> Mesh:
    config = MeshConfig(**sizes)
    return build_mesh(config, jax.devices()[: config.num_devices])


@pytest.mark.parametrize(
    "name",
    "flash_attn2 ring blocksparse ragged_page_attention_v2 ragged_page_attention_v3 sdpa "
    "vanilla".split(),
)
def test_an_operation_of_the_documents_is_registered(name: str) -> None:
    assert name in OperationRegistry.list_implementations()


# Metadata of a mesh alone: attribute, value.
METADATA_DEFAULTS = [
    ("runtime_dtype", jnp.float32),
    ("runtime_softmax_dtype", jnp.float32),
    ("sequence_axis_name", "sp"),
    ("platform", "cpu"),  # the reference has no default and fails
    ("backend", "cpu"),
    ("partition_axis", PartitionAxis()),
    ("base_config", None),
    ("operation_configs", None),
    ("scan_ring_attention", False),  # from here on: in the text of the document, not in its source
    ("softmax_scale", None),
    ("dropout_prob", 0.0),
    ("blocksize_q", None),
    ("blocksize_k", None),
    ("blocksize_b", None),
]


@pytest.mark.parametrize(("name", "value"), METADATA_DEFAULTS)
def test_a_setting_that_is_not_given_takes_its_default(name, value) -> None:
    on = mesh(tp=2, sp=2)
    filled = OperationMetadata(ax.NOT_GIVEN, _stored_mesh=on)
    assert getattr(filled, name) == value
    assert filled.mesh is on
    assert filled.partition_manager == PartitionManager(PartitionAxis(), on)


# Metadata read from a configuration: attribute there, its value, attribute here, value.
FROM_CONFIG = [
    ("attn_dtype", "bfloat16", "runtime_dtype", jnp.bfloat16),
    ("dtype", "bfloat16", "runtime_dtype", jnp.bfloat16),
    ("dtype", "torch.bfloat16", "runtime_dtype", jnp.bfloat16),  # as a dtype of torch is printed
    ("torch_dtype", "bfloat16", "runtime_dtype", jnp.bfloat16),
    ("torch_dtype", "torch.bfloat16", "runtime_dtype", jnp.bfloat16),
    ("attn_softmax_dtype", "float32", "runtime_softmax_dtype", jnp.float32),
    ("sequence_axis_name", "never read", "sequence_axis_name", "sp"),
    ("platform", "TPU", "platform", "tpu"),
    ("platform", "cuda", "platform", "gpu"),
    ("backend", "ROCM", "backend", "rocm"),
    ("partition_axis", PartitionAxis.reference(), "partition_axis", PartitionAxis.reference()),
    ("operation_configs", {"ring": {}}, "operation_configs", {"ring": BlockSizes()}),
    ("mesh", MESH, "mesh", MESH),
    ("scan_ring_attention", True, "scan_ring_attention", True),
    ("softmax_scale", 0.5, "softmax_scale", 0.5),
    ("attention_multiplier", 0.0625, "softmax_scale", 0.0625),  # Granite
    ("query_pre_attn_scalar", 256, "softmax_scale", 0.0625),  # Gemma: its power -1/2
    ("attention_dropout", 0.125, "dropout_prob", 0.125),
    ("dropout_prob", 0.5, "dropout_prob", 0.5),
    ("blocksize_q", 8, "blocksize_q", 8),
    ("blocksize_k", 16, "blocksize_k", 16),
    ("blocksize_b", 1, "blocksize_b", 1),
]


@pytest.mark.parametrize(("theirs", "value", "ours", "want"), FROM_CONFIG)
def test_metadata_reads_a_configuration(theirs, value, ours, want) -> None:
    config = SimpleNamespace(**{theirs: value})
    filled = OperationMetadata.from_config(config)
    assert getattr(filled, ours) == want and filled.base_config is config
    given = OperationMetadata(jnp.float16, softmax_scale=2.0, base_config=config)
    assert (given.runtime_dtype, given.softmax_scale) == (jnp.float16, 2.0)


# Name, what is done, what comes out.
BEHAVIOURS = [
    ("blocksize_b=1, 'often 1'", lambda: METADATA.replace(blocksize_b=1).blocksize_b, 1),
    (
        "OperationMetadata in JSON",
        lambda: OperationMetadata.from_json(METADATA.to_json()),
        METADATA,
    ),
    (
        "OperationMetadata in a dict",
        lambda: OperationMetadata.from_dict(METADATA.to_dict()),
        METADATA,
    ),
    ("replace", lambda: METADATA.replace(softmax_scale=0.5).softmax_scale, 0.5),
    (
        "mesh of base_config first",
        lambda: (
            OperationMetadata(
                jnp.float32, base_config=SimpleNamespace(mesh=OTHER), _stored_mesh=MESH
            ).mesh
        ),
        OTHER,
    ),
    ("get_operation_config, not set", lambda: METADATA.get_operation_config("ring"), None),
    (
        "get_operation_config, set",
        lambda: METADATA.replace(operation_configs={"ring": {"block_q": 8}}).get_operation_config(
            "ring"
        ),
        BlockSizes(block_q=8),
    ),
    (
        "get_mode of one query",
        lambda: OperationRegistry.create("vanilla", METADATA).get_mode(HEADS[:, :1]),
        "__autoregressive__",
    ),
    (
        "get_mode of several",
        lambda: OperationRegistry.create("vanilla", METADATA).get_mode(HEADS),
        "__train__",
    ),
    (
        "from_config of our own",
        lambda: OperationMetadata.from_config(ModelConfig()).runtime_dtype,
        jnp.bfloat16,
    ),
]


@pytest.mark.parametrize(("name", "act", "want"), BEHAVIOURS)
def test_an_item_does_what_its_document_promises(name, act, want) -> None:
    assert act() == want


# Name, what is done, the message of its ValueError.
REFUSALS = [
    (
        "blocksize_b=2",
        lambda: METADATA.replace(blocksize_b=2),
        "no operation works in blocks of several sequences",
    ),
    (
        "a 16-bit softmax",
        lambda: METADATA.replace(runtime_softmax_dtype=jnp.bfloat16),
        "computes its softmax in float32",
    ),
    ("an unknown platform", lambda: METADATA.replace(platform="abacus"), "use one of cpu, gpu"),
    ("no mesh", lambda: OperationMetadata(jnp.float32).mesh, "call jax.set_mesh"),
    (
        "an unknown operation",
        lambda: OperationRegistry.get("flash"),
        "unknown attention operation 'flash'; use one of ring, ",
    ),
    (
        "settings of an unknown operation",
        lambda: METADATA.get_operation_config("flash"),
        "unknown attention operation 'flash'",
    ),
    (
        "a taken name",
        lambda: OperationRegistry.register("ring", capabilities=Capabilities())(print),
        "registered twice",
    ),
]


@pytest.mark.parametrize(("name", "act", "message"), REFUSALS)
def test_a_mistake_is_refused_in_one_line(name, act, message) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        act()
    assert "\n" not in str(refusal.value)


def test_a_registered_operation_can_be_called_by_its_name(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_OPERATIONS", dict(registry._OPERATIONS))

    @OperationRegistry.register("mine", capabilities=Capabilities())
    def mine(q_BLHh, k_BTKh, v_BTKh, inputs, spec):
        return q_BLHh + v_BTKh

    assert OperationRegistry.get("mine")[0].function is mine
    called = OperationRegistry.create("mine", METADATA)(HEADS, HEADS, HEADS)
    np.testing.assert_array_equal(called, 2 * HEADS)
    assert called.sharding.spec == P("dp", None, "tp", None)


def test_attributes_are_set_carefully() -> None:
    """Given values stay; then base_config under pickup_name or attr_name; then the default."""
    base = SimpleNamespace(colour="red", attn_dtype="bfloat16", empty=None)
    filled = METADATA.replace(base_config=base)
    filled.set_attrs_carefully("runtime_dtype", "given values stay", "attn_dtype")
    assert filled.runtime_dtype == jnp.float32
    filled.set_attrs_carefully("colour", "blue")
    filled.set_attrs_carefully("paint", "blue", "colour")
    filled.set_attrs_carefully("other", "blue", "colour", use_base_config=False)
    filled.set_attrs_carefully("empty", "blue")
    filled.set_attrs_carefully("absent", "blue")
    assert (filled.colour, filled.paint, filled.other) == ("red", "red", "blue")
    assert (filled.empty, filled.absent) == ("blue", "blue")
