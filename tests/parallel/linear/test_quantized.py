"""Products in int8 and float8 equal numpy's on values that were rounded to the same steps."""

import re
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import PartitionSpec as P
from rings import place, ring
from test_collective_matmul import both, island_of

from model.remat import REMAT_POLICIES
from parallel.linear.head_matmul import PLAIN, HeadMatmul
from parallel.linear.local_matmul import (
    kernel_gradient,
    matmul,
    matmul_transposed,
    plain_matmul,
    trained_columns,
)
from parallel.linear.quantized import Quantized, QuantizedMatmul, Scales
from parallel.linear.ring import Ring
from parallel.linear.stored_kernel import stored_matmul

ALL = ("forward", "dgrad", "wgrad")
TYPES = ("int8", "fp8_e4m3")


def rounded(x: np.ndarray, dtype: str, axis: int | tuple[int, ...] | None) -> np.ndarray:
    """Round to the values that a dtype has, times a scale for all entries along `axis`."""
    largest = {"int8": 127, "fp8_e4m3": 448}[dtype]
    most = np.max(np.abs(x), axis=axis, keepdims=True).astype(np.float32)
    scale = np.where(most > 0, most * np.float32(1 / largest), np.float32(1))
    steps = np.float32(x) / scale
    if dtype == "int8":
        return np.rint(steps).astype(np.float64) * scale
    return steps.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Values whose rows and columns have very different sizes, one row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, size=(*shape[:-1], 1))
    x[..., 0, :] = 0
    return np.float32(x)


def close(got, want, scale=None) -> None:
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("scales", get_args(Scales))
@pytest.mark.parametrize("dtype", TYPES)
def test_products_equal_numpy_and_others_are_exact(dtype, scales):
    x, w, dy = random(3, 4, 16), random(16, 8, seed=1), random(3, 4, 8, seed=2)
    quantized = QuantizedMatmul(dtype, ALL, scales)
    first, second, last, rows = (
        axes if scales == "channel" else None for axes in (0, 1, -1, (0, 1))
    )
    wanted = {
        "forward": rounded(x, dtype, last) @ rounded(w, dtype, first),
        "dgrad": rounded(dy, dtype, last) @ rounded(w, dtype, second).T,
        "wgrad": np.einsum("blD,blF->DF", rounded(x, dtype, rows), rounded(dy, dtype, rows)),
    }
    exact = {
        "forward": np.float64(x) @ w,
        "dgrad": np.float64(dy) @ w.T,
        "wgrad": np.einsum("blD,blF->DF", np.float64(x), dy),
    }
    functions = {
        "forward": lambda precision: matmul(x, w, precision),
        "dgrad": lambda precision: matmul_transposed(dy, w, precision),
        "wgrad": lambda precision: kernel_gradient(x, dy, precision),
    }
    for product, function in functions.items():
        close(jax.jit(function, static_argnums=0)(quantized), wanted[product])
        others = QuantizedMatmul(dtype, tuple(name for name in ALL if name != product), scales)
        np.testing.assert_allclose(function(others), exact[product], rtol=1e-4, atol=1e-3)
        assert np.abs(wanted[product] - exact[product]).max() > 1e-3


@pytest.mark.parametrize("dtype", TYPES)
def test_a_product_is_within_one_step_of_every_operand(dtype):
    x, w = random(64, 32), random(32, 16, seed=1)
    y = np.float64(matmul(x, w, QuantizedMatmul(dtype, ("forward",))))
    step = {"int8": 0.5 / 127, "fp8_e4m3": 2.0**-4}[dtype]
    # |x'w' - xw| <= |x' - x| |w| + |x'| |w' - w|, and an entry of float8 is off by its own 2^-4.
    sizes = np.abs(np.float64(x)), np.abs(np.float64(w))
    if dtype == "int8":
        errors = step * sizes[0].max(1, keepdims=True), step * sizes[1].max(0, keepdims=True)
    else:
        errors = step * sizes[0] + 1e-6, step * sizes[1] + 1e-6
    bound = np.broadcast_to(errors[0], x.shape) @ sizes[1]
    bound += (sizes[0] + errors[0]) @ np.broadcast_to(errors[1], w.shape)
    assert np.all(np.abs(y - np.float64(x) @ w) <= 1.01 * bound)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_plain_matmul_has_the_derivatives_of_its_products(dtype):
    x, w, dy = random(3, 4, 16), random(16, 8, seed=1), random(3, 4, 8, seed=2)
    precision = QuantizedMatmul(dtype, ("forward", "dgrad"))
    y, pull = jax.vjp(lambda x, w: plain_matmul(x, w, precision), x, w)
    dx, dw = pull(dy)
    close(y, rounded(x, dtype, -1) @ rounded(w, dtype, 0))
    close(dx, rounded(dy, dtype, -1) @ rounded(w, dtype, 1).T)
    close(dw, np.einsum("blD,blF->DF", np.float64(x), dy))


@pytest.mark.parametrize("dtype", TYPES)
def test_scales_along_a_sum_are_multiplied_into_the_other_operand(dtype):
    x, w, dy = random(12, 16), random(16, 8, seed=1), random(12, 8, seed=2)
    precision = QuantizedMatmul(dtype, ALL)
    rows, kernel = precision.quantize(x, (1,)), precision.quantize(w, (0,))
    values, steps = np.float64(rows.values), np.float64(rows.scale)
    close(kernel_gradient(rows, dy, precision), values.T @ rounded(steps * dy, dtype, 0))
    values, steps = np.float64(kernel.values), np.float64(kernel.scale)
    close(matmul_transposed(dy, kernel, precision), rounded(steps * dy, dtype, 1) @ values.T)
    close(kernel.floats(jnp.float32), values * steps)
    close(matmul(rows, kernel, precision), rounded(x, dtype, 1) @ rounded(w, dtype, 0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e-38, 1e-45])
def test_values_that_no_scale_can_hold_stay_visible_or_become_zero(dtype, value):
    x, w = random(4, 16), random(16, 8, seed=1)
    w[:, 2] = 0
    w[3, 2] = value
    y = np.asarray(matmul(x, w, QuantizedMatmul(dtype, ALL)))
    assert np.all(np.isfinite(np.delete(y, 2, axis=1)))
    if np.isfinite(value):
        assert np.all(np.abs(y[:, 2]) < 1e-30)
    else:
        assert not np.any(np.isfinite(y[x[:, 3] != 0, 2]))


def test_sums_of_int8_that_could_overflow_are_refused():
    x = jax.ShapeDtypeStruct((140_000, 4), jnp.float32)
    precision = QuantizedMatmul("int8", ALL)
    with pytest.raises(ValueError, match=r"over 140,000 terms could overflow; at most 133,144 are"):
        jax.eval_shape(lambda x: kernel_gradient(x, x, precision), x)


N, B, L, D, F = 4, 3, 8, 16, 24


def shards(x: np.ndarray, axis: int) -> list[np.ndarray]:
    return np.split(x, N, axis)


def rounded_in_blocks(x, dtype, scales, axis, cut):
    """Round to a scale per row or column, or to one scale per block of a device along `cut`."""
    axis = axis if scales == "channel" else None
    return np.concatenate([rounded(block, dtype, axis) for block in shards(x, cut)], cut)


def gathered(x, w1, w2, dy1, dy2, dtype, scales):
    """Values and gradients of `gather_matmul`: rows are rounded once, columns where they lie."""
    x = rounded_in_blocks(x, dtype, scales, -1, 1)
    ys = [x @ rounded_in_blocks(w, dtype, scales, 0, 1) for w in (w1, w2)]
    dx = sum(
        rounded_in_blocks(np.concatenate(dys, -1), dtype, scales, -1, 1)
        @ rounded(np.concatenate(ws, 1), dtype, 1 if scales == "channel" else None).T
        for *dys, ws in zip(
            shards(dy1, -1),
            shards(dy2, -1),
            zip(shards(w1, 1), shards(w2, 1), strict=True),
            strict=True,
        )
    )
    dws = [np.einsum("blD,blF->DF", x, dy) for dy in (dy1, dy2)]
    return ys, [dx, *dws]


def scattered(x, w, dy, dtype, scales):
    """Values and gradients of `matmul_scatter`: every device rounds its own features."""
    parts = list(zip(shards(x, -1), shards(w, 0), strict=True))
    dy = rounded_in_blocks(dy, dtype, scales, -1, 1)
    first, second = (0, 1) if scales == "channel" else (None, None)
    y = sum(rounded_in_blocks(x, dtype, scales, -1, 1) @ rounded(w, dtype, first) for x, w in parts)
    dx = [dy @ rounded(w, dtype, second).T for _, w in parts]
    dw = [np.einsum("blF,blD->FD", x, dy) for x, _ in parts]
    return y, [np.concatenate(dx, -1), np.concatenate(dw, 0)]


# A scale per array depends on the pieces of a ring: the plain ring sends whole blocks.
RINGS = [(overlap, "channel") for overlap in ("ring", "bidirectional", "split", "hypercube")]
RINGS += [("ring", "tensor")]


@pytest.mark.parametrize(("overlap", "scales"), RINGS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.costly
def test_rings_equal_numpy(dtype, overlap, scales):
    precision, mesh = QuantizedMatmul(dtype, ("forward", "dgrad"), scales), ring(N)
    x, w1, w2 = random(B, L, D), random(D, F, seed=1), random(D, F, seed=2)
    dys = [random(B, L, F, seed=seed) for seed in (3, 4)]
    specs, island = island_of("gather_rows", mesh, overlap, precision=precision)
    ys, grads = both(mesh, specs, island, [x, w1, w2], tuple(dys))
    wanted = gathered(x, w1, w2, *dys, dtype, scales)
    for got, want in zip((*ys, *grads), (*wanted[0], *wanted[1]), strict=True):
        close(got, want)
    h, w, dy = random(B, L, F, seed=5), random(F, D, seed=6), random(B, L, D, seed=7)
    specs, island = island_of("scatter_rows", mesh, overlap, precision=precision)
    y, grads = both(mesh, specs, island, [h, w], dy)
    wanted = scattered(h, w, dy, dtype, scales)
    for got, want in zip((y, *grads), (wanted[0], *wanted[1]), strict=True):
        close(got, want)


@pytest.mark.parametrize("overlap", ["ring", "bidirectional", "split", "hypercube"])
@pytest.mark.costly
def test_a_chain_equals_its_two_linears_one_after_the_other(overlap):
    mesh, precision = ring(N), QuantizedMatmul("int8", ("forward", "dgrad"))
    arrays = [np.tanh(random(*s, seed=i)) for i, s in enumerate([(B, L, D), *[(D, F)] * 2])]
    arrays += [np.tanh(random(F, D, seed=5))]
    dy = np.tanh(random(B, L, D, seed=6))
    found, wanted = (
        both(mesh, *island_of("chain", mesh, how, extras=0, precision=precision), arrays, dy)
        for how in (overlap, "none")
    )
    for got, want in zip((found[0], found[1][0]), (wanted[0], wanted[1][0]), strict=True):
        close(got, np.float64(want))
    for got, want in zip(found[1][1:], wanted[1][1:], strict=True):  # of rounded rows, of x
        distance = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
        assert 1e-5 < distance < 0.02


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("overlap", "scales"), RINGS[::2])
@pytest.mark.parametrize("dtype", TYPES)
def test_stored_kernels_are_rounded_once_for_both_products(dtype, overlap, scales, dim):
    mesh, precision = ring(N), QuantizedMatmul(dtype, ("forward", "dgrad"), scales)
    x, w, dy = random(B * N, L, D), random(D, F, seed=1), random(B * N, L, F, seed=2)
    kernel = P("ring", None) if dim == 0 else P(None, "ring")
    specs = (P("ring"), kernel)
    body = partial(stored_matmul, ring=Ring(("ring",), overlap), dim=dim, precision=precision)
    island = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ring"))
    y, (dx, dw) = both(mesh, specs, island, [x, w], dy)
    first = 0 if scales == "channel" else None
    kernel, scale = rounded(w, dtype, first), np.float64(precision.quantize(w, (0,)).scale)

    def rows(x):  # of every device
        last = -1 if scales == "channel" else None
        return np.concatenate([rounded(block, dtype, last) for block in np.split(x, N)])

    close(y, rows(x) @ kernel)
    if scales == "channel":  # multiplied into dy, because dx is a sum over columns
        dy_rows, kernel = rows(dy * scale), kernel / scale
    else:
        dy_rows = rows(dy)
    close(dx, dy_rows @ kernel.T)
    close(dw, np.einsum("blD,blF->DF", np.float64(x), dy))


@pytest.mark.parametrize("kind", ["gather_rows", "scatter_rows", "chain"])
def test_blocks_travel_as_int8_and_sums_do_not(kind):
    mesh, precision = ring(N), QuantizedMatmul("int8", ("forward", "dgrad"))
    specs, island = island_of(kind, mesh, "bidirectional", extras=0, precision=precision)
    shapes = {
        "gather_rows": [(B, L, D), (D, F), (D, F)],
        "scatter_rows": [(B, L, F), (F, D)],
        "chain": [(B, L, D), (D, F), (D, F), (F, D)],
    }[kind]
    with jax.set_mesh(mesh):
        args = [place(mesh, s, random(*shape)) for s, shape in zip(specs, shapes, strict=True)]

        def loss(*args):
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(island(*args)))

        text = jax.jit(jax.grad(loss, range(len(args)))).lower(*args).compile().as_text()
    sent = re.findall(r"= (\w+)\[([\d,]+)\]\S* collective-permute\(", text)
    block = f"{B},{L // N},{D}"
    hops = N - 1
    assert sent.count(("s8", block)) == hops * (2 if kind == "chain" else 1)
    assert sent.count(("f32", block)) == hops * (2 if kind == "chain" else 1)  # sums
    assert {shape for dtype, shape in sent if shape != block} == {f"{B},{L // N},1"}  # scales


def test_a_quantized_array_is_a_pytree_of_its_values_and_scales():
    rows = QuantizedMatmul("int8", ALL).quantize(jnp.asarray(random(4, 8)), (1,))
    assert rows.shape == (4, 8) and rows.ndim == 2
    assert [leaf.dtype for leaf in jax.tree.leaves(rows)] == [jnp.int8, jnp.float32]
    assert isinstance(jax.tree.map(lambda x: x[:2], rows), Quantized)


def test_the_trained_columns_of_quantized_rows_keep_their_scales():
    rows = QuantizedMatmul("int8", ALL).quantize(jnp.asarray(random(4, 12)), (1,))
    kernels = [jnp.zeros((5, 4)), jnp.zeros((5, 8))]
    found = trained_columns(rows, kernels, 1)
    np.testing.assert_array_equal(found.floats("float32"), rows.floats("float32")[:, 4:])


@pytest.mark.parametrize("side", ["out", "in"])
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("scales", get_args(Scales))
@pytest.mark.costly
def test_products_by_head_equal_plain_ones(side, is_stored, scales):
    precision, heads = QuantizedMatmul("int8", ALL, scales), HeadMatmul(4, side)
    x, w, dy = random(B, L, D), random(D, F, seed=1), random(B, L, F, seed=2)
    kernel = precision.quantize(w, (0,)) if is_stored else w
    arguments = {"forward": (x, kernel), "dgrad": (dy, kernel), "wgrad": (x, dy)}
    for product, operands in arguments.items():
        got, want = (getattr(it, product)(*operands, precision) for it in (heads, PLAIN))
        close(got, np.float64(want))


@pytest.mark.parametrize("policy", ["dots", "offload"])
@pytest.mark.parametrize("dtype", TYPES)
def test_remat_policies_keep_products_in_the_type_of_the_model(dtype, policy):
    precision = QuantizedMatmul(dtype, ("forward", "dgrad"))

    @partial(jax.checkpoint, policy=REMAT_POLICIES[policy])
    def layer(x, w):
        plain = plain_matmul(x, w, precision)
        inlined = matmul(x, w, precision)  # as in the forward rules of rings
        return jnp.sum(jnp.sin(plain) * jnp.cos(inlined))

    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (random(6, 16), random(16, 8, seed=1)))
    kept = [aval for aval, what in saved_residuals(layer, x, w) if "argument" not in what]
    assert [(aval.shape, aval.dtype) for aval in kept] == [((6, 8), jnp.bfloat16)] * 2
