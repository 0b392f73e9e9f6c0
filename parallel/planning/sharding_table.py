"""Sharding table: how every tensor is split, what each device holds of it, and what is replicated.

Tensors (name, semantic axes, shape) and the sharding rules give rows, and rows give text; nothing
is allocated. No replica is silent: for every mesh axis that does not split a tensor, the row has a
reason and an excess, in bytes per device beyond an even split over all devices. A tensor whose
sharding differs from its semantic axes is an error. Arrays that exist only inside a shard_map
(gathered inputs, gathered kernels) are not in the table.
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
from units import format_bytes

_COLUMNS = tuple(
    "semantic axes,spec,dtype,shape,per device,bytes,replicas,excess,reasons".split(",")
)
_NUMBERS = (6, 7, 8)
_LEGEND = (
    "bytes: per device, summed over the arrays of a row; excess: bytes beyond an even split",
    "replicas: devices that hold the same shard; stack: a dim that is scanned and never sharded",
)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Description of an array for the table.

    Attributes:
        axes: A `DynamicShardingAxes` class or instance, or a list of semantic axes; None if not
            known. They describe the last dims; dims before them are a stack that is scanned.
        spec: The actual sharding; None for the one that the rules give.
        count: The number of such arrays.
    """

    name: str
    axes: Any
    shape: tuple[int, ...]
    dtype: Any
    spec: P | None = None
    count: int = 1


@dataclass(frozen=True)
class Replication:
    """One mesh axis whose devices all hold the same shard of a tensor."""

    mesh_axis: str
    size: int
    reason: str
    cost: int
    """Excess bytes per device; several axes share them by the logarithm of their sizes."""

    def __str__(self) -> str:
        return f"{self.mesh_axis}={self.size}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor on one device, with the bytes of all `count` arrays."""

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
        """Bytes per device if nothing were replicated."""
        return self.bytes_per_device - sum(item.cost for item in self.replicated)


def tensors_of_model(model: nnx.Module) -> list[Tensor]:
    """Return the variables of a module, with the `semantic_axes` in their metadata."""
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


def tensors_of_state(tree: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of a pytree, such as an optimizer state.

    A leaf whose path ends in the name of a parameter, and has its shape, gets its axes, also if
    the leaf is a field of the moment of that parameter, such as its codes in 8 bits; one of the
    shape without the last dimension gets the other axes. Leaves of one parameter with the same
    sharding become one Tensor: `{mu,nu}.name`.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    found: dict[Any, tuple[Tensor, list[str]]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        tensor, prefix = _of_parameter(parts, leaf.shape, by_name)
        tensor = dataclasses.replace(tensor, dtype=leaf.dtype, spec=_spec_in_type(leaf))
        key = (tensor.name, str(tensor.dtype), tensor.spec)
        found.setdefault(key, (tensor, []))[1].extend(prefix)
    return [
        dataclasses.replace(tensor, name=f"{_braces(prefixes)}.{tensor.name}", count=len(prefixes))
        if prefixes
        else tensor
        for tensor, prefixes in found.values()
    ]


def _of_parameter(
    parts: Sequence[str], shape: tuple[int, ...], by_name: Mapping[str, Tensor]
) -> tuple[Tensor, list[str]]:
    """Return a leaf of a state with the axes of its parameter, and the name before it."""
    for fields in ([], [parts[-1]]):
        names = parts[: len(parts) - len(fields)]
        start = next((n for n in range(1, len(names)) if ".".join(names[n:]) in by_name), None)
        if start is None:
            continue
        found = by_name[".".join(names[start:])]
        name = ".".join([found.name, *fields])
        if shape == found.shape:
            return dataclasses.replace(found, name=name), [names[start - 1]]
        if fields and shape == found.shape[:-1]:
            axes = None if found.axes is None else [*getattr(found.axes, "axes", found.axes)][:-1]
            return dataclasses.replace(found, name=name, shape=shape, axes=axes), [names[start - 1]]
    return Tensor(name=".".join(parts), axes=None, shape=shape, dtype=None), []


def _braces(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{','.join(names)}}}"


def _spec_in_type(array: Any) -> P | None:
    """Return the spec of an array or a ShapeDtypeStruct; None if it has none."""
    return getattr(array.sharding, "spec", None)


def sharding_table(tensors: Iterable[Tensor], manager: PartitionManager) -> list[Row]:
    """Return one row per tensor.

    Raises: ValueError for a dim that does not divide, or a sharding that differs from the semantic
        axes.
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
    """Return the sharding of a tensor, which must be the one of its semantic axes."""
    ndim = len(tensor.shape)
    given = None if tensor.spec is None else P(*tensor.spec, *[None] * (ndim - len(tensor.spec)))
    if tensor.axes is None:
        return given if given is not None else P(*[None] * ndim)
    stack = max(0, ndim - len(_entries(tensor.axes)))
    resolved = manager.resolve(tensor.axes, shape=tensor.shape[stack:], name=tensor.name)
    spec = P(*[None] * stack, *resolved)
    if given is not None and _split(given, manager) != _split(spec, manager):
        raise ValueError(
            f"{tensor.name} has sharding {given}, but {_axes_label(tensor)} means {spec}"
        )
    return spec


def _split(spec: P, manager: PartitionManager) -> list[tuple[str, ...]]:
    """Return the mesh axes of more than one device that split each dim."""
    return [tuple(n for n in mesh_axes_of(entry) if manager.mesh.shape[n] > 1) for entry in spec]


def _axes_label(tensor: Tensor) -> str:
    """Return a label like `RowWise: stack TP [FSDP SP]`."""
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
    """Return why this mesh axis splits no dim of this tensor."""
    if not tensor.shape:
        return "scalar"
    if tensor.axes is None:
        return "no semantic axes"
    entries = _entries(tensor.axes)
    shape = tensor.shape[len(tensor.shape) - len(entries) :]
    mode = runtime_mode(tensor.axes, ax.NOT_GIVEN, shape, tensor.name)
    wanted = [manager.partition_axis.resolve_axis(entry, mode) for entry in entries]
    for entry, size, names in zip(entries, shape, wanted, strict=True):
        if mesh_axis in names:
            parts = math.prod(manager.mesh.shape[name] for name in names)
            return (
                f"{axis_label(entry)} = {size} does not divide over {' x '.join(names)} = {parts}, "
                "replicated on request"
            )
    if mesh_axis == manager.partition_axis.data_parallel_axis:
        return "data parallelism"
    if any(axis_label(entry) == ax.EMPTY for entry in entries):
        rule = _rule_name(tensor.axes)
        if all(axis_label(entry) == ax.EMPTY for entry in entries):
            return "kept whole" + (f" by the rule {rule}" if rule else "")
        return "one of its dims has no semantic axis" + (f" ({rule})" if rule else "")
    if nowhere := [axis_label(e) for e, names in zip(entries, wanted, strict=True) if not names]:
        return f"the rules leave {' and '.join(nowhere)} unsharded"
    return f"no dim is on {mesh_axis}"


def costs(rows: Iterable[Row]) -> dict[str, int]:
    """Return the excess bytes per device by mesh axis and reason, the largest first."""
    found: dict[str, int] = {}
    for row in rows:
        for item in row.replicated:
            found[str(item)] = found.get(str(item), 0) + item.cost
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def summary(rows: Sequence[Row]) -> str:
    """Return one line: bytes per device, how many are replicas, and the two largest reasons.

    The reasons are left out if less than 1 % is replicated.
    """
    size, even = _bytes(rows)
    if size == even:
        return f"{format_bytes(size)} per device, nothing replicated"
    if 100 * (size - even) < size:
        return f"{format_bytes(size)} per device, less than 1 % of it replicated"
    every = list(costs(rows).items())
    reasons = "; ".join(f"{format_bytes(cost)} over {reason}" for reason, cost in every[:2])
    reasons = f"largest: {reasons}" if len(every) > 2 else reasons
    return (
        f"{format_bytes(size)} per device, {format_bytes(size - even)} of it replicated ({reasons})"
    )


def _bytes(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the bytes per device, as they are and split evenly over all devices."""
    return sum(row.bytes_per_device for row in rows), sum(row.even_bytes for row in rows)


def render(sections: Mapping[str, Sequence[Row]]) -> str:
    """Return the table as text: a block per section, then the excess bytes by reason."""
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
                ("reason", "excess bytes per device", *sections),
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
    """Return lines with aligned columns; those in `right` are right-aligned."""
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
