"""`vanilla` equals attention written out in numpy; the registry and dispatch keep their laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel

from model.attention.capabilities import Capabilities, Request
from model.attention.dense import vanilla
from model.attention.dispatch import choose_for_layer, choose_operation, in_zigzag
from model.attention.metadata import OPERATION_NAMES
from model.attention.operation import OperationMetadata, OperationRegistry
from model.attention.scores import PagedInputs, Pattern, ScoreInputs, ScoreRule
from model.config import ModelConfig
from parallel.sharding.axes import MODE_DECODE

B, L, h = 2, 12, 8


def inputs(H: int, K: int, dtype=np.float32):
    rng = np.random.default_rng(H * 10 + K)
    q, k, v = (rng.normal(size=(B, L, heads, h)).astype(dtype) for heads in (H, K, K))
    segments = np.sort(rng.integers(0, 3, (B, L)), axis=1).astype(np.int32)
    return q, k, v, segments


def call(q, k, v, segments, rule: ScoreRule, **arrays):
    index = jnp.arange(L)[None]
    rows = ScoreInputs(
        q_index_BL=index,
        kv_index_BT=index,
        q_segment_ids_BL=segments,
        kv_segment_ids_BT=segments,
        **arrays,
    )
    return jax.jit(vanilla, static_argnums=4)(q, k, v, rows, rule)


CAUSAL = Pattern()


def oracle(q, k, v, segments, pattern=CAUSAL, soft_cap=None, bias=None, sinks=None):
    """One query at a time, float64."""
    H, K = q.shape[2], k.shape[2]
    out = np.zeros(q.shape)
    for b, i, head in np.ndindex(B, L, H):
        sees = [j for j in range(L) if pattern.visible(np.int32(i), np.int32(j))]
        seen = [j for j in sees if segments[b, j] == segments[b, i]]
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


@pytest.mark.parametrize(("H", "K"), [(4, 4), (4, 2), (4, 1)])
def test_vanilla_equals_attention_written_out(H: int, K: int) -> None:
    arrays = inputs(H, K)
    np.testing.assert_allclose(call(*arrays, ScoreRule(scale=h**-0.5)), oracle(*arrays), atol=2e-6)


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern(causal=False),
        Pattern(window=3),
        Pattern(causal=False, window=3),
        Pattern(chunk=5),
        Pattern(prefix=4),
        Pattern(window=2, prefix=1, chunk=6),
    ],
    ids=str,
)
def test_vanilla_sees_what_the_pattern_lets_it_see(pattern: Pattern) -> None:
    arrays = inputs(4, 2)
    got = call(*arrays, ScoreRule(scale=h**-0.5, pattern=pattern))
    np.testing.assert_allclose(got, oracle(*arrays, pattern), atol=2e-6)


def test_vanilla_caps_biases_and_sinks_scores() -> None:
    arrays, rng = inputs(4, 2), np.random.default_rng(5)
    bias = rng.normal(size=(B, 4, L, L)).astype(np.float32)
    sinks = rng.normal(size=4).astype(np.float32)
    rule = ScoreRule(scale=h**-0.5, soft_cap=0.7)
    got = call(*arrays, rule, bias_BHLT=bias, sinks_H=sinks)
    np.testing.assert_allclose(
        got, oracle(*arrays, soft_cap=0.7, bias=bias, sinks=sinks), atol=2e-6
    )


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient() -> None:
    q, k, v, segments = inputs(4, 2)
    unseen = np.ones((B, 1, L, L), bool)
    unseen[:, :, 5] = False

    def loss(q, k, v, sinks):
        out = call(q, k, v, segments, ScoreRule(scale=1.0), mask_BHLT=unseen, sinks_H=sinks)
        return jnp.sum(out**2), out

    for sinks in (None, jnp.zeros(4)):
        grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v, sinks)
        assert np.abs(out[:, 5]).max() == 0 and np.abs(grads[0][:, 5]).max() == 0
        assert all(np.isfinite(g).all() for g in grads)


def test_vanilla_in_bfloat16_keeps_float32_scores() -> None:
    q, k, v, segments = inputs(4, 2)
    low = [y.astype(jnp.bfloat16) for y in (q, k, v)]
    out = call(*low, segments, ScoreRule(scale=h**-0.5))
    assert out.dtype == jnp.bfloat16
    want = oracle(*(np.asarray(y, np.float32) for y in low), segments)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=2e-2)


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    q, k, _, segments = inputs(4, 4)
    v = np.ones((B, L, 4, h), np.float32)
    numbers = {"row_ids_B": jnp.arange(B), "head_ids_H": jnp.arange(4)}
    rule = ScoreRule(scale=0.0, dropout=0.25, pattern=Pattern(causal=False))
    outs = [
        call(q, k, v, 0 * segments, rule, dropout_seed=jnp.array([s, 7], jnp.uint32), **numbers)
        for s in range(40)
    ]
    # 12 equal weights per query: each result is (kept / 12) / 0.75, of mean 1.
    kept = np.asarray(outs)[..., 0] * 12 * 0.75
    np.testing.assert_allclose(kept, kept.round(), atol=1e-4)
    assert kept.mean() / 12 == pytest.approx(0.75, abs=0.01)
    assert kept.std() == pytest.approx((12 * 0.25 * 0.75) ** 0.5, rel=0.1)


def request(**changes) -> Request:
    base = {
        "features": frozenset({"segment_ids"}),
        "platform": "cpu",
        "dtype": "float32",
        "length": 4096,
        "head_dim": 128,
        "heads": 8,
    }
    return Request(**{**base, **changes})


def test_dispatch_takes_the_best_and_says_why_not_the_others() -> None:
    assert choose_operation(request()).name == "flash_attn2"
    short = choose_operation(request(length=64))
    assert short.name == "vanilla"
    assert "flash_attn2 native, blocksparse native (pays from rows of 1024, not 64)" in short.reason
    assert "ring native, ulysses native (sp is one device)" in short.reason
    tpu = choose_operation(request(platform="tpu"))
    assert (tpu.name, tpu.form.name) == ("flash_attn2", "tpu")
    # The kernel has no bias: the same name's native form has.
    biased = choose_operation(request(platform="tpu", features=frozenset({"bias"})))
    assert (biased.name, biased.form.name) == ("flash_attn2", "native")
    assert "flash_attn2 tpu (has no bias)" in biased.reason
    odd = choose_operation(request(platform="tpu", head_dim=80))
    assert "flash_attn2 tpu (needs heads of a multiple of 128, not 80)" in odd.reason
    chunked = choose_operation(request(features=frozenset({"chunk", "segment_ids"})))
    assert chunked.name == "blocksparse"
    split = choose_operation(request(features=frozenset({"sequence_parallel"}), sp=4))
    assert split.name == "ring"
    gpu = choose_operation(
        request(platform="gpu", dtype="bfloat16", features=frozenset({"gqa", "window"}))
    )
    assert (gpu.name, gpu.form.name) == ("flash_attn2", "gpu")
    # Each of two features alone, but not both at once.
    both = request(
        platform="gpu", dtype="bfloat16", features=frozenset({"bidirectional", "window"})
    )
    assert choose_operation(both).form.name == "native"
    assert "flash_attn2 gpu (has no bidirectional with window)" in choose_operation(both).reason
    blind = request(platform="tpu", features=frozenset({"block_mask", "segment_ids"}))
    assert choose_operation(blind, "blocksparse").form.name == "native"


def test_naming_what_cannot_do_it_is_refused_with_what_every_form_lacks() -> None:
    with pytest.raises(ValueError, match=r"attention sdpa cannot .*\(native: has no soft_cap\)"):
        choose_operation(request(features=frozenset({"soft_cap"})), "sdpa")
    with pytest.raises(ValueError, match=r"ulysses cannot .* divisible by sp=8, not 4"):
        split = request(features=frozenset({"sequence_parallel"}), sp=8, heads=4)
        choose_operation(split, "ulysses")
    with pytest.raises(ValueError, match=r"no attention operation .* vanilla native.* \(takes"):
        choose_operation(request(dtype="float64"))


def test_the_registry_refuses_unknown_and_double_names() -> None:
    assert OperationRegistry.list_implementations()[0] == "vanilla"
    assert set(OperationRegistry.list_implementations()) == set(OPERATION_NAMES)
    with pytest.raises(ValueError, match=r"unknown attention operation 'vanila'.*vanilla"):
        OperationRegistry.get("vanila")
    with pytest.raises(ValueError, match="registered twice"):
        OperationRegistry.register("vanilla", capabilities=Capabilities())(vanilla)


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "thd"])
def test_an_operation_takes_every_layout_outside_of_jit(layout: str) -> None:
    q, k, v, _ = inputs(4, 2)
    tp = tensor_parallel(ONE_DEVICE)
    metadata = OperationMetadata(jnp.float32, partition_manager=tp.manager)
    operation = OperationRegistry.create("flash_attn2", metadata)
    to, back = {
        "bthd": (lambda y: y, lambda y: y),
        "bhtd": (lambda y: y.swapaxes(1, 2), lambda y: y.swapaxes(1, 2)),
        "thd": (lambda y: y[0], lambda y: y[None]),
    }[layout]
    got = back(operation(*(to(y) for y in (q, k, v)), layout=layout))
    want = oracle(q, k, v, np.zeros((B, L)))[: got.shape[0]]
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert operation.get_mode(q[:, :1]) == MODE_DECODE


def test_misfit_arrays_are_refused() -> None:
    q, k, v, _ = inputs(4, 2)
    tp = tensor_parallel(ONE_DEVICE)
    metadata = OperationMetadata(jnp.float32, partition_manager=tp.manager)
    operation = OperationRegistry.create("vanilla", metadata)
    for arrays, options, law in (
        ((q, k[:, :5], v), {}, "do not fit"),
        ((q[:, :, :3], k, v), {}, "3 query heads are not a multiple of 2"),
        ((q[0], k, v), {}, "layout bthd has 4 dims"),
        ((q, k, v), {"layout": "htd"}, "attention layout 'htd': use one of bthd, bhtd, thd"),
        ((q, k, v), {"softmax_aux": np.zeros(3)}, r"softmax_aux \(3,\): give logits \(4,\)"),
        ((q, k, v), {"sliding_window": 0}, "attention window=0: use at least 1"),
        (
            (q, k, v),
            {"sliding_window": 2.5},
            "attention window=2.5: use at least 1, a static whole",
        ),
        ((q, k, v), {"block_mask": np.ones((2, 2), bool)}, "blocks of ndarray: use BlockMask.of"),
        ((q, k, v), {"logits_soft_cap": 0.0}, "attention soft_cap=0.0: use a number above 0"),
        ((q, k, v), {"mask": np.ones((B, 1, L, 3), bool)}, "mask .* has not the shape"),
        ((q, k, v), {"mask": np.ones((B, 1, L, L), int)}, "mask of int.*: give booleans"),
        ((q, k, v), {"q_segment_ids": np.zeros((B, 3), int)}, "q_segment_ids .* has not the shape"),
        ((q, k, v), {"kv_segment_ids": np.zeros((B, L), int)}, "without q_segment_ids"),
        ((q[:0], k[:0], v[:0]), {}, "give at least one of everything"),
    ):
        with pytest.raises(ValueError, match=law):
            operation(*arrays, **options)


def test_rows_that_the_mesh_cannot_split_are_refused() -> None:
    q, k, v, _ = inputs(4, 2)
    for mesh, arrays, options, law in (
        ("dp8", (q, k, v), {}, "over 2 sequences: not divisible by dp.*=8; pad"),
        ("tp4-sp2", (q[:, :11], k, v), {}, r"over 11 queries: not divisible by sp=2"),
        ("tp4-sp2", (q, k[:, :1], v[:, :1]), {}, r"over 1 keys: not divisible by sp=2"),
        (
            "tp4-sp2",
            (q[:, :1], k[:, :7], v[:, :7]),
            {"mode": MODE_DECODE},
            "over 7 keys: not divisible by sp=2",
        ),
    ):
        metadata = OperationMetadata(
            jnp.float32, partition_manager=tensor_parallel(MESHES[mesh]).manager
        )
        with pytest.raises(ValueError, match=law):
            OperationRegistry.create("flash_attn2", metadata)(*arrays, **options)


@pytest.mark.parametrize("axis", ["dp", "sp", "tp"])
def test_a_mesh_of_one_axis_is_enough_for_attention(axis: str) -> None:
    q, k, v, _ = inputs(4, 2)
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), (axis,), explicit, devices=jax.devices()[:2])
    operation = OperationRegistry.create("ring", OperationMetadata(jnp.float32, _stored_mesh=mesh))
    want = oracle(q, k, v, np.zeros((B, L)))
    np.testing.assert_allclose(operation(q, k, v), want, atol=2e-6)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ["vanilla", "flash_attn2", "ring"])
@pytest.mark.parametrize("mesh", ["tp4-sp2", "fsdp8"])
def test_more_queries_than_keys_see_all_of_them_if_not_causal(name, window, mesh) -> None:
    q, k, v, _ = inputs(4, 2)
    q, k, v = (np.concatenate([y] * 4) for y in (q, k[:, :4], v[:, :4]))
    manager = tensor_parallel(MESHES[mesh]).manager
    metadata = OperationMetadata(jnp.float32, partition_manager=manager)
    operation = OperationRegistry.create(name, metadata)
    got = operation(q, k, v, causal=False, sliding_window=window)
    sees = np.abs(np.arange(L)[:, None] - np.arange(4)) < (window or L)
    scores = np.einsum("blhd,bthd->bhlt", q, k.repeat(2, 2)) * h**-0.5
    weights = np.exp(scores) * sees
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(
        got, np.einsum("bhlt,bthd->blhd", weights, v.repeat(2, 2)), atol=2e-6
    )


def test_keys_of_other_rows_are_not_for_kernels_that_read_no_indices() -> None:
    """Fewer queries than keys are the last rows, and a segment may have no keys at all."""
    q, k, v, _ = inputs(2, 2)
    metadata = OperationMetadata(
        jnp.float32, partition_manager=tensor_parallel(ONE_DEVICE).manager, platform="tpu"
    )
    kernel = OperationRegistry.create("flash_attn2", metadata)._only("tpu")
    ids = np.zeros((B, L), np.int32)
    for arrays, options in (
        ((q[:, :2], k, v), {}),
        ((q, k, v), {"q_segment_ids": ids, "kv_segment_ids": ids + 1}),
    ):
        with pytest.raises(ValueError, match="has no row_order"):
            kernel(*arrays, **options)
    with pytest.raises(ValueError, match=r"\(tpu: needs rows of a multiple of 128"):
        kernel(q, k, v, q_segment_ids=ids)


def test_settings_that_no_operation_reads_are_refused() -> None:
    manager = tensor_parallel(ONE_DEVICE).manager
    for fields, law in (
        ({"runtime_softmax_dtype": jnp.bfloat16}, "runtime_softmax_dtype=bfloat16: .* float32"),
        ({"blocksize_b": 2}, "blocksize_b=2: no operation works in blocks of sequences"),
    ):
        metadata = OperationMetadata(jnp.float32, partition_manager=manager, **fields)
        with pytest.raises(ValueError, match=law):
            OperationRegistry.create("vanilla", metadata)


def test_pages_whose_heads_do_not_divide_are_refused() -> None:
    metadata = OperationMetadata(
        jnp.float32, partition_manager=tensor_parallel(MESHES["tp8"]).manager
    )
    operation = OperationRegistry.create("ragged_page_attention_v2", metadata)
    paged = PagedInputs(jnp.asarray([[1]]), jnp.asarray([1]))
    with pytest.raises(ValueError, match="8 query heads over pages of 4 kv heads on tp=8"):
        operation.attend_pages(jnp.zeros((1, 8, h)), jnp.zeros((3, 2, 8, h)), paged)


def test_a_model_chooses_per_layer_and_mode() -> None:
    config = ModelConfig(
        layer_types=("sliding_attention", "full_attention"), sliding_window=8, dtype="float32"
    )
    manager = tensor_parallel(MESHES["tp4-sp2"]).manager
    long = choose_for_layer(config, "sliding_attention", manager, length=8192)
    assert long.name == "ring" and in_zigzag(config, manager, 8192)
    assert not in_zigzag(config.model_copy(update={"zigzag": False}), manager, 8192)
    assert choose_for_layer(config, "full_attention", manager, length=64).name == "vanilla"
    decode = choose_for_layer(config, "full_attention", manager, length=1, mode=MODE_DECODE)
    assert decode.name == "flash_attn2" and decode.form.capabilities.merges_keys
    # Keys that are split over sp are merged, not gathered, whatever the layer sees.
    chunks = ModelConfig(
        layer_types=("chunked_attention",), attention_chunk_size=8, dtype="float32"
    )
    decode = choose_for_layer(chunks, "chunked_attention", manager, length=1, mode=MODE_DECODE)
    assert decode.name == "blocksparse" and decode.form.capabilities.merges_keys


@pytest.mark.parametrize("name", ["ragged_page_attention_v2", "ragged_page_attention_v3"])
@pytest.mark.parametrize("mesh", [ONE_DEVICE, MESHES["dp2-fsdp2-tp2"]], ids=["one", "tp2"])
def test_pages_are_attended_to_by_name(name, mesh) -> None:
    """Two sequences of 5 and 3 keys in pages of 2, out of order; their last queries."""
    rng, lengths, K = np.random.default_rng(3), (5, 3), 2
    keys, values = rng.normal(size=(2, 2, 6, K, h)).astype(np.float32)
    table = np.array([[4, 1, 6], [2, 5, 0]], np.int32)
    pages = np.zeros((7, 2, 2 * K, h), np.float32)
    for row, ids in enumerate(table):
        for page, id_ in enumerate(ids):
            pages[id_, :, 0::2] = keys[row, 2 * page : 2 * page + 2]
            pages[id_, :, 1::2] = values[row, 2 * page : 2 * page + 2]
    counts = (1, 1) if name.endswith("v2") else (3, 1)
    q = rng.normal(size=(sum(counts), 4, h)).astype(np.float32)
    starts = None if name.endswith("v2") else jnp.asarray([0, 3, 4], jnp.int32)
    inputs = PagedInputs(jnp.asarray(table), jnp.asarray(lengths, jnp.int32), starts)
    metadata = OperationMetadata(jnp.float32, partition_manager=tensor_parallel(mesh).manager)
    operation = OperationRegistry.create(name, metadata)
    with jax.set_mesh(metadata.mesh):
        got = np.asarray(operation.attend_pages(jnp.asarray(q), jnp.asarray(pages), inputs))
    first = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for i in range(count):
            seen = length - count + i + 1
            for head in range(4):
                scores = keys[row, :seen, head // 2] @ q[first + i, head] * h**-0.5
                weights = np.exp(scores - scores.max())
                want = weights / weights.sum() @ values[row, :seen, head // 2]
                np.testing.assert_allclose(got[first + i, head], want, atol=2e-6)
        first += count
    with pytest.raises(ValueError, match=r"attention vanilla cannot .* has no .*paged"):
        OperationRegistry.create("vanilla", metadata).attend_pages(q, pages, inputs)


@pytest.mark.parametrize("name", ["vanilla", "sdpa", "flash_attn2", "ulysses"])
@pytest.mark.parametrize("value", [-np.inf, np.finfo(np.float32).min])
def test_what_a_bias_hides_is_not_seen(name, value) -> None:
    """Query 0 sees key 0 alone, which the bias hides."""
    q, k, v, _ = inputs(4, 2)
    bias = np.zeros((B, 4, L, L), np.float32)
    bias[..., 5, 2] = -1e4
    want = oracle(q, k, v, np.zeros((B, L)), bias=bias)
    bias[..., 5, 2] = bias[..., 0, 0] = value
    tp = tensor_parallel(ONE_DEVICE)
    metadata = OperationMetadata(jnp.float32, partition_manager=tp.manager)
    operation = jax.jit(OperationRegistry.create(name, metadata))
    with jax.set_mesh(tp.mesh):
        got = np.asarray(operation(q, k, v, bias=bias))
        grads = jax.grad(lambda *arrays: operation(*arrays, bias=bias).sum(), argnums=(0, 1, 2))
        assert all(np.isfinite(g).all() for g in grads(*map(jnp.asarray, (q, k, v))))
    assert not got[:, 0].any()
    np.testing.assert_allclose(got[:, 1:], want[:, 1:], atol=2e-6)


def test_sdpa_adds_a_bias_in_float32() -> None:
    """Positions times a slope, of which bfloat16 keeps two digits."""
    q, k, v, _ = inputs(4, 2, jnp.bfloat16)
    bias = 400 + 0.3 * np.arange(L, dtype=np.float32) * np.ones((1, 1, L, 1), np.float32)
    tp = tensor_parallel(ONE_DEVICE)
    metadata = OperationMetadata(jnp.bfloat16, partition_manager=tp.manager)
    with jax.set_mesh(tp.mesh):
        one, other = (
            np.asarray(jax.jit(OperationRegistry.create(name, metadata))(q, k, v, bias=bias))
            for name in ("sdpa", "vanilla")
        )
    np.testing.assert_allclose(one.astype(float), other.astype(float), atol=2.0**-5)


@pytest.mark.parametrize("name", ["vanilla", "flash_attn2", "blocksparse", "ring", "ulysses"])
def test_a_sink_of_no_weight_leaves_zeros_where_nothing_is_seen(name) -> None:
    q, k, v, _ = inputs(4, 2)
    tp = tensor_parallel(ONE_DEVICE)
    metadata = OperationMetadata(jnp.float32, partition_manager=tp.manager)
    operation = OperationRegistry.create(name, metadata)
    ids = np.where(np.arange(L) == 2, 7, 0)[None].repeat(B, 0)
    sinks = jnp.asarray([-np.inf, 0.5, -np.inf, 0.0], jnp.float32)

    @jax.jit
    def total(q, sinks):
        out = operation(
            q, k, v, softmax_aux=sinks, q_segment_ids=ids, kv_segment_ids=np.zeros_like(ids)
        )
        return jnp.sum(out), out

    with jax.set_mesh(tp.mesh):
        grads, out = jax.grad(total, argnums=(0, 1), has_aux=True)(jnp.asarray(q), sinks)
    assert not np.asarray(out)[:, 2].any()
    assert all(np.isfinite(x).all() for x in (out, *grads))
