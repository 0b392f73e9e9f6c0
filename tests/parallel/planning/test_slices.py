"""Names of TPU slices."""

import importlib.util
import math

import pytest

from parallel.planning.slices import Topology, absent_devices, read_topology


def test_a_topology_names_its_slices() -> None:
    assert read_topology("v5p:2x2x4") == Topology("v5p:2x2x4", (2, 2, 4), 1)
    assert read_topology("v5e:2x4*16") == Topology("v5e:2x4", (2, 4), 16)
    for text in ("", "v5p", "v5p:", "v5p:2x", "v5p:2x2*0", "v5p:2x2*", "2*v5p:2x2", "v5p:2x2 *2"):
        with pytest.raises(ValueError, match=r"write v5p:2x2x2 .*two slices"):
            read_topology(text)


# From Google's tables of accelerator types, read in November 2026.
@pytest.mark.parametrize(
    ("name", "sides"),
    {
        "v5p-8": (2, 2, 1),
        "v5p-16": (2, 2, 2),
        "v5p-128": (4, 4, 4),
        "v5p-384": (4, 4, 12),
        "v5p-768": (4, 8, 12),
        "v5p-1536": (8, 8, 12),
        "v5p-12288": (16, 16, 24),
        "v4-4096": (8, 16, 16),
        "v5litepod-8": (2, 4),
        "v5e-256": (16, 16),
        "v6e-64": (8, 8),
        "v6e-1": (1, 1),
        "tpu-v5-lite-podslice:4x4": (4, 4),
        "tpu-v6e-slice:8x16": (8, 16),
    }.items(),
)
def test_the_names_of_gcloud_and_gke_name_sides(name: str, sides: tuple[int, ...]) -> None:
    found = read_topology(name)
    assert found.sides == sides
    assert read_topology(found.gcloud) == found
    assert read_topology(f"{name}*2").num_chips == 2 * math.prod(sides)


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "v5p-12": "counts TensorCores, two for each chip; v5p slices have 8, 16, 32",
        "v5p-15": "counts TensorCores",
        "v6e-12": "counts chips; v6e slices have 1, 4, 8, 16, 32, 64, 128, 256",
        "v9z-8": "there is no TPU v9z. Known: v4-8 to v4-8192; v5e-1",
        "v5e:2x2x2": "v5e slices have 2 sides and at most 256 chips",
        "v6e:32x32": "v6e slices have 2 sides and at most 256 chips",
    }.items(),
)
def test_a_slice_that_does_not_exist_is_refused_with_those_that_do(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_topology(name)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not here")
@pytest.mark.parametrize("name", ["v6e-1", "v4-8", "v5p-16", "v5e-8*2"])
def test_a_slice_has_one_device_per_chip(name: str) -> None:
    assert len(absent_devices(name)) == read_topology(name).num_chips


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is here")
def test_without_libtpu_one_line_says_how_to_get_it() -> None:
    with pytest.raises(ValueError, match=r'v5p:2x2x2 needs libtpu; pip install -e "\.\[plan\]"'):
        absent_devices("v5p:2x2x2")
