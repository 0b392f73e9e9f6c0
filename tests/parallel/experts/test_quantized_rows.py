"""Rows in one byte per number: their rounding and their scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from islands import mesh_of
from jax import shard_map
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.experts.quantized_rows import dequantize_rows, quantize_rows

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
numbers = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
rows = arrays(np.float32, (3, 4), elements=numbers) | arrays(
    np.float32, (3, 4), elements=st.floats(-1000, 1000, width=16)
)


@pytest.mark.parametrize("dtype", LARGEST)
@settings(max_examples=80, deadline=None)
@given(x=rows)
def test_a_row_is_rounded_once_with_the_smallest_scale_that_holds_it(dtype, x) -> None:
    values, scale = (np.asarray(y) for y in quantize_rows(jnp.asarray(x), dtype))
    assert values.dtype == np.uint8 and values.shape == x.shape
    largest = np.abs(x.astype(np.float64)).max(-1)
    assert np.all(np.frexp(scale)[0] == 0.5)
    assert np.all(largest <= scale * LARGEST[dtype])
    # Half of it would not do, unless it is no normal number.
    assert np.all((largest > scale / 2 * LARGEST[dtype]) | (scale == 2.0**-126) | (largest == 0))
    got = np.asarray(dequantize_rows(values, scale, dtype, np.float32), np.float64)
    # e4m3 has four significant bits, and numbers below 2^-6 in steps of 2^-9; int8 has steps of 1.
    steps = 0.5 if dtype == "int8" else np.maximum(np.abs(x / scale[:, None]) * 2.0**-4, 2.0**-10)
    assert np.all(np.abs(got - x) <= steps * scale[:, None])
    # bfloat16 holds the rounded numbers: another rounding changes nothing.
    again = dequantize_rows(values, scale, dtype, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(again, np.float64), got)


def test_devices_with_parts_of_the_features_have_one_scale() -> None:
    mesh, x = mesh_of(tp=2), np.float32([[1, 2, 3, 1000], [500, 1, 1, 1]])
    island = shard_map(
        lambda x: quantize_rows(x, "int8", "tp"),
        mesh=mesh,
        in_specs=P(None, "tp"),
        out_specs=(P(None, "tp"), P()),
    )
    values, scale = island(jax.device_put(x, NamedSharding(mesh, P(None, "tp"))))
    np.testing.assert_array_equal(scale, [8, 4])
    np.testing.assert_array_equal(np.asarray(values).view(np.int8), np.rint(x / [[8], [4]]))
