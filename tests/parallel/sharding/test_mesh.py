"""The order of devices: rings of physical links within a slice, slice after slice along dp."""

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.sharding.mesh import (
    AXIS_NAMES,
    MeshConfig,
    build_mesh,
    is_hypercube,
    ring_of_axes,
    ring_order,
)


def box(*sides: int) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(side) for side in sides)))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_boxes_with_an_even_side_have_a_ring(data) -> None:
    boxes = [(2, 2), (2, 4), (2, 3), (3, 4), (8, 8), (2, 2, 2), (2, 2, 3), (3, 2, 3), (4, 4, 4)]
    sides = data.draw(st.sampled_from(boxes))
    places = data.draw(st.permutations(box(*sides)))
    order = ring_order(places)
    assert order is not None and sorted(order) == list(range(len(places)))
    for here, there in zip(order, [*order[1:], order[0]], strict=True):
        a, b = places[here], places[there]
        assert sum(abs(x - y) for x, y in zip(a, b, strict=True)) == 1


@pytest.mark.parametrize("sides", [(4,), (3, 3), (1, 8), (3, 3, 3)])
def test_grids_without_a_ring_say_so(sides) -> None:
    assert ring_order(box(*sides)) is None


@dataclass(frozen=True)
class Chip:
    """As much of a TPU device as a mesh looks at."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5p"
    process_index: int = 0


@dataclass(frozen=True)
class ChipOfSlice(Chip):
    """A chip where there are several slices: one alone has no index."""

    slice_index: int = 0


@pytest.fixture
def grids(monkeypatch) -> list[np.ndarray]:
    """What build_mesh hands to jax, which would refuse chips that are not its own."""
    found: list[np.ndarray] = []
    monkeypatch.setattr("parallel.sharding.mesh.Mesh", lambda grid, *_, **__: found.append(grid))
    return found


@pytest.mark.parametrize("config", [MeshConfig(sp=8), MeshConfig(tp=8), MeshConfig(sp=4, tp=2)])
def test_rows_and_heads_lie_on_rings_of_neighbours(config, grids) -> None:
    chips = [Chip(n, place) for n, place in enumerate(box(2, 2, 2))]
    build_mesh(config, chips)
    grid = grids[0].reshape(config.sp, config.tp)
    places = np.array([[chip.coords for chip in line] for line in grid])
    for ring in (*places, *places.swapaxes(0, 1)):
        hops = np.abs(ring - np.roll(ring, 1, axis=0)).sum(1)
        assert len(ring) == 1 or (hops == 1).all()


@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (MeshConfig(fsdp=8), ("fsdp",)),
        (MeshConfig(dp=2, fsdp=4), ("fsdp",)),
        (MeshConfig(fsdp=4, tp=2), ("fsdp",)),
        (MeshConfig(fsdp=2, sp=4), ("fsdp", "sp")),
        (MeshConfig(fsdp=4, sp=2), ("sp", "fsdp")),
        (MeshConfig(dp=2, fsdp=2, sp=2), ("fsdp", "sp")),
    ],
    ids=str,
)
def test_every_group_of_devices_that_stores_a_kernel_is_a_ring(config, axes, grids) -> None:
    # By this name jax knows v5p, and has no order of its own for a box of 8 chips.
    chips = [Chip(n, place, device_kind="TPU v5") for n, place in enumerate(box(2, 2, 2))]
    build_mesh(config, chips)
    grid, names = grids[0], AXIS_NAMES
    order = ring_of_axes(SimpleNamespace(devices=grid, axis_names=names), axes)
    others = [name for name in names if name not in axes]
    groups = grid.transpose([names.index(name) for name in (*others, *axes)])
    for group in groups.reshape(-1, len(order)):
        places = np.array([group[number].coords for number in order])
        assert (np.abs(places - np.roll(places, 1, axis=0)).sum(1) == 1).all()


def test_chips_in_a_line_have_no_ring(grids) -> None:
    build_mesh(MeshConfig(fsdp=4), [Chip(n, place) for n, place in enumerate(box(4, 1, 1))])
    assert ring_of_axes(SimpleNamespace(devices=grids[0], axis_names=AXIS_NAMES), ["fsdp"]) is None


@pytest.mark.parametrize(
    ("sides", "config", "is_cube"),
    [
        ((2, 2, 2), MeshConfig(tp=8), True),
        ((2, 2, 2), MeshConfig(fsdp=2, tp=4), True),
        ((2, 2, 2), MeshConfig(fsdp=4, tp=2), True),
        ((2, 4, 1), MeshConfig(tp=8), False),
        ((4, 1, 1), MeshConfig(tp=4), False),
    ],
    ids=str,
)
def test_corners_of_a_cube_are_numbered_by_a_gray_code(sides, config, is_cube, grids) -> None:
    # By this name jax knows v5p, and has no order of its own for a box of 8 chips.
    chips = [Chip(n, place, device_kind="TPU v5") for n, place in enumerate(box(*sides))]
    build_mesh(config, chips)
    mesh = SimpleNamespace(devices=grids[0], axis_names=AXIS_NAMES)
    assert is_hypercube(mesh, "tp") == is_cube
    for group in grids[0].reshape(-1, config.tp) if is_cube else ():
        for place, chip in enumerate(group):
            for side in range(config.tp.bit_length() - 1):
                # The Gray codes of these two numbers differ in one bit.
                across = group[place ^ (2 << side) - 1]
                assert np.abs(np.subtract(across.coords, chip.coords)).sum() == 1


def test_simulated_devices_keep_their_order() -> None:
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"))
    assert not is_hypercube(mesh, "fsdp") and not is_hypercube(mesh.abstract_mesh, "fsdp")
    assert (
        ring_of_axes(mesh, ["fsdp"]) == ring_of_axes(mesh.abstract_mesh, ["fsdp"]) == (0, 1, 2, 3)
    )


def slices(*sides: tuple[int, ...]) -> list[ChipOfSlice]:
    """Chips of slices of these sides, in no order."""
    chips = [
        ChipOfSlice(100 * index + n, place, slice_index=index)
        for index, side in enumerate(sides)
        for n, place in enumerate(box(*side))
    ]
    return random.Random(0).sample(chips, len(chips))


@pytest.mark.parametrize(
    "inner", [MeshConfig(tp=8), MeshConfig(dp=2, tp=4), MeshConfig(fsdp=2, sp=2, tp=2)]
)
@pytest.mark.parametrize("count", [2, 3])
def test_every_slice_is_laid_out_as_one_alone_and_dp_goes_from_one_to_the_next(
    inner, count, grids
) -> None:
    build_mesh(inner, [Chip(n, place) for n, place in enumerate(box(2, 2, 2))])
    config = MeshConfig(**{**inner.model_dump(), "dp": inner.dp * count, "dcn_dp": count})
    build_mesh(config, slices(*[(2, 2, 2)] * count))
    alone, together = grids
    assert together.shape == tuple(getattr(config, name) for name in AXIS_NAMES)
    for index in range(count):
        part = together[index * inner.dp : (index + 1) * inner.dp]
        assert {chip.slice_index for chip in part.flat} == {index}
        assert [chip.coords for chip in part.flat] == [chip.coords for chip in alone.flat]


@pytest.mark.parametrize(
    ("config", "sides", "message"),
    [
        (MeshConfig(dp=2, tp=8), [(2, 2, 2)] * 2, "mesh.dcn_dp=1, .* 2 slices; use mesh.dcn_dp=2"),
        (
            MeshConfig(dp=2, dcn_dp=2, tp=4),
            [(2, 2, 2)],
            "mesh.dcn_dp=2, .* in 1 slice; use mesh.dcn_dp=1",
        ),
        (MeshConfig(dp=3, dcn_dp=3, tp=4), [(2, 2, 1), (2, 2, 2)], "=3, .* in 2 slices; use"),
        (MeshConfig(dp=2, dcn_dp=2, tp=6), [(2, 2, 1), (2, 2, 2)], r"slices have \[4, 8\] devices"),
    ],
)
def test_other_slices_than_configured_are_refused(config, sides, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_mesh(config, slices(*sides))


def test_an_automatic_dp_spans_whole_slices() -> None:
    config = MeshConfig(dp="auto", dcn_dp=2, fsdp=2)
    assert config.filled(8).dp == 4
    with pytest.raises(ValueError) as error:
        config.filled(6)
    assert str(error.value) == (
        "mesh.dp=auto: 6 devices leave mesh.dp=3, which is not divisible by mesh.dcn_dp=2; change "
        "the other axes, or mesh.dcn_dp"
    )


def test_dp_spans_whole_slices() -> None:
    with pytest.raises(ValueError, match=r"mesh\.dp=3 is not .* mesh\.dcn_dp=2; use mesh\.dp=4"):
        MeshConfig(dp=3, dcn_dp=2)
    assert MeshConfig(dp=4, dcn_dp=2, tp=2).num_devices == 8


@pytest.mark.parametrize("config", [{"dp": 2, "tp": 4}, {"dp": 4, "fsdp": 2}, {"dp": 8}])
def test_slices_rehearsed_without_a_tpu_change_no_order(config) -> None:
    devices = jax.devices()[:8]
    rehearsed = build_mesh(MeshConfig(dcn_dp=2, **config), devices)
    assert rehearsed == build_mesh(MeshConfig(**config), devices)
    first, second = rehearsed.devices.reshape(2, 4)
    assert max(device.id for device in first) < min(device.id for device in second)


def test_one_and_two_devices_need_no_order() -> None:
    assert ring_order([(0, 0)]) == [0]
    assert ring_order([(0, 0), (5, 5)]) == [0, 1]
