"""The device mesh dp x fsdp x ep x sp x tp.

All axes are `AxisType.Explicit`: shardings are part of array types, so an unplanned reshard is a
trace-time error. All five axes always exist; an unused one has size 1. tp is innermost: its devices
are neighbours, on TPU in the order of a ring of physical links. dp is outermost and the only axis
that crosses slices.
"""

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh
from pydantic import (
    BaseModel,
    ModelWrapValidatorHandler,
    PositiveInt,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from parallel.sharding.devices import NUM_SIMULATED
from parallel.sharding.partition import refuse_unknown_keys

_LOG = logging.getLogger(__name__)

AXIS_NAMES = ("dp", "fsdp", "ep", "sp", "tp")
AUTO_SIZES = ("auto", -1)
"""Sizes of a mesh axis that takes the devices which the other axes leave."""


def _as_count(value: Any) -> int:
    """Return a number of slices, or 1 for what the check of its field will refuse."""
    return value if isinstance(value, int) and value > 0 else 1


class MeshConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Number of devices along each mesh axis; their product is the number of devices.

    One axis may be `auto` or -1: it takes the accelerators that the other axes leave. Before they
    are counted (`filled`), and without accelerators, it has the largest size with which the product
    is at most 8, but at least 1.
    """

    dp: PositiveInt = 1
    """Data parallel: splits the batch; every dp rank holds all parameters."""
    fsdp: PositiveInt = 1
    """Fully sharded data parallel: splits the batch and the parameters."""
    tp: PositiveInt = 1
    """Tensor parallel: splits attention heads, MLP width and vocabulary."""
    sp: PositiveInt = 1
    """Sequence parallel: splits the tokens of a row, and the parameters."""
    ep: PositiveInt = 1
    """Expert parallel: splits the experts, and outside of them the batch."""
    dcn_dp: PositiveInt = 1
    """Number of TPU slices that dp spans; does not change the number of devices. Only sums of
    gradients and losses, updates of Muon, and updates and state of SOAP cross the data-centre
    network between slices. CPU and GPU devices are divided into slices in order."""
    _auto: str | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _read_auto(cls, data: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return validate(data)
        automatic = [name for name in AXIS_NAMES if data.get(name) in AUTO_SIZES]
        if not automatic:
            return validate(data)
        if len(automatic) > 1:
            raise ValueError(
                f"mesh.{automatic[0]} and mesh.{automatic[1]} are both auto, but only one axis can "
                f"take the remaining devices; give one of them a size, such as "
                f"mesh.{automatic[1]}=1"
            )
        (axis,) = automatic
        # dp spans whole slices.
        unit = _as_count(data.get("dcn_dp")) if axis == "dp" else 1
        others = validate({**data, axis: unit}).num_devices
        config = validate({**data, axis: unit * max(1, NUM_SIMULATED // others)})
        config._auto = axis  # type: ignore[misc]  # private attributes are not frozen
        return config

    @model_serializer(mode="wrap")
    def _write_auto(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return serialize(self) | ({self._auto: "auto"} if self._auto else {})

    @property
    def auto_axis(self) -> str | None:
        """The axis that takes the devices which the others leave; None: all have a given size."""
        return self._auto

    @property
    def given_devices(self) -> int | None:
        """The product of all axes; None if one of them takes all devices that there are."""
        return None if self._auto else self.num_devices

    def smallest(self) -> "MeshConfig":
        """Return the mesh with the fewest devices on its automatic axis: one, or one per slice."""
        if self._auto is None:
            return self
        least = self.dcn_dp if self._auto == "dp" else 1
        return self.filled(least * self.num_devices // getattr(self, self._auto))

    def filled(self, num_devices: int) -> "MeshConfig":
        """Return the mesh whose automatic axis takes all of these devices, as a size.

        Raises: ValueError if the other axes do not divide the number of devices.
        """
        if self._auto is None:
            return self
        sizes = {name: getattr(self, name) for name in type(self).model_fields}
        others = self.num_devices // sizes[self._auto]
        if num_devices % others:
            axes = " * ".join(
                f"mesh.{name}={sizes[name]}"
                for name in AXIS_NAMES
                if name != self._auto and sizes[name] > 1
            )
            raise ValueError(
                f"mesh.{self._auto}=auto: {axes} does not divide {num_devices} "
                f"device{'s' if num_devices > 1 else ''}; make it a divisor of {num_devices}"
            )
        size = num_devices // others
        if self._auto == "dp" and size % self.dcn_dp:
            raise ValueError(
                f"mesh.dp=auto: {num_devices} devices leave mesh.dp={size}, which is not divisible "
                f"by mesh.dcn_dp={self.dcn_dp}; change the other axes, or mesh.dcn_dp"
            )
        return MeshConfig(**(sizes | {self._auto: size}))

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


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Build the explicit-sharding mesh over exactly `config.num_devices` devices.

    Slices follow one another along dp, and all of them have the same layout.

    Raises: ValueError for another number of devices or slices, or for axes that do not fit the
    torus of a slice.
    """
    shape = tuple(getattr(config, name) for name in AXIS_NAMES)
    if len(devices) != config.num_devices:
        sizes = " * ".join(f"{name} {size}" for name, size in zip(AXIS_NAMES, shape, strict=True))
        raise ValueError(
            f"mesh {sizes} needs {config.num_devices} devices, got {len(devices)}; change mesh.* "
            "so that they multiply to that"
        )
    if devices[0].platform == "tpu":
        inner = (config.dp // config.dcn_dp, *shape[1:])
        grid = np.array([_arrange_slice(part, inner) for part in _slices(config.dcn_dp, devices)])
    else:
        grid = np.array(devices)
    return Mesh(grid.reshape(shape), AXIS_NAMES, axis_types=(AxisType.Explicit,) * len(AXIS_NAMES))


def _slices(num_slices: int, devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Group devices by slice; devices of a single slice have no slice index."""
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
        raise ValueError(
            f"the slices have {sizes} devices, but mesh.dp needs equal slices; use equal slices"
        )
    return [found[index] for index in sorted(found)]


def _arrange_slice(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """Arrange the chips of one slice in this shape, tp and then sp along rings of links."""
    try:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except NotImplementedError as error:
        raise ValueError(
            f"mesh {dict(zip(AXIS_NAMES, shape, strict=True))} does not fit the torus of these "
            f"{len(devices)} chips; use powers of two that multiply to its sides"
        ) from error
    sp, tp = shape[-2:]
    groups = [group[_ring_order_of("tp", list(group))] for group in grid.reshape(-1, tp)]
    sheets = np.array(groups).reshape(-1, sp, tp)
    grid = np.array([sheet[_ring_order_of("sp", list(sheet[:, 0]))] for sheet in sheets])
    return grid.reshape(shape)


def ring_of_axes(mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[int, ...] | None:
    """Return the devices along these axes, numbered with the first axis outermost, as a ring.

    Consecutive ones are neighbours in the first group of devices along the axes; `build_mesh` lays
    out the other groups alike. Devices that are not TPUs keep their order. None if the chips form
    no ring.

    `build_mesh` orders tp and sp along such a ring, but not fsdp: libtpu gathers over all sides of
    the torus at once only if devices are in the order of their coordinates.
    """
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "tpu":
        return tuple(range(math.prod(mesh.shape[name] for name in axes)))
    names = [name for name in mesh.axis_names if name in axes]
    group = mesh.devices[tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)]
    order = ring_order(_coords(group.transpose([names.index(name) for name in axes]).flat))
    return None if order is None else tuple(order)


def is_hypercube(mesh: Mesh | AbstractMesh, axis: str) -> bool:
    """Return whether the TPUs along an axis are the corners of a box whose sides are 2 long.

    `build_mesh` then numbers them so that the reflected Gray code of a number is a corner.
    """
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "tpu":
        return False
    group = mesh.devices[tuple(slice(None) if name == axis else 0 for name in mesh.axis_names)]
    corners = np.array(_coords(group))
    corners -= corners.min(axis=0)
    return bool(corners.max() < 2 and len(np.unique(corners, axis=0)) == 2 ** corners.max(0).sum())


def _coords(devices: Iterable[jax.Device]) -> list[tuple[int, ...]]:
    return [(*device.coords, device.core_on_chip) for device in devices]


def _ring_order_of(axis: str, group: Sequence[jax.Device]) -> list[int]:
    """Return the indices of a group's devices along a ring of links; warn if there is none."""
    order = ring_order(_coords(group))
    if order is None:
        _LOG.warning(
            "%s %d: these chips form no ring of neighbours, so some hops take several links",
            axis,
            len(group),
        )
    return list(range(len(group))) if order is None else order


def ring_order(coords: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Return the indices of grid positions in the order of a ring of neighbours, or None.

    The ring is a Hamiltonian cycle of the grid. A box has one if it has at least two sides longer
    than 1, one of them even; for other shapes, and for positions that fill no box, the result is
    None. Wrap-around links are not used.
    """
    if len(coords) <= 2:
        return sorted(range(len(coords)), key=coords.__getitem__)
    lows = [min(axis) for axis in zip(*coords, strict=True)]
    sides = [max(axis) - low + 1 for axis, low in zip(zip(*coords, strict=True), lows, strict=True)]
    cycle = _box_cycle(sides) if math.prod(sides) == len(coords) else None
    if cycle is None:
        return None
    index = {position: number for number, position in enumerate(coords)}
    return [index[tuple(a + b for a, b in zip(step, lows, strict=True))] for step in cycle]


def _box_cycle(sides: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return a closed walk of neighbours through every position of a box, or None."""
    even = next((axis for axis, side in enumerate(sides) if side % 2 == 0), None)
    if even is None:
        return None
    # The other axes, walked in one line, form the columns of a sheet; the even axis has its rows.
    columns = _snake([side for axis, side in enumerate(sides) if axis != even])
    if len(columns) == 1:
        return None
    # From the corner through all columns but the first, row by row in alternating direction; then
    # back along the first column. On a cube of side 2 this is the reflected Gray code.
    rows = range(sides[even])
    walk = [(0, columns[0])]
    walk += [(row, rest) for row in rows for rest in (columns[1:], columns[:0:-1])[row % 2]]
    walk += [(row, columns[0]) for row in reversed(rows) if row]
    return [(*rest[:even], row, *rest[even:]) for row, rest in walk]


def _snake(sides: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all positions of a box in an order in which consecutive ones are neighbours."""
    if not sides:
        return [()]
    inner = _snake(sides[1:])
    return [(i, *rest) for i in range(sides[0]) for rest in (inner, inner[::-1])[i % 2]]


def context_mesh() -> Mesh | AbstractMesh | None:
    """Return the mesh of `jax.set_mesh`, or None; None inside shard_map too.

    While jax traces, the result is an AbstractMesh. Inside shard_map, manual axes no longer split
    array types, so a layout on that mesh would be wrong.
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty or abstract.manual_axes:
        return None
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:
        # jax shows no devices while it traces, and has no public test for tracing.
        return abstract
    return abstract if concrete.empty else concrete


def mesh_context(mesh: Mesh | AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which PartitionSpecs resolve on `mesh`.

    A mesh that is already set stays. So code that is given a mesh also works without
    `jax.set_mesh`, traced or not.
    """
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    try:
        return jax.set_mesh(mesh)
    except ValueError:  # while jax traces
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


_MESH_KEYS = ("axis_names", "axis_sizes", "axis_types", "platform", "device_ids")


def mesh_to_dict(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Return axes and devices as JSON values. Raises: ValueError for a mesh without devices."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"mesh {mesh.shape_tuple} is abstract and has no devices to write; build the config "
            "outside of jax.jit, or pass mesh="
        )
    return {
        "axis_names": list(mesh.axis_names),
        "axis_sizes": list(mesh.axis_sizes),
        "axis_types": [kind.name for kind in mesh.axis_types],
        # Ids are unique within a platform only: a process may have both CPU 0 and GPU 0.
        "platform": mesh.devices.flat[0].platform,
        "device_ids": [device.id for device in mesh.devices.flat],
    }


def mesh_from_dict(data: Mapping[str, Any]) -> Mesh:
    """Rebuild the mesh of `mesh_to_dict`, on the same devices in the same order.

    Raises: ValueError if the entries contradict each other, or this machine lacks the devices.
    """
    refuse_unknown_keys("mesh", data, _MESH_KEYS)
    if missing := [key for key in _MESH_KEYS if key not in data]:
        raise ValueError(f"mesh: key {missing[0]!r} is missing; a mesh has {', '.join(_MESH_KEYS)}")
    names, sizes, ids = data["axis_names"], data["axis_sizes"], data["device_ids"]
    axes_match = len(names) == len(sizes) == len(data["axis_types"])
    if not axes_match or not math.prod(sizes) == len(ids) == len(set(ids)):
        raise ValueError(
            f"mesh: axes {names} with sizes {sizes} and types {data['axis_types']} do not match "
            f"devices {ids}; give one size and type per axis, and as many different ids as the "
            "sizes multiply to"
        )
    if unknown := [kind for kind in data["axis_types"] if kind not in AxisType.__members__]:
        legal = ", ".join(AxisType.__members__)
        raise ValueError(f"mesh: axis type {unknown[0]!r} is unknown; use {legal}")
    present = {device.id: device for device in _devices(data["platform"])}
    if absent := [number for number in ids if number not in present]:
        raise ValueError(
            f"mesh: this machine has no {data['platform']} devices {absent}, only "
            f"{sorted(present)}; pass mesh= to put the config on other devices"
        )
    grid = np.array([present[number] for number in ids]).reshape(sizes)
    return Mesh(grid, tuple(names), axis_types=tuple(AxisType[k] for k in data["axis_types"]))


def _devices(platform: str) -> list[jax.Device]:
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"mesh: this machine has no {platform} devices; pass mesh= to put the config on others"
        ) from error
