"""Hugging Face model directories, written from the arrays of a checkpoint.

Files are allocated first, and every array is then copied to its places in them, a chunk of the
checkpoint at a time, so that memory is bounded by the largest chunk. config.json comes last: a
directory without it is incomplete.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.families.base import (
    IGNORED,
    Family,
    FamilyError,
    family_of,
    find_family,
    mathematics,
    model_config,
)
from model.families.layouts import Shape
from model.families.tensors import Piece, find_pieces
from safe_files import replace_file, sync
from training.hugging_face.companions import Source
from training.hugging_face.model_directory import CONFIG, INDEX, SINGLE, ModelDirectory
from training.hugging_face.tensor_files import DTYPES, TensorInfo, create_file
from training.stored_arrays import Chunk

MAX_FILE_BYTES = 5 * 10**9
SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16"}
"""Types of an export by our names."""
_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def describe_source(directory: Path, config: ModelConfig, leaves: Mapping[str, Shape]) -> Source:
    """Return the format of a model directory, for an export of the same format.

    leaves: shapes of our arrays by dotted path. Quantized weights will be written as bfloat16.
    """
    source = ModelDirectory(directory)
    dtypes: dict[str, str] = {}
    exceptions = {}
    for pieces in source.find_pieces(config, leaves).values():
        for piece in pieces:
            name = piece.name
            dtype = "BF16" if source.is_encoded(name) else source.infos[name].dtype
            if dtype != dtypes.setdefault(piece.entry.name, dtype):
                exceptions[name] = dtype
    return Source(source.keys, dtypes, exceptions)


@dataclass(frozen=True)
class Export:
    """Plan of a model directory.

    keys: content of config.json. pieces: pieces of each of our arrays, by its path. dtypes:
    safetensors type of each tensor, by its name.
    """

    keys: dict[str, Any]
    pieces: dict[str, list[Piece]]
    dtypes: dict[str, str]


def plan_export(
    config: ModelConfig,
    leaves: Mapping[str, Shape],
    source: Source | None,
    *,
    dtype: str | None = None,
    others: Mapping[str, Any] | None = None,
) -> Export:
    """Return what an export of these arrays writes.

    Args:
        config: the model.
        leaves: shapes of our arrays by dotted path.
        source: the format of the directory that the run was made from.
        dtype: float32 or bfloat16; None: as in the source, else `model.param_dtype`.
        others: keys of config.json that do not affect the mathematics.

    Raises:
        FamilyError: no family, or not the family of the source, can express this model.
    """
    family = family_of(source.config) if source is not None else find_family(config)
    keys = _keys(family, config, source, others or {})
    known = source.dtypes if source is not None else {}
    pieces = find_pieces(family.tensors, leaves, config, lambda piece: piece.entry.name in known)
    if unnamed := [path for path, part in pieces.items() if not part]:
        raise FamilyError(f"{family.architecture} has no tensor for {', '.join(unnamed)}")
    default = SAFETENSORS_TYPES[dtype or config.param_dtype]
    dtypes = {}
    for piece in (piece for part in pieces.values() for piece in part):
        found = default
        if dtype is None and source is not None:
            found = known.get(piece.entry.name, default)
            found = source.exceptions.get(piece.name, found)
        elif piece.entry.dtype is not None:
            found = piece.entry.dtype
        dtypes[piece.name] = found
    common = max(_TORCH_NAMES, key=list(dtypes.values()).count)
    keys["dtype" if "dtype" in keys else "torch_dtype"] = _TORCH_NAMES[common]
    return Export(keys, pieces, dtypes)


def _keys(
    family: Family, config: ModelConfig, source: Source | None, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return config.json: that of the source if it describes the same model.

    Ids of tokens in `others` are those of another tokenizer than that of the source.
    `max_position_embeddings` in `others` covers the longest rows of the run.
    """
    written = family.write(config)
    if source is None:
        return {**others, **written}
    tokens = {name: value for name, value in others.items() if name.endswith("_token_id")}
    known = {name: value for name, value in source.config.items() if name != "quantization_config"}
    keys = known | tokens
    longest = "max_position_embeddings"
    if longest in known and longest in others:
        keys[longest] = written.get(longest, others[longest])
    if mathematics(model_config(family.read(keys))) == mathematics(config):
        return keys
    return {name: value for name, value in keys.items() if name in IGNORED} | written


def write_tensors(
    directory: Path,
    export: Export,
    chunks: Callable[[str], Iterator[Chunk]],
    progress: Callable[[int, int], None] | None = None,
    max_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the safetensors files of an export, with their index if there are several.

    Args:
        directory: an existing folder.
        export: what to write.
        chunks: yields one of our arrays by its path, in blocks with their first indices.
        progress: called with (bytes written, bytes in all).
        max_bytes: size of a file above which another one is begun.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    infos = _create_files(directory, export, max_bytes)
    total, done = sum(info.num_bytes for info in infos.values()), 0
    for path, pieces in export.pieces.items():
        by_index = {piece.index: piece for piece in pieces}
        num_lead = len(pieces[0].index)
        for start, block in chunks(path):
            for offset in np.ndindex(block.shape[:num_lead]):
                piece = by_index[tuple(np.add(start[:num_lead], offset).tolist())]
                place = piece.view(infos[piece.name].open("r+"))
                done += _copy_block(place, start[num_lead:], block[offset])
            if progress is not None:
                progress(done, total)
    for file in {info.path for info in infos.values()}:  # before config.json calls it complete
        sync(file)


def _copy_block(place: np.ndarray, start: Sequence[int], block: np.ndarray) -> int:
    """Copy a block to where it begins in an array, without padding; return the bytes written."""
    target = place[tuple(map(slice, start, np.add(start, block.shape)))]
    target[...] = block[tuple(map(slice, target.shape))]
    return target.nbytes


def _create_files(directory: Path, export: Export, max_bytes: int) -> dict[str, TensorInfo]:
    """Create all files, and return where every tensor is."""
    shapes = {p.name: p.stored_shape for pieces in export.pieces.values() for p in pieces}
    files: list[dict[str, tuple[str, Shape]]] = [{}]
    sizes = [0]
    for name in sorted(shapes, key=_by_number):
        dtype, shape = export.dtypes[name], shapes[name]
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if files[-1] and sizes[-1] + size > max_bytes:
            files.append({})
            sizes.append(0)
        files[-1][name] = dtype, shape
        sizes[-1] += size
    if len(files) == 1:
        return create_file(directory / SINGLE, files[0])
    infos: dict[str, TensorInfo] = {}
    for number, tensors in enumerate(files, 1):
        path = directory / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        infos |= create_file(path, tensors)
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: info.path.name for name, info in infos.items()},
    }
    replace_file(directory / INDEX, json.dumps(index, indent=2))
    return infos


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"\.", name)]


def write_config(directory: Path, export: Export) -> None:
    """Write config.json, which completes a directory."""
    replace_file(directory / CONFIG, json.dumps(export.keys, indent=2) + "\n")
