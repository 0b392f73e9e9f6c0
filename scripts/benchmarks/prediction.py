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
from parallel.planning.timeline import predict
from parallel.sharding.chips import CHIPS, Chip
from parallel.sharding.devices import absent_devices, read_topology

Pass = Literal["fwd", "fwd+bwd"]
PASSES: tuple[Pass, ...] = get_args(Pass)
_PARTS = ("total", "matmul", "other", "kernels", "exposed", "dma_wait")
HEADER = "".join(f"{name:>9}" for name in (*_PARTS, "temp GiB", "compile"))


@dataclass(frozen=True)
class Compiled:
    """A program that is compiled for an absent slice, and its predicted time.

    Attributes:
        program: The compiled program.
        prediction: Where its time goes.
        temporary_gib: Temporary memory per device.
        compile_seconds: CPU seconds of tracing and compiling, however busy the machine is.
    """

    program: Any
    prediction: Prediction
    temporary_gib: float
    compile_seconds: float

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
    def _milliseconds(self) -> dict[str, float]:
        return {f"{name}_ms": getattr(self.prediction, name) * 1e3 for name in _PARTS}


def compile_for(
    topology: str,
    mesh: jax.sharding.Mesh,
    function: Any,
    arguments: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a jitted function of abstract arguments for a mesh of absent devices.

    options: compiler options.
    """
    begin = time.process_time()
    with jax.set_mesh(mesh):
        program = function.lower(*arguments).compile(options)
    seconds = time.process_time() - begin
    named = read_topology(topology)
    one_slice = mesh.devices.flat[: mesh.size // named.num_slices]
    prediction = predict(
        program.as_text(), chip_of(topology), named.sides, places=chip_coords(one_slice)
    )
    memory = program.memory_analysis().temp_size_in_bytes / 2**30
    return Compiled(program, prediction, memory, seconds)


def compile_pass(
    name: Pass,
    topology: str,
    mesh: jax.sharding.Mesh,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a function alone ("fwd"), or with the derivatives of all arguments ("fwd+bwd").

    The cotangent is one more argument, laid out like the output.
    """

    def forward(*arguments: Any) -> Any:
        return function(*arguments)

    def both(*arguments_and_cotangent: Any) -> Any:
        *arguments, cotangent = arguments_and_cotangent
        out, pull = jax.vjp(function, *arguments)
        return out, pull(cotangent)

    if name == "fwd":
        return compile_for(topology, mesh, jax.jit(forward), arguments, options=options)
    with jax.set_mesh(mesh):
        cotangent = jax.eval_shape(function, *arguments)
    arguments = [*arguments, cotangent]
    return compile_for(topology, mesh, jax.jit(both), arguments, options=options)


def chip_of(topology: str) -> Chip:
    """Return the data sheet of the chips of a slice.

    Raises:
        ValueError: Their figures are not known.
    """
    kind = absent_devices(topology)[0].device_kind
    if kind not in CHIPS:
        raise ValueError(f"topology {topology}: no figures for {kind}; known: {', '.join(CHIPS)}")
    return CHIPS[kind]
