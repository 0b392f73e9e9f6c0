"""`flash_attn2` and `blocksparse`: attention in blocks, without scores in memory.

Both are `flash_attention` with different capabilities. It adds to a block engine what is common to
all: the derivative, the merge of partial results over a mesh axis that splits the keys, and sinks.
The default engine, `model/attention/blockwise.py`, runs on every platform. Blocks in which no query
sees a key are skipped, be it for causality, a window, documents or a mask.

On TPU both begin with splash attention, the Pallas kernel that jax ships. It takes whole rows in
natural order; blocks that the mask hides are not visited. `blocksparse` uses its derivative too,
`flash_attn2` that of `model/attention/pallas_flash.py`, with fewer matmuls. Other orders of rows,
bias, mask arrays and dropout are not supported.

Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
Source: FlashAttention-2 (arXiv 2307.08691).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    SegmentIds,
    splash_attention_kernel,
    splash_attention_mask,
)

from model.attention.blockwise import OutputGradients, attend, attend_gradients, varying
from model.attention.mask import AttentionInputs, AttentionSpec, MaskSpec, with_sinks
from model.attention.pallas_flash import MAX_BLOCK_K, MAX_BLOCK_Q, KernelOptions
from model.attention.pallas_flash import attend_gradients as attend_gradients_on_tpu
from model.attention.pallas_kernels import LANES, fits_scalar_memory
from model.attention.registry import ALL, RESULT_NAME, Capabilities, Feature, register
from parallel.linear.ring import pcast_varying


class Engine(NamedTuple):
    """The functions that compute blocks, with the signatures of `model/attention/blockwise.py`.

    attend: (q, k, v, inputs, spec) -> (out `B L H h`, float32 or in q's dtype; lse `B H L`,
    float32). attend_gradients: the same arguments and OutputGradients -> (dq, dk, dv), and dbias if
    it supports a bias.
    """

    attend: Callable[..., tuple[Array, Array]]
    attend_gradients: Callable[..., tuple[Any, ...]]


NATIVE = Engine(attend, attend_gradients)

# min_length: with gradients, on two CPU cores, eight rows of 512 tokens take 0.6 of the time of
# `vanilla`, of 256 tokens as long, of 128 twice as long (23 November 2026, heads of 64).
_capabilities = partial(Capabilities, merges_keys=True, min_length=512, blockwise=True)


@register(
    "blocksparse",
    capabilities=_capabilities(features=ALL - {"bias", "mask", "dropout"}, preference=50),
)
@register(
    "flash_attn2",
    capabilities=_capabilities(features=ALL - {"prefix", "block_mask"}, preference=60),
)
def flash_attention(
    q_BLHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
    engine: Engine = NATIVE,
) -> Array:
    """Return attention `B L H h` in q's dtype, differentiable in q, k, v, bias and sinks.

    Memory is linear in L and T. Communication: none, or that of `merge` over spec.merge_axis.
    """
    sinks_H, bias_BHLT = inputs.sinks_H, inputs.bias_BHLT
    inputs = replace(inputs, sinks_H=None, bias_BHLT=None)
    # The engine's results vary over all these axes, so the arrays it is derived by must too.
    axes = varying(q_BLHh, k_BTKh, v_BTKh, bias_BHLT, inputs)
    arrays = jax.tree.map(lambda x: pcast_varying(x, axes), (q_BLHh, k_BTKh, v_BTKh, bias_BHLT))
    out_BLHh, lse_BHL = _attention(engine, spec, arrays, inputs)
    if spec.merge_axis is not None:
        out_BLHh, lse_BHL = merge(out_BLHh, lse_BHL, spec.merge_axis)
    if sinks_H is not None:
        out_BLHh, _ = with_sinks(out_BLHh, lse_BHL, sinks_H.astype(jnp.float32))
    return out_BLHh.astype(q_BLHh.dtype)


def merge(out_BLHh: Array, lse_BHL: Array, axis_name: str) -> tuple[Array, Array]:
    """Return result and logsumexp over all keys from those over each device's own keys.

    Communication: an all-reduce of out, and of lse an all-reduce and an all-reduce max.
    """
    out_BLHh, lse_BHL = pcast_varying(out_BLHh, (axis_name,)), pcast_varying(lse_BHL, (axis_name,))
    top_BHL = lax.pmax(lax.stop_gradient(lse_BHL), axis_name)
    top_BHL = jnp.where(top_BHL == -jnp.inf, 0.0, top_BHL)
    weight_BHL = jnp.exp(lse_BHL - top_BHL)
    share_BLHh = out_BLHh * weight_BHL.transpose(0, 2, 1)[..., None]
    norm_BHL, out_BLHh = lax.psum((weight_BHL, share_BLHh), axis_name)
    safe_BHL = jnp.where(norm_BHL > 0, norm_BHL, 1.0)
    lse_BHL = jnp.where(norm_BHL > 0, top_BHL + jnp.log(safe_BHL), -jnp.inf)
    return out_BLHh / safe_BHL.transpose(0, 2, 1)[..., None], lse_BHL


_Arrays = tuple[Array, Array, Array, Array | None]
_Result = tuple[Array, Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    engine: Engine, spec: AttentionSpec, arrays: _Arrays, inputs: AttentionInputs
) -> _Result:
    return _attention_forward(engine, spec, arrays, inputs)[0]


def _attention_forward(
    engine: Engine, spec: AttentionSpec, arrays: _Arrays, inputs: AttentionInputs
) -> tuple[_Result, Any]:
    q_BLHh, k_BTKh, v_BTKh, bias_BHLT = arrays
    result = engine.attend(q_BLHh, k_BTKh, v_BTKh, replace(inputs, bias_BHLT=bias_BHLT), spec)
    out_BLHh, lse_BHL = checkpoint_name(result, RESULT_NAME)
    return (out_BLHh, lse_BHL), (arrays, inputs, out_BLHh, lse_BHL)


def _attention_backward(
    engine: Engine, spec: AttentionSpec, residuals: Any, cotangents: _Result
) -> tuple[_Arrays, None]:
    arrays, inputs, out_BLHh, lse_BHL = residuals
    dout_BLHh, dlse_BHL = cotangents
    q_BLHh, k_BTKh, v_BTKh, bias_BHLT = arrays
    product_BLHh = dout_BLHh.astype(jnp.float32) * out_BLHh.astype(jnp.float32)
    delta_BHL = jnp.sum(product_BLHh, axis=-1).transpose(0, 2, 1) - dlse_BHL
    output = OutputGradients(lse_BHL, delta_BHL, dout_BLHh)
    inputs = replace(inputs, bias_BHLT=bias_BHLT)
    grads = engine.attend_gradients(q_BLHh, k_BTKh, v_BTKh, inputs, spec, output)
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(grads[:3], arrays[:3], strict=True))
    return (dq, dk, dv, None if bias_BHLT is None else grads[3].astype(bias_BHLT.dtype)), None


_attention.defvjp(_attention_forward, _attention_backward)


# Tokens in a block: a multiple of the vector unit's lanes, up to what fits into VMEM for heads as
# wide as the lanes (v5p, libtpu 0.0.42.1); wider heads get fewer.
_MAX_BLOCK = 1024
_TPU_FEATURES: frozenset[Feature] = frozenset(
    {"bidirectional", "segment_ids", "window", "soft_cap", "sinks", "gqa"}
)
_tpu_capabilities = partial(
    Capabilities,
    # A query that sees no block of its own document would get a mean instead of zeros.
    never_together=frozenset({"block_mask", "segment_ids"}),
    dtypes=("float32", "bfloat16"),
    length_multiple=LANES,
    head_dim_multiple=LANES,
    check_vma=False,
)


@register(
    "blocksparse",
    backend="tpu",
    capabilities=_tpu_capabilities(features=_TPU_FEATURES | {"prefix", "block_mask"}),
)
def splash(
    q_BLHh: Array, k_BTKh: Array, v_BTKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Return attention of whole rows in natural order; ignores row indices. Memory linear in L.

    Source: jax.experimental.pallas.ops.tpu.splash_attention.
    """
    k_BTKh = _scaled(k_BTKh, spec.scale)
    out_BLHh = _splash_rows(q_BLHh, k_BTKh, v_BTKh, inputs, spec).astype(q_BLHh.dtype)
    sees_none_L = _rows_that_see_nothing(spec.mask, q_BLHh.shape[1])
    return jnp.where(sees_none_L[:, None, None], 0, out_BLHh) if sees_none_L.any() else out_BLHh


@register("flash_attn2", backend="tpu", capabilities=_tpu_capabilities(features=_TPU_FEATURES))
def splash_with_fused_gradients(
    q_BLHh: Array, k_BTKh: Array, v_BTKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Return attention of whole rows in natural order. Memory linear in L.

    Forward it is splash attention. Splash's own derivative computes the scores of a pair of blocks
    twice, for dq and for dk and dv, in 7 matmuls. The kernel used here keeps dq in VMEM if there is
    room, and computes all three at once, in 5. docs/kernels.md compares the compiled kernels.
    For rows so long that the list of their blocks exceeds scalar memory, splash's own is used.
    """
    block_q, block_k = _gradient_blocks(q_BLHh, k_BTKh, spec)
    (B, L), T = q_BLHh.shape[:2], k_BTKh.shape[1]
    # Without documents all rows have the same pairs of blocks.
    num_lists = 1 if inputs.q_segment_ids_BL is None else B
    if not fits_scalar_memory(num_lists, L // block_q, T // block_k):
        return splash(q_BLHh, k_BTKh, v_BTKh, inputs, spec)
    # Both passes must see the same rounded keys, or the weights would not sum to one.
    k_BTKh, spec = _scaled(k_BTKh, spec.scale), replace(spec, scale=1.0)
    return flash_attention(q_BLHh, k_BTKh, v_BTKh, inputs, spec, _SPLASH)


def _scaled(k_BTKh: Array, scale: float) -> Array:
    """Scale keys, as splash has no scale; they are fewer than queries, or as many."""
    return (k_BTKh.astype(jnp.float32) * scale).astype(k_BTKh.dtype)


def _splash_attend(
    q_BLHh: Array, k_BTKh: Array, v_BTKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Array, Array]:
    return _splash_rows(q_BLHh, k_BTKh, v_BTKh, inputs, spec, with_lse=True)


def _gradient_blocks(q_BLHh: Array, k_BTKh: Array, spec: AttentionSpec) -> tuple[int, int]:
    """Return the tokens in a block of queries and of keys in the backward pass."""
    block_q = _block(q_BLHh.shape[1], min(spec.block_q or MAX_BLOCK_Q, MAX_BLOCK_Q))
    return block_q, _block(k_BTKh.shape[1], min(spec.block_k or MAX_BLOCK_K, MAX_BLOCK_K))


def fused_gradients(
    q_BLHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
    output: OutputGradients,
    *,
    dq_stays: bool | None = None,
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv; arguments as `Engine.attend_gradients`, dq_stays as `KernelOptions`."""
    block_q, block_k = _gradient_blocks(q_BLHh, k_BTKh, spec)
    spec = replace(spec, block_q=block_q, block_k=block_k)
    share = _visible_share(spec.mask, q_BLHh.shape[1])
    options = KernelOptions(visible_share=share, dq_stays=dq_stays)
    return attend_gradients_on_tpu(q_BLHh, k_BTKh, v_BTKh, inputs, spec, output, options)


_SPLASH = Engine(_splash_attend, fused_gradients)


def _visible_share(mask: MaskSpec, length: int) -> float:
    """Return about which part of the scores of a row of tokens its mask shows."""
    window = min(mask.window or length, length)
    one_side = (window - window * window / (2 * length)) / length
    return one_side if mask.causal else min(2 * one_side, 1.0)


def _splash_rows(
    q_BLHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
    *,
    with_lse: bool = False,
) -> Any:
    """Return the result of splash attention `B L H h`, or that and the logsumexps `B H L`.

    k_BTKh: Keys times the scale of the scores.
    """
    if (wide := q_BLHh.shape[-1]) > LANES:
        limit = _MAX_BLOCK * LANES // wide
        spec = replace(spec, block_q=spec.block_q or limit, block_k=spec.block_k or limit)
    kernel = splash_kernel(q_BLHh.shape[1], q_BLHh.shape[2], spec, with_lse=with_lse)
    q, k, v = (y.transpose(0, 2, 1, 3) for y in (q_BLHh, k_BTKh, v_BTKh))
    ids, q_ids, kv_ids = None, inputs.q_segment_ids_BL, inputs.kv_segment_ids_BT
    if q_ids is not None and kv_ids is not None:
        ids = SegmentIds(q=q_ids, kv=kv_ids)
    rows = jax.vmap(kernel, in_axes=(0, 0, 0, None if ids is None else 0, None))
    found = rows(q, k, v, ids, inputs.sinks_H)
    if not with_lse:
        return found.transpose(0, 2, 1, 3)
    out_BHLh, (lse_BHL,) = found
    return out_BHLh.transpose(0, 2, 1, 3), lse_BHL


def splash_kernel(length: int, heads: int, spec: AttentionSpec, *, with_lse: bool = False) -> Any:
    """Return the kernel for one row: q `H L h`, k and v `K L h`, segment ids `L` -> `H L h`.

    with_lse: It also returns a tuple with the logsumexps `H L`, and has no derivative.

    Raises: ValueError if L is not a multiple of 128.
    """
    limits = (spec.block_q or _MAX_BLOCK, spec.block_k or _MAX_BLOCK)
    block_q, block_k = (_block(length, limit) for limit in limits)
    mask = _splash_mask(spec.mask, length)
    return splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([mask] * heads),
        attn_logits_soft_cap=spec.soft_cap,
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block_q,
            block_kv=block_k,
            block_kv_compute=block_k,
            block_q_dkv=block_q,
            block_kv_dkv=block_k,
            block_kv_dkv_compute=block_k,
            block_q_dq=block_q,
            block_kv_dq=block_k,
        ),
        save_residuals=with_lse,
        residual_checkpoint_name=None if with_lse else RESULT_NAME,
    )


def _block(length: int, limit: int) -> int:
    """Return the largest multiple of the lanes within the limit that divides the row."""
    sizes = range(max(limit, LANES) // LANES * LANES, 0, -LANES)
    block = next((size for size in sizes if length % size == 0), None)
    if block is None:
        raise ValueError(f"splash needs rows of a multiple of {LANES} tokens, got {length}")
    return block


def _splash_mask(mask: MaskSpec, length: int) -> Any:
    """Return jax's mask: computed in the kernel for causal, full and window, else stored."""
    shape, causal, window = (length, length), mask.causal, mask.window
    if not mask.prefix and mask.blocks is None:
        if window is not None:
            sides = (window - 1, 0 if causal else window - 1)
            return splash_attention_mask.LocalMask(shape, sides, 0)
        known = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
        return known(shape)
    return _StoredMask(mask, length)


class _StoredMask(splash_attention_mask.Mask):
    """Any mask over rows 0 .. length - 1.

    A row that sees nothing sees itself here: the kernel would divide by zero.
    """

    def __init__(self, mask: MaskSpec, length: int):
        self._mask, self._length = mask, length
        self._sees_none = _rows_that_see_nothing(mask, length)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._length, self._length)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        q_index, kv_index = (np.arange(self._length, dtype=np.int32)[part] for part in index)
        seen = self._mask.visible(q_index[:, None], kv_index)
        itself = self._sees_none[q_index][:, None] & (q_index[:, None] == kv_index)
        return np.asarray(seen | itself)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _StoredMask):
            return NotImplemented
        return (self._mask, self._length) == (other._mask, other._length)

    def __hash__(self) -> int:
        return hash((self._mask, self._length))


def _rows_that_see_nothing(mask: MaskSpec, length: int) -> np.ndarray:
    """Return booleans per row; only a block mask can hide a row's own key from it."""
    index = np.arange(length, dtype=np.int32)
    if mask.blocks is None:
        return np.zeros(length, bool)
    return np.array([not mask.visible(row, index).any() for row in index])
