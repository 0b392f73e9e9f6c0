"""Compile programs for a TPU slice that is not attached, with their predicted time and memory."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from parallel.planning.links import chip_coords
from parallel.planning.memory import MemoryUse, memory_use
from parallel.planning.prediction import Prediction
from parallel.planning.slices import absent_devices, read_topology
from parallel.planning.timeline import predict
from parallel.sharding.devices import CHIPS, Chip

_SIZE = r"([\d.]+)([BKMGT]?)"
# The short form comes from a check before scheduling, the long form from the allocation after it.
_HBM = (
    re.compile(rf"memory required[^(]*\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_SPACE = re.compile(r"Ran out of memory in memory space (\w+)")
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfMemory(ValueError):
    """A program that needs more device memory (HBM) than a chip has.

    Attributes:
        required: Bytes per device that it needs, arguments included; None if libtpu does not say.
        available: Bytes per device that programs can use; None if libtpu does not say.
        sentence: The sentence of libtpu.
    """

    def __init__(self, sentence: str, required: float | None, available: float | None):
        super().__init__(
            f"the program does not fit: {sentence} Split its arrays over more devices, keep fewer "
            "of them, or name a slice whose chips have more memory"
        )
        self.sentence, self.required, self.available = sentence, required, available


class OutOfKernelMemory(ValueError):
    """A kernel whose blocks need more on-chip memory (VMEM, SMEM) than a chip has."""


@dataclass(frozen=True)
class CompiledProgram:
    """The predicted time and the memory of a program on a slice.

    Attributes:
        prediction: Where the time goes.
        memory: What one device holds.
        compile_seconds: CPU seconds of compiling, however busy the machine was.
        text: The scheduled program.
    """

    prediction: Prediction
    memory: MemoryUse
    compile_seconds: float
    text: str


@dataclass(frozen=True)
class SliceCompiler:
    """Compiles programs for a mesh of absent devices.

    Attributes:
        topology: The name of the slice, such as "v5p:2x2x2".
        mesh: The mesh of its devices.
    """

    topology: str
    mesh: jax.sharding.Mesh

    def compile(
        self, function: Any, arguments: Sequence[Any], options: Mapping[str, Any] | None = None
    ) -> CompiledProgram:
        """Compile a jitted function of abstract arguments; options: compiler options.

        Raises:
            OutOfMemory: It needs more memory than a chip has.
            OutOfKernelMemory: One of its kernels needs more on-chip memory than a chip has.
        """
        with jax.set_mesh(self.mesh):
            lowered = function.lower(*arguments)
            begin = time.process_time()
            try:
                program = lowered.compile(options)
            except jax.errors.JaxRuntimeError as error:
                refusal = read_refusal(str(error))
                if refusal is None:
                    raise
                raise refusal from error
        seconds = time.process_time() - begin
        named, text = read_topology(self.topology), program.as_text()
        one_slice = self.mesh.devices.flat[: self.mesh.size // named.num_slices]
        prediction = predict(
            text, chip_of(self.topology), named.sides, places=chip_coords(one_slice)
        )
        return CompiledProgram(prediction, memory_use(program), seconds, text)


def read_refusal(message: str) -> OutOfMemory | OutOfKernelMemory | None:
    """Return the exception for a message of libtpu, or None if memory is not what it is about."""
    if not message.startswith("RESOURCE_EXHAUSTED"):
        return None
    sentence = _first_sentence(message)
    for form in _HBM:
        if found := form.search(message):
            required, available = (
                float(found[i]) * _UNITS[found[i + 1]] for i in range(1, len(found.groups()), 2)
            )
            return OutOfMemory(sentence, required, available)
    space = _SPACE.search(message)
    if space is None or space[1] == "hbm":
        return OutOfMemory(sentence, None, None)
    kernel = re.search(r'op_name="([^"]+)"', message)
    where = f" ({kernel[1]})" if kernel else ""
    return OutOfKernelMemory(
        f"a kernel{where} needs too much on-chip memory: {sentence} Choose smaller blocks for it, "
        "or another implementation"
    )


def chip_of(topology: str) -> Chip:
    """Return the data sheet of the chips of a slice.

    Raises:
        ValueError: Their figures are not known.
    """
    kind = absent_devices(topology)[0].device_kind
    if kind not in CHIPS:
        raise ValueError(f"topology {topology}: no figures for {kind}; known: {', '.join(CHIPS)}")
    return CHIPS[kind]


def _first_sentence(message: str) -> str:
    """Return the line of a message that says what ran out, without status codes."""
    line = message.partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
    line = line.removeprefix("XLA:TPU compile permanent error. ").strip()
    return line if line.endswith(".") else f"{line}."
