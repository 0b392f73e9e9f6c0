"""Temporary buffers of a compiled TPU program: where each lies in memory, and when it is in use.

libtpu writes them as text files beside the program if the compiler option `xla_dump_to` names a
folder, also of a program that does not fit. The option changes nothing of the program.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?", re.MULTILINE)
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$",
    re.MULTILINE,
)
_RANGE = re.compile(r"^    (\S+\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_ORDER = re.compile(r"^    \d+:(\S+)$", re.MULTILINE)
_HBM = 0  # XLA calls memory spaces colors


@dataclass(frozen=True)
class Value:
    """The result of one instruction, or one element of it.

    Attributes:
        instruction: The name of the instruction.
        shape: Type and sides without layout, such as "bf16[8,128]".
        offset: Where it begins in the memory of the temporaries, in bytes.
        bytes: Its size, with the padding of tiles.
        start: Position of the instruction in the schedule.
        end: Position of the last instruction that reads it.
    """

    instruction: str
    shape: str
    offset: int
    bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class BufferAssignment:
    """The buffers of a compiled program in HBM.

    Attributes:
        arguments: Bytes of the arguments.
        others: Bytes of the results that are not in donated arguments, and of constants.
        temporaries: Bytes of the memory that all temporary buffers share, with gaps.
        values: All values that are stored among the temporaries at some time.
        order: Names of all instructions, in the order of the schedule; bodies of loops count once.
    """

    arguments: int
    others: int
    temporaries: int
    values: tuple[Value, ...]
    order: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes that libtpu compares with the memory of the chip."""
        return self.arguments + self.others + self.temporaries

    def at(self, time: int) -> tuple[Value, ...]:
        """Return the values in use at a position of the schedule, without what shares memory.

        An update in place and the parameters of a loop share the memory of their operands. Of
        values that share memory, the one that begins first is returned.
        """
        live = [x for x in self.values if x.start <= time <= x.end]
        found, end = [], 0
        for value in sorted(live, key=lambda x: (x.offset, -x.bytes, x.start)):
            if value.offset + value.bytes > end:
                found.append(value)
                end = value.offset + value.bytes
        return tuple(found)

    def peak(self) -> tuple[int, tuple[Value, ...]]:
        """Return the position at which most bytes are in use, and the values of that moment."""
        times = sorted({x.start for x in self.values})
        moments = ((time, self.at(time)) for time in times)
        return max(moments, key=lambda moment: _bytes(moment[1]), default=(0, ()))

    def history(self, value: Value) -> tuple[Value, ...]:
        """Return the values that held the same memory without a gap, this one included, in order.

        They are one array: what a loop passes on, and what instructions update in place.
        """
        same = [
            x
            for x in self.values
            if (x.offset, x.bytes, x.shape) == (value.offset, value.bytes, value.shape)
        ]
        same.sort(key=lambda x: (x.start, x.end))
        return _touching(same, value)


def read_buffer_assignment(folder: Path) -> BufferAssignment | None:
    """Read the files of one program; None if libtpu wrote none."""
    assigned = sorted(folder.glob("*.after_optimizations-buffer-assignment.txt"))
    ranges = sorted(folder.glob("*.after_optimizations-live-range.txt"))
    if len(assigned) != 1 or len(ranges) != 1:
        return None
    text = ranges[0].read_text()
    live = {name: (int(start), int(end)) for name, start, end in _RANGE.findall(text)}
    sizes: Counter[str] = Counter()
    values: list[Value] = []
    for size, kind, found in _allocations(assigned[0].read_text()):
        sizes[kind] += size
        if kind == "temporaries":
            values += _values(found, live)
    order = tuple(_ORDER.findall(text))
    return BufferAssignment(
        sizes["arguments"], sizes["others"], sizes["temporaries"], tuple(values), order
    )


def _allocations(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield size, kind and text of the allocations in HBM."""
    headings = list(_ALLOCATION.finditer(text))
    ends = [*(x.start() for x in headings[1:]), len(text)]
    for heading, end in zip(headings, ends, strict=True):
        if int(heading[2] or _HBM) == _HBM:
            line, _, values = text[heading.start() : end].partition("\n")
            kind = "arguments" if ", parameter " in line else "others"
            yield int(heading[1]), "temporaries" if "preallocated-temp" in line else kind, values


def _values(text: str, live: dict[str, tuple[int, int]]) -> Iterator[Value]:
    """Yield the values of an allocation that are live at some time."""
    for name, index, size, offset, shape in _VALUE.findall(text):
        key = name + (index or "{}")
        if key in live:
            plain = re.sub(r"\{[^}]*\}", "", shape)
            yield Value(name, plain, int(offset), int(size), *live[key])


def _touching(values: Sequence[Value], value: Value) -> tuple[Value, ...]:
    """Return the values whose time in use is connected with that of `value` without a gap."""
    found: list[Value] = []
    end = -1
    for x in values:  # sorted by start
        if x.start > end:
            if value in found:
                break
            found = []
        found.append(x)
        end = max(end, x.end)
    return tuple(found)


def _bytes(values: Sequence[Value]) -> int:
    """Return the bytes of values that `BufferAssignment.at` returned; parts shared count once."""
    total, end = 0, 0
    for x in values:
        total += x.offset + x.bytes - max(x.offset, end)
        end = x.offset + x.bytes
    return total
