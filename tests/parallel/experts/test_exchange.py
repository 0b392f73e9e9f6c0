"""Where items lie, what hops carry and what does not fit: loops in numpy, on any devices."""

import importlib.util
import math
import re
import subprocess
import sys
from functools import cached_property, lru_cache, partial
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.experts.exchange import (
    Hops,
    Places,
    RaggedPlan,
    exchange_blocks,
    from_places,
    place,
    to_places,
)
from parallel.experts.grouped_matmul import RowLayout

A, E = 12, 4
LAYOUTS = {
    "packed": RowLayout("packed", 1, A, E),
    "packed-roomy": RowLayout("packed", 1, A + 5, E),
    "packed-small": RowLayout("packed", 1, 7, E),
    "blocks": RowLayout.blocks(A, E, 4),
    "blocks-small": RowLayout("blocks", 4, 8, E),
    "uniform": RowLayout("uniform", 1, E * A, E),
    "uniform-small": RowLayout("uniform", 1, E * 2, E),
}
TRACED = []


@partial(jax.jit, static_argnums=1)
def place_compiled(groups_A: jax.Array, layout: RowLayout) -> Places:
    TRACED.append(layout)
    return place(groups_A, layout)


# Sums of at most four float32 numbers of size one, in another order.
ROUNDING = 4 * 2.0**-23


def place_by_loop(groups_A, layout: RowLayout):
    """Items of one group after the other, each into the next row, while there is one."""
    count, rows = len(groups_A), layout.rows
    place_A, item_R, sizes_E = np.full(count, rows), np.full(rows, count), []
    row = 0
    for group in range(layout.groups):
        uniform = layout.kind == "uniform"
        each = rows // layout.groups
        first = row = group * each if uniform else -(-row // layout.block) * layout.block
        for item in np.flatnonzero(np.asarray(groups_A) == group):
            if row < (first + each if uniform else rows):
                place_A[item], item_R[row] = row, item
                row += 1
        sizes_E.append(row - first)
    return place_A, item_R, np.array(sizes_E)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 3, -1, E, -(2**31), 99]), min_size=A, max_size=A))
@example([2] * A)
@example([-1] * A)
@example([E] * A)
@example([0] + [E - 1] * (A - 1))
def test_items_lie_by_group_in_order_and_only_those_beyond_the_room_are_dropped(
    name, groups
) -> None:
    layout = LAYOUTS[name]
    groups_A = np.array(groups, np.int32)
    places = place_compiled(groups_A, layout)
    got = [np.asarray(y) for y in (places.place_A, places.item_R, places.sizes_E)]
    for array, want in zip(got, place_by_loop(groups_A, layout), strict=True):
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, want)
    place_A, item_R, sizes_E = got
    placed, used = place_A < layout.rows, item_R < A
    np.testing.assert_array_equal(item_R[place_A[placed]], np.flatnonzero(placed))
    np.testing.assert_array_equal(place_A[item_R[used]], np.flatnonzero(used))
    # The rows that a grouped matmul takes for those of the groups.
    np.testing.assert_array_equal(layout.members(sizes_E).any(axis=1), used)
    if "small" not in name:
        np.testing.assert_array_equal(placed, (groups_A >= 0) & (groups_A < E))
    assert TRACED.count(layout) == 1, "what is assigned is data, whatever it is"


T, K, D = 5, 3, 4


def assigned(seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arrays of one device, and the groups of its items: some have none."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (T, D), "w": (T, K), "y": (12, D), "g_rows": (12, D), "g_tokens": (T, D)}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return arrays, rng.integers(-1, 3, T * K).astype(np.int32)


ROWS = {"gaps": RowLayout("blocks", 3, 12, 3), "cut": RowLayout("uniform", 1, 12, 3)}


def there(places: Places, arrays) -> tuple[jax.Array, jax.Array]:
    """By index, for autodiff: tokens -> rows, zeros without an item; rows -> weighted sums."""
    item_R, place_A = places.item_R, places.place_A
    x_AD = jnp.repeat(arrays["x"], K, axis=0)
    rows = jnp.where((item_R < T * K)[:, None], x_AD[jnp.minimum(item_R, T * K - 1)], 0)
    y_AD = jnp.where((place_A < 12)[:, None], arrays["y"][jnp.minimum(place_A, 11)], 0)
    return rows, jnp.sum(y_AD.reshape(T, K, D) * arrays["w"][..., None], axis=1)


def here(places: Places, arrays) -> tuple[jax.Array, jax.Array]:
    rows = to_places(arrays["x"], places)
    rows = jnp.where((places.item_R < T * K)[:, None], rows, 0)
    return rows, from_places(arrays["y"], arrays["w"], places)


def moved(way, layout: RowLayout, arrays, groups_A):
    """Rows, sums, their gradients and the places of one device."""
    places = place(groups_A, layout)

    def loss(arrays):
        rows, tokens = way(places, arrays)
        return jnp.sum(rows * arrays["g_rows"]) + jnp.sum(tokens * arrays["g_tokens"])

    return way(places, arrays), jax.grad(loss)(arrays), places


@lru_cache
def mesh_of(**sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


class Island:
    """`body` on row s of every array on device s; row s of the result is device s's answer."""

    def __init__(self, mesh: Mesh, body, *arrays) -> None:
        def local(*rows):
            return jax.tree.map(lambda y: y[None], body(*jax.tree.map(lambda y: y[0], rows)))

        self.mesh, spec = mesh, P(mesh.axis_names)
        self.sharding = NamedSharding(mesh, spec)
        with jax.set_mesh(mesh):
            island = jax.shard_map(local, in_specs=spec, out_specs=spec)
            self.lowered = jax.jit(island).lower(*jax.device_put(arrays, self.sharding))

    @cached_property
    def compiled(self):
        return self.lowered.compile()

    def run(self, *arrays):
        placed = jax.device_put(arrays, self.sharding)
        return jax.tree.map(np.asarray, self.compiled(*placed))

    def collectives(self) -> dict[str, int]:
        text = self.lowered.as_text()
        found = re.findall(r"stablehlo\.(collective_\w+|all_\w+|reduce_scatter)", text)
        return {name: found.count(name) for name in found}


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


@pytest.mark.parametrize("layout", ROWS)
def test_tokens_reach_their_rows_and_come_back_as_plain_indexing_does_on_every_device(
    layout,
) -> None:
    devices = stacked([assigned(seed) for seed in range(4)])
    got = Island(mesh_of(ep=4), partial(moved, here, ROWS[layout]), *devices).run(*devices)
    plain = jax.jit(jax.vmap(partial(moved, there, ROWS[layout])))
    want = jax.tree.map(np.asarray, plain(*devices))
    for a, b in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING * np.abs(b).max())
    _, gradients, places = got
    used = places.item_R < T * K
    placed = (places.place_A < 12).reshape(4, T, K)
    wanted = devices[1].reshape(4, T, K) >= 0
    assert np.any(~used) and np.any(wanted & ~placed), "rows without items, items without rows"
    assert np.all(gradients["y"][~used] == 0) and np.all(gradients["w"][~placed] == 0)
    assert np.all(gradients["w"][placed] != 0)


def pulled(function):
    """(arguments, cotangent) -> value and derivatives, compiled."""

    @jax.jit
    def both(arguments, cotangent):
        value, pull = jax.vjp(function, *arguments)
        return value, pull(cotangent)

    return both


def test_an_item_without_a_place_adds_nothing_whatever_its_weight() -> None:
    """And rows without an item, whatever stands in them."""
    arrays, groups_A = assigned(0)
    places = place_compiled(groups_A, ROWS["cut"])
    placed, used = np.asarray(places.place_A) < 12, np.asarray(places.item_R) < T * K
    broken = {
        **arrays,
        "w": np.where(placed.reshape(T, K), arrays["w"], np.nan),
        "y": np.where(used[:, None], arrays["y"], np.nan),
    }
    solve = jax.jit(partial(moved, here, ROWS["cut"]))
    (got, got_gradient, _), (want, gradient, _) = (solve(y, groups_A) for y in (broken, arrays))
    np.testing.assert_array_equal(got[1], want[1])
    for name in ("x", "w", "y"):
        np.testing.assert_array_equal(got_gradient[name], gradient[name])


def test_a_token_never_receives_the_cotangent_of_a_row_that_is_not_its_own() -> None:
    arrays, groups_A = assigned(1)
    places = place_compiled(groups_A, ROWS["gaps"])
    used = np.asarray(places.item_R) < T * K
    pull = pulled(lambda x: to_places(x, places))
    huge = np.where(used[:, None], arrays["g_rows"], 1e9).astype(np.float32)
    assert not used.all()
    (got,), (want,) = (pull((arrays["x"],), g)[1] for g in (huge, arrays["g_rows"]))
    np.testing.assert_array_equal(got, want)


def test_bfloat16_items_are_added_in_float32() -> None:
    """256 + 1 + 1: every partial sum in bfloat16 would round back to 256."""
    places = place_compiled(np.zeros(3, np.int32), RowLayout("packed", 1, 3, 1))
    column = jnp.array([[256.0], [1.0], [1.0]], jnp.bfloat16)
    ones = jnp.ones((1, 3), jnp.float32)
    three = jnp.full((1, 1), 3, jnp.bfloat16)
    y, (dy, dw) = pulled(lambda y, w: from_places(y, w, places))((column, ones), three)
    assert y.dtype == jnp.bfloat16 and y[0, 0] == 258
    assert dy.dtype == jnp.bfloat16 and np.all(dy == 3)
    assert dw.dtype == jnp.float32 and dw.tolist() == [[768, 3, 3]]
    _, (dx,) = pulled(lambda x: to_places(x, places))((column[:1],), column)
    assert dx.dtype == jnp.bfloat16 and dx[0, 0] == 258


DEVICES = [
    *({"ep": n} for n in (1, 2, 3, 4, 5, 6, 8)),
    {"ep": 2, "sp": 4},
    {"ep": 3, "sp": 2},
]
over_devices = pytest.mark.parametrize(
    "sizes", DEVICES, ids=lambda sizes: "-".join(f"{k}{n}" for k, n in sizes.items())
)


def blocks_and_cotangents(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Block b of device s holds 100 s + b."""
    value = 100 * np.arange(n)[:, None] + np.arange(n)
    blocks = np.tile(value[..., None, None], (1, 1, 2, 3)).astype(np.float32)
    return blocks, np.random.default_rng(n).standard_normal(blocks.shape, np.float32)


def by_hops(axes, blocks, cotangents):
    """Blocks by position: who gets them, whose come, what comes, what comes back, gradients."""
    hops = Hops(axes)
    positions = range(blocks.shape[0])
    targets = hops.targets()

    def arrive(blocks):
        sent = blocks[targets]
        return jnp.stack([hops.send(sent[p], p) for p in positions])

    arrived, pull = jax.vjp(arrive, blocks)
    back = jnp.stack([hops.send(arrived[p], p, back=True) for p in positions])
    return targets, hops.sources(), arrived, back, pull(cotangents)[0]


@over_devices
def test_hops_take_every_block_to_its_target_once_and_back(sizes) -> None:
    n, axes = math.prod(sizes.values()), tuple(sizes)
    blocks, cotangents = blocks_and_cotangents(n)
    island = Island(mesh_of(**sizes), partial(by_hops, axes), blocks, cotangents)
    targets, sources, arrived, back, gradient = island.run(blocks, cotangents)
    me = np.arange(n)
    for toward in (targets, sources):
        np.testing.assert_array_equal(toward[:, 0], me)
        np.testing.assert_array_equal(np.sort(toward, axis=1), np.tile(me, (n, 1)))
    for p in range(n):
        # What goes where arrives from there, at the same position.
        np.testing.assert_array_equal(sources[targets[:, p], p], me)
        np.testing.assert_array_equal(arrived[:, p, 0, 0], 100 * sources[:, p] + me)
        np.testing.assert_array_equal(back[me, p], blocks[me, targets[:, p]])
        np.testing.assert_array_equal(gradient[me, targets[:, p]], cotangents[targets[:, p], p])
    distances = targets ^ me[:, None] if n & (n - 1) == 0 else (targets - me[:, None]) % n
    assert np.all(distances == distances[0]), "a hop has one distance"
    if n & (n - 1) == 0:
        assert np.all(distances[0, 1:-1:2] ^ distances[0, 2:-1:2] == n - 1)
    # There, back and in the derivative: a permute for every block but the own one.
    assert island.collectives() == ({"collective_permute": 3 * (n - 1)} if n > 1 else {})


@over_devices
def test_one_collective_brings_a_block_from_everyone_and_is_its_own_inverse(sizes) -> None:
    def body(blocks, cotangents):
        def exchange(x):
            return exchange_blocks(x, tuple(sizes))

        arrived, pull = jax.vjp(exchange, blocks)
        return arrived, exchange(arrived), pull(cotangents)[0]

    n = math.prod(sizes.values())
    blocks, cotangents = blocks_and_cotangents(n)
    island = Island(mesh_of(**sizes), body, blocks, cotangents)
    arrived, twice, gradient = island.run(blocks, cotangents)
    np.testing.assert_array_equal(arrived, blocks.transpose(1, 0, 2, 3))
    np.testing.assert_array_equal(twice, blocks)
    np.testing.assert_array_equal(gradient, cotangents.transpose(1, 0, 2, 3))
    assert island.collectives() == ({"all_to_all": 3} if n > 1 else {})


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 8])
def test_groups_hold_all_positions_once_the_own_block_first(n) -> None:
    """In order, so that a group is a slice of what is ordered by position."""
    told = {}

    def body(x):
        told.update({count: Hops(("ep",)).groups(count) for count in range(2, 11)})
        return x

    Island(mesh_of(ep=n), body, np.zeros((n, 1), np.float32))
    for count, groups in told.items():
        assert groups[0] == [0] and len(groups) <= count and all(groups)
        assert list(chain(*groups)) == list(range(n))
        lengths = [len(group) for group in groups[1:]]
        assert max(lengths, default=0) == -(-(n - 1) // (count - 1))
    assert len(told) == 9 and len(told[n + 1]) == n


def fits(sizes_nE, room: int):
    """(target, row) of every sorted row of every source; None where it does not fit."""
    n, e = len(sizes_nE), sizes_nE.shape[1] // len(sizes_nE)
    used, rows = [0] * n, [[] for _ in range(n)]
    for source in range(n):
        for group, count in enumerate(sizes_nE[source]):
            for _ in range(count):
                target = group // e
                fit = used[target] < room
                rows[source].append((target, used[target]) if fit else None)
                used[target] += fit
    return rows


def ragged(axes, room: int, native: bool, x_AD, sizes_E, y_RD, g_RD, g_AD):
    plan = RaggedPlan.of(sizes_E, axes, room)

    def move(x, y):
        return plan.send(x, native=native), plan.send_back(y, len(x), native=native)

    out, pull = jax.vjp(move, x_AD, y_RD)
    return out, pull((g_RD, g_AD)), plan.received_nE, plan.groups_R()


def loads(n: int, groups: int, rows: int) -> dict[str, np.ndarray]:
    """Sizes by source and group that sum to at most `rows` at every source."""
    rng = np.random.default_rng(n)
    draws = rng.multinomial(rows, [1 / (groups + 1)] * (groups + 1), size=n)[:, :groups]
    skew = np.zeros((n, groups), int)
    skew[:, 1], skew[-1, -1] = rows - 3, 3
    sparse = np.where(rng.random((n, groups)) < 0.6, 0, draws)
    sparse[n // 2] = 0
    even = np.full((n, groups), rows // groups)
    cases = {"random": draws, "skew": skew, "sparse": sparse, "even": even, "none": 0 * even}
    return {name: sizes.astype(np.int32) for name, sizes in cases.items()}


@pytest.mark.parametrize("roomy", [True, False])
@pytest.mark.parametrize(
    "sizes", [{"ep": 2}, {"ep": 4}, {"ep": 8}, {"ep": 2, "sp": 2}], ids=lambda s: "-".join(s)
)
def test_ragged_rows_lie_by_source_and_group_and_the_last_ones_are_cut(sizes, roomy) -> None:
    n, rows, width = math.prod(sizes.values()), 19, 2
    e, room = 2, n * rows if roomy else 13
    body, island = partial(ragged, tuple(sizes), room, False), None
    rng = np.random.default_rng(room)
    x, g_x = rng.standard_normal((2, n, rows, width), np.float32)
    y, g_y = rng.standard_normal((2, n, room, width), np.float32)
    cuts = 0
    for name, sizes_nE in loads(n, n * e, rows).items():
        arrays = x, sizes_nE, y, g_y, g_x
        island = island or Island(mesh_of(**sizes), body, *arrays)
        (sent, back), (dx, dy), received, groups = island.run(*arrays)
        want = [np.zeros_like(array) for array in (sent, back, dx, dy)]
        want_received, want_groups = np.zeros((n, n, e), int), np.full((n, room), e)
        for source, found in enumerate(fits(sizes_nE, room)):
            group_A = np.repeat(np.arange(n * e), sizes_nE[source])
            cuts += found.count(None)
            for a, there in enumerate(found):
                if there is not None:
                    here = source, a
                    want[0][there], want[1][here] = x[here], y[there]
                    want[2][here], want[3][there] = g_y[there], g_x[here]
                    want_received[there[0], source, group_A[a] % e] += 1
                    want_groups[there] = group_A[a] % e
        for got, array in zip((sent, back, dx, dy), want, strict=True):
            np.testing.assert_array_equal(got, array, err_msg=name)
        np.testing.assert_array_equal(received, want_received, err_msg=name)
        np.testing.assert_array_equal(groups, want_groups, err_msg=name)
        assert groups.dtype == np.int32
    assert (cuts == 0) == roomy


def as_documented(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`lax.ragged_all_to_all` by its documentation; NaN where that forbids the call."""
    swap = partial(jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True)
    everywhere = jax.lax.all_gather(operand, axis_name)
    begin, first, row = swap(input_offsets), swap(output_offsets), jnp.arange(len(output))
    for source in range(len(recv_sizes)):
        here = (row >= first[source]) & (row < first[source] + recv_sizes[source])
        taken = everywhere[source, begin[source] + row - first[source]]
        output = jnp.where(here[:, None], taken, output)
    return jnp.where(jnp.all(swap(recv_sizes) == send_sizes), output, jnp.nan)


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"ep": 2, "sp": 2}], ids="-".join)
def test_the_native_exchange_is_told_to_move_what_its_emulation_moves(sizes, monkeypatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", as_documented)
    n, rows, room = 4, 19, 13
    rng = np.random.default_rng(0)
    x, g_x = rng.standard_normal((2, n, rows, 2), np.float32)
    y, g_y = rng.standard_normal((2, n, room, 2), np.float32)
    cases = loads(n, 2 * n, rows)
    bodies = [partial(ragged, tuple(sizes), room, native) for native in (True, False)]
    arrays = x, cases["even"], y, g_y, g_x
    islands = [Island(mesh_of(**sizes), body, *arrays) for body in bodies]
    for sizes_nE in cases.values():
        native, emulated = (island.run(x, sizes_nE, y, g_y, g_x) for island in islands)
        jax.tree.map(np.testing.assert_array_equal, native, emulated)


# Sizes are data: the compiler cannot know that anything is empty, or fits.
NATIVE = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from parallel.experts.exchange import RaggedPlan
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.devices import absent_devices
mesh = build_mesh(MeshConfig(ep=2, sp=2), absent_devices("v5p:2x2x1"))
def body(x, sizes, g):
    plan = RaggedPlan.of(sizes, ("ep", "sp"), 96)
    def there_and_back(x):
        return plan.send_back(jnp.sin(plan.send(x, native=True)), len(x), native=True)
    y, pull = jax.vjp(there_and_back, x)
    return y, pull(g)[0]
def like(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(("ep", "sp"))))
rows = like((4 * 64, 512), jnp.bfloat16)
with jax.set_mesh(mesh):
    island = jax.shard_map(body, in_specs=P(("ep", "sp")), out_specs=P(("ep", "sp")))
    print(jax.jit(island).lower(rows, like((4 * 8,), jnp.int32), rows).compile().as_text())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs libtpu: pip install -e ".[plan]"'
)
def test_the_native_exchange_and_its_gradient_compile_for_a_tpu() -> None:
    """In a process of its own: libtpu takes the whole process."""
    command = [sys.executable, "-c", NATIVE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    # There, back, and both of them in the derivative; rows are never gathered everywhere.
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", done.stdout)) == 4
    assert not re.search(r"= \S*bf16\S* all-gather", done.stdout)
