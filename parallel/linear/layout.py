"""How a linear is told to split, and what the types of arrays already say about splits.

`TensorParallelConfig` is the one argument by which a linear learns its mesh, its axis and how it
hides communication; it is frozen, hashable and survives JSON. The functions below it read layouts:
of a spec, of an array (committed or traced), of a product before it is computed. This file moves
no data and knows no linear: it refuses what cannot hold before any device works. Names follow the
published reference `easydel.layers.linear`; where we differ, the docstring says so.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.linear.collective_matmul import Overlap
from parallel.sharding.partition import (
    PartitionAxis,
    PartitionManager,
    Residual,
    refuse_unknown_keys,
)


class MatrixMultiplyMethod(StrEnum):
    """The collective that a split matmul needs; a member equals its value as a string."""

    ALL_GATHER = "all_gather"
    """The input is gathered over the axis, then multiplied."""
    REDUCE_SCATTER = "reduce_scatter"
    """Partial products are summed over the axis, each device keeping its part."""


def _method(value: str) -> MatrixMultiplyMethod:
    if value not in list(MatrixMultiplyMethod):
        legal = ", ".join(MatrixMultiplyMethod)
        raise ValueError(f"matmul_method {value!r} is not a matmul method; use one of {legal}")
    return MatrixMultiplyMethod(value)


@dataclass(frozen=True)
class TensorParallelConfig:
    """Where and how linears are split.

    mesh: explicit-sharding mesh; None takes the one of `jax.set_mesh`, if any. While jax traces,
        that is an AbstractMesh: good for shard_map and the rules, without devices to write down.
    axis_name: the mesh axis that splits heads, MLP width and vocabulary: TP of the rules.
    matmul_method: the collective around a linear's matmul, which then needs a mesh; None: what the
        linear's direction and the layouts ask for.
    reduce_output: a row-parallel output is whole on every device of the axis.
    reduce_scatter_output: a column-parallel output stays split over the axis.
    partition_axis: the rules by which parameters and activations are laid out.
    overlap: how a linear hides its communication; see parallel/linear/collective_matmul.py.
    kind_overlaps: the kinds of linears whose overlap differs, such as {"qkv": "split"}.
    The fields from partition_axis on are ours. The reference looks for a mesh in the context only
    for a matmul_method; its text also calls that field `matmul_type`.
    """

    mesh: Mesh | None = None
    axis_name: str = "tp"
    matmul_method: MatrixMultiplyMethod | None = None
    reduce_output: bool = False
    reduce_scatter_output: bool = False
    partition_axis: PartitionAxis = field(default_factory=PartitionAxis, kw_only=True)
    overlap: Overlap = field(default="none", kw_only=True)
    kind_overlaps: Mapping[str, Overlap] = field(
        default_factory=lambda: MappingProxyType({}), kw_only=True, hash=False
    )

    def __post_init__(self) -> None:
        if self.mesh is None:
            object.__setattr__(self, "mesh", context_mesh())
        if self.matmul_method is not None:
            _method(self.matmul_method)
            if self.mesh is None:
                raise ValueError(
                    f"matmul_method {str(self.matmul_method)!r} needs a mesh; pass mesh= or call "
                    "jax.set_mesh(mesh) first"
                )
        if self.mesh is not None:
            _check_axis("axis_name", self.axis_name, self.mesh)
        if not isinstance(self.kind_overlaps, Mapping):
            raise ValueError(
                f"kind_overlaps={self.kind_overlaps!r} is not a mapping; give one overlap per kind"
            )
        for where, overlap in (("overlap", self.overlap), *self.kind_overlaps.items()):
            if overlap not in get_args(Overlap):
                legal = ", ".join(get_args(Overlap))
                raise ValueError(f"{where}={overlap!r} is not an overlap; use one of {legal}")
        # A copy of its own: the config is a key of jit's caches, so it must not change later.
        object.__setattr__(self, "kind_overlaps", MappingProxyType(dict(self.kind_overlaps)))

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickle and deepcopy, which know no MappingProxyType.
        values = {name: getattr(self, name) for name in _FIELDS}
        values["kind_overlaps"] = dict(self.kind_overlaps)
        return partial(TensorParallelConfig, **values), ()

    @property
    def matmul_type(self) -> MatrixMultiplyMethod | None:
        """`matmul_method`, under the name that the reference's attribute list gives it."""
        return self.matmul_method

    @property
    def manager(self) -> PartitionManager:
        """Resolves semantic axes on this mesh. Raises: ValueError without a mesh."""
        if self.mesh is None:
            raise ValueError(
                "this TensorParallelConfig has no mesh, so no axis resolves; pass mesh= or build "
                "it under jax.set_mesh(mesh)"
            )
        rules = dataclasses.replace(self.partition_axis, tensor_parallel_axis=self.axis_name)
        return PartitionManager(rules, self.mesh)

    def for_kind(self, kind: str) -> "TensorParallelConfig":
        """This config as linears of that kind read it: `overlap` is theirs."""
        return dataclasses.replace(self, overlap=self.kind_overlaps.get(kind, self.overlap))

    def replace(self, **changes: Any) -> "TensorParallelConfig":
        """A copy with these fields changed. Raises: ValueError for an unknown field."""
        refuse_unknown_keys("TensorParallelConfig", changes, _FIELDS)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold. Raises: ValueError for a mesh without devices."""
        return {
            **{name: getattr(self, name) for name in _FIELDS},
            "mesh": None if self.mesh is None else mesh_to_dict(self.mesh),
            "matmul_method": None if self.matmul_method is None else str(self.matmul_method),
            "partition_axis": self.partition_axis.to_dict(),
            "kind_overlaps": dict(self.kind_overlaps),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], mesh: Mesh | None = None) -> "TensorParallelConfig":
        """What `to_dict` wrote; a key that is left out takes its default.

        mesh: takes the place of the written one, for another machine.
        Raises: ValueError for an unknown key, or if this machine lacks the written devices.
        """
        refuse_unknown_keys("TensorParallelConfig", data, _FIELDS)
        values = dict(data)
        written = values.pop("mesh", None)
        if mesh is None and written is not None:
            mesh = mesh_from_dict(written)
        if values.get("matmul_method") is not None:
            values["matmul_method"] = _method(values["matmul_method"])
        if "partition_axis" in values:
            values["partition_axis"] = PartitionAxis.from_dict(values["partition_axis"])
        return cls(mesh=mesh, **values)

    def to_json(self, **kwargs: Any) -> str:
        """`to_dict` as JSON; the keyword arguments are those of json.dumps."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def from_json(cls, json_str: str, mesh: Mesh | None = None) -> "TensorParallelConfig":
        """What `to_json` wrote; see `from_dict`."""
        return cls.from_dict(json.loads(json_str), mesh)


_FIELDS = tuple(entry.name for entry in dataclasses.fields(TensorParallelConfig))
_MESH_KEYS = ("axis_names", "axis_sizes", "axis_types", "platform", "device_ids")


def context_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh`; none inside shard_map, where an axis no longer splits types."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty or abstract.manual_axes:
        return None
    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:
        # While it traces, jax shows no devices, and it has no public question "am I tracing?".
        return abstract
    return abstract if concrete.empty else concrete


def _check_axis(name: str, axis_name: str, mesh: Mesh | AbstractMesh) -> None:
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{name} {axis_name!r} is not an axis of the mesh; use one of "
            f"{', '.join(mesh.axis_names)}"
        )


def mesh_to_dict(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """Axes and devices, as values that JSON can hold. Raises: ValueError if it has no devices."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"mesh {mesh.shape_tuple} is abstract and has no devices to write; build the config "
            "outside of jax.jit, or pass mesh="
        )
    return {
        "axis_names": list(mesh.axis_names),
        "axis_sizes": list(mesh.axis_sizes),
        "axis_types": [kind.name for kind in mesh.axis_types],
        # Ids are unique on one platform only: CPU 0 and GPU 0 may stand in one process.
        "platform": mesh.devices.flat[0].platform,
        "device_ids": [device.id for device in mesh.devices.flat],
    }


def mesh_from_dict(data: Mapping[str, Any]) -> Mesh:
    """What `mesh_to_dict` wrote, on the same devices in the same order.

    Raises: ValueError if it does not hold together, or if this machine lacks the devices.
    """
    refuse_unknown_keys("mesh", data, _MESH_KEYS)
    if missing := [key for key in _MESH_KEYS if key not in data]:
        raise ValueError(f"mesh: key {missing[0]!r} is missing; a mesh has {', '.join(_MESH_KEYS)}")
    names, sizes, ids = data["axis_names"], data["axis_sizes"], data["device_ids"]
    axes_match = len(names) == len(sizes) == len(data["axis_types"])
    if not axes_match or not math.prod(sizes) == len(ids) == len(set(ids)):
        raise ValueError(
            f"mesh: axes {names} of sizes {sizes} and types {data['axis_types']} do not hold the "
            f"devices {ids}; give one size and type per axis, and their product of different ids"
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


def mesh_axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec, outermost first."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def without_axis(entry: Any, *axis_names: str) -> Any:
    """One entry of a PartitionSpec with these mesh axes taken out."""
    kept = tuple(name for name in mesh_axes_of(entry) if name not in axis_names)
    return kept[0] if len(kept) == 1 else kept or None


def layout_of(spec: P, axis_name: str, *, rank: int | None = None) -> Residual:
    """How activations `... L D` with this spec lie on the tensor-parallel axis.

    rank: of the activations, for a spec that leaves trailing dims out (they are whole). Without it
        the last entry is the features' and an empty spec is replicated; types are always full.
    Raises: ValueError if the axis splits a dim before L, or is not the innermost there: local
        blocks would not be contiguous. Also if the spec has more entries than dims.
    """
    rank = len(spec) if rank is None else rank
    if len(spec) > rank:
        raise ValueError(f"spec {spec} has more than the {rank} dims of the activations")
    split = [dim for dim, entry in enumerate(spec) if axis_name in mesh_axes_of(entry)]
    if not split:
        return "replicated"
    if mesh_axes_of(spec[split[0]])[-1] != axis_name:
        raise ValueError(
            f"activations of type {spec} are split over {axis_name} outside of other axes; reshard "
            f"them so that {axis_name} comes last in its entry"
        )
    if split[0] < rank - 2:
        raise ValueError(
            f"activations of type {spec} are split over {axis_name} before dim -2; reshard them "
            "so that it splits rows or features"
        )
    return "hidden" if split[0] == rank - 1 else "sequence"


def _placement(arr: Any) -> NamedSharding | None:
    """The array's place on a mesh of several devices, if it is known."""
    arr = arr[...] if isinstance(arr, nnx.Variable) else arr
    sharding: Any = jax.typeof(arr).sharding
    if not sharding.mesh.are_all_axes_explicit and not isinstance(arr, jax.core.Tracer):
        sharding = getattr(arr, "sharding", None)  # on Auto axes only the array itself knows
    elif AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def get_sharding(arr: Any) -> P | None:
    """The layout of an array on its mesh: one entry per dim, the same eagerly and under jit.

    None: a single device, a sharding without names, or a tracer that no explicit axis types (Auto
    meshes, shard_map bodies). Whole on all devices of a mesh is a layout: all entries None.
    The reference reads `.sharding.spec` as it was written: it fails on the first kind and under
    jit, and a spec that leaves out trailing dims comes back short.
    """
    placement = _placement(arr)
    if placement is None:
        return None
    missing = np.ndim(arr) - len(placement.spec)
    return P(*placement.spec, *[None] * missing) if missing else placement.spec


def get_output_partition_spec(lhs: Any, rhs: Any, method: str, axis_name: str) -> P | None:
    """The layout of `lhs @ rhs` under that method; None if either has none (`get_sharding`).

    lhs `... L D`: activations; rhs `D F`: a kernel. With the axis in another place than named:
    ALL_GATHER: the axis leaves lhs, be it on rows or on features, and F lies as in rhs:
        `... L/tp D` or `... L D/tp` or `... L D`, with `D F/tp` -> `... L F/tp`.
    REDUCE_SCATTER: D is on the axis, in lhs or in rhs or both; the partial products are summed and
        scattered onto F, inside of the axes that split F in rhs:
        `... L D/tp`, `D/tp F` -> `... L F/tp`.  (A scatter onto rows is the row linear's own.)
    A mesh axis that already splits a row dim does not split F too: rhs is gathered over it.
    Raises: ValueError for an axis or method that does not exist, a reduce-scatter that has nothing
    to sum or finds the axis taken, an F that does not divide, an rhs that is not `D F`.
    The reference ignores `method`: P(rhs[1], rhs[0]) for matrices, P(..., axis_name) otherwise.
    """
    method = _method(method)
    if len(lhs.shape) < 1 or len(rhs.shape) != 2:
        raise ValueError(f"lhs {lhs.shape} and rhs {rhs.shape} are not `... D` and `D F`")
    left, right = _placement(lhs), _placement(rhs)
    lhs_spec, rhs_spec = get_sharding(lhs), get_sharding(rhs)
    if left is None or right is None or lhs_spec is None or rhs_spec is None:
        return None
    _check_axis("axis_name", axis_name, left.mesh)
    _check_axis("axis_name", axis_name, right.mesh)
    if method is MatrixMultiplyMethod.ALL_GATHER:
        gathered = P(*(without_axis(entry, axis_name) for entry in lhs_spec))
        return get_matmul_output_sharding(gathered, rhs_spec)
    contracted = (*mesh_axes_of(lhs_spec[-1]), *mesh_axes_of(rhs_spec[0]))
    product = get_matmul_output_sharding(lhs_spec, rhs_spec)
    if axis_name not in contracted or any(axis_name in mesh_axes_of(entry) for entry in product):
        raise ValueError(
            f"{lhs_spec} @ {rhs_spec} leaves no partial sums over {axis_name} to scatter; put "
            f"{axis_name} on the features of lhs and on dim 0 of rhs, or use all_gather"
        )
    scattered = (*mesh_axes_of(product[-1]), axis_name)
    parts = math.prod(right.mesh.shape[name] for name in scattered)
    if rhs.shape[1] % parts:
        raise ValueError(
            f"rhs {rhs.shape}: dim 1 = {rhs.shape[1]} is not divisible by "
            f"{' x '.join(scattered)} = {parts}; use a width that is"
        )
    return P(*product[:-1], scattered)


def get_matmul_output_sharding(lhs_pspec: P | None, rhs_pspec: P | None) -> P:
    """The layout of X @ W from theirs: the rows of X, the columns of W, the rank of X.

    A mesh axis stays where it is first used: later uses are dropped, out of tuples too. P() if
    either is None. Specs have one entry per dim, as `get_sharding` gives them; dims that a short
    one leaves out are whole: P() @ anything has no known rank and stays P(), and a W of one entry
    has rows only (the reference takes that entry for the columns).
    """
    if not lhs_pspec or rhs_pspec is None:
        return P()
    columns = rhs_pspec[-1] if len(rhs_pspec) > 1 else None
    used: set[str] = set()
    entries: list[Any] = []
    for entry in (*lhs_pspec[:-1], columns):
        fresh = tuple(name for name in mesh_axes_of(entry) if name not in used)
        used.update(fresh)
        entries.append(fresh or None)
    return P(*entries)
