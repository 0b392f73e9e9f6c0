"""A hypercube brings every piece to its documented owner, over all links of the cube at once."""

import re

import jax
import numpy as np
import pytest
from rings import equations, per_device, program_per_device, ring

from parallel.linear.hypercube import Hypercube
from parallel.linear.scheduling import scheduling_groups
from parallel.sharding.mesh import ring_order

SIZES = [1, 2, 4, 8]
# The dim along which blocks lie, whether the batch is cut instead, and a block.
CASES = [(-2, False, (2, 5, 2)), (-1, False, (3, 1, 4)), (-2, True, (5, 3, 1))]


def gray(number: int) -> int:
    return number ^ number >> 1


def sides(size: int) -> int:
    return max(1, size.bit_length() - 1)


def cut(block: np.ndarray, size: int, dim: int, cut_batch: bool) -> list[np.ndarray]:
    """Pieces as equal as they can be, cut at the nearest whole row."""
    axis, d = 0 if cut_batch else dim, sides(size)
    return np.split(block, [round(block.shape[axis] * k / d) for k in range(1, d)], axis)


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    """Numbers whose sums are exact in every order."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


def owners(size: int, device: int) -> list[tuple[int, int]]:
    """Return (owner, piece) by position: recursive doubling over the corners, side by side."""
    d, found = sides(size), []
    corner_of = [gray(s) for s in range(size)]
    for hop in range(size):
        for piece in range(d):
            crossed = sum(1 << (piece + j) % d for j in range(d) if hop >> j & 1)
            found.append((corner_of.index(corner_of[device] ^ crossed), piece))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dim", "cut_batch", "shape"), CASES)
def test_pieces_arrive_from_their_owners_and_sums_return_to_them(dim, cut_batch, shape, size):
    walk = Hypercube("ring", "hypercube", cut_batch)
    x = whole_numbers(size, size, *shape)
    others = whole_numbers(9, size, size, *shape)
    wholes = np.stack([np.concatenate(blocks, axis=dim) for blocks in others])

    def body(x: jax.Array, whole: jax.Array) -> list:
        blocks, worked = walk.gather(x, lambda k, block: block * (k + 1), dim)
        pieces = walk.shard(whole, dim)
        cuts = [pieces(k) for k in range(len(blocks))]
        sums = walk.scatter(pieces, lambda piece: 2 * piece, dim=dim)
        both = walk.gather_scatter(x, lambda k, b: b, lambda b: 3 * b, dim=dim)[2]
        placed = [walk.unshard(blocks, dim), walk.unshard(cuts, dim), walk.all_gather(x, dim)]
        return [blocks, worked, cuts, sums, both, placed]

    blocks, worked, cuts, sums, both, placed = per_device(ring(size), body, x, wholes)
    for s in range(size):
        for k, (owner, piece) in enumerate(owners(size, s)):
            want = cut(x[owner], size, dim, cut_batch)[piece]
            np.testing.assert_array_equal(blocks[k][s], want)
            np.testing.assert_array_equal(worked[k][s], want * (k + 1))
            want = cut(others[s, owner], size, dim, cut_batch)[piece]
            np.testing.assert_array_equal(cuts[k][s], want)
        np.testing.assert_array_equal(sums[s], 2 * others[:, s].sum(0))
        np.testing.assert_array_equal(both[s], 3 * size * x[s])
    gathered = np.stack([np.concatenate(x, axis=dim)] * size)
    for got, want in zip(placed, (gathered, wholes, gathered), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [4, 8])
def test_devices_may_be_numbered_otherwise_than_along_the_cube(size) -> None:
    order = tuple(np.random.default_rng(size).permutation(size).tolist())
    walk = Hypercube("ring", "hypercube", order=order)
    x = whole_numbers(size, size, 3, 2)
    wholes = whole_numbers(9, size, 3 * size, 2)

    def body(x: jax.Array, whole: jax.Array) -> list:
        return [walk.all_gather(x, 0), walk.scatter(walk.shard(whole, 0), lambda b: b, dim=0)]

    gathered, sums = per_device(ring(size), body, x, wholes)
    np.testing.assert_array_equal(gathered, [np.concatenate(x)] * size)
    np.testing.assert_array_equal(sums, np.split(wholes.sum(0), size))
    places = [order.index(device) for device in range(size)]
    jaxpr = program_per_device(ring(size), body, x, wholes)
    for e in equations(jaxpr):
        if e.primitive.name == "ppermute":
            steps = {gray(places[a]) ^ gray(places[b]) for a, b in e.params["perm"]}
            assert len(steps) == 1 and steps.pop().bit_count() == 1


def longest_chain(jaxpr) -> int:
    """The most hops of which each waits for the one before."""
    depth: dict = {}
    for e in jaxpr.eqns:
        if e.primitive.name == "optimization_barrier":  # ties hops to computation, moves nothing
            same = zip(e.invars, e.outvars, strict=True)
            depth.update({id(y): depth.get(id(x), 0) for x, y in same})
            continue
        before = max((depth.get(id(v), 0) for v in e.invars), default=0)
        after = before + (e.primitive.name == "ppermute")
        depth.update({id(v): after for v in e.outvars})
    return max(depth.values(), default=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", ["gather", "scatter"])
def test_every_hop_uses_all_links_once_and_few_wait_for_each_other(which, size) -> None:
    walk, d = Hypercube("ring", "hypercube"), sides(size)

    def program(x: jax.Array) -> list | jax.Array:
        if which == "gather":
            return walk.gather(x, lambda k, block: 2 * block, -2)[1]
        return walk.scatter(lambda k: 2 * x, lambda b: b, dim=-2)

    jaxpr = program_per_device(ring(size), program, np.ones((size, 3, 2), np.float32))
    hops = [e.params["perm"] for e in equations(jaxpr) if e.primitive.name == "ppermute"]
    assert len(hops) == d * (size - 1)
    crossed = []
    for pairs in hops:
        steps = {gray(a) ^ gray(b) for a, b in pairs}
        assert len(steps) == 1 and len(pairs) == size
        crossed.append(steps.pop())
    for start in range(0, len(crossed), d):
        assert sorted(crossed[start : start + d]) == [1 << side for side in range(d)]
    assert longest_chain(jaxpr) <= d


@pytest.mark.parametrize(
    ("size", "rows", "message"),
    [
        (6, 4, "needs a power of two of devices, but ring has 6"),
        (8, 2, r"cuts a block of \(2, 4\) into 3 pieces along dim -2: use a size of 3 or more"),
    ],
)
def test_what_is_no_cube_or_cannot_be_cut_is_refused(size, rows, message) -> None:
    walk = Hypercube("ring", "hypercube")
    x = np.ones((size, rows, 4), np.float32)
    with pytest.raises(ValueError, match=message):
        per_device(ring(size), lambda x: walk.gather(x, lambda k, b: b, -2)[0], x)


def test_large_pieces_are_whole_tiles_of_128_rows() -> None:
    walk = Hypercube("ring", "hypercube")
    shapes = []

    def body(x: jax.Array) -> jax.Array:
        shapes[:] = [piece.shape[0] for piece in walk.split_pieces(x, 0)]
        return x

    program_per_device(ring(8), body, np.zeros((8, 1024, 1), np.float32))
    assert shapes == [384, 256, 384]


def groups_of(text: str) -> list[int]:
    return sorted(map(int, re.findall(r'_scheduling_group_id = "?(\d+)', text)))


def test_a_hop_and_the_work_that_hides_it_form_a_group() -> None:
    walk, mesh = Hypercube("ring", "hypercube"), ring(4)
    spec = jax.sharding.PartitionSpec("ring")
    x = jax.device_put(np.ones((4, 4, 2), np.float32), jax.NamedSharding(mesh, spec))

    def body(x: jax.Array) -> jax.Array:
        _, results = walk.gather(x, lambda k, block: block @ block.T, -2)
        return walk.scatter(lambda k: results[k], lambda piece: piece @ piece, dim=-2)

    def text(enabled: bool | None) -> str:
        program = jax.shard_map(
            lambda x: body(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec
        )
        if enabled is None:
            return jax.jit(program).lower(x).as_text()
        with scheduling_groups(enabled):
            return jax.jit(lambda x: program(x)).lower(x).as_text()

    assert groups_of(text(None)) == groups_of(text(False)) == []
    marked = text(True)
    assert marked == text(True)  # numbered from 1 in every program
    # Four hops of the gather, four of the scatter, each with its own number.
    assert set(groups_of(marked)) == set(range(1, 9))
    members: dict[int, list[str]] = {}
    for line in marked.splitlines():
        for number in groups_of(line):
            members.setdefault(number, []).append(line)
    for number, lines in members.items():
        permutes = sum("collective_permute" in line for line in lines)
        assert permutes == (0 if number in (4, 5) else 2)  # nothing follows, or came before
        assert sum("dot_general" in line for line in lines) == 2


@pytest.mark.parametrize("sides", [(2, 2), (2, 2, 2), (1, 2, 1, 2), (2, 2, 2, 1)])
def test_a_ring_through_a_cube_is_a_gray_code(sides) -> None:
    coords = [tuple(c) for c in np.ndindex(*sides)]
    order = ring_order(coords)
    corners = [np.array(coords[device]) for device in order]
    for place, corner in enumerate(corners):
        for side in range(len(corners).bit_length() - 1):
            across = corners[place ^ (2 << side) - 1]
            assert np.abs(across - corner).sum() == 1
