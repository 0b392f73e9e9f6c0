"""The order of a tp group is a ring of physical links wherever the grid has one."""

import importlib.util
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.mesh import MeshConfig, absent_devices, build_mesh, ring_order


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


@pytest.mark.parametrize("config", [MeshConfig(sp=8), MeshConfig(tp=8), MeshConfig(sp=4, tp=2)])
def test_rows_and_heads_lie_on_rings_of_neighbours(config, monkeypatch) -> None:
    chips = [Chip(n, place) for n, place in enumerate(box(2, 2, 2))]
    grids = []
    monkeypatch.setattr("parallel.mesh.Mesh", lambda grid, *_, **__: grids.append(grid))
    build_mesh(config, chips)
    grid = grids[0].reshape(config.sp, config.tp)
    places = np.array([[chip.coords for chip in line] for line in grid])
    for ring in (*places, *places.swapaxes(0, 1)):
        hops = np.abs(ring - np.roll(ring, 1, axis=0)).sum(1)
        assert len(ring) == 1 or (hops == 1).all()


def test_one_and_two_devices_need_no_order() -> None:
    assert ring_order([(0, 0)]) == [0]
    assert ring_order([(0, 0), (5, 5)]) == [0, 1]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is here")
def test_without_libtpu_one_line_says_how_to_get_it() -> None:
    with pytest.raises(ValueError, match=r'topology v5p:2x2x2: .*pip install -e "\.\[plan\]"'):
        absent_devices("v5p:2x2x2")
