"""`vanilla` equals attention written out in numpy; documents and the future stay unseen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention.dense import vanilla
from model.attention.operation import Capabilities, OperationRegistry
from model.attention.splash import SegmentIds, splash_kernel

B, L, h = 2, 12, 8


def inputs(H: int, K: int, dtype=np.float32):
    rng = np.random.default_rng(H * 10 + K)
    q, k, v = (rng.normal(size=(B, L, heads, h)).astype(dtype) for heads in (H, K, K))
    segments = np.sort(rng.integers(0, 3, (B, L)), axis=1).astype(np.int32)
    return q, k, v, segments


def call(q, k, v, segments):
    index = jnp.arange(L)
    return vanilla(
        q,
        k,
        v,
        q_index_L=index,
        kv_index_T=index,
        q_segment_ids_BL=segments,
        kv_segment_ids_BT=segments,
        softmax_scale=h**-0.5,
    )


def oracle(q, k, v, segments):
    """One query at a time, float64."""
    H, K = q.shape[2], k.shape[2]
    out = np.zeros(q.shape)
    for b in range(B):
        for i in range(L):
            for head in range(H):
                seen = [j for j in range(i + 1) if segments[b, j] == segments[b, i]]
                keys = k[b, seen, head // (H // K)].astype(np.float64)
                scores = keys @ q[b, i, head].astype(np.float64) * h**-0.5
                weights = np.exp(scores - scores.max())
                out[b, i, head] = weights / weights.sum() @ v[b, seen, head // (H // K)]
    return out


@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (4, 1)])
def test_vanilla_equals_attention_written_out(H: int, K: int) -> None:
    arrays = inputs(H, K)
    np.testing.assert_allclose(call(*arrays), oracle(*arrays), atol=2e-6)


def test_vanilla_in_bfloat16_keeps_float32_scores() -> None:
    q, k, v, segments = inputs(4, 2)
    low = [y.astype(jnp.bfloat16) for y in (q, k, v)]
    out = call(*low, segments)
    assert out.dtype == jnp.bfloat16
    want = oracle(*(np.asarray(y, np.float32) for y in low), segments)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=2e-2)


def test_no_token_sees_the_future_or_another_document() -> None:
    q, k, v, segments = inputs(4, 2)

    def out_of(i: int, k, v):
        return jnp.sum(call(q, k, v, segments)[0, i])

    for i in range(L):
        for grad in jax.grad(out_of, (1, 2))(i, k, v):
            touched = np.flatnonzero(np.abs(grad[0]).sum((1, 2)))
            assert all(j <= i and segments[0, j] == segments[0, i] for j in touched)


def test_packed_documents_do_not_change_each_other() -> None:
    q, k, v, segments = inputs(4, 2)
    other = segments[0] == segments[0, -1]
    k2, v2 = k.copy(), v.copy()
    k2[0, other] += 5
    v2[0, other] -= 3
    before, after = call(q, k, v, segments), call(q, k2, v2, segments)
    np.testing.assert_array_equal(before[0, ~other], after[0, ~other])
    assert np.abs(np.asarray(before - after))[0, other].max() > 0.1


def test_the_registry_refuses_unknown_and_double_names() -> None:
    assert OperationRegistry.list_implementations()[0] == "vanilla"
    with pytest.raises(ValueError, match=r"unknown attention operation 'vanila'.*vanilla"):
        OperationRegistry.get("vanila")
    record = Capabilities(needs_all_keys=True)
    with pytest.raises(ValueError, match="registered twice"):
        OperationRegistry.register("vanilla", capabilities=record)(vanilla)


@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2)])
def test_splash_equals_vanilla_in_values_and_gradients(H, K) -> None:
    # The kernel runs in Pallas' interpreter here; 128 rows are the least that it takes.
    rows, width = 128, 128
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, rows, n, width)).astype(np.float32) for n in (H, K, K))
    segments = np.sort(rng.integers(0, 3, (1, rows)), axis=1).astype(np.int32)

    def by_kernel(q, k, v):
        heads_first = (y[0].transpose(1, 0, 2) for y in (q * width**-0.5, k, v))
        ids = SegmentIds(q=segments[0], kv=segments[0])
        return splash_kernel(rows, H, interpret=True)(*heads_first, ids).transpose(1, 0, 2)[None]

    def by_vanilla(q, k, v):
        index = jnp.arange(rows)
        options = {"q_index_L": index, "kv_index_T": index, "softmax_scale": width**-0.5}
        ids = {"q_segment_ids_BL": segments, "kv_segment_ids_BT": segments}
        return vanilla(q, k, v, **options, **ids)

    def both(function):
        def loss(*arrays):
            out = function(*arrays)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    for got, want in zip(
        jax.tree.leaves(both(by_kernel)), jax.tree.leaves(both(by_vanilla)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
