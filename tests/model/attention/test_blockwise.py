"""Attention in blocks equals dense attention, for every feature, skipped block and merge."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_mask import seen_BHLT

from model.attention.blockwise import OutputGradients, attend, attend_gradients, block_pairs
from model.attention.flash import flash_attention
from model.attention.mask import (
    UNUSED,
    AttentionInputs,
    AttentionSpec,
    BlockMask,
    MaskSpec,
    chunk_ids,
    dropout_keep_BHLT,
)

B, h = 2, 8
# Bound: float32 rounding of sums of some tens of terms of order one.
BOUND = 2e-5


def dense(q_BLHh, k_BTKh, v_BTKh, inputs: AttentionInputs, spec: AttentionSpec):
    """Return (out, lse) of dense attention, with every score in memory."""
    G = q_BLHh.shape[2] // k_BTKh.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q_BLHh, k_BTKh, v_BTKh))
    k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
    scores = spec.scale * jnp.einsum("BLHh,BTHh->BHLT", q, k)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    if inputs.bias_BHLT is not None:
        scores = scores + inputs.bias_BHLT
    weights = jnp.exp(jnp.where(seen_BHLT(spec.mask, inputs), scores, -jnp.inf))
    norm = weights.sum(-1)
    if inputs.sinks_H is not None:
        norm = norm + jnp.exp(inputs.sinks_H)[:, None]
    blind = norm == 0
    norm = jnp.where(blind, 1.0, norm)
    if spec.dropout:
        weights = weights * dropout_keep_BHLT(inputs, spec.dropout) / (1 - spec.dropout)
    out = jnp.einsum("BHLT,BTHh->BLHh", weights / norm[..., None], v)
    return out, jnp.where(blind, -jnp.inf, jnp.log(norm))


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arrays(L: int, T: int, H: int = 4, K: int = 2) -> tuple[jax.Array, ...]:
    return draw(0, B, L, H, h), draw(1, B, T, K, h), draw(2, B, T, K, h)


def indices(L: int, T: int) -> AttentionInputs:
    """Return the inputs of queries that are the last L of T tokens."""
    return AttentionInputs(q_index_BL=jnp.arange(T - L, T)[None], kv_index_BT=jnp.arange(T)[None])


def documents(rows: int, seed: int = 3) -> jax.Array:
    ids = np.random.default_rng(seed).integers(0, 3, (B, rows))
    return jnp.asarray(np.sort(ids, axis=1), jnp.int32)


def case(name: str, L: int, T: int, H: int = 4) -> tuple[AttentionInputs, AttentionSpec]:
    """Return the inputs and spec of causal attention with the named feature."""
    rng = np.random.default_rng(4)
    order = jnp.asarray([rng.permutation(T) for _ in range(B)], jnp.int32)
    blocks = BlockMask.from_array(rng.random((-(-T // 3), -(-T // 4))) < 0.5, 3, 4)
    ids = documents(T)
    masked = jnp.asarray(rng.random((B, 1, L, T)) < 0.5)
    seed = jnp.asarray([7, 11], jnp.uint32)
    inputs, fields = {
        "causal": ({}, {}),
        "bidirectional": ({}, {"mask": MaskSpec(causal=False)}),
        "segments": ({"q_segment_ids_BL": ids[:, T - L :], "kv_segment_ids_BT": ids}, {}),
        "window": ({}, {"mask": MaskSpec(window=4)}),
        "window both ways": ({}, {"mask": MaskSpec(window=4, causal=False)}),
        "prefix": ({}, {"mask": MaskSpec(window=2, prefix=3)}),
        "blocks": ({}, {"mask": MaskSpec(blocks=blocks)}),
        "soft cap": ({}, {"soft_cap": 0.7}),
        "bias": ({"bias_BHLT": draw(5, B, H, L, T)}, {}),
        "shared bias": ({"bias_BHLT": draw(5, 1, 1, L, T)}, {"soft_cap": 0.7}),
        "mask": ({"mask_BHLT": masked}, {"mask": MaskSpec(causal=False)}),
        "sinks": ({"sinks_H": draw(6, H)}, {}),
        "dropout": (
            {"dropout_seed": seed, "row_ids_B": jnp.arange(B), "head_ids_H": jnp.arange(H)},
            {"dropout": 0.4},
        ),
        "row order": ({"q_index_BL": order[:, :L], "kv_index_BT": order}, {}),
        "unused": ({"kv_index_BT": jnp.where(order < T - 6, order, UNUSED)}, {}),
    }[name]
    return replace(indices(L, T), **inputs), replace(AttentionSpec(scale=0.4), **fields)


FEATURES = [
    *"causal bidirectional segments window prefix blocks bias mask sinks".split(),
    *("window both ways", "soft cap", "shared bias", "dropout", "row order", "unused"),
]


def values_and_derivatives(function, inputs: AttentionInputs, spec: AttentionSpec, *qkv):
    """Return the result and the derivatives in q, k, v, bias and sinks for a fixed cotangent."""

    def of(qkv, bias, sinks):
        return function(*qkv, replace(inputs, bias_BHLT=bias, sinks_H=sinks), spec)

    out, pull = jax.vjp(of, qkv, inputs.bias_BHLT, inputs.sinks_H)
    return out, pull(draw(8, *out.shape).astype(out.dtype))


def assert_close(got, want, bound: float = BOUND) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x.astype(np.float32), y, rtol=bound, atol=bound)


def assert_equals_dense(inputs: AttentionInputs, spec: AttentionSpec, *qkv) -> None:
    @jax.jit
    def both(inputs, *qkv):
        got = values_and_derivatives(flash_attention, inputs, spec, *qkv)
        return got, values_and_derivatives(lambda *a: dense(*a)[0], inputs, spec, *qkv)

    assert_close(*both(inputs, *qkv))


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_equals_dense_attention_in_value_and_derivative(name) -> None:
    # Blocks of more queries than decoding has: sequence by sequence.
    inputs, spec = case(name, 45, 45)
    assert_equals_dense(inputs, replace(spec, block_q=33, block_k=17), *arrays(45, 45))


def test_features_together_equal_dense_attention() -> None:
    together = ("segments", "dropout", "bias", "sinks", "mask")
    parts = [case(name, 11, 14)[0] for name in together]
    inputs = indices(11, 14)
    for part in parts:
        given_ = {
            name: x for name, x in vars(part).items() if x is not None and "index" not in name
        }
        inputs = replace(inputs, **given_)
    pattern = MaskSpec(window=9, prefix=2, blocks=case("blocks", 11, 14)[1].mask.blocks)
    spec = AttentionSpec(scale=0.4, mask=pattern, soft_cap=1.3, dropout=0.4, block_q=5, block_k=3)
    assert_equals_dense(inputs, spec, *arrays(11, 14, K=1))


@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    L=st.integers(1, 12),
    earlier=st.integers(0, 9),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    blocks=st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_any_lengths_heads_and_blocks_equal_dense_attention(L, earlier, heads, blocks) -> None:
    T = L + earlier
    spec = AttentionSpec(scale=0.4, mask=MaskSpec(window=7), block_q=blocks[0], block_k=blocks[1])
    assert_equals_dense(indices(L, T), spec, *arrays(L, T, *heads))


def test_default_blocks_divide_rows_evenly() -> None:
    assert_equals_dense(*case("causal", 530, 530), *(x[:1] for x in arrays(530, 530, 1, 1)))


def test_bfloat16_equals_dense_attention_within_its_rounding() -> None:
    inputs, spec = case("sinks", 13, 13)
    qkv = tuple(x.astype(jnp.bfloat16) for x in arrays(13, 13))
    spec = replace(spec, block_q=4, block_k=5)

    @jax.jit
    def both(inputs, *qkv):
        wide = (x.astype(jnp.float32) for x in qkv)
        want = values_and_derivatives(lambda *a: dense(*a)[0], inputs, spec, *wide)
        return values_and_derivatives(flash_attention, inputs, spec, *qkv), want

    (out, grads), want = both(inputs, *qkv)
    assert {x.dtype for x in (out, *grads[0])} == {jnp.dtype(jnp.bfloat16)}
    # Bound: a few roundings to 8 bits, of numbers up to four.
    assert_close((out, grads), want, bound=4e-2)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_have_zero_results_and_gradients(sinks) -> None:
    L = 9
    mask = jnp.ones((1, 1, L, L), bool).at[:, :, 3:6].set(False)
    inputs = replace(indices(L, L), mask_BHLT=mask, sinks_H=draw(6, 4) if sinks else None)
    spec = AttentionSpec(scale=0.4, block_q=2, block_k=4)
    qkv = arrays(L, L)

    @jax.jit
    def run(*qkv):
        return values_and_derivatives(flash_attention, inputs, spec, *qkv), attend(
            *qkv, replace(inputs, sinks_H=None), spec
        )

    (out, (grads, _, _)), (_, lse) = run(*qkv)
    assert not np.any(out[:, 3:6]) and not np.any(grads[0][:, 3:6])
    assert np.all(lse[:, :, 3:6] == -np.inf) and np.all(np.isfinite(lse[:, :, :3]))
    assert all(np.all(np.isfinite(x)) for x in (out, *grads))
    assert_equals_dense(inputs, spec, *qkv)


def half(inputs: AttentionInputs, keys: slice) -> AttentionInputs:
    bias = inputs.bias_BHLT
    return replace(
        inputs,
        kv_index_BT=inputs.kv_index_BT[:, keys],
        kv_segment_ids_BT=inputs.kv_segment_ids_BT[:, keys],
        bias_BHLT=None if bias is None else bias[..., keys],
    )


def test_parts_of_the_keys_merge_to_the_whole_and_their_gradients_add_up() -> None:
    L, halves = 12, (slice(0, 5), slice(5, 12))
    inputs, spec = case("segments", L, L)
    inputs = replace(inputs, bias_BHLT=draw(5, 1, 4, L, L))
    spec = replace(spec, block_q=4, block_k=3, mask=MaskSpec(window=6))

    @jax.jit
    def run(dout, q, k, v):
        parts = [attend(q, k[:, s], v[:, s], half(inputs, s), spec) for s in halves]
        lse = jnp.logaddexp(*(part[1] for part in parts))
        shares = [jnp.exp(part[1] - lse).transpose(0, 2, 1)[..., None] for part in parts]
        out = sum(share * part[0] for share, part in zip(shares, parts, strict=True))
        delta = (dout * out).sum(-1).transpose(0, 2, 1)
        output = OutputGradients(lse, delta, dout)
        grads = [
            attend_gradients(q, k[:, s], v[:, s], half(inputs, s), spec, output) for s in halves
        ]
        got = (
            grads[0].q_BLHh + grads[1].q_BLHh,
            jnp.concatenate([g.k_BTKh for g in grads], axis=1),
            jnp.concatenate([g.v_BTKh for g in grads], axis=1),
            jnp.concatenate([g.bias_BHLT for g in grads], axis=-1),
        )
        whole = attend(q, k, v, inputs, spec)
        of_whole = attend_gradients(q, k, v, inputs, spec, output)
        return ((out, lse), whole, dense(q, k, v, inputs, spec)), (got, tuple(of_whole))

    (merged, whole, want), (got, of_whole) = run(draw(8, B, L, 4, h), *arrays(L, L))
    assert_close(merged, want)
    assert_close(whole, want)
    assert_close(got, of_whole)


def visited(inputs: AttentionInputs, L: int, T: int, sequence: int = 0, **spec) -> set:
    """Return the pairs (block of queries, block of keys) visited for one of two sequences."""
    run = jax.jit(lambda inputs: block_pairs(inputs, AttentionSpec(scale=1.0, **spec), L, T, B=B))
    visits, count = run(inputs)
    found = [tuple(visit) for visit in np.asarray(visits[: int(count)]).tolist()]
    assert len(set(found)) == len(found) == int(count)
    return {(a, b) for s, a, b in found if s == sequence}


def test_only_blocks_in_which_something_is_visible_are_visited() -> None:
    # More queries per block than `decoding` has: every sequence is visited by itself.
    n, size = 8, 64
    L, sizes = n * size, {"block_q": size, "block_k": size}
    rows = indices(L, L)
    every = {(a, b) for a in range(n) for b in range(n)}
    causal = {(a, b) for a, b in every if a >= b}
    both = MaskSpec(causal=False)
    assert visited(rows, L, L, mask=both, **sizes) == every
    assert visited(rows, L, L, **sizes) == causal
    # Blocks that do not divide the rows: the last rows of a block of queries are 4, 9, .. 24, 28.
    assert len(visited(indices(29, 29), 29, 29, block_q=5, block_k=6)) == 1 + 2 + 3 + 4 + 5 + 5
    window = {(a, b) for a, b in causal if a - b <= 2}
    assert visited(rows, L, L, mask=MaskSpec(window=size + 2), **sizes) == window
    ids = chunk_ids(rows.q_index_BL, None, chunk=2 * size, keys=L)
    chunked = replace(rows, q_segment_ids_BL=ids, kv_segment_ids_BT=ids)
    chunks = {(a, b) for a, b in causal if a // 2 == b // 2}
    assert visited(chunked, L, L, mask=MaskSpec(window=2 * size), **sizes) == chunks
    prefix = window | {(a, 0) for a in range(n)}
    pattern = MaskSpec(window=size + 2, prefix=3)
    assert visited(rows, L, L, mask=pattern, **sizes) == prefix
    drawn = np.random.default_rng(0).random((n, n)) < 0.3
    mask = BlockMask.from_array(drawn, size, size)
    want = {(a, b) for a, b in every if drawn[a, b]}
    assert visited(rows, L, L, mask=replace(both, blocks=mask), **sizes) == want
    rows_LT = jnp.asarray(np.kron(drawn, np.ones((size, size), bool)))
    masked = replace(rows, mask_BHLT=rows_LT[None, None])
    assert visited(masked, L, L, mask=both, **sizes) == want


def test_documents_unused_slots_and_shuffled_rows_are_skipped_by_what_is_in_a_block() -> None:
    n, size = 8, 64
    L, sizes = n * size, {"block_q": size, "block_k": size}
    rows = indices(L, L)
    causal = {(a, b) for a in range(n) for b in range(a + 1)}
    # Two sequences: documents of three blocks, and of five.
    ids = jnp.stack([jnp.arange(L) // (3 * size), jnp.arange(L) // (5 * size)])
    packed = replace(rows, q_segment_ids_BL=ids, kv_segment_ids_BT=ids)
    for sequence, blocks in ((0, 3), (1, 5)):
        want = {(a, b) for a, b in causal if a // blocks == b // blocks}
        assert visited(packed, L, L, sequence, **sizes) == want
    order = np.array([0, 7, 1, 6, 2, 5, 3, 4])
    index = jnp.asarray((order[:, None] * size + np.arange(size)).reshape(1, -1))
    zigzag = replace(rows, q_index_BL=index, kv_index_BT=index)
    want = {(a, b) for a in range(n) for b in range(n) if order[a] >= order[b]}
    assert visited(zigzag, L, L, **sizes) == want


def test_decoding_visits_all_sequences_at_once_and_used_slots_only() -> None:
    T, used = 64, jnp.asarray([[14], [30]])
    index = jnp.where(jnp.arange(T) < used, jnp.arange(T), UNUSED)
    slots = AttentionInputs(q_index_BL=used - 1, kv_index_BT=index)
    assert visited(slots, 1, T, block_k=4) == {(0, b) for b in range(8)}
    assert visited(slots, 1, T, block_k=4, mask=MaskSpec(window=4)) == {
        (0, b) for b in (2, 3, 6, 7)
    }
    # A slot that is not used makes no later key of its block visible.
    gap = AttentionInputs(q_index_BL=used[:1] - 9, kv_index_BT=jnp.asarray([[3, 4, UNUSED, 9]]))
    assert visited(gap, 1, 4, block_k=2) == {(0, 0)}
    # A query beyond all slots sees no more of them.
    later = replace(slots, q_index_BL=used + 99)
    assert visited(later, 1, T, block_k=4) == {(0, b) for b in range(8)}


def test_skipped_blocks_are_not_read() -> None:
    size = 40
    L = 4 * size
    spec = AttentionSpec(scale=0.4, block_q=size, block_k=size)
    q, k, v = arrays(L, L)
    q, k, v = (x.at[:, size : 2 * size].set(jnp.nan) for x in (q, k, v))
    ids = jnp.arange(L)[None] // size
    inputs = replace(indices(L, L), q_segment_ids_BL=ids, kv_segment_ids_BT=ids)
    run = jax.jit(lambda *qkv: values_and_derivatives(flash_attention, inputs, spec, *qkv))
    out, (grads, _, _) = run(q, k, v)
    for x in (out, *grads):
        assert np.all(np.isfinite(x[:, :size])) and np.all(np.isfinite(x[:, 2 * size :]))


def island(body, shape: tuple[int, int], specs: dict[str, P], out_spec: P, given_: dict):
    """Return `body` in a shard_map over eight devices that checks varying axes."""
    devices = np.array(jax.devices()[:8]).reshape(shape)
    mesh = Mesh(devices, ("rows", "heads"), axis_types=(AxisType.Explicit,) * 2)
    order = list(given_)
    placed = [jax.device_put(given_[name], NamedSharding(mesh, specs[name])) for name in order]

    def local(*blocks: jax.Array) -> jax.Array:
        return body(**dict(zip(order, blocks, strict=True)))

    in_specs = tuple(specs[name] for name in order)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_spec), mesh, placed


def test_rows_and_heads_split_over_devices_equal_dense_attention() -> None:
    L, H, K = 10, 8, 4
    q, k, v = arrays(L, L, H, K)
    given_ = {"q": q, "k": k, "v": v, "bias": draw(5, 1, 1, L, L), "sinks": draw(6, H)}
    given_["ids"] = documents(L)
    split = P("rows", None, "heads", None)
    specs = {"q": split, "k": split, "v": split, "bias": P(), "sinks": P("heads")}
    specs["ids"] = P("rows", None)
    spec = AttentionSpec(scale=0.4, block_q=4, block_k=3)

    def body(function, q, k, v, bias, sinks, ids):
        inputs = replace(indices(L, L), q_segment_ids_BL=ids, kv_segment_ids_BT=ids)
        return function(q, k, v, replace(inputs, bias_BHLT=bias, sinks_H=sinks), spec)

    def derived(function, *arrays):
        out, pull = jax.vjp(lambda *floats: function(*floats, arrays[5]), *arrays[:5])
        return out, pull(jnp.cos(out))

    local, mesh, placed = island(
        lambda **blocks: body(flash_attention, **blocks), (2, 4), specs, split, given_
    )
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *a: derived(local, *a))(*placed)
    want = jax.jit(lambda *a: derived(lambda *b: body(lambda *c: dense(*c)[0], *b), *a))(
        *given_.values()
    )
    assert_close(got, want)


@pytest.mark.parametrize("L", [1, 3])
def test_results_over_keys_split_over_devices_are_merged(L) -> None:
    T, H = 24, 4
    q, k, v = arrays(L, T, H, 2)
    index = jnp.where(jnp.arange(T) < jnp.asarray([[9], [17]]), jnp.arange(T), UNUSED)
    queries = jnp.asarray([[9], [17]]) - L + jnp.arange(L)
    given_ = {"q": q, "k": k, "v": v, "index": index, "queries": queries, "sinks": draw(6, H)}
    keys = P(None, "heads", None, None)
    specs = {"q": P(), "k": keys, "v": keys, "index": P(None, "heads"), "queries": P()}
    specs["sinks"] = P()

    def body(function, spec, q, k, v, index, queries, sinks):
        inputs = AttentionInputs(q_index_BL=queries, kv_index_BT=index, sinks_H=sinks)
        return function(q, k, v, inputs, spec)

    spec = AttentionSpec(scale=0.4, mask=MaskSpec(window=12), block_k=2)
    local, mesh, placed = island(
        lambda **blocks: body(flash_attention, replace(spec, merge_axis="heads"), **blocks),
        (1, 8),
        specs,
        P(),
        given_,
    )
    with jax.set_mesh(mesh):
        got = jax.jit(local)(*placed)
    assert_close(got, body(dense, spec, **given_)[0])


def test_memory_at_8192_tokens_is_under_an_eighth_of_one_score_matrix() -> None:
    def temporary(L: int) -> int:
        inputs, spec = indices(L, L), AttentionSpec(scale=0.125)
        x = jax.ShapeDtypeStruct((1, L, 8, 64), jnp.float32)
        run = jax.jit(lambda *qkv: values_and_derivatives(flash_attention, inputs, spec, *qkv))
        return run.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(4096), temporary(8192)
    assert long < 2.2 * short
    assert long < 8 * 8192 * 8192 * 4 / 8
