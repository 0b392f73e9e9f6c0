"""The predicted time of a program, by its parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parallel.planning.collective_cost import Resource
from parallel.planning.parts import UNATTRIBUTED


@dataclass(frozen=True)
class Span:
    """Something on the timeline, from `start` to `end` in seconds.

    A loop is simulated once. It has a span "loop" around all iterations, those of the first, and
    one "iterations" for the others.
    """

    name: str
    part: str
    start: float
    end: float
    kind: Literal["instruction", "loop", "iterations", "transfer"] = "instruction"
    """Waits are instructions. Transfers run beside all others."""
    resources: frozenset[Resource] = frozenset()
    """Those that a transfer occupies."""
    details: Mapping[str, float | str] = field(default_factory=dict)


@dataclass
class PartTime:
    """Seconds of one part of the model, and the FLOPs of its matmuls and kernels."""

    matmul: float = 0.0
    other: float = 0.0
    kernels: float = 0.0
    exposed: float = 0.0
    dma_wait: float = 0.0
    recomputed: float = 0.0
    """The part of the total that repeats forward work during the backward pass."""
    matmul_flops: float = 0.0
    kernel_flops: float = 0.0

    @property
    def total(self) -> float:
        """The sum over all kinds."""
        return self.matmul + self.other + self.kernels + self.exposed + self.dma_wait


@dataclass
class CollectiveTime:
    """Collectives of one kind over the same mesh axes in one part of the model."""

    kind: str
    axes: str
    part: str
    count: int = 0
    bytes: float = 0.0
    """Sent by each device."""
    seconds: float = 0.0
    """On the links, hidden or not."""
    exposed: float = 0.0
    """Seconds during which nothing else runs; includes waiting for transfers queued before."""

    @property
    def hidden(self) -> float:
        """Seconds on the links beside compute."""
        return max(0.0, self.seconds - self.exposed)


@dataclass(frozen=True)
class Prediction:
    """Breakdown of the time of one run of a program, in seconds.

    total = matmul + other + kernels + exposed + dma_wait.
    """

    total: float
    matmul: float
    other: float
    """Vector work, copies and layout changes outside of matmuls."""
    kernels: float
    """Custom calls: Pallas attention and the like."""
    communication: float
    """Time on the links, hidden or not."""
    exposed: float
    """The part of the communication during which nothing else runs."""
    dma_wait: float
    """Waiting for prefetches from HBM."""
    exposed_by: Mapping[str, float]
    """Exposed seconds by kind of collective; " (sync)" is one without start and done, " (fused)"
    one within a fusion."""
    bytes_by: Mapping[str, float]
    """Bytes that each device sends, by kind of collective."""
    counts: Mapping[str, int]
    """Number of transfers, labelled as in `exposed_by`; and "dma"."""
    top: Mapping[str, float]
    """Seconds by operation, longest first; waits are entries "EXPOSED ..." and "DMA WAIT ..."."""
    assumed: Mapping[str, float]
    """Seconds that the compiler gave no cycles for, by opcode or custom-call target, and one
    iteration of each loop with an unknown trip count."""
    parts: Mapping[str, PartTime]
    """Time by part of the model, longest first; forward and backward pass together."""
    collectives: Sequence[CollectiveTime]
    """Collectives by kind, mesh axes and part, the most exposed first."""
    unattributed: Mapping[str, float]
    """Seconds by operation that belong to no part, longest first."""
    spans: Sequence[Span] = field(compare=False, repr=False)
    """The timeline, in the order in which the program starts things; see `trace`."""

    @property
    def matmul_flops(self) -> float:
        """FLOPs of all matmuls of one device, recomputed ones included."""
        return sum(part.matmul_flops for part in self.parts.values())

    @property
    def kernel_flops(self) -> float:
        """FLOPs of attention kernels and grouped matmuls of one device."""
        return sum(part.kernel_flops for part in self.parts.values())

    def table(self, rows: int = 12) -> str:
        """Return the prediction as text: parts of the total, collectives, longest operations."""
        lines = [_line("total", self.total)]
        for name in ("matmul", "other", "kernels", "exposed", "dma_wait"):
            seconds = getattr(self, name)
            share = seconds / self.total if self.total else 0.0
            lines.append(f"{_line('  ' + name, seconds)}  {share:>6.1%}")
        if self.parts.keys() - {UNATTRIBUTED}:
            lines.append("by part")
            lines += [_line(f"  {name}", part.total) for name, part in self.parts.items()]
        lines.append(_line("communication", self.communication))
        for kind, count in self.counts.items():
            exposed = self.exposed_by.get(kind)
            tail = "" if exposed is None else f"  {exposed * 1e3:.3f} ms exposed"
            lines.append(f"  {kind:<26} {count:>7} x{tail}")
        for kind, size in self.bytes_by.items():
            lines.append(f"  {kind:<26} {size / 2**30:>9.3f} GiB")
        lines.append(_line("not from the compiler", sum(self.assumed.values())))
        shown = {name: seconds for name, seconds in self.assumed.items() if seconds >= 1e-6}
        lines += [_line(f"  {name}", seconds) for name, seconds in shown.items()]
        lines.append("longest")
        for name, seconds in list(self.top.items())[:rows]:
            short = name if len(name) <= 78 else f"{name[:30]} .. {name[-44:]}"
            lines.append(f"{seconds * 1e3:>10.3f} ms  {short}")
        return "\n".join(lines)


def _line(name: str, seconds: float) -> str:
    return f"{name:<28} {seconds * 1e3:>9.3f} ms"
