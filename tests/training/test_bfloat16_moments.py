"""Moments in bfloat16: unbiased rounding that keeps what bfloat16 can hold, and small changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.optimizers import OptimizerConfig, make_optimizer
from training.optimizers.bfloat16_moments import stochastically_rounded

EPS = 2.0**-8  # half the distance of bfloat16 values around 1, relative


def test_the_mean_of_rounded_values_is_exact():
    x = jnp.full((1000, 1000), 1 + 0.3 * 2 * EPS, jnp.float32)
    found = np.asarray(stochastically_rounded(x, jnp.uint32(5)), np.float64)
    assert {*np.unique(found)} == {1.0, 1 + 2 * EPS}
    share = np.mean(found > 1)
    assert share == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / x.size))
    # Neither rows, columns nor neighbours are rounded alike.
    for means in (np.mean(found > 1, axis=0), np.mean(found > 1, axis=1)):
        assert np.std(means) == pytest.approx(np.sqrt(0.21 / 1000), rel=0.2)
    up = found > 1
    assert np.mean(up[:, 1:] & up[:, :-1]) == pytest.approx(0.09, abs=0.003)
    assert np.mean(up[1:] & up[:-1]) == pytest.approx(0.09, abs=0.003)


def test_every_seed_rounds_otherwise_and_the_same_seed_alike():
    x = jnp.full((100, 100), 1 + EPS, jnp.float32)
    first, again, other = (
        np.asarray(stochastically_rounded(x, jnp.uint32(seed)), np.float64) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.mean(first == other) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_what_bfloat16_can_hold_stays_as_it_is(seed):
    values = np.random.default_rng(seed).normal(size=(50, 7)).astype("f4") * 10.0 ** (seed - 2)
    values[0, :4] = [0.0, -0.0, np.inf, -np.inf]
    x = jnp.asarray(values, jnp.bfloat16)
    found = stochastically_rounded(x.astype(jnp.float32), jnp.uint32(seed))
    np.testing.assert_array_equal(np.asarray(x).view("u2"), np.asarray(found).view("u2"))
    assert np.isnan(stochastically_rounded(jnp.full((1,), jnp.nan), jnp.uint32(0)))[0]


def test_values_become_one_of_their_neighbours():
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
    found = np.asarray(stochastically_rounded(x, jnp.uint32(3)), np.float64)
    error = np.abs(found - np.float64(x)) / np.abs(np.float64(x))
    assert EPS < error.max() < 2 * EPS


def second_moment(dtype: str | None, steps: int) -> np.ndarray:
    """Return the second moment of AdamW after many equal gradients, all of them 1."""
    config = OptimizerConfig(beta2=0.999, moments_dtype=dtype, clip_norm=None, weight_decay=0.0)
    optimizer = make_optimizer(config, optax.constant_schedule(0.0))
    params = {"kernel": jnp.ones((64, 64))}

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(
            0, steps, lambda _, state: optimizer.update(params, state, params)[1], state
        )

    leaves = jax.tree.leaves(run(optimizer.init(params)))
    moments = [x for x in leaves if x.ndim]
    assert {x.dtype for x in moments} == {jnp.dtype(dtype or "float32")}
    return np.asarray(moments[1], np.float64)


def test_a_moment_follows_changes_that_are_too_small_for_bfloat16():
    """At 0.9 the moment grows by 1e-4 per step, and bfloat16 has steps of 4e-3 there."""
    exact, found = second_moment(None, 3000), second_moment("bfloat16", 3000)
    assert exact.mean() == pytest.approx(1 - 0.999**3000, rel=1e-4)
    assert found.mean() == pytest.approx(exact.mean(), abs=2e-3)
    assert np.std(found) > 0


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_parameters_in_bfloat16_are_updated_in_float32(name):
    config = OptimizerConfig(name=name, moments_dtype="bfloat16", beta2=0.999, clip_norm=None)
    optimizer = make_optimizer(config, optax.constant_schedule(0.0))
    params = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}

    @jax.jit
    def run(state, grads):
        return jax.lax.fori_loop(
            0, 1000, lambda _, state: optimizer.update(grads, state, params)[1], state
        )

    state = run(optimizer.init(params), params)
    state = run(state, {"kernel": params["kernel"] / 2})
    moment = [x for x in jax.tree.leaves(state) if x.ndim][-1]
    assert moment.dtype == jnp.bfloat16
    assert np.std(np.asarray(moment, np.float64)) > 0 and float(moment.mean()) < 0.9


def test_a_bad_update_changes_neither_moments_nor_their_next_rounding():
    config = OptimizerConfig(moments_dtype="bfloat16")
    optimizer = make_optimizer(config, optax.constant_schedule(0.1))
    params = {"kernel": jnp.ones((8, 8))}
    _, once = optimizer.update(params, optimizer.init(params), params, is_good=jnp.array(True))
    bad = {"kernel": jnp.full((8, 8), jnp.nan)}
    _, kept = optimizer.update(bad, once, params, is_good=jnp.array(False))
    for before, after in zip(jax.tree.leaves(once), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
