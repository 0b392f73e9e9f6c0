"""Activations of gated MLPs equal their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from model.activations import ACTIVATIONS, gated_activation


def silu(gate: float, up: float) -> float:
    return gate / (1 + math.exp(-gate)) * up


def gelu_tanh(gate: float, up: float) -> float:
    return 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def clamped_swiglu(gate: float, up: float) -> float:
    gate, up = min(gate, 1.5), max(min(up, 1.5), -1.5)
    return (up + 1) * gate / (1 + math.exp(-1.702 * gate))


@pytest.mark.parametrize("formula", [silu, gelu_tanh, clamped_swiglu])
def test_values_equal_the_formula_in_the_dtype_of_the_arguments(formula) -> None:
    gate, up = 2 * np.random.default_rng(0).standard_normal((2, 500))
    limit = 1.5 if ACTIVATIONS[formula.__name__].takes_limit else None
    function = gated_activation(formula.__name__, limit)
    want = [formula(g, u) for g, u in zip(gate, up, strict=True)]
    got = function(jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    np.testing.assert_allclose(got, want, atol=2e-6)
    half = function(jnp.asarray(gate, jnp.bfloat16), jnp.asarray(up, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), want, atol=0.1)


def test_equal_arguments_give_one_function_so_that_programs_are_compiled_once() -> None:
    assert gated_activation("clamped_swiglu", 7.0) is gated_activation("clamped_swiglu", 7.0)
    assert gated_activation("clamped_swiglu", 7.0) is not gated_activation("clamped_swiglu", 8.0)
    with pytest.raises(ValueError, match="unknown activation 'relu'; use one of silu, gelu_tanh"):
        gated_activation("relu", None)
