"""The record of a checkpoint: what the run was, and shape, dtype and fingerprint of every array."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.checkpoint_errors import DamageError, read_error

Leaves = Mapping[str, list[Any]]
"""[shape, dtype] of every array, by its dotted path; JSON values."""


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """Return the record in the folder of a checkpoint.

    Raises:
        CheckpointError: it is missing, unreadable or damaged.
    """
    try:
        # orbax's own reader opens every array and prints the ones that it cannot open.
        metadata = json.loads((folder / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"]
        record, expected = metadata["record"], metadata["sha256"]
    except Exception as error:
        raise read_error(f"checkpoint {step} has no record", error) from error
    if checksum(record) != expected or record["step"] != step:
        raise DamageError(f"checkpoint {step} is damaged: checksum mismatch of its record")
    return record


def checksum(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 that is stored beside a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def shapes_and_dtypes(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return [shape, dtype] of every array, as JSON values."""
    return {name: [list(x.shape), str(x.dtype)] for name, x in arrays.items()}


def check_leaves(step: int, found: Leaves, wanted: Leaves) -> None:
    """Check that the arrays of a checkpoint are those of this model.

    Without the check orbax would silently cast a differing dtype.

    Raises:
        ValueError: names the first array that is missing, extra, or differs; parameters first.
    """
    names = found.keys() | wanted.keys()
    for name in sorted(names, key=lambda name: (not name.startswith("params."), name)):
        if name.startswith("ema.") and name not in found:
            raise ValueError(
                f"optimizer.ema_decay is set, but checkpoint {step} has no moving average; set "
                "optimizer.ema_decay=null, or give another run.dir"
            )
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"checkpoint {step} holds {name.removeprefix('params.')} as "
                f"{_shown(found.get(name))}, but the config asks for {_shown(wanted.get(name))}; "
                "restore the values of the run's config.yaml, or give another run.dir"
            )


def _shown(leaf: list[Any] | None) -> str:
    return "nothing" if leaf is None else f"({tuple(leaf[0])}, {leaf[1]!r})"
