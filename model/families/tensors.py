"""Tensor tables: which tensor of a Hugging Face file holds which of our arrays.

A table is a tuple of entries, read in both directions. Our arrays have dotted paths and are stacked
over layers, and experts over experts too; a `Piece` is the part of an array that one tensor holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.families.layouts import IDENTITY, Concatenated, Layout, Shape, Transposed

STACKS = {"layers": False, "sparse_layers": True}
"""Our stacks of layers, and whether these are mixtures of experts."""
_VOCAB_DIM = {"embed.table": 0, "head.kernel": 1}


@dataclass(frozen=True)
class Entry:
    """One kind of tensor on disk, and our arrays in it.

    name: with {layer}, and with {expert} if every expert has a tensor of its own.
    paths: our arrays; `*.` at the start stands for both stacks of layers.
    stacked: dim 0 on disk are the experts.
    dtype: safetensors type that an export always writes; None: the type of the other tensors.
    """

    name: str
    paths: tuple[str, ...]
    layout: Layout = IDENTITY
    stacked: bool = False
    dtype: str | None = None


def vector(name: str, path: str, dtype: str | None = None) -> tuple[Entry, ...]:
    """Return the entry of a scale, a table or another array that is stored as it is."""
    return (Entry(name, (path,), dtype=dtype),)


def linear(name: str, path: str, *outputs: str) -> tuple[Entry, ...]:
    """Return the entries of the weight and of the bias of a linear.

    outputs: names of its outputs, which the tensor on disk holds one after another.
    """
    inner = Concatenated() if len(outputs) > 1 else IDENTITY
    suffixes = [f".{output}" for output in outputs] or [""]
    return (
        Entry(f"{name}.weight", tuple(f"{path}.kernel{s}" for s in suffixes), Transposed(inner)),
        Entry(f"{name}.bias", tuple(f"{path}.bias{s}" for s in suffixes), inner),
    )


def weight(name: str, path: str) -> tuple[Entry, ...]:
    """Return the entry of a linear without bias."""
    return linear(name, path)[:1]


@dataclass(frozen=True)
class Piece:
    """Part of one of our arrays, and the tensor on disk that holds it."""

    path: str
    """Dotted path of our array."""
    index: tuple[int, ...]
    """Leading indices of the part in our array: layer, expert."""
    name: str
    """Name of the tensor on disk."""
    entry: Entry
    part: int
    """Number of the array in `entry.paths`."""
    shapes: tuple[Shape, ...]
    """Shapes of all parts of the tensor, without padding and leading dims."""
    num_experts: int = 0
    """Experts in the tensor on disk; 0: it has no such dim."""

    @property
    def shape(self) -> Shape:
        """Shape of our part, without padding."""
        return self.shapes[self.part]

    @cached_property
    def stored_shape(self) -> Shape:
        """Shape of the whole tensor on disk."""
        shape = self.entry.layout.stored_shape(self.shapes)
        return (self.num_experts, *shape) if self.num_experts else shape

    def view(self, tensor: Any) -> np.ndarray:
        """Return our part as a view of the tensor on disk."""
        one = tensor[self.index[-1]] if self.num_experts else tensor[...]
        return self.entry.layout.view(one, self.shapes, self.part)


def find_pieces(
    table: Sequence[Entry],
    leaves: Mapping[str, Shape],
    config: ModelConfig,
    exists: Callable[[Piece], bool] | None = None,
) -> dict[str, list[Piece]]:
    """Return the pieces of every array, by path; an empty list where the table has no entry.

    leaves: shapes of our arrays by dotted path. exists: whether the tensor of a piece exists. If
    several entries hold an array, the first one whose tensor exists is used, else the first one.
    """
    found: dict[str, list[Piece]] = {}
    for path in leaves:
        spellings = [
            _pieces(entry, entry.paths.index(pattern), path, leaves, config)
            for entry in table
            for pattern in entry.paths
            if _matches(pattern, path) and _has_all(entry, path, leaves)
        ]
        chosen = spellings[:1]
        if exists is not None:
            chosen = [pieces for pieces in spellings if exists(pieces[0])][:1] or chosen
        found[path] = chosen[0] if chosen else []
    return found


def _matches(pattern: str, path: str) -> bool:
    stack, _, rest = path.partition(".")
    return pattern == path or (stack in STACKS and pattern == f"*.{rest}")


def _has_all(entry: Entry, path: str, leaves: Mapping[str, Shape]) -> bool:
    """Return whether the model has every array of an entry."""
    stack = path.partition(".")[0]
    return all(pattern.replace("*", stack) in leaves for pattern in entry.paths)


def _pieces(
    entry: Entry, part: int, path: str, leaves: Mapping[str, Shape], config: ModelConfig
) -> list[Piece]:
    """Return the pieces of one array in the order of layers and experts."""
    stack = path.partition(".")[0]
    has_experts = entry.stacked or "{expert}" in entry.name
    num_lead = (stack in STACKS) + has_experts
    shapes = []
    for pattern in entry.paths:
        other = pattern.replace("*", stack)
        shape = list(leaves[other])
        if other in _VOCAB_DIM:
            shape[_VOCAB_DIM[other]] = config.vocab_size
        shapes.append(tuple(shape[num_lead:]))
    layers = [n for n, sparse in enumerate(config.sparse_layers) if sparse == STACKS.get(stack)]
    experts = config.moe.num_experts if has_experts else 0
    return [
        Piece(
            path,
            (*([place] if stack in STACKS else []), *([expert] if experts else [])),
            entry.name.format(layer=layer, expert=expert),
            entry,
            part,
            tuple(shapes),
            experts if entry.stacked else 0,
        )
        for place, layer in enumerate(layers or [0])
        for expert in range(experts or 1)
    ]
