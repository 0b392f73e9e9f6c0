"""The record of a checkpoint, and the errors of reading one.

The record describes the run, and holds shape, dtype and fingerprint of every array. Errors
distinguish damage on disk from a machine that cannot read, such as one without memory.
"""

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.bucket_path import AnyPath, BucketPath, write_file
from model.lora import is_adapter
from model.multi_token import MODULES
from safe_files import json_digest

_NOT_DAMAGE = re.compile(r"RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED")
# Codes of tensorstore's errors, and those that mean damage if they come from a bucket.
_CODE = re.compile(r"\b([A-Z]+_?[A-Z]+):")
_STATUS = re.compile(r"http_response_code='(\d+)'")
_DAMAGE_CODES = {"DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "INVALID_ARGUMENT"}
_NOT_DAMAGE_ERRNO = {errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
_NOT_DAMAGE_ERRNO |= {errno.ENOMEM, errno.EMFILE, errno.ENFILE}


_METADATA = "_CHECKPOINT_METADATA"
COMMIT_FILE = "commit_success.txt"
"""The last file of a finished checkpoint in a bucket."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message is one line with the reason."""


class DamageError(CheckpointError):
    """The content of a checkpoint differs from what was written."""


def read_error(what: str, error: BaseException, *, is_remote: bool = False) -> CheckpointError:
    """Return the error for a failed read: DamageError unless this machine is at fault.

    Missing memory, permissions or an unavailable file system are faults of the machine. Errors of
    the service of a bucket (is_remote) are no damage either.
    """
    cause = _root_cause(error)
    if is_remote:
        code = _CODE.search(str(cause))
        known = FileNotFoundError | ValueError | LookupError | TypeError
        status = _STATUS.search(str(cause))
        is_refusal = status is not None and status[1] not in ("404", "416")
        is_refusal |= code is not None and code[1] not in _DAMAGE_CODES
        if is_refusal or not isinstance(cause, known):
            return CheckpointError(f"{what}: {short_reason(error)}")
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


Leaves = Mapping[str, list[Any]]
"""[shape, dtype] of every array, by its dotted path; JSON values."""


def saved_steps(folder: AnyPath) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending, without opening it.

    Saves in progress are left out.
    """
    if isinstance(folder, Path) and not folder.exists():
        return []
    found = (path for path in folder.iterdir() if path.name.isdecimal())
    if isinstance(folder, BucketPath):  # a save that was interrupted has its name already
        found = (path for path in found if (path / COMMIT_FILE).exists())
    return sorted(int(path.name) for path in found)


def read_record(folder: AnyPath, step: int) -> dict[str, Any]:
    """Return the record in the folder of a checkpoint.

    Raises:
        CheckpointError: it is missing, unreadable or damaged.
    """
    try:
        # orbax's own reader opens every array and prints the ones that it cannot open.
        metadata = json.loads((folder / _METADATA).read_bytes())["custom_metadata"]
        record, expected = metadata["record"], metadata["sha256"]
    except Exception as error:
        is_remote = isinstance(folder, BucketPath)
        what = f"checkpoint {step} has no record"
        raise read_error(what, error, is_remote=is_remote) from error
    if json_digest(record) != expected or record["step"] != step:
        raise DamageError(f"checkpoint {step} is damaged: checksum mismatch of its record")
    return record


def amend_record(folder: AnyPath, step: int, changes: Mapping[str, Any]) -> None:
    """Change values of the record in the folder of a checkpoint, all of them or none.

    Raises:
        CheckpointError: the record is missing, unreadable or damaged.
        OSError: it cannot be written, and is as before.
    """
    record = {**read_record(folder, step), **changes}
    file = folder / _METADATA
    metadata = json.loads(file.read_bytes())
    metadata["custom_metadata"] |= {"record": record, "sha256": json_digest(record)}
    write_file(file, json.dumps(metadata))


def shapes_and_dtypes(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return [shape, dtype] of every array, as JSON values."""
    return {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()}


def holds_only_parameters(leaves: Leaves) -> bool:
    """Return whether a checkpoint holds no optimizer state: training starts from it."""
    return all(name.startswith("params.") for name in leaves)


def check_leaves(step: int, found: Leaves, wanted: Leaves) -> None:
    """Check that the arrays of a checkpoint are those of this model, or its parameters.

    Without the check orbax would silently cast a differing dtype.

    Raises:
        ValueError: names the first array that is missing, extra, or differs, parameters first; or
            says that adapters or a moving average are missing or extra.
    """
    if holds_only_parameters(found):
        wanted = {name: leaf for name, leaf in wanted.items() if name.startswith("params.")}
    has_adapters, needs_adapters = (any(map(is_adapter, x)) for x in (found, wanted))
    if has_adapters and not needs_adapters:
        raise ValueError(
            f"checkpoint {step} has adapters, but lora.rank is 0; restore the section lora of the "
            "run's config.yaml, or give another run.dir"
        )
    if needs_adapters and not has_adapters:
        raise ValueError(
            f"checkpoint {step} has no adapters, but lora.rank is set; to go on without, remove "
            "the section lora; to train adapters on this run, set training.init_from to this "
            "run.dir, and run.dir to a new one"
        )
    start = f"params.{MODULES}."
    has_modules, needs_modules = (any(y.startswith(start) for y in x) for x in (found, wanted))
    if has_modules and not needs_modules:
        raise ValueError(
            f"checkpoint {step} has modules of multi-token prediction, but model.mtp_loss_weights "
            "is empty; restore that key of the run's config.yaml, or, to go on without them, set "
            "training.init_from to this run.dir, and run.dir to a new one"
        )
    if needs_modules and not has_modules:
        raise ValueError(
            f"checkpoint {step} has no modules of multi-token prediction, but "
            "model.mtp_loss_weights is set; set it to [], or, to add them to this model, set "
            "training.init_from to this run.dir, and run.dir to a new one"
        )
    names = found.keys() | wanted.keys()
    for name in sorted(names, key=lambda name: (not name.startswith("params."), name)):
        if name.startswith("ema.") and name not in found:
            raise ValueError(
                f"optimizer.ema_decay is set, but checkpoint {step} has no moving average; set "
                "optimizer.ema_decay=null, or give another run.dir"
            )
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"checkpoint {step} has {_shown(found.get(name))} for "
                f"{name.removeprefix('params.')}, but this configuration has "
                f"{_shown(wanted.get(name))}; restore the values of the run's config.yaml, or give "
                "another run.dir"
            )


def _shown(leaf: list[Any] | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1]} {tuple(leaf[0])}"
