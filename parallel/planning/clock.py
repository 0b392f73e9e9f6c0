"""Clock of a simulated program: the time, what is in flight, and the ledger of a computation."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from parallel.planning.collective_cost import Resource, TransferCost
from parallel.planning.hlo import Computation, Instruction
from parallel.planning.ledger import Ledger, Operation, Transfer, Work
from parallel.planning.prediction import Span

InFlight = tuple[float, Transfer]
"""End and entry of a transfer that is not waited for yet."""


@dataclass
class Clock:
    """The time now, when each resource is free, and when pending collectives will be done."""

    now: float = 0.0
    busy: dict[Resource, float] = field(default_factory=dict)
    fusions: dict[str, InFlight] = field(default_factory=dict)
    """Asynchronous collective fusions by channel. They may span computations."""
    cross_slice: dict[str, InFlight] = field(default_factory=dict)
    """Collectives between slices by name."""
    spans: list[Span] = field(default_factory=list)

    def occupy(self, resources: Iterable[Resource], seconds: float) -> float:
        """Queue a transfer until all resources are free; return when it will be done."""
        busy = {name: self.busy.get(name, 0.0) for name in resources}
        end = max([self.now, *busy.values()]) + seconds
        self.busy.update(dict.fromkeys(busy, end))
        return end

    def advance(self, seconds: float, name: str, part: str, **details: float | str) -> None:
        """Let time pass on the stream, and record for what."""
        start = self.now
        self.now += seconds
        if seconds:
            self.spans.append(Span(name, part, start, self.now, details=details))

    def copy(self) -> "Clock":
        """Return a clock that can advance on its own."""
        state = (dict(self.busy), dict(self.fusions), dict(self.cross_slice))
        return Clock(self.now, *state, list(self.spans))


@dataclass(frozen=True)
class Frame:
    """A computation that is being run."""

    computation: Computation
    clock: Clock
    ledger: Ledger = field(default_factory=Ledger)
    in_flight: dict[str, InFlight] = field(default_factory=dict)
    """Pending transfers by the name of their start."""

    def compute(self, x: Instruction, seconds: float, work: Work, flops: float) -> None:
        """Run an instruction on the stream."""
        label = f"{x.opcode} {x.op_name}"
        self.ledger.add("compute", work, seconds)
        self.ledger.add("flops", work, flops)
        self.ledger.add("top", Operation(label, work.scope.part), seconds)
        self.clock.advance(
            seconds,
            label,
            work.scope.part,
            kind=work.kind,
            instruction=x.name,
            cycles=x.cycles or 0,
            bytes=x.bytes,
            flops=flops,
        )

    def transfer(self, x: Instruction, cost: TransferCost, entry: Transfer) -> InFlight:
        """Queue a transfer; return when it will be done."""
        self.ledger.add("count", entry, 1)
        if entry.kind != "dma":
            self.ledger.add("communication", entry, cost.seconds)
            self.ledger.add("bytes", entry, cost.bytes)
        end = self.clock.occupy(cost.resources, cost.seconds)
        if cost.seconds:
            span = Span(
                f"{entry.label} {x.op_name}",
                entry.scope.part,
                end - cost.seconds,
                end,
                "transfer",
                frozenset(cost.resources),
                details={"instruction": x.name, "axes": entry.axes, "bytes": cost.bytes},
            )
            self.clock.spans.append(span)
        return end, entry

    def wait(self, x: Instruction, pending: InFlight) -> None:
        """Stop the stream until a transfer is done."""
        end, entry = pending
        seconds = max(0.0, end - self.clock.now)
        is_dma = entry.kind == "dma"
        label = f"{'DMA WAIT' if is_dma else 'EXPOSED'} {x.opcode} {x.op_name}"
        self.ledger.add("dma_wait" if is_dma else "exposed", entry, seconds)
        self.ledger.add("top", Operation(label, entry.scope.part), seconds)
        self.clock.advance(seconds, label, entry.scope.part, kind="wait", instruction=x.name)
