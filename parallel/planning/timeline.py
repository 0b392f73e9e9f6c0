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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.planning.clock import Clock, Frame
from parallel.planning.collective_cost import CollectiveCost, TransferCost
from parallel.planning.device_groups import BETWEEN_SLICES, MeshAxes
from parallel.planning.flops import kernel_flops, matmul_flops
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
from parallel.planning.ledger import Kind, Ledger, Transfer, Work, summarise
from parallel.planning.links import Coords
from parallel.planning.parts import PartFinder, PartTable
from parallel.planning.prediction import Prediction, Span
from parallel.sharding.devices import Chip

_DMA_STARTS = frozenset(
    {"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"}
)


def predict(
    text: str,
    chip: Chip,
    torus: Sequence[int] = (),
    places: Sequence[Coords] = (),
    *,
    parts: PartTable = (),
    axes: Mapping[str, int] | None = None,
) -> Prediction:
    """Predict the time of one run of a compiled program on one of its devices.

    Args:
        text: `compiled.as_text()` of a TPU program. With several slices each runs the same program.
        chip: The figures of the device; a TPU of `parallel.sharding.devices.CHIPS`.
        torus: The sides of the first slice, (2, 2, 2) for v5p:2x2x2; collectives that the compiler
            spreads over several sides get the links of all.
        places: `links.chip_coords(mesh.devices.flat)` of the first slice, so that permutes take
            the links between the chips; without, every permute is one between neighbours.
        parts: The parts of the model by scopes; without, all time is unattributed.
        axes: `mesh.shape` of the mesh that the program was compiled for, to name the axes of
            collectives; without, they have no name.

    Raises: ValueError for a chip without clock and links, for a text that is no schedule, for
        places that are not those of the program's devices in this torus, and for axes that are
        not those of its mesh.
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
    clock = Clock()
    simulator = _Simulator(
        module,
        chip,
        InstructionCost(module, chip),
        CollectiveCost(chip, tuple(torus), tuple(places), module.num_partitions),
        PartFinder(module, parts),
        MeshAxes(axes, module.num_partitions) if axes else None,
    )
    ledger = simulator.run(module.entry, clock)
    return summarise(clock.now, ledger, clock.spans)


@dataclass(frozen=True)
class _Simulator:
    """Runs a program instruction by instruction on a clock."""

    module: HloModule
    chip: Chip
    instructions: InstructionCost
    collectives: CollectiveCost
    parts: PartFinder
    axes: MeshAxes | None

    def run(self, computation: Computation, clock: Clock) -> Ledger:
        """Advance the clock by one run of this computation; return where the time went."""
        frame = Frame(computation, clock)
        for x in computation.instructions:
            self._run_instruction(x, frame)
        return frame.ledger

    def _run_instruction(self, x: Instruction, frame: Frame) -> None:
        if x.opcode == "while":
            self._run_loop(x, frame)
        elif x.opcode == "conditional":
            self._run_longest_branch(x, frame)
        elif x.opcode == "call":
            frame.ledger.merge(self.run(self._called(x, "to_apply"), frame.clock))
        elif x.cross_slice is not None or x.opcode == "recv-done":
            self._run_cross_slice(x, frame)
        elif (collective := self.module.collective_of(x, frame.computation)) is not None:
            self._run_collective(x, collective, frame)
        elif x.opcode in _DMA_STARTS or x.opcode == "async-start":
            # A copy moves its result, a slice the smaller of its arrays; four bytes are a flag.
            size = min((array.bytes for array in x.arrays if array.bytes > 4), default=0.0)
            cost = TransferCost(("dma",), size / self.chip.hbm_bandwidth, size)
            if x.is_in_host_memory:
                way = "to" if "update" in x.opcode else "from"
                cost = TransferCost((f"{way} host",), size / self.chip.host_bandwidth, size)
            entry = Transfer("dma", "dma", "", self.parts.scope(x, frame.computation))
            frame.in_flight[x.name] = frame.transfer(x, cost, entry)
        elif x.opcode.endswith("-done") or x.opcode == "async-update":
            self._finish(x, frame)
        else:
            self._compute(x, frame)

    def _run_collective(self, x: Instruction, collective: Collective, frame: Frame) -> None:
        """Run an instruction that is, starts, contains or ends a collective within a slice."""
        kind, role = collective.kind, self.module.fusion_role(x)
        channel = collective.instruction.find(r"channel_id=(\d+)") or collective.instruction.name
        if role == "done":
            if channel in frame.clock.fusions:
                frame.wait(x, frame.clock.fusions.pop(channel))
            self._compute(x, frame)
        elif role == "start":
            entry = self._entry(kind, kind, x, collective, frame)
            cost = self.collectives.transfer(collective)
            frame.clock.fusions[channel] = frame.transfer(x, cost, entry)
            self._compute(x, frame)
        elif role == "progress":
            self._compute(x, frame)
        elif x.opcode.endswith("-start"):
            entry = self._entry(kind, kind, x, collective, frame)
            cost = self.collectives.transfer(collective)
            frame.in_flight[x.name] = frame.transfer(x, cost, entry)
        else:
            is_fused = x.opcode not in COLLECTIVES
            label = f"{kind} (fused)" if is_fused else f"{kind} (sync)"
            entry = self._entry(label, kind, x, collective, frame)
            pending = frame.transfer(x, self.collectives.transfer(collective), entry)
            if is_fused:
                self._compute(x, frame)
            frame.wait(x, pending)

    def _entry(
        self, label: str, kind: str, x: Instruction, collective: Collective, frame: Frame
    ) -> Transfer:
        axes = ""
        if self.axes is not None:
            axes = self.axes.label(collective.instruction, self.module.num_partitions)
        scope = self.parts.scope(collective.instruction, collective.computation)
        if not scope.is_known:
            scope = self.parts.scope(x, frame.computation)
        return Transfer(label, kind, axes, scope)

    def _run_cross_slice(self, x: Instruction, frame: Frame) -> None:
        """Model a transfer between slices, from its `send` to the matching `recv-done`."""
        if x.opcode == "send" and x.cross_slice is not None:
            size = frame.computation.operand_bytes(x)
            cost = self.collectives.between_slices(x, x.cross_slice, size)
            label = f"{x.cross_slice.kind} {BETWEEN_SLICES}"
            scope = self.parts.scope(x, frame.computation)
            entry = Transfer(label, label, BETWEEN_SLICES, scope)
            frame.clock.cross_slice[x.cross_slice.name] = frame.transfer(x, cost, entry)
        elif x.opcode == "recv-done":
            sender = next((y.cross_slice for y in frame.computation.operands(x)), None)
            if sender is not None and sender.name in frame.clock.cross_slice:
                frame.wait(x, frame.clock.cross_slice.pop(sender.name))

    def _called(self, x: Instruction, attribute: str) -> Computation:
        return self.module.computations[x.calls(attribute) or ""]

    def _run_loop(self, x: Instruction, frame: Frame) -> None:
        """Run the body once and take that as the steady state of all iterations."""
        clock = frame.clock
        start, before = clock.now, dict(clock.busy)
        body = self.run(self._called(x, "body"), clock)
        elapsed = clock.now - start
        count = trip_count(self.module, x, frame.computation)
        if count is None:
            count = 1
            frame.ledger.add("assumed", "while without trip count", elapsed)
        clock.now = start + elapsed * count
        if elapsed and count > 1:
            part = self.parts.scope(x, frame.computation).part
            rest, name = f"{count - 1} more iterations", f"loop x{count} {x.op_name}"
            clock.spans.append(Span(rest, part, start + elapsed, clock.now, "iterations"))
            clock.spans.append(Span(name, part, start, clock.now, "loop"))
        for resource, end in clock.busy.items():
            if end != before.get(resource):
                clock.busy[resource] = end + elapsed * (count - 1)
        frame.ledger.merge(body, count)

    def _run_longest_branch(self, x: Instruction, frame: Frame) -> None:
        branches = [self.module.computations[name] for name in x.branches]
        ends = {}
        for branch in branches:
            trial = frame.clock.copy()
            self.run(branch, trial)
            ends[branch.name] = trial.now
        longest = max(branches, key=lambda branch: ends[branch.name])
        frame.ledger.merge(self.run(longest, frame.clock))

    def _finish(self, x: Instruction, frame: Frame) -> None:
        """Wait for the transfer that a done ends; one that started elsewhere costs nothing."""
        start = next((name for name in x.operands if name in frame.in_flight), None)
        if start is None:
            return
        if x.opcode == "async-update":
            frame.in_flight[x.name] = frame.in_flight[start]
        else:
            frame.wait(x, frame.in_flight[start])

    def _compute(self, x: Instruction, frame: Frame) -> None:
        computation = frame.computation
        seconds = self.instructions.seconds(x, computation)
        if self.instructions.is_assumed(x):
            frame.ledger.add("assumed", x.custom_call_target or x.opcode, seconds)
        is_kernel = x.opcode == "custom-call" and not x.is_matmul
        kind: Kind = "kernels" if is_kernel else "matmul" if x.is_matmul else "other"
        count = (
            kernel_flops(x, computation) if is_kernel else matmul_flops(x, computation, self.module)
        )
        frame.compute(x, seconds, Work(kind, self.parts.scope(x, computation)), count)
