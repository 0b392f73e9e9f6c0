"""Which overlap method a linear gets under `auto`: an estimate from its shape and the chip.

Rings pay where a hop takes no longer than the matmul above it; whole blocks both ways keep matmuls
large, halves use both directions to the end. The estimate prices matmuls and links alone, at the
rates that compiled schedules reach; `scripts/bench.py overlap` shows what a compiled schedule makes
of the same shapes. It refuses to guess: on chips without figures it answers `none` and says so.
"""

from dataclasses import dataclass
from typing import Literal

from parallel.linear.collective_matmul import Overlap
from parallel.sharding.mesh import Chip

OverlapChoice = Literal[Overlap, "auto"]
"""`Overlap`, or `auto`: chosen per kind of linear, with a reason."""

# Fractions and sizes read off schedules compiled for v5p:2x2x2 and v5e:2x4, November 2026: large
# bfloat16 matmuls reach 0.88 of peak, ones of fewer than 1024 rows about a fifth less.
_EFFICIENCY, _FULL_ROWS, _SHORT_PENALTY = 0.88, 1024, 1.2


@dataclass(frozen=True, kw_only=True)
class RingShape:
    """What one ring carries and multiplies on each device; sizes of a block, local widths."""

    rows: int
    """Rows that one partial matmul sees."""
    width: int
    """Full features of the rows that travel."""
    block_bytes: int
    """One block on the wire."""
    gather_columns: int = 0
    """Columns of the kernels that gathered rows meet; 0: nothing is gathered."""
    scatter_columns: int = 0
    """Features that the row-parallel kernel contracts; 0: nothing is scattered."""
    halves: bool = True
    """A block can be cut in two."""
    kernels: int = 1
    """Kernels that share the rows of a partial matmul between them: experts."""


@dataclass(frozen=True)
class Choice:
    """An overlap method and why."""

    overlap: Overlap
    reason: str


def choose_overlap(shape: RingShape, n: int, chip: Chip | None) -> Choice:
    """The method with the least estimated forward time on a ring of n devices.

    chip: None, or one without link figures: `none`.
    """
    if n == 1:
        return Choice("none", "one device, nothing travels")
    if chip is None or not chip.ici_bandwidth:
        return Choice("none", "no link figures for this device, so no overlap is assumed")
    # A tie goes to the method named first.
    legal: tuple[Overlap, ...] = ("none", "bidirectional", "split", "ring")
    times = {
        overlap: _seconds(overlap, shape, n, chip)
        for overlap in legal
        if shape.halves or overlap != "split"
    }
    best = min(times, key=times.__getitem__)
    told = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in times.items())
    return Choice(best, f"estimated ms forward: {told}")


def _seconds(overlap: Overlap, shape: RingShape, n: int, chip: Chip) -> float:
    """Forward time of the matmuls and of what they do not hide."""
    hop = shape.block_bytes / chip.ici_bandwidth
    columns = [c for c in (shape.gather_columns, shape.scatter_columns) if c]
    halved = overlap == "split" and len(columns) == 2  # a chain multiplies the halves one by one
    matmuls = [_matmul_seconds(shape, c, n, chip, overlap, halved) for c in columns]
    if overlap == "none":
        # One collective in both directions, and nothing under it.
        return sum(matmul + (n - 1) / 2 * hop for matmul in matmuls)
    if overlap == "bidirectional":
        return sum(max(matmul, n // 2 * hop) for matmul in matmuls)
    # The sums of a chain follow its blocks: both phases share matmuls and links.
    links = len(columns) * (n - 1) * hop / (2 if overlap == "split" else 1)
    copies = 0.0
    if overlap == "split" and not halved:
        # Halves are put together and parted again, by each a read and a write of a block.
        copies = 4 * (n - 1) * shape.block_bytes / chip.hbm_bandwidth
    return max(sum(matmuls), links) + copies


def _matmul_seconds(
    shape: RingShape, columns: int, n: int, chip: Chip, overlap: Overlap, halved: bool
) -> float:
    parts = 1 if overlap == "none" else 2 * n if halved else n
    rows = shape.rows * n // parts
    compute = 2 * shape.rows * n * shape.width * columns / (_EFFICIENCY * chip.peak_flops)
    compute *= _SHORT_PENALTY if rows < _FULL_ROWS else 1.0
    item = shape.block_bytes // (shape.rows * shape.width)
    kernel_bytes = (
        item * shape.width * columns * shape.kernels
    )  # read again for every partial matmul
    return max(compute, parts * kernel_bytes / chip.hbm_bandwidth)
