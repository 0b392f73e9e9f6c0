"""The rules: which mesh axes carry a semantic axis. One frozen table, no globals, nothing dropped.

`PartitionAxis` maps semantic axes (axes.py) to mesh axes; `PartitionManager` applies it to
one mesh. A dim that does not divide, an unknown name and a mesh axis used twice are ValueErrors:
a layout never degrades in silence. Two differences from the reference, both deliberate: BATCH is
on (dp, fsdp, ep), so that dense layers are not computed ep times over, and an indivisible dim is
an error instead of a silent replication. `PartitionAxis.reference()` gives the reference's rules.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.sharding import axes as ax

AxisRule = str | tuple[str, ...] | None
"""What a semantic axis resolves to: mesh axes (or DP, FSDP, TP, SP, EP), or None: replicated."""

Residual = Literal["hidden", "sequence", "replicated"]
"""Layout of the residual stream between blocks; see `residual_rules`."""

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
# A decoded token is a sequence of length one: it cannot be split.
_GENERATION_RULES: Mapping[str, AxisRule] = MappingProxyType(
    {ax.QUERY_LENGTH: None, ax.LENGTH: None}
)


def refuse_unknown_keys(owner: str, data: Any, known: Iterable[str]) -> None:
    """ValueError, naming the nearest known key, if `data` has a key of its own or none at all."""
    known = tuple(known)
    if not isinstance(data, Mapping):
        raise ValueError(f"{owner}={data!r} is not a mapping; its keys are {', '.join(known)}")
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"its keys are {', '.join(known)}"
            raise ValueError(f"{owner}: unknown key {key!r}; {remedy}")


def _plain(value: Any) -> Any:
    """Mappings as dicts and sequences as lists, all the way down: what JSON has."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _frozen(value: Any) -> Any:
    """The reverse of `_plain`: read-only mappings and tuples."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: _frozen(inner) for key, inner in value.items()})
    return tuple(_frozen(inner) for inner in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class PartitionAxis:
    """Mesh axis names and the semantic table; immutable: `register` returns a new table."""

    data_parallel_axis: str = "dp"
    fully_sharded_data_parallel_axis: str = "fsdp"
    tensor_parallel_axis: str = "tp"
    sequence_parallel_axis: str = "sp"
    expert_parallel_axis: str = "ep"
    rules: Mapping[str, AxisRule] = field(default_factory=lambda: _RULES, hash=False)
    generation_rules: Mapping[str, AxisRule] = field(
        default_factory=lambda: _GENERATION_RULES, hash=False
    )

    def __post_init__(self) -> None:
        # Copies of its own: the table is a key of jit's caches, so it must not change later.
        for table in ("rules", "generation_rules"):
            object.__setattr__(self, table, MappingProxyType(dict(getattr(self, table))))

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickle and deepcopy, which know no MappingProxyType.
        return PartitionAxis.from_dict, (self.to_dict(),)

    @property
    def mesh_axes(self) -> dict[str, str]:
        """The constants DP, FSDP, TP, SP and EP to the names of mesh axes."""
        return {
            ax.DP: self.data_parallel_axis,
            ax.FSDP: self.fully_sharded_data_parallel_axis,
            ax.TP: self.tensor_parallel_axis,
            ax.SP: self.sequence_parallel_axis,
            ax.EP: self.expert_parallel_axis,
        }

    @classmethod
    def reference(cls) -> "PartitionAxis":
        """The rules of the reference library: BATCH on (fsdp, dp), so ep ranks repeat the batch."""
        return cls(rules=MappingProxyType({**_RULES, ax.BATCH: (ax.FSDP, ax.DP)}))

    def to_dict(self) -> dict[str, Any]:
        """Axis names and both tables, as values that JSON can hold."""
        return {entry.name: _plain(getattr(self, entry.name)) for entry in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PartitionAxis":
        """What `to_dict` wrote; a key that is left out takes its default.

        Raises: ValueError for an unknown key, or a table that is not one.
        """
        refuse_unknown_keys(
            "PartitionAxis", data, (entry.name for entry in dataclasses.fields(cls))
        )
        for table in ("rules", "generation_rules"):
            if not isinstance(data.get(table, {}), Mapping):
                raise ValueError(f"PartitionAxis.{table}={data[table]!r} is not a mapping of rules")
        return cls(**{key: _frozen(value) for key, value in data.items()})

    def register(
        self,
        semantic_axis: str,
        axis_rule: AxisRule,
        generation_axis_rule: Any = ax.NOT_GIVEN,
        override: bool = False,
    ) -> "PartitionAxis":
        """A copy of this table with one more semantic axis.

        generation_axis_rule: the rule in GENERATION_MODES, if it differs.
        Raises: ValueError if the name is that of a mesh axis, or taken and `override` is false.
        """
        if semantic_axis in {*self.mesh_axes, *self.mesh_axes.values()}:
            raise ValueError(
                f"{semantic_axis!r} is a mesh axis, which no rule places; register another name"
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
        """The mesh axes, outermost first, of one entry of a `DynamicShardingAxes.axes`.

        semantic_axis: a semantic axis, None, "_", or a (nested) sequence of them.
        Raises: ValueError for a name that is neither a rule nor a mesh axis.
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
            f"unknown semantic axis {semantic_axis!r}; known: {', '.join(sorted(self.rules))}"
        )


def residual_rules(layout: Residual, base: PartitionAxis | None = None) -> PartitionAxis:
    """The table in which `ResidualSharding` (B, L, D) has this layout.

    hidden: (batch, sp, tp), the reference's; sequence: (batch, (sp, tp), -);
    replicated: (batch, sp, -).
    """
    base = base or PartitionAxis()
    if layout not in ("hidden", "sequence", "replicated"):
        raise ValueError(f"residual layout {layout!r}: use hidden, sequence or replicated")
    length = (ax.SP, ax.TP) if layout == "sequence" else ax.SP
    embed = ax.TP if layout == "hidden" else None
    return base.register(ax.LENGTH, length, None, override=True).register(
        ax.EMBED, embed, override=True
    )


def runtime_mode(axes: Any, mode: Any, shape: Sequence[int] | None, name: str = "tensor") -> str:
    """The MODE_* constant in which `axes` are resolved.

    mode: overrides the one that `axes` carries, unless NOT_GIVEN; a plain list means MODE_TRAIN. An
        integer is the index of the dim to look at: length 1 means MODE_DECODE, else MODE_TRAIN.
    Raises: ValueError if it is no mode, or an index and there is no such dim.
    """
    if mode is ax.NOT_GIVEN:
        mode = getattr(axes, "mode", ax.MODE_TRAIN)
    if not isinstance(mode, int):
        if mode not in (modes := get_args(ax.RUNTIME_MODE_TYPES)):
            raise ValueError(f"{name}: mode {mode!r} is none of {', '.join(modes)}")
        return mode
    if shape is None:
        raise ValueError(f"{name}: mode {mode} is a dim index, so the shape is needed")
    if not -len(shape) <= mode < len(shape):
        raise ValueError(f"{name}: mode {mode} is no dim of {tuple(shape)}; give the length's")
    return ax.MODE_DECODE if shape[mode] == 1 else ax.MODE_TRAIN


def axis_label(entry: Any) -> str:
    """One entry of a `DynamicShardingAxes.axes` as its constants are named: `TP`, `[FSDP SP]`."""
    if entry is None or entry == ax.EMPTY:
        return ax.EMPTY
    if not isinstance(entry, str):
        return f"[{' '.join(axis_label(part) for part in entry)}]"
    short = {ax.DP: "DP", ax.FSDP: "FSDP", ax.TP: "TP", ax.EP: "EP", ax.SP: "SP"}
    return short.get(entry, entry.strip("_"))


def _without(entry: Any, names: frozenset[str]) -> Any:
    """An entry less these semantic axes."""
    if entry is None or isinstance(entry, str):
        return None if entry in names else entry
    return tuple(_without(part, names) for part in entry)


@dataclass(frozen=True)
class PartitionManager:
    """Resolves semantic axes to PartitionSpecs on one mesh.

    mesh: an axis of the rules that it does not have counts as one of size one.
    replicate: semantic axes that may stay whole. Where the shape is known and a dim does not
        divide, they are taken out of its entry; what is left must divide. What that costs is in
        the sharding table (parallel/planning/sharding_table.py).
    """

    partition_axis: PartitionAxis
    mesh: Mesh
    replicate: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        rules = self.partition_axis
        known = [
            *(rules.data_parallel_axis, rules.fully_sharded_data_parallel_axis),
            *(rules.expert_parallel_axis, rules.sequence_parallel_axis, rules.tensor_parallel_axis),
        ]
        for name, size in self.mesh.shape.items():
            if size > 1 and name not in known:
                raise ValueError(
                    f"mesh axis {name!r} of size {size} has no part in the rules, which know "
                    f"{', '.join(known)}; rename it, or name it in PartitionAxis"
                )
        for name in sorted(self.replicate):
            if not self.partition_axis.resolve_axis(name, ax.MODE_TRAIN):
                raise ValueError(f"replicate={axis_label(name)}: no rule splits it; leave it out")

    def axis_size(self, semantic_axis: Any, mode: str = ax.MODE_TRAIN) -> int:
        """Over how many devices this semantic axis (or sequence of them) is split."""
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
        """The PartitionSpec of a tensor.

        axes: a `DynamicShardingAxes` class or instance, or a plain list of semantic axes.
        mode: overrides the mode that `axes` carries. An integer mode is the index of the dim to
            look at and needs `shape`: length 1 means MODE_DECODE, anything else MODE_TRAIN.
        shape: when given, every dim must divide; `name` is then used in the message.
        Raises: ValueError for unknown names, a mesh axis used twice, a dim that does not divide.
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
        """`resolve` as a NamedSharding on this mesh."""
        return NamedSharding(self.mesh, self.resolve(axes, mode, shape))

    def constrain(self, x: jax.Array, axes: Any, mode: Any = ax.NOT_GIVEN) -> jax.Array:
        """`x` laid out by the rules; moves data only if its type says otherwise."""
        return jax.sharding.reshard(x, self.resolve(axes, mode, x.shape))

    def _divided(
        self, name: str, entries: Sequence[Any], mode: str, shape: Sequence[int]
    ) -> list[tuple[str, ...]]:
        """The mesh axes of every dim of this shape, less those that may and must stay whole."""
        if len(shape) != len(entries):
            raise ValueError(f"{name}: shape {tuple(shape)} has not {len(entries)} dims")
        dims = []
        for index, (size, entry) in enumerate(zip(shape, entries, strict=True)):
            divides = size % self.axis_size(entry, mode) == 0
            kept = entry if divides else _without(entry, self.replicate)
            if size % (parts := self.axis_size(kept, mode)):
                mesh_axes = " x ".join(self._mesh_axes(kept, mode))
                legal = ", ".join(str(n) for n in range(1, parts + 1) if size % n == 0)
                raise ValueError(
                    f"{name} {tuple(shape)}: dim {index} = {size} is not divisible by "
                    f"{mesh_axes} = {parts}; sizes that divide it: {legal}; or let "
                    f"{axis_label(kept)} stay whole on every device (PartitionManager.replicate)"
                )
            dims.append(self._mesh_axes(kept, mode))
        return dims
