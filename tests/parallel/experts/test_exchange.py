"""Exchanges between devices equal loops in numpy: values, gradients, dropped rows."""

import importlib.util
import math
import re
import subprocess
import sys
from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from islands import Island, mesh_of

from parallel.experts.exchange import PermuteAllToAll, RaggedAllToAll, all_to_all

DEVICES = [
    *({"ep": n} for n in (1, 2, 3, 4, 5, 6, 8)),
    {"ep": 2, "sp": 4},
    {"ep": 3, "sp": 2},
]
over_devices = pytest.mark.parametrize(
    "sizes", DEVICES, ids=lambda sizes: "-".join(f"{k}{n}" for k, n in sizes.items())
)


def blocks_and_cotangents(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks and cotangents; block b of device s holds 100 s + b."""
    value = 100 * np.arange(n)[:, None] + np.arange(n)
    blocks = np.tile(value[..., None, None], (1, 1, 2, 3)).astype(np.float32)
    return blocks, np.random.default_rng(n).standard_normal(blocks.shape, np.float32)


def by_permutes(axes, blocks, cotangents):
    """Return by position: targets, sources, blocks received, blocks sent back, gradients."""
    positions = range(blocks.shape[0])
    farthest_first = tuple(reversed(positions[1:]))
    exchange = PermuteAllToAll(axes, farthest_first)
    targets = exchange.targets()

    def arrive(blocks):
        sent = blocks[targets]
        return jnp.stack([exchange.send(sent[p], p) for p in positions])

    arrived, pull = jax.vjp(arrive, blocks)
    back = jnp.stack([exchange.send(arrived[p], p, back=True) for p in positions])
    return targets, exchange.sources(), arrived, back, pull(cotangents)[0]


@pytest.mark.parametrize("distances", [(1, 2), (1, 2, 2), (0, 1, 2)], ids=str)
def test_an_exchange_needs_every_distance_once(distances) -> None:
    exchange = PermuteAllToAll(("ep",), distances)
    with pytest.raises(AssertionError, match=re.escape(str(distances))):
        Island(mesh_of(ep=4), lambda x: x[exchange.targets()], np.zeros((4, 4)))


@over_devices
def test_permutes_send_every_block_to_its_target_once_and_back(sizes) -> None:
    n, axes = math.prod(sizes.values()), tuple(sizes)
    blocks, cotangents = blocks_and_cotangents(n)
    island = Island(mesh_of(**sizes), partial(by_permutes, axes), blocks, cotangents)
    targets, sources, arrived, back, gradient = island.run(blocks, cotangents)
    me = np.arange(n)
    for toward in (targets, sources):
        np.testing.assert_array_equal(toward[:, 0], me)
        np.testing.assert_array_equal(np.sort(toward, axis=1), np.tile(me, (n, 1)))
    for p in range(n):
        # A block that device s sends at a position arrives from s at the same position.
        np.testing.assert_array_equal(sources[targets[:, p], p], me)
        np.testing.assert_array_equal(arrived[:, p, 0, 0], 100 * sources[:, p] + me)
        np.testing.assert_array_equal(back[me, p], blocks[me, targets[:, p]])
        np.testing.assert_array_equal(gradient[me, targets[:, p]], cotangents[targets[:, p], p])
    distances = targets ^ me[:, None] if n & (n - 1) == 0 else (targets - me[:, None]) % n
    np.testing.assert_array_equal(distances, [[0, *range(n - 1, 0, -1)]] * n)
    # Forth, back and in the gradient: one permute for every block but the own one.
    assert island.collectives() == ({"collective_permute": 3 * (n - 1)} if n > 1 else {})


@over_devices
def test_all_to_all_receives_a_block_from_every_device_and_is_its_own_inverse(sizes) -> None:
    def body(blocks, cotangents):
        def exchange(x):
            return all_to_all(x, tuple(sizes))

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
def test_chunks_hold_all_positions_once_and_in_order_the_own_block_first(n) -> None:
    chunks_of = {}

    def body(x):
        exchange = PermuteAllToAll(("ep",))
        chunks_of.update({count: exchange.chunks(count) for count in range(2, 11)})
        return x

    Island(mesh_of(ep=n), body, np.zeros((n, 1), np.float32))
    for count, chunks in chunks_of.items():
        assert chunks[0] == [0] and len(chunks) <= count and all(chunks)
        assert list(chain(*chunks)) == list(range(n))
        lengths = [len(chunk) for chunk in chunks[1:]]
        assert max(lengths, default=0) == -(-(n - 1) // (count - 1))
    assert len(chunks_of) == 9 and len(chunks_of[n + 1]) == n


def received_rows(sizes_nE, room: int):
    """Return (target, row) of every sorted row of every source; None for a dropped row."""
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
    exchange = RaggedAllToAll.create(sizes_E, axes, rows=room, native=native)

    def move(x, y):
        return exchange.send(x), exchange.send_back(y, len(x))

    out, pull = jax.vjp(move, x_AD, y_RD)
    return out, pull((g_RD, g_AD)), exchange.received_nE, exchange.groups_R()


def loads(n: int, groups: int, rows: int) -> dict[str, np.ndarray]:
    """Return sizes by source and group that sum to at most `rows` at every source."""
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
def test_ragged_rows_are_ordered_by_source_and_group_and_the_last_are_dropped(sizes, roomy) -> None:
    n, rows, width = math.prod(sizes.values()), 19, 2
    e, room = 2, n * rows if roomy else 13
    body, island = partial(ragged, tuple(sizes), room, False), None
    rng = np.random.default_rng(room)
    x, g_x = rng.standard_normal((2, n, rows, width), np.float32)
    y, g_y = rng.standard_normal((2, n, room, width), np.float32)
    dropped = 0
    for name, sizes_nE in loads(n, n * e, rows).items():
        arrays = x, sizes_nE, y, g_y, g_x
        island = island or Island(mesh_of(**sizes), body, *arrays)
        (sent, back), (dx, dy), received, groups = island.run(*arrays)
        want = [np.zeros_like(array) for array in (sent, back, dx, dy)]
        want_received, want_groups = np.zeros((n, n, e), int), np.full((n, room), e)
        for source, found in enumerate(received_rows(sizes_nE, room)):
            group_A = np.repeat(np.arange(n * e), sizes_nE[source])
            dropped += found.count(None)
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
    assert (dropped == 0) == roomy


def as_documented(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Emulate `lax.ragged_all_to_all` by its documentation; NaN for an invalid call."""
    swap = partial(jax.lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0, tiled=True)
    gathered = jax.lax.all_gather(operand, axis_name)
    begin, first, row = swap(input_offsets), swap(output_offsets), jnp.arange(len(output))
    for source in range(len(recv_sizes)):
        here = (row >= first[source]) & (row < first[source] + recv_sizes[source])
        taken = gathered[source, begin[source] + row - first[source]]
        output = jnp.where(here[:, None], taken, output)
    return jnp.where(jnp.all(swap(recv_sizes) == send_sizes), output, jnp.nan)


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"ep": 2, "sp": 2}], ids="-".join)
def test_the_native_ragged_exchange_equals_its_emulation(sizes, monkeypatch) -> None:
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


# Sizes are traced: the compiler cannot know that a group is empty, or that all rows fit.
NATIVE = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from parallel.experts.exchange import RaggedAllToAll
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.planning.slices import absent_devices
mesh = build_mesh(MeshConfig(ep=2, sp=2), absent_devices("v5p:2x2x1"))
def body(x, sizes, g):
    exchange = RaggedAllToAll.create(sizes, ("ep", "sp"), rows=96, native=True)
    def forth_and_back(x):
        return exchange.send_back(jnp.sin(exchange.send(x)), len(x))
    y, pull = jax.vjp(forth_and_back, x)
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
def test_the_native_ragged_exchange_and_its_gradient_compile_for_a_tpu() -> None:
    """Runs in a subprocess, because libtpu cannot share a process with the CPU tests."""
    command = [sys.executable, "-c", NATIVE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    # Forth, back, and both of them in the gradient; rows are never all-gathered.
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", done.stdout)) == 4
    assert not re.search(r"= \S*bf16\S* all-gather", done.stdout)
