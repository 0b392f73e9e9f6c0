"""Automatic choice of a linear's overlap method, from its shape and the chip.

A ring pays off if a hop takes no longer than the matmul that hides it. `bidirectional` keeps
matmuls large; `split` uses both link directions to the end; `hypercube` uses the links of all sides
where the devices are the corners of a cube. The estimate counts only matmuls and
link transfers, at the rates that compiled schedules reach. `scripts/bench.py overlap` shows a
compiled schedule of the same shapes. On a chip without figures the choice is `none`.
"""

from dataclasses import dataclass
from typing import Literal

from parallel.linear.collective_matmul import Overlap
from parallel.sharding.devices import Chip

OverlapChoice = Literal[Overlap, "auto"]
"""`Overlap`, or `auto`: chosen for each kind of linear."""

# Read off schedules compiled for v5p:2x2x2 and v5e:2x4 in November 2026 by `scripts/bench.py
# overlap`: large bfloat16 matmuls reach 0.88 of peak; those of fewer than 1024 rows take 1.2 times
# as long.
_EFFICIENCY, _FULL_ROWS, _SHORT_PENALTY = 0.88, 1024, 1.2
_UNKNOWN_LINKS = "link bandwidth unknown; parallel.overlap=ring overlaps anyway"
# A block of 16 sequences is cut into 5, 6 and 5: the largest piece over the mean, 6 / (16 / 3).
_UNEVEN = 1.125


@dataclass(frozen=True, kw_only=True)
class RingShape:
    """Sizes of the blocks and matmuls of one ring, per device; kernel widths are local."""

    rows: int
    """Rows of one partial matmul."""
    width: int
    """Full feature width of the communicated rows."""
    block_bytes: int
    """Bytes of one communicated block."""
    gather_columns: int = 0
    """Columns of the kernels that multiply gathered rows; 0: nothing is gathered."""
    scatter_columns: int = 0
    """Features that the row-parallel kernel contracts; 0: nothing is scattered."""
    halves: bool = True
    """Whether a block can be split in two."""
    pieces: int = 1 << 30
    """Most pieces into which a block can be cut."""
    kernels: int = 1
    """Number of kernels (experts) that share the rows of a partial matmul."""


@dataclass(frozen=True)
class Choice:
    """An overlap method and the reason for it."""

    overlap: Overlap
    reason: str


def choose_overlap(
    shape: RingShape, n: int, chip: Chip | None, *, hypercube: bool = False
) -> Choice:
    """Return the method with the least estimated forward time on a ring of n devices.

    The choice is `none` if `chip` is None or has no link figures.

    hypercube: The devices are the corners of a hypercube (`parallel.sharding.mesh.is_hypercube`).
    """
    if n == 1:
        return Choice("none", "one device, no communication")
    if chip is None or not chip.ici_bandwidth:
        return Choice("none", _UNKNOWN_LINKS)
    # min() takes the first of equal times. `hypercube` precedes the other rings, because only its
    # hops are scheduled in groups. With n = 2 it gains nothing, and it cannot cut rows of experts.
    hypercube &= n > 2 and shape.pieces >= n.bit_length() - 1 and shape.kernels == 1
    methods: tuple[Overlap, ...] = ("none", "hypercube", "bidirectional", "split", "ring")
    possible = {"hypercube": hypercube, "split": shape.halves}
    times = {
        overlap: _seconds(overlap, shape, n, chip)
        for overlap in methods
        if possible.get(overlap, True)
    }
    best = min(times, key=times.__getitem__)
    estimates = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in times.items())
    return Choice(best, f"estimated ms forward: {estimates}")


def least_rows_for_compute(chip: Chip) -> int:
    """Return the least rows of a block of a kernel whose matmul is bound by compute, not by memory.

    Per number that it reads, of two bytes, the matmul does two FLOPs for every row of the block. So
    it needs as many rows as the chip does FLOPs per byte, at the rate that matmuls reach.
    """
    return round(_EFFICIENCY * chip.peak_flops / chip.hbm_bandwidth)


def choose_fsdp_overlap(width: int, chip: Chip | None) -> Choice:
    """Return the overlap method of the gather of stored kernels and of the sum of their gradients.

    A ring moves half of the bytes of the all-reduce to which libtpu compiles a reduce-scatter, and
    its hops are asynchronous. But every partial matmul of a gradient reads all of dy again: it is
    bound by memory if its block has fewer rows than `least_rows_for_compute`. Predicted for
    Llama-3-8B's shape over fsdp 8 of v6e (512 rows, at least 493): 1201 ms with rings, 1257 without
    (`scripts/bench.py model`, libtpu 0.0.42, 29 November 2026).

    Args:
        width: Rows (or columns) of the kernel that one device stores.
        chip: Figures of the chip, if known.
    """
    if chip is None or not chip.ici_bandwidth:
        return Choice("none", _UNKNOWN_LINKS)
    if width < (least := least_rows_for_compute(chip)):
        return Choice("none", f"partial matmuls of {width} rows are bound by memory below {least}")
    return Choice("bidirectional", "blocks of kernels and gradients travel under matmuls")


def _seconds(overlap: Overlap, shape: RingShape, n: int, chip: Chip) -> float:
    """Estimate the forward time: matmuls, and the communication that they do not hide."""
    hop = shape.block_bytes / chip.ici_bandwidth
    columns = [c for c in (shape.gather_columns, shape.scatter_columns) if c]
    # Parts of a block that are multiplied one by one; a chain does not join the halves of `split`.
    parts = 2 if overlap == "split" and len(columns) == 2 else 1
    parts = n.bit_length() - 1 if overlap == "hypercube" else parts
    matmuls = [_matmul_seconds(shape, c, n, chip, overlap, parts) for c in columns]
    if overlap == "none":
        # One collective that uses both directions, hidden by nothing.
        return sum(matmul + (n - 1) / 2 * hop for matmul in matmuls)
    if overlap == "bidirectional":
        return sum(max(matmul, n // 2 * hop) for matmul in matmuls)
    if overlap == "hypercube":
        return sum(max(matmul, _UNEVEN * (n - 1) * hop / parts) for matmul in matmuls)
    # Sums of a chain follow its blocks, so both phases share matmuls and links.
    links = len(columns) * (n - 1) * hop / (2 if overlap == "split" else 1)
    copies = 0.0
    if overlap == "split" and parts == 1:
        # Concatenating halves and splitting them again each read and write a block.
        copies = 4 * (n - 1) * shape.block_bytes / chip.hbm_bandwidth
    return max(sum(matmuls), links) + copies


def _matmul_seconds(
    shape: RingShape, columns: int, n: int, chip: Chip, overlap: Overlap, parts: int
) -> float:
    """Estimate the time of all partial matmuls with these columns."""
    count = 1 if overlap == "none" else parts * n
    rows = shape.rows * n // count
    compute = 2 * shape.rows * n * shape.width * columns / (_EFFICIENCY * chip.peak_flops)
    compute *= _SHORT_PENALTY if rows < _FULL_ROWS else 1.0
    item = shape.block_bytes // (shape.rows * shape.width)
    # Every partial matmul reads the kernels again.
    kernel_bytes = item * shape.width * columns * shape.kernels
    return max(compute, count * kernel_bytes / chip.hbm_bandwidth)
