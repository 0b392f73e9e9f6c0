"""Memory of a compiled program on one device, by class, and its largest temporary buffers.

The classes of arguments are exact: the caller names them, and shardings give the bytes. The
temporaries are those of the moment at which most of them are in use, as libtpu assigned them
(`parallel.planning.buffer_assignment`):

- gradients: results of the backward pass with the sides of a shard of a parameter, of all layers or
  of one. An activation with exactly these sides counts here too.
- kept activations: results of the forward pass that the backward pass reads.
- temporaries: all others, such as parameters in the compute dtype, gathered parameters and logits.
- fragmentation: gaps between them.
- unassigned: what libtpu reports beyond them.

A program fits if `assigned`, which is arguments, outputs, constants and temporaries with gaps, is
at most the memory of the chip; libtpu's refusals name this figure. `memory_analysis()` reports more
temporary bytes, also more than the chip has, of programs that fit. libtpu fills free memory with
prefetches, so temporaries grow with the memory of the chip. Its `peak_memory_in_bytes` is
arguments, outputs and constants plus the fullest moment of one memory space, without gaps; with
buffers in VMEM it can exceed what is in HBM. All checked with libtpu 0.0.42 in November 2026.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax

from parallel.planning.buffer_assignment import BufferAssignment, Value
from parallel.planning.hlo import Computation, HloModule, Instruction
from parallel.planning.hlo_parser import parse_hlo

PARAMETERS = "parameters"
"""The class of arguments whose shapes tell gradients from other results of the backward pass."""
_SHOWN = 10
_VIEWS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional")
_SIDES = re.compile(r"\[([\d,]*)\]")


@dataclass(frozen=True)
class Buffer:
    """Temporary arrays of one kind that are in use when most memory is.

    Attributes:
        shape: Type and sides of one of them: "bf16[32,2,4096,4096]".
        bytes: The size of one of them, with the padding of tiles.
        count: The number of them.
        kind: "gradients", "kept activations" or "temporaries".
        scope: The `jax.named_scope`s of the operation that makes them, such as "layers/mlp".
        is_backward: Whether the backward pass makes them.
    """

    shape: str
    bytes: int
    count: int
    kind: str
    scope: str
    is_backward: bool


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a program holds on one device.

    total = arguments + outputs + temporary + program = the sum of `classes`.

    Attributes:
        arguments: Bytes of the arguments.
        outputs: Bytes of the results that are not written into donated arguments.
        temporary: Bytes of all intermediate values.
        program: Bytes of the code; 0 if the program does not fit, because then there is none.
        assigned: Bytes that libtpu compares with the memory of the chip; None if it did not say.
        classes: Bytes by class: those of the arguments as the caller named them, "padding" (of
            arguments, by tiles), "outputs", "gradients", "kept activations", "temporaries",
            "fragmentation", "unassigned" and "program".
        largest: The largest temporary buffers, at most ten.
    """

    arguments: int
    outputs: int
    temporary: int
    program: int
    assigned: int | None
    classes: Mapping[str, int]
    largest: tuple[Buffer, ...]

    @property
    def held(self) -> int:
        """Bytes of arguments and outputs."""
        return self.arguments + self.outputs

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.held + self.temporary + self.program


def argument_bytes(classes: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes per device of trees of abstract arrays, by class.

    Exact but for the padding of tiles, and known without a compiler.
    """
    return {name: sum(map(_shard_bytes, jax.tree.leaves(tree))) for name, tree in classes.items()}


def memory_use(
    program: Any, assignment: BufferAssignment | None, text: str, classes: Mapping[str, Any]
) -> MemoryUse:
    """Return the memory of a program, as `memory_analysis()` reports it.

    Args:
        program: The program, `jax.stages.Compiled`.
        assignment: What libtpu assigned; None: all temporary bytes are "unassigned".
        text: Its text.
        classes: The abstract arguments by class; the one named `PARAMETERS` tells gradients.
    """
    found = program.memory_analysis()
    return _memory_use(
        found.argument_size_in_bytes,
        found.output_size_in_bytes - found.alias_size_in_bytes,
        found.temp_size_in_bytes,
        found.generated_code_size_in_bytes,
        assignment=assignment,
        text=text,
        classes=classes,
    )


def assigned_memory(
    assignment: BufferAssignment, text: str, classes: Mapping[str, Any]
) -> MemoryUse:
    """Return the memory of a program that does not fit: what libtpu would have assigned."""
    return _memory_use(
        assignment.arguments,
        assignment.others,
        assignment.temporaries,
        0,
        assignment=assignment,
        text=text,
        classes=classes,
    )


def _memory_use(
    arguments: int,
    outputs: int,
    temporary: int,
    program: int,
    *,
    assignment: BufferAssignment | None,
    text: str,
    classes: Mapping[str, Any],
) -> MemoryUse:
    named = argument_bytes(classes)
    rest = {"padding": arguments - sum(named.values())} if named else {"arguments": arguments}
    inside = dict.fromkeys(("gradients", "kept activations", "temporaries", "fragmentation"), 0)
    buffers: list[Buffer] = []
    if assignment is not None:
        buffers = _buffers(assignment, parse_hlo(text), classes)
        for buffer in buffers:
            inside[buffer.kind] += buffer.bytes * buffer.count
        inside["fragmentation"] = assignment.temporaries - sum(inside.values())
    use = {
        **named,
        **rest,
        "outputs": outputs,
        **_at_most(inside, temporary),
        "program": program,
    }
    return MemoryUse(
        arguments=arguments,
        outputs=outputs,
        temporary=temporary,
        program=program,
        assigned=assignment.total if assignment is not None else None,
        classes=MappingProxyType(use),
        largest=tuple(sorted(buffers, key=lambda x: -x.bytes * x.count)[:_SHOWN]),
    )


def largest_buffer(text: str) -> Buffer | None:
    """Return the largest array that a program computes, of any backend; None if there is none.

    text: what `compiled.as_text()` returns. It does not say which arrays share memory, or which are
    in use at the same time. So this is the array that needs the most, and not the only one at the
    moment when memory runs out.
    """
    module = parse_hlo(text)
    origins, largest = _Origins(module), None
    for x in _computed(module, module.entry):
        for array in x.arrays:
            if largest is None or array.bytes > largest.bytes:
                shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                made = is_backward(origins.op_names.get(x.name, ""))
                scope = origins.scope(x.name)
                largest = Buffer(shape, int(array.bytes), 1, "temporaries", scope, made)
    return largest


def _computed(module: HloModule, computation: Computation) -> Iterator[Instruction]:
    """Yield the instructions whose results are arrays in device memory of their own."""
    for x in computation.instructions:
        called = [x.calls("body"), x.calls("to_apply") if x.opcode == "call" else None]
        inner = [module.computations.get(name or "") for name in (*called, *x.branches)]
        if any(inner):
            for body in inner:
                if body is not None:
                    yield from _computed(module, body)
        elif x.opcode not in _VIEWS and not (x.is_in_vmem or x.is_in_host_memory):
            yield x


def _shard_bytes(x: Any) -> int:
    return math.prod(_shard_shape(x)) * x.dtype.itemsize


def _shard_shape(x: Any) -> tuple[int, ...]:
    return tuple(x.sharding.shard_shape(x.shape)) if x.sharding is not None else tuple(x.shape)


def _at_most(classes: Mapping[str, int], reported: int) -> dict[str, int]:
    """Return the classes with the rest of what is reported, "unassigned".

    libtpu does not report tables of a few KiB. Without other temporaries it reports less than it
    assigns, and the classes are cut.
    """
    left, found = reported, {}
    for name, size in classes.items():
        found[name] = min(size, left)
        left -= found[name]
    return {**found, "unassigned": left}


def _buffers(
    assignment: BufferAssignment, module: HloModule, classes: Mapping[str, Any]
) -> list[Buffer]:
    """Return the buffers in use at the peak; equal ones are counted."""
    shapes = {
        sides
        for x in jax.tree.leaves(classes.get(PARAMETERS, ()))
        for sides in _stack_and_layer(_shard_shape(x))
    }
    origins = _Origins(module)
    time, values = assignment.peak()
    counts: Counter[Buffer] = Counter()
    end = 0
    for value in values:
        size = value.offset + value.bytes - max(value.offset, end)
        end = value.offset + value.bytes
        history = assignment.history(value)
        # The first maker of a stack of layers fills it with zeros; the last one is its layer.
        named = [x for x in history if origins.op_name(x)]
        backward = [x.instruction for x in named if is_backward(origins.op_name(x))]
        before = [x.instruction for x in named if x.start <= time]
        maker = before[-1] if before else value.instruction
        read = origins.op_names.get(assignment.order[max(x.end for x in history)], "")
        kind = "temporaries"
        if any(_is_forward(origins.op_name(x)) for x in named):
            is_kept = _is_forward(origins.op_names.get(maker, "")) and is_backward(read)
            kind = "kept activations" if is_kept else kind
        elif backward and _sides(value) in shapes:
            kind, maker = "gradients", backward[-1]
        made = origins.op_names.get(maker, "")
        shape = "tuple" if value.shape.startswith("(") else value.shape
        counts[Buffer(shape, size, 1, kind, origins.scope(maker), is_backward(made))] += 1
    return [replace(buffer, count=count) for buffer, count in counts.items()]


class _Origins:
    """Named scopes and operations that the values of a program come from."""

    def __init__(self, module: HloModule):
        self.op_names: dict[str, str] = {}
        """The op_name of every instruction that has one."""
        self._operands: dict[str, tuple[str, ...]] = {}
        self._loops: set[str] = set()
        for computation in module.computations.values():
            for x in computation.instructions:
                self._operands[x.name] = x.operands
                if x.op_name != x.name:
                    self.op_names[x.name] = x.op_name
                if x.opcode == "while":
                    self._loops.add(x.name)

    def op_name(self, value: Value) -> str:
        """Return the op_name of the operation that makes a value; "" for what a loop passes on."""
        name = value.instruction
        return "" if name in self._loops else self.op_names.get(name, "")

    def scope(self, name: str, steps: int = 4) -> str:
        """Return the longest path of named scopes of an instruction and of those that it reads.

        For an instruction that the compiler made, it is that of the instructions before these, at
        most `steps` back. "" for an operation outside of named scopes.
        """
        operands = self._operands.get(name, ())
        own = self.op_names.get(name)
        if own is not None and not named_scopes(own):
            return ""
        scopes = [named_scopes(self.op_names.get(x, "")) for x in (name, *operands)]
        longest = max(scopes, key=lambda path: path.count("/") + bool(path))
        if longest or not steps:
            return longest
        return next((found for x in operands if (found := self.scope(x, steps - 1))), "")


def _sides(value: Value) -> tuple[int, ...]:
    found = _SIDES.search(value.shape)
    return _normal(int(side) for side in found[1].split(",") if side) if found else ()


def _stack_and_layer(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sides of an array, and those without its first dim if others are left."""
    layer = shape[1:] if len(shape) > 2 else shape
    return _normal(shape), _normal(layer)


def _normal(sides: Iterable[int]) -> tuple[int, ...]:
    """Return sides in an order that transposes and dims of size 1 do not change."""
    return tuple(sorted(side for side in sides if side > 1))


def is_backward(op_name: str) -> bool:
    """Return whether an operation belongs to the backward pass."""
    return "transpose(" in op_name


def _is_forward(op_name: str) -> bool:
    return "jvp(" in op_name and not is_backward(op_name)


_OWN = re.compile(
    r"jit\(.*\)|pjit|while|body|cond|scan|closed_call|checkpoint|rematted_computation|shard_map|"
    r"custom_[jv]vp_call|branch_\d+_fun|"
)
_TRANSFORMED = re.compile(r"(?:transpose|jvp|vmap)\((.*)\)")


def named_scopes(op_name: str) -> str:
    """Return the named scopes in an op_name, at most three, or the name of an argument."""
    path, _, _ = op_name.rpartition("/")  # the last part is the primitive
    if not path:
        return op_name.replace("\\'", "'")
    parts = []
    for part in path.split("/"):
        while found := _TRANSFORMED.fullmatch(part):
            part = found[1]
        if not _OWN.fullmatch(part):
            parts.append(part)
    return "/".join(parts[:3])
