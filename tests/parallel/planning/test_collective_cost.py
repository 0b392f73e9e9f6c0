"""Cost of permutes by the links on their routes, and of ragged dots by their tiles.

The eight partitions of `hlo_text` are placed in row-major order unless a test says otherwise.
"""

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_text import (
    DOWN,
    FIVE_TIMES,
    UP,
    loop_body,
    matmul,
    permute_done,
    permute_start,
    program,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.planning.links import Coords, chip_coords, link_loads, order_by_links
from parallel.planning.prediction import Prediction
from parallel.planning.slices import absent_devices
from parallel.planning.timeline import predict
from parallel.sharding.devices import CHIPS, Chip

ROOT = Path(__file__).parents[3]
# One cycle is a microsecond; a megabyte takes a millisecond over HBM or one link one way.
MESH = Chip(peak_flops=1e12, hbm_bandwidth=1e9, ici_bandwidth=1e9, clock_hz=1e6)
RING_4 = dataclasses.replace(MESH, wrap=4)
HOP = 1e-6
MS = 1e-3


def box(*sides: int) -> list[Coords]:
    return list(itertools.product(*(range(side) for side in sides)))


def pairs(*moves: tuple[int, int]) -> str:
    return f"source_target_pairs={{{','.join(f'{{{a},{b}}}' for a, b in moves)}}}"


def shift(distance: int) -> str:
    return pairs(*((i, (i + distance) % 8) for i in range(8)))


def partner(bits: int) -> str:
    return pairs(*((i, i ^ bits) for i in range(8)))


def together(chip: Chip, sides: tuple[int, ...], *permutes: str) -> Prediction:
    """Predict permutes of a megabyte that all start at once."""
    starts = [permute_start(f"s{i}", moves) for i, moves in enumerate(permutes)]
    dones = [permute_done(f"d{i}", f"s{i}") for i in range(len(permutes))]
    return predict(program(*starts, *dones), chip, sides, box(*sides))


def close(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("moves", "load", "distance"),
    [
        (pairs((0, 1)), 1, 1),
        (pairs((0, 2)), 1, 2),
        (pairs((0, 3)), 1, 3),
        (pairs((0, 2), (1, 3)), 2, 2),
        (pairs((0, 3), (1, 4), (2, 5)), 3, 3),
        (pairs((0, 2), (3, 1)), 1, 2),
        # Without links between the ends, what leaves at one comes back through the whole line.
        (shift(1), 1, 7),
        (shift(2), 2, 6),
        (shift(3), 3, 5),
        (shift(4), 4, 4),
    ],
)
def test_a_permute_takes_its_busiest_link_and_its_longest_route(
    moves: str, load: int, distance: int
) -> None:
    found = together(MESH, (8,), moves)
    assert found.total == found.exposed == close(load * MS + distance * HOP)
    assert found.bytes_by == {"collective-permute": 1e6}, "what each device sends, once"


@pytest.mark.parametrize(
    ("distance", "load", "hops"), [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 2, 4), (5, 3, 3), (7, 1, 1)]
)
def test_wrapped_sides_shorten_routes_and_ties_go_both_ways(
    distance: int, load: int, hops: int
) -> None:
    found = together(RING_4, (8,), shift(distance))
    assert found.total == close(load * MS + hops * HOP)


@pytest.mark.parametrize(
    ("sides", "moves", "load", "distance"),
    [
        ((2, 4), pairs((0, 3), (4, 7)), 1, 1),  # along the side of four, around its end
        ((2, 4), pairs((0, 7)), 1, 2),
        ((2, 4), pairs((0, 2)), 1, 2),  # no message is faster than one link
        ((4, 2), pairs((0, 6)), 1, 1),
        ((2, 2, 2), pairs((0, 7)), 1, 3),
        ((2, 2, 2), pairs((0, 3), (1, 2)), 1, 2),
    ],
)
def test_sides_of_four_wrap_and_sides_of_two_do_not(
    sides: tuple[int, ...], moves: str, load: int, distance: int
) -> None:
    assert together(RING_4, sides, moves).total == close(load * MS + distance * HOP)


@pytest.mark.parametrize(
    ("line", "megabytes"),
    [
        ("f32[2000000]{0} all-gather(%x), dimensions={0}", 7),
        ("f32[31250]{0} reduce-scatter(%x), dimensions={0}, to_apply=%add", 7 / 8),
        ("f32[250000]{0} all-reduce(%x), to_apply=%add", 7 / 8 + 7 / 8),
    ],
)
def test_a_ring_sends_each_of_eight_blocks_seven_times_both_ways(line: str, megabytes: float):
    """An all-reduce is a reduce-scatter and an all-gather: Patarasuk and Yuan 2009, section 3."""
    groups = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
    found = predict(program(f"%r = {line}, {groups}"), MESH, (8,), box(8))
    assert list(found.bytes_by.values()) == [close(megabytes * 1e6)]
    assert found.total == close(megabytes * MS / 2 + 7 * HOP)


@pytest.mark.parametrize("bits", range(1, 8))
def test_the_distance_in_a_cube_is_the_number_of_different_bits(bits: int) -> None:
    found = together(MESH, (2, 2, 2), partner(bits))
    assert found.total == close(MS + bits.bit_count() * HOP)


@pytest.mark.parametrize(
    ("chip", "sides", "first", "second", "seconds"),
    [
        # The same way: one after the other. Opposite ways: at once.
        (RING_4, (8,), shift(2), shift(2), 4 * MS + 4 * HOP),
        (RING_4, (8,), shift(2), shift(6), 2 * MS + 2 * HOP),
        (RING_4, (8,), shift(3), shift(2), 5 * MS + 5 * HOP),
        # Far and near: on the same links or not.
        (RING_4, (8,), shift(2), shift(1), 3 * MS + 3 * HOP),
        (RING_4, (8,), shift(2), shift(7), 2 * MS + 2 * HOP),
        # A tie takes both ways.
        (RING_4, (8,), shift(4), shift(7), 3 * MS + 5 * HOP),
        # Across different sides of a cube: at once; with a side in common: one after the other.
        (MESH, (2, 2, 2), partner(3), partner(4), MS + 2 * HOP),
        (MESH, (2, 2, 2), partner(3), partner(6), 2 * MS + 4 * HOP),
        # Parts of one line.
        (MESH, (8,), pairs((0, 2)), pairs((2, 4)), MS + 2 * HOP),
        (MESH, (8,), pairs((0, 2)), pairs((1, 3)), 2 * MS + 4 * HOP),
    ],
)
def test_permutes_queue_for_shared_links_in_one_direction(
    chip: Chip, sides: tuple[int, ...], first: str, second: str, seconds: float
) -> None:
    found = together(chip, sides, first, second)
    assert found.total == close(seconds)
    assert together(chip, sides, second, first).total == close(seconds)


def test_a_transfer_waits_until_all_its_links_are_free() -> None:
    found = together(MESH, (8,), pairs((0, 1)), pairs((1, 2), (3, 4)), pairs((0, 2)))
    assert found.total == close(2 * MS + 3 * HOP)


def test_permutes_in_a_loop_keep_their_links_busy() -> None:
    body = loop_body(permute_start("s", shift(2)), matmul("m", 500), permute_done("d", "s"))
    found = predict(program(FIVE_TIMES, others=body), RING_4, (8,), box(8))
    assert found.total == close(5 * (2 * MS + 2 * HOP))
    assert found.exposed == close(5 * (1.5 * MS + 2 * HOP))


AROUND = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1), (1, 0, 0)]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([1, -1]), st.integers(0, 3000)), min_size=1, max_size=6))
def test_permutes_between_neighbours_cost_the_same_with_and_without_places(
    steps: list[tuple[int, int]],
) -> None:
    lines = []
    for index, (way, cycles) in enumerate(steps):
        lines += [permute_start(f"s{index}", shift(way)), matmul("m", cycles)]
    lines += [permute_done(f"d{index}", f"s{index}") for index in range(len(steps))]
    text = program(*lines)
    assert predict(text, MESH, (2, 2, 2), AROUND) == predict(text, MESH, (2, 2, 2))


def test_four_chips_in_a_square_are_a_ring_of_neighbours() -> None:
    text = program(permute_start("s", UP), permute_start("t", DOWN), permute_done("d", "t"))
    square = [(0, 0), (0, 1), (1, 1), (1, 0), *((x, y) for x in (2, 3) for y in (0, 1))]
    assert predict(text, MESH, (4, 2), square) == predict(text, MESH, (4, 2))


CORES = [place for place in box(2, 2) for _ in range(2)]


@pytest.mark.parametrize(
    ("moves", "seconds"),
    [
        ([pairs((0, 1), (1, 0))], MS + HOP),  # within a chip: as long as a hop
        ([pairs((0, 1)), pairs((0, 2))], MS + HOP),  # and on no link
        ([pairs((0, 2), (1, 3))], 2 * MS + HOP),  # two cores share the links of their chip
    ],
)
def test_cores_of_a_chip_share_its_links(moves: list[str], seconds: float) -> None:
    starts = [permute_start(f"s{i}", each) for i, each in enumerate(moves)]
    dones = [permute_done(f"d{i}", f"s{i}") for i in range(len(moves))]
    assert predict(program(*starts, *dones), MESH, (2, 2), CORES).total == close(seconds)


def test_places_of_another_mesh_are_refused() -> None:
    text = program(permute_start("s", shift(2)), permute_done("d", "s"))
    with pytest.raises(
        ValueError, match=r"4 places for a program of 8 partitions; pass the places"
    ):
        predict(text, MESH, (2, 2), box(2, 2))
    with pytest.raises(ValueError, match=r"from \(0, 0\) to \(0, 2\) leaves the torus \(2, 2\)"):
        predict(text, MESH, (2, 2), box(2, 4))


def distance(source: Coords, target: Coords, sides: Sequence[int], wrap: int) -> int:
    """Return the distance by arithmetic on the sides, not hop by hop."""
    total = 0
    for a, b, side in zip(source, target, sides, strict=True):
        straight = abs(a - b)
        total += min(straight, side - straight) if side % wrap == 0 else straight
    return total


@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_messages_take_shortest_routes_over_links_of_neighbours(data: st.DataObject) -> None:
    sides = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    wrap = data.draw(st.sampled_from([4, 3, 7]))
    place = st.tuples(*(st.integers(0, side - 1) for side in sides))
    messages = data.draw(st.lists(st.tuples(place, place), min_size=1, max_size=8))
    loads, longest = link_loads(messages, sides, wrap)
    ways = [distance(a, b, sides, wrap) for a, b in messages]
    assert sum(loads.values()) == close(sum(ways))
    assert longest == max(ways)
    assert all(distance(a, b, sides, wrap) == 1 for a, b in loads)


@dataclasses.dataclass(frozen=True)
class Device:
    """The attribute of a TPU device that `chip_coords` reads."""

    coords: list[int]


def finish(order: Sequence[int], routes: Sequence[Any], sides: Sequence[int]) -> float:
    """Send permutes in this order, each as soon as all its links are free; in blocks on a link."""
    free: dict[Any, float] = {}
    for number in order:
        loads = link_loads(routes[number], sides, 4)[0]
        end = max(free.get(link, 0.0) for link in loads) + max(loads.values())
        free.update(dict.fromkeys(loads, end))
    return max(free.values())


@pytest.mark.parametrize("sides", [(2, 2, 2), (2, 2, 4), (4, 4, 4)], ids=str)
def test_an_all_to_all_by_permutes_in_this_order_is_as_fast_as_its_busiest_link(sides) -> None:
    places = box(*sides)
    n = len(places)
    routes = [[(places[a], places[a ^ distance]) for a in range(n)] for distance in range(1, n)]
    order = order_by_links(routes, sides, 4)
    assert sorted(order) == list(range(n - 1))
    total, _ = link_loads(itertools.chain(*routes), sides, 4)
    assert finish(order, routes, sides) == max(total.values())


def test_places_are_relative_to_the_corner_of_the_slice() -> None:
    devices = [Device([4, 2, 0]), Device([5, 2, 0]), Device([4, 3, 0])]
    assert chip_coords(devices) == ((0, 0, 0), (1, 0, 0), (0, 1, 0))  # type: ignore[arg-type]  # stand-ins


# lax.ragged_dot: one megaflop takes 1 us at peak, one megabyte 1 ms.


def ragged(
    T: int, D: int, F: int, E: int, tiling: str, memory: str = "", peak: float = 1e12
) -> Prediction:
    call = (
        f"%ragged-dot-none.1 = bf16[{T},{F}]{{1,0}} custom-call(%i, %i, /*index=2*/%a, %w), "
        'custom_call_target="tpu_custom_call", frontend_attributes={mosaic_fusion_entry_point='
        f'"true",ragged_dot_tiling="{tiling}"}}, backend_config={{"cost_estimate":{{"flops":"1"}}}}'
    )
    lines = (
        "%i = s32[5]{0} parameter(1)",
        f"%a = bf16[{T},{D}]{{1,0{memory}}} parameter(2)",
        f"%w = bf16[{E},{D},{F}]{{2,1,0}} parameter(3)",
        call,
    )
    return predict(program(*lines), dataclasses.replace(MESH, peak_flops=peak))


SLOW = 1e9  # FLOP/s: only the matmul counts
FAST = 1e18  # FLOP/s: only HBM traffic counts


@pytest.mark.parametrize(
    ("shape", "tiling", "computed"),
    [
        ((1024, 256, 512, 1), "128,256,512", 1024 * 256 * 512),
        ((1024, 256, 512, 4), "128,256,512", (1024 + 3 * 128) * 256 * 512),  # shared tiles
        ((1000, 256, 512, 1), "128,256,512", 1024 * 256 * 512),
        ((1024, 256, 768, 1), "128,256,640", 1024 * 256 * 1280),  # the last tile is whole
        ((1024, 448, 256, 2), "128,256,128", (1024 + 128) * 512 * 256),
    ],
)
def test_a_ragged_dot_computes_whole_tiles_at_the_rate_of_matmuls(
    shape: tuple[int, int, int, int], tiling: str, computed: int
) -> None:
    found = ragged(*shape, tiling, peak=SLOW)
    assert found.total == found.kernels == close(2 * computed / (0.88 * SLOW))
    assert found.assumed == {"tpu_custom_call": close(found.total)}


@pytest.mark.parametrize(
    ("shape", "tiling", "memory", "moved"),
    [
        ((1024, 256, 512, 4), "128,256,512", "", 1024 * 256 + 4 * 256 * 512 + 1024 * 512),
        # Two tiles of F read the rows twice.
        ((1024, 256, 512, 4), "128,256,256", "", 2 * 1024 * 256 + 4 * 256 * 512 + 1024 * 512),
        # Two tiles of D: at each of 8 + 3 steps of rows both blocks come anew.
        (
            (1024, 256, 512, 4),
            "128,128,256",
            "",
            2 * 11 * 128 * 256 + 11 * 256 * 512 + 1024 * 512,
        ),
        # Rows that lie in VMEM are not read from HBM.
        ((1024, 256, 512, 4), "128,256,512", ":S(1)", 4 * 256 * 512 + 1024 * 512),
    ],
)
def test_a_ragged_dot_reads_what_its_tiles_need(
    shape: tuple[int, int, int, int], tiling: str, memory: str, moved: int
) -> None:
    found = ragged(*shape, tiling, memory, peak=FAST)
    assert found.total == found.kernels == close(2 * moved / MESH.hbm_bandwidth)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"')
def test_libtpu_writes_the_text_that_these_tests_assume() -> None:
    # In a process of its own, since libtpu changes the backend of the process.
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Partitions are positions in the mesh, not ids of devices: the route has 3 hops, not 1.
    assert found["seconds"] == close(found["seconds without places"] + 2 * HOP)
    # Forward and dgrad are kernels; wgrad is a matmul of all rows for each of 4 groups.
    one = 2 * 1024 * 256 * 512 / CHIPS["TPU v5"].peak_flops
    assert 2 * one / 0.88 < found["kernels"] < 3 * one / 0.88
    assert found["matmul"] > 4 * one


def schedules_for_tpu() -> dict[str, float]:
    """Predict a permute in a shuffled mesh and a ragged dot on v5p:2x2x2, in seconds."""
    chip, sides = CHIPS["TPU v5"], (2, 2, 2)
    devices = sorted(absent_devices("v5p:2x2x2"), key=lambda device: tuple(device.coords))
    shuffled = [devices[i] for i in (0, 7, 1, 6, 2, 5, 3, 4)]  # partners are opposite corners
    mesh = Mesh(np.array(shuffled), ("ep",), axis_types=(AxisType.Explicit,))

    def local(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P("ep"))
        return jax.ShapeDtypeStruct((8 * shape[0], *shape[1:]), dtype, sharding=sharding)

    def compiled(function: Callable[..., Any], *inputs: jax.ShapeDtypeStruct) -> str:
        island = jax.shard_map(function, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        with jax.set_mesh(mesh):
            return jax.jit(island).lower(*inputs).compile().as_text()

    def swap(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, "ep", [(i, i ^ 1) for i in range(8)])

    def dot(x: jax.Array, w: jax.Array, sizes: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
        return y, pull(dy)

    text = compiled(swap, local(1 << 20))
    groups = local(4, dtype=jnp.int32)
    grouped = compiled(dot, local(1024, 256), local(4, 256, 512), groups, local(1024, 512))
    prediction = predict(grouped, chip, sides)
    return {
        "seconds": predict(text, chip, sides, chip_coords(shuffled)).total,
        "seconds without places": predict(text, chip, sides).total,
        "kernels": prediction.kernels,
        "matmul": prediction.matmul,
    }


if __name__ == "__main__":
    print(json.dumps(schedules_for_tpu()))
