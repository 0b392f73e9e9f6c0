"""Attention that materialises its scores: `vanilla`, the reference for all others, and `sdpa`.

Memory is B H L T. Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head
dim, X = G L queries of one kv head.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from model.attention.mask import (
    AttentionInputs,
    AttentionSpec,
    dropout_keep_BHLT,
    visible_BHLT,
    with_sinks,
)
from model.attention.registry import ALL, Capabilities, register
from parallel.sharding.axes import DEFAULT_MASK_VALUE


@register("vanilla", capabilities=Capabilities(features=ALL, preference=40))
def vanilla(
    q_BLHh: Array, k_BTKh: Array, v_BTKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Return softmax(scale q k^T + bias) v over the visible keys, with float32 scores.

    Weights are normalised after the product with v: h divisions per query instead of T.
    Source: Attention is all you need (arXiv 1706.03762), equation 1; grouped heads as in GQA
    (arXiv 2305.13245); soft cap: Gemma 2 (arXiv 2408.00118), section 2.
    """
    B, L, H, h = q_BLHh.shape
    K, T = k_BTKh.shape[2], k_BTKh.shape[1]
    G = H // K
    # Queries of one kv head are adjacent: two batched matmuls, no broadcast of k and v.
    q_BKXh = q_BLHh.reshape(B, L, K, G, h).transpose(0, 2, 3, 1, 4).reshape(B, K, G * L, h)
    k_BKTh, v_BKTh = k_BTKh.transpose(0, 2, 1, 3), v_BTKh.transpose(0, 2, 1, 3)
    scores_BKXT = jnp.einsum("BKXh,BKTh->BKXT", q_BKXh, k_BKTh, preferred_element_type=jnp.float32)
    scores_BHLT = scores_BKXT.reshape(B, H, L, T) * spec.scale
    if spec.soft_cap is not None:
        scores_BHLT = spec.soft_cap * jnp.tanh(scores_BHLT / spec.soft_cap)
    if inputs.bias_BHLT is not None:
        scores_BHLT = scores_BHLT + inputs.bias_BHLT.astype(jnp.float32)
    scores_BHLT += jnp.where(visible_BHLT(inputs, spec.mask), 0.0, DEFAULT_MASK_VALUE)
    top_BHL = lax.stop_gradient(jnp.max(scores_BHLT, axis=-1, keepdims=True))
    # For a query that sees nothing the maximum is the mask value, and every weight must be zero.
    top_BHL = jnp.maximum(top_BHL, 0.5 * DEFAULT_MASK_VALUE)
    weights_BHLT = jnp.exp(scores_BHLT - top_BHL)
    norm_BHL = jnp.sum(weights_BHLT, axis=-1)
    if spec.dropout:
        weights_BHLT = jnp.where(dropout_keep_BHLT(inputs, spec.dropout), weights_BHLT, 0.0)
        weights_BHLT /= 1.0 - spec.dropout
    weights_BKXT = weights_BHLT.astype(v_BKTh.dtype).reshape(B, K, G * L, T)
    out_BKXh = jnp.einsum(
        "BKXT,BKTh->BKXh", weights_BKXT, v_BKTh, preferred_element_type=jnp.float32
    )
    sees_none_BHL = norm_BHL == 0
    out_BHLh = out_BKXh.reshape(B, H, L, h) / jnp.where(sees_none_BHL, 1.0, norm_BHL)[..., None]
    out_BLHh = out_BHLh.transpose(0, 2, 1, 3)
    if inputs.sinks_H is not None:
        lse_BHL = jnp.log(jnp.where(sees_none_BHL, 1.0, norm_BHL)) + top_BHL[..., 0]
        out_BLHh, _ = with_sinks(out_BLHh, lse_BHL, inputs.sinks_H)
    return out_BLHh.astype(q_BLHh.dtype)


# XLA:CPU has no float16 matmul that sums in float32.
@register(
    "sdpa",
    capabilities=Capabilities(
        features=ALL - {"soft_cap", "sinks", "dropout"},
        preference=30,
        dtypes=("float32", "bfloat16"),
    ),
)
def sdpa(
    q_BLHh: Array, k_BTKh: Array, v_BTKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Call XLA's `jax.nn.dot_product_attention` with an explicit mask. Memory B H L T."""
    seen_BHLT = visible_BHLT(inputs, spec.mask)
    bias_BHLT = inputs.bias_BHLT
    if bias_BHLT is not None:
        # Keys that the bias hides go into the mask: jax masks with a finite number.
        seen_BHLT = seen_BHLT & (bias_BHLT > -jnp.inf)
        bias_BHLT = jnp.where(seen_BHLT, bias_BHLT.astype(jnp.float32), 0.0)
    out_BLHh = jax.nn.dot_product_attention(
        q_BLHh,
        k_BTKh,
        v_BTKh,
        bias=bias_BHLT,
        mask=seen_BHLT,
        scale=spec.scale,
        implementation="xla",
    )
    # For a query that sees nothing it averages all values.
    sees_BL1h = jnp.any(seen_BHLT, axis=-1).transpose(0, 2, 1)[..., None]
    return jnp.where(sees_BL1h, out_BLHh, 0)


_CUDNN = Capabilities(
    features=frozenset({"bidirectional", "window", "gqa"}),
    never_together=frozenset({"bidirectional", "window"}),  # cuDNN's window looks back only
    dtypes=("bfloat16", "float16"),
    head_dim_multiple=8,
    max_head_dim=(((0, 0), 128), ((9, 0), 256)),  # wider heads from Hopper on
)


@register("cudnn", backend="gpu", capabilities=replace(_CUDNN, preference=69))
@register("sdpa", "flash_attn2", backend="gpu", capabilities=_CUDNN)
def cudnn(
    q_BLHh: Array, k_BTKh: Array, v_BTKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Call cuDNN's flash attention on whole rows in natural order; ignores row indices.

    Through jax's public function cuDNN can mask the padding of a row, but not several documents in
    it, so packed rows use another operation.
    """
    mask = spec.mask
    window = None
    if mask.window is not None:
        window = (mask.window - 1, 0 if mask.causal else mask.window - 1)
    return jax.nn.dot_product_attention(
        q_BLHh,
        k_BTKh,
        v_BTKh,
        scale=spec.scale,
        is_causal=mask.causal,
        local_window_size=window,
        implementation="cudnn",
    )
