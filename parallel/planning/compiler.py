"""Compile programs for a TPU slice that is not attached, with their predicted time and memory."""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from parallel.planning.buffer_assignment import read_buffer_assignment
from parallel.planning.links import chip_coords
from parallel.planning.memory import MemoryUse, assigned_memory, memory_use
from parallel.planning.parts import PartTable
from parallel.planning.prediction import Prediction
from parallel.planning.refusals import OutOfMemory, read_refusal
from parallel.planning.result_cache import Result, ResultCache, program_key
from parallel.planning.slices import absent_devices, read_topology
from parallel.planning.timeline import predict
from parallel.sharding.devices import CHIPS, Chip


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
        parts: The parts of the model by scopes, by which predictions divide the time.
        cache: Results of earlier compilations; None: compile every time.
    """

    topology: str
    mesh: jax.sharding.Mesh
    parts: PartTable = ()
    cache: ResultCache | None = None

    def compile(
        self,
        function: Any,
        arguments: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        *,
        classes: Mapping[str, Any] = MappingProxyType({}),
    ) -> CompiledProgram:
        """Compile a jitted function of abstract arguments.

        Args:
            function: What `jax.jit` returns.
            arguments: Its arguments as `jax.ShapeDtypeStruct`s with shardings.
            options: Compiler options.
            classes: The arguments by class, for `MemoryUse.classes`: names and trees of arrays.

        Raises:
            OutOfMemory: It needs more memory than a chip has.
            OutOfKernelMemory: One of its kernels needs more on-chip memory than a chip has.
        """
        with jax.set_mesh(self.mesh):
            lowered = function.lower(*arguments)

        def make() -> Result:
            return _compile(lowered, options or {}, classes)

        if self.cache is None:
            result = make()
        else:
            devices = [str(device) for device in self.mesh.devices.flat]
            key = program_key(
                lowered.as_text(), str(read_topology(self.topology)), devices, options, classes
            )
            result = self.cache.get(key, make)
        named = read_topology(self.topology)
        one_slice = self.mesh.devices.flat[: self.mesh.size // named.num_slices]
        prediction = predict(
            result.text,
            chip_of(self.topology),
            named.sides,
            places=chip_coords(one_slice),
            parts=self.parts,
            axes=self.mesh.shape,
        )
        return CompiledProgram(prediction, result.memory, result.compile_seconds, result.text)


def _compile(lowered: Any, options: Mapping[str, Any], classes: Mapping[str, Any]) -> Result:
    """Compile a lowered program and account for its memory.

    libtpu writes its buffer assignment into a folder, also of a program that does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        begin = time.process_time()
        try:
            with _nothing_cached():
                program = lowered.compile({**options, **dump})
        except jax.errors.JaxRuntimeError as error:
            refusal = read_refusal(str(error))
            if refusal is None:
                raise
            if isinstance(refusal, OutOfMemory):
                refusal.memory = _refused_memory(Path(folder), classes)
            raise refusal from error
        seconds = time.process_time() - begin
        assignment = read_buffer_assignment(Path(folder))
    text = program.as_text()
    return Result(text, memory_use(program, assignment, text, classes), seconds)


def _refused_memory(folder: Path, classes: Mapping[str, Any]) -> MemoryUse | None:
    """Return the memory of a program that does not fit; None if libtpu wrote nothing of it."""
    assignment = read_buffer_assignment(folder)
    if assignment is None:
        return None
    (scheduled,) = folder.glob("*.after_optimizations.txt")
    return assigned_memory(assignment, scheduled.read_text(), classes)


@contextmanager
def _nothing_cached() -> Iterator[None]:
    """Keep programs for absent devices out of jax's compilation cache.

    jax (0.10 and 0.12) writes them there but cannot read them back, and warns each time.
    """
    option = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[option]
    jax.config.update(option, math.inf)
    try:
        yield
    finally:
        jax.config.update(option, before)


def chip_of(topology: str) -> Chip:
    """Return the data sheet of the chips of a slice.

    Raises:
        ValueError: Their figures are not known.
    """
    kind = absent_devices(topology)[0].device_kind
    if kind not in CHIPS:
        raise ValueError(f"topology {topology}: no figures for {kind}; known: {', '.join(CHIPS)}")
    return CHIPS[kind]
