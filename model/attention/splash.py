"""Splash attention, the Pallas kernel that jax ships: `flash_attn2` and `blocksparse` on TPU.

It takes whole rows in natural order. The mask is known when the kernel is built, and blocks in
which no query sees a key are not visited. Other orders of rows, bias, mask arrays and dropout are
not supported.

Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    SegmentIds,
    splash_attention_kernel,
    splash_attention_mask,
)

from model.attention.mask import AttentionInputs, AttentionSpec, MaskSpec
from model.attention.registry import RESULT_NAME, Capabilities, Feature, register

# Tokens in a block: a multiple of the vector unit's lanes, up to what fits into VMEM.
_LANES, _MAX_BLOCK = 128, 1024
_FEATURES: frozenset[Feature] = frozenset(
    {"bidirectional", "segment_ids", "window", "soft_cap", "sinks", "gqa"}
)
_capabilities = partial(
    Capabilities,
    # A query that sees no block of its own document would get a mean instead of zeros.
    never_together=frozenset({"block_mask", "segment_ids"}),
    dtypes=("float32", "bfloat16"),
    length_multiple=_LANES,
    head_dim_multiple=_LANES,
    check_vma=False,
)


@register(
    "blocksparse",
    backend="tpu",
    capabilities=_capabilities(features=_FEATURES | {"prefix", "block_mask"}),
)
@register("flash_attn2", backend="tpu", capabilities=_capabilities(features=_FEATURES))
def splash(
    q_BLHh: Array, k_BTKh: Array, v_BTKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Return attention of whole rows in natural order; ignores row indices. Memory linear in L.

    Source: jax.experimental.pallas.ops.tpu.splash_attention.
    """
    kernel = splash_kernel(q_BLHh.shape[1], q_BLHh.shape[2], spec)
    q, k, v = (y.transpose(0, 2, 1, 3) for y in (q_BLHh, k_BTKh, v_BTKh))
    q = q * jnp.asarray(spec.scale, q.dtype)
    ids, q_ids, kv_ids = None, inputs.q_segment_ids_BL, inputs.kv_segment_ids_BT
    if q_ids is not None and kv_ids is not None:
        ids = SegmentIds(q=q_ids, kv=kv_ids)
    attend = jax.vmap(kernel, in_axes=(0, 0, 0, None if ids is None else 0, None))
    out_BLHh = attend(q, k, v, ids, inputs.sinks_H).transpose(0, 2, 1, 3).astype(q_BLHh.dtype)
    sees_none_L = _rows_that_see_nothing(spec.mask, q_BLHh.shape[1])
    return jnp.where(sees_none_L[:, None, None], 0, out_BLHh) if sees_none_L.any() else out_BLHh


def splash_kernel(length: int, heads: int, spec: AttentionSpec, interpret: bool = False) -> Any:
    """Return the kernel for one row: q `H L h`, k and v `K L h`, segment ids `L` -> `H L h`.

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
        residual_checkpoint_name=RESULT_NAME,
        interpret=interpret,
    )


def _block(length: int, limit: int) -> int:
    """Return the largest multiple of the lanes within the limit that divides the row."""
    sizes = range(max(limit, _LANES) // _LANES * _LANES, 0, -_LANES)
    block = next((size for size in sizes if length % size == 0), None)
    if block is None:
        raise ValueError(f"splash needs rows of a multiple of {_LANES} tokens, got {length}")
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
