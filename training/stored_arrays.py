"""Arrays of a checkpoint, read from disk in chunks, so that memory is bounded by a chunk."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from training.checkpoint_record import DamageError, read_error
from training.fingerprint import RunningFingerprint

Chunk = tuple[tuple[int, ...], np.ndarray]
"""Where a chunk begins in its array, and its values."""


def read_chunks(
    checkpoint: Path, name: str, expected: str, sharding: jax.sharding.NamedSharding
) -> Iterator[Chunk]:
    """Yield an array of a checkpoint in the chunks in which it is stored, each once.

    Args:
        checkpoint: directory of the checkpoint.
        name: dotted path of the array.
        expected: its fingerprint.
        sharding: one device, which computes fingerprints.

    Raises:
        CheckpointError: it cannot be read, or is damaged. A fingerprint that differs is found after
            the last chunk.
    """
    what = f"checkpoint {checkpoint.name} cannot be read"
    try:
        folder = {"driver": "file", "path": f"{os.path.abspath(checkpoint)}/state/"}
        store = {"driver": "ocdbt", "base": folder, "path": f"{name}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}, read=True).result()
    except Exception as error:
        raise read_error(what, error) from error
    found = RunningFingerprint(array.shape, sharding)
    sizes: Any = array.chunk_layout.read_chunk.shape
    begins = (range(0, n, size) for n, size in zip(array.shape, sizes, strict=True))
    for start in itertools.product(*begins):
        ends = np.minimum(np.add(start, sizes), array.shape).tolist()
        try:
            values = array[tuple(map(slice, start, ends))].read().result()
        except Exception as error:
            raise read_error(what, error) from error
        found.add(start, values)
        yield start, values
    if found.digits != expected:
        raise DamageError(f"checkpoint {checkpoint.name} is damaged: {name}: fingerprint mismatch")
