"""Ring matmuls equal their plain twins and numpy, in values, gradients and structure."""

import math
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rings import collectives, equations, place, primitives, ring

from parallel.linear.collective_chain import gather_matmul_scatter
from parallel.linear.collective_matmul import (
    gather_matmul,
    gather_matmul_blocks,
    matmul_scatter,
)
from parallel.linear.local_matmul import CHAIN_WGRAD_BLOCKS, WGRAD_BLOCKS

OVERLAPS = ("none", "ring", "bidirectional", "split")
RINGS = OVERLAPS[1:]
DIMS = {"rows": -2, "features": -1}
COLUMNS, ROWS, VECTOR = P(None, "ring"), P("ring", None), P("ring")


def activations(dim: int, rank: int = 3) -> P:
    """The spec of activations that lie on the ring along this dim."""
    entries: list[str | None] = [None] * rank
    entries[dim] = "ring"
    return P(*entries)


def island_of(
    kind: str, mesh: Mesh, overlap: str, *, rank: int = 3, kernels: int = 2, extras: int = 1, **opts
):
    """One of KINDS as an island: the specs of its arguments, and the function."""
    verb, _, dim = kind.partition("_")
    options = {"axis_name": "ring", "overlap": overlap, **opts}
    columns = (COLUMNS,) * kernels
    if verb == "scatter":
        specs, outs = (activations(-1, rank), ROWS), activations(DIMS[dim], rank)
        body = partial(matmul_scatter, dim=DIMS[dim], **options)
    elif verb == "gather":
        specs, outs = (activations(DIMS[dim], rank), *columns), (activations(-1, rank),) * kernels
        body = partial(_gather, dim=DIMS[dim], **options)
    else:
        outs = activations(-2, rank)
        specs = (outs, *columns, *[VECTOR] * extras, ROWS)
        body = partial(_chain, kernels=kernels, **options)
    return specs, jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=outs)


def _gather(x, *kernels, **options):
    return gather_matmul(x, kernels, **options)


def _chain(x, *arrays, kernels, **options):
    columns, extras, last = arrays[:kernels], arrays[kernels:-1], arrays[-1]
    return gather_matmul_scatter(x, columns, extras, last, function=mix, **options)


def mix(first: jax.Array, *others: jax.Array) -> jax.Array:
    """Curved in every argument, and each of them counts in another way."""
    y = jnp.tanh(first)
    for index, other in enumerate(others):
        y = y * (1.5 + jnp.sin(other + index))
    return y


KINDS = ("gather_rows", "gather_features", "scatter_rows", "scatter_features", "chain")


def pulled(island, args: tuple, cotangent):
    """The value and the gradients of every argument."""
    y, pull = jax.vjp(island, *args)
    return y, pull(cotangent)


def both(mesh: Mesh, specs: tuple, island, arrays: list, cotangent):
    """`pulled`, compiled as a whole: op by op, every hop would be a compilation of its own."""
    with jax.set_mesh(mesh):
        args = tuple(place(mesh, spec, a) for spec, a in zip(specs, arrays, strict=True))
        outs = jax.tree.map(jax.typeof, jax.eval_shape(island, *args))
        ct = jax.tree.map(lambda y, c: place(mesh, y.sharding.spec, c), outs, cotangent)
        return jax.jit(partial(pulled, island))(args, ct)


def close(got: jax.Array, want: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)


def unit(overlap: str, kind: str, lead: tuple[int, ...], size: int) -> tuple[int, int]:
    """By what rows and features of a device must divide: split halves an even batch, or those.

    A hypercube cuts a large batch, or at least so many rows or features.
    """
    if overlap == "hypercube":
        sides = max(1, size.bit_length() - 1)
        cuts_batch = bool(lead) and lead[0] >= sides
        return (1, sides) if kind.endswith("features") else (1 if cuts_batch else sides, 1)
    if overlap != "split":
        return 1, 1
    halves_batch = bool(lead) and lead[0] % 2 == 0
    return (1, 2) if kind.endswith("features") else (1 if halves_batch else 2, 1)


def plain(kind: str, kernels: int = 2):
    """`island_of` on one device."""
    if kind == "chain":
        return partial(plain_chain, kernels=kernels)
    if kind.startswith("gather"):
        return lambda x, *kernels: tuple(jnp.matmul(x, w) for w in kernels)
    return jnp.matmul


def plain_chain(*arrays: jax.Array, kernels: int) -> jax.Array:
    x, *more, last = arrays
    products = [jnp.matmul(x, w) for w in more[:kernels]]
    return jnp.matmul(mix(*products, *more[kernels:]), last)


def shapes_of(
    kind: str, lead: tuple[int, ...], R: int, D: int, widths: list[int], extras: int
) -> list[tuple[int, ...]]:
    if kind.startswith("scatter"):
        return [(*lead, R, widths[0]), (widths[0], D)]
    if kind.startswith("gather"):
        return [(*lead, R, D), *((D, width) for width in widths)]
    F = widths[0]
    return [(*lead, R, D), *((D, F) for _ in widths), *((F,) for _ in range(extras)), (F, D)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [*OVERLAPS, "hypercube"])
@settings(deadline=None, max_examples=6, derandomize=True)
@given(
    size=st.integers(1, 8),
    lead=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    rows=st.integers(1, 3),
    features=st.integers(1, 3),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    extras=st.integers(0, 2),
)
@example(size=3, lead=(2,), rows=1, features=1, widths=[1, 3, 1], extras=0)
@pytest.mark.costly
def test_rings_equal_the_matmuls_of_one_device(
    overlap, kind, size, lead, rows, features, widths, extras
) -> None:
    if overlap == "hypercube":
        size = 1 << size % 4
    rng, mesh, units = np.random.default_rng(size), ring(size), unit(overlap, kind, lead, size)
    R, widths = rows * units[0] * size, [width * size for width in widths]
    D = features if kind == "chain" else features * units[1] * size
    shapes = shapes_of(kind, lead, R, D, widths, extras)
    scale = 0.5 if kind == "chain" else 1.0
    arrays = [rng.normal(scale=scale, size=shape).astype(np.float32) for shape in shapes]
    specs, island = island_of(
        kind, mesh, overlap, rank=len(lead) + 2, kernels=len(widths), extras=extras
    )
    on_one = jax.jit(partial(pulled, plain(kind, len(widths))))
    g = jax.tree.map(
        lambda y: rng.normal(size=y.shape).astype(np.float32),
        jax.eval_shape(plain(kind, len(widths)), *arrays),
    )
    want = on_one(tuple(arrays), g)
    jax.tree.map(close, both(mesh, specs, island, arrays, g), want)
    if overlap == "bidirectional":  # the last hop of a sum differs if no derivative follows
        with jax.set_mesh(mesh):
            args = [place(mesh, spec, a) for spec, a in zip(specs, arrays, strict=True)]
            jax.tree.map(close, jax.jit(island)(*args), want[0])


def arguments(kind: str, mesh: Mesh, specs: tuple, seed: int = 0) -> list[np.ndarray]:
    """Arrays for `island_of`, of which only travelling blocks have D or D/n features."""
    n = mesh.size
    R, D, F = 4 * n, 6 * n, 2 * n
    column = kind.startswith(("gather", "chain"))
    shapes = {COLUMNS: (D, F), ROWS: (F, D), VECTOR: (F,)}
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=shapes.get(s, (2, R, D if column else F))) for s in specs]
    return [a.astype(np.float32) / (1 if a.ndim == 3 else 4) for a in arrays]


def placed(kind: str, mesh: Mesh, specs: tuple) -> list[jax.Array]:
    return [place(mesh, s, a) for s, a in zip(specs, arguments(kind, mesh, specs), strict=True)]


def gradients(island, args: list):
    """The gradients of every argument of a curved loss."""

    def loss(args: list) -> jax.Array:
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(island(*args)))

    return jax.grad(loss)(args)


COLLECTIVES = {
    "all_gather",
    "all_gather_invariant",
    "all_gather_reduced",
    "all_to_all",
    "pmax",
    "psum",
    "psum_invariant",
    "reduce_scatter",
    "unreduced_reduce_scatter",
}
GATHERS_AND_SCATTERS = {kind: 2 if kind == "chain" else 1 for kind in KINDS}
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def hops_of(kind: str, size: int, overlap: str) -> int:
    """Of one pass: n - 1 blocks per gather and per scatter, in halves if they are split."""
    return GATHERS_AND_SCATTERS[kind] * (size - 1) * (2 if overlap == "split" else 1)


@cache
def counted(kind: str, size: int, overlap: str) -> tuple[Counter[str], Counter[str]]:
    """The primitives of the value, and of the gradients."""
    mesh = ring(size)
    specs, island = island_of(kind, mesh, overlap)
    with jax.set_mesh(mesh):
        args = placed(kind, mesh, specs)
        return primitives(island, *args), primitives(partial(gradients, island), args)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_hops_and_its_twin_calls_one_collective(kind, overlap, size) -> None:
    for passes, counts in enumerate(counted(kind, size, overlap), start=1):
        called = {name for name in counts if name in COLLECTIVES}
        if overlap == "none":
            calls = sum(counts[name] for name in called)
            assert calls == passes * GATHERS_AND_SCATTERS[kind] and not counts["ppermute"]
            assert called <= {"all_gather", "reduce_scatter"}
        else:
            assert counts["ppermute"] == passes * hops_of(kind, size, overlap)
            assert not called


@pytest.mark.parametrize("overlap", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_program_permutes_and_calls_no_other_collective(kind, overlap) -> None:
    mesh = ring(3)
    specs, island = island_of(kind, mesh, overlap)
    with jax.set_mesh(mesh):
        args = placed(kind, mesh, specs)
        text = jax.jit(partial(gradients, island)).lower(args).compile().as_text()
    assert collectives(text) == {"collective-permute": 2 * hops_of(kind, 3, overlap)}


@pytest.mark.parametrize("overlap", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_gathered_blocks_are_residuals_only_without_remat(kind, overlap) -> None:
    size = 4
    mesh = ring(size)
    specs, island = island_of(kind, mesh, overlap)
    with jax.set_mesh(mesh):
        args = placed(kind, mesh, specs)

        def gathered_elements(island) -> int:
            saved = jax.eval_shape(lambda *args: jax.vjp(island, *args)[1], *args)
            width = args[0].shape[-1]
            widths = {width, width // size, width // size // 2}
            leaves = [leaf for leaf in jax.tree.leaves(saved) if leaf.ndim == 3]
            return sum(leaf.size for leaf in leaves if leaf.shape[-1] in widths)

        def hops(island) -> int:
            return primitives(partial(gradients, island), args)["ppermute"]

        gathers = not kind.startswith("scatter")
        assert gathered_elements(island) == args[0].size * (size if gathers else 1)
        again = hops_of("gather_rows", size, overlap) if gathers else 0
        for policy in POLICIES.values():
            remat = jax.checkpoint(island, policy=policy, prevent_cse=False)
            assert gathered_elements(remat) == args[0].size
            assert hops(remat) == hops(island) + again


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("overlap", RINGS)
def test_a_chain_never_puts_blocks_in_natural_order(overlap, size) -> None:
    for passes, counts in enumerate(counted("chain", size, overlap), start=1):
        # Only natural order depends on a device's position on the ring. It is not requested.
        for name in ("axis_index", "dynamic_slice", "dynamic_update_slice", "gather", "scatter"):
            assert not counts[name], name
        # Only the halves of a device's own result meet again.
        assert counts["concatenate"] == (passes if overlap == "split" else 0)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("overlap", RINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_gather_is_pinned_hop_by_hop(kind, overlap, size) -> None:
    rounds = 1 + (size // 2 if overlap == "bidirectional" else size - 1)
    forward, backward = counted(kind, size, overlap)
    # Backwards a scatter gathers: every kind gathers once, and the chain twice.
    assert forward["optimization_barrier"] == (0 if kind.startswith("scatter") else rounds)
    assert backward["optimization_barrier"] == GATHERS_AND_SCATTERS[kind] * rounds


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_matmul_has_the_precision_that_was_asked_for(kind, overlap) -> None:
    mesh = ring(3)
    specs, island = island_of(kind, mesh, overlap, precision=lax.Precision.HIGHEST)
    with jax.set_mesh(mesh):
        args = placed(kind, mesh, specs)
        jaxpr = jax.make_jaxpr(partial(gradients, island))(args).jaxpr
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert {e.params["precision"] for e in products} == {(lax.Precision.HIGHEST,) * 2}
    assert len(products) >= 3


@pytest.mark.parametrize("overlap", RINGS)
@pytest.mark.parametrize("kind", DIMS)
def test_an_output_that_nobody_uses_leaves_its_kernel_without_gradient(kind, overlap) -> None:
    mesh = ring(4)
    specs, island = island_of(f"gather_{kind}", mesh, overlap, kernels=3)
    with jax.set_mesh(mesh):
        x = place(mesh, specs[0], np.ones((2, 8, 8), np.float32))
        kernels = [place(mesh, COLUMNS, np.ones((8, 4), np.float32)) for _ in range(3)]
        dkernels = jax.jit(jax.grad(lambda ws: jnp.sum(island(x, *ws)[1])))(kernels)
    assert [float(jnp.sum(dw)) for dw in dkernels] == [0, 2 * 8 * 8 * 4, 0]


def growth(parts: int) -> float:
    """Bound the error of a sum of rounded parts that is rounded again after every addition.

    In roundings of the result, all of them independent: the parts together make one, and a sum of
    k of the n parts has k / n of the variance of the result.
    """
    return math.sqrt(1 + sum(k / parts for k in range(2, parts + 1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.costly
def test_bfloat16_rounds_no_more_than_its_travelling_sums_explain(kind) -> None:
    size = 8
    errors = bfloat16_errors(kind, ring(size))
    # A sum that travels is rounded at every stop; the twin's parts are, and their sum (in float32)
    # at the end. A kernel's derivative over rows is a sum of groups of blocks; the twin's is whole.
    travels = growth(size) / math.sqrt(2)
    for overlap in RINGS:
        positions = size * (2 if overlap == "split" else 1)
        groups, chain_groups = (
            growth(math.ceil(positions / blocks)) for blocks in (WGRAD_BLOCKS, CHAIN_WGRAD_BLOCKS)
        )
        bounds = {
            "gather_rows": (1, 1, travels, groups, groups),
            "gather_features": (1, 1, travels, 1, 1),
            "scatter_rows": (travels, 1, groups),
            "scatter_features": (travels, 1, 1),
            "chain": (travels, travels, chain_groups, chain_groups, travels, chain_groups),
        }[kind]
        for error, twin, bound in zip(errors[overlap], errors["none"], bounds, strict=True):
            # A rounding is relative to the power of two below: up to 20% off for a given sum.
            assert error <= 1.2 * bound * twin


def bfloat16_errors(kind: str, mesh: Mesh) -> dict[str, list[float]]:
    """By overlap, of the outputs and all gradients: the relative distance from float32."""
    specs, island = island_of(kind, mesh, "none")
    short = [a.astype(jnp.bfloat16) for a in arguments(kind, mesh, specs)]
    g = jax.tree.map(
        lambda y: np.random.default_rng(1).normal(size=y.shape).astype(jnp.bfloat16),
        jax.eval_shape(plain(kind), *short),
    )
    exact = jax.tree.map(np.float32, (tuple(short), g))
    want = jax.tree.leaves(jax.jit(partial(pulled, plain(kind)))(*exact))
    errors = {}
    for overlap in OVERLAPS:
        specs, island = island_of(kind, mesh, overlap)
        got = both(mesh, specs, island, short, g)
        assert all(y.dtype == jnp.bfloat16 for y in jax.tree.leaves(got))
        pairs = zip(map(np.float32, jax.tree.leaves(got)), want, strict=True)
        errors[overlap] = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
    return errors


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_partial_sums_over_features_are_added_in_float32(overlap) -> None:
    # 1 + 2**-9 is not a bfloat16: added pairwise in bfloat16 the small parts would be lost.
    size = 8
    mesh = ring(size)
    unit = 2 if overlap == "split" else 1
    small = np.full((1, 1, size * unit), 2.0**-9 / unit, jnp.bfloat16)
    small[..., :unit] = 1 / unit
    ones = np.ones((size * unit, size * unit), jnp.bfloat16)
    want = np.float32(jnp.bfloat16(1 + 7 * 2.0**-9))
    specs, island = island_of("gather_features", mesh, overlap, kernels=1)
    (out,), _ = both(mesh, specs, island, [small, ones], (small,))
    np.testing.assert_array_equal(np.float32(out), want)
    # The derivative of a scatter gathers.
    specs, island = island_of("scatter_features", mesh, overlap)
    _, (dx, _) = both(mesh, specs, island, [small, ones], small)
    np.testing.assert_array_equal(np.float32(dx), want)


@pytest.mark.parametrize("kind", KINDS)
def test_split_refuses_what_has_no_halves(kind) -> None:
    mesh = ring(2)
    specs, island = island_of(kind, mesh, "split")
    x = np.ones((3, 2, 2), np.float32)
    shapes = {COLUMNS: (2, 2), ROWS: (2, 2), VECTOR: (2,)}
    with jax.set_mesh(mesh):
        args = [place(mesh, s, np.ones(shapes[s]) if s in shapes else x) for s in specs]
        with pytest.raises(ValueError, match=r"overlap split .* use an even size there"):
            jax.eval_shape(island, *args)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("kind", DIMS)
def test_blocks_and_their_pullback_equal_a_matmul(kind, overlap) -> None:
    x, w, dy = (np.random.default_rng(0).normal(size=s) for s in [(8, 16), (16, 12), (8, 12)])
    mesh, x_spec = ring(4), activations(DIMS[kind], 2)

    def body(x, w, dy):
        product = gather_matmul_blocks(
            x, w, jnp.negative, axis_name="ring", dim=DIMS[kind], overlap=overlap
        )
        return product.unshard(product.results), *product.pullback(product.shard(dy))

    specs = (x_spec, COLUMNS, COLUMNS)
    with jax.set_mesh(mesh):
        args = [
            place(mesh, s, y.astype(np.float32)) for s, y in zip(specs, (x, w, dy), strict=True)
        ]
        outs = (COLUMNS, x_spec, COLUMNS)
        got = jax.jit(jax.shard_map(body, in_specs=specs, out_specs=outs))(*args)
    for y, want in zip(got, (-x @ w, dy @ w.T, x.T @ dy), strict=True):
        close(y, want)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("kind", DIMS)
def test_a_result_that_does_not_divide_is_refused(kind, overlap) -> None:
    mesh = ring(2)
    specs, island = island_of(f"scatter_{kind}", mesh, overlap)
    with jax.set_mesh(mesh):
        x, w = (place(mesh, s, np.ones(a)) for s, a in zip(specs, [(2, 5, 2), (2, 5)], strict=True))
        with pytest.raises(ValueError, match="divisible"):
            jax.eval_shape(island, x, w)


def test_an_unknown_overlap_is_refused() -> None:
    one = jnp.ones((1, 1))
    ring = {"axis_name": "ring", "overlap": "maybe"}
    for call in (
        lambda: gather_matmul(one, [], dim=-1, **ring),
        lambda: matmul_scatter(one, one, dim=-2, **ring),
        lambda: gather_matmul_scatter(one, [one], [], one, function=jnp.sin, **ring),
    ):
        with pytest.raises(ValueError, match="'maybe': use none, ring, bidirectional, split"):
            call()
