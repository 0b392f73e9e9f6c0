"""Draws follow each row's key and come from the set and distribution that numpy computes."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.generation.sampling import SamplingConfig, row_keys, sample_tokens
from parallel.sharding.mesh import MeshConfig, build_mesh

V = 8
GRID = [
    SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature, top_k, top_p in (
        (1.0, 3, None),
        (0.5, None, 0.5),
        (2.0, None, 0.9),
        (0.7, 4, 0.5),
        (1.0, 1, None),
        (1.0, 50, 0.9),
    )
]
sample = partial(jax.jit, static_argnames="sampling")(sample_tokens)
keys_of = jax.jit(row_keys)
categorical = jax.jit(jax.vmap(jax.random.categorical))


def keys(count: int, seed: int = 0) -> jax.Array:
    return keys_of(jax.random.key(seed), jnp.arange(count), jnp.zeros(count, jnp.int32))


def kept(logits_V: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """The ids that may be drawn: sort, keep k, then keep until the probability reaches p."""
    order = np.lexsort((np.arange(V), -logits_V))[: sampling.top_k]
    with np.errstate(over="ignore"):
        weights = np.exp((logits_V[order] - logits_V.max()) / np.float64(sampling.temperature))
    before = np.cumsum(weights) - weights
    p = 2.0 if sampling.top_p is None else sampling.top_p
    return order[before < p * weights.sum()]


def expected_draws(
    logits_BV: np.ndarray, keys_B: jax.Array, sampling: SamplingConfig
) -> np.ndarray:
    """Categorical draws with the same keys after all other logits are set to -inf."""
    masked_BV = np.full(logits_BV.shape, -np.inf, np.float32)
    for row, logits_V in enumerate(logits_BV):
        ids = kept(logits_V, sampling)
        masked_BV[row, ids] = (logits_V[ids] - logits_V.max()) / np.float32(sampling.temperature)
    return np.asarray(categorical(keys_B, masked_BV))


@pytest.mark.parametrize("sampling", GRID, ids=str)
def test_draws_equal_categorical_draws_from_the_set_of_numpy(sampling: SamplingConfig) -> None:
    rows = 64
    logits_BV = np.random.default_rng(0).normal(0, 2, (rows, V)).astype(np.float32)
    for seed in range(8):
        tokens_B = sample(logits_BV, keys(rows, seed), sampling=sampling)
        assert tokens_B.dtype == jnp.int32 and tokens_B.shape == (rows,)
        np.testing.assert_array_equal(
            tokens_B, expected_draws(logits_BV, keys(rows, seed), sampling)
        )


# Integers tie often.
logits = st.lists(st.integers(-2, 2) | st.just(-math.inf), min_size=V, max_size=V)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(logits.filter(lambda row: max(row) > -math.inf), min_size=4, max_size=4),
    seed=st.integers(0, 2**31 - 1),
    sampling=st.sampled_from(GRID),
)
def test_ties_go_to_the_lowest_ids_and_minus_infinity_is_never_drawn(rows, seed, sampling) -> None:
    logits_BV = np.array(rows, np.float32)
    tokens_B = np.asarray(sample(logits_BV, keys(4, seed), sampling=sampling))
    np.testing.assert_array_equal(tokens_B, expected_draws(logits_BV, keys(4, seed), sampling))
    assert np.isfinite(logits_BV[np.arange(4), tokens_B]).all()
    greedy_B = sample(logits_BV, keys(4, seed), sampling=SamplingConfig())
    np.testing.assert_array_equal(greedy_B, np.argmax(logits_BV, axis=-1))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(top_k=3, top_p=0.5),
        SamplingConfig(temperature=1.0, top_k=1),
        SamplingConfig(temperature=5.0, top_k=1, top_p=1.0),
        SamplingConfig(temperature=1.0, top_p=1e-6),
        SamplingConfig(temperature=1.0, top_p=5e-324),
        SamplingConfig(temperature=1e-30),
    ],
    ids=str,
)
def test_a_single_candidate_is_the_most_likely_token(sampling: SamplingConfig) -> None:
    logits_BV = np.random.default_rng(1).normal(0, 1, (32, V)).astype(np.float32)
    logits_BV[0] = 0.0  # all equal: the lowest id, unless a temperature draws among them
    logits_BV[1, 2:4] = 9.0
    logits_BV[2] = [-0.0, 0.0, -1, 0.0, -1, -1, -1, -1]  # 0.0 and -0.0 tie
    rows = slice(3, None) if sampling.temperature == 1e-30 else slice(None)
    tokens_B = sample(logits_BV, keys(32), sampling=sampling)
    np.testing.assert_array_equal(tokens_B[rows], np.argmax(logits_BV, axis=-1)[rows])


@pytest.mark.parametrize("limits", [{}, {"top_k": V}, {"top_p": 1.0}, {"top_k": 99, "top_p": 1.0}])
def test_without_limits_it_is_a_categorical_draw(limits) -> None:
    logits_BV = np.random.default_rng(2).normal(0, 3, (512, V)).astype(np.float32)
    tokens_B = sample(logits_BV, keys(512), sampling=SamplingConfig(temperature=1.5, **limits))
    np.testing.assert_array_equal(tokens_B, categorical(keys(512), logits_BV / 1.5))


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=1.0), *GRID], ids=str)
def test_token_frequencies_match_probabilities(sampling: SamplingConfig) -> None:
    draws = 20_000
    logits_V = np.array([1.0, -1.0, 0.5, 2.0, -np.inf, 0.0, 1.5, -3.0], np.float32)
    shares_V = np.zeros(V)
    ids = kept(logits_V, sampling)
    shares_V[ids] = np.exp(logits_V[ids] / sampling.temperature)
    shares_V /= shares_V.sum()
    logits_BV = np.broadcast_to(logits_V, (draws, V))
    counts_V = np.bincount(sample(logits_BV, keys(draws), sampling=sampling), minlength=V)
    assert (counts_V[shares_V == 0] == 0).all()
    likely_V = shares_V > 0
    expected = draws * shares_V[likely_V]
    chi_square = np.sum((counts_V[likely_V] - expected) ** 2 / expected)
    # Mean n - 1, standard deviation sqrt(2 (n - 1)); the seed is fixed, so the result is too.
    freedom = likely_V.sum() - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=1.0), *GRID], ids=str)
def test_a_row_draws_the_same_alone_and_in_a_batch(sampling: SamplingConfig) -> None:
    seed = jax.random.key(3)
    logits_BV = np.random.default_rng(3).normal(0, 1, (16, V)).astype(np.float32)
    rows_B, positions_B = jnp.arange(16), jnp.arange(16) * 7
    together = sample(logits_BV, row_keys(seed, rows_B, positions_B), sampling=sampling)
    order = np.random.default_rng(4).permutation(16)
    shuffled = sample(
        logits_BV[order], row_keys(seed, rows_B[order], positions_B[order]), sampling=sampling
    )
    np.testing.assert_array_equal(shuffled, together[order])
    for row in (0, 5):
        here = slice(row, row + 1)
        alone = sample(
            logits_BV[here], row_keys(seed, rows_B[here], positions_B[here]), sampling=sampling
        )
        assert alone[0] == together[row]


def test_keys_differ_by_seed_row_and_position() -> None:
    rows_B, positions_B = (jnp.asarray(y.ravel()) for y in np.meshgrid(range(8), range(8)))
    both = [jax.random.key_data(keys_of(jax.random.key(s), rows_B, positions_B)) for s in (0, 1)]
    assert len(np.unique(np.concatenate(both), axis=0)) == 128


def test_rows_may_be_split_over_devices() -> None:
    on = build_mesh(MeshConfig(dp=4, tp=2), jax.devices()[:8])
    logits_BV = np.random.default_rng(5).normal(0, 1, (8, V)).astype(np.float32)
    sampling = SamplingConfig(temperature=0.7, top_k=4, top_p=0.9)
    whole = sample(logits_BV, keys(8), sampling=sampling)
    with jax.set_mesh(on):
        ids = jax.device_put(jnp.arange(8), NamedSharding(on, P("dp")))
        split = jax.device_put(logits_BV, NamedSharding(on, P("dp", None)))
        tokens_B = sample(split, keys_of(jax.random.key(0), ids, 0 * ids), sampling=sampling)
    assert tokens_B.sharding.spec == P("dp")
    np.testing.assert_array_equal(tokens_B, whole)


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits_BV = jax.random.normal(jax.random.key(6), (64, V), jnp.bfloat16)
    sampling = SamplingConfig(temperature=0.3, top_p=0.9)
    wide = sample(logits_BV.astype(jnp.float32), keys(64), sampling=sampling)
    np.testing.assert_array_equal(sample(logits_BV, keys(64), sampling=sampling), wide)


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.9}])
def test_extreme_temperatures_draw_allowed_tokens_only(temperature, limits) -> None:
    logits_BV = jnp.asarray([[1.0, 5.0, 4.0, -jnp.inf]] * 64)
    drawn = sample(logits_BV, keys(64), sampling=SamplingConfig(temperature=temperature, **limits))
    allowed = {1} if temperature < 1 else {1, 2} if "top_k" in limits else {0, 1, 2}
    assert set(np.asarray(drawn).tolist()) == allowed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"temperature": -1.0},
            r"temperature=-1.0: use 1e-30 to 1e30, or 0 for greedy decoding",
        ),
        ({"temperature": math.inf}, r"temperature=inf: use"),
        ({"temperature": math.nan}, r"temperature=nan: use"),
        ({"temperature": 1e-40}, r"temperature=1e-40: use"),
        ({"temperature": 1e38}, r"temperature=1e\+38: use"),
        ({"top_k": 0}, r"top_k=0: use an integer of at least 1"),
        ({"top_k": 2.0}, r"top_k=2.0: use"),
        ({"top_k": True}, r"top_k=True: use"),
        ({"top_p": 0.0}, r"top_p=0.0: use more than 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p=1.5: use"),
        ({"top_p": math.nan}, r"top_p=nan: use"),
    ],
)
def test_invalid_sampling_is_refused(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        SamplingConfig(**fields)
    assert "\n" not in str(refusal.value)
