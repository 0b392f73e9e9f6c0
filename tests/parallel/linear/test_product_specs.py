"""The layout of a spec, of an array and of a product is the one that the arrays then have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.linear.config import (
    MatrixMultiplyMethod,
    get_matmul_output_sharding,
    get_output_partition_spec,
    get_sharding,
)
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.specs import mesh_axes_of

ALL_GATHER, REDUCE_SCATTER = MatrixMultiplyMethod
NAMES = ("dp", "fsdp", "ep", "sp", "tp")


def mesh(**sizes: int) -> Mesh:
    config = MeshConfig(**sizes)
    return build_mesh(config, jax.devices()[: config.num_devices])


def put(array, on: Mesh, spec: P) -> jax.Array:
    return jax.device_put(array, NamedSharding(on, spec))


def traced(function, *arrays):
    """What a function of arrays says of them under jit, where they have only types."""
    said = []

    def body(*tracers):
        said.append(function(*tracers))
        return tracers

    jax.jit(body).trace(*arrays)
    return said[0]


def test_the_sharding_of_an_array_is_the_same_eagerly_and_under_jit() -> None:
    on = mesh(dp=2, tp=4)
    for spec, full in (
        (P("dp", "tp"), P("dp", "tp")),
        (P("dp"), P("dp", None)),
        (P(None, ("dp", "tp")), P(None, ("dp", "tp"))),
        (P(), P(None, None)),
    ):
        x = put(jnp.zeros((8, 8)), on, spec)
        assert get_sharding(x) == full
        assert traced(get_sharding, x) == full
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        assert get_sharding(struct) == full


def test_partial_sums_stay_in_the_sharding() -> None:
    on = mesh(tp=8)
    with jax.set_mesh(on):
        x, w = put(jnp.zeros((8, 8)), on, P(None, "tp")), put(jnp.zeros((8, 8)), on, P("tp"))
        partial = P(None, None, unreduced={"tp"})
        sums = jax.jit(lambda x, w: jnp.einsum("ld,df->lf", x, w, out_sharding=partial))(x, w)
    assert get_sharding(sums) == partial


def test_on_an_auto_mesh_only_a_committed_array_knows_its_sharding() -> None:
    on = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    x = put(jnp.zeros((8, 8)), on, P("dp"))
    assert get_sharding(x) == P("dp", None)
    assert traced(get_sharding, x) is None


def test_what_is_on_no_mesh_has_no_sharding() -> None:
    one = mesh()
    for x in (
        jnp.zeros((2, 2)),
        np.zeros((2, 2)),
        1.0,
        jax.device_put(jnp.zeros(2), jax.devices()[3]),
        put(jnp.zeros(2), one, P("tp")),
        jax.ShapeDtypeStruct((2, 2), jnp.float32),
    ):
        assert get_sharding(x) is None
    assert traced(get_sharding, jnp.zeros(2)) is None
    assert traced(get_sharding, put(jnp.zeros(2), one, P("tp"))) is None


def test_a_block_inside_shard_map_has_no_sharding() -> None:
    on, seen = mesh(tp=8), []

    def body(block):
        seen.append(get_sharding(block))
        return block

    island = jax.shard_map(body, mesh=on, in_specs=P("tp"), out_specs=P("tp"))
    jax.jit(island).trace(put(jnp.zeros(8), on, P("tp")))
    assert seen == [None]


BATCH, LENGTH, WIDTH, FEATURES = 4, 8, 8, 16
GATHERS = [  # lhs, rhs, product
    (P("dp", "tp", None), P(None, "tp"), P("dp", None, "tp")),
    (P("dp", ("sp", "tp"), None), P(None, "tp"), P("dp", "sp", "tp")),
    (P("dp", "sp", "tp"), P("sp", "tp"), P("dp", "sp", "tp")),
    (P("dp", None, None), P("sp", "tp"), P("dp", None, "tp")),
    (P(), P(None, ("sp", "tp")), P(None, None, ("sp", "tp"))),
    (P("dp", "sp", "tp"), P(None, ("tp", "sp")), P("dp", "sp", "tp")),
]
SCATTERS = [
    (P("dp", "sp", "tp"), P("tp", None), P("dp", "sp", "tp")),
    (P("dp", "sp", "tp"), P("tp", "sp"), P("dp", "sp", "tp")),
    (P("dp", None, "tp"), P("tp", "sp"), P("dp", None, ("sp", "tp"))),
    (P("dp", None, None), P("tp", None), P("dp", None, "tp")),
    (P("dp", None, "tp"), P(), P("dp", None, "tp")),
]


def operands(on: Mesh, lhs: P, rhs: P) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(BATCH, LENGTH, WIDTH)), rng.normal(size=(WIDTH, FEATURES))
    return put(x.astype(np.float32), on, lhs), put(w.astype(np.float32), on, rhs)


def gather_dims(block: jax.Array, spec: P, axes: set[str]) -> jax.Array:
    for dim, entry in enumerate(spec):
        for name in reversed([name for name in mesh_axes_of(entry) if name in axes]):
            block = lax.all_gather(block, name, axis=dim, tiled=True)
    return block


def multiply(x, w, method, lhs, rhs, product) -> jax.Array:
    """Local blocks by plain collectives, laid out as the prediction says."""
    kept = set(mesh_axes_of(product[-1]))
    if method == ALL_GATHER:
        x = gather_dims(x, lhs, {"tp"})
        w = gather_dims(w, rhs, {"sp", "dp"} - kept | set(mesh_axes_of(rhs[0])))
        return jnp.matmul(x, w)
    w = gather_dims(w, rhs, {"sp"} - kept)
    rank, size = lax.axis_index("tp"), WIDTH // lax.axis_size("tp")
    if "tp" not in mesh_axes_of(lhs[-1]):
        x = lax.dynamic_slice_in_dim(x, rank * size, size, axis=-1)
    if "tp" not in mesh_axes_of(rhs[0]):
        w = lax.dynamic_slice_in_dim(w, rank * size, size, axis=0)
    return lax.psum_scatter(jnp.matmul(x, w), "tp", scatter_dimension=2, tiled=True)


@pytest.mark.parametrize(
    ("method", "lhs", "rhs", "product"),
    [(ALL_GATHER, *case) for case in GATHERS] + [(REDUCE_SCATTER, *case) for case in SCATTERS],
)
def test_the_predicted_layout_holds_the_product(method, lhs: P, rhs: P, product: P) -> None:
    on = mesh(dp=2, sp=2, tp=2)
    x, w = operands(on, lhs, rhs)
    assert get_output_partition_spec(x, w, method, "tp") == product
    assert get_output_partition_spec(x, w, method.value, "tp") == product
    assert traced(lambda x, w: get_output_partition_spec(x, w, method, "tp"), x, w) == product
    lhs, rhs = get_sharding(x), get_sharding(w)
    island = jax.shard_map(
        lambda x, w: multiply(x, w, method, lhs, rhs, product),
        mesh=on,
        in_specs=(lhs, rhs),
        out_specs=product,
        check_vma=False,  # a gathered block counts as varying, and a product may leave its axis out
    )
    y = jax.jit(island)(x, w)
    np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(w), rtol=1e-5, atol=1e-5)


def test_a_product_of_what_lies_on_no_mesh_has_no_layout() -> None:
    x, w = operands(mesh(dp=2, sp=2, tp=2), P(), P(None, "tp"))
    for method in MatrixMultiplyMethod:
        assert get_output_partition_spec(np.asarray(x), w, method, "tp") is None
        assert get_output_partition_spec(x, np.asarray(w), method, "tp") is None


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        (P("dp", None, None), P(None, None)),  # nothing to sum
        (P("dp", "tp", None), P("tp", None)),  # rows have the axis
        (P("dp", None, "tp"), P(None, "tp")),  # features have it
    ],
)
def test_a_reduce_scatter_without_partial_sums_is_refused(lhs: P, rhs: P) -> None:
    x, w = operands(mesh(dp=2, tp=2), lhs, rhs)
    with pytest.raises(ValueError, match=r"no partial sums over tp to scatter; put tp on the feat"):
        get_output_partition_spec(x, w, REDUCE_SCATTER, "tp")


def test_products_that_cannot_be_laid_out_are_refused() -> None:
    on = mesh(tp=8)
    x, w = operands(on, P(None, None, "tp"), P("tp", None))
    with pytest.raises(ValueError, match=r"axis_name 'model' is not an axis of the mesh"):
        get_output_partition_spec(x, w, ALL_GATHER, "model")
    with pytest.raises(ValueError, match=r"matmul_method None is not a matmul method"):
        get_output_partition_spec(x, w, None, "tp")
    with pytest.raises(ValueError, match=r"dim 1 = 12 is not divisible by tp = 8"):
        get_output_partition_spec(x, w[:, :12], REDUCE_SCATTER, "tp")
    with pytest.raises(ValueError, match=r"rhs \(4, 8, 8\) are not `... D` and `D F`"):
        get_output_partition_spec(x, x, ALL_GATHER, "tp")


@st.composite
def specs(draw, min_rank: int) -> P:
    """A legal spec: no axis twice."""
    order = list(draw(st.permutations(NAMES)))
    entries = []
    for _ in range(draw(st.integers(min_rank, 4))):
        count = draw(st.integers(0, 2))
        taken, order = order[:count], order[count:]
        entries.append(tuple(taken) if len(taken) > 1 else taken[0] if taken else None)
    return P(*entries)


@given(specs(min_rank=1), specs(min_rank=2))
def test_laws_of_product_layouts(lhs: P, rhs: P) -> None:
    product = get_matmul_output_sharding(lhs, rhs)
    assert len(product) == len(lhs)
    used = [name for entry in product for name in mesh_axes_of(entry)]
    assert len(used) == len(set(used))
    # Rows keep all of theirs; columns keep, in order, what the rows have not used.
    assert product[:-1] == lhs[:-1]
    rows = {name for entry in lhs[:-1] for name in mesh_axes_of(entry)}
    columns = tuple(name for name in mesh_axes_of(rhs[-1]) if name not in rows)
    assert mesh_axes_of(product[-1]) == columns
    assert get_matmul_output_sharding(product, P(None, None))[:-1] == product[:-1]


@given(specs(min_rank=2), specs(min_rank=2))
def test_product_layouts_equal_the_type_rule_of_jax_where_it_has_one(lhs: P, rhs: P) -> None:
    """jax types a product whose contraction is whole and whose dims share no axis."""
    lhs = P(*lhs[:-1], None)
    rows = {name for entry in lhs for name in mesh_axes_of(entry)}
    rhs = P(None, tuple(name for name in mesh_axes_of(rhs[-1]) if name not in rows) or None)
    on = mesh(dp=2, sp=2, tp=2)
    x, w = (
        jax.ShapeDtypeStruct((8,) * len(spec), jnp.float32, sharding=NamedSharding(on, spec))
        for spec in (lhs, rhs)
    )
    with jax.set_mesh(on):
        y = jax.eval_shape(jnp.matmul, x, w)
    assert y.sharding.spec == get_matmul_output_sharding(lhs, rhs)
