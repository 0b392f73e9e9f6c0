"""Every operation times every feature: what it claims equals `vanilla`, the rest is refused."""

from functools import cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from model.attention.capabilities import Feature
from model.attention.dense import vanilla
from model.attention.operation import OperationMetadata, OperationRegistry
from model.attention.ring import zigzag_order
from model.attention.scores import UNUSED, BlockMask, Pattern, ScoreInputs, ScoreRule
from parallel.sharding.axes import MODE_DECODE
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionManager
from parallel.sharding.residual import residual_rules

B, L, H, h = 2, 32, 8, 8
# Stated bound: float32 rounding, relative to the largest value of each array.
BOUND = 1e-5
MESHES = {"one": MeshConfig(), "dp2-tp2-sp2": MeshConfig(dp=2, tp=2, sp=2)}
DENSE = [
    name
    for name in OperationRegistry.list_implementations()
    if not any("paged" in form.capabilities.features for form in OperationRegistry.get(name))
]
FEATURES = [name for name in get_args(Feature) if name not in ("paged", "mixed")]


@cache
def arrays(kv_heads: int = H, length: int = L, keys: int = L) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = ((length, H), (keys, kv_heads), (keys, kv_heads))
    return tuple(rng.normal(size=(B, n, heads, h)).astype(np.float32) for n, heads in shapes)


def segments() -> np.ndarray:
    return np.sort(np.random.default_rng(1).integers(0, 3, (B, L)), axis=1).astype(np.int32)


def options_of(feature: str) -> dict:
    """The arguments that ask for this feature; floating ones are differentiated."""
    rng = np.random.default_rng(2)
    causal = np.tril(np.ones((4, 4), bool))
    causal[2, 1] = False
    unused = np.where(np.arange(L) < 20, np.arange(L), UNUSED)[None].repeat(B, 0)
    unused[0, 12:] = UNUSED
    return {
        "bidirectional": {"causal": False},
        "segment_ids": {"q_segment_ids": segments()},
        "window": {"sliding_window": 5},
        "chunk": {"chunk_size": 8},
        "prefix": {"prefix": 6},
        "block_mask": {"block_mask": BlockMask.of(causal, L // 4, L // 4)},
        "soft_cap": {"logits_soft_cap": 1.5},
        "sinks": {"softmax_aux": rng.normal(size=H).astype(np.float32)},
        "gqa": {},
        "bias": {"bias": rng.normal(size=(B, H, L, L)).astype(np.float32)},
        "mask": {"mask": rng.random((B, 1, L, L)) < 0.7},
        "dropout": {"dropout_key": jax.random.key(3)},
        "row_order": {"q_index": zigzag_order(L, 4), "kv_index": zigzag_order(L, 4)},
        "sequence_parallel": {},
        "decode": {
            "mode": MODE_DECODE,
            "q_index": np.array([[11], [19]], np.int32),
            "kv_index": unused.astype(np.int32),
        },
    }[feature]


def metadata(mesh: str = "one", **fields) -> OperationMetadata:
    config = MESHES[mesh]
    rules = residual_rules("sequence")
    built = build_mesh(config, jax.devices()[: config.num_devices])
    return OperationMetadata(
        runtime_dtype=jnp.float32,
        partition_axis=rules,
        partition_manager=PartitionManager(rules, built),
        dropout_prob=0.3,
        _stored_mesh=built,
        **fields,
    )


def run(name: str, mesh: str, feature: str, **fields):
    """(result, gradients by q, k, v and every floating option) as numpy."""
    options = options_of(feature)
    floating = {key: y for key, y in options.items() if key in ("bias", "softmax_aux")}
    fixed = {key: y for key, y in options.items() if key not in floating}
    q, k, v = arrays(2 if feature == "gqa" else H, 1 if feature == "decode" else L)
    operation = OperationRegistry.create(name, metadata(mesh, **fields))

    def loss(parts, floating):
        out = operation(*parts, **fixed, **floating)
        return jnp.sum(jnp.sin(out)), out

    with jax.set_mesh(operation.metadata.mesh):
        put = jax.tree.map(lambda y: jax.device_put(y, P()), ((q, k, v), floating))
        grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*put)
    return jax.tree.map(np.asarray, (out, grads))


@cache
def oracle(feature: str):
    return run("vanilla", "one", feature)


def assert_close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= BOUND * max(np.abs(b).max(), 1.0)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", DENSE)
def test_a_claimed_feature_equals_vanilla_and_another_is_refused(name, feature, mesh) -> None:
    (form,) = (form for form in OperationRegistry.get(name) if form.name == "native")
    claimed = feature in form.capabilities.features
    if claimed and (name, mesh) != ("vanilla", "one"):
        assert_close(run(name, mesh, feature), oracle(feature))
    elif not claimed and (feature != "sequence_parallel" or mesh != "one"):
        with pytest.raises(ValueError, match=rf"attention {name} cannot do .* has no .*{feature}"):
            run(name, mesh, feature)


@pytest.mark.parametrize("layout", ["bhtd", "thd"])
@pytest.mark.parametrize("name", DENSE)
def test_layouts_differ_in_the_order_of_dims_alone(name, layout) -> None:
    operation = OperationRegistry.create(name, metadata())
    rows = arrays() if layout == "bhtd" else tuple(y[:1] for y in arrays())
    turned = [y.swapaxes(1, 2) if layout == "bhtd" else y[0] for y in rows]
    want, got = operation(*rows), operation(*turned, layout=layout)
    np.testing.assert_array_equal(got.swapaxes(1, 2) if layout == "bhtd" else got[None], want)


@pytest.mark.parametrize("name", DENSE)
def test_no_token_sees_the_future_or_another_document(name) -> None:
    operation, ids = OperationRegistry.create(name, metadata()), segments()
    q, k, v = arrays()

    @jax.jit
    def gradient(i, k, v):
        def out_of(k, v):
            chosen = (jnp.arange(B)[:, None] == 0) & (jnp.arange(L) == i)
            out = operation(q, k, v, q_segment_ids=ids)
            return jnp.sum(jnp.where(chosen[..., None, None], out, 0.0))

        return jax.grad(out_of, (0, 1))(k, v)

    for i in range(0, L, 5):
        seen = [j for j in range(i + 1) if ids[0, j] == ids[0, i]]
        by_key, by_value = gradient(i, k, v)
        assert set(np.flatnonzero(np.abs(by_key[0]).sum((1, 2)))) <= set(seen)
        assert list(np.flatnonzero(np.abs(by_value[0]).sum((1, 2)))) == seen


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("mesh", MESHES)
def test_packed_documents_do_not_change_each_other_by_a_bit(name, mesh) -> None:
    operation, ids = OperationRegistry.create(name, metadata(mesh)), segments()
    q, k, v = arrays()
    other = ids[0] == ids[0, -1]
    changed = [y.copy() for y in (k, v)]
    changed[0][0, other] += 5
    changed[1][0, other] -= 3
    with jax.set_mesh(operation.metadata.mesh):
        attend = jax.jit(lambda *parts: operation(*parts, q_segment_ids=jnp.asarray(ids)))
        before, after = (np.asarray(attend(q, *kv)) for kv in ((k, v), changed))
    np.testing.assert_array_equal(before[0, ~other], after[0, ~other])
    np.testing.assert_array_equal(before[1], after[1])
    assert np.abs(before - after)[0, other].max() > 0.1


TPU_FORMS = [
    (form, feature)
    for name in DENSE
    for form in OperationRegistry.get(name)
    for feature in ("none", *FEATURES)
    if form.name == "tpu" and feature in {"none", *form.capabilities.features}
]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "feature"), TPU_FORMS, ids=lambda x: getattr(x, "operation", x))
def test_a_kernel_for_tpu_equals_vanilla_in_the_interpreter(form, feature) -> None:
    """Rows of two blocks of 128; rings of one device: what they send is tested elsewhere."""
    rng, rows, wide = np.random.default_rng(0), 256, 128
    heads = (4, 2, 2) if feature == "gqa" else (2, 2, 2)
    parts = [jnp.asarray(rng.normal(size=(1, rows, n, wide)), jnp.float32) for n in heads]
    index = jnp.arange(rows)[None]
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (1, rows)), axis=1), jnp.int32)
    order = jnp.asarray(zigzag_order(rows, 4))[None]
    blocks = BlockMask.of([[1, 0], [0, 0]], rows // 2, rows // 2)
    patterns = {
        "bidirectional": Pattern(causal=False),
        "window": Pattern(window=37),
        "chunk": Pattern(chunk=100),
        "prefix": Pattern(prefix=30),
        "block_mask": Pattern(blocks=blocks),
    }
    inputs = ScoreInputs(
        q_index_BL=order if feature == "row_order" else index,
        kv_index_BT=order if feature == "row_order" else index,
        q_segment_ids_BL=ids if feature == "segment_ids" else None,
        kv_segment_ids_BT=ids if feature == "segment_ids" else None,
        sinks_H=jnp.asarray(rng.normal(size=2), jnp.float32) if feature == "sinks" else None,
    )
    rule = ScoreRule(
        scale=wide**-0.5,
        pattern=patterns.get(feature, Pattern()),
        soft_cap=2.0 if feature == "soft_cap" else None,
        block_q=128,
        block_k=128,
    )

    def both(function):
        def loss(*parts):
            out = function(*parts, inputs, rule)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*parts)

    with pltpu.force_tpu_interpret_mode():
        got = both(form.function)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(both(vanilla)), strict=True):
        assert np.abs(a - b).max() <= BOUND * max(np.abs(b).max(), 1.0)
