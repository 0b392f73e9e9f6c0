"""Static settings that attention operations share: dtypes, mesh, sharding rules, block sizes.

`OperationMetadata` gathers them from arguments or from a model's configuration, converts to and
from JSON, and returns the PartitionSpec of every array of an attention (`AttnShardingRules`). Names
follow the published reference `easydel.layers.operations._operation_meta`; docstrings say where we
differ.

Letters: B batch, L queries, T keys, H query heads, h head dim; t in a layout's name is L or T.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from pydantic import ValidationError

from model.attention.registry import backends_of
from model.attention.sharded import AttnShardingRules, Layout, attention_shardings
from model.config import BlockSizes, OperationConfigs
from parallel.sharding import axes as ax
from parallel.sharding.mesh import context_mesh, mesh_from_dict, mesh_to_dict
from parallel.sharding.partition import PartitionAxis, PartitionManager, refuse_unknown_keys

_UNSET: Any = ax.NOT_GIVEN
# Default of a field, and its names in base_config if other than its own.
_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "runtime_dtype": (jnp.float32, "attn_dtype", "dtype", "torch_dtype"),
    "runtime_softmax_dtype": (jnp.float32, "attn_softmax_dtype"),
    "operation_configs": (None,),
    "scan_ring_attention": (False,),
    "softmax_scale": (None, "softmax_scale", "attention_multiplier"),
    "dropout_prob": (0.0, "attention_dropout", "dropout_prob"),
    "blocksize_q": (None,),
    "blocksize_k": (None,),
    "blocksize_b": (None,),
}
_BLOCK_SIZES = ("blocksize_q", "blocksize_k", "blocksize_b")
_PLATFORMS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


@dataclass
class OperationMetadata:
    """Static settings of attention operations; fields that are not given are filled in.

    A field is not given if it is NOT_GIVEN, EMPTY_VAL, Ellipsis or None. It then takes the
    attribute of the same name of `base_config` (other names where stated below), else its default.
    A PyTree without leaves: an argument of `jax.jit`, which compiles again for other settings.

    runtime_dtype: of q, k and v; base_config.attn_dtype, dtype or torch_dtype, else float32.
    runtime_softmax_dtype: of the softmax; base_config.attn_softmax_dtype, else float32. No other is
        legal: sums of thousands of weights lose digits in 16 bits, so every operation uses float32.
    sequence_axis_name: the mesh axis that splits rows, as in partition_axis; never from
        base_config.
    platform, backend: lowercase names, given as strings or as enums by name. Default: the platform
        of the mesh's devices, else jax.default_backend(); the reference has no default platform and
        fails without one. The platform of cuda and rocm is gpu.
    partition_axis, partition_manager: the sharding rules, and the rules on the mesh; without a mesh
        there is no manager yet.
    base_config: the source of defaults; not compared and not written.
    operation_configs: block sizes by registered operation; mappings become BlockSizes.
    _stored_mesh: see `mesh`; set here if it comes from base_config or from the context.

    The reference documents the following attributes but does not have them.
    scan_ring_attention: a ring is a `lax.scan`. softmax_scale: factor of q k^T; base_config.
    softmax_scale or attention_multiplier, then query_pre_attn_scalar ** -0.5; None:
    1 / sqrt(head_dim). dropout_prob: fraction of the weights that is dropped;
    base_config.attention_dropout, then base_config.dropout_prob. blocksize_q, blocksize_k: tokens
    in a block; None: the operation's default. blocksize_b: sequences in a block; 1 or None, because
    every operation skips blocks by the documents of one sequence.

    Raises: ValueError for an illegal value, or for two fields that contradict each other.
    """

    runtime_dtype: Any
    runtime_softmax_dtype: Any = None
    sequence_axis_name: str = _UNSET
    platform: str = _UNSET
    backend: str = _UNSET
    partition_axis: PartitionAxis = _UNSET
    partition_manager: PartitionManager = _UNSET
    base_config: object | None = field(default=None, compare=False, repr=False)
    operation_configs: dict[str, BlockSizes] | None = None
    _stored_mesh: Mesh | None = _UNSET
    scan_ring_attention: bool = field(default=_UNSET, kw_only=True)
    softmax_scale: float | None = field(default=_UNSET, kw_only=True)
    dropout_prob: float = field(default=_UNSET, kw_only=True)
    blocksize_q: int | None = field(default=_UNSET, kw_only=True)
    blocksize_k: int | None = field(default=_UNSET, kw_only=True)
    blocksize_b: int | None = field(default=_UNSET, kw_only=True)

    def __post_init__(self) -> None:
        self._fill_sharding()
        default_platform = _platform_of(self._any_mesh())
        for name, (default, *theirs) in _SETTINGS.items():
            for pickup_name in theirs or (name,):
                self.set_attrs_carefully(name, _UNSET, pickup_name)
            self.set_attrs_carefully(name, default, use_base_config=False)
        scalar = getattr(self.base_config, "query_pre_attn_scalar", None)
        if self.softmax_scale is None and scalar is not None:
            self.softmax_scale = scalar**-0.5
        for name in ("backend", "platform"):
            self.set_attrs_carefully(name, default_platform)
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            setattr(self, name, _dtype(name, getattr(self, name)))
        self.backend = _platform_name("backend", self.backend, default_platform)
        name = _platform_name("platform", self.platform, default_platform)
        self.platform = _PLATFORMS.get(name, name)
        if self.operation_configs is not None:
            self.operation_configs = _operation_configs(self.operation_configs)
        self._check_numbers()

    def __hash__(self) -> int:
        """Return a hash of some of the compared fields, so that the settings can be static."""
        return hash((self.runtime_dtype, self.platform, self.sequence_axis_name, self._stored_mesh))

    def _fill_sharding(self) -> None:
        """Fill in rules, mesh, manager and sequence axis, each from those that imply it."""
        fill = self.set_attrs_carefully
        # If rules are given, those of the base config are not read: they could contradict.
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
        for name in _BLOCK_SIZES:
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < 1):
                raise ValueError(f"{name}={size!r}: use a whole number of at least 1, or none")
        if self.blocksize_b not in (None, 1):
            raise ValueError(
                f"blocksize_b={self.blocksize_b}: no operation works in blocks of several "
                "sequences; use 1, or leave it out"
            )
        if self.runtime_softmax_dtype != jnp.float32:
            raise ValueError(
                f"runtime_softmax_dtype={self.runtime_softmax_dtype.name}: every operation "
                "computes its softmax in float32; leave it out"
            )

    def set_attrs_carefully(
        self,
        attr_name: str,
        default: Any | None,
        pickup_name: str | None = None,
        use_base_config: bool = True,
    ) -> None:
        """Set an attribute that is not given, from base_config if allowed, else to `default`.

        pickup_name: its name in base_config, if not `attr_name`.
        """
        if _is_set(getattr(self, attr_name, _UNSET)):
            return
        found = _UNSET
        if use_base_config and self.base_config is not None:
            found = getattr(self.base_config, pickup_name or attr_name, _UNSET)
        setattr(self, attr_name, found if _is_set(found) else default)

    @property
    def mesh(self) -> Mesh:
        """The mesh of base_config, else the stored one, else that of `jax.set_mesh`.

        The mesh of the context is an AbstractMesh while jax traces: it has no devices and cannot be
        written. Setting a mesh changes rules, platform and backend with it.
        Raises: ValueError if there is none, or for setting another than base_config's.
        """
        mesh = self._any_mesh()
        if mesh is None:
            raise ValueError(
                "attention has no mesh to place arrays on; set metadata.mesh = mesh, or call "
                "jax.set_mesh(mesh) first"
            )
        return mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        """Change the mesh in place, as `replace(mesh=mesh)`."""
        vars(self).update(vars(self.replace(mesh=mesh)))

    def _any_mesh(self) -> Any:
        base = getattr(self.base_config, "mesh", None)
        for mesh in (base, self._stored_mesh):
            if _is_set(mesh):
                return mesh
        return context_mesh()

    @property
    def manager(self) -> PartitionManager:
        """The rules on `mesh`, set or not. Raises: ValueError if there is no mesh."""
        return self._manager(self.mesh)

    def _manager(self, mesh: Mesh, rules: PartitionAxis | None = None) -> PartitionManager:
        """Return our rules, or others, on that mesh, with the same axes kept replicated."""
        given = self.partition_manager
        replicate = given.replicate if _is_set(given) else frozenset[str]()
        return PartitionManager(rules or self.partition_axis, mesh, replicate)

    def get_operation_config(self, impl_name: str) -> BlockSizes | None:
        """Return the settings of an operation; None: its defaults.

        Raises: ValueError for an unknown operation.
        """
        backends_of(impl_name)
        return (self.operation_configs or {}).get(impl_name)

    def block_sizes(self, impl_name: str) -> tuple[int | None, int | None]:
        """Return block_q and block_k of an operation: its own settings, then the general ones."""
        own = self.get_operation_config(impl_name) or BlockSizes()
        return own.block_q or self.blocksize_q, own.block_k or self.blocksize_k

    def get_shardings(
        self,
        mode: ax.RUNTIME_MODE_TYPES,
        layout: Layout = "bthd",
        qkv_mni_sharding: bool = False,
        softmax_aux: Any | None = None,
    ) -> AttnShardingRules:
        """Return the PartitionSpecs of all arrays of an attention in this runtime mode.

        layout: of q, k, v and the output; thd is all sequences in one row, without a batch dim. The
            reference raises NotImplementedError for it.
        qkv_mni_sharding: k and v have one head per query head, and HEAD and HEAD_DIM place them.
        softmax_aux: an array that goes with the softmax: one dim of heads (sinks), or two dims of
            which the second is kv heads. The reference takes any other rank for one dim.
        Raises: ValueError for an unknown mode or layout, without a mesh, or for a softmax_aux of
            another rank.
        """
        return attention_shardings(self.manager, mode, layout, qkv_mni_sharding, softmax_aux)

    @classmethod
    def from_config(cls, config: object) -> "OperationMetadata":
        """Return metadata filled in from a configuration, which stays its base_config.

        config: a `ModelConfig`, or an object with any of the attributes that the class names, such
            as a configuration of Hugging Face or EasyDeL.
        The reference's text gives this method softmax_scale and dropout_prob as arguments, its
        signature does not; here they are attributes of the configuration.
        """
        return cls(_UNSET, base_config=config)

    def replace(self, **changes: Any) -> "OperationMetadata":
        """Return a copy with these fields (or `mesh`) changed, and the fields that they imply.

        A new mesh implies its platform and backend, new rules their sequence axis, a new manager
        its rules and mesh, unless these are among the changes. Other defaults of base_config are
        not read again.
        Raises: ValueError for an unknown field, or a mesh that differs from base_config's.
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
        old_mesh = self._any_mesh()
        mesh = changes.setdefault("_stored_mesh", old_mesh)
        if _is_set(base_mesh) and mesh != base_mesh:
            raise ValueError(
                f"mesh {mesh and mesh.shape_tuple} would be ignored: base_config.mesh "
                f"{base_mesh.shape_tuple} takes precedence; change it there, or replace "
                "base_config too"
            )
        follows = ["sequence_axis_name"] if "partition_axis" in changes else []
        follows += ["platform", "backend"] if mesh != old_mesh else []
        current = {name: getattr(self, name) for name in _FIELDS}
        values = current | dict.fromkeys(follows) | changes | {"base_config": None}
        rules = values["partition_axis"]
        if not _is_set(manager):
            on_mesh = _is_set(rules) and _is_set(mesh)
            values["partition_manager"] = self._manager(mesh, rules) if on_mesh else None
        replaced = OperationMetadata(**values)
        replaced.base_config = base
        return replaced

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can hold; without base_config, whose values are filled in.

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
        """Return the metadata that `to_dict` wrote; a missing key takes its default.

        mesh: replaces the written one, with its platform and backend, on another machine.
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
        """Return `to_dict` as JSON; keyword arguments are those of json.dumps."""
        return json.dumps(self.to_dict(), **kwargs)

    @classmethod
    def from_json(cls, json_str: str, mesh: Mesh | None = None) -> "OperationMetadata":
        """Return the metadata that `to_json` wrote; see `from_dict`."""
        return cls.from_dict(json.loads(json_str), mesh)


# Copies, because the settings can be changed in place and jit keeps those that it has compiled.
jax.tree_util.register_pytree_node(
    OperationMetadata, lambda settings: ((), copy(settings)), lambda settings, _: copy(settings)
)

_FIELDS = tuple(entry.name for entry in dataclasses.fields(OperationMetadata))
_WRITTEN = (*(name for name in _FIELDS if name not in ("base_config", "_stored_mesh")), "mesh")


def _is_set(value: Any) -> bool:
    """Return whether a value was given: anything but the marks of absence."""
    return not (
        value is None or value is ... or value is ax.EMPTY_VAL or isinstance(value, ax.EMPTY_VAL)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same_mesh(one: Any, other: Any) -> bool:
    """Return whether meshes are equal; an abstract mesh equals any of the same axes."""
    abstract = isinstance(one, AbstractMesh) or isinstance(other, AbstractMesh)
    return one.shape_tuple == other.shape_tuple if abstract else one == other


def _platform_of(mesh: Any) -> str:
    """Return the platform of the mesh's devices; without any, jax's default backend."""
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
    else:
        device = None if mesh is None else mesh.devices.flat[0]
    return jax.default_backend() if device is None else device.platform


def _platform_name(owner: str, value: Any, default: str) -> str:
    """Return a platform or backend in lowercase, from its name or an enum of that name."""
    name = value.name if isinstance(value, Enum) else value
    legal = tuple(dict.fromkeys((*_PLATFORMS, default.lower())))
    if not isinstance(name, str) or name.lower() not in legal:
        raise ValueError(f"{owner}={value!r} is unknown; use one of {', '.join(legal)}")
    return name.lower()


def _dtype(owner: str, value: Any) -> Any:
    floating = "use float32, bfloat16 or float16"
    try:
        dtype = jnp.dtype(str(value).removeprefix("torch.") if "torch." in str(value) else value)
    except TypeError as error:
        raise ValueError(f"{owner}={value!r} is not a dtype; {floating}") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{owner}={dtype.name} is not a floating-point dtype; {floating}")
    return dtype


def _operation_configs(configs: Any) -> dict[str, BlockSizes]:
    """Return the settings by operation, every entry as BlockSizes."""
    if isinstance(configs, OperationConfigs):
        return dict(configs.overrides())
    if not isinstance(configs, Mapping):
        raise ValueError(
            f"operation_configs={configs!r} is not a mapping; its keys are names of operations"
        )
    return {name: _block_sizes(name, config) for name, config in configs.items()}


def _block_sizes(name: str, config: Any) -> BlockSizes:
    backends_of(name)
    if isinstance(config, BlockSizes):
        return config
    owner = f"operation_configs.{name}"
    refuse_unknown_keys(owner, config, BlockSizes.model_fields)
    try:
        return BlockSizes.model_validate(dict(config), strict=True)
    except ValidationError as error:
        field, value = error.errors()[0]["loc"][0], error.errors()[0]["input"]
        rule = "use a whole number of at least 1, or none"
        raise ValueError(f"{owner}.{field}={value!r}: {rule}") from error
