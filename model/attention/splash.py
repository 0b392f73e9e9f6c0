"""Attention whose scores stay on the chip: the TPU forms of `flash_attn2` and `blocksparse`.

Both are the Pallas kernel that jax ships, on whole rows in natural order: patterns are known when
it is built, and blocks that nobody sees are not visited. It refuses other orders of rows and
whatever a pattern cannot say. Letters: B batch, L queries, T keys, H query heads, K kv heads, h
head dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    SegmentIds,
    splash_attention_kernel,
    splash_attention_mask,
)

from model.attention.capabilities import Capabilities, Feature
from model.attention.operation import RESULT_NAME, OperationRegistry
from model.attention.scores import Pattern, ScoreInputs, ScoreRule

# Tokens of a block of queries or keys: lanes of the vector unit, and what fits its memory.
_LANES, _MAX_BLOCK = 128, 1024
_FEATURES: frozenset[Feature] = frozenset(
    {"bidirectional", "segment_ids", "window", "soft_cap", "sinks", "gqa"}
)


def _capabilities(*more: Feature) -> Capabilities:
    return Capabilities(
        features=_FEATURES | {*more},
        # A row that sees no block of its own document would get a mean instead of zeros.
        never_together=frozenset({"block_mask", "segment_ids"}),
        dtypes=("float32", "bfloat16"),
        length_multiple=_LANES,
        head_dim_multiple=_LANES,
        types_varying=False,
    )


@OperationRegistry.register(
    "blocksparse", form="tpu", capabilities=_capabilities("chunk", "prefix", "block_mask")
)
@OperationRegistry.register("flash_attn2", form="tpu", capabilities=_capabilities())
def splash(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """Attention within segments, forward and backward in blocks; memory linear in L.

    The rows must be whole and in natural order: the indices are not read.
    Source: jax.experimental.pallas.ops.tpu.splash_attention.
    """
    kernel = splash_kernel(q_BLHh.shape[1], q_BLHh.shape[2], rule)
    q, k, v = (y.transpose(0, 2, 1, 3) for y in (q_BLHh, k_BTKh, v_BTKh))
    q = q * jnp.asarray(rule.scale, q.dtype)
    ids, q_ids, kv_ids = None, inputs.q_segment_ids_BL, inputs.kv_segment_ids_BT
    if q_ids is not None and kv_ids is not None:
        ids = SegmentIds(q=q_ids, kv=kv_ids)
    attend = jax.vmap(kernel, in_axes=(0, 0, 0, None if ids is None else 0, None))
    out_BLHh = attend(q, k, v, ids, inputs.sinks_H).transpose(0, 2, 1, 3).astype(q_BLHh.dtype)
    blind_L = _blind_rows(rule.pattern, q_BLHh.shape[1])
    return jnp.where(blind_L[:, None, None], 0, out_BLHh) if blind_L.any() else out_BLHh


def splash_kernel(length: int, heads: int, rule: ScoreRule, interpret: bool = False) -> Any:
    """The kernel for one sequence: q `H L h`, k and v `K L h`, segment ids `L` -> `H L h`.

    Raises: ValueError if L is not a multiple of 128.
    """
    limits = (rule.block_q or _MAX_BLOCK, rule.block_k or _MAX_BLOCK)
    block_q, block_k = (_block(length, limit) for limit in limits)
    mask = _mask(rule.pattern, length)
    return splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([mask] * heads),
        attn_logits_soft_cap=rule.soft_cap,
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
    """The largest multiple of the lanes that divides the rows and is within the limit."""
    sizes = range(max(limit, _LANES) // _LANES * _LANES, 0, -_LANES)
    block = next((size for size in sizes if length % size == 0), None)
    if block is None:
        raise ValueError(f"splash needs rows of a multiple of {_LANES} tokens, got {length}")
    return block


def _mask(pattern: Pattern, length: int) -> Any:
    """The pattern in the words of jax: computed in the kernel if it knows it, else stored."""
    shape, causal, window = (length, length), pattern.causal, pattern.window
    if pattern.chunk is None and not pattern.prefix and pattern.blocks is None:
        if window is not None:
            sides = (window - 1, 0 if causal else window - 1)
            return splash_attention_mask.LocalMask(shape, sides, 0)
        known = splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
        return known(shape)
    return _PatternMask(pattern, length)


class _PatternMask(splash_attention_mask.Mask):
    """Any pattern over rows 0 .. length - 1. A row that sees nothing sees itself: the kernel would
    divide by zero."""

    def __init__(self, pattern: Pattern, length: int):
        self._pattern, self._length = pattern, length
        self._blind = _blind_rows(pattern, length)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._length, self._length)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        q_index, kv_index = (np.arange(self._length, dtype=np.int32)[part] for part in index)
        seen = self._pattern.visible(q_index[:, None], kv_index)
        itself = self._blind[q_index][:, None] & (q_index[:, None] == kv_index)
        return np.asarray(seen | itself)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _PatternMask):
            return NotImplemented
        return (self._pattern, self._length) == (other._pattern, other._length)

    def __hash__(self) -> int:
        return hash((self._pattern, self._length))


def _blind_rows(pattern: Pattern, length: int) -> np.ndarray:
    """Rows that see no key at all; only a block mask can make one (rows of keys are their own)."""
    index = np.arange(length, dtype=np.int32)
    if pattern.blocks is None:
        return np.zeros(length, bool)
    return np.array([not pattern.visible(row, index).any() for row in index])
