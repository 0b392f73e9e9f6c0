"""Memory of a compiled program on one device."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a program holds on one device.

    Attributes:
        arguments: Of its arguments.
        outputs: Of its results that are not written into donated arguments.
        temporary: Of everything in between, at the moment when that is largest.
        program: Of its code.
    """

    arguments: int
    outputs: int
    temporary: int
    program: int

    @property
    def held(self) -> int:
        """Bytes of arguments and outputs."""
        return self.arguments + self.outputs

    @property
    def total(self) -> int:
        """Bytes that are compared with the memory of the chip."""
        return self.held + self.temporary + self.program


def memory_use(program: Any) -> MemoryUse:
    """Return the memory of a program, `jax.stages.Compiled`."""
    found = program.memory_analysis()
    return MemoryUse(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        program=found.generated_code_size_in_bytes,
    )
