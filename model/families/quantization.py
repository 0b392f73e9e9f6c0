"""Quantized weights on disk (MXFP4, FP8), decoded when they are read.

Each class has the shape of the decoded tensor, and indexing it decodes the requested part. Torus
trains and exports the decoded values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from model.families.base import FamilyError
from model.families.layouts import Shape
from registry import Registry

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_SCALE_TYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
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

    def __post_init__(self) -> None:
        if self.blocks.dtype != np.uint8 or self.scales.dtype != np.uint8:
            raise ValueError(f"has {self.blocks.dtype} and {self.scales.dtype} instead of uint8")
        if self.blocks.ndim != 4 or self.blocks.shape != (*self.scales.shape, 16):
            raise ValueError(f"has scales {self.scales.shape} for blocks {self.blocks.shape}")

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

    def __post_init__(self) -> None:
        if self.weight.dtype != _FP8 or self.scale.dtype not in _SCALE_TYPES:
            raise ValueError(f"is {self.weight.dtype} with scales of {self.scale.dtype}")
        blocks = (-(-size // block) for size, block in zip(self.shape, self.block, strict=False))
        if self.weight.ndim != 2 or self.scale.shape != tuple(blocks):
            raise ValueError(f"has scales {self.scale.shape} for a weight {self.shape}")

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
    rows, columns = settings.get("weight_block_size", (128, 128))
    weight, scale = tensors
    return Fp8Tensor(weight, scale, (rows, columns))


def _check_fp8(settings: Mapping[str, Any]) -> None:
    block = settings.get("weight_block_size", [128, 128])
    if not isinstance(block, list) or [type(n) is int and n > 0 for n in block] != [True, True]:
        raise FamilyError(
            f"config.json: weight_block_size={block!r} of quantization_config is not supported; "
            "only FP8 weights with a scale per block are: use the model without quantization"
        )


class Encoding(NamedTuple):
    """Storage of a weight by a quantization method.

    suffixes: endings of the names of its tensors. decoded: ending of the decoded weight's name.
    decode: (these tensors, `quantization_config`) -> the tensor that decodes when indexed; it
        raises ValueError for shapes or types that do not fit each other.
    check: raises FamilyError for a `quantization_config` that is not supported.
    """

    suffixes: tuple[str, ...]
    decoded: str
    decode: Callable[[Sequence[np.ndarray], Mapping[str, Any]], StoredTensor]
    check: Callable[[Mapping[str, Any]], None] = lambda settings: None


ENCODINGS: Registry[Encoding] = Registry("quantization_config.quant_method")
ENCODINGS["mxfp4"] = Encoding(("_blocks", "_scales"), "", _decode_mxfp4)
ENCODINGS["fp8"] = Encoding((".weight", ".weight_scale_inv"), ".weight", _decode_fp8, _check_fp8)
