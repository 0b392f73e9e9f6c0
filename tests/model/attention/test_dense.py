"""`vanilla` equals attention written out in numpy; `sdpa` adds a bias in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ONE_DEVICE, tensor_parallel
from plain_mask import sees

from model.attention.api import OperationRegistry
from model.attention.dense import vanilla
from model.attention.mask import (
    AttentionInputs,
    AttentionSpec,
    MaskSpec,
    dropout_keep_BHLT,
)
from model.attention.metadata import OperationMetadata

B, L, h = 2, 12, 8


def qkv(H: int, K: int, dtype=np.float32):
    rng = np.random.default_rng(H * 10 + K)
    return tuple(rng.normal(size=(B, L, heads, h)).astype(dtype) for heads in (H, K, K))


SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (B, L)), axis=1).astype(np.int32)


def written_out(q, k, v, segments, mask=None, soft_cap=None, bias=None, sinks=None):
    """Attention of one query at a time, in float64."""
    mask = MaskSpec() if mask is None else mask
    H, K = q.shape[2], k.shape[2]
    out = np.zeros(q.shape)
    for b, i, head in np.ndindex(B, L, H):
        seen = [j for j in range(L) if sees(mask, i, j) and segments[b, j] == segments[b, i]]
        if not seen:
            continue
        keys = k[b, seen, head // (H // K)].astype(np.float64)
        scores = keys @ q[b, i, head].astype(np.float64) * h**-0.5
        scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
        scores = scores if bias is None else scores + bias[b, head, i, seen]
        weights = np.exp(scores)
        norm = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
        out[b, i, head] = weights / norm @ v[b, seen, head // (H // K)]
    return out


def call(q, k, v, segments=SEGMENTS, *, inputs=None, **spec):
    index = jnp.arange(L)[None]
    rows = AttentionInputs(
        q_index_BL=index,
        kv_index_BT=index,
        q_segment_ids_BL=segments,
        kv_segment_ids_BT=segments,
        **(inputs or {}),
    )
    spec = AttentionSpec(**{"scale": h**-0.5, **spec})
    return jax.jit(vanilla, static_argnums=4)(q, k, v, rows, spec)


@pytest.mark.parametrize(
    ("heads", "mask"),
    [
        ((4, 4), MaskSpec()),
        ((4, 1), MaskSpec()),
        ((4, 2), MaskSpec(causal=False)),
        ((4, 2), MaskSpec(window=3)),
        ((4, 2), MaskSpec(causal=False, window=3)),
        ((4, 2), MaskSpec(prefix=4)),
        ((4, 2), MaskSpec(window=2, prefix=1)),
    ],
    ids=str,
)
def test_vanilla_equals_attention_written_out(heads, mask) -> None:
    arrays = qkv(*heads)
    want = written_out(*arrays, SEGMENTS, mask)
    np.testing.assert_allclose(call(*arrays, mask=mask), want, atol=2e-6)


def test_vanilla_applies_soft_cap_bias_and_sinks() -> None:
    arrays, rng = qkv(4, 2), np.random.default_rng(5)
    bias = rng.normal(size=(B, 4, L, L)).astype(np.float32)
    sinks = rng.normal(size=4).astype(np.float32)
    got = call(*arrays, soft_cap=0.7, inputs={"bias_BHLT": bias, "sinks_H": sinks})
    want = written_out(*arrays, SEGMENTS, soft_cap=0.7, bias=bias, sinks=sinks)
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("sinks", [None, jnp.zeros(4)], ids=["no sinks", "sinks"])
def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient(sinks) -> None:
    mask = np.ones((B, 1, L, L), bool)
    mask[:, :, 5] = False

    def loss(q, k, v):
        out = call(q, k, v, inputs={"mask_BHLT": mask, "sinks_H": sinks}, scale=1.0)
        return jnp.sum(out**2), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*qkv(4, 2))
    assert np.abs(out[:, 5]).max() == 0 and np.abs(grads[0][:, 5]).max() == 0
    assert all(np.isfinite(g).all() for g in grads)


def test_vanilla_in_bfloat16_keeps_float32_scores() -> None:
    low = [y.astype(jnp.bfloat16) for y in qkv(4, 2)]
    out = call(*low)
    assert out.dtype == jnp.bfloat16
    want = written_out(*(np.asarray(y, np.float32) for y in low), SEGMENTS)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=2e-2)


def test_rows_heads_queries_and_keys_drop_weights_of_their_own() -> None:
    sizes = (4, 5, 32, 33)
    rows, heads, queries, keys = (jnp.arange(size) for size in sizes)
    inputs = AttentionInputs(
        q_index_BL=queries[None],
        kv_index_BT=keys[None],
        dropout_seed=jnp.array([3, 7], jnp.uint32),
        row_ids_B=rows,
        head_ids_H=heads,
    )
    keep = np.asarray(dropout_keep_BHLT(inputs, 0.5))
    assert keep.shape == sizes
    for dim in range(4):  # thousands of coins: 0.05 is more than six standard deviations
        assert abs(np.diff(keep, axis=dim).mean() - 0.5) < 0.05


def test_dropout_drops_its_fraction_and_keeps_the_mean() -> None:
    q, k, _ = qkv(4, 4)
    v = np.ones((B, L, 4, h), np.float32)
    numbers = {"row_ids_B": jnp.arange(B), "head_ids_H": jnp.arange(4)}
    spec = {"scale": 0.0, "dropout": 0.25, "mask": MaskSpec(causal=False)}
    outs = [
        call(
            *(q, k, v, 0 * SEGMENTS),
            inputs={"dropout_seed": jnp.array([seed, 7], jnp.uint32), **numbers},
            **spec,
        )
        for seed in range(40)
    ]
    # 12 equal weights per query: each result is (kept / 12) / 0.75, of mean 1.
    kept = np.asarray(outs)[..., 0] * 12 * 0.75
    np.testing.assert_allclose(kept, kept.round(), atol=1e-4)
    assert kept.mean() / 12 == pytest.approx(0.75, abs=0.01)
    assert kept.std() == pytest.approx((12 * 0.25 * 0.75) ** 0.5, rel=0.1)


def test_sdpa_adds_a_bias_in_float32() -> None:
    """The bias is a slope of positions; bfloat16 would keep two digits of it."""
    bias = 400 + 0.3 * np.arange(L, dtype=np.float32) * np.ones((1, 1, L, 1), np.float32)
    inputs = AttentionInputs(bias_BHLT=bias)
    tp = tensor_parallel(ONE_DEVICE)
    metadata = OperationMetadata(jnp.bfloat16, partition_manager=tp.manager)
    sdpa, want = (
        np.asarray(
            OperationRegistry.create(name, metadata)(*qkv(4, 2, jnp.bfloat16), inputs=inputs)
        )
        for name in ("sdpa", "vanilla")
    )
    np.testing.assert_allclose(sdpa.astype(float), want.astype(float), atol=2.0**-5)
