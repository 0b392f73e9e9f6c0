"""The predicted time of a program, by its parts, and the ledger from which it is summed up."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Section = Literal[
    "compute", "communication", "exposed", "dma_wait", "bytes", "count", "top", "assumed"
]
Ledger = dict[tuple[Section, str], float]
"""Seconds, bytes or counts by section and label."""


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

    def table(self, rows: int = 12) -> str:
        """Return the prediction as text: parts of the total, collectives, longest operations."""
        lines = [_line("total", self.total)]
        for name in ("matmul", "other", "kernels", "exposed", "dma_wait"):
            seconds = getattr(self, name)
            share = seconds / self.total if self.total else 0.0
            lines.append(f"{_line('  ' + name, seconds)}  {share:>6.1%}")
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


def summarise(total: float, ledger: Ledger) -> Prediction:
    """Return the prediction that a ledger adds up to."""

    def section(name: Section) -> dict[str, float]:
        found = {key: value for (part, key), value in ledger.items() if part == name}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    compute = section("compute")
    top = {name: seconds for name, seconds in section("top").items() if seconds}
    assumed = {name: seconds for name, seconds in section("assumed").items() if seconds}
    return Prediction(
        total=total,
        matmul=compute.get("matmul", 0.0),
        other=compute.get("other", 0.0),
        kernels=compute.get("kernels", 0.0),
        communication=sum(section("communication").values()),
        exposed=sum(section("exposed").values()),
        dma_wait=sum(section("dma_wait").values()),
        exposed_by=MappingProxyType(section("exposed")),
        bytes_by=MappingProxyType(section("bytes")),
        counts=MappingProxyType({name: int(value) for name, value in section("count").items()}),
        top=MappingProxyType(top),
        assumed=MappingProxyType(assumed),
    )
