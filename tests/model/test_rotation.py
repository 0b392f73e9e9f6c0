"""Rotations equal the formula of the paper; dot products depend on distances only."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs.reading import ConfigError
from configs.schema import make_config
from model.config import ModelConfig
from model.rope import RopeScaling, rope_frequencies
from model.rotation import layer_rotations, rotate, rotation
from parallel.sharding.mesh import MeshConfig, build_mesh

FAMILIES = {
    "default": (64, 1e4, RopeScaling()),
    "linear": (128, 1e4, RopeScaling(type="linear", factor=8)),
    "yarn": (
        128,
        1e6,
        RopeScaling(type="yarn", factor=4, original_max_position_embeddings=32768),
    ),
}
FORMS = pytest.mark.parametrize("by_matmul", [False, True], ids=["halves", "matmul"])


def rope(x_BLHh, positions_BL, *, frequency_h, attention_factor=1.0, by_matmul=False):
    width = x_BLHh.shape[-1] if by_matmul else None
    by = rotation(positions_BL, frequency_h, attention_factor, matmul_width=width)
    return rotate(x_BLHh, by)


def expected(x, positions, frequency_h, factor=1.0):
    """Return the rotation of pairs as complex numbers, in float64."""
    half = len(frequency_h)
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]).astype(np.complex128) * factor
    pairs = pairs * np.exp(1j * np.asarray(positions)[..., None, None] * frequency_h)
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


@lru_cache
def family_rotation(family: str, by_matmul: bool):
    """The jitted rotation, compiled once per family and form."""
    frequency_h, factor = rope_frequencies(*FAMILIES[family])
    options = {"frequency_h": frequency_h, "attention_factor": factor, "by_matmul": by_matmul}
    return jax.jit(partial(rope, **options))


@FORMS
@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_rotate_like_complex_numbers(family: str, by_matmul) -> None:
    head_dim, theta, scaling = FAMILIES[family]
    frequency_h, factor = rope_frequencies(head_dim, theta, scaling)
    x = np.random.default_rng(0).standard_normal((2, 3, 2, head_dim)).astype(np.float32)
    positions = np.array([[0, 5, 9], [2, 3, 100]])
    out = family_rotation(family, by_matmul)(x, positions)
    np.testing.assert_allclose(out, expected(x, positions, frequency_h, factor), atol=1e-4)
    np.testing.assert_allclose(out[0, 0], factor * x[0, 0], rtol=1e-6)  # position 0: no rotation


@FORMS
def test_the_end_of_a_head_is_kept(by_matmul) -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 12)).astype(np.float32)
    positions_BL, frequency_h = np.tile(np.arange(5), (2, 1)), rope_frequencies(8, 1e4)[0]
    turn = partial(rope, frequency_h=frequency_h, attention_factor=2.0, by_matmul=by_matmul)
    got = turn(jnp.asarray(x), positions_BL)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(got[..., :8], turn(jnp.asarray(x[..., :8]), positions_BL))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rotated", [128, 32])
def test_both_forms_are_bit_equal_with_their_gradients(dtype, rotated) -> None:
    frequency_h, factor = rope_frequencies(rotated, 5e5)[0], 1.25
    positions_BL = jnp.array([[0, 1, 2, 3], [7, 100, 4095, 131071]])
    x, g = jax.random.normal(jax.random.key(0), (2, 2, 4, 3, 128)).astype(dtype)
    tables = [rotation(positions_BL, frequency_h, factor, matmul_width=w) for w in (None, 128)]

    # Without jit: compiled, the products of either form may be fused into a sum with one rounding.
    def both(by):
        out, pull = jax.vjp(partial(rotate, by=by), x)
        return out, *pull(g)

    (halves, dx_halves), (matmul, dx_matmul) = map(both, tables)
    assert halves.dtype == matmul.dtype == dx_matmul.dtype == dtype
    np.testing.assert_array_equal(halves, matmul)
    np.testing.assert_array_equal(dx_halves, dx_matmul)


def test_rotation_is_bit_equal_to_frequencies_computed_on_the_device() -> None:
    def on_device(x_BLHh, positions_BL, theta):
        half = x_BLHh.shape[-1] // 2
        frequency_h = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
        angle = positions_BL[..., None].astype(jnp.float32) * frequency_h
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
        first, second = jnp.split(x_BLHh.astype(jnp.float32), 2, axis=-1)
        out = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(out, axis=-1).astype(x_BLHh.dtype)

    positions_BL = jnp.array([[0, 1, 2, 3], [7, 100, 4095, 131071]])
    for head_dim, theta in ((16, 1e4), (128, 5e5)):
        frequency_h, factor = rope_frequencies(head_dim, theta)
        for dtype in (jnp.float32, jnp.bfloat16):
            x_BLHh = jax.random.normal(jax.random.key(0), (2, 4, 2, head_dim), dtype)
            ours = jax.jit(partial(rope, frequency_h=frequency_h, attention_factor=factor))
            theirs = jax.jit(partial(on_device, theta=theta))
            out = ours(x_BLHh, positions_BL)
            assert out.dtype == dtype
            np.testing.assert_array_equal(out, theirs(x_BLHh, positions_BL))


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(list(FAMILIES)),
    by_matmul=st.booleans(),
    distance=st.integers(0, 500),
    starts=st.lists(st.integers(0, 500), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_dot_products_depend_on_distance_and_norms_are_kept(
    family, by_matmul, distance, starts, seed
) -> None:
    head_dim, theta, scaling = FAMILIES[family]
    frequency_h, factor = rope_frequencies(head_dim, theta, scaling)
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 1, 1, head_dim), dtype=np.float32)
    queries_BL = np.array([starts]) + distance
    q_BLHh, k_BLHh = (np.repeat(y, 3, axis=1) for y in (q, k))
    turn = family_rotation(family, by_matmul)
    q_rotated, k_rotated = turn(q_BLHh, queries_BL), turn(k_BLHh, np.array([starts]))
    products_L = np.sum(q_rotated * k_rotated, axis=-1)[0, :, 0]
    half = head_dim // 2
    pairs = (q[..., :half] + 1j * q[..., half:]) * (k[..., :half] - 1j * k[..., half:])
    wanted = np.sum(pairs * np.exp(1j * distance * frequency_h)).real * factor**2
    np.testing.assert_allclose(products_L, wanted, atol=5e-3)
    norms = np.linalg.norm(q_rotated, axis=-1)
    np.testing.assert_allclose(norms, factor * np.linalg.norm(q), rtol=1e-5)


@FORMS
def test_rope_keeps_the_sharding_of_rows_and_heads(by_matmul) -> None:
    config = MeshConfig(dp=2, sp=2, tp=2)
    on = build_mesh(config, jax.devices()[:8])
    turn = jax.jit(partial(rope, frequency_h=rope_frequencies(8, 1e4)[0], by_matmul=by_matmul))
    x_BLHh = jax.random.normal(jax.random.key(2), (2, 4, 2, 8))
    positions_BL = jnp.arange(8).reshape(2, 4)
    whole = turn(x_BLHh, positions_BL)
    with jax.set_mesh(on):
        spec = P("dp", "sp", "tp", None)
        x = jax.device_put(x_BLHh, NamedSharding(on, spec))
        positions = jax.device_put(positions_BL, NamedSharding(on, P("dp", "sp")))
        out, pull = jax.vjp(lambda x: turn(x, positions), x)
        (dx,) = pull(out)
    assert out.sharding.spec == dx.sharding.spec == spec
    np.testing.assert_array_equal(out, whole)
    np.testing.assert_allclose(dx, x_BLHh, rtol=1e-5)  # rotated back


@FORMS
def test_layers_of_equal_frequencies_share_a_rotation(by_matmul) -> None:
    types = ("full_attention", "sliding_attention")
    shared = ModelConfig(layer_types=types, sliding_window=4)
    positions_BL = jnp.arange(8)[None]
    found = layer_rotations(shared, positions_BL, by_matmul=by_matmul)
    assert found[types[0]] is found[types[1]] and found[types[0]].by_matmul == by_matmul
    own = shared.model_copy(update={"rope_local_theta": 500.0})
    found = layer_rotations(own, positions_BL, by_matmul=by_matmul)
    assert not np.array_equal(found[types[0]].cos, found[types[1]].cos)
    local = own.model_copy(update={"rope_layers": (False, True)})
    assert [*layer_rotations(local, positions_BL, by_matmul=by_matmul)] == [types[1]]
    none = own.model_copy(update={"rope_layers": (False,), "head_dim": 33})
    assert layer_rotations(none, positions_BL, by_matmul=by_matmul) == {}


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ({"head_dim": 33, "rope_layers": [False]}, None),
        ({"head_dim": 45, "partial_rotary_factor": 0.8}, None),
        ({"head_dim": 33}, "model.head_dim=33: rope rotates pairs; use an even head_dim"),
    ],
)
def test_only_rope_needs_heads_of_even_width(model, error) -> None:
    tree = {"model": model, "mesh": {"tp": 1}}
    if error is None:
        make_config(tree)
        return
    with pytest.raises(ConfigError) as refused:
        make_config(tree)
    assert error in str(refused.value)


@FORMS
def test_heads_that_do_not_fit_are_refused(by_matmul) -> None:
    by = rotation(jnp.zeros((1, 2)), np.ones(8), matmul_width=16 if by_matmul else None)
    with pytest.raises(ValueError, match="heads of 8 dimensions, but a rotation for 16"):
        rotate(jnp.zeros((1, 2, 1, 8)), by)
