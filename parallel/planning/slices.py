"""Names of TPU slices, and the devices of slices that are not attached.

A slice is named by its sides ("v5p:2x2x2"), as gcloud names it ("v5p-16", "v5litepod-8", "v6e-64")
or as GKE does ("tpu-v5-lite-podslice:4x4"). "*2" after a name means two such slices.
"""

import importlib.util
import itertools
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from parallel.sharding.devices import describe_missing_tpu


@dataclass(frozen=True)
class Generation:
    """Naming and shape of the slices of one TPU generation.

    Attributes:
        dims: Dimensions of the torus.
        cores: TensorCores per chip if gcloud counts TensorCores, 1 if it counts chips.
        largest: Chips of the largest slice.
        gke: Values of the node selector `cloud.google.com/gke-tpu-accelerator`.
        gcloud: Prefix of an accelerator type in gcloud.
        options: Arguments of `get_topology_desc`.
    """

    dims: int
    cores: int
    largest: int
    gke: tuple[str, ...]
    gcloud: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()


# Google's pages on v4, v5e, v5p and v6e, read in November 2026: sizes and names.
# Without "megacore" libtpu describes a v4 chip as two devices, which programs of jax are not.
GENERATIONS = {
    "v4": Generation(
        3, 2, 4096, ("tpu-v4-podslice",), ("v4",), (("chip_config_name", "megacore"),)
    ),
    "v5e": Generation(
        2, 1, 256, ("tpu-v5-lite-podslice", "tpu-v5-lite-device"), ("v5litepod", "v5e", "v5lite")
    ),
    "v5p": Generation(3, 2, 6144, ("tpu-v5p-slice",), ("v5p",)),
    "v6e": Generation(2, 1, 256, ("tpu-v6e-slice",), ("v6e",)),
}


_SMALL: dict[int, list[tuple[int, ...]]] = {
    2: [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)],
    3: [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4)],
}
"""Sides of slices by dimensions of the torus; larger ones of three dimensions consist of cubes."""


@dataclass(frozen=True)
class Topology:
    """One or several equal TPU slices.

    Attributes:
        slice_name: One slice as libtpu names it: "v5p:2x2x2".
        sides: Chips along each side of a slice.
        num_slices: Number of slices.
    """

    slice_name: str
    sides: tuple[int, ...]
    num_slices: int

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.sides) * self.num_slices

    @property
    def generation(self) -> str:
        """The generation: "v5p"."""
        return self.slice_name.partition(":")[0]

    @property
    def gcloud_number(self) -> int:
        """The number in gcloud's name of one slice: its chips, or their TensorCores."""
        return math.prod(self.sides) * GENERATIONS[self.generation].cores

    @property
    def gcloud(self) -> str:
        """The accelerator type of one slice in gcloud: "v5p-16", "v5litepod-8"."""
        return f"{GENERATIONS[self.generation].gcloud[0]}-{self.gcloud_number}"

    def __str__(self) -> str:
        return self.slice_name + (f"*{self.num_slices}" if self.num_slices > 1 else "")


def read_topology(text: str) -> Topology:
    """Parse the name of one slice or of several.

    Raises:
        ValueError: The name has another form, or there is no such slice; lists what there is.
    """
    found = re.fullmatch(
        r"([\w-]+?)(?::([1-9]\d*(?:x[1-9]\d*)*)|-([1-9]\d*))(?:\*([1-9]\d*))?", text
    )
    if found is None:
        raise ValueError(
            f"topology {text}: not the name of a TPU slice; write v5p:2x2x2 (its sides) or v5p-16 "
            f"(gcloud's name), and v5p-16*2 for two slices. {_known()}"
        )
    generation = _generation(found[1], text)
    if found[2]:
        sides = tuple(int(side) for side in found[2].split("x"))
    else:
        sides = _sides(generation, int(found[3]), text)
    dims = GENERATIONS[generation].dims
    sides += (1,) * (dims - len(sides))
    if len(sides) > dims or math.prod(sides) > GENERATIONS[generation].largest:
        raise ValueError(
            f"topology {text}: {generation} slices have {dims} sides and at most "
            f"{GENERATIONS[generation].largest} chips. {_known()}"
        )
    has_cubes = dims == 3 and all(side % 4 == 0 for side in sides)
    if not has_cubes and tuple(sorted(sides)) not in map(tuple, map(sorted, _SMALL[dims])):
        sizes = ", ".join("x".join(map(str, known)) for known in _SMALL[dims])
        more = " and sides that are multiples of 4" if dims == 3 else ""
        raise ValueError(f"topology {text}: there is no such slice; {generation} has {sizes}{more}")
    name = f"{generation}:{'x'.join(map(str, sides))}"
    return Topology(name, sides, int(found[4] or 1))


def _generation(name: str, text: str) -> str:
    for generation, known in GENERATIONS.items():
        if name in (generation, *known.gcloud, *known.gke):
            return generation
    raise ValueError(f"topology {text}: there is no TPU {name}. {_known()}")


def _sides(generation: str, count: int, text: str) -> tuple[int, ...]:
    """Return the sides of the slice with this number in its gcloud name."""
    known = GENERATIONS[generation]
    chips = count // known.cores
    by_chips = {math.prod(sides): sides for sides in _SMALL[known.dims]}
    if count == chips * known.cores and chips in by_chips:
        return by_chips[chips]
    if known.dims == 3 and count == chips * known.cores and chips % 64 == 0:
        return _cubes(chips // 64)
    sizes = ", ".join(str(chips * known.cores) for chips in by_chips)
    more = f" and multiples of {64 * known.cores}" if known.dims == 3 else ""
    unit = "TensorCores, two for each chip" if known.cores == 2 else "chips"
    raise ValueError(
        f"topology {text}: the number counts {unit}; {generation} slices have {sizes}{more}"
    )


def _cubes(count: int) -> tuple[int, ...]:
    """Return the sides of the most compact slice of `count` cubes of 4 x 4 x 4 chips."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    pairs = itertools.combinations_with_replacement(divisors, 2)
    shapes = (sorted((a, b, count // (a * b))) for a, b in pairs if count % (a * b) == 0)
    best = min(shapes, key=lambda shape: (shape[2], shape[1]))
    return tuple(4 * side for side in best)


def _known() -> str:
    """Return a line with the slices that can be planned."""
    examples = {"v4": "v4-8", "v5e": "v5e-1 (also v5litepod-1)", "v5p": "v5p-8", "v6e": "v6e-1"}
    listed = (
        f"{examples[name]} to {name}-{known.largest * known.cores}"
        for name, known in GENERATIONS.items()
    )
    return f"Known: {'; '.join(listed)}"


def absent_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a TPU that is not attached; programs compile for them but do not run.

    topology: A name that `read_topology` accepts. Needs libtpu, which `pip install "jax[tpu]"`
    installs on any Linux x86 machine.

    Raises: ValueError without libtpu, or for a topology that libtpu does not know.
    """
    named = read_topology(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f'topology {topology} needs libtpu; pip install -e ".[plan]"')
    describe_missing_tpu()
    # Otherwise libtpu queries the cloud's metadata server and refuses a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    options: dict[str, Any] = dict(GENERATIONS[named.generation].options)
    if named.sides.count(1) == len(named.sides):
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        found = topologies.get_topology_desc(
            platform="tpu",
            topology_name=named.slice_name,
            num_slices=named.num_slices,
            **options,
        )
        return list(found.devices)
    except Exception as error:  # jaxlib has no exception type for libtpu's errors
        raise ValueError(
            f"topology {topology}: {str(error).splitlines()[0]}; name another slice. {_known()}"
        ) from error
