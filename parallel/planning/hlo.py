"""A compiled XLA program as data: instructions, computations and the collectives among them.

Instructions stand in the order in which the device runs them, so a reader can see which matmuls
lie between the start and the done of a transfer. `parallel.planning.hlo_parser` makes these objects
from text, `parallel.planning.timeline` computes how long they take.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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

_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Array:
    """One array of a result."""

    dtype: str
    dims: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class CrossSlice:
    """A collective between slices, which begins with a `send` and ends with a `recv-done`."""

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
    """The text between the parentheses: operands, or the value of a constant."""
    attributes: str
    """The text after the parentheses."""
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions whose results this one reads."""
        return tuple(_NAME.findall(self.arguments))

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, with tuples flattened; without tokens and the like."""
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

    @property
    def is_in_vmem(self) -> bool:
        """Whether the result is placed in VMEM rather than HBM."""
        return "S(1)" in self.shape

    @property
    def is_in_host_memory(self) -> bool:
        """Whether the result, or the array that a slice is of, is in the memory of the host."""
        return "S(5)" in self.shape

    @cached_property
    def cycles(self) -> int | None:
        """The cycles that the compiler estimates, if it does."""
        found = self.find(r'"estimated_cycles":"?(\d+)')
        return int(found) if found else None

    @property
    def op_name(self) -> str:
        """The `jax.named_scope` path of the operation, else the name of the instruction."""
        return self.scope_path or self.name

    @property
    def scope_path(self) -> str | None:
        """The `jax.named_scope` path of the operation, if the compiler kept it."""
        return self.find(r'op_name="([^"]+)"')

    @property
    def is_matmul(self) -> bool:
        """Whether the matrix units compute it; true for a fusion around a matmul."""
        return (
            self.opcode in ("convolution", "dot")
            or "convolution_algorithm" in self.attributes
            or "kind=kOutput" in self.attributes
        )

    def find(self, pattern: str) -> str | None:
        """Return the first group of a regular expression in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    def calls(self, attribute: str = "calls") -> str | None:
        """Return the computation named by `calls=`, `body=`, `condition=` or `to_apply=`."""
        return self.find(rf"\b{attribute}=%?([\w.\-]+)")

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        listed = self.find(r"branch_computations=\{([^}]*)\}")
        if listed is not None:
            return tuple(_NAME.findall(listed))
        return tuple(re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.attributes))

    @property
    def custom_call_target(self) -> str | None:
        """The target of a custom call."""
        is_call = self.opcode == "custom-call"
        return self.find(r'custom_call_target="([^"]+)"') if is_call else None

    @property
    def source_target_pairs(self) -> tuple[tuple[int, int], ...]:
        """Source and target partition of each message of a permute; they may be equal.

        Partitions are numbered as the devices in `mesh.devices.flat`, whatever their own ids.
        """
        listed = self.find(r"source_target_pairs=\{(.*?)\}\}") or ""
        return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", listed))

    @property
    def cross_slice(self) -> CrossSlice | None:
        """The collective between slices (libtpu's megascale) that a send or recv belongs to."""
        kind = self.find(r'_xla_megascale_transfer_type="(\w+)"')
        if kind is None or self.opcode not in ("send", "recv"):
            return None
        slices = (self.find(r'_xla_megascale_target="\{([\d,]+)\}') or "").split(",")
        name = self.find(r'_xla_host_transfer_rendezvous="([^"]+)"') or self.name
        return CrossSlice(kind.lower().replace("_", "-"), name, len(slices))

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
    """A named sequence of instructions."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by their names."""
        return MappingProxyType({x.name: x for x in self.instructions})

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the result of the computation."""
        return next((x for x in self.instructions if x.is_root), self.instructions[-1])

    def operands(self, x: Instruction) -> tuple[Instruction, ...]:
        """Return the instructions whose results this one reads."""
        return tuple(self.by_name[name] for name in x.operands if name in self.by_name)

    @cached_property
    def _users(self) -> Mapping[str, Sequence[Instruction]]:
        found: dict[str, list[Instruction]] = defaultdict(list)
        for x in self.instructions:
            for name in x.operands:
                found[name].append(x)
        return found

    def users(self, x: Instruction) -> Sequence[Instruction]:
        """Return the instructions that read the result of this one."""
        return self._users.get(x.name, ())

    def operand_bytes(self, x: Instruction) -> float:
        """Return the size of everything that this instruction reads."""
        return sum(operand.bytes for operand in self.operands(x))

    def source(self, x: Instruction) -> Instruction:
        """Return the instruction that this one only copies, converts or reshapes."""
        while x.opcode in ("copy", "convert", "bitcast", "reshape"):
            operands = self.operands(x)
            if not operands:
                break
            x = operands[0]
        return x


@dataclass(frozen=True)
class Collective:
    """A collective and the computation in which it stands."""

    kind: str
    instruction: Instruction
    computation: Computation


@dataclass(frozen=True)
class HloModule:
    """A scheduled program: its computations, and the one that runs first."""

    computations: Mapping[str, Computation]
    entry: Computation
    num_partitions: int

    def nested(self, name: str | None) -> Iterator[tuple[Computation, Instruction]]:
        """Yield the instructions of a called computation and of those that it calls."""
        computation = self.computations.get(name or "")
        if computation is not None:
            for x in computation.instructions:
                yield computation, x
                yield from self.nested(x.calls())

    def collective_of(self, x: Instruction, computation: Computation) -> Collective | None:
        """Return the collective that this instruction is, starts or contains."""
        kind = x.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return Collective(kind, x, computation)
        return self._collective_in(x.calls()) if x.opcode in ("fusion", "async-start") else None

    def _collective_in(self, name: str | None) -> Collective | None:
        """Return the first collective inside a called computation."""
        for computation, x in self.nested(name):
            kind = x.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                # libtpu's fused reduce-scatter is an all-reduce of which each keeps a slice.
                fused = kind == "all-reduce" and "all-reduce-scatter" in computation.name
                return Collective("reduce-scatter" if fused else kind, x, computation)
        return None

    def fusion_role(self, x: Instruction) -> Literal["start", "progress", "done"] | None:
        """Return the part that a fusion has in an asynchronous collective fusion.

        libtpu starts a collective in one fusion, lets it progress under the matmuls of others and
        ends it in a last one; all of them contain the collective.
        """
        computation = self.computations.get(x.calls() or "") if x.opcode == "fusion" else None
        if computation is None:
            return None
        targets = {inner.custom_call_target for inner in computation.instructions}
        if "AsyncCollectiveStart" in targets:
            return "start"
        if "AsyncCollectiveDone" in targets:
            return "done"
        return "progress" if computation.name.startswith("async_collective_fusion") else None


def trip_count(module: HloModule, loop: Instruction, computation: Computation) -> int | None:
    """Return how often a `while` of this computation runs; None if the text does not say.

    XLA may annotate the count; libtpu does not. Otherwise it is (bound - start) / step: the bound
    is the largest constant in the condition, the counter is the tuple element that the condition
    reads.
    """
    annotated = loop.find(r'known_trip_count[":{\s]+n"?:"?(\d+)')
    if annotated:
        return int(annotated)
    condition = module.computations[loop.calls("condition") or ""]
    constants = [x.constant for _, x in module.nested(condition.name)]
    bound = max((value for value in constants if value is not None), default=0)
    reads = [x.find(r"index=(\d+)") for x in condition.instructions]
    counters = [int(index) for index in reads if index is not None]
    if bound <= 0 or not counters:
        return None
    body = module.computations[loop.calls("body") or ""]
    initial = _tuple_element(computation, computation.operands(loop)[0], counters[-1])
    start = (computation.source(initial).constant if initial else None) or 0
    step = _step(module, body, _tuple_element(body, body.root, counters[-1]))
    return max(0, -(-(bound - start) // step))


def _step(module: HloModule, body: Computation, update: Instruction | None) -> int:
    """Return what one iteration adds to the counter; 1 if the text does not say."""
    if update is not None and update.opcode == "fusion":
        body = module.computations[update.calls() or ""]
        update = body.root
    if update is None or update.opcode != "add":
        return 1
    return next((x.constant for x in body.operands(update) if x.constant), 1)


def _tuple_element(computation: Computation, x: Instruction, index: int) -> Instruction | None:
    """Return the instruction that produces one element of a tuple."""
    if x.opcode != "tuple" or index >= len(x.operands):
        return None
    return computation.by_name.get(x.operands[index])
