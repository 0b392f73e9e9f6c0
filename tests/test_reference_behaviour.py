"""The reference API as a specification, continued: what its items do, one row and one test each."""

import copy
import pickle
from functools import partial
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rings import per_device, ring

from model.attention.metadata import OperationMetadata
from parallel.linear import ring as rg
from parallel.linear.linear import (
    ColumnParallelLinear,
    MatrixMultiplyMethod,
    ParallelLinear,
    RowParallelLinear,
    TensorParallelConfig,
    get_sharding,
)
from parallel.linear.model_parallelism import ModelParallelismWrapper
from parallel.linear.tensor_parallel import TPAsyncDense, TPDense, scale_init
from parallel.sharding import axes as ax
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionAxis, PartitionManager

DEVICES = np.array(jax.devices())
AUTO = Mesh(DEVICES.reshape(2, 4), ("dp", "tp"))  # as in the documents
HALF_AUTO = Mesh(AUTO.devices, ("dp", "tp"), axis_types=(AxisType.Explicit, AxisType.Auto))
MESH = Mesh(AUTO.devices, AUTO.axis_names, axis_types=(AxisType.Explicit,) * 2)
X = np.random.default_rng(0).normal(size=(4, 8, 64)).astype(np.float32)
HEADS = np.ones((2, 4, 4, 8), np.float32)
GATHERED = TensorParallelConfig(mesh=MESH)
SPLIT = GATHERED.replace(reduce_scatter_output=True)
METADATA = OperationMetadata(jnp.float32, _stored_mesh=MESH)
MANAGER = PartitionManager(PartitionAxis(), build_mesh(MeshConfig(sp=2, tp=4), jax.devices()))
TABLE = PartitionAxis().register("__STATE__", ("tp", "sp"), "tp")
METHOD = MatrixMultiplyMethod
HIDDEN = P("dp", None, "tp")
FSDP_SP, ROWS = ("fsdp", "sp"), ("dp", "fsdp", "ep")


def column(config=GATHERED, **options) -> ColumnParallelLinear:
    return ColumnParallelLinear(64, 128, parallel_config=config, **options)


def row_linear(config=GATHERED) -> RowParallelLinear:
    return RowParallelLinear(128, 64, parallel_config=config)


def dense(mode="none", cls=TPDense, layer=nnx.Linear, **options):
    build = partial(layer, 64, 64)
    return cls(build, "tp", mode, parallel_config=SPLIT, rngs=nnx.Rngs(0), **options)


def copies(**options) -> np.ndarray:
    """The kernels (4, 2, 3) of a wrapper around nnx.Linear."""
    kwargs = {"in_features": 2, "out_features": 3}
    options = {"module_kwargs": kwargs, "rngs": nnx.Rngs(0), **options}
    with jax.set_mesh(MESH):
        return np.asarray(ModelParallelismWrapper("tp", nnx.Linear, **options).sharded.kernel[...])


def place(spec: P) -> jax.Array:
    return jax.device_put(X, jax.NamedSharding(MESH, spec))


def plain() -> np.ndarray:
    """The output of a dense layer, by numpy; its bias is zero."""
    return X @ np.asarray(dense().module.kernel[...])


def x_split() -> jax.Array:
    """The input with its features over tp."""
    return place(HIDDEN)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def said_inside_jit(function, x):
    said = []
    jax.jit(lambda x: said.append(function(x))).trace(x)
    return said[0]


def initial_kernel(**options) -> np.ndarray:
    return np.asarray(ParallelLinear(4, 8, **options).kernel[...])


def is_static(value) -> bool:
    """Whether it is a pytree without leaves that jit takes and returns."""
    leaves, tree = jax.tree.flatten(value)
    return leaves == [] and jax.tree.unflatten(tree, leaves) == value == jax.jit(lambda y: y)(value)


# Name, what is done, what comes out, or a function that computes it from the parameters. Arrays
# are compared up to rounding.
BEHAVIOURS = [
    ("NOT_GIVEN is an EMPTY_VAL", lambda: isinstance(ax.NOT_GIVEN, ax.EMPTY_VAL), True),
    ("NOT_GIVEN, copied", lambda: copy.copy(ax.NOT_GIVEN) is ax.NOT_GIVEN, True),
    ("NOT_GIVEN, copied deeply", lambda: copy.deepcopy([ax.NOT_GIVEN])[0] is ax.NOT_GIVEN, True),
    ("NOT_GIVEN, pickled", lambda: pickled([ax.NOT_GIVEN])[0] is ax.NOT_GIVEN, True),
    ("another EMPTY_VAL, pickled", lambda: type(pickled(ax.EMPTY_VAL())), ax.EMPTY_VAL),
    ("another EMPTY_VAL is not NOT_GIVEN", lambda: ax.EMPTY_VAL() is ax.NOT_GIVEN, False),
    ("the mask value is finite", lambda: np.isfinite(np.float32(ax.DEFAULT_MASK_VALUE)), True),
    ("ColumnWise", lambda: MANAGER.resolve(ax.ColumnWise), P(FSDP_SP, "tp")),
    ("RowWise", lambda: MANAGER.resolve(ax.RowWise), P("tp", FSDP_SP)),
    ("SColumnWise", lambda: MANAGER.resolve(ax.SColumnWise), P(FSDP_SP)),
    ("SRowWise", lambda: MANAGER.resolve(ax.SRowWise), P("tp")),
    ("Replicated", lambda: MANAGER.resolve(ax.Replicated), P(None)),
    ("ExpertColumnWise", lambda: MANAGER.resolve(ax.ExpertColumnWise), P("ep", "fsdp", "tp")),
    ("ExpertRowWise", lambda: MANAGER.resolve(ax.ExpertRowWise), P("ep", "tp", "fsdp")),
    (
        "ExpertColumnWiseAlt",
        lambda: MANAGER.resolve(ax.ExpertColumnWiseAlt),
        P("ep", FSDP_SP, "tp"),
    ),
    ("ExpertRowWiseAlt", lambda: MANAGER.resolve(ax.ExpertRowWiseAlt), P("ep", "tp", FSDP_SP)),
    (
        "UnifiedExpertColumnWise",
        lambda: MANAGER.resolve(ax.UnifiedExpertColumnWise),
        P(("fsdp", "sp", "ep"), None, "tp"),
    ),
    (
        "UnifiedExpertRowWise",
        lambda: MANAGER.resolve(ax.UnifiedExpertRowWise),
        P(("fsdp", "sp", "ep"), "tp", None),
    ),
    ("ExpertActivations", lambda: MANAGER.resolve(ax.ExpertActivations), P("dp", "sp", "ep", "tp")),
    (
        "ExpertActivationsAlt",
        lambda: MANAGER.resolve(ax.ExpertActivationsAlt),
        P("dp", "sp", ("tp", "fsdp")),
    ),
    (
        "an integer mode, several tokens: training",
        lambda: MANAGER.resolve(ax.AttnQSharding, shape=(2, 4, 4, 8)),
        P(ROWS, "sp", "tp", None),
    ),
    (
        "an integer mode, one token: decoding",
        lambda: MANAGER.resolve(ax.AttnQSharding, shape=(2, 1, 4, 8)),
        P(ROWS, None, "tp", None),
    ),
    ("register, in training", lambda: TABLE.resolve_axis("__STATE__", "__train__"), ("tp", "sp")),
    ("register, in decoding", lambda: TABLE.resolve_axis("__STATE__", ax.MODE_DECODE), ("tp",)),
    ("register leaves the old table", lambda: "__STATE__" in PartitionAxis().rules, False),
    (
        "shard, the reference's name of constrain",
        lambda: MANAGER.shard(X, ax.HiddenStateSharding).sharding.spec,
        P(ROWS, "sp", "tp"),
    ),
    ("rules are a static pytree", lambda: is_static(PartitionAxis()), True),
    ("a manager is a static pytree", lambda: is_static(MANAGER), True),
    ("TensorParallelConfig is a static pytree", lambda: is_static(SPLIT), True),
    # easydel.layers.linear
    ("a linear without rngs: seed 0", initial_kernel, lambda: initial_kernel(rngs=nnx.Rngs(0))),
    ("param_dtype", lambda: initial_kernel(param_dtype=jnp.float16).dtype, np.dtype("float16")),
    ("dtype", lambda: ParallelLinear(64, 8, dtype=jnp.bfloat16)(X).dtype, jnp.bfloat16),
    ("use_bias=False", lambda: ParallelLinear(4, 8, use_bias=False).bias, None),
    ("bias", lambda: np.asarray(ParallelLinear(4, 8).bias[...]), np.zeros(8)),
    (
        "out_features, several",
        lambda: [y.shape for y in ParallelLinear(64, (8, 4))(X)],
        [(4, 8, 8), (4, 8, 4)],
    ),
    ("scale", lambda: ParallelLinear(64, 8, scale=0.5)(X), lambda: 0.5 * ParallelLinear(64, 8)(X)),
    (
        "scale fan_in",
        lambda: ParallelLinear(64, 8, scale="fan_in")(X),
        lambda: ParallelLinear(64, 8)(X) / 8,
    ),
    (
        "scale fan_out",
        lambda: ParallelLinear(64, 4, scale="fan_out")(X),
        lambda: ParallelLinear(64, 4)(X) / 2,
    ),
    (
        "native_forward",
        lambda: column().native_forward(X),
        lambda: X @ np.asarray(column().kernel[...]),
    ),
    (
        "native_forward with w",
        lambda: column().native_forward(X, w=np.ones((64, 128), np.float32)),
        X @ np.ones((64, 128), np.float32),
    ),
    (
        "a mesh is enough: the output is whole",
        lambda: column()(X).sharding.spec,
        P(None, None, None),
    ),
    ("reduce_scatter_output", lambda: column(SPLIT)(X).sharding.spec, P(None, None, "tp")),
    ("a column kernel", lambda: column().kernel[...].sharding.spec, P(None, "tp")),
    ("a row kernel", lambda: row_linear().kernel[...].sharding.spec, P("tp", None)),
    ("a column bias is split", lambda: column().bias[...].sharding.spec, P("tp")),
    ("a row bias is whole", lambda: row_linear().bias[...].sharding.spec, P(None)),
    (
        "ALL_GATHER: column",
        lambda: (
            ParallelLinear(
                64, 8, parallel_config=GATHERED.replace(matmul_method=METHOD.ALL_GATHER)
            ).direction
        ),
        "column",
    ),
    (
        "REDUCE_SCATTER: row",
        lambda: (
            ParallelLinear(
                64, 8, parallel_config=GATHERED.replace(matmul_method=METHOD.REDUCE_SCATTER)
            ).direction
        ),
        "row",
    ),
    (
        "matmul_type is matmul_method",
        lambda: GATHERED.replace(matmul_method="all_gather").matmul_type,
        METHOD.ALL_GATHER,
    ),
    (
        "TensorParallelConfig in JSON",
        lambda: TensorParallelConfig.from_json(SPLIT.to_json()),
        SPLIT,
    ),
    (
        "TensorParallelConfig in a dict",
        lambda: TensorParallelConfig.from_dict(SPLIT.to_dict()),
        SPLIT,
    ),
    ("get_sharding", lambda: get_sharding(place(P("dp"))), P("dp", None, None)),
    (
        "get_sharding under jit",
        lambda: said_inside_jit(get_sharding, place(P("dp"))),
        P("dp", None, None),
    ),
    ("get_sharding of one device", lambda: get_sharding(jnp.zeros(2)), None),
    # xlstm_jax.distributed.tensor_parallel
    (
        "scale_init",
        lambda: scale_init(nnx.initializers.ones, 0.25)(jax.random.key(0), (2,)),
        np.full(2, 0.25),
    ),
    ("dense_name", lambda: dense(dense_name="proj").proj.kernel[...].shape, (64, 64)),
    ("use_bias", lambda: dense("gather", use_bias=False).module.bias, None),
    (
        "kernel_init",
        lambda: dense("gather", kernel_init=nnx.initializers.ones).module.kernel[...],
        np.ones((64, 64)),
    ),
    (
        "kernel_init_adjustment",
        lambda: dense("gather", kernel_init_adjustment=0.5).module.kernel[...],
        lambda: 0.5 * dense().module.kernel[...],
    ),
    (
        "mode none ignores the adjustment",
        lambda: dense(kernel_init_adjustment=0.5).module.kernel[...],
        lambda: dense().module.kernel[...],
    ),
    ("gather", lambda: dense("gather")(x_split()), plain),
    (
        "gather, asynchronous",
        lambda: dense("gather", TPAsyncDense)(x_split()),
        plain,
    ),
    ("scatter", lambda: dense("scatter")(x_split()), plain),
    (
        "scatter, asynchronous",
        lambda: dense("scatter", TPAsyncDense)(x_split()),
        plain,
    ),
    (
        "gather: the layout of the output",
        lambda: dense("gather")(x_split()).sharding.spec,
        HIDDEN,
    ),
    (
        "skip_communication takes a whole input",
        lambda: dense("gather", skip_communication=True)(place(P("dp"))),
        plain,
    ),
    ("module_kwargs", lambda: copies().shape, (4, 2, 3)),
    ("split_rngs: copies differ", lambda: len({kernel.tobytes() for kernel in copies()}), 4),
    (
        "split_rngs=False: copies are equal",
        lambda: len({kernel.tobytes() for kernel in copies(split_rngs=False)}),
        1,
    ),
    (
        "mask_except_model_idx",
        lambda: copies(mask_except_model_idx=2).any((1, 2)).tolist(),
        [False, False, True, False],
    ),
]


@pytest.mark.parametrize(
    ("act", "want"), [r[1:] for r in BEHAVIOURS], ids=[r[0] for r in BEHAVIOURS]
)
@pytest.mark.costly
def test_an_item_does_what_its_document_promises(act, want) -> None:
    got, want = act(), want() if isinstance(want, FunctionType) else want
    if isinstance(want, np.ndarray | jax.Array):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    else:
        assert got == want


# Rings of 4 devices: function, options, entry i on device s as the device it comes from.
UP = [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]
DOWN = [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]
GATHERS = [
    (rg.async_gather, {}, UP),
    (rg.async_gather, {"shift_up": False}, DOWN),
    (rg.async_gather_bidirectional, {}, UP),
    (rg.async_gather_bidirectional, {"shift_up": False}, DOWN),
]
# Function, options, the device on which entry k of device s ends: lower half, upper half.
SCATTERS = [
    (rg.async_scatter, {}, lambda s, k: (s - 1 - k, s - 1 - k)),
    (rg.async_scatter, {"shift_up": False}, lambda s, k: (s + 1 + k, s + 1 + k)),
    (rg.async_scatter_split, {}, lambda s, k: (s - 1 - k, s + 1 + k)),
]


@pytest.mark.parametrize(("function", "options", "origins"), GATHERS)
def test_a_gather_lists_shards_in_its_documented_order(function, options, origins) -> None:
    own = np.arange(4.0)[:, None]
    got = per_device(ring(4), partial(function, axis_name="ring", **options), own)
    np.testing.assert_array_equal(np.stack(got)[..., 0], origins)


def test_a_split_gather_has_2n_minus_1_entries_as_documented() -> None:
    """The reference's source returns 2 n: its own shard in halves too."""
    halves = np.stack([np.arange(4.0), 10 + np.arange(4.0)], axis=-1)
    got = per_device(ring(4), partial(rg.async_gather_split, axis_name="ring"), halves)
    np.testing.assert_array_equal(got[0], halves)
    np.testing.assert_array_equal(np.stack(got[1:])[..., 0], [*UP[1:], *(10 + np.array(DOWN[1:]))])


@pytest.mark.parametrize(("function", "options", "owners"), SCATTERS)
def test_a_scatter_ends_at_its_documented_device(function, options, owners) -> None:
    terms = np.random.default_rng(0).normal(size=(4, 4, 2)).astype(np.float32)
    want = np.zeros((4, 2))
    for s in range(4):
        for k in range(4):
            for half, owner in enumerate(owners(s, k)):
                want[owner % 4, half] += terms[s, k, half]
    got = per_device(ring(4), lambda xs: function(list(xs), "ring", **options), terms)
    np.testing.assert_allclose(got, want, atol=1e-5)


# Name, what is done, the message of its ValueError.
CYCLE = PartitionAxis().register("__A__", "__B__")
REFUSALS = [
    ("unknown axis", lambda: MANAGER.resolve(["__NONE__"]), "unknown semantic axis '__NONE__'"),
    (
        "a cyclic rule",
        lambda: CYCLE.register("__B__", ("sp", "__A__")),
        "leads back to it: __A__ -> __B__ -> __A__",
    ),
    (
        "a cyclic rule in decoding",
        lambda: CYCLE.register("__B__", "tp", "__A__"),
        "leads back to it: __A__ -> __B__ -> __A__",
    ),
    (
        "a rule of itself",
        lambda: CYCLE.register("__C__", "__C__"),
        "leads back to it: __C__ -> __C__",
    ),
    (
        "a registered name",
        lambda: TABLE.register("__STATE__", "tp"),
        "already registered; pass override=True",
    ),
    (
        "an integer mode without a shape",
        lambda: MANAGER.resolve(ax.AttnQSharding),
        "pass the shape too",
    ),
    (
        "Auto axes, rules",
        lambda: PartitionManager(PartitionAxis(), AUTO),
        r"dp, tp are Auto.* axis_types=\(AxisType.Explicit,\) \* 2$",
    ),
    (
        "one Auto axis",
        lambda: PartitionManager(PartitionAxis(), HALF_AUTO),
        r"mesh axes tp are Auto.* axis_types=\(AxisType.Explicit,\) \* 2$",
    ),
    (
        "Auto axes, linears",
        lambda: TensorParallelConfig(AUTO),
        r"dp, tp are Auto.* axis_types=\(AxisType.Explicit,\) \* 2$",
    ),
    (
        "axis_name not in the mesh",
        lambda: GATHERED.replace(axis_name="model"),
        "'model' is not an axis of the mesh",
    ),
    (
        "a method without a mesh",
        lambda: TensorParallelConfig(matmul_method="all_gather"),
        "needs a mesh; pass mesh= or",
    ),
    (
        "an unknown method",
        lambda: GATHERED.replace(matmul_method="gather"),
        "use one of all_gather, reduce_scatter",
    ),
    (
        "column, then row",
        lambda: row_linear()(column()(X)),
        "give that one a .* reduce_scatter_output=True",
    ),
    (
        "an unknown scale",
        lambda: ParallelLinear(4, 8, scale="fan"),
        "give a number, fan_in or fan_out",
    ),
    (
        "an unknown mode",
        lambda: dense("row"),
        "Unknown Tensor Parallel mode: 'row'; use scatter, gather, none",
    ),
]


@pytest.mark.parametrize(
    ("act", "message"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_a_mistake_is_refused_in_one_line(act, message) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        act()
    assert "\n" not in str(refusal.value)
