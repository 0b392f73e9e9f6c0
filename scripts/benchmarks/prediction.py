"""Compile programs for a TPU slice that is not here, and predict their time.

libtpu compiles; parallel/planning reads the schedule of the compiled program. Both are functions of
their inputs, so a record of earlier predictions can stand in for a compilation of minutes.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from _clone import ROOT

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
    """The predicted time and the memory of a program on an absent slice.

    Attributes:
        prediction: Where the time goes.
        temporary_gib: Temporary memory per device.
        held_gib: Memory per device of arguments and outputs.
        compile_seconds: CPU seconds of compiling, however busy the machine was.
        text: The compiled program, or None if the figures come from a record.
    """

    prediction: Prediction
    temporary_gib: float
    held_gib: float
    compile_seconds: float
    text: str | None = None

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


class SliceCompiler:
    """Compiles programs for a mesh of absent devices.

    Attributes:
        topology: The name of the slice, such as "v5p:2x2x2".
        mesh: The mesh of its devices.
        record: A JSON file of earlier predictions by label. A program that it has is not compiled
            again, as long as the program, libtpu and the predictor are the same. New predictions
            are added. None compiles always.
    """

    def __init__(self, topology: str, mesh: jax.sharding.Mesh, record: Path | None = None):
        self.topology, self.mesh, self.record = topology, mesh, record

    def compile(
        self,
        label: str,
        function: Any,
        arguments: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        """Compile a jitted function of abstract arguments.

        label: identifies the program in the record. options: compiler options.
        """
        # Pallas kernels carry source locations, which would make digests depend on paths and lines.
        with jax.set_mesh(self.mesh), _without_locations():
            lowered = function.lower(*arguments)
        digest = self._digest(lowered, options)
        recorded = self._read().get(label)
        if recorded is not None and recorded["digest"] == digest:
            return Compiled(Prediction(**recorded["prediction"]), **recorded["figures"])
        compiled = self._compile(lowered, options)
        self._write(label, digest, compiled)
        return compiled

    def compile_pass(
        self,
        label: str,
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

        label = f"{self.topology} {label} {name}"
        if name == "fwd":
            return self.compile(label, jax.jit(forward), arguments, options=options)
        with jax.set_mesh(self.mesh):
            cotangent = jax.eval_shape(function, *arguments)
        return self.compile(label, jax.jit(both), [*arguments, cotangent], options=options)

    def _compile(self, lowered: Any, options: Mapping[str, Any] | None) -> Compiled:
        begin = time.process_time()
        with jax.set_mesh(self.mesh):
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

    def _digest(self, lowered: Any, options: Mapping[str, Any] | None) -> str:
        """Return a digest of all that a prediction depends on."""
        sources = [*(ROOT / "parallel/planning").glob("*.py"), ROOT / "parallel/sharding/chips.py"]
        parts = [
            self.topology,
            *(str(device) for device in self.mesh.devices.flat),
            version("jax"),
            version("libtpu"),
            json.dumps(options and dict(options), sort_keys=True),
            *(path.read_text() for path in sorted(sources)),
            lowered.as_text(),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _read(self) -> dict[str, Any]:
        is_there = self.record is not None and self.record.exists()
        return json.loads(self.record.read_text()) if self.record and is_there else {}

    def _write(self, label: str, digest: str, compiled: Compiled) -> None:
        if self.record is None:
            return
        values = {
            field.name: getattr(compiled.prediction, field.name) for field in fields(Prediction)
        }
        entry = {
            "digest": digest,
            "figures": {
                name: getattr(compiled, name)
                for name in ("temporary_gib", "held_gib", "compile_seconds")
            },
            "prediction": {
                name: dict(value) if isinstance(value, Mapping) else value
                for name, value in values.items()
            },
        }
        entries = self._read() | {label: entry}
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    limit = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)


def chip_of(topology: str) -> Chip:
    """Return the data sheet of the chips of a slice.

    Raises:
        ValueError: Their figures are not known.
    """
    kind = absent_devices(topology)[0].device_kind
    if kind not in CHIPS:
        raise ValueError(f"topology {topology}: no figures for {kind}; known: {', '.join(CHIPS)}")
    return CHIPS[kind]
