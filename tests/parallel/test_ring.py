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

from parallel.ring import gather_matmul, matmul_scatter

DIMS = {"rows": -2, "features": -1}


def ring(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("ring",), axis_types=(AxisType.Explicit,))


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
        outs, pull = jax.vjp(partial(gathered, mesh=mesh, dim=dim, overlap=overlap), *args)
        grads = pull(cts)
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
        out, pull = jax.vjp(run, *args)
        dx, dkernel = pull(place(mesh, spec, cotangent))
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
        (out,) = gathered(placed, w, mesh=mesh, dim=-1, overlap="ring")
    assert np.asarray(out, np.float32).max() == np.float32(jnp.bfloat16(1 + 7 * 2.0**-9))


def test_an_unknown_overlap_is_refused() -> None:
    with pytest.raises(ValueError, match="use none, ring"):
        gather_matmul(jnp.ones((1, 1)), [], axis_name="ring", dim=-1, overlap="maybe")
