"""Attention whose scores stay on the chip: `splash`, the Pallas kernel that jax ships for TPU.

Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    SegmentIds,
    splash_attention_kernel,
    splash_attention_mask,
)

from model.attention.operation import Capabilities, OperationRegistry

# Tokens of a block of queries or keys: lanes of the vector unit, and what fits its memory.
_LANES, _MAX_BLOCK = 128, 1024


@OperationRegistry.register(
    "splash",
    capabilities=Capabilities(
        needs_all_keys=True,
        splits_length=False,
        length_multiple=_LANES,
        platforms=("tpu",),
        types_varying=False,
    ),
)
def splash(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    *,
    q_index_L: jax.Array,
    kv_index_T: jax.Array,
    q_segment_ids_BL: jax.Array,
    kv_segment_ids_BT: jax.Array,
    softmax_scale: float,
) -> jax.Array:
    """Causal attention within segments, forward and backward in blocks; memory linear in L.

    The rows must be whole (the indices are not read: row i sees rows 0 .. i). Blocks above the
    diagonal are skipped. Source: jax.experimental.pallas.ops.tpu.splash_attention.
    """
    kernel = splash_kernel(q_BLHh.shape[1], q_BLHh.shape[2])
    q, k, v = (y.transpose(0, 2, 1, 3) for y in (q_BLHh, k_BTKh, v_BTKh))
    q = q * jnp.asarray(softmax_scale, q.dtype)
    ids = SegmentIds(q=q_segment_ids_BL, kv=kv_segment_ids_BT)
    out_BHLh = jax.vmap(kernel)(q, k, v, ids)
    return out_BHLh.transpose(0, 2, 1, 3).astype(q_BLHh.dtype)


def splash_kernel(length: int, heads: int, interpret: bool = False) -> Any:
    """The kernel for one sequence: q `H L h`, k and v `K L h`, segment ids `L` -> `H L h`.

    Raises: ValueError if L is not a multiple of 128.
    """
    sizes = range(_MAX_BLOCK, 0, -_LANES)
    block = next((size for size in sizes if length % size == 0), None)
    if block is None:
        raise ValueError(f"splash needs rows of a multiple of {_LANES} tokens, got {length}")
    causal = splash_attention_mask.CausalMask((length, length))
    return splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([causal] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )
