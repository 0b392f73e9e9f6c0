"""Division of a model's layers into segments: repeated patterns, each compiled once."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

LayerType = Literal["full_attention", "sliding_attention", "chunked_attention"]
"""Keys that a query attends to: all earlier ones, a sliding window, or those of its chunk."""


class LayerKind(NamedTuple):
    """Properties of a layer that determine its program."""

    layer_type: LayerType
    is_sparse: bool
    """The MLP is a mixture of experts."""
    has_rope: bool = True
    """Queries and keys are rotated by their positions."""


class Segment(NamedTuple):
    """Consecutive layers: a pattern of kinds, repeated. One scan runs over the repeats."""

    pattern: tuple[LayerKind, ...]
    repeats: int


def shortest_period(values: Sequence[Any]) -> int:
    """Return the length of the shortest prefix that gives the list when it is repeated.

    The last repetition may be cut short. The list must not be empty.
    """
    count = len(values)
    return next(n for n in range(1, count + 1) if values[n:] == values[: count - n])


def divide_layers(kinds: tuple[LayerKind, ...]) -> list[Segment]:
    """Divide layers by the shortest pattern that they repeat, however `layer_types` is written.

    Layers that do not complete a pattern follow. Layers that repeat no pattern are divided into
    runs of equal layers, if that leaves fewer layers to compile.
    """
    count = len(kinds)
    if not count:
        return []
    period = shortest_period(kinds)
    if period <= count // 2:
        repeats, rest = divmod(count, period)
        return [Segment(kinds[:period], repeats), *divide_layers(kinds[count - rest :])]
    runs = [Segment((kind,), len([*run])) for kind, run in groupby(kinds)]
    return runs if len(runs) < count else [Segment(kinds, 1)]
