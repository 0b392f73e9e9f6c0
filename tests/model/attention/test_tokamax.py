"""Attention by tokamax equals `vanilla`, and its kernels are chosen and lowered for NVIDIA GPUs."""

import importlib
import re
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from plain_mask import seen_BHLT

from model.attention import registry, tokamax_attention
from model.attention.dense import vanilla
from model.attention.mask import AttentionInputs, AttentionSpec, MaskSpec
from model.attention.registry import Request, choose_operation

needs_tokamax = pytest.mark.skipif(
    find_spec("tokamax") is None, reason='pip install -e ".[gpu]" with Python 3.12 or later'
)
B, L, H, K, h = 2, 24, 4, 2, 8
MASKS = [MaskSpec(), MaskSpec(window=5), MaskSpec(causal=False), MaskSpec(causal=False, window=4)]
DOCUMENTS = np.array([[0] * 9 + [1] * 1 + [2] * 14, [1] * 4 + [0] * 12 + [2] * 8], np.int32)


def rows(segments: np.ndarray | None, length: int = L) -> AttentionInputs:
    index = np.arange(length, dtype=np.int32)[None]
    return AttentionInputs(
        q_index_BL=index, kv_index_BT=index, q_segment_ids_BL=segments, kv_segment_ids_BT=segments
    )


def qkv(length: int = L, width: int = h):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(B, length, n, width)).astype(np.float32) for n in (H, K, K)]


def value_and_gradients(operation, spec, inputs):
    def loss(q, k, v):
        out = operation(q, k, v, inputs, spec)
        return jnp.sum(jnp.sin(3 * out)), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv())


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("segments", [None, DOCUMENTS], ids=["one document", "documents"])
def test_ranges_of_keys_are_the_mask(mask, segments) -> None:
    spec = AttentionSpec(scale=1.0, mask=mask)
    start, end = tokamax_attention.key_ranges(L, segments, spec)
    index = np.arange(L)
    seen = np.ones((1, L, L), bool)
    if start is not None:
        seen = seen & (index >= np.asarray(start)[..., None])
    if end is not None:
        seen = seen & (index < np.asarray(end)[..., None])
    if mask.causal:
        seen = seen & (index[:, None] >= index)
    want = seen_BHLT(mask, rows(segments))[:, 0]
    np.testing.assert_array_equal(np.broadcast_to(seen, want.shape), want)


GPU = partial(Request, platform="gpu", dtype="bfloat16", length=4096, head_dim=64, heads=8)


@pytest.mark.parametrize(
    ("installed", "features", "capability", "chosen", "not_chosen"),
    [
        (True, {"segment_ids", "gqa"}, (9, 0), "tokamax gpu", "cudnn gpu (has no segment_ids)"),
        (True, {"segment_ids", "window", "soft_cap"}, (10, 0), "tokamax gpu", "cudnn gpu (has no"),
        (
            True,
            {"segment_ids"},
            (8, 0),
            "tokamax_triton gpu",
            "tokamax gpu (runs on compute capability 9, 10, not 8)",
        ),
        (True, {"gqa"}, (9, 0), "cudnn gpu", "ring native"),
        (
            False,
            {"segment_ids"},
            (9, 0),
            "flash_attn2 native",
            'tokamax gpu, tokamax_triton gpu (needs tokamax: pip install -e ".[gpu]" with Python',
        ),
        (True, {"segment_ids", "sinks"}, (9, 0), "flash_attn2 native", "(has no sinks)"),
    ],
)
def test_auto_prefers_kernels_for_gpus(
    installed, features, capability, chosen, not_chosen, monkeypatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: installed or None)
    choice = choose_operation(GPU(features=frozenset(features), compute_capability=capability))
    assert f"{choice.name} {choice.backend.name}" == chosen
    assert not_chosen in choice.reason


def test_a_gpu_without_the_package_refuses_the_name_with_the_extra(monkeypatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    request = GPU(features=frozenset({"segment_ids"}), compute_capability=(9, 0))
    with pytest.raises(ValueError, match=r"tokamax cannot serve.*needs tokamax.*\[gpu\]"):
        choose_operation(request, "tokamax")


# tokamax's XLA implementation has the arguments of the kernels. Its derivative builds a jaxpr
# without debug information.
@needs_tokamax
@pytest.mark.filterwarnings("ignore:core.Jaxpr is missing a DebugInfo:DeprecationWarning")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_values_and_gradients_are_those_of_vanilla(mask, soft_cap) -> None:
    spec = AttentionSpec(scale=0.3, mask=mask, soft_cap=soft_cap)
    inputs = rows(DOCUMENTS)
    got = value_and_gradients(partial(tokamax_attention.attend, "xla"), spec, inputs)
    want = value_and_gradients(vanilla, spec, inputs)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)  # sums of 24 float32 products


# Pallas interprets the forward kernel on a CPU. In the backward kernel it does not know a
# `program_id` inside of a condition, and the Mosaic kernels have instructions that it has not.
@needs_tokamax
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_triton_kernel_equals_vanilla(mask, monkeypatch) -> None:
    tokamax = importlib.import_module("tokamax")
    monkeypatch.setattr(pl, "pallas_call", partial(_interpreted, pl.pallas_call))
    spec, length = AttentionSpec(scale=0.3, mask=mask), 192
    documents = np.repeat(np.array([[0, 0, 1, 2, 2, 2], [0, 1, 2, 3, 3, 4]], np.int32), 32, axis=1)
    inputs = rows(documents, length)
    arrays = [jnp.asarray(array) for array in qkv(length, 16)]
    with tokamax.config.cross_compile(True):
        got = tokamax_attention.attend("triton", *arrays, inputs, spec)
    want = vanilla(*arrays, inputs, spec)
    np.testing.assert_allclose(got, want, atol=1e-5)  # float32 sums in another order


def _interpreted(pallas_call, *arguments, **options):
    return pallas_call(*arguments, **{**options, "interpret": True})


@needs_tokamax
def test_a_hopper_program_has_three_kernels_and_no_mask_of_pairs(monkeypatch) -> None:
    """Forward, dq, and dk with dv; the compute capability is that of an absent H100."""
    tokamax = importlib.import_module("tokamax")
    gpu_utils = importlib.import_module("tokamax._src.gpu_utils")
    monkeypatch.setattr(gpu_utils, "_compute_capability", lambda device=None: 9.0)
    length, spec = 256, AttentionSpec(scale=0.125, mask=MaskSpec(window=64), soft_cap=30.0)

    def gradients(q, k, v, segments):
        def loss(*arrays):
            inputs = AttentionInputs(q_segment_ids_BL=segments, kv_segment_ids_BT=segments)
            return jnp.sum(tokamax_attention.mosaic(*arrays, inputs, spec).astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    q, kv = (jax.ShapeDtypeStruct((B, length, n, 64), jnp.bfloat16) for n in (H, K))
    segments = jax.ShapeDtypeStruct((B, length), jnp.int32)
    with tokamax.config.cross_compile(True):
        lowered = jax.jit(gradients).trace(q, kv, kv, segments).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 3
    # Without it, XLA runs the forward kernel twice in a scan over layers.
    assert len(re.findall(r"= stablehlo\.optimization_barrier", text)) == 1
    assert not re.search(rf"{length}x{length}x", text)
