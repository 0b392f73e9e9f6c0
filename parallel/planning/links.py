"""Physical links of a TPU slice: positions of its chips, messages on each link, order of permutes.

The order keeps links busy.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import jax

Coords = tuple[int, ...]
"""Position of a chip in the torus of its slice, counted from a corner."""
Link = tuple[Coords, Coords]
"""One direction of a link between two neighbouring chips."""


def chip_coords(devices: Iterable[jax.Device]) -> tuple[Coords, ...]:
    """Return the position of each TPU device's chip, from the corner of their bounding box.

    Cores of one chip share its position. Devices of several slices have positions in their own
    slice.
    """
    found = [tuple(device.coords) for device in devices]
    lows = [min(axis) for axis in zip(*found, strict=True)]
    return tuple(tuple(a - low for a, low in zip(coords, lows, strict=True)) for coords in found)


def link_loads(
    pairs: Iterable[tuple[Coords, Coords]], sides: Sequence[int], wrap: int
) -> tuple[dict[Link, float], int]:
    """Count the messages on each link of a torus, and the longest distance in hops.

    Every message takes the shortest way along the first axis, then along the second, and so on.
    Where both ways around a side are equally long, half of the messages go each way. libtpu
    describes absent slices without wrap-around links unless asked, so its own collectives may not
    use them.

    Args:
        pairs: Source and target of each message.
        sides: Sides of the slice.
        wrap: Sides that are a multiple of this have wrap-around links (`Chip.wrap`); 0: none.

    Returns:
        Messages by link, and the longest distance.

    Raises:
        ValueError: A position is outside of the torus.
    """
    loads: dict[Link, float] = defaultdict(float)
    longest = 0
    for source, target in pairs:
        here, distance = source, 0
        for axis, goal in enumerate(target):
            side = sides[axis] if axis < len(sides) else 1
            if max(here[axis], goal) >= side:
                raise ValueError(
                    f"a message from {source} to {target} leaves the torus {tuple(sides)}; pass "
                    "the sides of the slice that these chips are in"
                )
            ways = _shortest_ways(goal - here[axis], side if wrap and side % wrap == 0 else 0)
            for way in ways:
                for link in _walk(here, axis, way, side):
                    loads[link] += 1 / len(ways)
            here = (*here[:axis], goal, *here[axis + 1 :])
            distance += abs(ways[0])
        longest = max(longest, distance)
    return dict(loads), longest


def order_by_links(
    routes: Sequence[Sequence[tuple[Coords, Coords]]], sides: Sequence[int], wrap: int
) -> list[int]:
    """Order permutes so that those that follow one another travel over different links.

    Greedy: of those left, the ones that occupy most links go first, each followed by all that share
    no link with it and with each other.

    Args:
        routes: Source and target of each message, by permute.
        sides: Sides of the slice, as for `link_loads`.
        wrap: As for `link_loads`.

    Returns:
        The indices of the permutes in this order.
    """
    loads = [link_loads(pairs, sides, wrap)[0] for pairs in routes]
    left = sorted(range(len(routes)), key=lambda i: -sum(loads[i].values()))
    order: list[int] = []
    while left:
        busy: set[Link] = set()
        for i in list(left):
            if busy.isdisjoint(loads[i]):
                busy.update(loads[i])
                left.remove(i)
                order.append(i)
    return order


def _walk(here: Coords, axis: int, way: int, side: int) -> Iterator[Link]:
    """Yield the links of a signed distance along one axis, wrapping around its end."""
    for _ in range(abs(way)):
        index = (here[axis] + (1 if way > 0 else -1)) % side
        after = (*here[:axis], index, *here[axis + 1 :])
        yield here, after
        here = after


def _shortest_ways(offset: int, ring: int) -> tuple[int, ...]:
    """Return the shortest signed distances along one axis; ring: its length if it wraps, else 0."""
    if not ring or 2 * abs(offset) < ring:
        return (offset,)
    if 2 * abs(offset) == ring:
        return abs(offset), -abs(offset)
    return (offset - ring if offset > 0 else offset + ring,)
