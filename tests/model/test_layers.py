"""Norm and initialiser equal their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, tensor_parallel

from model.config import ModelConfig
from model.layers import RMSNorm, truncated_normal
from parallel.sharding.axes import ResidualSharding

CONFIG = ModelConfig(vocab_size=64, hidden_size=16, dtype="float32")


@pytest.mark.parametrize("layout", ["hidden", "sequence", "replicated"])
def test_rms_norm_equals_its_formula_in_every_layout(layout: str) -> None:
    tp = tensor_parallel(MESHES["tp4-sp2"], layout)
    x = np.random.default_rng(0).normal(size=(2, 16, 16)).astype(np.float32) * 3
    with jax.set_mesh(tp.mesh):
        norm = RMSNorm(CONFIG, tp)
        norm.scale[...] = jnp.arange(16.0)
        y = jax.jit(norm)(jax.device_put(x, tp.manager.sharding(ResidualSharding)))
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.arange(16)
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-6)


def test_truncated_normal_has_its_moments_and_exact_values() -> None:
    x = (
        np.asarray(truncated_normal(0.5)(jax.random.key(0), (1000, 1000), jnp.float32), np.float64)
        / 0.5
    )
    assert abs(x.mean()) < 4e-3 and abs(x.std() - 1) < 2e-3
    assert 2.7 - 0.02 < (x**4).mean() < 2.7 + 0.02  # a normal has 3, a uniform 1.8
    assert 3.3 < np.abs(x).max() < 3.5
    levels = x * (4 * (2**32 - 1) / 12) ** 0.5 * 2
    np.testing.assert_allclose(levels, np.round(levels), atol=0.05)
