"""Attention that writes its scores down: `vanilla`, the oracle of all the others, and `sdpa`.

Memory B H L T. Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head
dim, X = G L queries of one kv head.
"""

import jax
import jax.numpy as jnp
from jax import lax

from model.attention.operation import Capabilities, Feature, OperationRegistry
from model.attention.scores import ScoreInputs, ScoreRule, kept_BHLT, visible_BHLT, with_sinks
from parallel.sharding.axes import DEFAULT_MASK_VALUE

_BY_MASK: frozenset[Feature] = frozenset(
    {
        *("bidirectional", "segment_ids", "window", "chunk", "prefix", "block_mask", "gqa"),
        *("bias", "mask", "row_order", "sequence_parallel", "decode"),
    }
)
_ALL: frozenset[Feature] = _BY_MASK | {"soft_cap", "sinks", "dropout"}


@OperationRegistry.register("vanilla", capabilities=Capabilities(features=_ALL))
def vanilla(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """softmax(scale q k^T + bias) v over the keys that are seen, with float32 scores.

    The weights stay unnormalised until they have met v: h divisions per query instead of T.
    Source: Attention is all you need (arXiv 1706.03762), equation 1; grouped heads as in GQA
    (arXiv 2305.13245); soft cap: Gemma 2 (arXiv 2408.00118), section 2.
    """
    B, L, H, h = q_BLHh.shape
    K, T = k_BTKh.shape[2], k_BTKh.shape[1]
    G = H // K
    # Queries of one kv head side by side: two batched matmuls, no broadcast of k and v.
    q_BKXh = q_BLHh.reshape(B, L, K, G, h).transpose(0, 2, 3, 1, 4).reshape(B, K, G * L, h)
    k_BKTh, v_BKTh = k_BTKh.transpose(0, 2, 1, 3), v_BTKh.transpose(0, 2, 1, 3)
    scores_BKXT = jnp.einsum("BKXh,BKTh->BKXT", q_BKXh, k_BKTh, preferred_element_type=jnp.float32)
    scores_BHLT = scores_BKXT.reshape(B, H, L, T) * rule.scale
    if rule.soft_cap is not None:
        scores_BHLT = rule.soft_cap * jnp.tanh(scores_BHLT / rule.soft_cap)
    if inputs.bias_BHLT is not None:
        scores_BHLT = scores_BHLT + inputs.bias_BHLT.astype(jnp.float32)
    scores_BHLT += jnp.where(visible_BHLT(inputs, rule.pattern), 0.0, DEFAULT_MASK_VALUE)
    top_BHL = lax.stop_gradient(jnp.max(scores_BHLT, axis=-1, keepdims=True))
    # A query that sees nothing: its top is the mask's value, and every weight must be zero.
    top_BHL = jnp.maximum(top_BHL, 0.5 * DEFAULT_MASK_VALUE)
    weights_BHLT = jnp.exp(scores_BHLT - top_BHL)
    norm_BHL = jnp.sum(weights_BHLT, axis=-1)
    if rule.dropout:
        weights_BHLT = jnp.where(kept_BHLT(inputs, rule.dropout), weights_BHLT, 0.0)
        weights_BHLT /= 1.0 - rule.dropout
    weights_BKXT = weights_BHLT.astype(v_BTKh.dtype).reshape(B, K, G * L, T)
    out_BKXh = jnp.einsum(
        "BKXT,BKTh->BKXh", weights_BKXT, v_BKTh, preferred_element_type=jnp.float32
    )
    blind_BHL = norm_BHL == 0
    out_BHLh = out_BKXh.reshape(B, H, L, h) / jnp.where(blind_BHL, 1.0, norm_BHL)[..., None]
    out_BLHh = out_BHLh.transpose(0, 2, 1, 3)
    if inputs.sinks_H is not None:
        lse_BHL = jnp.log(jnp.where(blind_BHL, 1.0, norm_BHL)) + top_BHL[..., 0]
        out_BLHh, _ = with_sinks(out_BLHh, lse_BHL, inputs.sinks_H)
    return out_BLHh.astype(q_BLHh.dtype)


# XLA:CPU has no matmul of float16 that sums in float32.
@OperationRegistry.register(
    "sdpa", capabilities=Capabilities(features=_BY_MASK, dtypes=("float32", "bfloat16"))
)
def sdpa(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """`jax.nn.dot_product_attention`, XLA's own; the mask is written out. Memory B H L T."""
    seen_BHLT = visible_BHLT(inputs, rule.pattern)
    bias_BHLT = inputs.bias_BHLT
    if bias_BHLT is not None:
        # What a bias hides, the mask hides: jax's mask is a finite number, which any key beats.
        seen_BHLT = seen_BHLT & (bias_BHLT > -jnp.inf)
        bias_BHLT = jnp.where(seen_BHLT, bias_BHLT.astype(jnp.float32), 0.0)
    out_BLHh = jax.nn.dot_product_attention(
        q_BLHh,
        k_BTKh,
        v_BTKh,
        bias=bias_BHLT,
        mask=seen_BHLT,
        scale=rule.scale,
        implementation="xla",
    )
    # It averages all values for a query that sees none of them.
    sees_BL1h = jnp.any(seen_BHLT, axis=-1).transpose(0, 2, 1)[..., None]
    return jnp.where(sees_BL1h, out_BLHh, 0)


@OperationRegistry.register(
    "sdpa",
    "flash_attn2",
    form="gpu",
    capabilities=Capabilities(
        features=frozenset({"bidirectional", "window", "gqa"}),
        never_together=frozenset({"bidirectional", "window"}),  # cuDNN looks back only
        dtypes=("bfloat16", "float16"),
        head_dim_multiple=8,
    ),
)
def cudnn(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """cuDNN's flash attention on whole rows in natural order; the indices are not read.

    It takes documents only as lengths of one per row, so packed rows go to the native form.
    """
    pattern = rule.pattern
    window = None
    if pattern.window is not None:
        window = (pattern.window - 1, 0 if pattern.causal else pattern.window - 1)
    return jax.nn.dot_product_attention(
        q_BLHh,
        k_BTKh,
        v_BTKh,
        scale=rule.scale,
        is_causal=pattern.causal,
        local_window_size=window,
        implementation="cudnn",
    )
