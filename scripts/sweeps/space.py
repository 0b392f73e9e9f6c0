"""The search space of a sweep: values and ranges of configuration keys, and the points in it."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Scale = Literal["log", "uniform", "int"]
Point = dict[str, str]
"""The text of an override's value, by configuration key."""
_MAX_DRAWS = 1000  # of a point that has not been drawn before


@dataclass(frozen=True)
class Range:
    """Numbers from low to high: uniform, uniform in the logarithm, or whole with both ends."""

    scale: Scale
    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> str:
        """Return a random number with four significant digits, or a whole number."""
        if self.scale == "int":
            return str(rng.integers(int(self.low), int(self.high), endpoint=True))
        if self.scale == "log":
            return f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.4g}"
        return f"{rng.uniform(self.low, self.high):.4g}"


Values = tuple[str, ...] | Range
Space = Mapping[str, Values]


def is_range(item: str) -> bool:
    """Return whether KEY=TEXT names a range, such as KEY=log:1e-4:1e-2."""
    scale, *limits = item.partition("=")[2].split(":")
    return scale in get_args(Scale) and len(limits) == 2


def parse_space(items: Iterable[str]) -> Space:
    """Return the values of every key from `KEY=VALUE,VALUE` or `KEY=SCALE:LOW:HIGH`.

    Commas inside of brackets, braces and quotes do not separate values. Raises: ValueError.
    """
    space: dict[str, Values] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not key or not equals or not text:
            raise ValueError(
                f"--grid {item!r}: write section.key=VALUE,VALUE or section.key=log:LOW:HIGH"
            )
        if key in space:
            raise ValueError(f"--grid {item!r}: {key} is given twice; write all values in one list")
        space[key] = _parse_range(item) if is_range(item) else _split(item)
    return space


def _parse_range(item: str) -> Range:
    scale, low_text, high_text = item.partition("=")[2].split(":")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError as error:
        raise ValueError(f"--grid {item!r}: {low_text} and {high_text} must be numbers") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"--grid {item!r}: the first number must be below the second one")
    if scale == "log" and low <= 0:
        raise ValueError(f"--grid {item!r}: a logarithmic range must begin above 0; use uniform:")
    if scale == "int" and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"--grid {item!r}: both numbers must be whole; use uniform:")
    (known,) = (name for name in get_args(Scale) if name == scale)
    return Range(known, low, high)


def _split(item: str) -> tuple[str, ...]:
    """Return the values of an item, split at the commas outside of brackets and quotes."""
    values, depth, quote = [""], 0, ""
    for letter in item.partition("=")[2]:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
            if letter == "," and not depth:
                values.append("")
                continue
        values[-1] += letter
    if not all(values):
        raise ValueError(f"--grid {item!r}: a value is empty; remove the extra comma")
    if len(set(values)) < len(values):
        raise ValueError(f"--grid {item!r}: a value is given twice; remove one")
    return tuple(values)


def varied_keys(space: Space) -> list[str]:
    """Return the keys that have more than one value."""
    return [key for key, values in space.items() if isinstance(values, Range) or len(values) > 1]


def grid_points(space: Space) -> list[Point]:
    """Return every combination of values; the last key changes fastest. Raises: ValueError."""
    lists: list[tuple[str, ...]] = []
    for key, values in space.items():
        if isinstance(values, Range):
            raise ValueError(f"--grid {key}: a range has no end; add --random N to draw N trials")
        lists.append(values)
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*lists)]


def random_points(space: Space, count: int, seed: int) -> list[Point]:
    """Return up to `count` distinct random points; more points begin with those of fewer.

    There are fewer if the space has no more.
    """
    points: list[Point] = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        for _ in range(_MAX_DRAWS):
            point = {key: _draw(values, rng) for key, values in space.items()}
            if point not in points:
                points.append(point)
                break
    return points


def _draw(values: Values, rng: np.random.Generator) -> str:
    return values.draw(rng) if isinstance(values, Range) else values[rng.integers(len(values))]


def overrides_of(point: Point) -> Sequence[str]:
    """Return the overrides of a point, as train.py takes them."""
    return [f"{key}={text}" for key, text in point.items()]
