"""Calls on global arrays: defaults, refusals, and masks in every form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from test_dense import B, L, h, qkv, written_out

from model.attention.api import OperationRegistry, attend
from model.attention.mask import AttentionInputs, AttentionSpec, BlockMask, MaskSpec
from model.attention.metadata import OperationMetadata
from model.attention.registry import Request, choose_operation
from parallel.sharding.axes import MODE_DECODE

Q, K, V = qkv(4, 2)
ONE_DOCUMENT = np.zeros((B, L), np.int32)


def operation(name: str, mesh=ONE_DEVICE, **fields):
    manager = tensor_parallel(mesh).manager
    metadata = OperationMetadata(jnp.float32, partition_manager=manager, **fields)
    return OperationRegistry.create(name, metadata)


@pytest.mark.parametrize(
    ("arrays", "inputs", "message"),
    [
        ((Q, K[:, :5], V), {}, "do not fit"),
        ((Q[:, :, :3], K, V), {}, "3 query heads are not a multiple of 2"),
        ((Q[0], K, V), {}, r"query \(12, 4, 8\): give 4 dims"),
        ((Q[:0], K[:0], V[:0]), {}, "every dim must be at least 1"),
        ((Q, K, V), {"sinks_H": np.zeros(3)}, r"sinks \(3,\): give logits \(4,\)"),
        ((Q, K, V), {"mask_BHLT": np.ones((B, 1, L, 3), bool)}, "mask .* does not have the shape"),
        ((Q, K, V), {"mask_BHLT": np.ones((B, 1, L, L), int)}, "mask of int.*: give booleans"),
        ((Q, K, V), {"q_segment_ids_BL": np.zeros((B, 3), int)}, "q_segment_ids .* not have"),
        ((Q, K, V), {"kv_segment_ids_BT": ONE_DOCUMENT}, "without q_segment_ids"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays, inputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        operation("vanilla")(*arrays, inputs=AttentionInputs(**inputs))


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (MaskSpec, {"window": 0}, "attention window=0: use at least 1"),
        (MaskSpec, {"window": 2.5}, "attention window=2.5: use at least 1, a static whole"),
        (MaskSpec, {"prefix": -1}, "attention prefix=-1: use at least 0"),
        (MaskSpec, {"blocks": np.ones((2, 2), bool)}, "ndarray: use BlockMask.from_array"),
        (AttentionSpec, {"scale": 1.0, "soft_cap": 0.0}, "soft_cap=0.0: use a number above 0"),
        (BlockMask, {"rows": (), "block_q": 1, "block_k": 1}, "a rectangle of booleans"),
        (BlockMask, {"rows": ((True,),), "block_q": 0, "block_k": 1}, "use at least 1"),
        (
            BlockMask.from_array,
            {"mask": np.ones(3, bool), "block_q": 1, "block_k": 1},
            r"two dims .* not shape \(3,\)",
        ),
    ],
)
def test_masks_and_specs_that_cannot_be_are_refused(make, fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    ("mesh", "arrays", "options", "message"),
    [
        ("dp8", (Q, K, V), {}, "over 2 sequences: not divisible by dp.*=8; pad"),
        ("tp4-sp2", (Q[:, :11], K, V), {}, r"over 11 queries: not divisible by sp=2"),
        ("tp4-sp2", (Q, K[:, :1], V[:, :1]), {}, r"over 1 keys: not divisible by sp=2"),
        (
            "tp4-sp2",
            (Q[:, :1], K[:, :7], V[:, :7]),
            {"mode": MODE_DECODE},
            "over 7 keys: not divisible by sp=2",
        ),
        ("tp8", (Q, K, V), {}, "4 query heads are not divisible by tp=8"),
    ],
)
def test_arrays_that_the_mesh_cannot_split_are_refused(mesh, arrays, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        operation("flash_attn2", MESHES[mesh])(*arrays, **options)


@pytest.mark.parametrize("axis", ["dp", "sp", "tp"])
def test_a_mesh_of_one_axis_is_enough(axis: str) -> None:
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((2,), (axis,), explicit, devices=jax.devices()[:2])
    ring = OperationRegistry.create("ring", OperationMetadata(jnp.float32, _stored_mesh=mesh))
    np.testing.assert_allclose(ring(Q, K, V), written_out(Q, K, V, ONE_DOCUMENT), atol=2e-6)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ["vanilla", "flash_attn2", "ring"])
def test_more_queries_than_keys_see_all_of_them_if_not_causal(name, window) -> None:
    q, k, v = Q, K[:, :4], V[:, :4]
    got = operation(name, MESHES["tp4-sp2"])(q, k, v, mask=MaskSpec(causal=False, window=window))
    sees = np.abs(np.arange(L)[:, None] - np.arange(4)) < (window or L)
    scores = np.einsum("blhd,bthd->bhlt", q, k.repeat(2, 2)) * h**-0.5
    weights = np.exp(scores) * sees
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    want = np.einsum("bhlt,bthd->blhd", weights, v.repeat(2, 2))
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_kernel_that_ignores_row_indices_is_not_given_keys_of_other_rows() -> None:
    """Fewer queries than keys are the last rows, and a segment may have no keys at all."""
    q, k, v = qkv(2, 2)
    kernel = operation("flash_attn2", platform="tpu")
    others = AttentionInputs(q_segment_ids_BL=ONE_DOCUMENT, kv_segment_ids_BT=ONE_DOCUMENT + 1)
    for arrays, inputs in (((q[:, :2], k, v), AttentionInputs()), ((q, k, v), others)):
        with pytest.raises(ValueError, match=r"tpu: has no row_order"):
            kernel.forward_tpu(*arrays, inputs=inputs)
    with pytest.raises(ValueError, match=r"\(tpu: needs rows of a multiple of 128"):
        kernel.forward_tpu(q, k, v, inputs=AttentionInputs(q_segment_ids_BL=ONE_DOCUMENT))


def test_the_reference_calls_by_platform_fall_back_to_the_native_backend() -> None:
    vanilla = operation("vanilla")
    assert vanilla.get_mode(Q[:, :1]) == MODE_DECODE
    want = vanilla(Q, K, V)
    for name in ("native", "cpu", "gpu", "cuda", "rocm", "tpu"):
        np.testing.assert_array_equal(getattr(vanilla, f"forward_{name}")(Q, K, V), want)


def test_a_choice_is_run_as_chosen_and_refuses_more_than_it_can_do() -> None:
    asked = Request(
        features=frozenset({"gqa"}), platform="cpu", dtype="float32", length=L, head_dim=h, heads=4
    )
    choice, metadata = choose_operation(asked, "blocksparse"), operation("vanilla").metadata
    spec = AttentionSpec(scale=h**-0.5, block_q=4, block_k=4)
    got = attend([choice.backend], (Q, K, V), AttentionInputs(), spec, metadata)
    np.testing.assert_allclose(got, written_out(Q, K, V, ONE_DOCUMENT), atol=2e-6)
    bias = AttentionInputs(bias_BHLT=np.zeros((1, 1, L, L), np.float32))
    with pytest.raises(ValueError, match=r"blocksparse cannot serve .*native: has no bias"):
        attend([choice.backend], (Q, K, V), bias, spec, metadata)


@pytest.mark.parametrize("name", ["vanilla", "sdpa", "flash_attn2"])
@pytest.mark.parametrize("value", [-np.inf, np.finfo(np.float32).min])
def test_a_key_that_the_bias_hides_is_not_seen(name, value) -> None:
    """Query 0 sees key 0 alone, which the bias hides."""
    bias = np.zeros((B, 4, L, L), np.float32)
    bias[..., 5, 2] = -1e4
    want = written_out(Q, K, V, ONE_DOCUMENT, bias=bias)
    bias[..., 5, 2] = bias[..., 0, 0] = value
    called = operation(name)

    @jax.jit
    def total(*parts):
        out = called(*parts, inputs=AttentionInputs(bias_BHLT=bias))
        return out.sum(), out

    with jax.set_mesh(called.metadata.mesh):
        grads, got = jax.grad(total, (0, 1, 2), has_aux=True)(*map(jnp.asarray, (Q, K, V)))
    assert all(np.isfinite(g).all() for g in grads)
    assert not np.asarray(got)[:, 0].any()
    np.testing.assert_allclose(got[:, 1:], want[:, 1:], atol=2e-6)


@pytest.mark.parametrize("name", ["vanilla", "flash_attn2", "ring"])
def test_a_sink_of_no_weight_leaves_zeros_where_nothing_is_seen(name) -> None:
    called = operation(name)
    ids = np.where(np.arange(L) == 2, 7, 0)[None].repeat(B, 0)

    @jax.jit
    def total(q, sinks):
        inputs = AttentionInputs(
            sinks_H=sinks, q_segment_ids_BL=ids, kv_segment_ids_BT=np.zeros_like(ids)
        )
        out = called(q, K, V, inputs=inputs)
        return jnp.sum(out), out

    sinks = jnp.asarray([-np.inf, 0.5, -np.inf, 0.0], jnp.float32)
    with jax.set_mesh(called.metadata.mesh):
        grads, out = jax.grad(total, argnums=(0, 1), has_aux=True)(jnp.asarray(Q), sinks)
    assert not np.asarray(out)[:, 2].any()
    assert all(np.isfinite(x).all() for x in (out, *grads))


def test_several_sinks_per_kv_head_equal_one_of_their_logsumexp() -> None:
    several = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    one = np.log(np.exp(several).sum(0)).repeat(2)
    got, want = (
        operation("vanilla")(Q, K, V, inputs=AttentionInputs(sinks_H=x)) for x in (several, one)
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)
