"""Weights that a checkpoint stores in few bits, decoded when they are read.

A stored weight stands in for the tensor that it encodes: it has its name and shape, and indexing it
decodes what is asked for. Torus trains and exports the decoded values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from model.families.layouts import Shape
from registry import Registry

_FP4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


class StoredTensor(Protocol):
    """A tensor on disk, encoded or not; a numpy array is one."""

    @property
    def shape(self) -> Shape:
        """Shape of the decoded tensor."""

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return the decoded entries at an index of dim 0, or everything for `...`."""


@dataclass(frozen=True)
class Mxfp4Tensor:
    """Blocks of 32 FP4 values that share a power of two (OCP MX formats, version 1.0).

    blocks: uint8 (experts, out, in / 32, 16), two values in a byte, the low bits first. scales:
    uint8 (experts, out, in / 32), exponents with bias 127. Decoded: (experts, in, out), float32.
    """

    blocks: np.ndarray
    scales: np.ndarray

    @property
    def shape(self) -> Shape:
        """(experts, in, out)."""
        experts, rows, groups, half = self.blocks.shape
        return experts, groups * half * 2, rows

    def __getitem__(self, index: Any) -> np.ndarray:
        """Decode some experts."""
        blocks, scales = np.asarray(self.blocks[index]), np.asarray(self.scales[index])
        values = np.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), np.float32)
        values[..., 0::2], values[..., 1::2] = _FP4[blocks & 15], _FP4[blocks >> 4]
        values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
        return np.swapaxes(values.reshape(*blocks.shape[:-2], -1), -1, -2)


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix of FP8 values, multiplied by one float32 per block (DeepSeek-V3: 128 x 128).

    weight: float8_e4m3fn (out, in). scale: (out / block, in / block), rounded up. Decoded: float32.
    """

    weight: np.ndarray
    scale: np.ndarray
    block: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> Shape:
        """(out, in)."""
        return self.weight.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        """Decode the whole matrix, then index it."""
        rows, columns = self.weight.shape
        decoded = np.asarray(self.weight).astype(np.float32)
        for first in range(0, rows, self.block[0]):  # the whole matrix of scales would be as large
            scale = np.repeat(np.asarray(self.scale[first // self.block[0]]), self.block[1])
            decoded[first : first + self.block[0]] *= scale[:columns].astype(np.float32)
        return decoded[index]


def _decode_mxfp4(tensors: Sequence[np.ndarray], settings: Mapping[str, Any]) -> StoredTensor:
    blocks, scales = tensors
    return Mxfp4Tensor(blocks, scales)


def _decode_fp8(tensors: Sequence[np.ndarray], settings: Mapping[str, Any]) -> StoredTensor:
    rows, columns = settings.get("weight_block_size") or (128, 128)
    weight, scale = tensors
    return Fp8Tensor(weight, scale, (rows, columns))


class Encoding(NamedTuple):
    """How a quantization method stores a weight.

    suffixes: endings of the names of its tensors. decoded: ending of the decoded weight's name.
    decode: (these tensors, `quantization_config`) -> the stand-in.
    """

    suffixes: tuple[str, ...]
    decoded: str
    decode: Callable[[Sequence[np.ndarray], Mapping[str, Any]], StoredTensor]


ENCODINGS: Registry[Encoding] = Registry("quantization_config.quant_method")
ENCODINGS["mxfp4"] = Encoding(("_blocks", "_scales"), "", _decode_mxfp4)
ENCODINGS["fp8"] = Encoding((".weight", ".weight_scale_inv"), ".weight", _decode_fp8)
