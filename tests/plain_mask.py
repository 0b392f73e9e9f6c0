"""Which keys a query sees, written out from the rules: the reference for attention masks.

It reads the fields of a `MaskSpec` and of an `AttentionInputs` and calls none of their methods.
"""

import jax.numpy as jnp
import numpy as np


def sees(mask, query, key):
    """Return whether queries see keys, by row indices that broadcast; -1 is an absent key.

    Arrays may be of numpy or jax; those of numpy have no bound at 2^31.
    """
    near = query >= -1
    if mask.causal:
        near = near & (key <= query)
    if mask.window is not None:
        near = near & (abs(query - key) < mask.window)
    seen = (key >= 0) & (near | (key < mask.prefix))
    if mask.blocks is None:
        return seen
    table = np.array(mask.blocks.rows)
    padded = np.zeros((table.shape[0] + 2, table.shape[1] + 2), bool)
    padded[1:-1, 1:-1] = table
    row = jnp.clip(query // mask.blocks.block_q, -1, table.shape[0]) + 1
    column = jnp.clip(key // mask.blocks.block_k, -1, table.shape[1]) + 1
    return seen & jnp.asarray(padded)[row, column]


def seen_BHLT(mask, inputs):
    """Return the pairs of queries and keys that mask, segments and mask array let pass."""
    seen = sees(mask, inputs.q_index_BL[:, :, None], inputs.kv_index_BT[:, None])
    if inputs.q_segment_ids_BL is not None:
        seen = seen & (inputs.q_segment_ids_BL[:, :, None] == inputs.kv_segment_ids_BT[:, None])
    return seen[:, None] if inputs.mask_BHLT is None else seen[:, None] & inputs.mask_BHLT
