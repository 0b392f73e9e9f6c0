"""`flash_attn2` and `blocksparse`: attention in blocks that never materialises its scores.

Both are `flash_attention` with different capabilities. It adds to a block engine what is common to
all: the derivative, the merge of partial results over a mesh axis that splits the keys, and sinks.
The default engine, `model/attention/blockwise.py`, runs on every platform. Blocks in which no query
sees a key are skipped, be it for causality, a window, documents or a mask.

Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
Source: FlashAttention-2 (arXiv 2307.08691).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from model.attention.blockwise import OutputGradients, attend, attend_gradients, varying
from model.attention.mask import AttentionInputs, AttentionSpec, with_sinks
from model.attention.registry import ALL, RESULT_NAME, Capabilities, register
from parallel.linear.ring import pcast_varying


class Engine(NamedTuple):
    """The functions that compute blocks, with the signatures of `model/attention/blockwise.py`.

    attend: (q, k, v, inputs, spec) -> (out `B L H h`, lse `B H L`), float32. attend_gradients: the
    same arguments and OutputGradients -> (dq, dk, dv), and dbias if it supports a bias.
    """

    attend: Callable[..., tuple[Array, Array]]
    attend_gradients: Callable[..., tuple[Any, ...]]


NATIVE = Engine(attend, attend_gradients)

_capabilities = partial(Capabilities, merges_keys=True, min_length=1024, blockwise=True)


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
    delta_BHL = jnp.sum(dout_BLHh * out_BLHh, axis=-1).transpose(0, 2, 1) - dlse_BHL
    output = OutputGradients(lse_BHL, delta_BHL, dout_BLHh)
    inputs = replace(inputs, bias_BHLT=bias_BHLT)
    grads = engine.attend_gradients(q_BLHh, k_BTKh, v_BTKh, inputs, spec, output)
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(grads[:3], arrays[:3], strict=True))
    return (dq, dk, dv, None if bias_BHLT is None else grads[3].astype(bias_BHLT.dtype)), None


_attention.defvjp(_attention_forward, _attention_backward)
