"""Every operation with every feature: what it claims equals `vanilla`, the rest is refused."""

from dataclasses import replace
from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import sample
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from model.attention import flash
from model.attention.api import OperationRegistry
from model.attention.dense import vanilla
from model.attention.mask import (
    UNUSED,
    AttentionInputs,
    AttentionSpec,
    BlockMask,
    MaskSpec,
    chunk_ids,
)
from model.attention.metadata import OperationMetadata
from model.attention.registry import ALL, Feature, backends_of, operation_names
from model.attention.ring import zigzag_order
from parallel.sharding.axes import MODE_DECODE
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionManager
from parallel.sharding.residual import residual_rules

B, L, H, h = 2, 32, 8, 8
# Bound: float32 rounding, relative to the largest value of each array.
BOUND = 1e-5
MESHES = {"one": MeshConfig(), "dp2-tp2-sp2": MeshConfig(dp=2, tp=2, sp=2)}
OPERATIONS = [
    name
    for name in operation_names()
    if backends_of(name)[-1].name == "native" and not name.startswith("ragged_page")
]
FEATURES = [name for name in get_args(Feature) if name in ALL]


@cache
def arrays(kv_heads: int = H, length: int = L, keys: int = L) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((length, H), (keys, kv_heads), (keys, kv_heads))
    return tuple(rng.normal(size=(B, n, heads, h)).astype(np.float32) for n, heads in shapes)


def segments() -> np.ndarray:
    return np.sort(np.random.default_rng(1).integers(0, 3, (B, L)), axis=1).astype(np.int32)


def options_of(feature: str) -> tuple[dict, dict]:
    """Return the inputs and the other arguments that ask for this feature."""
    rng = np.random.default_rng(2)
    causal = np.tril(np.ones((4, 4), bool))
    causal[2, 1] = False
    unused = np.where(np.arange(L) < 20, np.arange(L), UNUSED)[None].repeat(B, 0)
    unused[0, 12:] = UNUSED
    zigzag = zigzag_order(L, 4)
    blocks = BlockMask.from_array(causal, L // 4, L // 4)
    slots = {
        "q_index_BL": np.array([[11], [19]], np.int32),
        "kv_index_BT": unused.astype(np.int32),
    }
    return {
        "bidirectional": ({}, {"mask": MaskSpec(causal=False)}),
        "segment_ids": ({"q_segment_ids_BL": segments()}, {}),
        "window": ({}, {"mask": MaskSpec(window=5)}),
        "prefix": ({}, {"mask": MaskSpec(prefix=6)}),
        "block_mask": ({}, {"mask": MaskSpec(blocks=blocks)}),
        "soft_cap": ({}, {"soft_cap": 1.5}),
        "sinks": ({"sinks_H": rng.normal(size=H).astype(np.float32)}, {}),
        "gqa": ({}, {}),
        "bias": ({"bias_BHLT": rng.normal(size=(B, H, L, L)).astype(np.float32)}, {}),
        "mask": ({"mask_BHLT": rng.random((B, 1, L, L)) < 0.7}, {}),
        "dropout": ({"dropout_seed": jax.random.key(3)}, {}),
        "row_order": ({"q_index_BL": zigzag, "kv_index_BT": zigzag}, {}),
        "sequence_parallel": ({}, {}),
        "decode": (slots, {"mode": MODE_DECODE}),
    }[feature]


def create(name: str, mesh: str = "one"):
    config = MESHES[mesh]
    rules = residual_rules("sequence")
    built = build_mesh(config, jax.devices()[: config.num_devices])
    metadata = OperationMetadata(
        jnp.float32, partition_manager=PartitionManager(rules, built), dropout_prob=0.3
    )
    return OperationRegistry.create(name, metadata)


def run(name: str, mesh: str, feature: str):
    """Return (result, gradients in q, k, v, bias and sinks) as numpy."""
    inputs, options = options_of(feature)
    floating = {key: y for key, y in inputs.items() if key in ("bias_BHLT", "sinks_H")}
    fixed = {key: y for key, y in inputs.items() if key not in floating}
    q, k, v = arrays(2 if feature == "gqa" else H, 1 if feature == "decode" else L)
    operation = create(name, mesh)

    def loss(parts, floating):
        out = operation(*parts, inputs=AttentionInputs(**fixed, **floating), **options)
        return jnp.sum(jnp.sin(out)), out

    with jax.set_mesh(operation.metadata.mesh):
        put = jax.tree.map(lambda y: jax.device_put(y, P()), ((q, k, v), floating))
        grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*put)
    return jax.tree.map(np.asarray, (out, grads))


@cache
def expected(feature: str):
    return run("vanilla", "one", feature)


def assert_close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= BOUND * max(np.abs(b).max(), 1.0)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_claimed_feature_equals_vanilla_and_another_is_refused(name, feature) -> None:
    """On a mesh; one device is the same local blocks, of which tests of every operation run."""
    mesh = "dp2-tp2-sp2"
    if feature in backends_of(name)[-1].capabilities.features:
        assert_close(run(name, mesh, feature), expected(feature))
    else:
        message = rf"attention operation {name} cannot serve .* has no .*{feature}"
        with pytest.raises(ValueError, match=message):
            run(name, mesh, feature)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_token_sees_the_future_or_another_document(name) -> None:
    operation, ids = create(name), segments()
    q, k, v = arrays()

    @jax.jit
    def gradient(i, k, v):
        def out_of(k, v):
            chosen = (jnp.arange(B)[:, None] == 0) & (jnp.arange(L) == i)
            out = operation(q, k, v, inputs=AttentionInputs(q_segment_ids_BL=ids))
            return jnp.sum(jnp.where(chosen[..., None, None], out, 0.0))

        return jax.grad(out_of, (0, 1))(k, v)

    for i in range(0, L, 5):
        seen = [j for j in range(i + 1) if ids[0, j] == ids[0, i]]
        by_key, by_value = gradient(i, k, v)
        assert set(np.flatnonzero(np.abs(by_key[0]).sum((1, 2)))) <= set(seen)
        assert list(np.flatnonzero(np.abs(by_value[0]).sum((1, 2)))) == seen


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("mesh", MESHES)
def test_packed_documents_do_not_change_each_other_by_a_bit(name, mesh) -> None:
    operation, ids = create(name, mesh), segments()
    q, k, v = arrays()
    other = ids[0] == ids[0, -1]
    changed = [y.copy() for y in (k, v)]
    changed[0][0, other] += 5
    changed[1][0, other] -= 3
    with jax.set_mesh(operation.metadata.mesh):
        attend = jax.jit(partial(operation, inputs=AttentionInputs(q_segment_ids_BL=ids)))
        before, after = (np.asarray(attend(q, *kv)) for kv in ((k, v), changed))
    np.testing.assert_array_equal(before[0, ~other], after[0, ~other])
    np.testing.assert_array_equal(before[1], after[1])
    assert np.abs(before - after)[0, other].max() > 0.1


TPU_BACKENDS = [
    (backend, feature)
    for name in OPERATIONS
    for backend in backends_of(name)
    for feature in ("none", "chunk", *FEATURES)
    if backend.name == "tpu" and feature in {"none", "chunk", *backend.capabilities.features}
]


@pytest.mark.parametrize(
    ("backend", "feature"), sample(TPU_BACKENDS, 3), ids=lambda x: getattr(x, "operation", x)
)
def test_a_kernel_for_tpu_equals_vanilla_in_the_interpreter(backend, feature) -> None:
    """Rows are two blocks of 128, and rings are one device; other tests cover what they send."""
    rng, rows, wide = np.random.default_rng(0), 256, 128
    heads = (4, 2, 2) if feature == "gqa" else (2, 2, 2)
    parts = [jnp.asarray(rng.normal(size=(1, rows, n, wide)), jnp.float32) for n in heads]
    index = jnp.arange(rows)[None]
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (1, rows)), axis=1), jnp.int32)
    if feature == "chunk":
        start = jnp.searchsorted(ids[0], ids[0])
        ids = chunk_ids(index - start, ids, chunk=100, keys=rows)
    order = jnp.asarray(zigzag_order(rows, 4))[None]
    blocks = BlockMask.from_array([[1, 0], [0, 0]], rows // 2, rows // 2)
    patterns = {
        "bidirectional": MaskSpec(causal=False),
        "window": MaskSpec(window=37),
        "chunk": MaskSpec(window=100),
        "prefix": MaskSpec(prefix=30),
        "block_mask": MaskSpec(blocks=blocks),
    }
    inputs = AttentionInputs(
        q_index_BL=order if feature == "row_order" else index,
        kv_index_BT=order if feature == "row_order" else index,
        q_segment_ids_BL=ids if feature in ("segment_ids", "chunk") else None,
        kv_segment_ids_BT=ids if feature in ("segment_ids", "chunk") else None,
        sinks_H=jnp.asarray(rng.normal(size=2), jnp.float32) if feature == "sinks" else None,
    )
    spec = AttentionSpec(
        scale=wide**-0.5,
        mask=patterns.get(feature, MaskSpec()),
        soft_cap=2.0 if feature == "soft_cap" else None,
        block_q=128,
        block_k=128,
    )

    def both(function):
        def loss(parts, sinks):
            out = function(*parts, replace(inputs, sinks_H=sinks), spec)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(parts, inputs.sinks_H)

    with pltpu.force_tpu_interpret_mode():
        got = both(backend.function)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(both(vanilla)), strict=True):
        assert np.abs(a - b).max() <= BOUND * max(np.abs(b).max(), 1.0)


@pytest.mark.parametrize("dq_stays", [True, False])
@pytest.mark.costly
def test_gradients_on_tpu_see_the_rounded_keys_of_the_forward_pass(dq_stays, monkeypatch) -> None:
    """Scores have a standard deviation of 9: one rounding of keys changes weights by percents."""
    rng, rows, wide = np.random.default_rng(0), 256, 128
    q, k, v, cotangent = (
        jnp.asarray(scale * rng.normal(size=(1, rows, 2, wide)), jnp.bfloat16)
        for scale in (9, 1, 1, 1)
    )
    index = jnp.arange(rows)[None]
    inputs = AttentionInputs(q_index_BL=index, kv_index_BT=index)
    spec = AttentionSpec(scale=wide**-0.5, block_q=128, block_k=128)
    keys = (k.astype(jnp.float32) * spec.scale).astype(jnp.bfloat16)

    def gradients(function, spec, *arrays):
        def loss(*arrays):
            out = function(*arrays, inputs, spec)
            return jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

    engine = flash.Engine(flash._SPLASH.attend, partial(flash.fused_gradients, dq_stays=dq_stays))
    monkeypatch.setattr(flash, "_SPLASH", engine)
    with pltpu.force_tpu_interpret_mode():
        got = gradients(flash.splash_with_fused_gradients, spec, q, k, v)
    exact = (x.astype(jnp.float32) for x in (q, keys, v))
    dq, dk, dv = gradients(vanilla, replace(spec, scale=1.0), *exact)
    for a, b in zip(got, (dq, dk * spec.scale, dv), strict=True):
        error = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert error < 0.01, error
