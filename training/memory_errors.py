"""Lack of device memory as one line: what needs it, and what to change."""

from typing import Any

import jax

from parallel.planning.memory import Buffer, largest_buffer
from parallel.planning.refusals import OutOfKernelMemory, read_largest_buffer, read_refusal
from training.logs import log
from training.spikes import TrainingError
from units import format_bytes

_REMEDY = (
    "lower data.global_batch_size, raise training.gradient_accumulation, set model.remat=full, or "
    "split arrays over more devices (mesh.fsdp, mesh.tp)"
)


def memory_error(
    error: jax.errors.JaxRuntimeError,
    phase: str | None,
    program: Any | None,
    remedy: str = _REMEDY,
) -> TrainingError | None:
    """Return the error that a user sees instead; None if memory is not what it is about.

    Args:
        error: Error of XLA while a program was compiled or ran.
        phase: What the process was working on.
        program: The program that ran, `jax.stages.Compiled`; None if it is not known.
        remedy: What the user can do.
    """
    message = str(error)
    refusal = read_refusal(message)
    if refusal is None:
        return None
    begin = f"{phase}: " if phase else ""
    if isinstance(refusal, OutOfKernelMemory):
        return TrainingError(f"{begin}{refusal}")
    parts = [f"{begin}out of device memory: {refusal.sentence.rstrip('.')}"]
    try:
        parts += _explanation(read_largest_buffer(message), program)
    except Exception as failure:  # the text of a program depends on the backend
        log.debug("the program cannot be described: %s", failure)
    if (phase or "").startswith("recheck"):
        remedy = f"set training.guard.recheck_every=0, {remedy}"
    return TrainingError("; ".join([*parts, remedy]))


def _explanation(buffer: Buffer | None, program: Any | None) -> list[str]:
    if buffer is None and program is not None:
        buffer = largest_buffer(program.as_text())
    described = [_describe(buffer)] if buffer is not None else []
    return [*described, *([_needs(program)] if program is not None else [])]


def _describe(buffer: Buffer) -> str:
    where = buffer.scope or "an operation outside of named parts of the model"
    direction = "backward" if buffer.is_backward else "forward"
    size = format_bytes(buffer.bytes)
    return f"the largest buffer is {size} of {buffer.shape} in {where} ({direction})"


def _needs(program: Any) -> str:
    """Return what a device needs for a program."""
    found = program.memory_analysis()
    arguments = format_bytes(found.argument_size_in_bytes)
    temporary = format_bytes(found.temp_size_in_bytes)
    return (
        f"a device needs {arguments} for the state and the batch and {temporary} for intermediate "
        "values"
    )
