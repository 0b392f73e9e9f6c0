"""Predicts the time of a compiled TPU program from its schedule alone; no TPU is needed.

The model: one stream runs the instructions in order, each for the cycles that the compiler
estimated. Transfers between a start and a done run beside it, on resources that serve one after
another: the links of each permute, those of the other collectives, and the DMA engine. A done waits
for its transfer, and that wait is what is exposed. Where the compiler gives no cycles, memory
traffic over HBM bandwidth stands in, and `Prediction.assumed` says for how much. It is an estimate
to compare schedules with, not a measurement. It refuses chips without a torus. What crosses the
network between slices takes each chip's share of its host's bandwidth; latency, the host's part in
it and other traffic are left out, so that it is a bound from below.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from parallel.planning.hlo import (
    COLLECTIVES,
    Collective,
    Computation,
    Crossing,
    Instruction,
    Program,
    read_program,
)
from parallel.planning.links import Coords, Link, link_loads
from parallel.sharding.chips import Chip

_HOP_LATENCY = 1e-6  # seconds per hop
_MATMUL_EFFICIENCY = 0.88  # of peak: the compiler's own estimate of a bfloat16 matmul of side 8192
_ATTENTION_EFFICIENCY = 0.5  # of peak; Pallas attention carries no estimate of its own

# What takes no time: views, constants, bookkeeping.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id iota "
    "opt-barrier add-dependency".split()
)
# Custom calls that only name memory: `lax.empty`, and XLA's view of slices fetched side by side
# (memory_space_assignment: CreateBitcastConcat).
_FREE_TARGETS = frozenset({"AllocateBuffer", "ConcatBitcast"})
_DMA_STARTS = frozenset(
    {"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"}
)

_Section = Literal[
    "compute", "communication", "exposed", "dma_wait", "bytes", "count", "top", "assumed"
]
_Ledger = dict[tuple[_Section, str], float]
_Resource = str | Link


@dataclass(frozen=True)
class Prediction:
    """Where the time of one run of a program goes; all times in seconds.

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
    """The part of it during which nothing else runs."""
    dma_wait: float
    """Waiting for prefetches from HBM."""
    exposed_by: Mapping[str, float]
    """By kind of collective; " (sync)": no start and done, " (fused)": within one fusion."""
    bytes_by: Mapping[str, float]
    """Bytes that each device moves, by kind of collective."""
    counts: Mapping[str, int]
    """How often each kind of transfer runs, named as in `exposed_by`; and "dma"."""
    top: Mapping[str, float]
    """Operations, longest first; waits stand apart as "EXPOSED ..." and "DMA WAIT ..."."""
    assumed: Mapping[str, float]
    """Compute for which the compiler gave no cycles, by opcode or target, and the one iteration
    of each loop whose trip count the text does not tell."""

    def table(self, rows: int = 12) -> str:
        """The prediction as text: the parts of the total, the collectives, the longest ops."""
        lines = [_row("total", self.total)]
        for name in ("matmul", "other", "kernels", "exposed", "dma_wait"):
            seconds = getattr(self, name)
            share = seconds / self.total if self.total else 0.0
            lines.append(f"{_row('  ' + name, seconds)}  {share:>6.1%}")
        lines.append(_row("communication", self.communication))
        for kind, count in self.counts.items():
            exposed = self.exposed_by.get(kind)
            tail = "" if exposed is None else f"  {exposed * 1e3:.3f} ms exposed"
            lines.append(f"  {kind:<26} {count:>7} x{tail}")
        for kind, size in self.bytes_by.items():
            lines.append(f"  {kind:<26} {size / 2**30:>9.3f} GiB")
        lines.append(_row("not from the compiler", sum(self.assumed.values())))
        shown = {name: seconds for name, seconds in self.assumed.items() if seconds >= 1e-6}
        lines += [_row(f"  {name}", seconds) for name, seconds in shown.items()]
        lines.append("longest")
        for name, seconds in list(self.top.items())[:rows]:
            short = name if len(name) <= 78 else f"{name[:30]} .. {name[-44:]}"
            lines.append(f"{seconds * 1e3:>10.3f} ms  {short}")
        return "\n".join(lines)


def _row(name: str, seconds: float) -> str:
    return f"{name:<28} {seconds * 1e3:>9.3f} ms"


def predict(
    text: str, chip: Chip, torus: Sequence[int] = (), places: Sequence[Coords] = ()
) -> Prediction:
    """Predicts the time of one run of a compiled program on one of its devices.

    text: `compiled.as_text()` of a TPU program. torus: the sides of the slice, (2, 2, 2) for
    v5p:2x2x2; collectives that the compiler spreads over several sides get the links of all.
    places: `links.chip_coords(mesh.devices.flat)`, so that permutes take the links between; if
    left out, every permute is one to neighbours. Of several slices each runs the same program:
    torus and places are those of the first.
    Raises: ValueError for a chip without clock and links, for a text that is no schedule, and for
    places that are not those of the program's devices in this torus.
    """
    if not (chip.clock_hz and chip.ici_bandwidth and chip.hbm_bandwidth):
        raise ValueError(
            f"chip {chip} has no clock or no links: a schedule is priced in cycles of a TPU; "
            "use a TPU of parallel.sharding.chips.CHIPS"
        )
    program = read_program(text)
    if places and len(places) != program.num_partitions:
        raise ValueError(
            f"{len(places)} places for a program of {program.num_partitions} partitions; "
            "pass those of mesh.devices.flat of the mesh that it was compiled for"
        )
    clock = _Clock()
    ledger = _Walk(program, chip, tuple(torus), tuple(places)).run(program.entry, clock)
    return _summarise(clock.now, ledger)


def _summarise(total: float, ledger: _Ledger) -> Prediction:
    def section(name: _Section) -> dict[str, float]:
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


@dataclass
class _Clock:
    """The time now, until when each resource is busy, and when open collectives will be done."""

    now: float = 0.0
    busy: dict[_Resource, float] = field(default_factory=dict)
    fusions: dict[str, float] = field(default_factory=dict)
    """Asynchronous collective fusions: channel -> end. They may span computations."""
    crossings: dict[str, float] = field(default_factory=dict)
    """Collectives between slices: name -> end."""

    def occupy(self, resources: Iterable[_Resource], seconds: float) -> float:
        """Queues a transfer that begins when all of these are free; when it will be done."""
        busy = {name: self.busy.get(name, 0.0) for name in resources}
        end = max([self.now, *busy.values()]) + seconds
        self.busy.update(dict.fromkeys(busy, end))
        return end

    def copy(self) -> "_Clock":
        return _Clock(self.now, dict(self.busy), dict(self.fusions), dict(self.crossings))


@dataclass(frozen=True)
class _Frame:
    """A computation that is being run."""

    computation: Computation
    clock: _Clock
    ledger: _Ledger = field(default_factory=lambda: defaultdict(float))
    flying: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Transfers under way: name of the start -> end, and label ("dma" or as in exposed_by)."""

    def merge(self, ledger: _Ledger, times: int = 1) -> None:
        """Adds what a called computation did."""
        for key, value in ledger.items():
            self.ledger[key] += value * times

    def compute(self, x: Instruction, seconds: float) -> None:
        """Runs an instruction on the stream."""
        is_kernel = x.opcode == "custom-call" and not x.is_matmul
        part = "kernels" if is_kernel else "matmul" if x.is_matmul else "other"
        self.clock.now += seconds
        self.ledger["compute", part] += seconds
        self.ledger["top", f"{x.opcode} {x.op_name}"] += seconds

    def wait(self, x: Instruction, end: float, label: str) -> None:
        """Stops the stream until a transfer is done."""
        seconds = max(0.0, end - self.clock.now)
        self.clock.now += seconds
        section: _Section = "dma_wait" if label == "dma" else "exposed"
        prefix = "DMA WAIT" if label == "dma" else "EXPOSED"
        self.ledger[section, label] += seconds
        self.ledger["top", f"{prefix} {x.opcode} {x.op_name}"] += seconds


class _Walk:
    """Runs a program instruction by instruction on a clock."""

    def __init__(
        self, program: Program, chip: Chip, torus: tuple[int, ...], places: tuple[Coords, ...]
    ) -> None:
        self.program, self.chip, self.torus, self.places = program, chip, torus, places

    def run(self, computation: Computation, clock: _Clock) -> _Ledger:
        """Advances the clock by one run of this computation; where the time went."""
        frame = _Frame(computation, clock)
        for x in computation.instructions:
            self._step(x, frame)
        return frame.ledger

    def _step(self, x: Instruction, frame: _Frame) -> None:
        collective = self.program.collective_of(x, frame.computation)
        role = self.program.fusion_role(x)
        if x.opcode == "while":
            self._loop(x, frame)
        elif x.opcode == "conditional":
            self._branch(x, frame)
        elif x.opcode == "call":
            frame.merge(self.run(self._called(x, "to_apply"), frame.clock))
        elif x.crossing is not None:
            if x.opcode == "send":
                frame.clock.crossings[x.crossing.name] = self._cross(x, x.crossing, frame)
        elif x.opcode == "recv-done":
            sender = next((y.crossing for y in frame.computation.operands(x)), None)
            if sender is not None:
                end = frame.clock.crossings.pop(sender.name, frame.clock.now)
                frame.wait(x, end, f"{sender.kind} between slices")
        elif x.opcode in _DMA_STARTS or (x.opcode == "async-start" and collective is None):
            # A copy moves its result, a slice the smaller of its arrays; four bytes are a flag.
            size = min((array.bytes for array in x.arrays if array.bytes > 4), default=0.0)
            end = frame.clock.occupy(["dma"], size / self.chip.hbm_bandwidth)
            frame.flying[x.name] = end, "dma"
            frame.ledger["count", "dma"] += 1
        elif collective is not None and role == "done":
            end = frame.clock.fusions.pop(_channel(collective.instruction), frame.clock.now)
            frame.wait(x, end, collective.kind)
            frame.compute(x, self._seconds(x, frame))
        elif collective is not None and role == "start":
            end = self._transfer(collective, collective.kind, frame)
            frame.clock.fusions[_channel(collective.instruction)] = end
            frame.compute(x, self._seconds(x, frame))
        elif collective is not None and x.opcode.endswith("-start"):
            end = self._transfer(collective, collective.kind, frame)
            frame.flying[x.name] = end, collective.kind
        elif x.opcode.endswith("-done") or x.opcode == "async-update":
            self._finish(x, frame)
        elif collective is not None and x.opcode in COLLECTIVES:
            label = f"{collective.kind} (sync)"
            frame.wait(x, self._transfer(collective, label, frame), label)
        elif collective is not None and role is None:
            label = f"{collective.kind} (fused)"
            end = self._transfer(collective, label, frame)
            frame.compute(x, self._seconds(x, frame))
            frame.wait(x, end, label)
        else:
            frame.compute(x, self._seconds(x, frame))

    def _called(self, x: Instruction, attribute: str) -> Computation:
        return self.program.computations[x.calls(attribute) or ""]

    def _loop(self, x: Instruction, frame: _Frame) -> None:
        """Runs the body once and takes that as the steady state."""
        clock = frame.clock
        start, before = clock.now, dict(clock.busy)
        body = self.run(self._called(x, "body"), clock)
        elapsed = clock.now - start
        count = self.program.trip_count(x, frame.computation)
        if count is None:
            count = 1
            frame.ledger["assumed", "while without trip count"] += elapsed
        clock.now = start + elapsed * count
        for resource, end in clock.busy.items():
            if end != before.get(resource):
                clock.busy[resource] = end + elapsed * (count - 1)
        frame.merge(body, count)

    def _branch(self, x: Instruction, frame: _Frame) -> None:
        """Takes the longest branch."""
        branches = [self.program.computations[name] for name in x.branches]
        ends = {}
        for branch in branches:
            trial = frame.clock.copy()
            self.run(branch, trial)
            ends[branch.name] = trial.now
        longest = max(branches, key=lambda branch: ends[branch.name])
        frame.merge(self.run(longest, frame.clock))

    def _finish(self, x: Instruction, frame: _Frame) -> None:
        """Waits for what this done belongs to; a done without a start here costs nothing."""
        start = next((name for name in x.operands if name in frame.flying), None)
        if start is None:
            return
        if x.opcode == "async-update":
            frame.flying[x.name] = frame.flying[start]
        else:
            frame.wait(x, *frame.flying[start])

    # What things cost.

    def _transfer(self, collective: Collective, label: str, frame: _Frame) -> float:
        """Queues a collective on its links; when it will be done."""
        price = self._permute if collective.kind == "collective-permute" else self._ring
        resources, seconds, size = price(collective)
        frame.ledger["communication", label] += seconds
        frame.ledger["bytes", collective.kind] += size
        frame.ledger["count", label] += 1
        return frame.clock.occupy(resources, seconds)

    def _permute(self, collective: Collective) -> tuple[Iterable[_Resource], float, float]:
        """Links, seconds and bytes sent of a permute.

        It holds every link on its routes (`link_loads`) until all have arrived, as late as the link
        that most of them share lets them. Links work in both directions at once. Without places it
        is one hop to neighbours: permutes with the same pairs share their links, others have their
        own. (By the ids alone a way around a ring is not known: on a torus as many steps go up as
        down.)
        """
        x = collective.instruction
        moves = [(a, b) for a, b in x.moves if a != b]
        if x.moves and not moves:
            return (), 0.0, 0.0
        size = collective.computation.operand_bytes(x) or x.arrays[0].bytes
        source, target = min(moves) if moves else (0, 0)
        links: Iterable[_Resource] = (f"link {source} to {target}",)
        load, distance = 1.0, 1
        if self.places:
            routes = [(self.places[a], self.places[b]) for a, b in moves]
            loads, farthest = link_loads(routes, self.torus, self.chip.wrap)
            if loads:  # else between the cores of chips: no faster, but on no link
                links, load, distance = loads, max(1.0, *loads.values()), farthest
        seconds = load * size / self.chip.ici_bandwidth + distance * _HOP_LATENCY
        return links, seconds, size

    def _ring(self, collective: Collective) -> tuple[Iterable[_Resource], float, float]:
        """Resource, seconds and bytes of a collective over rings in both directions."""
        x = collective.instruction
        n = x.group_size(self.program.num_partitions)
        if n == 1:
            return (), 0.0, 0.0
        size = collective.computation.operand_bytes(x)
        if collective.kind == "all-gather":
            size = max(size, x.bytes - (size if x.opcode.endswith("-start") else 0))
        moved = {
            "all-gather": size * (n - 1) / n,
            "reduce-scatter": size * (n - 1) / n,
            "all-reduce": 2 * size * (n - 1) / n,
            # A quarter of an all-gather of the global array (scaling book).
            "all-to-all": size * n / 4,
            "ragged-all-to-all": size * n / 4,
        }.get(collective.kind, size)
        both_ways = 2 * self.chip.ici_bandwidth * self._rings(x)
        return ("rings",), moved / both_ways + _HOP_LATENCY * (n - 1), moved

    def _cross(self, x: Instruction, crossing: Crossing, frame: _Frame) -> float:
        """Queues a collective between slices on the chip's share of its host; when it is done."""
        if crossing.kind != "all-reduce" or not self.chip.dcn_bandwidth:
            raise ValueError(
                f"{x.name}: no price for {crossing.kind} between slices at "
                f"{self.chip.dcn_bandwidth} bytes/s; let sums over mesh.dp alone cross, on a chip "
                "with Chip.dcn_bandwidth"
            )
        n, label = crossing.num_slices, f"{crossing.kind} between slices"
        moved = 2 * frame.computation.operand_bytes(x) * (n - 1) / n
        seconds = moved / self.chip.dcn_bandwidth
        frame.ledger["communication", label] += seconds
        frame.ledger["bytes", label] += moved
        frame.ledger["count", label] += 1
        return frame.clock.occupy(["dcn"], seconds)

    def _rings(self, x: Instruction) -> float:
        """How many rings the collective uses at once: one per side of the torus that it spans.

        libtpu names the sides (dim_sizes) or how many (the emitter's 1D, 2D, 3D); a side of two
        chips has one link between them, so it is half a ring. Longer sides count as rings whether
        their ends are linked or not, unlike on the routes of permutes.
        """
        listed = x.find(r"dim_sizes:([\d,]+)")
        spans_sides = int(x.find(r'"emitter":"(\d)D') or 1) > 1
        sides: Sequence[int] = self.torus if spans_sides else ()
        if listed:
            sides = [int(side) for side in listed.strip(",").split(",")]
        return max(1.0, sum(0.5 if side == 2 else 1.0 for side in sides if side > 1))

    def _seconds(self, x: Instruction, frame: _Frame) -> float:
        """How long an instruction keeps the stream busy."""
        if x.cycles is not None:
            seconds = x.cycles / self.chip.clock_hz
            if x.opcode == "broadcast":
                # libtpu's figure for a plain fill is far above the time of writing it.
                seconds = min(seconds, x.bytes / self.chip.hbm_bandwidth)
            return seconds
        if x.opcode in _FREE or x.target in _FREE_TARGETS:
            return 0.0
        if self.program.fusion_role(x) in ("start", "done"):
            return 0.0  # the links write its result in place; it only begins or waits
        if x.opcode == "custom-call":
            seconds = self._kernel_seconds(x, frame.computation)
        else:
            seconds = self._traffic(x, frame.computation) / self.chip.hbm_bandwidth
        frame.ledger["assumed", x.target or x.opcode] += seconds
        return seconds

    def _traffic(self, x: Instruction, computation: Computation) -> float:
        """Bytes to and from HBM of an instruction without an estimate."""
        if "S(1)" in x.shape:
            return 0.0  # the result stays in VMEM
        operands = computation.operands(x)
        if x.opcode == "dynamic-update-slice" and len(operands) > 1:
            return 2 * operands[1].bytes  # in place
        return x.bytes + computation.operand_bytes(x)

    def _kernel_seconds(self, x: Instruction, computation: Computation) -> float:
        """A custom call: its traffic, its FLOPs if it tells them, causal attention if it is that.

        Attention runs at a share of peak. Where it does not tell its FLOPs (splash): 4 per query,
        key and feature forward, 8 for dk and dv, 6 for dq, and the causal half of it.
        """
        if x.ragged_tiling is not None:
            return self._ragged_seconds(x, x.ragged_tiling, computation)
        traffic = x.bytes + computation.operand_bytes(x)
        told = float(x.find(r'"flops":"?(\d+)') or 0)
        splash = "splash_m" in x.name
        attention = splash or "flash_" in x.name
        rate = self.chip.peak_flops * (_ATTENTION_EFFICIENCY if attention else 1.0)
        if splash or (attention and not told):
            # The query comes first; the tables of the mask before it hold integers.
            floats = [
                array.dims
                for operand in computation.operands(x)
                for array in operand.arrays
                if array.dtype.startswith(("bf", "f")) and len(array.dims) > 2
            ]
            if floats:
                query = max(floats, key=len)
                each = 8 if "dkv" in x.name else 6 if "dq" in x.name else 4
                told = each * math.prod(query) * query[-2] / 2
        return max(traffic / self.chip.hbm_bandwidth, told / rate)

    def _ragged_seconds(
        self, x: Instruction, tiling: tuple[int, int, int], computation: Computation
    ) -> float:
        """libtpu's kernel for `lax.ragged_dot`, T D, E D F -> T F, in whole tiles.

        For each tile of F it steps over tiles of rows, and for each of those over tiles of D. A
        group that ends within a tile of rows takes a step more. While D is one tile, rows are read
        once for each tile of F and kernels once; otherwise every step reads both anew. The
        derivative by the rows is such a kernel too; that by the kernels is none, but a masked
        matmul of all rows for each group, with cycles.
        """
        rows, kernels = computation.operands(x)[-2:]
        T, D = rows.arrays[0].dims
        E, _, F = kernels.arrays[0].dims
        per_t, per_d, per_f = tiling
        steps = math.ceil(T / per_t) + E - 1
        d_tiles, f_tiles = math.ceil(D / per_d), math.ceil(F / per_f)
        once = d_tiles == 1
        reads_of_rows = f_tiles * (1 if once else steps * per_t / T)
        reads_of_kernels = 1 if once else steps / E
        traffic = reads_of_rows * _hbm_bytes(rows) + reads_of_kernels * _hbm_bytes(kernels)
        flops = 2 * steps * per_t * d_tiles * per_d * f_tiles * per_f
        return max(
            (traffic + _hbm_bytes(x)) / self.chip.hbm_bandwidth,
            flops / (self.chip.peak_flops * _MATMUL_EFFICIENCY),
        )


def _hbm_bytes(x: Instruction) -> float:
    """The size of a result, unless it stays in VMEM."""
    return 0.0 if "S(1)" in x.shape else x.bytes


def _channel(x: Instruction) -> str:
    return x.find(r"channel_id=(\d+)") or x.name
