"""Partition rules: from semantic axes such as EMBED to mesh axes such as tp.

`PartitionAxis` is the table of rules; `PartitionManager` applies it to one mesh and returns
PartitionSpecs. Both are immutable. An unknown name, a dim that does not divide and a mesh axis used
twice are ValueErrors.

Two deliberate differences from the reference: BATCH is on (dp, fsdp, ep), so that ep ranks do not
repeat the dense layers, and a dim that does not divide is an error instead of silently replicated.
`PartitionAxis.reference()` has the reference's rules.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.sharding import axes as ax

AxisRule = str | tuple[str, ...] | None
"""Mesh axes (by name, or as DP, FSDP, TP, SP, EP) of one semantic axis; None: replicated."""

_RULES: Mapping[str, AxisRule] = MappingProxyType(
    {
        ax.BATCH: (ax.DP, ax.FSDP, ax.EP),
        ax.LENGTH: ax.SP,
        ax.QUERY_LENGTH: ax.SP,
        ax.KV_LENGTH: ax.SP,
        ax.EMBED: ax.TP,
        ax.HEAD: ax.TP,
        ax.KV_HEAD: ax.TP,
        ax.HEAD_DIM: None,
        ax.KV_HEAD_DIM: None,
        ax.MLP_INTERMEDIATE: ax.TP,
        ax.VOCAB: ax.TP,
        ax.EXPERT: ax.EP,
        ax.EXPERT_GATE: None,
        ax.BIAS_HEAD_SEQ: None,
        ax.BIAS_KV_SEQ: None,
    }
)
# A decoded token is a sequence of length 1, which cannot be split.
_GENERATION_RULES: Mapping[str, AxisRule] = MappingProxyType(
    {ax.QUERY_LENGTH: None, ax.LENGTH: None}
)


def refuse_unknown_keys(owner: str, data: Any, known: Iterable[str]) -> None:
    """Raise a ValueError if `data` is no mapping or has an unknown key; name the nearest known."""
    known = tuple(known)
    if not isinstance(data, Mapping):
        raise ValueError(f"{owner}={data!r} is not a mapping; its keys are {', '.join(known)}")
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"its keys are {', '.join(known)}"
            raise ValueError(f"{owner}: unknown key {key!r}; {remedy}")


def _to_json(value: Any) -> Any:
    """Convert mappings to dicts and sequences to lists, recursively, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _to_json(inner) for key, inner in value.items()}
    return [_to_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def _from_json(value: Any) -> Any:
    """Convert to read-only mappings and tuples, recursively; reverses `_to_json`."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: _from_json(inner) for key, inner in value.items()})
    return tuple(_from_json(inner) for inner in value) if isinstance(value, list | tuple) else value


def refuse_auto_axes(mesh: Mesh) -> None:
    """Raise a ValueError if an axis of the mesh is Auto; array types do not show such layouts."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    if auto := [name for name, kind in kinds if kind == AxisType.Auto]:
        raise ValueError(
            f"mesh axes {', '.join(auto)} are Auto, so array types do not show layouts; build the "
            f"mesh with axis_types=(AxisType.Explicit,) * {len(mesh.axis_names)}"
        )


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class PartitionAxis:
    """Names of the mesh axes, and the rules; immutable: `register` returns a new table.

    A pytree without leaves.
    """

    data_parallel_axis: str = "dp"
    fully_sharded_data_parallel_axis: str = "fsdp"
    tensor_parallel_axis: str = "tp"
    sequence_parallel_axis: str = "sp"
    expert_parallel_axis: str = "ep"
    rules: Mapping[str, AxisRule] = field(default_factory=lambda: _RULES, hash=False)
    """Rule of each semantic axis."""
    generation_rules: Mapping[str, AxisRule] = field(
        default_factory=lambda: _GENERATION_RULES, hash=False
    )
    """Rules that replace those above in GENERATION_MODES."""

    def __post_init__(self) -> None:
        # Private copies: the table is a key of jit's caches, so it must not change later.
        for table in ("rules", "generation_rules"):
            object.__setattr__(self, table, MappingProxyType(dict(getattr(self, table))))
        for rules in (self.rules, {**self.rules, **self.generation_rules}):
            for name in rules:
                self._refuse_cycle(rules, name)

    def _refuse_cycle(self, rules: Mapping[str, AxisRule], name: Any, *outer: Any) -> None:
        if name in outer:
            raise ValueError(
                f"the rule of semantic axis {name!r} leads back to it: "
                f"{' -> '.join((*outer, name))}; give one of them mesh axes"
            )
        rule = None if name in self.mesh_axes.values() else rules.get(name)
        for part in (rule,) if isinstance(rule, str) else rule or ():
            self._refuse_cycle(rules, part, *outer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle and deepcopy do not support MappingProxyType.
        return PartitionAxis.from_dict, (self.to_dict(),)

    @property
    def mesh_axes(self) -> dict[str, str]:
        """The mesh axis name of each constant DP, FSDP, TP, SP and EP."""
        return {
            ax.DP: self.data_parallel_axis,
            ax.FSDP: self.fully_sharded_data_parallel_axis,
            ax.TP: self.tensor_parallel_axis,
            ax.SP: self.sequence_parallel_axis,
            ax.EP: self.expert_parallel_axis,
        }

    @classmethod
    def reference(cls) -> "PartitionAxis":
        """Return the reference's rules: BATCH on (fsdp, dp), LENGTH on sp in decoding too.

        So ep ranks repeat the batch, and a decoded token of LENGTH 1 needs sp = 1.
        """
        rules = {**_RULES, ax.BATCH: (ax.FSDP, ax.DP)}
        return cls(rules=rules, generation_rules={ax.QUERY_LENGTH: None})

    def to_dict(self) -> dict[str, Any]:
        """Return axis names and both tables as JSON values."""
        return {
            entry.name: _to_json(getattr(self, entry.name)) for entry in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PartitionAxis":
        """Rebuild the table of `to_dict`; missing keys take their defaults.

        Raises: ValueError for an unknown key, or for rules that are not a mapping.
        """
        refuse_unknown_keys(
            "PartitionAxis", data, (entry.name for entry in dataclasses.fields(cls))
        )
        for table in ("rules", "generation_rules"):
            if not isinstance(data.get(table, {}), Mapping):
                raise ValueError(f"PartitionAxis.{table}={data[table]!r} is not a mapping of rules")
        return cls(**{key: _from_json(value) for key, value in data.items()})

    def register(
        self,
        semantic_axis: str,
        axis_rule: AxisRule,
        generation_axis_rule: Any = ax.NOT_GIVEN,
        override: bool = False,
    ) -> "PartitionAxis":
        """Return a copy of this table with one more semantic axis.

        generation_axis_rule: Rule in GENERATION_MODES, if it differs.

        Raises: ValueError if the name is a mesh axis, is registered and `override` is false, or
        its rule leads back to it.
        """
        if semantic_axis in {*self.mesh_axes, *self.mesh_axes.values()}:
            raise ValueError(
                f"{semantic_axis!r} is a mesh axis and cannot have a rule; register another name"
            )
        if semantic_axis in self.rules and not override:
            raise ValueError(
                f"semantic axis {semantic_axis!r} is already registered; pass override=True"
            )
        rules = MappingProxyType({**self.rules, semantic_axis: axis_rule})
        generation = dict(self.generation_rules)
        generation.pop(semantic_axis, None)
        if generation_axis_rule is not ax.NOT_GIVEN:
            generation[semantic_axis] = generation_axis_rule
        return dataclasses.replace(self, rules=rules, generation_rules=MappingProxyType(generation))

    def resolve_axis(self, semantic_axis: Any, mode: str) -> tuple[str, ...]:
        """Return the mesh axes, outermost first, of one entry of a `DynamicShardingAxes.axes`.

        semantic_axis: A semantic axis, None, "_", or a (nested) sequence of them.

        Raises: ValueError for a name that is neither a semantic axis nor a mesh axis.
        """
        if semantic_axis is None or semantic_axis == ax.EMPTY:
            return ()
        if not isinstance(semantic_axis, str):
            return tuple(name for part in semantic_axis for name in self.resolve_axis(part, mode))
        mesh_axes = self.mesh_axes
        if semantic_axis in mesh_axes:
            return (mesh_axes[semantic_axis],)
        if semantic_axis in mesh_axes.values():
            return (semantic_axis,)
        if mode in ax.GENERATION_MODES and semantic_axis in self.generation_rules:
            return self.resolve_axis(self.generation_rules[semantic_axis], mode)
        if semantic_axis in self.rules:
            return self.resolve_axis(self.rules[semantic_axis], mode)
        raise ValueError(
            f"unknown semantic axis {semantic_axis!r}; use one of {', '.join(sorted(self.rules))}"
        )


def runtime_mode(axes: Any, mode: Any, shape: Sequence[int] | None, name: str = "tensor") -> str:
    """Return the MODE_* constant in which `axes` are resolved.

    mode: Replaces the mode of `axes`, unless NOT_GIVEN; a plain list has MODE_TRAIN. An integer is
        the index of a dim: size 1 means MODE_DECODE, any other size MODE_TRAIN.

    Raises: ValueError for an unknown mode, or for an index without that dim.
    """
    if mode is ax.NOT_GIVEN:
        mode = getattr(axes, "mode", ax.MODE_TRAIN)
    if not isinstance(mode, int):
        if mode not in (modes := get_args(ax.RUNTIME_MODE_TYPES)):
            raise ValueError(f"{name}: mode {mode!r} is unknown; use one of {', '.join(modes)}")
        return mode
    if shape is None:
        raise ValueError(f"{name}: mode {mode} is the index of a dim; pass the shape too")
    if not -len(shape) <= mode < len(shape):
        raise ValueError(f"{name}: mode {mode} is no dim of {tuple(shape)}; use that of LENGTH")
    return ax.MODE_DECODE if shape[mode] == 1 else ax.MODE_TRAIN


def axis_label(entry: Any) -> str:
    """Return one entry of a `DynamicShardingAxes.axes` by constant names: `TP`, `[FSDP SP]`."""
    if entry is None or entry == ax.EMPTY:
        return ax.EMPTY
    if not isinstance(entry, str):
        return f"[{' '.join(axis_label(part) for part in entry)}]"
    short = {ax.DP: "DP", ax.FSDP: "FSDP", ax.TP: "TP", ax.EP: "EP", ax.SP: "SP"}
    return short.get(entry, entry.strip("_"))


def _without(entry: Any, names: frozenset[str]) -> Any:
    """Return an entry without these semantic axes."""
    if entry is None or isinstance(entry, str):
        return None if entry in names else entry
    return tuple(_without(part, names) for part in entry)


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionManager:
    """Resolves semantic axes to PartitionSpecs on one mesh; a pytree without leaves."""

    partition_axis: PartitionAxis
    mesh: Mesh
    """The Explicit mesh; axes of the rules that it does not have count as size 1."""
    replicate: frozenset[str] = frozenset()
    """Semantic axes that may stay unsharded. Where a shape is given and a dim does not divide, they
    are removed from its entry, and the rest must divide. The sharding table shows the cost
    (parallel/planning/sharding_table.py)."""

    def __post_init__(self) -> None:
        refuse_auto_axes(self.mesh)
        rules = self.partition_axis
        known = [
            *(rules.data_parallel_axis, rules.fully_sharded_data_parallel_axis),
            *(rules.expert_parallel_axis, rules.sequence_parallel_axis, rules.tensor_parallel_axis),
        ]
        for name, size in self.mesh.shape.items():
            if size > 1 and name not in known:
                raise ValueError(
                    f"mesh axis {name!r} of size {size} is not in the rules, which use "
                    f"{', '.join(known)}; rename it, or name it in PartitionAxis"
                )
        for name in sorted(self.replicate):
            if not self.partition_axis.resolve_axis(name, ax.MODE_TRAIN):
                raise ValueError(f"replicate={axis_label(name)}: no rule shards it; leave it out")

    def axis_size(self, semantic_axis: Any, mode: str = ax.MODE_TRAIN) -> int:
        """Return the number of shards of this semantic axis (or sequence of them)."""
        return math.prod(self.mesh.shape[name] for name in self._mesh_axes(semantic_axis, mode))

    def _mesh_axes(self, semantic_axis: Any, mode: str) -> tuple[str, ...]:
        names = self.partition_axis.resolve_axis(semantic_axis, mode)
        return tuple(name for name in names if name in self.mesh.shape)

    def resolve(
        self,
        axes: Any,
        mode: Any = ax.NOT_GIVEN,
        shape: Sequence[int] | None = None,
        name: str = "tensor",
    ) -> P:
        """Return the PartitionSpec of a tensor.

        Args:
            axes: A `DynamicShardingAxes` class or instance, or a plain list of semantic axes.
            mode: Replaces the mode of `axes`; see `runtime_mode`. An integer mode needs `shape`.
            shape: If given, every dim must divide.
            name: Name of the tensor in error messages.

        Raises:
            ValueError: An unknown name, a mesh axis used twice, or a dim that does not divide.
        """
        entries = axes.axes if hasattr(axes, "axes") else axes
        mode = runtime_mode(axes, mode, shape, name)
        dims = [self._mesh_axes(entry, mode) for entry in entries]
        used = [mesh_axis for dim in dims for mesh_axis in dim]
        if twice := sorted({mesh_axis for mesh_axis in used if used.count(mesh_axis) > 1}):
            raise ValueError(f"{name}: {list(entries)} uses mesh axis {twice[0]!r} twice")
        if shape is not None:
            dims = self._divided(name, entries, mode, shape)
        return P(*(dim[0] if len(dim) == 1 else dim or None for dim in dims))

    def sharding(
        self, axes: Any, mode: Any = ax.NOT_GIVEN, shape: Sequence[int] | None = None
    ) -> NamedSharding:
        """Return `resolve` as a NamedSharding on this mesh."""
        return NamedSharding(self.mesh, self.resolve(axes, mode, shape))

    def constrain(self, x: jax.Array, axes: Any, mode: Any = ax.NOT_GIVEN) -> jax.Array:
        """Reshard `x` to the layout of the rules; no-op if its type already has that layout."""
        sharding = self.sharding(axes, mode, x.shape)
        if jax.typeof(x).sharding.mesh.empty and isinstance(self.mesh, Mesh):
            return jax.device_put(x, sharding)  # an array that is on no mesh yet, traced or not
        return jax.sharding.reshard(x, sharding)

    shard = constrain  # its name in the reference's source

    def _divided(
        self, name: str, entries: Sequence[Any], mode: str, shape: Sequence[int]
    ) -> list[tuple[str, ...]]:
        """Return the mesh axes of every dim, without `replicate` where a dim does not divide."""
        if len(shape) != len(entries):
            raise ValueError(f"{name}: shape {tuple(shape)} does not have {len(entries)} dims")
        dims = []
        for index, (size, entry) in enumerate(zip(shape, entries, strict=True)):
            divides = size % self.axis_size(entry, mode) == 0
            kept = entry if divides else _without(entry, self.replicate)
            if size % (parts := self.axis_size(kept, mode)):
                mesh_axes = " x ".join(self._mesh_axes(kept, mode))
                legal = ", ".join(str(n) for n in range(1, parts + 1) if size % n == 0)
                raise ValueError(
                    f"{name} {tuple(shape)}: dim {index} = {size} is not divisible by "
                    f"{mesh_axes} = {parts}; change this size, or choose mesh sizes whose product "
                    f"is one of {legal}"
                )
            dims.append(self._mesh_axes(kept, mode))
        return dims
