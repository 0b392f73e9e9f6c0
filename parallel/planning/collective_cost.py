"""Cost of a collective: the links, rings or host network that it occupies, and for how long."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel.planning.device_groups import device_groups
from parallel.planning.hlo import Collective, CrossSlice, Instruction
from parallel.planning.links import Coords, Link, link_loads
from parallel.sharding.devices import Chip

_HOP_LATENCY = 1e-6  # seconds per hop

Resource = str | Link
"""Something that serves one transfer after another: a link, "rings", "dcn" or "dma"."""


@dataclass(frozen=True)
class TransferCost:
    """Resources and time of one transfer."""

    resources: Iterable[Resource]
    seconds: float
    bytes: float
    """Sent by each device."""


_FREE = TransferCost((), 0.0, 0.0)


class CollectiveCost:
    """Prices collectives on a slice of a torus.

    torus: the sides of the slice. places: of the devices, in the order of the partitions; empty:
    every permute is one between neighbours.
    """

    def __init__(
        self, chip: Chip, torus: Sequence[int], places: Sequence[Coords], num_partitions: int
    ):
        self._chip, self._torus, self._places = chip, torus, places
        self._num_partitions = num_partitions

    def transfer(self, collective: Collective) -> TransferCost:
        """Return the cost of a collective within a slice."""
        if collective.kind == "collective-permute":
            return self._permute(collective)
        return self._ring(collective)

    def _permute(self, collective: Collective) -> TransferCost:
        """Return the cost of a permute.

        It occupies every link on its routes (`link_loads`) until all messages have arrived. The
        link that most messages share decides how long. Links work in both directions at once.
        Without places it is one hop between neighbours; permutes with the same pairs then share
        their links, others have their own. (The ids alone do not tell a way around a ring: on a
        torus as many steps go up as down.)
        """
        x = collective.instruction
        pairs = [(a, b) for a, b in x.source_target_pairs if a != b]
        if x.source_target_pairs and not pairs:
            return _FREE
        size = collective.computation.operand_bytes(x) or x.arrays[0].bytes
        source, target = min(pairs) if pairs else (0, 0)
        links: Iterable[Resource] = (f"link {source} to {target}",)
        load, distance = 1.0, 1
        if self._places:
            routes = [(self._places[a], self._places[b]) for a, b in pairs]
            loads, farthest = link_loads(routes, self._torus, self._chip.wrap)
            if loads:  # else between the cores of chips: no faster, but on no link
                links, load, distance = loads, max(1.0, *loads.values()), farthest
        seconds = load * size / self._chip.ici_bandwidth + distance * _HOP_LATENCY
        return TransferCost(links, seconds, size)

    def _ring(self, collective: Collective) -> TransferCost:
        """Return the cost of a collective over rings in both directions."""
        x = collective.instruction
        n = len(device_groups(x, self._num_partitions)[0])
        if n == 1:
            return _FREE
        size = collective.computation.operand_bytes(x)
        if collective.kind == "all-gather":
            size = max(size, x.bytes - (size if x.opcode.endswith("-start") else 0))
        share = size * (n - 1) / n
        exchanges = ("all-to-all", "ragged-all-to-all")
        shares = dict.fromkeys(("all-gather", "reduce-scatter", *exchanges), share)
        sent = (shares | {"all-reduce": 2 * share}).get(collective.kind, size)
        # Blocks of an exchange pass through other devices: on a ring it takes a quarter of an
        # all-gather of the global array (scaling book).
        carried = size * n / 4 if collective.kind in exchanges else sent
        both_ways = 2 * self._chip.ici_bandwidth * self._num_rings(x)
        return TransferCost(("rings",), carried / both_ways + _HOP_LATENCY * (n - 1), sent)

    def _num_rings(self, x: Instruction) -> float:
        """Return how many rings the collective uses at once: one per side of the torus it spans.

        libtpu names the sides (dim_sizes) or their number (the emitter's 1D, 2D, 3D). A side of two
        chips has one link between them, so it is half a ring. Longer sides count as rings whether
        their ends are linked or not, unlike on the routes of permutes.
        """
        listed = x.find(r"dim_sizes:([\d,]+)")
        spans_sides = int(x.find(r'"emitter":"(\d)D') or 1) > 1
        sides: Sequence[int] = self._torus if spans_sides else ()
        if listed:
            sides = [int(side) for side in listed.strip(",").split(",")]
        return max(1.0, sum(0.5 if side == 2 else 1.0 for side in sides if side > 1))

    def between_slices(self, x: Instruction, collective: CrossSlice, size: float) -> TransferCost:
        """Return the cost of a collective of `size` bytes over the chip's share of its host.

        Raises: ValueError for another kind of collective, or a chip without `dcn_bandwidth`.
        """
        n = collective.num_slices
        sent = {
            "all-reduce": 2 * (n - 1) / n,
            "all-gather": n - 1.0,
            "reduce-scatter": (n - 1) / n,
            "all-to-all": (n - 1) / n,
        }
        if collective.kind not in sent or not self._chip.dcn_bandwidth:
            raise ValueError(
                f"{x.name}: no price for {collective.kind} between slices at "
                f"{self._chip.dcn_bandwidth} bytes/s; let only {', '.join(sent)} cross slices, on "
                "a chip with Chip.dcn_bandwidth"
            )
        moved = size * sent[collective.kind]
        return TransferCost(("dcn",), moved / self._chip.dcn_bandwidth, moved)
