"""The reference API as a specification: every item of its four documents, one row a test.

Documents: `eformer.common_types`, `easydel.layers.linear`, `easydel.layers.operations.
_operation_meta` and `xlstm_jax.distributed.tensor_parallel`. Values are written out from them. A
row that differs from its document says so. What the items do is in
test_reference_behaviour.py and, for attention, test_reference_attention.py.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from model.attention.api import OperationRegistry
from model.attention.metadata import AttnShardingRules, OperationMetadata
from parallel.linear import linear as lin
from parallel.linear import ring as rg
from parallel.linear import tensor_parallel as tpar
from parallel.linear.linear import ParallelLinear, TensorParallelConfig
from parallel.linear.model_parallelism import ModelParallelismWrapper
from parallel.linear.tensor_parallel import TPAsyncDense, TPDense
from parallel.sharding import axes as ax
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionAxis

REQUIRED = dataclasses.MISSING
BATCH, LENGTH, QUERY, KV = "__BATCH__", "__LENGTH__", "__QUERY_LENGTH__", "__KV_LENGTH__"
HEAD, HEAD_DIM, KV_HEAD, KV_DIM = "__HEAD__", "__HEAD_DIM__", "__KV_HEAD__", "__KV_HEAD_DIM__"
DP, FSDP = "__DATA_PARALLEL__", "__FULLY_SHARDED_DATA_PARALLEL__"
TP, EP, SP = "__TENSOR_PARALLEL__", "__EXPERT_PARALLEL__", "__SEQUENCE_PARALLEL__"
TRAIN, DECODE, PREFILL, INSERT = "__train__", "__autoregressive__", "__prefill__", "__insert__"


def rows(table):
    """Parametrize a test by rows; the first entry of a row is its name."""
    rows = list(table)
    return pytest.mark.parametrize("row", rows, ids=[str(row[0]) for row in rows])


def mesh(**sizes: int) -> Mesh:
    config = MeshConfig(**sizes)
    return build_mesh(config, jax.devices()[: config.num_devices])


# eformer.common_types: name, value.
COMMON_TYPES = [
    ("Array", jnp.ndarray),
    ("PRNGKey", jnp.ndarray),
    ("DType", jnp.dtype),
    ("Shape", Sequence[int]),
    ("Mesh", jax.sharding.Mesh),
    ("AxisNames", tuple[str, ...]),
    ("AxisIdxes", tuple[int, ...]),
    ("RUNTIME_MODE_TYPES", Literal["__autoregressive__", "__prefill__", "__train__", "__insert__"]),
    ("BATCH", "__BATCH__"),
    ("LENGTH", "__LENGTH__"),
    ("KV_LENGTH", "__KV_LENGTH__"),
    ("QUERY_LENGTH", "__QUERY_LENGTH__"),
    ("EMBED", "__EMBED__"),
    ("HEAD", "__HEAD__"),
    ("HEAD_DIM", "__HEAD_DIM__"),
    ("KV_HEAD", "__KV_HEAD__"),
    ("KV_HEAD_DIM", "__KV_HEAD_DIM__"),
    ("MLP_INTERMEDIATE", "__MLP_INTERMEDIATE__"),
    ("VOCAB", "__VOCAB__"),
    ("EXPERT", "__EXPERT__"),
    ("EXPERT_GATE", "__EXPERT_GATE__"),
    ("BIAS_HEAD_SEQ", "__BIAS_HEAD_SEQ__"),
    ("BIAS_KV_SEQ", "__BIAS_KV_SEQ__"),
    ("EMPTY", "_"),
    ("DATA_PARALLEL", "__DATA_PARALLEL__"),
    ("FULLY_SHARDED_DATA_PARALLEL", "__FULLY_SHARDED_DATA_PARALLEL__"),
    ("TENSOR_PARALLEL", "__TENSOR_PARALLEL__"),
    ("EXPERT_PARALLEL", "__EXPERT_PARALLEL__"),
    ("SEQUENCE_PARALLEL", "__SEQUENCE_PARALLEL__"),
    ("DP", "__DATA_PARALLEL__"),
    ("FSDP", "__FULLY_SHARDED_DATA_PARALLEL__"),
    ("TP", "__TENSOR_PARALLEL__"),
    ("EP", "__EXPERT_PARALLEL__"),
    ("SP", "__SEQUENCE_PARALLEL__"),
    ("MODE_DECODE", "__autoregressive__"),
    ("MODE_PREFILL", "__prefill__"),
    ("MODE_TRAIN", "__train__"),
    ("MODE_INSERT", "__insert__"),
    ("GENERATION_MODES", {"__autoregressive__", "__insert__"}),
    ("DEFAULT_MASK_VALUE", -2.381976426469702e38),
]


@rows(COMMON_TYPES)
def test_a_constant_or_alias_has_its_documented_value(row) -> None:
    name, value = row
    assert getattr(ax, name) == value


@pytest.mark.parametrize("member", [tuple[str, ...], str, type(None)])
def test_the_alias_axis_type_contains(member) -> None:
    assert member in ax.AxisType.__args__


# eformer.common_types: sharding class, axes, mode. ExpertTensorParallel is in the source only.
SHARDING_CLASSES = [
    ("HiddenStateSharding", [BATCH, QUERY, "__EMBED__"], 1),
    ("AttnQSharding", [BATCH, QUERY, HEAD, HEAD_DIM], 1),
    ("AttnKVSharding", [BATCH, KV, KV_HEAD, KV_DIM], 1),
    ("ColumnWise", [[FSDP, SP], TP], TRAIN),
    ("RowWise", [TP, [FSDP, SP]], TRAIN),
    ("SColumnWise", [[FSDP, SP]], TRAIN),
    ("SRowWise", [TP], TRAIN),
    ("Replicated", ["_"], TRAIN),
    ("ExpertColumnWise", [EP, FSDP, TP], TRAIN),
    ("ExpertRowWise", [EP, TP, FSDP], TRAIN),
    ("ExpertColumnWiseAlt", [EP, [FSDP, SP], TP], TRAIN),
    ("ExpertRowWiseAlt", [EP, TP, [FSDP, SP]], TRAIN),
    ("UnifiedExpertColumnWise", [[FSDP, SP, EP], "_", TP], TRAIN),
    ("UnifiedExpertRowWise", [[FSDP, SP, EP], TP, "_"], TRAIN),
    ("ExpertActivations", [DP, SP, EP, TP], TRAIN),
    ("ExpertActivationsAlt", [DP, SP, [TP, FSDP]], TRAIN),
    ("ExpertTensorParallel", [TP, "_", "_"], TRAIN),
]


@rows(SHARDING_CLASSES)
def test_a_sharding_class_has_its_documented_axes_and_mode(row) -> None:
    name, axes, mode = row
    cls = getattr(ax, name)
    assert issubclass(cls, ax.DynamicShardingAxes)
    assert (cls.axes, cls.mode) == (axes, mode)
    assert tuple(cls([BATCH, None], PREFILL)) == ([BATCH, None], PREFILL)


# eformer: the rule of every semantic axis in training, and in decoding and insertion if it differs.
# BATCH is ours in PartitionAxis(): the reference repeats the batch on every ep device.
RULES = [
    ("__BATCH__", ("dp", "fsdp", "ep"), ("dp", "fsdp", "ep")),
    ("__LENGTH__", ("sp",), ()),
    ("__QUERY_LENGTH__", ("sp",), ()),
    ("__KV_LENGTH__", ("sp",), ("sp",)),
    ("__EMBED__", ("tp",), ("tp",)),
    ("__HEAD__", ("tp",), ("tp",)),
    ("__KV_HEAD__", ("tp",), ("tp",)),
    ("__HEAD_DIM__", (), ()),
    ("__KV_HEAD_DIM__", (), ()),
    ("__MLP_INTERMEDIATE__", ("tp",), ("tp",)),
    ("__VOCAB__", ("tp",), ("tp",)),
    ("__EXPERT__", ("ep",), ("ep",)),
    ("__EXPERT_GATE__", (), ()),
    ("__BIAS_HEAD_SEQ__", (), ()),
    ("__BIAS_KV_SEQ__", (), ()),
    ("__DATA_PARALLEL__", ("dp",), ("dp",)),
    ("__FULLY_SHARDED_DATA_PARALLEL__", ("fsdp",), ("fsdp",)),
    ("__TENSOR_PARALLEL__", ("tp",), ("tp",)),
    ("__EXPERT_PARALLEL__", ("ep",), ("ep",)),
    ("__SEQUENCE_PARALLEL__", ("sp",), ("sp",)),
    ("_", (), ()),
    (None, (), ()),
]
REFERENCE_RULES = {
    "__BATCH__": (("fsdp", "dp"), ("fsdp", "dp")),
    "__LENGTH__": (("sp",), ("sp",)),  # a decoded token of LENGTH 1 then needs sp = 1
}


@rows(RULES)
def test_a_semantic_axis_resolves_to_its_mesh_axes(row) -> None:
    name, *ours = row
    for table, (train, decode) in (
        (PartitionAxis(), ours),
        (PartitionAxis.reference(), REFERENCE_RULES.get(name, ours)),
    ):
        by_mode = {TRAIN: train, PREFILL: train, DECODE: decode, INSERT: decode}
        assert {mode: table.resolve_axis(name, mode) for mode in by_mode} == by_mode


# Dataclass fields, in order: class, field, default. `...`: a default that the document leaves open.
# A document without the keyword-only fields `rngs` and `parallel_config` belongs to flax.linen.
FIELDS = [
    (ModelParallelismWrapper, "model_axis_name", REQUIRED),
    (ModelParallelismWrapper, "module_fn", REQUIRED),
    (ModelParallelismWrapper, "mask_except_model_idx", None),
    (ModelParallelismWrapper, "split_rngs", True),
    (ModelParallelismWrapper, "module_kwargs", FrozenDict()),
    (TPDense, "dense_fn", REQUIRED),
    (TPDense, "model_axis_name", REQUIRED),
    (TPDense, "tp_mode", "none"),
    (TPDense, "skip_communication", False),
    (TPDense, "kernel_init", ...),
    (TPDense, "kernel_init_adjustment", 1.0),
    (TPDense, "use_bias", True),
    (TPDense, "dense_name", "module"),
    (TPAsyncDense, "dense_fn", REQUIRED),
    (TPAsyncDense, "model_axis_name", REQUIRED),
    (TPAsyncDense, "tp_mode", "none"),
    (TPAsyncDense, "kernel_init", ...),
    (TPAsyncDense, "kernel_init_adjustment", 1.0),
    (TPAsyncDense, "use_bias", True),
    (TPAsyncDense, "dense_name", "module"),
    (TPAsyncDense, "use_bidirectional_gather", True),
    (TPAsyncDense, "use_bidirectional_scatter", False),
    (TensorParallelConfig, "mesh", None),
    (TensorParallelConfig, "axis_name", "tp"),
    (TensorParallelConfig, "matmul_method", None),
    (TensorParallelConfig, "reduce_output", False),
    (TensorParallelConfig, "reduce_scatter_output", False),
    (OperationMetadata, "runtime_dtype", REQUIRED),
    (OperationMetadata, "runtime_softmax_dtype", None),
    (OperationMetadata, "sequence_axis_name", ax.NOT_GIVEN),
    (OperationMetadata, "platform", ax.NOT_GIVEN),
    (OperationMetadata, "backend", ax.NOT_GIVEN),
    (OperationMetadata, "partition_axis", ax.NOT_GIVEN),
    (OperationMetadata, "partition_manager", ax.NOT_GIVEN),
    (OperationMetadata, "base_config", None),
    (OperationMetadata, "operation_configs", None),
    (OperationMetadata, "_stored_mesh", ax.NOT_GIVEN),
]
NAMED_TUPLES = [
    (ax.DynamicShardingAxes, "axes mode"),
    (
        AttnShardingRules,
        "query3d query key value bias mask output q_segment_ids kv_segment_ids softmax_aux",
    ),
]


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: f"{row[0].__name__}.{row[1]}")
def test_a_field_has_its_documented_place_and_default(row) -> None:
    cls, name, default = row
    documented = [other for owner, other, _ in FIELDS if owner is cls]
    fields = [field for field in dataclasses.fields(cls) if not field.kw_only]
    assert [field.name for field in fields] == documented
    found = fields[documented.index(name)].default
    assert callable(found) if default is ... else found == default


@pytest.mark.parametrize(("cls", "fields"), NAMED_TUPLES)
def test_a_named_tuple_has_its_documented_fields_by_number(cls, fields: str) -> None:
    assert " ".join(cls._fields) == fields


# Parameters of functions and methods. Ours may have more, at the end and with defaults.
METADATA, CONFIG = OperationMetadata, TensorParallelConfig
SIGNATURES = [
    (tpar.scale_init, "init_fn, scale_factor=1.0"),
    (rg.async_gather, "x, axis_name, shift_up=True"),
    (rg.async_gather_bidirectional, "x, axis_name, shift_up=True"),
    (rg.async_gather_split, "x, axis_name"),
    (rg.async_scatter, "xs, axis_name, shift_up=True"),
    (rg.async_scatter_split, "xs, axis_name"),
    (lin.get_sharding, "arr"),
    (lin.get_output_partition_spec, "lhs, rhs, method, axis_name"),
    (lin.get_matmul_output_sharding, "lhs_pspec, rhs_pspec"),
    (ParallelLinear.native_forward, "self, inputs, w=None"),
    (ParallelLinear.__call__, "self, inputs"),
    (CONFIG.from_dict, "data"),
    (CONFIG.from_json, "json_str"),
    (CONFIG.replace, "self, **"),
    (CONFIG.to_dict, "self"),
    (CONFIG.to_json, "self, **"),
    (METADATA.from_config, "config"),
    (METADATA.from_dict, "data"),
    (METADATA.from_json, "json_str"),
    (METADATA.replace, "self, **"),
    (METADATA.to_dict, "self"),
    (METADATA.to_json, "self, **"),
    (METADATA.get_operation_config, "self, impl_name"),
    (
        METADATA.get_shardings,
        "self, mode, layout='bthd', qkv_mni_sharding=False, softmax_aux=None",
    ),
    (
        METADATA.set_attrs_carefully,
        "self, attr_name, default, pickup_name=None, use_base_config=True",
    ),
    (OperationRegistry.create, "name, metadata"),
    (OperationRegistry.get, "name"),
    (OperationRegistry.list_implementations, ""),
    (
        PartitionAxis.register,
        "self, semantic_axis, axis_rule, generation_axis_rule=<not given>, override=False",
    ),
]


@pytest.mark.parametrize("row", SIGNATURES, ids=lambda row: row[0].__qualname__)
def test_a_function_has_its_documented_parameters(row) -> None:
    function, documented = row
    texts = []
    for parameter in inspect.signature(function).parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        default = f"={parameter.default!r}" if has_default else ""
        is_rest = parameter.kind is inspect.Parameter.VAR_KEYWORD
        texts.append("**" if is_rest else parameter.name + default)
    count = len(documented.split(", ")) if documented else 0
    assert ", ".join(texts[:count]) == documented
    assert all("=" in text for text in texts[count:])


# Attributes of a linear: name, value of ParallelLinear(4, 8).
LINEAR_ATTRIBUTES = [
    ("in_features", 4),
    ("out_features", 8),
    ("use_bias", True),
    ("dtype", None),
    ("param_dtype", jnp.float32),
    ("precision", None),
    ("bias_init", nnx.initializers.zeros),
    ("parallel_config", None),
    ("distributed_matmul", None),
    ("scale", 1.0),
]
LINEAR_CLASSES = [
    (lin.ParallelLinear, "none", nnx.Module),
    (lin.ColumnParallelLinear, "column", ParallelLinear),
    (lin.RowParallelLinear, "row", ParallelLinear),
    (lin.Linear, "none", ParallelLinear),  # promised by the document, not in its source
]


@rows(LINEAR_ATTRIBUTES)
def test_an_attribute_of_a_linear_is_public_and_has_its_default(row) -> None:
    assert getattr(ParallelLinear(4, 8), row[0]) == row[1]


@rows(LINEAR_CLASSES)
def test_a_linear_class_has_its_direction_and_base(row) -> None:
    cls, direction, base = row
    assert cls.direction == direction and issubclass(cls, base)


@rows([("ALL_GATHER", "all_gather"), ("REDUCE_SCATTER", "reduce_scatter")])
def test_a_matmul_method_has_its_member(row) -> None:
    assert lin.MatrixMultiplyMethod[row[0]] == row[1] and len(lin.MatrixMultiplyMethod) == 2


@pytest.mark.parametrize(
    "name",
    "abstract_mesh axis_names axis_sizes device_ids empty is_multi_process local_devices "
    "local_mesh shape shape_tuple size".split(),
)
def test_a_mesh_has_the_attribute(name: str) -> None:
    assert hasattr(mesh(tp=2), name)


# Layout of a product: X, W, X @ W.
PRODUCTS = [
    (P("dp", "sp", None), P(None, "tp"), P("dp", "sp", "tp")),
    (P("dp", None, "tp"), P("tp", None), P("dp", None, None)),
    (P(("dp", "fsdp"), "sp", "tp"), P("tp", ("fsdp", "sp")), P(("dp", "fsdp"), "sp", None)),
    (P("dp", None, None), P("tp", ("dp", "sp")), P("dp", None, "sp")),
    (P(None, None), P(None, None), P(None, None)),
    (P("dp"), P(None, "tp"), P("tp")),
    (P("dp", None), P("tp"), P("dp", None)),  # reference: P("dp", "tp")
    (P("dp", None), P(), P("dp", None)),
    (P(), P(None, "tp"), P()),
    (None, P("tp"), P()),
    (P("tp"), None, P()),
    (None, None, P()),
]


@pytest.mark.parametrize(("lhs", "rhs", "product"), PRODUCTS)
def test_a_product_has_its_documented_layout(lhs, rhs, product) -> None:
    assert lin.get_matmul_output_sharding(lhs, rhs) == product
