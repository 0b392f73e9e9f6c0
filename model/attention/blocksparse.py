"""`blocksparse`: attention over what a pattern draws, at the cost of the blocks that it meets.

Sliding windows, chunks, a common prefix, packed documents and block masks of the user all become
blocks that are visited or not. It refuses what is no pattern: a bias, a mask of single scores,
dropout.
Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
"""

import jax

from model.attention.flash import softmax_attention
from model.attention.operation import Capabilities, OperationRegistry
from model.attention.scores import ScoreInputs, ScoreRule


@OperationRegistry.register(
    "blocksparse",
    capabilities=Capabilities(
        features=frozenset(
            {
                "bidirectional",
                "segment_ids",
                "window",
                "chunk",
                "prefix",
                "block_mask",
                "soft_cap",
                "sinks",
                "gqa",
                "row_order",
                "sequence_parallel",
                "decode",
            }
        ),
        merges_keys=True,
        least_length=1024,
    ),
)
def blocksparse(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """Attention in blocks; memory linear in L and T, unseen blocks cost nothing."""
    return softmax_attention(q_BLHh, k_BTKh, v_BTKh, inputs, rule)
