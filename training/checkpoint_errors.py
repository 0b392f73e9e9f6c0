"""Errors of checkpoints: damage on disk is told apart from a machine that cannot read."""

import errno
import re

_NOT_DAMAGE = re.compile(r"RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED")
_NOT_DAMAGE_ERRNO = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
_NOT_DAMAGE_ERRNO |= {errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message is one line with the reason."""


class DamageError(CheckpointError):
    """The content of a checkpoint differs from what was written."""


def read_error(what: str, error: BaseException) -> CheckpointError:
    """Return the error for a failed read: DamageError unless this machine is at fault.

    Missing memory, permissions or an unavailable file system are faults of the machine.
    """
    cause = _root_cause(error)
    is_local = isinstance(cause, MemoryError) or _NOT_DAMAGE.search(str(cause)) is not None
    is_local |= isinstance(cause, OSError) and cause.errno in _NOT_DAMAGE_ERRNO
    return (CheckpointError if is_local else DamageError)(f"{what}: {short_reason(error)}")


def short_reason(error: BaseException) -> str:
    """Return type and first line of the root cause, without tensorstore's settings."""
    cause = _root_cause(error)
    line = str(cause).strip().partition("\n")[0]
    line = re.sub(r" \[(source locations|tensorstore_spec).*", "", line)
    return f"{type(cause).__name__}: {line}"


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
