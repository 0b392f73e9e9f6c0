"""Sums over microbatches."""

import jax.numpy as jnp
import pytest

from training.accumulation import sum_over_parts


@pytest.mark.parametrize("parts", [1, 512])
def test_many_microbatches_are_added_in_float32(parts):
    """In bfloat16, 512 equal terms would add up to about half: 256 + 1 rounds to 256."""

    def micro(params, part, number):
        return jnp.sum(part["tokens"]), {"w": params["w"] * 0 + 1}

    params = {"w": jnp.ones(4, jnp.bfloat16)}
    batch = {"tokens": jnp.ones((parts, 1, 1), jnp.int32)}
    count, gradients = sum_over_parts(micro, params, batch, "cpu")
    assert count == parts and gradients["w"].dtype == jnp.bfloat16
    assert gradients["w"].tolist() == [float(parts)] * 4
