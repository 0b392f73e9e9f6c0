"""Predict the time of a compiled TPU program from its schedule alone; no TPU is needed.

One stream runs the instructions in order, each for the cycles that the compiler estimated.
Transfers between a start and a done run beside it. They occupy resources that serve one transfer
after another: the links of each permute, those of the other collectives, and the DMA engine. A done
waits for its transfer, and this wait is the exposed communication.

The prediction is an estimate to compare schedules with, not a measurement. Where the compiler gives
no cycles, memory traffic over HBM bandwidth stands in; `Prediction.assumed` says for how much.
Traffic between slices takes each chip's share of its host's bandwidth and ignores latency, the work
of the host and other traffic, so it is a lower bound. Only chips with a torus are supported.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from parallel.planning.collective_cost import CollectiveCost, Resource, TransferCost
from parallel.planning.hlo import (
    COLLECTIVES,
    Collective,
    Computation,
    HloModule,
    Instruction,
    trip_count,
)
from parallel.planning.hlo_parser import parse_hlo
from parallel.planning.instruction_cost import InstructionCost
from parallel.planning.links import Coords
from parallel.planning.prediction import Ledger, Prediction, Section, summarise
from parallel.sharding.devices import Chip

_DMA_STARTS = frozenset(
    {"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"}
)


def predict(
    text: str, chip: Chip, torus: Sequence[int] = (), places: Sequence[Coords] = ()
) -> Prediction:
    """Predict the time of one run of a compiled program on one of its devices.

    Args:
        text: `compiled.as_text()` of a TPU program. With several slices each runs the same program.
        chip: The figures of the device; a TPU of `parallel.sharding.devices.CHIPS`.
        torus: The sides of the first slice, (2, 2, 2) for v5p:2x2x2; collectives that the compiler
            spreads over several sides get the links of all.
        places: `links.chip_coords(mesh.devices.flat)` of the first slice, so that permutes take
            the links between the chips; without, every permute is one between neighbours.

    Raises: ValueError for a chip without clock and links, for a text that is no schedule, and for
        places that are not those of the program's devices in this torus.
    """
    if not (chip.clock_hz and chip.ici_bandwidth and chip.hbm_bandwidth):
        raise ValueError(
            f"chip {chip} has no clock or no links, which the prediction needs; use a TPU of "
            "parallel.sharding.devices.CHIPS"
        )
    module = parse_hlo(text)
    if places and len(places) != module.num_partitions:
        raise ValueError(
            f"{len(places)} places for a program of {module.num_partitions} partitions; pass the "
            "places of mesh.devices.flat of the mesh that it was compiled for"
        )
    clock = _Clock()
    collectives = CollectiveCost(chip, tuple(torus), tuple(places), module.num_partitions)
    simulator = _Simulator(module, chip, InstructionCost(module, chip), collectives)
    ledger = simulator.run(module.entry, clock)
    return summarise(clock.now, ledger)


@dataclass
class _Clock:
    """The time now, when each resource is free, and when pending collectives will be done."""

    now: float = 0.0
    busy: dict[Resource, float] = field(default_factory=dict)
    fusions: dict[str, float] = field(default_factory=dict)
    """Asynchronous collective fusions: channel -> end. They may span computations."""
    cross_slice: dict[str, float] = field(default_factory=dict)
    """Collectives between slices: name -> end."""

    def occupy(self, resources: Iterable[Resource], seconds: float) -> float:
        """Queue a transfer until all resources are free; return when it will be done."""
        busy = {name: self.busy.get(name, 0.0) for name in resources}
        end = max([self.now, *busy.values()]) + seconds
        self.busy.update(dict.fromkeys(busy, end))
        return end

    def copy(self) -> "_Clock":
        return _Clock(self.now, dict(self.busy), dict(self.fusions), dict(self.cross_slice))


@dataclass(frozen=True)
class _Frame:
    """A computation that is being run."""

    computation: Computation
    clock: _Clock
    ledger: Ledger = field(default_factory=lambda: defaultdict(float))
    in_flight: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Pending transfers: name of the start -> end, and label ("dma" or as in exposed_by)."""

    def merge(self, ledger: Ledger, times: int = 1) -> None:
        """Add the ledger of a called computation."""
        for key, value in ledger.items():
            self.ledger[key] += value * times

    def compute(self, x: Instruction, seconds: float) -> None:
        """Run an instruction on the stream."""
        is_kernel = x.opcode == "custom-call" and not x.is_matmul
        part = "kernels" if is_kernel else "matmul" if x.is_matmul else "other"
        self.clock.now += seconds
        self.ledger["compute", part] += seconds
        self.ledger["top", f"{x.opcode} {x.op_name}"] += seconds

    def transfer(self, cost: TransferCost, label: str, kind: str) -> float:
        """Queue a collective; return when it will be done."""
        self.ledger["communication", label] += cost.seconds
        self.ledger["bytes", kind] += cost.bytes
        self.ledger["count", label] += 1
        return self.clock.occupy(cost.resources, cost.seconds)

    def wait(self, x: Instruction, end: float, label: str) -> None:
        """Stop the stream until a transfer is done."""
        seconds = max(0.0, end - self.clock.now)
        self.clock.now += seconds
        section: Section = "dma_wait" if label == "dma" else "exposed"
        prefix = "DMA WAIT" if label == "dma" else "EXPOSED"
        self.ledger[section, label] += seconds
        self.ledger["top", f"{prefix} {x.opcode} {x.op_name}"] += seconds


@dataclass(frozen=True)
class _Simulator:
    """Runs a program instruction by instruction on a clock."""

    module: HloModule
    chip: Chip
    instructions: InstructionCost
    collectives: CollectiveCost

    def run(self, computation: Computation, clock: _Clock) -> Ledger:
        """Advance the clock by one run of this computation; return where the time went."""
        frame = _Frame(computation, clock)
        for x in computation.instructions:
            self._run_instruction(x, frame)
        return frame.ledger

    def _run_instruction(self, x: Instruction, frame: _Frame) -> None:
        if x.opcode == "while":
            self._run_loop(x, frame)
        elif x.opcode == "conditional":
            self._run_longest_branch(x, frame)
        elif x.opcode == "call":
            frame.merge(self.run(self._called(x, "to_apply"), frame.clock))
        elif x.cross_slice is not None or x.opcode == "recv-done":
            self._run_cross_slice(x, frame)
        elif (collective := self.module.collective_of(x, frame.computation)) is not None:
            self._run_collective(x, collective, frame)
        elif x.opcode in _DMA_STARTS or x.opcode == "async-start":
            # A copy moves its result, a slice the smaller of its arrays; four bytes are a flag.
            size = min((array.bytes for array in x.arrays if array.bytes > 4), default=0.0)
            end = frame.clock.occupy(["dma"], size / self.chip.hbm_bandwidth)
            frame.in_flight[x.name] = end, "dma"
            frame.ledger["count", "dma"] += 1
        elif x.opcode.endswith("-done") or x.opcode == "async-update":
            self._finish(x, frame)
        else:
            self._compute(x, frame)

    def _run_collective(self, x: Instruction, collective: Collective, frame: _Frame) -> None:
        """Run an instruction that is, starts, contains or ends a collective within a slice."""
        kind, role = collective.kind, self.module.fusion_role(x)
        channel = collective.instruction.find(r"channel_id=(\d+)") or collective.instruction.name
        if role == "done":
            frame.wait(x, frame.clock.fusions.pop(channel, frame.clock.now), kind)
            self._compute(x, frame)
        elif role == "start":
            cost = self.collectives.transfer(collective)
            frame.clock.fusions[channel] = frame.transfer(cost, kind, kind)
            self._compute(x, frame)
        elif role == "progress":
            self._compute(x, frame)
        elif x.opcode.endswith("-start"):
            cost = self.collectives.transfer(collective)
            frame.in_flight[x.name] = frame.transfer(cost, kind, kind), kind
        else:
            is_fused = x.opcode not in COLLECTIVES
            label = f"{kind} (fused)" if is_fused else f"{kind} (sync)"
            end = frame.transfer(self.collectives.transfer(collective), label, kind)
            if is_fused:
                self._compute(x, frame)
            frame.wait(x, end, label)

    def _run_cross_slice(self, x: Instruction, frame: _Frame) -> None:
        """Model a transfer between slices, from its `send` to the matching `recv-done`."""
        if x.opcode == "send" and x.cross_slice is not None:
            size = frame.computation.operand_bytes(x)
            cost = self.collectives.between_slices(x, x.cross_slice, size)
            label = f"{x.cross_slice.kind} between slices"
            frame.clock.cross_slice[x.cross_slice.name] = frame.transfer(cost, label, label)
        elif x.opcode == "recv-done":
            sender = next((y.cross_slice for y in frame.computation.operands(x)), None)
            if sender is not None:
                end = frame.clock.cross_slice.pop(sender.name, frame.clock.now)
                frame.wait(x, end, f"{sender.kind} between slices")

    def _called(self, x: Instruction, attribute: str) -> Computation:
        return self.module.computations[x.calls(attribute) or ""]

    def _run_loop(self, x: Instruction, frame: _Frame) -> None:
        """Run the body once and take that as the steady state of all iterations."""
        clock = frame.clock
        start, before = clock.now, dict(clock.busy)
        body = self.run(self._called(x, "body"), clock)
        elapsed = clock.now - start
        count = trip_count(self.module, x, frame.computation)
        if count is None:
            count = 1
            frame.ledger["assumed", "while without trip count"] += elapsed
        clock.now = start + elapsed * count
        for resource, end in clock.busy.items():
            if end != before.get(resource):
                clock.busy[resource] = end + elapsed * (count - 1)
        frame.merge(body, count)

    def _run_longest_branch(self, x: Instruction, frame: _Frame) -> None:
        branches = [self.module.computations[name] for name in x.branches]
        ends = {}
        for branch in branches:
            trial = frame.clock.copy()
            self.run(branch, trial)
            ends[branch.name] = trial.now
        longest = max(branches, key=lambda branch: ends[branch.name])
        frame.merge(self.run(longest, frame.clock))

    def _finish(self, x: Instruction, frame: _Frame) -> None:
        """Wait for the transfer that a done ends; one that started elsewhere costs nothing."""
        start = next((name for name in x.operands if name in frame.in_flight), None)
        if start is None:
            return
        if x.opcode == "async-update":
            frame.in_flight[x.name] = frame.in_flight[start]
        else:
            frame.wait(x, *frame.in_flight[start])

    def _compute(self, x: Instruction, frame: _Frame) -> None:
        seconds = self.instructions.seconds(x, frame.computation)
        if self.instructions.is_assumed(x):
            frame.ledger["assumed", x.custom_call_target or x.opcode] += seconds
        frame.compute(x, seconds)
