"""Functions of whole matrices: equal to the same function without a mesh, and dealt out evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.sharding import whole_matrices
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.whole_matrices import map_whole_matrices


def cubed(matrix: jax.Array) -> jax.Array:
    """Return a function of the whole matrix: every entry depends on all others."""
    cube = matrix @ (matrix.T @ matrix) / jnp.linalg.norm(matrix)
    return jnp.cumsum(jnp.cumsum(cube, axis=0), axis=1)


def compiled(mesh, spec, shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: map_whole_matrices(cubed, [x])).lower(x).compile()


@pytest.mark.parametrize(
    ("mesh", "spec", "shape"),
    [
        ({"tp": 8}, P(None, None, "tp"), (3, 4, 16)),
        ({"tp": 8}, P(None, "tp", None), (16, 8, 4)),
        ({"fsdp": 8}, P(None, ("fsdp", "sp"), "tp"), (8, 16, 6)),
        ({"fsdp": 2, "tp": 4}, P(None, "fsdp", "tp"), (9, 6, 8)),
        ({"fsdp": 2, "sp": 2, "tp": 2}, P(None, ("fsdp", "sp"), "tp"), (5, 8, 6)),
        ({"fsdp": 2, "sp": 2, "tp": 2}, P(None, "tp", ("fsdp", "sp")), (5, 6, 8)),
        ({"dp": 2, "fsdp": 2, "tp": 2}, P(None, "tp", "fsdp"), (8, 4, 6)),
        ({"dp": 4, "tp": 2}, P(None, "tp", None), (5, 4, 6)),
        ({"dp": 8}, P(None, None, None), (3, 4, 6)),
        ({"ep": 2, "fsdp": 2, "tp": 2}, P(None, "ep", "fsdp", "tp"), (3, 4, 6, 8)),
        ({"dp": 2, "ep": 4}, P(None, "ep", "fsdp", "tp"), (3, 4, 6, 8)),
        ({"fsdp": 2, "tp": 4}, P("fsdp", "tp"), (4, 8)),
    ],
)
def test_every_sharding_computes_what_one_device_computes(mesh, spec, shape):
    mesh = build_mesh(MeshConfig(**mesh), jax.devices())
    sharding, rng = NamedSharding(mesh, spec), np.random.default_rng(0)
    # Two stacks, of which one has twice the matrices where it has a dim for them.
    shapes = [shape, (2 * shape[0], *shape[1:]) if len(shape) > 2 else shape]
    values = [rng.normal(size=shape).astype("f4") for shape in shapes]
    with jax.set_mesh(mesh):
        stacks = [jax.device_put(value, sharding) for value in values]
        results = jax.jit(lambda stacks: map_whole_matrices(cubed, stacks))(stacks)
    for value, found in zip(values, results, strict=True):
        wanted = np.stack([cubed(x) for x in value.reshape(-1, *shape[-2:])]).reshape(value.shape)
        assert found.sharding.is_equivalent_to(sharding, len(shape))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        copies = {}
        for shard in found.addressable_shards:
            copy = copies.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(shard.data, copy)


def of_a_tree(matrices, read, factor):
    """Return functions of several matrices, with the rows and the columns of the first."""
    x, square = matrices["x"], matrices["square"]
    return {"x": cubed(x) @ square * factor, "square": jnp.cumsum(x.T @ read, axis=1)}


@pytest.mark.parametrize(
    ("mesh", "specs"),
    [
        ({"fsdp": 2, "tp": 4}, [P(None, "fsdp", "tp"), P(None, "tp", "fsdp"), P(None, "fsdp")]),
        ({"fsdp": 2, "tp": 4}, [P(None, "fsdp", "tp"), P(None, "tp"), P(None, None, "tp")]),
        ({"dp": 2, "tp": 4}, [P(None, None, "tp"), P(None, "tp"), P()]),
        ({"sp": 2, "fsdp": 2, "dp": 2}, [P(None, ("fsdp", "sp")), P(), P(None, ("fsdp", "sp"))]),
        ({"ep": 2, "tp": 4}, [P("ep", "tp"), P("ep", None, "tp"), P("ep", "tp")]),
        (None, [None] * 3),
    ],
)
def test_the_matrices_of_a_tree_may_have_other_sizes_and_shardings(mesh, specs):
    rng = np.random.default_rng(0)
    shapes = [(6, 4, 8), (6, 8, 8), (6, 4, 8)]
    x, square, read = (rng.normal(size=shape).astype("f4") for shape in shapes)

    def mapped(x, square, read, factor):
        stacks = [{"x": x, "square": square}, {"x": 2 * x, "square": square}]
        return map_whole_matrices(of_a_tree, stacks, [read, -read], [factor])

    if mesh is None:
        found = jax.jit(mapped)(x, square, read, 3.0)
    else:
        mesh = build_mesh(MeshConfig(**mesh), jax.devices())
        with jax.set_mesh(mesh):
            placed = (
                jax.device_put(value, NamedSharding(mesh, P(*spec, *[None] * (3 - len(spec)))))
                for value, spec in zip((x, square, read), specs, strict=True)
            )
            found = jax.jit(mapped)(*placed, jnp.float32(3))
    for result, scale in zip(found, (1, 2), strict=True):
        result = jax.tree.map(np.asarray, result)
        for layer in range(6):
            matrices = {"x": scale * x[layer], "square": square[layer]}
            wanted = of_a_tree(matrices, read[layer] * (3 - 2 * scale), 3.0)
            for name, value in wanted.items():
                np.testing.assert_allclose(result[name][layer], value, rtol=2e-5, atol=2e-5)


def test_without_a_mesh_the_function_is_applied_to_each_matrix():
    value = np.random.default_rng(0).normal(size=(2, 3, 4, 6)).astype("f4")
    (found,) = jax.jit(lambda x: map_whole_matrices(cubed, [x]))(value)
    wanted = np.stack([[cubed(x) for x in row] for row in value])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "spec", "matrices"),
    [
        ({"fsdp": 2, "tp": 4}, P(None, "fsdp", "tp"), 2),
        ({"dp": 2, "fsdp": 2, "tp": 2}, P(None, "fsdp", "tp"), 2),
        ({"dp": 8}, P(None, None, None), 2),
        ({"dp": 2, "ep": 2, "tp": 2}, P("ep", None, "tp"), 2),
    ],
)
def test_a_device_computes_its_share_of_the_matrices(mesh, spec, matrices, monkeypatch):
    shapes = []

    def each(function, stack):
        shapes.extend(x.shape for x in stack)
        return stack

    monkeypatch.setattr(whole_matrices.lax, "map", each)
    compiled(build_mesh(MeshConfig(**mesh), jax.devices()), spec, (16, 8, 8))
    assert shapes == [(matrices, 8, 8)]


def test_the_exchange_carries_shards_and_not_matrices():
    mesh = build_mesh(MeshConfig(fsdp=2, tp=4), jax.devices())
    text = compiled(mesh, P(None, "fsdp", "tp"), (8, 16, 32)).as_text()
    assert text.count(" all-to-all(") + text.count(" all-to-all-start(") == 4
    assert "all-gather" not in text and "all-reduce" not in text
