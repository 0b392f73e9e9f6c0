"""A compiled XLA program as data: the text of `compiled.as_text()`, parsed.

Instructions stand in the order in which the device runs them, so this is where a test can hold a
schedule: which matmuls lie between the start and the done of a transfer, which sums the compiler
left outside of its matmuls, how often a loop runs. How long anything takes is the business of
`parallel.planning.schedule`. It refuses a text whose instructions are not in schedule order.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


@dataclass(frozen=True)
class Array:
    """One array of a result: its shape and how many bytes it has."""

    dtype: str
    dims: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class Crossing:
    """A collective between slices, of which a `send` is the beginning and a `recv-done` the end."""

    kind: str
    """all-reduce, ..."""
    name: str
    """The same for all messages of one collective."""
    num_slices: int


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    """As printed, with layout and memory space: `bf16[8,128]{1,0:T(8,128)S(1)}`, or a tuple."""
    arguments: str
    """What stands between the parentheses: operands, or the value of a constant."""
    attributes: str
    """Everything after the parentheses."""
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions whose results this one reads."""
        return tuple(_NAME.findall(self.arguments))

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, a tuple flattened; tokens and the like are left out."""
        found = []
        for letters, digits, sides in _ARRAY.findall(self.shape):
            if not digits and letters != "pred":
                continue
            dims = tuple(int(side) for side in sides.split(",") if side)
            size = int(digits or 8) / 8
            for side in dims:
                size *= side
            found.append(Array(letters + digits, dims, size))
        return tuple(found)

    @cached_property
    def bytes(self) -> float:
        """The size of the result."""
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def cycles(self) -> int | None:
        """The compiler's own estimate, if it made one."""
        found = self.find(r'"estimated_cycles":"?(\d+)')
        return int(found) if found else None

    @property
    def op_name(self) -> str:
        """Where in the model it comes from, else its own name."""
        return self.find(r'op_name="([^"]+)"') or self.name

    @property
    def is_matmul(self) -> bool:
        """Whether the matrix units do it (a fusion around a matmul included)."""
        return (
            self.opcode in ("convolution", "dot")
            or "convolution_algorithm" in self.attributes
            or "kind=kOutput" in self.attributes
        )

    def find(self, pattern: str) -> str | None:
        """The first group of this pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    def calls(self, attribute: str = "calls") -> str | None:
        """The computation named by `calls=`, `body=`, `condition=` or `to_apply=`."""
        return self.find(rf"\b{attribute}=%?([\w.\-]+)")

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        listed = self.find(r"branch_computations=\{([^}]*)\}")
        if listed is not None:
            return tuple(_NAME.findall(listed))
        return tuple(re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.attributes))

    @property
    def target(self) -> str | None:
        """What a custom call calls."""
        is_call = self.opcode == "custom-call"
        return self.find(r'custom_call_target="([^"]+)"') if is_call else None

    @property
    def moves(self) -> tuple[tuple[int, int], ...]:
        """Source and target of each message of a permute, as partitions; may be one and the same.

        Partitions are numbered as the devices in `mesh.devices.flat`, whatever their own ids.
        """
        listed = self.find(r"source_target_pairs=\{(.*?)\}\}") or ""
        return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", listed))

    @property
    def crossing(self) -> Crossing | None:
        """What a send or recv between slices (libtpu's megascale) is part of."""
        kind = self.find(r'_xla_megascale_transfer_type="(\w+)"')
        if kind is None or self.opcode not in ("send", "recv"):
            return None
        slices = (self.find(r'_xla_megascale_target="\{([\d,]+)\}') or "").split(",")
        name = self.find(r'_xla_host_transfer_rendezvous="([^"]+)"') or self.name
        return Crossing(kind.lower().replace("_", "-"), name, len(slices))

    def group_size(self, num_partitions: int) -> int:
        """How many devices take part in one group of this collective."""
        groups = self.find(r"replica_groups=(.*)")
        if groups is None or groups.startswith("{}"):
            return num_partitions
        iota = re.match(r"\[\d+,(\d+)\]", groups)
        if iota:
            return int(iota.group(1))
        listed = re.match(r"\{\{([\d,]+)\}", groups)
        if listed:
            return listed.group(1).count(",") + 1
        mesh = re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", groups)
        if mesh is None:
            raise ValueError(
                f"{self.name} has replica_groups={groups[:60]!r}, a form that nobody has met yet; "
                "teach parallel.planning.hlo to count its devices"
            )
        sides = dict(re.findall(r"'?(\w+)'?=(\d+)", mesh.group(1)))
        axes = re.findall(r"'?([A-Za-z_]\w*)'?(?::\(\d+\)(\d+))?", mesh.group(2))
        return math.prod(int(part or sides[axis]) for axis, part in axes)

    @property
    def ragged_tiling(self) -> tuple[int, int, int] | None:
        """Rows, features and outputs in a tile of libtpu's kernel for `lax.ragged_dot`."""
        found = re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', self.attributes)
        return (int(found[1]), int(found[2]), int(found[3])) if found else None

    @property
    def constant(self) -> int | None:
        """The value of an integer constant."""
        is_integer = self.opcode == "constant" and re.fullmatch(r"\(-?\d+\)", self.arguments)
        return int(self.arguments[1:-1]) if is_integer else None


@dataclass(frozen=True)
class Computation:
    """A sequence of instructions under a name."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by their names."""
        return MappingProxyType({x.name: x for x in self.instructions})

    @property
    def root(self) -> Instruction:
        """The instruction whose result is that of the computation."""
        return next((x for x in self.instructions if x.is_root), self.instructions[-1])

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions whose results this one reads."""
        return tuple(self.by_name[name] for name in instruction.operands if name in self.by_name)

    def operand_bytes(self, instruction: Instruction) -> float:
        """The size of everything that this instruction reads."""
        return sum(x.bytes for x in self.operands(instruction))


@dataclass(frozen=True)
class Collective:
    """A collective and the computation in which it stands."""

    kind: str
    instruction: Instruction
    computation: Computation


@dataclass(frozen=True)
class AsyncPair:
    """A transfer that runs beside the compute scheduled between its two ends."""

    start: Instruction
    done: Instruction
    between: tuple[Instruction, ...]

    @property
    def matmul_cycles(self) -> int:
        """The compiler's estimate of the matmuls that hide it (those in a loop not counted)."""
        return sum(x.cycles or 0 for x in self.between if x.is_matmul)


@dataclass(frozen=True)
class Program:
    """A scheduled program: its computations, and the one that runs first."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_partitions: int

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """Those of the entry computation, in schedule order."""
        return self.entry.instructions

    @cached_property
    def scheduled(self) -> tuple[Computation, ...]:
        """The entry and every loop body, call and branch under it: what runs line by line."""
        found: dict[str, Computation] = {}

        def visit(computation: Computation) -> None:
            if computation.name not in found:
                found[computation.name] = computation
                for x in computation.instructions:
                    if x.opcode in ("while", "call", "conditional"):
                        for name in (x.calls("body"), x.calls("to_apply"), *x.branches):
                            if name is not None:
                                visit(self.computations[name])

        visit(self.entry)
        return tuple(found.values())

    def inside(self, name: str | None) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions of a called computation and of those that it calls."""
        computation = self.computations.get(name or "")
        if computation is not None:
            for x in computation.instructions:
                yield computation, x
                yield from self.inside(x.calls())

    def collective_in(self, name: str | None) -> Collective | None:
        """The first collective inside a called computation."""
        for computation, x in self.inside(name):
            kind = x.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                # libtpu's fused reduce-scatter is an all-reduce of which each keeps a slice.
                fused = kind == "all-reduce" and "all-reduce-scatter" in computation.name
                return Collective("reduce-scatter" if fused else kind, x, computation)
        return None

    def collective_of(self, x: Instruction, computation: Computation) -> Collective | None:
        """The collective that this instruction is, starts or carries."""
        kind = x.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return Collective(kind, x, computation)
        return self.collective_in(x.calls()) if x.opcode in ("fusion", "async-start") else None

    def fusion_role(self, x: Instruction) -> Literal["start", "step", "done"] | None:
        """The part of a fusion in an asynchronous collective fusion.

        libtpu starts a collective in one fusion, lets it progress under the matmul of others and
        ends it in a last one; all three contain the collective.
        """
        computation = self.computations.get(x.calls() or "") if x.opcode == "fusion" else None
        if computation is None:
            return None
        targets = {inner.target for inner in computation.instructions}
        if "AsyncCollectiveStart" in targets:
            return "start"
        if "AsyncCollectiveDone" in targets:
            return "done"
        return "step" if computation.name.startswith("async_collective_fusion") else None

    def pairs(self, kind: str = "collective-permute") -> tuple[AsyncPair, ...]:
        """All transfers of this kind that have a start and a done, in schedule order.

        Those that libtpu hides in fusions (asynchronous collective fusions) are not among them.
        """
        found = []
        for computation in self.scheduled:
            for index, x in enumerate(computation.instructions):
                if x.opcode.endswith("-start"):
                    collective = self.collective_of(x, computation)
                    if collective is not None and collective.kind == kind:
                        found.append(_pair(computation.instructions, index))
        return tuple(found)

    def unfused_adds(self, min_bytes: float) -> tuple[Instruction, ...]:
        """Sums and differences of two arrays outside of any matmul, results of at least this size.

        Adding a constant or a broadcast scalar does not count; a fusion counts if there is such
        a sum anywhere in it.
        """
        found = []
        for computation in self.scheduled:
            for x in computation.instructions:
                if not x.is_matmul and x.bytes >= min_bytes:
                    inner = self.inside(x.calls()) if x.opcode == "fusion" else ()
                    if any(
                        _adds_arrays(part, owner) and part.bytes >= min_bytes
                        for owner, part in ((computation, x), *inner)
                    ):
                        found.append(x)
        return tuple(found)

    def trip_count(self, loop: Instruction, computation: Computation) -> int | None:
        """How often this `while` of this computation runs, if the text tells.

        Annotated, or else (bound - start) / step: the bound is the largest constant in the
        condition, the counter what the condition reads; libtpu does not annotate.
        """
        annotated = loop.find(r'known_trip_count[":{\s]+n"?:"?(\d+)')
        if annotated:
            return int(annotated)
        condition = self.computations[loop.calls("condition") or ""]
        constants = [x.constant for _, x in self.inside(condition.name)]
        bound = max((value for value in constants if value is not None), default=0)
        reads = [x.find(r"index=(\d+)") for x in condition.instructions]
        counters = [int(index) for index in reads if index is not None]
        if bound <= 0 or not counters:
            return None
        body = self.computations[loop.calls("body") or ""]
        carried = computation.operands(loop)[0]
        first = _element(computation, carried, counters[-1])
        start = (_source(computation, first).constant if first else None) or 0
        step = self._step(body, _element(body, body.root, counters[-1]))
        return max(0, -(-(bound - start) // step))

    def _step(self, body: Computation, update: Instruction | None) -> int:
        """What one iteration adds to the counter: 1 if the text does not tell."""
        if update is not None and update.opcode == "fusion":
            body = self.computations[update.calls() or ""]
            update = body.root
        if update is None or update.opcode != "add":
            return 1
        return next((x.constant for x in body.operands(update) if x.constant), 1)


def _element(computation: Computation, carried: Instruction, index: int) -> Instruction | None:
    """The instruction that makes one element of a tuple."""
    if carried.opcode != "tuple" or index >= len(carried.operands):
        return None
    return computation.by_name.get(carried.operands[index])


def _source(computation: Computation, x: Instruction) -> Instruction:
    """What this instruction only copies, converts or reshapes."""
    while x.opcode in ("copy", "convert", "bitcast", "reshape"):
        operands = computation.operands(x)
        if not operands:
            break
        x = operands[0]
    return x


def _pair(instructions: tuple[Instruction, ...], index: int) -> AsyncPair:
    """The transfer that starts at this index."""
    start = instructions[index]
    name = start.name
    for end in range(index + 1, len(instructions)):
        x = instructions[end]
        if name in x.operands and x.opcode.endswith("-done"):
            return AsyncPair(start, x, instructions[index + 1 : end])
        if name in x.operands and x.opcode == "async-update":
            name = x.name
    raise ValueError(
        f"{start.name} has no done after it in its computation, so nothing tells what hides it; "
        "pass all of compiled.as_text()"
    )


def _adds_arrays(x: Instruction, computation: Computation) -> bool:
    """Whether this is a sum or difference of two arrays, neither of them one repeated value."""
    return x.opcode in ("add", "subtract") and not any(
        _source(computation, operand).opcode in ("constant", "broadcast")
        for operand in computation.operands(x)
    )


def read_program(text: str) -> Program:
    """Parses the text of a compiled program.

    Raises: ValueError if it has no entry computation or is not in schedule order.
    """
    header = text.partition("\n")[0]
    if "is_scheduled=true" not in header:
        raise ValueError(
            f"program starts with {header[:60]!r}: only a scheduled program has an order to read; "
            "pass compiled.as_text(), not lowered.as_text()"
        )
    computations: dict[str, Computation] = {}
    entry = None
    for heading, lines in _split(text):
        computation = Computation(heading.group(2), tuple(_parse(line) for line in lines))
        computations[computation.name] = computation
        if heading.group(1):
            entry = computation
    if entry is None:
        raise ValueError("program has no ENTRY computation: pass all of compiled.as_text()")
    partitions = re.search(r"num_partitions=(\d+)", header)
    return Program(
        MappingProxyType(computations), entry, int(partitions.group(1)) if partitions else 1
    )


def _split(text: str) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Every computation: its heading and its instructions, each on one line.

    The metadata of Pallas kernels spans lines; what starts no instruction continues the last one.
    """
    heading: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        if heading is None:
            heading, lines = _COMPUTATION.match(line), []
        elif line == "}":
            yield heading, lines
            heading = None
        elif _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += " " + line


def _parse(line: str) -> Instruction:
    """One instruction: `[ROOT] %name = shape opcode(arguments), attributes`."""
    found = _INSTRUCTION.match(line)
    assert found is not None, line
    rest = line[found.end() :]
    end = _close(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    end = _close(rest, opening)
    return Instruction(
        name=found.group(2),
        opcode=rest[:opening],
        shape=shape,
        arguments=rest[opening:end],
        attributes=rest[end:],
        is_root=found.group(1) is not None,
    )


def _close(text: str, start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    opening, depth = text[start], 0
    closing = _CLOSING[opening]
    for index in range(start, len(text)):
        if text[index] == opening:
            depth += 1
        elif text[index] == closing:
            depth -= 1
            if depth == 0:
                return index + 1
    raise ValueError(f"program is cut off at {text[start : start + 60]!r}: pass all of its text")
