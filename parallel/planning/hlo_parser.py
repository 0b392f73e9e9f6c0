"""Parser of the text of a compiled XLA program, `compiled.as_text()`."""

import re
from collections.abc import Iterator
from types import MappingProxyType

from parallel.planning.hlo import Computation, HloModule, Instruction

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


def parse_hlo(text: str) -> HloModule:
    """Parse the text of a compiled program.

    Raises: ValueError if it has no entry computation or is not in schedule order.
    """
    header = text.partition("\n")[0]
    if "is_scheduled=true" not in header:
        raise ValueError(
            f"the program text starts with {header[:60]!r} and is not scheduled, so it has no "
            "timeline; pass compiled.as_text(), not lowered.as_text()"
        )
    computations: dict[str, Computation] = {}
    entry = None
    for heading, lines in _split(text):
        computation = Computation(heading.group(2), tuple(_parse(line) for line in lines))
        computations[computation.name] = computation
        if heading.group(1):
            entry = computation
    if entry is None:
        raise ValueError(
            "the program text has no ENTRY computation; pass all of compiled.as_text()"
        )
    partitions = re.search(r"num_partitions=(\d+)", header)
    return HloModule(
        MappingProxyType(computations), entry, int(partitions.group(1)) if partitions else 1
    )


def _split(text: str) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Yield every computation: its heading and its instructions, each as one line.

    The metadata of Pallas kernels spans lines, so a line that starts no instruction continues the
    last one.
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
    """Parse one instruction: `[ROOT] %name = shape opcode(arguments), attributes`."""
    found = _INSTRUCTION.match(line)
    assert found is not None, line
    rest = line[found.end() :]
    end = _after_bracket(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    end = _after_bracket(rest, opening)
    return Instruction(
        name=found.group(2),
        opcode=rest[:opening],
        shape=shape,
        arguments=rest[opening:end],
        attributes=rest[end:],
        is_root=found.group(1) is not None,
    )


def _after_bracket(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`."""
    opening, depth = text[start], 0
    closing = _CLOSING[opening]
    for index in range(start, len(text)):
        if text[index] == opening:
            depth += 1
        elif text[index] == closing:
            depth -= 1
            if depth == 0:
                return index + 1
    raise ValueError(
        f"the program text is cut off at {text[start : start + 60]!r}; pass all of "
        "compiled.as_text()"
    )
