"""Groups of devices among which a collective runs, and the mesh axes that they follow."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

import numpy as np

from parallel.planning.hlo import Instruction

Groups = tuple[tuple[int, ...], ...]

BETWEEN_SLICES = "between slices"
NO_AXES = "no mesh axes"
ONE_DEVICE = "one device"


def device_groups(x: Instruction, num_partitions: int) -> Groups:
    """Return the partitions of each group of a collective.

    A permute has one group per message. Partitions are numbered as in `mesh.devices.flat`.

    Raises: ValueError for replica_groups in an unknown form.
    """
    if x.source_target_pairs:
        return x.source_target_pairs
    text = x.find(r"replica_groups=(.*)")
    if text is None or text.startswith("{}"):
        return (tuple(range(num_partitions)),)
    found = _parse(text)
    if found is None:
        raise ValueError(
            f"{x.name} has replica_groups={text[:60]!r}, which is no known form; extend "
            "parallel/planning/device_groups.py"
        )
    return found


def _parse(text: str) -> Groups | None:
    """Parse `{{0,1},{2,3}}`, `[2,2]<=[4]T(..)` or `mesh['a'=2,'b'=2] {'b'}`."""
    if listed := re.match(r"\{(\{[\d,{}]*\})\}", text):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if iota := re.match(r"\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _rows(_iota(iota[3]).reshape(int(iota[1]), int(iota[2])))
    mesh = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((\S+)\))? *(?:\{([^}]*)\})?", text)
    return _mesh_groups(mesh[1], mesh[2], mesh[3]) if mesh else None


def _mesh_groups(axes: str, devices: str | None, split: str | None) -> Groups:
    """Return the groups that vary along the listed axes of a mesh, by default along all.

    devices: the order of the devices in the mesh, as a list or a transposed iota. An axis may be
    listed in part: `'a':(2)4` is the 4 in the middle of an axis `'a'` of 2 * 4 * n.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    listed = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(
            r"'?([A-Za-z_][\w.]*)'?(?::\((\d+)\)(\d+))?", split or ",".join(sizes)
        )
    ]
    dims: list[int] = []
    varying: list[int] = []
    for name, size in sizes.items():
        cuts = sorted(
            {1, size}
            | {cut for a, before, n in listed if a == name for cut in (before, before * n)}
        )
        for low, high in itertools.pairwise(cuts):
            if any(a == name and before <= low < before * n for a, before, n in listed):
                varying.append(len(dims))
            dims.append(high // low)
    count = math.prod(dims)
    if devices is None:
        ids = np.arange(count)
    elif devices.startswith("["):
        ids = _iota(devices)
    else:
        ids = np.array(_numbers(devices))
    grid = np.moveaxis(ids.reshape(dims), varying, range(-len(varying), 0))
    return _rows(grid.reshape(-1, math.prod(dims[i] for i in varying)))


def _iota(text: str) -> np.ndarray:
    """Return the device ids that `[2,4]T(1,0)` stands for."""
    found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert found is not None, text
    dims = _numbers(found[1])
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(_numbers(found[2])) if found[2] else ids).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _rows(grid: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in grid)


class MeshAxes:
    """Names the mesh axes that groups of devices follow.

    sizes: of the mesh axes, the outermost first. num_partitions: of the program. With several
    slices a program is that of one slice, and the outermost axis spans the slices.

    Raises: ValueError if the mesh is not one of these partitions.
    """

    def __init__(self, sizes: Mapping[str, int], num_partitions: int):
        total = math.prod(sizes.values())
        slices, rest = divmod(total, num_partitions)
        used = [(name, size) for name, size in sizes.items() if size > 1]
        if rest or (slices > 1 and used[0][1] % slices):
            raise ValueError(
                f"a mesh of {dict(sizes)} has no whole slices of {num_partitions} devices, the "
                "partitions of this program; pass mesh.shape of the mesh it was compiled for"
            )
        if slices > 1:
            used[0] = used[0][0], used[0][1] // slices
        self._names = [name for name, size in used if size > 1]
        self._sizes = [size for _, size in used if size > 1]
        self._label = lru_cache(maxsize=None)(self._label_uncached)

    @cached_property
    def _coords(self) -> np.ndarray:
        """Position of each partition along the axes."""
        return np.indices(self._sizes).reshape(len(self._sizes), -1).T

    def label(self, x: Instruction, num_partitions: int) -> str:
        """Return the axes of a collective, such as "tp" or "dp+fsdp".

        A group that follows some axes but not all along them is "part of tp"; groups that follow
        no axes are `NO_AXES`; a collective of each device with itself is `ONE_DEVICE`.
        """
        groups = device_groups(x, num_partitions)
        return self._label(groups, bool(x.source_target_pairs))

    def _label_uncached(self, groups: Groups, is_permute: bool) -> str:
        if all(len(set(group)) == 1 for group in groups):
            return ONE_DEVICE
        if not self._names:
            return NO_AXES
        if is_permute:
            return self._joined(set().union(*(self._varying(pair) for pair in groups)))
        varying = self._varying(groups[0])
        if any(self._varying(group) != varying for group in groups):
            return NO_AXES
        whole = math.prod(self._sizes[axis] for axis in varying)
        label = self._joined(varying)
        return label if len(groups[0]) == whole else f"part of {label}"

    def _varying(self, group: Iterable[int]) -> set[int]:
        """Return the axes along which the devices of a group differ."""
        coords = self._coords[list(group)]
        return {axis for axis in range(len(self._sizes)) if len(set(coords[:, axis])) > 1}

    def _joined(self, axes: Iterable[int]) -> str:
        return "+".join(self._names[axis] for axis in sorted(axes))
