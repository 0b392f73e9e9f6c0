"""Quantized weights are decoded as their formats say, and parts must fit each other."""

import ml_dtypes
import numpy as np
import pytest

from model.families.quantization import Fp8Tensor, Mxfp4Tensor


def test_mxfp4_weights_are_decoded() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(120, 134, (2, 6, 3), dtype=np.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-v for v in values]
    want = np.empty((2, 96, 6))
    for expert, row, group, byte in np.ndindex(blocks.shape):
        scale = 2.0 ** (int(scales[expert, row, group]) - 127)
        for high in (0, 1):
            both = int(blocks[expert, row, group, byte])
            nibble = both >> 4 if high else both & 15
            want[expert, group * 32 + 2 * byte + high, row] = values[nibble] * scale
    stored = Mxfp4Tensor(blocks, scales)
    assert stored.shape == want.shape
    for expert in range(2):
        np.testing.assert_array_equal(stored[expert], want[expert])


def test_fp8_blocks_are_decoded() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((5, 7)).astype(np.float32)
    scale = np.array([[1.0, 2.0, 4.0], [0.5, 3.0, 7.0]], np.float32)
    encoded = weight.astype(ml_dtypes.float8_e4m3fn)
    want = np.array(
        [[float(encoded[i, j]) * scale[i // 4, j // 3] for j in range(7)] for i in range(5)],
        np.float32,
    )
    np.testing.assert_array_equal(Fp8Tensor(encoded, scale, (4, 3))[...], want)


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    weight = np.zeros((32, 16), ml_dtypes.float8_e4m3fn)
    for shape in ((1, 1), (2, 2), (2,), ()):
        with pytest.raises(ValueError, match="has scales"):
            Fp8Tensor(weight, np.ones(shape, np.float32), (16, 16))
    with pytest.raises(ValueError, match="is bfloat16 with scales of float32"):
        Fp8Tensor(weight.astype(ml_dtypes.bfloat16), np.ones((2, 1), np.float32), (16, 16))
    with pytest.raises(ValueError, match="is float8_e4m3fn with scales of uint8"):
        Fp8Tensor(weight, np.ones((2, 1), np.uint8), (16, 16))
    blocks = np.zeros((2, 8, 3, 16), np.uint8)
    for shape in ((2, 8, 4), (2, 8), (2, 8, 3, 1)):
        with pytest.raises(ValueError, match="has scales"):
            Mxfp4Tensor(blocks, np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match="instead of uint8"):
        Mxfp4Tensor(blocks, np.zeros((2, 8, 3), np.float32))
