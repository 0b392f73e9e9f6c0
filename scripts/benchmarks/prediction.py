"""Predictions as the benchmarks show them: lines of a table, figures for JSON, derivatives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax

from parallel.linear.scheduling import scheduling_groups
from parallel.planning.compiler import CompiledProgram, SliceCompiler

Pass = Literal["fwd", "fwd+bwd"]
PASSES: tuple[Pass, ...] = get_args(Pass)
_PARTS = ("total", "matmul", "other", "kernels", "exposed", "dma_wait")
HEADER = "".join(f"{name:>9}" for name in (*_PARTS, "temp GiB", "compile"))


def columns(compiled: CompiledProgram) -> str:
    """Return the figures as a line of a table with `HEADER`."""
    times = "".join(f"{value:9.2f}" for value in _milliseconds(compiled).values())
    return f"{times}{compiled.memory.temporary / 2**30:9.2f}{compiled.compile_seconds:8.0f}s"


def figures(compiled: CompiledProgram) -> dict[str, float]:
    """Return the figures by name, for JSON."""
    return {
        "exposed_share": compiled.prediction.exposed / compiled.prediction.total,
        "compile_seconds": compiled.compile_seconds,
        "temporary_gib": compiled.memory.temporary / 2**30,
        **_milliseconds(compiled),
    }


def _milliseconds(compiled: CompiledProgram) -> dict[str, float]:
    return {f"{name}_ms": getattr(compiled.prediction, name) * 1e3 for name in _PARTS}


def compile_pass(
    compiler: SliceCompiler,
    name: Pass,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> CompiledProgram:
    """Compile a function alone ("fwd"), or with derivatives of all arguments ("fwd+bwd").

    The cotangent is one more argument, laid out like the output. Hops are scheduled in groups, as
    in a training step.
    """

    def forward(*arguments: Any) -> Any:
        return function(*arguments)

    def both(*arguments_and_cotangent: Any) -> Any:
        *arguments, cotangent = arguments_and_cotangent
        out, pull = jax.vjp(function, *arguments)
        return out, pull(cotangent)

    program = forward
    if name == "fwd+bwd":
        with jax.set_mesh(compiler.mesh):
            arguments = [*arguments, jax.eval_shape(function, *arguments)]
        program = both
    with scheduling_groups():
        return compiler.compile(jax.jit(program), arguments, options)
