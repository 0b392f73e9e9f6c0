"""Messages between the processes of a run: their fields, and the function that reads them.

A message is one line of JSON. `parse` accepts a message only if every field has its type and lies
in its range, and nothing else is there.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    TypeAdapter,
    ValidationError,
    model_validator,
)


def _check_printable(text: str) -> str:
    """Refuse line breaks and terminal escapes: host names appear in log lines."""
    if not text.isprintable():
        raise ValueError("has a character that cannot be printed")
    return text


def _escape_surrogates(text: Any) -> Any:
    """Escape what is not Unicode: file names in error messages may have any bytes."""
    return text.encode(errors="backslashreplace").decode() if isinstance(text, str) else text


_Text = Annotated[str, BeforeValidator(_escape_surrogates)]
_Host = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_check_printable)]
_Count = Annotated[int, Field(ge=1, lt=2**31)]


class _Fields(BaseModel):
    """Base of all messages. Strict: a boolean is no number, and "1" is no integer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Member(_Fields):
    """Facts about one process that every process of the group knows."""

    host: _Host
    clock_skew: float
    """Seconds by which its clock is ahead of the clock of process 0."""
    payload: dict[str, Any]


class Hello(_Fields):
    """First message of a process to process 0."""

    kind: Literal["hello"] = "hello"
    process_id: _Count
    num_processes: _Count
    host: _Host
    payload: dict[str, Any]
    clock: float
    """Its time in seconds since the epoch."""

    @model_validator(mode="after")
    def _check_process_id(self) -> Self:
        if self.process_id >= self.num_processes:
            raise ValueError("process_id is not below num_processes")
        return self


class Members(_Fields):
    """Answer of process 0 when all processes have connected, in the order of their ids."""

    kind: Literal["members"] = "members"
    members: list[Member]


class Heartbeat(_Fields):
    """Sign of life, with the phase that a process is in and its duration."""

    kind: Literal["heartbeat"] = "heartbeat"
    phase: _Text | None
    phase_seconds: NonNegativeFloat


class Gather(_Fields):
    """Contribution to an all-gather, to process 0."""

    kind: Literal["gather"] = "gather"
    tag: str
    value: Any


class Result(_Fields):
    """Result of an all-gather, from process 0."""

    kind: Literal["result"] = "result"
    tag: str
    values: list[Any]


class Abort(_Fields):
    """The run has failed, and the receiver exits with this code.

    Code 0 is no valid message: a process exits with 0 only when its own work is done. A scheduler
    would take a run that another process ended with 0 for a finished one.
    """

    kind: Literal["abort"] = "abort"
    reason: _Text
    exit_code: int = Field(ge=1, le=255)
    has_stalled: bool = False
    """Whether the receiver writes the stacks of its threads first."""


Message = Hello | Members | Heartbeat | Gather | Result | Abort
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """Return a message as one line of JSON, without its line break."""
    return json.dumps(message.model_dump()).encode()


def parse(text: bytes) -> Message:
    """Return the message of a line. Raises: ValueError with one line that names the field."""
    try:
        return _MESSAGE.validate_python(json.loads(text.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where or 'message'}: {first['msg']}"[:200]  # may quote what was received
        raise ValueError(problem.encode("unicode_escape").decode()) from None
    except RecursionError:
        raise ValueError("message: is nested too deeply") from None
