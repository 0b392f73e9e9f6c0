"""Layouts of tensors on disk: one or several of our arrays in one tensor of a Hugging Face file.

A layout is a view. Reading copies from the view of a tensor, writing copies into it, so one
definition serves both directions. Shapes and views are those of one layer, or of one expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Layout(Protocol):
    """Arrangement of our arrays in one tensor on disk."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of the tensor on disk that holds arrays of these shapes."""

    def view(self, tensor: np.ndarray, shapes: Sequence[Shape], part: int) -> np.ndarray:
        """Return the array number `part` as a view of the tensor, with our shape."""


@dataclass(frozen=True)
class Identity:
    """One array, as it is."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of the array."""
        return shapes[0]

    def view(self, tensor: np.ndarray, shapes: Sequence[Shape], part: int) -> np.ndarray:
        """Return the tensor."""
        return tensor


IDENTITY = Identity()


@dataclass(frozen=True)
class Concatenated:
    """Several arrays one after another along their last dim: q, k and v, or gate and up."""

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of the concatenation."""
        return (*shapes[0][:-1], sum(shape[-1] for shape in shapes))

    def view(self, tensor: np.ndarray, shapes: Sequence[Shape], part: int) -> np.ndarray:
        """Return a range of the last dim."""
        start = sum(shape[-1] for shape in shapes[:part])
        return tensor[..., start : start + shapes[part][-1]]


@dataclass(frozen=True)
class Interleaved(Concatenated):
    """Several arrays of one shape, interleaved along their last dim: gate, up, gate, up."""

    def view(self, tensor: np.ndarray, shapes: Sequence[Shape], part: int) -> np.ndarray:
        """Return every Nth entry of the last dim."""
        return tensor[..., part :: len(shapes)]


@dataclass(frozen=True)
class Transposed:
    """Another layout whose last two dims are swapped: PyTorch stores a linear as (out, in)."""

    inner: Layout = IDENTITY

    def stored_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of the inner layout with the last two dims swapped."""
        *lead, rows, columns = self.inner.stored_shape(shapes)
        return (*lead, columns, rows)

    def view(self, tensor: np.ndarray, shapes: Sequence[Shape], part: int) -> np.ndarray:
        """Return the view of the inner layout on the transposed tensor."""
        return self.inner.view(np.swapaxes(tensor, -1, -2), shapes, part)
