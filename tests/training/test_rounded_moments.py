"""Moments in bfloat16 and in 8 bits: unbiased rounding that keeps what can be stored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.optimizers import OPTIMIZERS, OptimizerConfig, make_optimizer
from training.optimizers.stochastic_rounding import (
    EightBits,
    from_eight_bits,
    to_bfloat16,
    to_eight_bits,
)

EPS = 2.0**-8  # half the distance of bfloat16 values around 1, relative


def test_the_mean_of_rounded_values_is_exact():
    x = jnp.full((1000, 1000), 1 + 0.3 * 2 * EPS, jnp.float32)
    found = np.asarray(to_bfloat16(x, jnp.uint32(5)), np.float64)
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
        np.asarray(to_bfloat16(x, jnp.uint32(seed)), np.float64) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.mean(first == other) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_what_bfloat16_can_hold_stays_as_it_is(seed):
    values = np.random.default_rng(seed).normal(size=(50, 7)).astype("f4") * 10.0 ** (seed - 2)
    values[0, :4] = [0.0, -0.0, np.inf, -np.inf]
    x = jnp.asarray(values, jnp.bfloat16)
    found = to_bfloat16(x.astype(jnp.float32), jnp.uint32(seed))
    np.testing.assert_array_equal(np.asarray(x).view("u2"), np.asarray(found).view("u2"))
    assert np.isnan(to_bfloat16(jnp.full((1,), jnp.nan), jnp.uint32(0)))[0]


def test_values_become_one_of_their_neighbours():
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
    found = np.asarray(to_bfloat16(x, jnp.uint32(3)), np.float64)
    error = np.abs(found - np.float64(x)) / np.abs(np.float64(x))
    assert EPS < error.max() < 2 * EPS


def second_moment(dtype: str | None, steps: int) -> np.ndarray:
    """Return the second moment of AdamW after many equal gradients.

    They are 1, and 3 in the first of 65 columns, which is left out.
    """
    config = OptimizerConfig(beta2=0.999, moments_dtype=dtype, clip_norm=None, weight_decay=0.0)
    optimizer = make_optimizer(config, optax.constant_schedule(0.0))
    params = {"kernel": jnp.ones((64, 65)).at[:, 0].set(3.0)}

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(
            0, steps, lambda _, state: optimizer.update(params, state, params)[1], state
        )

    moment = optax.tree.get(run(optimizer.init(params)), "nu")["kernel"]
    if dtype == "int8":
        assert moment.codes.dtype == jnp.uint8 and moment.largest.shape == (64,)
        moment = from_eight_bits(moment)
    else:
        assert moment.dtype == jnp.dtype(dtype or "float32")
    return np.asarray(moment, np.float64)[:, 1:]


def test_a_moment_follows_changes_that_are_too_small_for_bfloat16():
    """At 0.9 the moment grows by 1e-4 per step, and bfloat16 has steps of 4e-3 there."""
    exact, found = second_moment(None, 3000), second_moment("bfloat16", 3000)
    assert exact.mean() == pytest.approx(1 - 0.999**3000, rel=1e-4)
    assert found.mean() == pytest.approx(exact.mean(), abs=2e-3)
    assert np.std(found) > 0


def test_a_moment_follows_changes_that_are_too_small_for_eight_bits():
    """At 0.5 the moment grows by 5e-4 per step, and 8 bits have steps of 4e-2 there."""
    exact, found = second_moment(None, 700), second_moment("int8", 700)
    assert found.mean() == pytest.approx(exact.mean(), rel=0.05)
    assert np.std(found) > 0


KINDS = [pytest.param(True, id="signed"), pytest.param(False, id="unsigned")]


def eight_bits(x: jax.Array, seed: int, is_signed: bool) -> EightBits:
    return jax.jit(to_eight_bits, static_argnames="is_signed")(
        x, jnp.uint32(seed), is_signed=is_signed
    )


@pytest.mark.parametrize("is_signed", KINDS)
def test_every_code_of_eight_bits_stays_as_it_is(is_signed):
    codes = jnp.arange(-127, 128, dtype=jnp.int8) if is_signed else jnp.arange(256).astype("uint8")
    largest = jnp.asarray(10.0 ** np.arange(-25, 26), jnp.float32)
    stored = EightBits(jnp.broadcast_to(codes, (len(largest), len(codes))), largest)
    for seed in range(5):
        again = eight_bits(from_eight_bits(stored), seed, is_signed)
        np.testing.assert_array_equal(again.codes, stored.codes)
        np.testing.assert_array_equal(again.largest, stored.largest)


@pytest.mark.parametrize("is_signed", KINDS)
def test_the_mean_of_values_in_eight_bits_is_exact(is_signed):
    rows = np.random.default_rng(1).uniform(0.01, 1, size=(3, 200)) * [[1e-20], [1.0], [1e20]]
    if is_signed:
        rows[:, ::2] *= -1
    x, mean, count = jnp.asarray(rows, jnp.float32), 0.0, 2000
    for seed in range(count):
        found = np.asarray(from_eight_bits(eight_bits(x, seed * 7919, is_signed)), np.float64)
        mean += found / count
        if seed == 0:
            assert 0.03 < np.max(np.abs(found / np.float64(x) - 1)) < 2 ** (1 / 8) - 1
    # A rounded value is off by at most 9 %, with a standard deviation of at most half of it.
    errors = mean / np.float64(x) - 1
    assert np.max(np.abs(errors)) < 5 * 0.045 / np.sqrt(count)
    assert np.abs(errors.mean()) < 5 * 0.045 / np.sqrt(count * x.size)


def test_eight_bits_keep_signs_and_zeros_and_no_divisor_becomes_zero():
    values = [[0.0, -0.0, 1.0, -1e-3, 1e-6, -1e-6, 1e-12], [0.0] * 7]
    signed = np.asarray(from_eight_bits(eight_bits(jnp.asarray(values), 0, True)))
    np.testing.assert_array_equal(np.sign(signed), [[0, 0, 1, -1, 0, 0, 0], [0] * 7])
    found = from_eight_bits(eight_bits(jnp.abs(jnp.asarray(values)), 0, False))
    np.testing.assert_array_equal(np.sign(found), [[0, 0, 1, 1, 1, 1, 1], [0] * 7])
    assert found[0, 6] == pytest.approx(2.0 ** (-254 / 8))
    broken = from_eight_bits(
        eight_bits(jnp.asarray([[1.0, jnp.nan, 0.0], [2.0, 2.0, 2.0]]), 0, True)
    )
    assert np.isnan(broken[0, 0]) and np.all(np.asarray(broken[1]) == 2)


def test_an_optimizer_that_does_not_say_what_is_never_negative_has_no_eight_bits(monkeypatch):
    unknown = dataclasses.replace(OPTIMIZERS["adamw"], never_negative=None)
    monkeypatch.setitem(OPTIMIZERS, "unknown", unknown)
    config = OptimizerConfig(name="unknown", moments_dtype="int8")
    with pytest.raises(ValueError, match=r"^optimizer\.moments_dtype=int8: optimizer unknown does"):
        make_optimizer(config, optax.constant_schedule(0.1))


@pytest.mark.parametrize("name", ["adamw", "muon", "soap", "adafactor"])
@pytest.mark.costly
def test_squares_are_unsigned_and_other_moments_signed(name):
    optimizer = make_optimizer(
        OptimizerConfig(name=name, moments_dtype="int8"), optax.constant_schedule(0.1)
    )
    params = {"up": {"kernel": jnp.ones((2, 128, 128))}, "embed": {"table": jnp.ones((128, 128))}}
    state = optimizer.init(params)
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.ndim and x.dtype != jnp.float32:
            names = {getattr(key, "name", "") for key in path}
            found.setdefault(x.dtype.name, set()).update(
                names & {"mu", "nu", "v_row", "v_col", "v"}
            )
    squares = {"v_row", "v_col", "v"} if name == "adafactor" else {"nu"}
    first = {} if name == "adafactor" else {"int8": {"mu"}}
    assert {kind: names for kind, names in found.items() if names} == first | {"uint8": squares}


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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_bad_update_changes_neither_moments_nor_their_next_rounding(dtype):
    config = OptimizerConfig(moments_dtype=dtype)
    optimizer = make_optimizer(config, optax.constant_schedule(0.1))
    params = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)}
    _, once = optimizer.update(params, optimizer.init(params), params, is_good=jnp.array(True))
    bad = {"kernel": jnp.full((8, 8), jnp.nan)}
    _, kept = optimizer.update(bad, once, params, is_good=jnp.array(False))
    for before, after in zip(jax.tree.leaves(once), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
