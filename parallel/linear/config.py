"""The configuration of tensor parallelism, and the layout of a product before it is computed.

`TensorParallelConfig` tells a linear its mesh, its axis and how it overlaps communication. Names
follow the published reference `easydel.layers.linear`; docstrings say where we differ.
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
from parallel.sharding.mesh import context_mesh, mesh_from_dict, mesh_to_dict
from parallel.sharding.partition import (
    PartitionAxis,
    PartitionManager,
    refuse_auto_axes,
    refuse_unknown_keys,
)
from parallel.sharding.specs import mesh_axes_of, without_axis


class MatrixMultiplyMethod(StrEnum):
    """The collective around a sharded matmul; each member equals its value as a string."""

    ALL_GATHER = "all_gather"
    """Gather the input over the axis, then multiply."""
    REDUCE_SCATTER = "reduce_scatter"
    """Multiply, then reduce-scatter the partial products over the axis."""


def _method(value: str) -> MatrixMultiplyMethod:
    if value not in list(MatrixMultiplyMethod):
        legal = ", ".join(MatrixMultiplyMethod)
        raise ValueError(f"matmul_method {value!r} is not a matmul method; use one of {legal}")
    return MatrixMultiplyMethod(value)


@jax.tree_util.register_static
@dataclass(frozen=True)
class TensorParallelConfig:
    """Mesh, axis and communication of tensor-parallel linears; hashable, and survives JSON.

    A pytree without leaves, so it can be an argument of a jitted function.

    The fields from `partition_axis` on are ours. The reference reads the mesh of the context only
    if `matmul_method` is set; its text also calls that field `matmul_type`.
    """

    mesh: Mesh | None = None
    """Explicit-sharding mesh; None: the one of `jax.set_mesh`, if any. While jax traces, that is an
    AbstractMesh, which cannot be serialised."""
    axis_name: str = "tp"
    """Mesh axis that splits heads, MLP width and vocabulary: TP of the partition rules."""
    matmul_method: MatrixMultiplyMethod | None = None
    """Collective around a linear's matmul; needs a mesh. None: what the linear's class and the
    layouts ask for."""
    reduce_output: bool = False
    """All-reduce the output of a REDUCE_SCATTER linear instead of scattering it."""
    reduce_scatter_output: bool = False
    """Leave column-parallel outputs split over the axis instead of gathering them."""
    partition_axis: PartitionAxis = field(default_factory=PartitionAxis, kw_only=True)
    """Rules that lay out parameters and activations."""
    overlap: Overlap = field(default="none", kw_only=True)
    """How communication is hidden under matmuls; see collective_matmul.py."""
    kind_overlaps: Mapping[str, Overlap] = field(
        default_factory=lambda: MappingProxyType({}), kw_only=True, hash=False
    )
    """Exceptions from `overlap` by kind of linear, such as {"qkv": "split"}."""
    fsdp_overlap: Overlap = field(default="none", kw_only=True)
    """How gathers of kernels over the axes that only store them (fsdp, sp), and the sums of their
    gradients, are hidden, where tp has one device; see stored_kernel.py."""
    group_hops: bool = field(default=True, kw_only=True)
    """Let training steps on TPUs schedule every hop of `hypercube` together with the matmuls that
    hide it; see scheduling.py."""
    head_width: int | None = field(default=None, kw_only=True)
    """Width of the heads into which column-parallel outputs are split, and from which row-parallel
    inputs are merged, if they should lie head by head in memory (see head_matmul.py). With several
    devices on tp, or adapters, it changes nothing."""

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
            refuse_auto_axes(self.mesh)
        if not isinstance(self.kind_overlaps, Mapping):
            raise ValueError(
                f"kind_overlaps={self.kind_overlaps!r} is not a mapping; give one overlap per kind"
            )
        named = {"overlap": self.overlap, "fsdp_overlap": self.fsdp_overlap}
        for key, overlap in (*named.items(), *self.kind_overlaps.items()):
            if overlap not in get_args(Overlap):
                legal = ", ".join(get_args(Overlap))
                raise ValueError(f"{key}={overlap!r} is not an overlap; use one of {legal}")
        # A private copy: the config is a key of jit's caches, so it must not change later.
        object.__setattr__(self, "kind_overlaps", MappingProxyType(dict(self.kind_overlaps)))

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle and deepcopy do not support MappingProxyType.
        values = {name: getattr(self, name) for name in _FIELDS}
        values["kind_overlaps"] = dict(self.kind_overlaps)
        return partial(TensorParallelConfig, **values), ()

    @property
    def matmul_type(self) -> MatrixMultiplyMethod | None:
        """Alias of `matmul_method`, from the reference's list of attributes."""
        return self.matmul_method

    @property
    def manager(self) -> PartitionManager:
        """The resolver of semantic axes on this mesh. Raises: ValueError without a mesh."""
        if self.mesh is None:
            raise ValueError(
                "this TensorParallelConfig has no mesh, so no axis resolves; pass mesh= or build "
                "it under jax.set_mesh(mesh)"
            )
        rules = dataclasses.replace(self.partition_axis, tensor_parallel_axis=self.axis_name)
        return PartitionManager(rules, self.mesh)

    def for_kind(self, kind: str) -> "TensorParallelConfig":
        """Return a copy whose `overlap` is that of this kind of linear."""
        return dataclasses.replace(self, overlap=self.kind_overlaps.get(kind, self.overlap))

    def replace(self, **changes: Any) -> "TensorParallelConfig":
        """Return a copy with these fields changed. Raises: ValueError for an unknown field."""
        refuse_unknown_keys("TensorParallelConfig", changes, _FIELDS)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. Raises: ValueError for a mesh without devices."""
        return {
            **{name: getattr(self, name) for name in _FIELDS},
            "mesh": None if self.mesh is None else mesh_to_dict(self.mesh),
            "matmul_method": None if self.matmul_method is None else str(self.matmul_method),
            "partition_axis": self.partition_axis.to_dict(),
            "kind_overlaps": dict(self.kind_overlaps),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], mesh: Mesh | None = None) -> "TensorParallelConfig":
        """Rebuild the config of `to_dict`; missing keys take their defaults.

        mesh: Replaces the stored mesh, for another machine.

        Raises: ValueError for an unknown key, or if this machine lacks the stored devices.
        """
        refuse_unknown_keys("TensorParallelConfig", data, _FIELDS)
        values = dict(data)
        stored = values.pop("mesh", None)
        if mesh is None and stored is not None:
            mesh = mesh_from_dict(stored)
        if values.get("matmul_method") is not None:
            values["matmul_method"] = _method(values["matmul_method"])
        if "partition_axis" in values:
            values["partition_axis"] = PartitionAxis.from_dict(values["partition_axis"])
        return cls(mesh=mesh, **values)

    def to_json(self, **kwargs: Any) -> str:
        """Return `to_dict` as JSON; `kwargs` go to json.dumps."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def from_json(cls, json_str: str, mesh: Mesh | None = None) -> "TensorParallelConfig":
        """Rebuild the config of `to_json`; see `from_dict`."""
        return cls.from_dict(json.loads(json_str), mesh)


_FIELDS = tuple(entry.name for entry in dataclasses.fields(TensorParallelConfig))


def _check_axis(name: str, axis_name: str, mesh: Mesh | AbstractMesh) -> None:
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{name} {axis_name!r} is not an axis of the mesh; use one of "
            f"{', '.join(mesh.axis_names)}"
        )


def _named_sharding(arr: Any) -> NamedSharding | None:
    """Return the sharding of an array on a mesh of several devices, or None if it is not known."""
    arr = arr[...] if isinstance(arr, nnx.Variable) else arr
    sharding: Any = jax.typeof(arr).sharding
    if not sharding.mesh.are_all_axes_explicit and not isinstance(arr, jax.core.Tracer):
        sharding = getattr(arr, "sharding", None)  # types do not show Auto axes
    elif AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def get_sharding(arr: Any) -> P | None:
    """Return the PartitionSpec of an array, one entry per dim, the same eagerly and under jit.

    An array that every device of a mesh holds whole has a spec of None entries. The result is None
    for a single device, a sharding without axis names, and a tracer without explicit axes (Auto
    meshes, shard_map bodies). The reference fails under jit and on shardings without a spec, and
    returns short specs as they are.
    """
    sharding = _named_sharding(arr)
    if sharding is None:
        return None
    missing = np.ndim(arr) - len(sharding.spec)
    return P(*sharding.spec, *[None] * missing) if missing else sharding.spec


def get_output_partition_spec(lhs: Any, rhs: Any, method: str, axis_name: str) -> P | None:
    """Return the PartitionSpec of `lhs @ rhs`, or None if either array is not sharded.

    ALL_GATHER: lhs is gathered over the axis, and F keeps the layout it has in rhs:
        `... L/tp D` or `... L D/tp` or `... L D`, with `D F/tp` -> `... L F/tp`.
    REDUCE_SCATTER: D is on the axis in lhs, in rhs, or in both; partial products are summed and
        scattered onto F, inside of the axes that split F in rhs: `... L D/tp`, `D/tp F` ->
        `... L F/tp`.
    A mesh axis that splits a row dim does not split F too: rhs is gathered over it. The reference
    ignores `method`: it returns P(rhs[1], rhs[0]) for matrices, and P(..., axis_name) otherwise.

    Args:
        lhs: Activations `... L D`.
        rhs: Kernel `D F`.
        method: A `MatrixMultiplyMethod` or its name.
        axis_name: The tensor-parallel mesh axis.

    Raises:
        ValueError: The axis or method is unknown, rhs is not `D F`, F does not divide, or a
            reduce-scatter has no partial sums or finds the axis in use.
    """
    method = _method(method)
    if len(lhs.shape) < 1 or len(rhs.shape) != 2:
        raise ValueError(f"lhs {lhs.shape} and rhs {rhs.shape} are not `... D` and `D F`")
    left, right = _named_sharding(lhs), _named_sharding(rhs)
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
    """Return the spec of X @ W: the rows of X, then the columns of W.

    A mesh axis keeps its first use; later uses are dropped, also from tuples. Specs have one entry
    per dim, as from `get_sharding`. If either is None, or X has no entries, the result is P(). A W
    of one entry splits rows only (the reference takes that entry for the columns).
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
