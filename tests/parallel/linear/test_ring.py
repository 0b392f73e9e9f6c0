"""Ring verbs and the `Ring` engine keep their documented orders, on rings of every size."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import equations, per_device, program_per_device, ring

from parallel.linear.ring import (
    Ring,
    add_arriving,
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
)

DIRECTIONS = ("ring", "bidirectional", "split")
SIZES = range(1, 9)


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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_arriving_sums_are_exact_sums_rounded_once(dtype) -> None:
    rng = np.random.default_rng(0)
    magnitudes = 2.0 ** rng.integers(-10, 10, size=(2, 4096))
    a, b = (rng.normal(size=(2, 4096)) * magnitudes).astype(dtype)
    exact = a.astype(np.float64) + b.astype(np.float64)
    np.testing.assert_array_equal(jax.jit(add_arriving)(a, b), exact.astype(dtype))
    casts = jax.make_jaxpr(add_arriving)(a, b).jaxpr.eqns
    assert not [equation for equation in casts if "convert" in equation.primitive.name]


def positions(walk: Ring, size: int) -> list[tuple[int, int]]:
    """What `Ring.positions` says on a ring of that size."""
    found = []

    def body(x: jax.Array) -> jax.Array:
        found[:] = walk.positions()
        return x

    program_per_device(ring(size), body, np.zeros((size, 1), np.float32))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_positions_name_every_piece_of_every_device_once_in_order_of_arrival(
    direction, size
) -> None:
    walk = Ring("ring", direction)
    found = positions(walk, size)
    everything = [(offset, piece) for offset in range(size) for piece in range(walk.num_pieces)]
    assert sorted((offset % size, piece) for offset, piece in found) == everything
    assert found[: walk.num_pieces] == [(0, piece) for piece in range(walk.num_pieces)]
    hops = [abs(offset) for offset, _ in found]
    assert hops == sorted(hops)
    assert hops[-1] == (size // 2 if direction == "bidirectional" else size - 1)


# A ring, the dim along which blocks lie, and a block: odd where it is not halved.
WALKS = [
    (Ring("ring", "ring"), -2, (2, 3, 2)),
    (Ring("ring", "bidirectional"), -2, (2, 3, 2)),
    (Ring("ring", "bidirectional"), 0, (3, 2)),
    (Ring("ring", "split"), -2, (3, 2, 2)),
    (Ring("ring", "split"), -1, (3, 1, 2)),
    (Ring("ring", "split", cut_batch=True), -2, (2, 3, 1)),
    (Ring("ring", "split", fuse_halves=True), -2, (3, 2, 2)),
    (Ring("ring", "split", cut_batch=True, fuse_halves=True), -2, (2, 3, 1)),
]


def pieces(walk: Ring, block: np.ndarray, dim: int) -> list[np.ndarray]:
    return np.split(block, walk.num_pieces, axis=0 if walk.cut_batch else dim)


def called_with(walk: Ring, position: int) -> int:
    """Return the position that the work is attributed to: the first of several joined pieces."""
    return position - position % walk.num_pieces if walk.fuse_halves else position


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    """Numbers whose sums are exact in every order."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("walk", "dim", "shape"), WALKS)
def test_blocks_are_gathered_cut_and_placed_as_positions_say(walk, dim, shape, size) -> None:
    x = whole_numbers(size, size, *shape)
    others = whole_numbers(9, size, size, *shape)
    wholes = np.stack([np.concatenate(blocks, axis=dim) for blocks in others])

    def body(x: jax.Array, whole: jax.Array) -> list:
        blocks, worked = walk.gather(x, lambda k, block: block * (k + 1), dim)
        cut = [walk.shard(whole, dim)(k) for k in range(len(blocks))]
        return [blocks, worked, cut, walk.unshard(blocks, dim), walk.unshard(cut, dim)]

    blocks, worked, cut, placed, back = per_device(ring(size), body, x, wholes)
    for k, (offset, piece) in enumerate(positions(walk, size)):
        for s in range(size):
            block = pieces(walk, x[(s - offset) % size], dim)[piece]
            np.testing.assert_array_equal(blocks[k][s], block)
            np.testing.assert_array_equal(worked[k][s], block * (called_with(walk, k) + 1))
            block = pieces(walk, others[s, (s - offset) % size], dim)[piece]
            np.testing.assert_array_equal(cut[k][s], block)
    np.testing.assert_array_equal(placed, [np.concatenate(x, axis=dim)] * size)
    np.testing.assert_array_equal(back, wholes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("walk", "dim", "shape"), WALKS)
def test_a_sum_ends_where_its_blocks_came_from(walk, dim, shape, size) -> None:
    owned = positions(walk, size)
    x = whole_numbers(size, size, *shape)
    parts = whole_numbers(9, size, len(owned), *pieces(walk, x[0], dim)[0].shape)
    weights = np.arange(1, size + 1, dtype=np.float32)

    def body(x: jax.Array, parts: jax.Array, weight: jax.Array) -> list:
        def work(k: int, block: jax.Array) -> jax.Array:
            return block + k

        def part(piece: jax.Array) -> jax.Array:
            return weight * piece

        both = [{"dim": dim, "hide_last_hop": hide} for hide in (True, False)]
        return [
            [walk.scatter(lambda k: parts[k], part, **how) for how in both],
            [walk.gather_scatter(x, work, part, **how) for how in both],
            walk.gather(x, work, dim),
        ]

    sums, chains, gathered = per_device(ring(size), body, x, parts, weights)
    sum_of, chain_of = (np.zeros((size, walk.num_pieces, *parts.shape[2:])) for _ in "sc")
    for s in range(size):
        for k, (offset, piece) in enumerate(owned):
            owner = (s - offset) % size
            sum_of[owner, piece] += weights[s] * parts[s, k]
            worked = pieces(walk, x[owner], dim)[piece] + called_with(walk, k)
            chain_of[owner, piece] += weights[s] * worked
    half_dim = 0 if walk.cut_batch else dim
    want, want_chain = (
        [np.concatenate(list(halves), axis=half_dim) for halves in y] for y in (sum_of, chain_of)
    )
    for total, (blocks, results, y) in zip(sums, chains, strict=True):
        np.testing.assert_array_equal(total, want)
        np.testing.assert_array_equal(y, want_chain)
        for got, same in zip((blocks, results), gathered, strict=True):
            np.testing.assert_array_equal(np.stack(got), np.stack(same))


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(("walk", "dim", "shape"), WALKS)
def test_devices_may_be_numbered_otherwise_than_along_the_ring(walk, dim, shape, size) -> None:
    order = tuple(np.random.default_rng(size).permutation(size).tolist())
    walk = replace(walk, order=order)
    x = whole_numbers(size, size, *shape)
    others = whole_numbers(9, size, size, *shape)
    wholes = np.stack([np.concatenate(blocks, axis=dim) for blocks in others])

    def body(x: jax.Array, whole: jax.Array) -> list:
        blocks = walk.gather(x, lambda k, block: block, dim)[0]
        cut = [walk.shard(whole, dim)(k) for k in range(len(blocks))]
        pieces = walk.shard(whole, dim)
        total = walk.scatter(pieces, lambda block: block, dim=dim)
        x_after, same = walk.scatter_before(x, pieces, lambda block: block, dim=dim)
        gathered = [walk.unshard(blocks, dim), walk.all_gather(x, dim)]
        return [gathered, walk.unshard(cut, dim), total, same, x_after]

    gathered, back, total, same, x_after = per_device(ring(size), body, x, wholes)
    for placed in gathered:
        np.testing.assert_array_equal(placed, [np.concatenate(x, axis=dim)] * size)
    np.testing.assert_array_equal(same, total)
    np.testing.assert_array_equal(x_after, x)
    np.testing.assert_array_equal(back, wholes)
    np.testing.assert_array_equal(total, others.sum(0))
    jaxpr = program_per_device(ring(size), body, x, wholes)
    hops = [e.params["perm"] for e in equations(jaxpr) if e.primitive.name == "ppermute"]
    places = [(order.index(a), order.index(b)) for pairs in hops for a, b in pairs]
    assert all((b - a) % size in (1, size - 1) for a, b in places)


def longest_chain(jaxpr) -> int:
    """The most hops of which each waits for the one before."""
    depth: dict = {}
    for equation in jaxpr.eqns:
        before = max((depth.get(id(v), 0) for v in equation.invars), default=0)
        after = before + (equation.primitive.name == "ppermute")
        depth.update({id(v): after for v in equation.outvars})
    return max(depth.values(), default=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_hop_goes_to_a_neighbour_and_few_wait_for_each_other(direction, size) -> None:
    walk = Ring("ring", direction)
    longest = size // 2 if direction == "bidirectional" else size - 1
    order: list[int] = []

    def note(k: int, block: jax.Array) -> jax.Array:
        order.append(k)
        return 2 * block

    def program(x: jax.Array, which: str) -> jax.Array:
        piece = x[:, : 2 // walk.num_pieces]
        if which == "gather":
            return walk.gather(x, note, -2)[1]
        if which == "scatter":
            return walk.scatter(lambda k: note(k, piece), lambda piece: piece, dim=-2)
        return walk.gather_scatter(x, note, lambda y: 3 * y, dim=-2)

    x = np.ones((size, 2, 2, 2), np.float32)
    for which, rings in (("gather", 1), ("scatter", 1), ("gather_scatter", 2)):
        order.clear()
        jaxpr = program_per_device(ring(size), partial(program, which=which), x)
        hops = [e.params["perm"] for e in equations(jaxpr) if e.primitive.name == "ppermute"]
        assert len(hops) == rings * walk.num_pieces * (size - 1)
        assert all((b - a) % size in (1, size - 1) for pairs in hops for a, b in pairs)
        assert longest_chain(jaxpr) <= rings * longest
        # Every piece is worked on, or added, once; what a sum meets last is the device's own.
        assert sorted(order) == list(range(walk.num_pieces * size))
        if which == "scatter":
            assert set(order[-walk.num_pieces :]) == set(range(walk.num_pieces))
        else:
            assert order == sorted(order)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_block_is_used_only_when_the_work_before_it_is_done(direction) -> None:
    walk = Ring("ring", direction)
    x = np.ones((6, 2, 2, 2), np.float32)
    jaxpr = program_per_device(
        ring(6), lambda x: walk.gather(x, lambda k, block: jnp.sin(block), -2)[1], x
    )
    made_by = {id(v): e for e in jaxpr.eqns for v in e.outvars}
    sources = [made_by[id(e.invars[0])] for e in jaxpr.eqns if e.primitive.name == "sin"]
    pins = [e for e in sources if e.primitive.name == "optimization_barrier"]
    assert len(pins) == len(sources) - walk.num_pieces  # all but the device's own
    assert all("sin" in {made_by[id(v)].primitive.name for v in e.invars} for e in pins)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_split_refuses_a_block_that_has_no_halves(size) -> None:
    walk = Ring("ring", "split")
    x = np.ones((size, 3, 4), np.float32)
    for body in (
        lambda x: walk.gather(x, lambda k, block: block, -2)[0],
        lambda x: walk.shard(jnp.concatenate([x] * size, axis=-2), -2)(0),
    ):
        with pytest.raises(ValueError, match=r"overlap split .* use an even size there"):
            per_device(ring(size), body, x)
