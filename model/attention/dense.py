"""Attention that writes its scores down: `vanilla`, the oracle of every other operation.

Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head dim.
"""

import jax
import jax.numpy as jnp
from jax import lax

from model.attention.operation import Capabilities, OperationRegistry
from parallel.axes import DEFAULT_MASK_VALUE


@OperationRegistry.register(
    "vanilla",
    capabilities=Capabilities(needs_all_keys=True),
)
def vanilla(
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
    """softmax(scale q k^T + mask) v with float32 scores; memory B H L T.

    The weights stay unnormalised until they have met v: h divisions per query instead of T.
    Source: Attention is all you need (arXiv 1706.03762), equation 1; grouped heads as in GQA
    (arXiv 2305.13245).
    """
    B, L, H, h = q_BLHh.shape
    K, T = k_BTKh.shape[2], k_BTKh.shape[1]
    G = H // K
    # Queries of one kv head side by side: two batched matmuls, no broadcast of k and v.
    q_BLHh = q_BLHh * jnp.asarray(softmax_scale, q_BLHh.dtype)
    q_BKXh = q_BLHh.reshape(B, L, K, G, h).transpose(0, 2, 3, 1, 4).reshape(B, K, G * L, h)
    k_BKTh, v_BKTh = k_BTKh.transpose(0, 2, 1, 3), v_BTKh.transpose(0, 2, 1, 3)
    scores_BKXT = jnp.einsum("BKXh,BKTh->BKXT", q_BKXh, k_BKTh, preferred_element_type=jnp.float32)
    visible_BLT = (q_index_L[:, None] >= kv_index_T[None, :]) & (
        q_segment_ids_BL[:, :, None] == kv_segment_ids_BT[:, None, :]
    )
    mask_BLT = jnp.where(visible_BLT, 0.0, DEFAULT_MASK_VALUE)
    scores_BKGLT = scores_BKXT.reshape(B, K, G, L, T) + mask_BLT[:, None, None]
    top_BKGL = lax.stop_gradient(jnp.max(scores_BKGLT, axis=-1, keepdims=True))
    weights_BKGLT = jnp.exp(scores_BKGLT - top_BKGL)
    norm_BKXh = jnp.sum(weights_BKGLT, axis=-1).reshape(B, K, G * L, 1)
    weights_BKXT = weights_BKGLT.astype(v_BTKh.dtype).reshape(B, K, G * L, T)
    out_BKXh = jnp.einsum(
        "BKXT,BKTh->BKXh", weights_BKXT, v_BKTh, preferred_element_type=jnp.float32
    )
    out_BKXh = (out_BKXh / norm_BKXh).astype(v_BTKh.dtype)
    return out_BKXh.reshape(B, K, G, L, h).transpose(0, 3, 1, 2, 4).reshape(B, L, H, h)
