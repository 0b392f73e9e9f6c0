"""Safetensors files: tensors mapped into memory, one at a time, for reading and for writing.

The format is 8 bytes with the length of a JSON header, the header, and the bytes of the tensors. A
mapping reads or writes only the bytes that are indexed, and is closed with its last view, so memory
is bounded by the largest tensor. The safetensors library can only write tensors that are all in
memory at once.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Types of tensors by their safetensors names."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of weights that need no decoding."""
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorInfo:
    """Type and place of a tensor. dtype: a key of `DTYPES`. offset: its first byte in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def open(self, mode: str = "r") -> np.ndarray:
        """Map the tensor into memory; `r+` to write to it."""
        if not self.num_bytes:
            return np.empty(self.shape, DTYPES[self.dtype])
        return np.memmap(self.path, DTYPES[self.dtype], mode, self.offset, self.shape)  # type: ignore[call-overload]  # the mode is one of two


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file by name.

    Raises:
        ValueError: the file is damaged or truncated, or holds a type that is not supported.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(
                f"{path} ({size} bytes) is not a complete safetensors file; download it again"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path} has a damaged header ({error}); download it again") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a damaged header (no JSON object); download it again")
    entries = {name: x for name, x in header.items() if name != "__metadata__"}
    tensors = {name: _read_entry(path, name, entries[name], 8 + length) for name in entries}
    for name, info in tensors.items():
        if info.offset + info.num_bytes > size:
            raise ValueError(
                f"{path} is truncated: {name} ends at byte {info.offset + info.num_bytes}, but the "
                f"file has {size}; download it again"
            )
    end = 8 + length
    for name, info in sorted(tensors.items(), key=lambda x: (x[1].offset, x[1].num_bytes)):
        if info.offset != end:
            raise ValueError(
                f"{path}: {name} begins at byte {info.offset} instead of {end}, where the tensor "
                "before it ends; download it again"
            )
        end += info.num_bytes
    if end != size:
        raise ValueError(f"{path} has {size - end} bytes after its tensors; download it again")
    return tensors


def _read_entry(path: Path, name: str, entry: Any, first: int) -> TensorInfo:
    """Return a tensor of a header. first: byte of the file after the header. Raises: ValueError."""
    values = entry if isinstance(entry, dict) else {}
    dtype = values.get("dtype")
    shape, offsets = (_whole_numbers(values.get(key)) for key in ("shape", "data_offsets"))
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"{path}: {name} has the type {dtype}, which is not supported")
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{path} has a damaged header ({name}: {entry}); download it again")
    info = TensorInfo(path, dtype, shape, first + offsets[0])
    if offsets[0] + info.num_bytes != offsets[1]:
        raise ValueError(f"{path}: the size of {name} does not fit its shape; download it again")
    return info


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    """Return a JSON list of numbers that are not negative; None for anything else."""
    is_list = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    return tuple(value) if is_list else None


def create_file(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, TensorInfo]:
    """Create a file for tensors of these names, types and shapes, filled with zeros.

    All its bytes are allocated, so that later writes do not fail on a full disk.
    Raises: OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        if end:
            os.posix_fallocate(file.fileno(), 8 + len(text), end)
    return {
        name: TensorInfo(path, dtype, shape, 8 + len(text) + header[name]["data_offsets"][0])
        for name, (dtype, shape) in tensors.items()
    }
