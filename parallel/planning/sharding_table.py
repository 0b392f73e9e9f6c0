"""The sharding table: where every tensor lies, what a device holds of it, what lies there twice.

Pure: tensors (name, semantic axes, shape) and the rules give rows, rows give text; nothing is
allocated. No copy is silent: for every mesh axis of more than one device that does not split a
tensor, the row has a reason and a cost, in bytes per device beyond an even split over all devices.
A tensor that lies elsewhere than its semantic axes say is an error. The table lists what it is
given: what exists only inside a shard_map (gathered inputs, gathered kernels) has no layout and is
not in it. It refuses to know what a tensor is for.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.sharding import axes as ax
from parallel.sharding.partition import PartitionManager, axis_label, runtime_mode
from parallel.sharding.specs import mesh_axes_of

_COLUMNS = tuple("semantic axes,spec,dtype,shape,per device,bytes,copies,beyond,why".split(","))
_NUMBERS = (6, 7, 8)
_LEGEND = (
    "bytes: per device, of all arrays of a row; beyond: more than an even split over all devices",
    "copies: how many devices hold the same part; stack: a dim that is scanned, on no mesh axis",
)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """What the table must know of an array.

    axes: a `DynamicShardingAxes` class or instance, or a list of semantic axes; None: not known.
        They are those of the last dims: dims before them are a stack that is scanned.
    spec: where it lies; None: where the rules put it.
    count: how many such arrays there are.
    """

    name: str
    axes: Any
    shape: tuple[int, ...]
    dtype: Any
    spec: P | None = None
    count: int = 1


@dataclass(frozen=True)
class Replication:
    """One mesh axis whose devices all hold the same part of a tensor."""

    mesh_axis: str
    size: int
    reason: str
    cost: int
    """Bytes per device; of several axes, each has the share of its size's logarithm."""

    def __str__(self) -> str:
        return f"{self.mesh_axis}{self.size}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor on one device. Bytes are those of all `count` arrays."""

    name: str
    axes: str
    spec: P
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    count: int
    bytes_per_device: int
    replicated: tuple[Replication, ...]

    @property
    def even_bytes(self) -> int:
        """Bytes per device if no two devices held the same."""
        return self.bytes_per_device - sum(item.cost for item in self.replicated)


def tensors_of_model(model: nnx.Module) -> list[Tensor]:
    """The variables of a module, abstract or not, with the `semantic_axes` in their metadata."""
    return [
        Tensor(
            name=".".join(str(part) for part in path),
            axes=variable.get_metadata().get("semantic_axes"),
            shape=variable.shape,
            dtype=variable.dtype,
            spec=_spec_in_type(variable.get_value()),
        )
        for path, variable in nnx.to_flat_state(nnx.state(model))
    ]


def tensors_alike(tree: Any, owners: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of a pytree; those made of an owner have its axes.

    Made of an owner is a leaf whose path ends in the owner's name, of the same shape. Where several
    lie alike they are one Tensor: `{mu,nu}.name`.
    """
    by_name = {owner.name: owner for owner in owners}
    found: dict[Any, tuple[Tensor, list[str]]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        ends = {".".join(parts[start:]): start for start in range(1, len(parts))}
        name = next((end for end in ends if end in by_name), None)
        if name is None or by_name[name].shape != leaf.shape:
            plain = Tensor(name=".".join(parts), axes=None, shape=leaf.shape, dtype=leaf.dtype)
            tensor, maker = plain, []
        else:
            tensor, maker = by_name[name], [parts[ends[name] - 1]]
        tensor = dataclasses.replace(tensor, dtype=leaf.dtype, spec=_spec_in_type(leaf))
        alike = (tensor.name, str(tensor.dtype), tensor.spec)
        found.setdefault(alike, (tensor, []))[1].extend(maker)
    return [
        dataclasses.replace(tensor, name=f"{_choice(makers)}.{tensor.name}", count=len(makers))
        if makers
        else tensor
        for tensor, makers in found.values()
    ]


def _choice(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{','.join(names)}}}"


def _spec_in_type(array: Any) -> P | None:
    """Of an array or a ShapeDtypeStruct; None if it does not say."""
    return getattr(array.sharding, "spec", None)


def sharding_table(tensors: Iterable[Tensor], manager: PartitionManager) -> list[Row]:
    """One row per tensor.

    Raises: ValueError for a dim that does not divide, or a tensor that lies elsewhere than its
        semantic axes say.
    """
    return [_row(tensor, manager) for tensor in tensors]


def _row(tensor: Tensor, manager: PartitionManager) -> Row:
    spec = _spec_of(tensor, manager)
    local = NamedSharding(manager.mesh, spec).shard_shape(tensor.shape)
    size = tensor.count * jnp.dtype(tensor.dtype).itemsize * math.prod(local)
    return Row(
        name=tensor.name,
        axes=_axes_label(tensor),
        spec=spec,
        dtype=str(jnp.dtype(tensor.dtype)),
        shape=tuple(tensor.shape),
        local_shape=tuple(local),
        count=tensor.count,
        bytes_per_device=size,
        replicated=_replications(tensor, spec, size, manager),
    )


def _entries(axes: Any) -> tuple[Any, ...]:
    return tuple(axes.axes if hasattr(axes, "axes") else axes)


def _spec_of(tensor: Tensor, manager: PartitionManager) -> P:
    """Where it lies, which must be where its semantic axes say."""
    ndim = len(tensor.shape)
    given = None if tensor.spec is None else P(*tensor.spec, *[None] * (ndim - len(tensor.spec)))
    if tensor.axes is None:
        return given if given is not None else P(*[None] * ndim)
    stack = max(0, ndim - len(_entries(tensor.axes)))
    resolved = manager.resolve(tensor.axes, shape=tensor.shape[stack:], name=tensor.name)
    spec = P(*[None] * stack, *resolved)
    if given is not None and _split(given, manager) != _split(spec, manager):
        raise ValueError(f"{tensor.name} lies as {given}, but {_axes_label(tensor)} means {spec}")
    return spec


def _split(spec: P, manager: PartitionManager) -> list[tuple[str, ...]]:
    """Per dim, the mesh axes that really split it."""
    return [tuple(n for n in mesh_axes_of(entry) if manager.mesh.shape[n] > 1) for entry in spec]


def _axes_label(tensor: Tensor) -> str:
    """`RowWise: stack TP [FSDP SP]`."""
    if tensor.axes is None:
        return "?" if tensor.shape else ""
    entries = _entries(tensor.axes)
    stack = ["stack"] * (len(tensor.shape) - len(entries))
    label = " ".join([*stack, *(axis_label(entry) for entry in entries)])
    return f"{rule}: {label}" if (rule := _rule_name(tensor.axes)) else label


def _rule_name(axes: Any) -> str:
    kind = axes if isinstance(axes, type) else type(axes)
    return kind.__name__ if hasattr(kind, "axes") else ""


def _replications(
    tensor: Tensor, spec: P, size: int, manager: PartitionManager
) -> tuple[Replication, ...]:
    used = {name for entry in spec for name in mesh_axes_of(entry)}
    unused = {name: n for name, n in manager.mesh.shape.items() if n > 1 and name not in used}
    copies = math.prod(unused.values())
    excess = size - round(size / copies)
    items, before, factor = [], 0, 1
    for name, count in unused.items():
        factor *= count
        upto = round(excess * math.log(factor) / math.log(copies))
        items.append(Replication(name, count, _reason(tensor, name, manager), upto - before))
        before = upto
    return tuple(items)


def _reason(tensor: Tensor, mesh_axis: str, manager: PartitionManager) -> str:
    """Why no dim of this tensor is on this mesh axis."""
    if not tensor.shape:
        return "a scalar"
    if tensor.axes is None:
        return "no semantic axes given"
    entries = _entries(tensor.axes)
    shape = tensor.shape[len(tensor.shape) - len(entries) :]
    mode = runtime_mode(tensor.axes, ax.NOT_GIVEN, shape, tensor.name)
    wanted = [manager.partition_axis.resolve_axis(entry, mode) for entry in entries]
    for entry, size, names in zip(entries, shape, wanted, strict=True):
        if mesh_axis in names:
            parts = math.prod(manager.mesh.shape[name] for name in names)
            return (
                f"{axis_label(entry)} = {size} does not divide over {' x '.join(names)} = {parts}: "
                "replicated on request"
            )
    label = _rule_name(tensor.axes) or "its axes"
    if any(axis_label(entry) == ax.EMPTY for entry in entries):
        return f"'_' in {label}"
    if nowhere := [axis_label(e) for e, names in zip(entries, wanted, strict=True) if not names]:
        return f"rules map {' and '.join(nowhere)} to nothing"
    repeats = mesh_axis == manager.partition_axis.data_parallel_axis
    return f"no dim is on {mesh_axis}" + (": data parallel repeats it" if repeats else "")


def costs(rows: Iterable[Row]) -> dict[str, int]:
    """Bytes per device beyond an even split, by mesh axis and reason, the largest first."""
    found: dict[str, int] = {}
    for row in rows:
        for item in row.replicated:
            found[str(item)] = found.get(str(item), 0) + item.cost
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def summary(rows: Sequence[Row]) -> str:
    """One line: bytes per device, those beyond an even split, the two largest reasons for them."""
    size, even = _bytes(rows)
    if size == even:
        return f"{size:,} bytes per device, split evenly"
    largest = [f"{cost:,} {reason}" for reason, cost in list(costs(rows).items())[:2]]
    return f"{size:,} bytes per device, {size - even:,} beyond an even split ({'; '.join(largest)})"


def _bytes(rows: Sequence[Row]) -> tuple[int, int]:
    """Per device: as it is, and split evenly."""
    return sum(row.bytes_per_device for row in rows), sum(row.even_bytes for row in rows)


def render(sections: Mapping[str, Sequence[Row]]) -> str:
    """The table as text: a block per section, then what every reason costs in each of them."""
    reasons = costs(row for rows in sections.values() for row in rows)
    marks = {reason: str(number) for number, reason in enumerate(reasons, 1)}
    lines: list[tuple[str, ...]] = []
    for title, rows in sections.items():
        lines += [(title, *_COLUMNS), *(_cells(row, marks) for row in rows), *_totals(rows), ()]
    text = _aligned(lines, right=_NUMBERS)
    if marks:
        by_section = [costs(rows) for rows in sections.values()]
        text += _aligned(
            [
                ("why", "bytes per device beyond an even split over all devices", *sections),
                *(
                    (mark, reason, *(f"{section.get(reason, 0):,}" for section in by_section))
                    for reason, mark in marks.items()
                ),
                (),
            ],
            right=range(2, 2 + len(sections)),
        )
    return "\n".join([*text, *_LEGEND])


def _cells(row: Row, marks: Mapping[str, str]) -> tuple[str, ...]:
    entries = ["-" if entry is None else "+".join(mesh_axes_of(entry)) for entry in row.spec]
    return (
        row.name if row.count == 1 else f"{row.name} x{row.count}",
        row.axes,
        " ".join(entries),
        row.dtype,
        _dims(row.shape),
        _dims(row.local_shape),
        f"{row.bytes_per_device:,}",
        str(math.prod(item.size for item in row.replicated)),
        f"{row.bytes_per_device - row.even_bytes:,}",
        ",".join(marks[str(item)] for item in row.replicated),
    )


def _totals(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    (size, even), blank = _bytes(rows), [""] * 5
    return [
        ("total", *blank, f"{size:,}", "", f"{size - even:,}"),
        ("total if split evenly", *blank, f"{even:,}"),
    ]


def _dims(shape: Sequence[int]) -> str:
    return " ".join(str(size) for size in shape)


def _aligned(lines: Sequence[tuple[str, ...]], right: Iterable[int]) -> list[str]:
    """Columns two spaces apart, those in `right` flush right."""
    right = set(right)
    columns = max(len(cells) for cells in lines)
    widths = [max(len(cells[i]) for cells in lines if len(cells) > i) for i in range(columns)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
        ).rstrip()
        for cells in lines
    ]
