"""Ring matmuls equal their plain twins and numpy, in values and gradients, on rings of any size."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from parallel.ring import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
    gather_matmul,
    matmul_scatter,
)

DIMS = {"rows": -2, "features": -1}


def ring(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("ring",), axis_types=(AxisType.Explicit,))


def per_device(mesh: Mesh, body, *arrays: np.ndarray) -> list:
    """Runs `body` on row s of every array on device s; leaf by leaf, row s is device s's answer."""
    with jax.set_mesh(mesh):
        placed = [place(mesh, P("ring"), array) for array in arrays]
        specs = tuple(P("ring") for _ in arrays)

        def local(*rows):
            return jax.tree.map(lambda y: y[None], body(*(row[0] for row in rows)))

        island = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("ring"))
        out = jax.jit(island)(*placed)
        return jax.tree.map(np.asarray, out)


@settings(deadline=None, max_examples=10, derandomize=True)
@given(size=st.integers(1, 8), up=st.booleans(), seed=st.integers(0, 99))
def test_async_gathers_list_the_shards_in_the_documented_order(size, up, seed) -> None:
    x = np.random.default_rng(seed).normal(size=(size, 3, 4)).astype(np.float32)
    sign = -1 if up else 1
    want = [[x[(s + sign * i) % size] for s in range(size)] for i in range(size)]
    for verb in (async_gather, async_gather_bidirectional):
        got = per_device(ring(size), partial(verb, axis_name="ring", shift_up=up), x)
        assert len(got) == size
        np.testing.assert_array_equal(np.stack(got), np.array(want))


@settings(deadline=None, max_examples=8, derandomize=True)
@given(size=st.integers(1, 8), seed=st.integers(0, 99))
def test_async_gather_split_lists_own_then_lower_then_upper_halves(size, seed) -> None:
    x = np.random.default_rng(seed).normal(size=(size, 3, 4)).astype(np.float32)
    got = per_device(ring(size), partial(async_gather_split, axis_name="ring"), x)
    assert len(got) == 2 * size - 1
    np.testing.assert_array_equal(got[0], x)
    for i in range(1, size):
        for s in range(size):
            np.testing.assert_array_equal(got[i][s], x[(s - i) % size][:, :2])
            np.testing.assert_array_equal(got[size - 1 + i][s], x[(s + i) % size][:, 2:])


@settings(deadline=None, max_examples=10, derandomize=True)
@given(size=st.integers(1, 8), kind=st.sampled_from(["up", "down", "split"]))
def test_async_scatters_bring_every_part_to_its_documented_owner(size, kind) -> None:
    xs = np.random.default_rng(size).normal(size=(size, size, 3, 4)).astype(np.float32)

    def body(x):
        if kind == "split":
            return async_scatter_split(list(x), "ring")
        return async_scatter(list(x), "ring", shift_up=kind == "up")

    got = per_device(ring(size), body, xs)
    up, down = np.zeros_like(got), np.zeros_like(got)
    for s in range(size):
        for k in range(size):
            up[(s - 1 - k) % size] += xs[s, k]
            down[(s + 1 + k) % size] += xs[s, k]
    split = np.concatenate([up[..., :2], down[..., 2:]], -1)
    np.testing.assert_allclose(got, {"up": up, "down": down, "split": split}[kind], atol=1e-5)


@settings(deadline=None, max_examples=6, derandomize=True)
@given(size=st.integers(1, 8), up=st.booleans())
def test_derivatives_of_the_verbs_are_their_transposes(size, up) -> None:
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 4)).astype(np.float32)
    weights = rng.normal(size=(size, size, 4)).astype(np.float32)

    def body(x, w):
        def loss(x):
            shards = async_gather_bidirectional(x, "ring", up)
            return sum(jnp.sum(part * w[i]) for i, part in enumerate(shards))

        return jax.grad(loss)(x)

    got = per_device(ring(size), body, x, weights)
    sign = -1 if up else 1
    want = np.zeros_like(x)
    for s in range(size):
        for i in range(size):
            want[(s + sign * i) % size] += weights[s, i]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_verbs_take_pytrees_and_any_dtype() -> None:
    x = np.arange(12, dtype=np.int32).reshape(4, 3)
    tree = per_device(
        ring(4), lambda a: async_gather({"a": a, "b": (a.astype(jnp.bfloat16),)}, "ring")[1], x
    )
    np.testing.assert_array_equal(tree["a"], np.roll(x, 1, 0))
    assert tree["b"][0].dtype == jnp.bfloat16


def test_wrong_shards_and_odd_features_are_refused() -> None:
    x = np.ones((4, 3), np.float32)
    with pytest.raises(ValueError, match="Number of shards needs to match axis size: got 3"):
        per_device(ring(4), lambda a: async_scatter([a] * 3, "ring"), x)
    with pytest.raises(ValueError, match="use an even width"):
        per_device(ring(4), lambda a: async_gather_split(a, "ring"), x)


def gathered(x: jax.Array, *kernels: jax.Array, mesh: Mesh, dim: int, overlap: str):
    spec = P(None, "ring", None) if dim == -2 else P(None, None, "ring")
    body = partial(_gather_body, dim=dim, overlap=overlap)
    columns = P(None, "ring")
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(spec, *(columns for _ in kernels)),
        out_specs=tuple(P(None, None, "ring") for _ in kernels),
    )(x, *kernels)


def _gather_body(x, *kernels, dim, overlap):
    return gather_matmul(x, kernels, axis_name="ring", dim=dim, overlap=overlap)


def scattered(x: jax.Array, kernel: jax.Array, mesh: Mesh, dim: int, overlap: str) -> jax.Array:
    spec = P(None, "ring", None) if dim == -2 else P(None, None, "ring")
    body = partial(matmul_scatter, axis_name="ring", dim=dim, overlap=overlap)
    in_specs = (P(None, None, "ring"), P("ring", None))
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=spec)(x, kernel)


def value_and_pullback(function, args, cotangent):
    """Compiled once as a whole: op by op, every hop would be a compilation of its own."""

    @jax.jit
    def both(args, cotangent):
        out, pull = jax.vjp(function, *args)
        return out, pull(cotangent)

    return both(tuple(args), cotangent)


def place(mesh: Mesh, spec: P, array: np.ndarray) -> jax.Array:
    return jax.device_put(array, jax.NamedSharding(mesh, spec))


def close(got: jax.Array, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    size=st.integers(1, 8),
    rows=st.integers(1, 3),
    features=st.integers(1, 3),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    kind=st.sampled_from(sorted(DIMS)),
    overlap=st.sampled_from(["none", "ring"]),
    seed=st.integers(0, 2**16),
)
def test_gather_matmul_equals_matmul(size, rows, features, widths, kind, overlap, seed) -> None:
    rng, mesh, dim = np.random.default_rng(seed), ring(size), DIMS[kind]
    x = rng.normal(size=(2, rows * size, features * size)).astype(np.float32)
    kernels = [
        rng.normal(size=(features * size, width * size)).astype(np.float32) for width in widths
    ]
    cotangents = [rng.normal(size=(2, rows * size, w.shape[1])).astype(np.float32) for w in kernels]
    with jax.set_mesh(mesh):
        spec = P(None, "ring", None) if dim == -2 else P(None, None, "ring")
        args = [place(mesh, spec, x), *(place(mesh, P(None, "ring"), w) for w in kernels)]
        cts = tuple(place(mesh, P(None, None, "ring"), c) for c in cotangents)
        run = partial(gathered, mesh=mesh, dim=dim, overlap=overlap)
        outs, grads = value_and_pullback(run, args, cts)
    for out, w in zip(outs, kernels, strict=True):
        close(out, x @ w)
    close(grads[0], sum(c @ w.T for c, w in zip(cotangents, kernels, strict=True)))
    for grad, c in zip(grads[1:], cotangents, strict=True):
        close(grad, np.einsum("bld,blf->df", x, c))


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    size=st.integers(1, 8),
    rows=st.integers(1, 3),
    features=st.integers(1, 3),
    width=st.integers(1, 3),
    kind=st.sampled_from(sorted(DIMS)),
    overlap=st.sampled_from(["none", "ring"]),
    seed=st.integers(0, 2**16),
)
def test_matmul_scatter_equals_matmul(size, rows, features, width, kind, overlap, seed) -> None:
    rng, mesh, dim = np.random.default_rng(seed), ring(size), DIMS[kind]
    x = rng.normal(size=(2, rows * size, features * size)).astype(np.float32)
    kernel = rng.normal(size=(features * size, width * size)).astype(np.float32)
    cotangent = rng.normal(size=(2, rows * size, width * size)).astype(np.float32)
    spec = P(None, "ring", None) if dim == -2 else P(None, None, "ring")
    with jax.set_mesh(mesh):
        args = place(mesh, P(None, None, "ring"), x), place(mesh, P("ring", None), kernel)
        run = partial(scattered, mesh=mesh, dim=dim, overlap=overlap)
        out, (dx, dkernel) = value_and_pullback(run, args, place(mesh, spec, cotangent))
    close(out, x @ kernel)
    close(dx, cotangent @ kernel.T)
    close(dkernel, np.einsum("blf,bld->fd", x, cotangent))


@pytest.mark.parametrize("kind", DIMS)
def test_a_ring_hops_and_its_twin_does_not(kind: str) -> None:
    mesh = ring(4)
    with jax.set_mesh(mesh):
        spec = P(None, "ring", None) if kind == "rows" else P(None, None, "ring")
        x = place(mesh, spec, np.ones((1, 8, 8), np.float32))
        w = place(mesh, P(None, "ring"), np.ones((8, 8), np.float32))
        text = {
            overlap: str(
                jax.make_jaxpr(partial(gathered, mesh=mesh, dim=DIMS[kind], overlap=overlap))(x, w)
            )
            for overlap in ("none", "ring")
        }
    assert text["ring"].count("ppermute[") == 3 and "all_gather[" not in text["ring"]
    assert text["none"].count("all_gather[") == 1 and "ppermute[" not in text["none"]


def test_partial_sums_of_bfloat16_are_added_in_float32() -> None:
    # 1 + 2**-9 is not a bfloat16: added pairwise in bfloat16 the small parts would be lost.
    mesh = ring(8)
    x = np.full((1, 1, 8), 2.0**-9, np.float32)
    x[..., 0] = 1
    with jax.set_mesh(mesh):
        placed = place(mesh, P(None, None, "ring"), x.astype(jnp.bfloat16))
        w = place(mesh, P(None, "ring"), np.ones((8, 8), jnp.bfloat16))
        run = partial(gathered, mesh=mesh, dim=-1, overlap="ring")
        (out,) = jax.jit(run)(placed, w)
    assert np.asarray(out, np.float32).max() == np.float32(jnp.bfloat16(1 + 7 * 2.0**-9))


def test_an_unknown_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="use none, ring"):
        gather_matmul(jnp.ones((1, 1)), [], axis_name="ring", dim=-1, overlap="maybe")
