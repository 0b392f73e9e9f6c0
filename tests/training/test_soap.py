"""SOAP against an implementation in numpy, and its bases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.optimizers import OptimizerConfig, make_optimizer
from training.optimizers.soap import next_basis
from training.schedules import make_schedule

SHAPE = (2, 6, 4)  # two layers
B1, B2, EPS, RATE, DECAY = 0.8, 0.9, 1e-4, 0.05, 0.3


def in_numpy(x: np.ndarray, gradients, interval: int, damping: float, max_size: int) -> np.ndarray:
    """Train one matrix by SOAP (arXiv 2409.11321, algorithms 3 and 4) in double precision.

    With the differences that training/optimizers/soap.py names. Here columns are sorted
    permanently, and the moments with them, as in the implementation of the authors.
    """
    x = np.float64(x)
    m, v = np.zeros_like(x), np.zeros_like(x)
    stats = [np.zeros((size, size)) for size in x.shape]
    bases = [np.eye(size) for size in x.shape]
    for t, gradient in enumerate(gradients, start=1):
        g = np.float64(gradient)
        left, right = bases
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * (left.T @ g @ right) ** 2
        mean, square = left.T @ m @ right / (1 - B1**t), v / (1 - B2**t)
        step = left @ (mean / (np.sqrt(square) + EPS)) @ right.T
        x = x - RATE * (step + DECAY * x)
        for side, product in enumerate((g @ g.T, g.T @ g)):
            stats[side] = B2 * stats[side] + (1 - B2) * product
            if len(product) <= max_size and t % interval == 1 % interval:
                values = np.diag(bases[side].T @ stats[side] @ bases[side])
                order = np.argsort(-values)
                v = np.take(v, order, axis=side)
                scale = damping * np.trace(stats[side]) / len(product)
                sorted_ = bases[side][:, order]
                q, r = np.linalg.qr((stats[side] + scale * np.eye(len(product))) @ sorted_)
                bases[side] = q * np.sign(np.diag(r))
    return x


def optimizer_of(options: dict, **keys):
    config = OptimizerConfig(
        name="soap", options=options, beta1=B1, beta2=B2, eps=EPS, learning_rate=RATE,
        weight_decay=DECAY, warmup_steps=0, schedule="constant", clip_norm=None, **keys,
    )  # fmt: skip
    return make_optimizer(config, make_schedule(config, 10))


def train(options: dict, gradients: np.ndarray, start: np.ndarray, bad=(), **keys):
    """Return the trained stack of matrices and the state of the optimizer."""
    optimizer = optimizer_of(options, **keys)
    params = {"mlp": {"kernel": jnp.asarray(start)}}
    state = optimizer.init(params)
    for number, gradient in enumerate(gradients):
        grads = {"mlp": {"kernel": jnp.asarray(gradient)}}
        is_good = number not in bad
        updates, state = optimizer.update(grads, state, params, is_good=is_good)
        params = optax.apply_updates(params, updates) if is_good else params
    return params["mlp"]["kernel"], state


def sides_of(state, field: str) -> list[np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [np.asarray(x) for path, x in leaves if path[-1] == jax.tree_util.GetAttrKey(field)]


@pytest.mark.parametrize(
    "options", [{}, {"interval": 1}, {"interval": 3}, {"max_size": 4}, {"damping": 0.0}], ids=str
)
@pytest.mark.costly
def test_steps_equal_an_implementation_in_numpy(options):
    rng = np.random.default_rng(0)
    start = rng.normal(size=SHAPE).astype("f4")
    gradients = rng.normal(size=(7, *SHAPE)).astype("f4")
    given = {"interval": 10, "damping": 0.1, "max_size": 8192} | options
    if not given["damping"]:  # no direction without gradients
        start, gradients = start[:, :4], gradients[:, :, :4]
    found, state = train(given, gradients, start)
    for layer in range(SHAPE[0]):
        wanted = in_numpy(start[layer], gradients[:, layer], **given)
        np.testing.assert_allclose(found[layer], wanted, rtol=1e-4, atol=1e-5)
    assert [basis.shape[-1] for basis in sides_of(state, "basis")] == [
        size for size in start.shape[1:] if size <= given["max_size"]
    ]


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize("damping", [0.0, 1e-6])
def test_the_basis_becomes_the_eigenvectors(scale, damping):
    rng = np.random.default_rng(1)
    vectors, first = (np.linalg.qr(rng.normal(size=(6, 6)))[0] for _ in range(2))
    statistic = (scale * vectors * [1, 27, 3, 243, 9, 81]) @ vectors.T
    basis = jnp.asarray(first, jnp.float32)
    for _ in range(12):
        basis = next_basis(jnp.asarray(statistic, jnp.float32), basis, damping=damping)
    # Each column is one of the vectors, with either sign.
    similar = np.abs(basis.T @ vectors)
    np.testing.assert_allclose(similar, similar > 0.5, atol=1e-3)
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-5)


def test_columns_keep_their_places_and_directions():
    """A converged basis stays, in whichever order its columns are."""
    vectors = np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0]
    statistic = jnp.asarray((vectors * [1, 16, 2, 8, 4]) @ vectors.T, jnp.float32)
    basis = jnp.asarray(vectors, jnp.float32)
    np.testing.assert_allclose(next_basis(statistic, basis, damping=0.0), basis, atol=1e-5)


def test_without_gradients_a_basis_stays():
    basis = jnp.asarray(np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0], jnp.float32)
    found = next_basis(jnp.zeros((5, 5)), basis, damping=1e-3)
    np.testing.assert_allclose(found, basis, atol=1e-6)
    start = np.ones(SHAPE, "f4")
    trained, _ = train({"interval": 1}, np.zeros((3, *SHAPE), "f4"), start)
    np.testing.assert_allclose(trained, start * (1 - RATE * DECAY) ** 3, rtol=1e-6)


@pytest.mark.parametrize("bad", [0, 2, 3], ids=["first", "due", "not due"])
@pytest.mark.costly
def test_a_bad_step_changes_nothing(bad):
    gradients = np.random.default_rng(0).normal(size=(5, *SHAPE)).astype("f4")
    start = np.ones(SHAPE, "f4")
    with_bad = np.insert(gradients, bad, np.nan, axis=0)
    found, state = train({"interval": 2}, with_bad, start, bad={bad})
    wanted, expected = train({"interval": 2}, gradients, start)
    np.testing.assert_array_equal(found, wanted)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_long_side_of_a_low_rank_factor_is_not_rotated():
    params = {"attention": {"lora_a": jnp.ones((1, 64, 2)), "lora_b": jnp.ones((1, 2, 64))}}
    state = optimizer_of({}).init(params)
    assert [basis.shape[-1] for basis in sides_of(state, "basis")] == [2, 2]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.costly
def test_moments_in_fewer_bits_leave_statistics_and_bases_exact(dtype):
    gradients = np.random.default_rng(0).normal(size=(3, *SHAPE)).astype("f4")
    start = np.ones(SHAPE, "f4")
    _, state = train({"interval": 1}, gradients, start, moments_dtype=dtype)
    _, wanted = train({"interval": 1}, gradients, start)
    for field in ("statistic", "basis"):
        for x, y in zip(sides_of(state, field), sides_of(wanted, field), strict=True):
            np.testing.assert_array_equal(x, y)
    kinds = {"bfloat16": {"bfloat16"}, "int8": {"int8", "uint8"}}[dtype]
    assert kinds <= {str(x.dtype) for x in jax.tree.leaves(state)}
