"""The ledger of a simulated program: seconds, bytes, counts and FLOPs by entry, and their sums."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from parallel.planning.parts import UNATTRIBUTED, Scope
from parallel.planning.prediction import CollectiveTime, PartTime, Prediction, Span

Kind = Literal["matmul", "other", "kernels"]


@dataclass(frozen=True)
class Work:
    """Entry for the instructions of one kind in one scope: "compute" and "flops"."""

    kind: Kind
    scope: Scope


@dataclass(frozen=True)
class Transfer:
    """Entry for transfers of one sort in one scope."""

    label: str
    """The kind, with " (sync)", " (fused)" or " between slices" where it applies; or "dma"."""
    kind: str
    axes: str
    """As `MeshAxes.label` names them."""
    scope: Scope


@dataclass(frozen=True)
class Operation:
    """Entry for the time of one operation."""

    label: str
    part: str


Section = Literal[
    "compute", "flops", "communication", "exposed", "dma_wait", "bytes", "count", "top", "assumed"
]


class Ledger:
    """Sums by section and entry.

    compute and flops have `Work` entries; communication (seconds on the links), exposed, dma_wait,
    bytes and count `Transfer`; top `Operation`; assumed has labels.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[Section, Any], float] = defaultdict(float)

    def add(self, section: Section, entry: Any, value: float) -> None:
        """Add a value to an entry."""
        self._sums[section, entry] += value

    def merge(self, other: "Ledger", times: int = 1) -> None:
        """Add the ledger of a called computation, run this many times."""
        for key, value in other._sums.items():
            self._sums[key] += value * times

    def entries(self, section: Section) -> list[tuple[Any, float]]:
        """Return the entries of a section and their values."""
        return [(entry, value) for (name, entry), value in self._sums.items() if name == section]

    def by(self, section: Section, label: Callable[[Any], str]) -> Mapping[str, float]:
        """Return the sums of a section by a label of its entries, the largest first."""
        found: dict[str, float] = defaultdict(float)
        for entry, value in self.entries(section):
            found[label(entry)] += value
        return MappingProxyType(dict(sorted(found.items(), key=lambda item: -item[1])))


def summarise(total: float, ledger: Ledger, spans: Sequence[Span]) -> Prediction:
    """Return the prediction that a ledger adds up to."""

    def label(entry: Transfer | Operation) -> str:
        return entry.label

    compute = ledger.by("compute", lambda work: work.kind)
    exposed, dma_wait = ledger.by("exposed", label), ledger.by("dma_wait", label)
    return Prediction(
        total=total,
        matmul=compute.get("matmul", 0.0),
        other=compute.get("other", 0.0),
        kernels=compute.get("kernels", 0.0),
        communication=sum(ledger.by("communication", label).values()),
        exposed=sum(exposed.values()),
        dma_wait=sum(dma_wait.values()),
        exposed_by=exposed,
        bytes_by=ledger.by("bytes", lambda transfer: transfer.kind),
        counts={name: int(count) for name, count in ledger.by("count", label).items()},
        top=_positive(ledger.by("top", label)),
        assumed=_positive(ledger.by("assumed", str)),
        parts=_parts(ledger),
        collectives=_collectives(ledger),
        unattributed=_positive(
            ledger.by("top", lambda x: x.label if x.part == UNATTRIBUTED else "")
        ),
        spans=tuple(spans),
    )


def _positive(seconds: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType({name: value for name, value in seconds.items() if name and value})


def _parts(ledger: Ledger) -> Mapping[str, PartTime]:
    found: dict[str, PartTime] = defaultdict(PartTime)
    for work, seconds in ledger.entries("compute"):
        _increase(found[work.scope.part], work.kind, seconds)
        if work.scope.is_recomputed:
            found[work.scope.part].recomputed += seconds
    for work, flops in ledger.entries("flops"):
        is_kernel = work.kind == "kernels"
        _increase(found[work.scope.part], "kernel_flops" if is_kernel else "matmul_flops", flops)
    waits: tuple[Section, ...] = ("exposed", "dma_wait")
    for section in waits:
        for transfer, seconds in ledger.entries(section):
            _increase(found[transfer.scope.part], section, seconds)
            if transfer.scope.is_recomputed:
                found[transfer.scope.part].recomputed += seconds
    used = {part: time for part, time in found.items() if time != PartTime()}
    return MappingProxyType(dict(sorted(used.items(), key=lambda item: -item[1].total)))


def _collectives(ledger: Ledger) -> tuple[CollectiveTime, ...]:
    found: dict[tuple[str, str, str], CollectiveTime] = {}
    columns: dict[Section, str] = {
        "count": "count",
        "bytes": "bytes",
        "communication": "seconds",
        "exposed": "exposed",
    }
    for section, name in columns.items():
        for transfer, value in ledger.entries(section):
            if transfer.kind != "dma":
                key = transfer.kind, transfer.axes, transfer.scope.part
                _increase(found.setdefault(key, CollectiveTime(*key)), name, value)
    return tuple(sorted(found.values(), key=lambda x: (-x.exposed, -x.seconds)))


def _increase(target: PartTime | CollectiveTime, name: str, value: float) -> None:
    setattr(target, name, getattr(target, name) + value)
