"""Compile programs for a TPU slice that is not here, and predict their time.

libtpu compiles; parallel/planning reads the schedule of the compiled program.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from parallel.planning.links import chip_coords
from parallel.planning.prediction import Prediction
from parallel.planning.slices import absent_devices, read_topology
from parallel.planning.timeline import predict
from parallel.sharding.devices import CHIPS, Chip

Pass = Literal["fwd", "fwd+bwd"]
PASSES: tuple[Pass, ...] = get_args(Pass)
_PARTS = ("total", "matmul", "other", "kernels", "exposed", "dma_wait")
HEADER = "".join(f"{name:>9}" for name in (*_PARTS, "temp GiB", "compile"))


@dataclass(frozen=True)
class Compiled:
    """The predicted time and the memory of a program on an absent slice.

    Attributes:
        prediction: Where the time goes.
        temporary_gib: Temporary memory per device.
        held_gib: Memory per device of arguments and outputs.
        compile_seconds: CPU seconds of compiling, however busy the machine was.
        text: The compiled program.
    """

    prediction: Prediction
    temporary_gib: float
    held_gib: float
    compile_seconds: float
    text: str

    @property
    def columns(self) -> str:
        """The figures as a line of a table with `HEADER`."""
        times = "".join(f"{value:9.2f}" for value in self._milliseconds.values())
        return f"{times}{self.temporary_gib:9.2f}{self.compile_seconds:8.0f}s"

    @property
    def figures(self) -> dict[str, float]:
        """The figures by name, for JSON."""
        return {
            "exposed_share": self.prediction.exposed / self.prediction.total,
            "compile_seconds": self.compile_seconds,
            "temporary_gib": self.temporary_gib,
            **self._milliseconds,
        }

    @property
    def exposed_by_ms(self) -> dict[str, float]:
        """Exposed milliseconds by kind of collective."""
        return {kind: seconds * 1e3 for kind, seconds in self.prediction.exposed_by.items()}

    @property
    def _milliseconds(self) -> dict[str, float]:
        return {f"{name}_ms": getattr(self.prediction, name) * 1e3 for name in _PARTS}


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
    ) -> Compiled:
        """Compile a jitted function of abstract arguments; options: compiler options."""
        with jax.set_mesh(self.mesh):
            lowered = function.lower(*arguments)
            begin = time.process_time()
            program = lowered.compile(options)
        seconds = time.process_time() - begin
        named, text = read_topology(self.topology), program.as_text()
        one_slice = self.mesh.devices.flat[: self.mesh.size // named.num_slices]
        prediction = predict(
            text, chip_of(self.topology), named.sides, places=chip_coords(one_slice)
        )
        m = program.memory_analysis()
        held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        return Compiled(prediction, m.temp_size_in_bytes / 2**30, held / 2**30, seconds, text=text)

    def compile_pass(
        self,
        name: Pass,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        """Compile a function alone ("fwd"), or with derivatives of all arguments ("fwd+bwd").

        The cotangent is one more argument, laid out like the output.
        """

        def forward(*arguments: Any) -> Any:
            return function(*arguments)

        def both(*arguments_and_cotangent: Any) -> Any:
            *arguments, cotangent = arguments_and_cotangent
            out, pull = jax.vjp(function, *arguments)
            return out, pull(cotangent)

        if name == "fwd":
            return self.compile(jax.jit(forward), arguments, options)
        with jax.set_mesh(self.mesh):
            cotangent = jax.eval_shape(function, *arguments)
        return self.compile(jax.jit(both), [*arguments, cotangent], options)


def chip_of(topology: str) -> Chip:
    """Return the data sheet of the chips of a slice.

    Raises:
        ValueError: Their figures are not known.
    """
    kind = absent_devices(topology)[0].device_kind
    if kind not in CHIPS:
        raise ValueError(f"topology {topology}: no figures for {kind}; known: {', '.join(CHIPS)}")
    return CHIPS[kind]
