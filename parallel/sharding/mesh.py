"""Devices in a grid: the mesh of dp x fsdp x tp x sp x ep, on accelerators or simulated on CPU.

All axes are `AxisType.Explicit`: shardings are part of array types, so an unplanned reshard is a
trace-time error. All five axes always exist; an unused one has size 1. Tensor parallelism is
innermost: its devices are neighbours, on TPU in the order of a ring of physical links. Data
parallelism is outermost and the only axis that leaves a slice. Where the links of a slice lead, and
which of them a message passes, is known here too.
"""

import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh
from pydantic import BaseModel, PositiveInt, model_validator

from parallel.sharding.simulation import simulate_cpu_devices

_LOG = logging.getLogger(__name__)

AXIS_NAMES = ("dp", "fsdp", "ep", "sp", "tp")

Place = tuple[int, ...]
"""Where a chip stands in the torus of its slice, counted from a corner."""
Link = tuple[Place, Place]
"""A link between neighbours, one way."""


class MeshConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How many devices along each mesh axis; their product is the number of devices."""

    dp: PositiveInt = 1
    """Data parallel: batch split, parameters whole on each."""
    fsdp: PositiveInt = 1
    """Fully sharded data parallel: batch and parameters split."""
    tp: PositiveInt = 1
    """Tensor parallel: heads, MLP width and vocabulary split."""
    sp: PositiveInt = 1
    """Sequence parallel: tokens of a row split; parameters too."""
    ep: PositiveInt = 1
    """Expert parallel: experts split, and the batch outside of them."""
    dcn_dp: PositiveInt = 1
    """Slices that dp spans: over their data-centre network go sums of gradients and losses alone;
    CPU and GPU devices count as slices in order. No factor of the number of devices."""

    @model_validator(mode="after")
    def _has_whole_slices(self) -> Self:
        if self.dp % self.dcn_dp:
            raise ValueError(
                f"mesh.dp={self.dp} is not divisible by mesh.dcn_dp={self.dcn_dp}; "
                f"use mesh.dp={-(-self.dp // self.dcn_dp) * self.dcn_dp}, or another mesh.dcn_dp"
            )
        return self

    @property
    def num_devices(self) -> int:
        """The product of all axes."""
        return math.prod(getattr(self, name) for name in AXIS_NAMES)


@dataclass(frozen=True)
class Chip:
    """Data-sheet figures of one device as jax counts them."""

    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    hbm_bandwidth: float = 0.0
    """Bytes/s of its memory."""
    ici_bandwidth: float = 0.0
    """Bytes/s one way over one link to a neighbour in the torus; 0: no torus."""
    clock_hz: float = 0.0
    """Cycles/s in which the compiler counts: peak / (MXUs * 128 * 128 * 2); 0: it does not."""
    wrap: int = 0
    """A side of a slice that is a multiple of this has links between its ends; 0: none has."""
    dcn_bandwidth: float = 0.0
    """Bytes/s one way of its share of what its host sends to other slices; 0: not known."""


# By jax's device_kind. TPU: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e pages); links: the table
# of "How to Scale Your Model" (jax-ml.github.io/scaling-book), 45 and 90 GB/s where Google's pages
# give a nominal 50 and 100; GPU: NVIDIA A100, H100 SXM and H200 data sheets, dense figures.
# Read November 2026. wrap: what slices are taken to have, cubes of 4 with optical faces (v4, v5p)
# and the 16 of a pod (v5e, v6e); for v5e libtpu 0.0.42 refuses any other. DCN: Google's pages give
# 6.4 and 25.6 Tbit/s per pod of 256 (v5e, v6e); for v4 and v5p the book's 25 GB/s per host, of 4.
CHIPS: dict[str, Chip] = {
    "TPU v4": Chip(275e12, 1.2e12, 45e9, 1.05e9, 4, 6.25e9),
    "TPU v5 lite": Chip(197e12, 0.82e12, 45e9, 1.5e9, 16, 3.125e9),
    "TPU v5": Chip(459e12, 2.765e12, 90e9, 1.75e9, 4, 6.25e9),
    "TPU v6 lite": Chip(918e12, 1.64e12, 90e9, 1.75e9, 16, 12.5e9),
    "NVIDIA A100-SXM4-80GB": Chip(312e12, 2.039e12),
    "NVIDIA H100 80GB HBM3": Chip(989e12, 3.35e12),
    "NVIDIA H200": Chip(989e12, 4.8e12),
}


def find_devices(num_devices: int) -> tuple[list[jax.Device], str | None]:
    """The devices of a run, and one line to show when they are not what one might expect.

    Accelerators when there are exactly enough of them; otherwise CPU devices, simulated. Must be
    called before anything else starts a jax backend, which fixes the number of CPU devices.
    Raises: ValueError when accelerators would stay unused, or the backend started with too few.
    """
    if (
        not jax.distributed.is_initialized()
        and jax.config.values["jax_num_cpu_devices"] < num_devices
    ):
        try:
            simulate_cpu_devices(num_devices)
        except RuntimeError as error:
            raise ValueError(
                f"the mesh needs {num_devices} CPU devices, but jax already started with "
                f"{jax.device_count('cpu')}; build the mesh first"
            ) from error
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"jax finds no device: {str(error).splitlines()[0] if str(error) else 'no backend'}; "
            "check JAX_PLATFORMS and the installed plugins"
        ) from error
    platform = devices[0].platform
    if jax.process_count() > 1:
        if not jax.distributed.is_initialized():
            raise ValueError(
                f"these {platform} devices belong to {jax.process_count()} processes; start "
                "train.py on all of them with --distributed"
            )
        if len(devices) != num_devices:
            raise ValueError(
                f"mesh.* multiplies to {num_devices} but the {jax.process_count()} processes have "
                f"{len(devices)} {platform} devices; make the product {len(devices)}"
            )
        return list(devices), None
    if platform != "cpu":
        if len(devices) == num_devices:
            return list(devices), None
        if len(devices) > num_devices:
            raise ValueError(
                f"mesh.* multiplies to {num_devices} but there are {len(devices)} {platform} "
                f"devices; make the product {len(devices)}, or hide the rest from jax"
            )
        found = f"{len(devices)} {platform} device{'s' if len(devices) > 1 else ''}"
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    else:
        found = "no accelerator"
    cpus = jax.devices("cpu")[:num_devices]
    noun = "device" if num_devices == 1 else "devices"
    return cpus, f"found {found}; simulating {num_devices} {noun} on the CPU"


@dataclass(frozen=True)
class Topology:
    """TPU slices by their name: "v5p:2x2x2" is one, "v5p:2x2x2*4" are four of them."""

    slice_name: str
    sides: tuple[int, ...]
    num_slices: int


def read_topology(text: str) -> Topology:
    """The slices that a text names. Raises: ValueError if it names none."""
    found = re.fullmatch(r"(\w+:([1-9]\d*(?:x[1-9]\d*)*))(?:\*([1-9]\d*))?", text)
    if found is None:
        raise ValueError(
            f"topology {text}: not the name of a TPU; write a slice like v5p:2x2x2 or v5e:2x4, and "
            "two of them like v5p:2x2x2*2"
        )
    sides = tuple(int(side) for side in found[2].split("x"))
    return Topology(found[1], sides, int(found[3] or 1))


def absent_devices(topology: str) -> list[jax.Device]:
    """The devices of a TPU that is not here, such as "v5p:2x2x2": to compile for, not to run.

    Of several slices too (`read_topology`). libtpu comes with `pip install "jax[tpu]"`, on any
    Linux x86 machine. Raises: ValueError without libtpu, or for a topology that it does not know.
    """
    named = read_topology(topology)
    # libtpu would look for the cloud's metadata server, and refuse a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=named.slice_name, num_slices=named.num_slices
        )
        return list(found.devices)
    except Exception as error:  # jaxlib has no type of its own for what libtpu throws
        raise ValueError(
            f"topology {topology}: {str(error).splitlines()[0]}; install libtpu by "
            'pip install -e ".[plan]" and name a slice like v5p:2x2x2 or v5e:2x4'
        ) from error


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """The explicit-sharding mesh over exactly `config.num_devices` devices.

    Slices lie one after another along dp, every one of them laid out alike.
    Raises: ValueError for another number of devices or slices, or a torus that does not fit.
    """
    shape = tuple(getattr(config, name) for name in AXIS_NAMES)
    if len(devices) != config.num_devices:
        raise ValueError(f"mesh {shape} needs {config.num_devices} devices, got {len(devices)}")
    if devices[0].platform == "tpu":
        inner = (config.dp // config.dcn_dp, *shape[1:])
        grid = np.array([_lay_out(part, inner) for part in _slices(config.dcn_dp, devices)])
    else:
        grid = np.array(devices)
    return Mesh(grid.reshape(shape), AXIS_NAMES, axis_types=(AxisType.Explicit,) * len(AXIS_NAMES))


def _slices(num_slices: int, devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each slice; without an index of its slice (a slice alone), all in one."""
    found: dict[int, list[jax.Device]] = defaultdict(list)
    for device in devices:
        found[getattr(device, "slice_index", 0)].append(device)
    if len(found) != num_slices:
        noun = "slice" if len(found) == 1 else "slices"
        raise ValueError(
            f"mesh.dcn_dp={num_slices}, but these {len(devices)} devices are in {len(found)} "
            f"{noun}; use mesh.dcn_dp={len(found)}"
        )
    sizes = [len(found[index]) for index in sorted(found)]
    if len(set(sizes)) > 1:
        raise ValueError(f"slices of {sizes} devices: mesh.dp needs them equal; use equal slices")
    return [found[index] for index in sorted(found)]


def _lay_out(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """The chips of one slice in this shape of axes: tp, then sp, along rings of links."""
    try:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except NotImplementedError as error:
        raise ValueError(
            f"mesh {dict(zip(AXIS_NAMES, shape, strict=True))} does not fit the torus of these "
            f"{len(devices)} chips; use powers of two that multiply to its sides"
        ) from error
    sp, tp = shape[-2:]
    groups = [group[_around_a_ring("tp", list(group))] for group in grid.reshape(-1, tp)]
    sheets = np.array(groups).reshape(-1, sp, tp)
    grid = np.array([sheet[_around_a_ring("sp", list(sheet[:, 0]))] for sheet in sheets])
    return grid.reshape(shape)


def _around_a_ring(axis: str, group: Sequence[jax.Device]) -> list[int]:
    """The devices of a group along this axis in the order of a ring of physical links, by index.

    As they are, with a warning, if they form none.
    """
    order = ring_order([(*device.coords, device.core_on_chip) for device in group])
    if order is None:
        _LOG.warning(
            "%s %d: these chips form no ring of neighbours, so some hops take several links",
            axis,
            len(group),
        )
    return list(range(len(group))) if order is None else order


def ring_order(places: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Indices of places in a grid, each a neighbour of the next, the last of the first; or None.

    A Hamiltonian cycle, which the boxes of a torus have if one of their sides is even; other shapes
    have none here. Wrap-around links are not used.
    """
    index = {place: position for position, place in enumerate(places)}
    if len(places) <= 2:
        return sorted(range(len(places)), key=places.__getitem__)
    lows = [min(axis) for axis in zip(*places, strict=True)]
    sides = [max(axis) - low + 1 for axis, low in zip(zip(*places, strict=True), lows, strict=True)]
    even = next((axis for axis, side in enumerate(sides) if side % 2 == 0), None)
    if math.prod(sides) != len(places) or even is None:
        return None
    # The other axes in one line, back and forth: with the even axis, a sheet.
    line = _back_and_forth([side for axis, side in enumerate(sides) if axis != even])
    if len(line) == 1:
        return None
    # Over all columns but the first, row by row back and forth, then home along the first.
    rows = range(sides[even])
    walk = [(row, place) for row in rows for place in (line[1:] if row % 2 == 0 else line[:0:-1])]
    walk += [(row, line[0]) for row in reversed(rows)]
    cycle = [(*place[:even], row, *place[even:]) for row, place in walk]
    return [index[tuple(a + b for a, b in zip(place, lows, strict=True))] for place in cycle]


def _back_and_forth(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """All places of a box, each a neighbour of the next."""
    if not sides:
        return [()]
    inner = _back_and_forth(sides[1:])
    return [(i, *rest) for i in range(sides[0]) for rest in (inner if i % 2 == 0 else inner[::-1])]


def places(devices: Iterable[jax.Device]) -> tuple[Place, ...]:
    """Where the chips of these TPU devices stand, from the corner of their box; cores share one.

    Chips of several slices stand where they do in their own.
    """
    found = [tuple(device.coords) for device in devices]
    lows = [min(axis) for axis in zip(*found, strict=True)]
    return tuple(tuple(a - low for a, low in zip(place, lows, strict=True)) for place in found)


def link_loads(
    pairs: Iterable[tuple[Place, Place]], sides: Sequence[int], wrap: int
) -> tuple[dict[Link, float], int]:
    """How many messages from place to place pass each link of a torus, and the longest distance.

    Every message takes the shortest way along the first axis, then along the second and so on;
    where both ways around a side are equally long, half of the messages go each way. Sides that are
    a multiple of `wrap` have links between their ends (`Chip.wrap`), others end. (libtpu describes
    absent slices without such links unless asked, so its own collectives may not use them.)
    Raises: ValueError for a place outside of the torus.
    """
    loads: dict[Link, float] = defaultdict(float)
    longest = 0
    for source, target in pairs:
        here, distance = source, 0
        for axis, goal in enumerate(target):
            side = sides[axis] if axis < len(sides) else 1
            if max(here[axis], goal) >= side:
                raise ValueError(
                    f"a message from {source} to {target} leaves the torus {tuple(sides)}; "
                    "pass the sides of the slice in which these places are"
                )
            ways = _ways(goal - here[axis], side if wrap and side % wrap == 0 else 0)
            for way in ways:
                for link in _along(here, axis, way, side):
                    loads[link] += 1 / len(ways)
            here = (*here[:axis], goal, *here[axis + 1 :])
            distance += abs(ways[0])
        longest = max(longest, distance)
    return dict(loads), longest


def _along(here: Place, axis: int, way: int, side: int) -> Iterator[Link]:
    """The links of this signed distance along one axis, around its end if need be."""
    for _ in range(abs(way)):
        index = (here[axis] + (1 if way > 0 else -1)) % side
        after = (*here[:axis], index, *here[axis + 1 :])
        yield here, after
        here = after


def _ways(offset: int, ring: int) -> tuple[int, ...]:
    """The shortest signed distances along one axis; ring: its length if its ends are linked."""
    if not ring or 2 * abs(offset) < ring:
        return (offset,)
    if 2 * abs(offset) == ring:
        return abs(offset), -abs(offset)
    return (offset - ring if offset > 0 else offset + ring,)
