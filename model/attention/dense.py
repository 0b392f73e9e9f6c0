"""Attention that writes its scores down: `vanilla`, the oracle of every other operation.

Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head dim.
"""

import jax
import jax.numpy as jnp

from model.attention.operation import Capabilities, OperationRegistry
from parallel.axes import DEFAULT_MASK_VALUE


@OperationRegistry.register(
    "vanilla",
    capabilities=Capabilities(segment_ids=True, grouped_query=True, gathers_keys=True),
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

    Source: Attention is all you need (arXiv 1706.03762), equation 1; grouped heads as in GQA
    (arXiv 2305.13245).
    """
    B, L, H, h = q_BLHh.shape
    K = k_BTKh.shape[2]
    q_BLKGh = q_BLHh.reshape(B, L, K, H // K, h)
    scores_BKGLT = jnp.einsum(
        "BLKGh,BTKh->BKGLT", q_BLKGh, k_BTKh, preferred_element_type=jnp.float32
    )
    visible_BLT = (q_index_L[:, None] >= kv_index_T[None, :]) & (
        q_segment_ids_BL[:, :, None] == kv_segment_ids_BT[:, None, :]
    )
    scores_BKGLT = jnp.where(
        visible_BLT[:, None, None], scores_BKGLT * softmax_scale, DEFAULT_MASK_VALUE
    )
    weights_BKGLT = jax.nn.softmax(scores_BKGLT, axis=-1).astype(v_BTKh.dtype)
    out_BLKGh = jnp.einsum("BKGLT,BTKh->BLKGh", weights_BKGLT, v_BTKh)
    return out_BLKGh.reshape(B, L, H, h)
