"""Arrays of a checkpoint in chunks on disk, so that reading one needs the memory of a chunk."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import v1

from data.bucket_path import AnyPath
from training.bucket_arrays import key_value_store
from training.checkpoint_record import DamageError, read_error
from training.fingerprint import RunningFingerprint, fingerprints, leaf_name

Chunk = tuple[tuple[int, ...], np.ndarray]
"""Where a chunk begins in its array, and its values."""

_CHUNK_BYTES = 2**26


def by_name(state: Any) -> dict[str, Any]:
    """Return every array by its dotted path; the file format knows no class of any library."""
    return {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(state)}


def in_place_of(abstract: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """Return the tree of `abstract` with its leaves replaced by the arrays of the same path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[leaf_name(path)], abstract)


def verify(step: int, arrays: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    """Check arrays that were read from a checkpoint, by name, against its fingerprints.

    Raises: DamageError if an array is missing or differs.
    """
    # A partial load returns its argument where an array is not stored.
    if missing := [n for n, x in arrays.items() if not isinstance(x, jax.Array)]:
        raise DamageError(f"checkpoint {step} is damaged: {missing[0]} is missing")
    for name, found in fingerprints(arrays).items():
        if found != expected[name]:
            raise DamageError(f"checkpoint {step} is damaged: {name}: fingerprint mismatch")


def chunked(
    arrays: Mapping[str, jax.Array], write_bytes: int | None, context: v1.Context
) -> v1.Context:
    """Return orbax's options for a save of these arrays in chunks.

    write_bytes: bytes of arrays written at a time, at least the largest array; None: all.
    context: other options of the save.
    """
    storage = v1.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=_CHUNK_BYTES)
    saving = dataclasses.replace(context.array_options.saving, storage_options=storage)
    above = max(x.nbytes for x in arrays.values()) + 1  # orbax refuses what equals the limit
    limit = write_bytes and max(write_bytes, above)
    return v1.Context(
        context,
        array_options=v1.options.ArrayOptions(saving=saving),
        memory_options=v1.options.MemoryOptions(write_concurrent_bytes=limit),
    )


def _key_value_store(checkpoint: AnyPath) -> dict[str, Any]:
    """Return the folder of arrays as tensorstore names it."""
    if isinstance(checkpoint, Path):
        return {"driver": "file", "path": f"{os.path.abspath(checkpoint)}/state/"}
    return key_value_store(checkpoint / "state/")


def read_chunks(
    checkpoint: AnyPath, name: str, expected: str, sharding: jax.sharding.NamedSharding
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
    is_remote = not isinstance(checkpoint, Path)
    try:
        store = {"driver": "ocdbt", "base": _key_value_store(checkpoint), "path": f"{name}/"}
        # A checkpoint never changes: nothing is asked for twice.
        never = {"recheck_cached_data": "open", "recheck_cached_metadata": "open"}
        spec = {"driver": "zarr3", "kvstore": store, **never}
        array = tensorstore.open(spec, read=True).result()
    except Exception as error:
        raise read_error(what, error, is_remote=is_remote) from error
    found = RunningFingerprint(array.shape, sharding)
    sizes: Any = array.chunk_layout.read_chunk.shape
    begins = (range(0, n, size) for n, size in zip(array.shape, sizes, strict=True))
    for start in itertools.product(*begins):
        ends = np.minimum(np.add(start, sizes), array.shape).tolist()
        try:
            values = array[tuple(map(slice, start, ends))].read().result()
        except Exception as error:
            raise read_error(what, error, is_remote=is_remote) from error
        found.add(start, values)
        yield start, values
    if found.digits != expected:
        raise DamageError(f"checkpoint {checkpoint.name} is damaged: {name}: fingerprint mismatch")
