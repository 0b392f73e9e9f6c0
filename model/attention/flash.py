"""`flash_attn2`: softmax attention whose scores are never written down, from a block engine.

`softmax_attention` is everything around an engine: its derivative, the merge of results over a
mesh axis that splits the keys, the sinks. It refuses to know how a block is computed: that is the
engine's, of which `model/attention/blockwise.py` is one that runs anywhere.
Letters: B batch, L queries, T keys, H query heads, K kv heads, h head dim.
Source: FlashAttention-2 (arXiv 2307.08691).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from model.attention.blockwise import attend, attend_gradients, varying
from model.attention.operation import RESULT_NAME, Capabilities, OperationRegistry
from model.attention.scores import ScoreInputs, ScoreRule, with_sinks
from parallel.linear.ring import pcast_varying


class Engine(NamedTuple):
    """How blocks are computed; signatures and meaning as in `model/attention/blockwise.py`.

    attend: (q, k, v, inputs, rule) -> (out `B L H h`, lse `B H L`), float32. attend_gradients: the
    same arguments and lse_BHL, delta_BHL, dout_BLHh by name -> (dq, dk, dv), and dbias if it can
    take a bias.
    """

    attend: Callable[..., tuple[jax.Array, jax.Array]]
    attend_gradients: Callable[..., tuple[Any, ...]]


NATIVE = Engine(attend, attend_gradients)


def softmax_attention(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
    engine: Engine = NATIVE,
) -> jax.Array:
    """Attention to `B L H h` in q's dtype, differentiable by q, k, v, bias and sinks.

    Communication: none, or with rule.merge_axis that of `merge`.
    """
    sinks_H, bias_BHLT = inputs.sinks_H, inputs.bias_BHLT
    inputs = replace(inputs, sinks_H=None, bias_BHLT=None)
    # What the engine returns varies over all these axes, and so must what it is derived by.
    axes = varying(q_BLHh, k_BTKh, v_BTKh, bias_BHLT, inputs)
    arrays = jax.tree.map(lambda x: pcast_varying(x, axes), (q_BLHh, k_BTKh, v_BTKh, bias_BHLT))
    out_BLHh, lse_BHL = _attention(engine, rule, arrays, inputs)
    if rule.merge_axis is not None:
        out_BLHh, lse_BHL = merge(out_BLHh, lse_BHL, rule.merge_axis)
    if sinks_H is not None:
        out_BLHh, _ = with_sinks(out_BLHh, lse_BHL, sinks_H.astype(jnp.float32))
    return out_BLHh.astype(q_BLHh.dtype)


def merge(out_BLHh: jax.Array, lse_BHL: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Result and logsumexp over all keys from those over each device's own, equal on all devices.

    Communication: an all-sum of out, and of lse an all-sum and an all-max, over the axis.
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


_Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    engine: Engine, rule: ScoreRule, arrays: _Arrays, inputs: ScoreInputs
) -> tuple[jax.Array, jax.Array]:
    return _attention_forward(engine, rule, arrays, inputs)[0]


def _attention_forward(
    engine: Engine, rule: ScoreRule, arrays: _Arrays, inputs: ScoreInputs
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    q_BLHh, k_BTKh, v_BTKh, bias_BHLT = arrays
    result = engine.attend(q_BLHh, k_BTKh, v_BTKh, replace(inputs, bias_BHLT=bias_BHLT), rule)
    out_BLHh, lse_BHL = checkpoint_name(result, RESULT_NAME)
    return (out_BLHh, lse_BHL), (arrays, inputs, out_BLHh, lse_BHL)


def _attention_backward(
    engine: Engine, rule: ScoreRule, residuals: Any, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[_Arrays, None]:
    arrays, inputs, out_BLHh, lse_BHL = residuals
    dout_BLHh, dlse_BHL = cotangents
    q_BLHh, k_BTKh, v_BTKh, bias_BHLT = arrays
    delta_BHL = jnp.sum(dout_BLHh * out_BLHh, axis=-1).transpose(0, 2, 1) - dlse_BHL
    grads = engine.attend_gradients(
        q_BLHh,
        k_BTKh,
        v_BTKh,
        replace(inputs, bias_BHLT=bias_BHLT),
        rule,
        lse_BHL=lse_BHL,
        delta_BHL=delta_BHL,
        dout_BLHh=dout_BLHh,
    )
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(grads[:3], arrays[:3], strict=True))
    return (dq, dk, dv, None if bias_BHLT is None else grads[3].astype(bias_BHLT.dtype)), None


_attention.defvjp(_attention_forward, _attention_backward)


@OperationRegistry.register(
    "flash_attn2",
    capabilities=Capabilities(
        features=frozenset(
            {
                "bidirectional",
                "segment_ids",
                "window",
                "soft_cap",
                "sinks",
                "gqa",
                "bias",
                "mask",
                "dropout",
                "row_order",
                "sequence_parallel",
                "decode",
            }
        ),
        merges_keys=True,
        least_length=1024,
    ),
)
def flash_attn2(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """Attention in blocks; memory linear in L and T, unseen blocks are skipped."""
    return softmax_attention(q_BLHh, k_BTKh, v_BTKh, inputs, rule)
