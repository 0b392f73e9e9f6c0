"""What an attention call knows beside its arrays: dtypes, mesh, layouts, settings per operation.

`OperationMetadata` gathers it once, from arguments or from a model's configuration, survives JSON,
and says how every array of an attention lies on the mesh (`AttnShardingRules`). It computes
nothing and knows no operation but by name. Names follow the published reference
`easydel.layers.operations._operation_meta`; where we differ, the docstring says so. Letters: B
batch, L queries, T keys, H query heads, h head dim; t of a layout's name is L or T.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from pydantic import BaseModel, PositiveInt, ValidationError

from model.attention.capabilities import Layout
from parallel.sharding import axes as ax
from parallel.sharding.mesh import context_mesh, mesh_from_dict, mesh_to_dict
from parallel.sharding.partition import PartitionAxis, PartitionManager, refuse_unknown_keys

OPERATION_NAMES = (
    *("vanilla", "sdpa", "flash_attn2", "ring", "blocksparse"),
    *("ragged_page_attention_v2", "ragged_page_attention_v3"),
    "ulysses",  # ours; the reference documents the others
)
"""What an operation can be called; the registry, which reads this file, holds the same names."""

_UNSET: Any = ax.NOT_GIVEN
_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


class AttnShardingRules(NamedTuple):
    """How every array of an attention lies on the mesh.

    query3d: queries without their length, `B H h`. query, key, value, output: in the layout that
    was asked for. bias, mask: `B H L T`, in thd `H L T`. q_segment_ids, kv_segment_ids: `B L` and
    `B T`, in thd `L` and `T`. softmax_aux: None if there is none.
    """

    query3d: P
    query: P
    key: P
    value: P
    bias: P
    mask: P
    output: P
    q_segment_ids: P
    kv_segment_ids: P
    softmax_aux: P | None


class OperationConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Settings of one attention operation."""

    block_q: PositiveInt | None = None
    """Queries of a block; null: the operation's own choice."""
    block_k: PositiveInt | None = None
    """Keys of a block; null: the operation's own choice."""


@dataclass
class OperationMetadata:
    """Everything static that attention operations share; what is not given is filled in.

    A field counts as not given if it is NOT_GIVEN, EMPTY_VAL, Ellipsis or None. It then takes the
    attribute of `base_config` of the same name (another name where one is told here), else its
    default.

    runtime_dtype: of q, k and v; base_config.attn_dtype, else float32.
    runtime_softmax_dtype: of the softmax; base_config.attn_softmax_dtype, else float32.
    sequence_axis_name: the mesh axis that splits rows; never from base_config, always the one that
        partition_axis names.
    platform, backend: lowercase names, given as strings or as enums by name; the platform of the
        mesh's devices, else jax.default_backend(). The reference has no default platform and fails
        without one. platform cuda and rocm are gpu.
    partition_axis, partition_manager: the rules, and the rules on the mesh; ours needs a mesh, so
        without one there is no manager yet.
    base_config: where values come from; not compared and not written.
    operation_configs: settings by name of the operation; mappings become OperationConfig.
    _stored_mesh: see `mesh`; pinned here when it comes from base_config or from the context.

    The documented attributes that the reference names but does not have: scan_ring_attention: a
    ring turns in a `lax.scan`. softmax_scale: of q k^T; None: 1 / sqrt(head_dim), see `scale_of`.
    dropout_prob: share of the weights that are dropped; base_config.attention_dropout comes first.
    blocksize_q, blocksize_k, blocksize_b: rows of a block, and sequences; None: the operation's own
    choice.
    Raises: ValueError for a value that is not one, or for two fields that contradict each other.
    """

    runtime_dtype: Any
    runtime_softmax_dtype: Any = None
    sequence_axis_name: str = _UNSET
    platform: str = _UNSET
    backend: str = _UNSET
    partition_axis: PartitionAxis = _UNSET
    partition_manager: PartitionManager = _UNSET
    base_config: object | None = field(default=None, compare=False, repr=False)
    operation_configs: dict[str, OperationConfig] | None = None
    _stored_mesh: Mesh | None = _UNSET
    scan_ring_attention: bool = field(default=_UNSET, kw_only=True)
    softmax_scale: float | None = field(default=_UNSET, kw_only=True)
    dropout_prob: float = field(default=_UNSET, kw_only=True)
    blocksize_q: int | None = field(default=_UNSET, kw_only=True)
    blocksize_k: int | None = field(default=_UNSET, kw_only=True)
    blocksize_b: int | None = field(default=_UNSET, kw_only=True)

    def __post_init__(self) -> None:
        fill = self.set_attrs_carefully
        fill("runtime_dtype", jnp.float32, "attn_dtype")
        fill("runtime_softmax_dtype", jnp.float32, "attn_softmax_dtype")
        self._fill_layout()
        here = _platform_of(self._any_mesh())
        fill("backend", here)
        fill("platform", here)
        fill("operation_configs", None)
        fill("scan_ring_attention", False)
        fill("softmax_scale", None)
        fill("dropout_prob", _UNSET, "attention_dropout")
        fill("dropout_prob", 0.0)
        for name in ("blocksize_q", "blocksize_k", "blocksize_b"):
            fill(name, None)
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            setattr(self, name, _dtype(name, getattr(self, name)))
        self.backend = _platform_name("backend", self.backend, here)
        name = _platform_name("platform", self.platform, here)
        self.platform = _PLATFORMS.get(name, name)
        if self.operation_configs is not None:
            self.operation_configs = _operation_configs(self.operation_configs)
        self._check_numbers()

    def _fill_layout(self) -> None:
        """Rules, mesh, manager and sequence axis: each takes the place of what it implies."""
        fill = self.set_attrs_carefully
        # Rules that are given leave those of the base config unread: two tables would contradict.
        ours = _is_set(self.partition_axis) or _is_set(self.partition_manager)
        fill("partition_manager", _UNSET, use_base_config=not ours)
        given = self.partition_manager if _is_set(self.partition_manager) else None
        if given is not None:
            rules = given.partition_axis
        elif _is_set(self.sequence_axis_name):
            rules = PartitionAxis(sequence_parallel_axis=self.sequence_axis_name)
        else:
            rules = PartitionAxis()
        fill("partition_axis", rules, use_base_config=not ours)
        fill("sequence_axis_name", self.partition_axis.sequence_parallel_axis, None, False)
        fill("_stored_mesh", context_mesh() if given is None else given.mesh, "mesh")
        mesh = self._any_mesh()
        if given is None and mesh is not None:
            self.partition_manager = self._manager(mesh)
        if given is not None and given.partition_axis != self.partition_axis:
            raise ValueError(
                "partition_axis and partition_manager.partition_axis are different rules; give one"
            )
        if given is not None and not _same_mesh(given.mesh, mesh):
            raise ValueError(
                f"partition_manager is on the mesh {given.mesh.shape_tuple}, the operations on "
                f"another; give one of partition_manager and mesh, base_config.mesh included"
            )
        if self.sequence_axis_name != self.partition_axis.sequence_parallel_axis:
            raise ValueError(
                f"sequence_axis_name={self.sequence_axis_name!r}, but the rules call that axis "
                f"{self.partition_axis.sequence_parallel_axis!r}; give partition_axis="
                f"PartitionAxis(sequence_parallel_axis={self.sequence_axis_name!r})"
            )

    def _check_numbers(self) -> None:
        if not isinstance(self.scan_ring_attention, bool):
            raise ValueError(f"scan_ring_attention={self.scan_ring_attention!r}: use true or false")
        scale = self.softmax_scale
        if scale is not None and not (_is_number(scale) and 0 < scale < math.inf):
            raise ValueError(
                f"softmax_scale={scale!r}: use a number above 0, or none for 1 / sqrt(head_dim)"
            )
        if not (_is_number(self.dropout_prob) and 0 <= self.dropout_prob < 1):
            raise ValueError(f"dropout_prob={self.dropout_prob!r}: use at least 0 and less than 1")
        for name in ("blocksize_q", "blocksize_k", "blocksize_b"):
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < 1):
                raise ValueError(f"{name}={size!r}: use a whole number of at least 1, or none")

    def set_attrs_carefully(
        self,
        attr_name: str,
        default: Any | None,
        pickup_name: str | None = None,
        use_base_config: bool = True,
    ) -> None:
        """Sets an attribute if it is not given: from base_config if that may be, else `default`.

        pickup_name: what base_config calls it, if not `attr_name`.
        """
        if _is_set(getattr(self, attr_name, _UNSET)):
            return
        found = _UNSET
        if use_base_config and self.base_config is not None:
            found = getattr(self.base_config, pickup_name or attr_name, _UNSET)
        setattr(self, attr_name, found if _is_set(found) else default)

    @property
    def mesh(self) -> Mesh:
        """The mesh of base_config if it has one, else the stored one, else that of `jax.set_mesh`.

        While jax traces, the last is an AbstractMesh: good for layouts, without devices to write
        down. Setting a mesh moves rules, platform and backend along.
        Raises: ValueError if there is none, or for setting another than base_config's.
        """
        mesh = self._any_mesh()
        if mesh is None:
            raise ValueError(
                "attention has no mesh, so no array has a place; set metadata.mesh = mesh, or call "
                "jax.set_mesh(mesh) first"
            )
        return mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        """`replace(mesh=mesh)`, in place."""
        vars(self).update(vars(self.replace(mesh=mesh)))

    def _any_mesh(self) -> Any:
        base = getattr(self.base_config, "mesh", None)
        for mesh in (base, self._stored_mesh):
            if _is_set(mesh):
                return mesh
        return context_mesh()

    def _manager(self, mesh: Mesh, rules: PartitionAxis | None = None) -> PartitionManager:
        """Our rules, or others, on that mesh; what may stay whole stays so."""
        given = self.partition_manager
        replicate = given.replicate if _is_set(given) else frozenset[str]()
        return PartitionManager(rules or self.partition_axis, mesh, replicate)

    def scale_of(self, head_dim: int) -> float:
        """What q k^T is multiplied by: softmax_scale, or 1 / sqrt(head_dim)."""
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    def get_operation_config(self, impl_name: str) -> OperationConfig | None:
        """The settings of this operation; None: its own choice. Raises: ValueError for no name."""
        _check_operation(impl_name)
        return (self.operation_configs or {}).get(impl_name)

    def get_shardings(
        self,
        mode: ax.RUNTIME_MODE_TYPES,
        layout: Layout = "bthd",
        qkv_mni_sharding: bool = False,
        softmax_aux: Any | None = None,
    ) -> AttnShardingRules:
        """Layouts of all arrays of an attention in this runtime mode.

        layout: of q, k, v and the output; thd: rows of all sequences one after another, no batch.
        qkv_mni_sharding: k and v have one head per query head, so they lie by HEAD and HEAD_DIM.
        softmax_aux: an array that goes with the softmax; of two dims (its second: kv heads), or of
        one (heads, such as sinks). The reference has no thd, and takes any other rank for one dim.
        Raises: ValueError for an unknown mode or layout, without a mesh, for a softmax_aux of
        another rank.
        """
        for name, value, legal in (
            ("mode", mode, get_args(ax.RUNTIME_MODE_TYPES)),
            ("layout", layout, get_args(Layout)),
        ):
            if value not in legal:
                raise ValueError(f"attention {name} {value!r} is unknown; use {', '.join(legal)}")
        batch = () if layout == "thd" else (ax.BATCH,)
        manager = self._manager(self.mesh)

        def rows(length: str, head: str, dim: str) -> P:
            inner = (head, length, dim) if layout == "bhtd" else (length, head, dim)
            return manager.resolve((*batch, *inner), mode)

        query = rows(ax.QUERY_LENGTH, ax.HEAD, ax.HEAD_DIM)
        heads = (ax.HEAD, ax.HEAD_DIM) if qkv_mni_sharding else (ax.KV_HEAD, ax.KV_HEAD_DIM)
        key = rows(ax.KV_LENGTH, *heads)
        scores = (ax.QUERY_LENGTH, ax.BIAS_KV_SEQ)
        return AttnShardingRules(
            query3d=manager.resolve((ax.BATCH, ax.HEAD, ax.HEAD_DIM), mode),
            query=query,
            key=key,
            value=key,
            bias=manager.resolve((*batch, ax.BIAS_HEAD_SEQ, *scores), mode),
            mask=manager.resolve((*batch, None, *scores), mode),
            output=query,
            q_segment_ids=manager.resolve((*batch, ax.QUERY_LENGTH), mode),
            kv_segment_ids=manager.resolve((*batch, ax.KV_LENGTH), mode),
            softmax_aux=_softmax_aux_spec(softmax_aux, manager, mode),
        )

    @classmethod
    def from_config(cls, config: object) -> "OperationMetadata":
        """Everything from the attributes of a configuration, which stays its base_config.

        The reference's text names softmax_scale and dropout_prob as arguments, its signature does
        not: here they are attributes of the configuration too.
        """
        return cls(_UNSET, base_config=config)

    def replace(self, **changes: Any) -> "OperationMetadata":
        """A copy with these fields (or `mesh`) changed, and what follows from them.

        A new mesh brings its platform and backend; new rules their sequence axis; a new manager its
        rules and mesh; unless these are among the changes too. What base_config said at first is
        not asked again, but for its mesh.
        Raises: ValueError for an unknown field, or a mesh that base_config's would hide.
        """
        refuse_unknown_keys("OperationMetadata", changes, (*_FIELDS, "mesh"))
        if "mesh" in changes:
            changes["_stored_mesh"] = changes.pop("mesh")
        base = changes.pop("base_config", self.base_config)
        manager: Any = changes.get("partition_manager")
        base_mesh: Any = getattr(base, "mesh", None)
        implied: dict[str, Any] = {"_stored_mesh": base_mesh} if _is_set(base_mesh) else {}
        if _is_set(manager):
            implied |= {"_stored_mesh": manager.mesh, "partition_axis": manager.partition_axis}
        changes = implied | changes
        here = self._any_mesh()
        mesh = changes.setdefault("_stored_mesh", here)
        if _is_set(base_mesh) and mesh != base_mesh:
            raise ValueError(
                f"mesh {mesh and mesh.shape_tuple} would never be read: base_config.mesh "
                f"{base_mesh.shape_tuple} comes first; change it there, or replace base_config too"
            )
        follows = ["sequence_axis_name"] if "partition_axis" in changes else []
        follows += ["platform", "backend"] if mesh != here else []
        current = {name: getattr(self, name) for name in _FIELDS}
        values = current | dict.fromkeys(follows) | changes | {"base_config": None}
        rules = values["partition_axis"]
        if not _is_set(manager):
            on_mesh = _is_set(rules) and _is_set(mesh)
            values["partition_manager"] = self._manager(mesh, rules) if on_mesh else None
        copy = OperationMetadata(**values)
        copy.base_config = base
        return copy

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold; base_config is left out, its values are in the other fields.

        Raises: ValueError for a mesh without devices.
        """
        mesh, manager, configs = self._any_mesh(), self.partition_manager, self.operation_configs
        return {
            **{name: getattr(self, name) for name in _WRITTEN if name != "mesh"},
            "runtime_dtype": self.runtime_dtype.name,
            "runtime_softmax_dtype": self.runtime_softmax_dtype.name,
            "partition_axis": self.partition_axis.to_dict(),
            "partition_manager": (
                {"replicate": sorted(manager.replicate)} if _is_set(manager) else None
            ),
            "operation_configs": configs and {n: c.model_dump() for n, c in configs.items()},
            "mesh": None if mesh is None else mesh_to_dict(mesh),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], mesh: Mesh | None = None) -> "OperationMetadata":
        """What `to_dict` wrote; a key that is left out takes its default.

        mesh: takes the place of the written one, with its platform and backend: another machine's.
        Raises: ValueError for an unknown key, or if this machine lacks the written devices.
        """
        refuse_unknown_keys("OperationMetadata", data, _WRITTEN)
        values = dict(data)
        written, manager = values.pop("mesh", None), values.pop("partition_manager", None)
        if mesh is not None:
            values |= {"platform": None, "backend": None}
        elif written is not None:
            mesh = mesh_from_dict(written)
        if values.get("partition_axis") is not None:
            values["partition_axis"] = PartitionAxis.from_dict(values["partition_axis"])
        metadata = cls(**{"runtime_dtype": None, **values}, _stored_mesh=mesh)
        if manager is not None:
            refuse_unknown_keys("partition_manager", manager, ("replicate",))
            replicate = frozenset(manager.get("replicate", ()))
            metadata.partition_manager = PartitionManager(
                metadata.partition_axis, metadata.mesh, replicate
            )
        return metadata

    def to_json(self, **kwargs: Any) -> str:
        """`to_dict` as JSON; the keyword arguments are those of json.dumps."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def from_json(cls, json_str: str, mesh: Mesh | None = None) -> "OperationMetadata":
        """What `to_json` wrote; see `from_dict`."""
        return cls.from_dict(json.loads(json_str), mesh)


_FIELDS = tuple(entry.name for entry in dataclasses.fields(OperationMetadata))
_WRITTEN = (*(name for name in _FIELDS if name not in ("base_config", "_stored_mesh")), "mesh")


def _is_set(value: Any) -> bool:
    """Whether a value was given: anything but the marks of absence."""
    return not (
        value is None or value is ... or value is ax.EMPTY_VAL or isinstance(value, ax.EMPTY_VAL)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same_mesh(one: Any, other: Any) -> bool:
    """Equal; an abstract mesh, which has no devices, equals one of the same axes."""
    abstract = isinstance(one, AbstractMesh) or isinstance(other, AbstractMesh)
    return one.shape_tuple == other.shape_tuple if abstract else one == other


def _platform_of(mesh: Any) -> str:
    """Of the mesh's devices, be it abstract; without any, jax's default backend."""
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
    else:
        device = None if mesh is None else mesh.devices.flat[0]
    return jax.default_backend() if device is None else device.platform


def _platform_name(owner: str, value: Any, here: str) -> str:
    """A platform or backend in lowercase, from its name or from an enum that is called so."""
    name = value.name if isinstance(value, Enum) else value
    legal = tuple(dict.fromkeys((*_PLATFORMS, here.lower())))
    if not isinstance(name, str) or name.lower() not in legal:
        raise ValueError(f"{owner}={value!r} is unknown; use one of {', '.join(legal)}")
    return name.lower()


def _dtype(owner: str, value: Any) -> Any:
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise ValueError(
            f"{owner}={value!r} is not a dtype; use float32, bfloat16 or float16"
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{owner}={dtype.name} has no fractions; use float32, bfloat16 or float16")
    return dtype


def _check_operation(name: str) -> None:
    if name not in OPERATION_NAMES:
        raise ValueError(
            f"unknown attention operation {name!r}; use one of {', '.join(OPERATION_NAMES)}"
        )


def _operation_configs(configs: Any) -> dict[str, OperationConfig]:
    """Every entry as an OperationConfig, under the name of an operation."""
    if not isinstance(configs, Mapping):
        raise ValueError(
            f"operation_configs={configs!r} is not a mapping; its keys are names of operations"
        )
    converted = {}
    for name, config in configs.items():
        _check_operation(name)
        if not isinstance(config, OperationConfig):
            owner = f"operation_configs.{name}"
            refuse_unknown_keys(owner, config, OperationConfig.model_fields)
            try:
                config = OperationConfig.model_validate(dict(config), strict=True)
            except ValidationError as error:
                first = error.errors()[0]
                raise ValueError(
                    f"{owner}.{first['loc'][0]}={first['input']!r}: use a whole number of at least "
                    "1, or none"
                ) from error
        converted[name] = config
    return converted


def _softmax_aux_spec(softmax_aux: Any, manager: PartitionManager, mode: str) -> P | None:
    if softmax_aux is None:
        return None
    rank = len(softmax_aux.shape)
    if rank not in (1, 2):
        raise ValueError(
            f"softmax_aux of shape {softmax_aux.shape}: give one number per head (H), or rows of "
            "one per kv head (X K)"
        )
    return manager.resolve((ax.EMPTY, ax.KV_HEAD) if rank == 2 else (ax.HEAD,), mode)
