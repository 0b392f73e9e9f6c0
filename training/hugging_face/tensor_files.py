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
"""Types of the format by name."""
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is. dtype: name of the format. offset: of its first byte in the file."""

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
            raise ValueError(f"{path} is no complete safetensors file ({size} bytes); get it again")
        try:
            header = json.loads(file.read(length))
            tensors = {
                name: TensorInfo(
                    path, tensor["dtype"], tuple(tensor["shape"]), 8 + length + _start(tensor)
                )
                for name, tensor in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has a damaged header ({error}); get it again") from error
    for name, info in tensors.items():
        if info.dtype not in DTYPES:
            raise ValueError(f"{path}: {name} has the type {info.dtype}, which is not supported")
        if info.offset + info.num_bytes != 8 + length + header[name]["data_offsets"][1]:
            raise ValueError(f"{path}: the size of {name} does not fit its shape; get it again")
        if info.offset + info.num_bytes > size:
            raise ValueError(
                f"{path} is truncated: {name} ends at byte {info.offset + info.num_bytes}, but the "
                f"file has {size}; get it again"
            )
    return tensors


def _start(tensor: Mapping[str, Any]) -> int:
    return int(tensor["data_offsets"][0])


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
