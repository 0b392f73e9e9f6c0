"""`ulysses`: attention over rows that are split over devices, by splitting the heads instead.

One all-to-all gives every device all rows of some heads, the operation of a single device follows,
another all-to-all gives the rows back. Against a ring: few collectives, but nothing hides them, and
no more devices than query heads. It refuses heads that do not divide by the devices. Letters: B
batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head dim; n devices of the
sequence axis. Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from model.attention.blockwise import varying
from model.attention.capabilities import AttentionFunction
from model.attention.flash import softmax_attention
from model.attention.operation import Capabilities, OperationRegistry
from model.attention.scores import ScoreInputs, ScoreRule
from parallel.linear.ring import all_gather, pcast_varying

_LENGTH, _HEADS = 1, 2
_LEAST_LENGTH = 1024  # rows per device from which the exchange pays: as the ring's


def ulysses_attention(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
    attention: AttentionFunction = softmax_attention,
) -> jax.Array:
    """q `B L/n H h`, k, v `B T/n K h` -> as q, by `attention` on `B L H/n h`.

    Bias and mask `B|1 H|1 L/n T`, columns in the order in which the devices hold the keys.
    Communication per device: all-to-alls of q, k, v and of the result, (n - 1)/n of a block each;
    kv heads that n does not divide are sent repeated, n / gcd(K, n) times. All-gathers of indices
    and segment ids. Raises: ValueError unless n divides H.
    """
    axis_name = rule.sequence_axis
    n = 1 if axis_name is None else lax.axis_size(axis_name)
    if axis_name is None or n == 1:
        return attention(q_BLHh, k_BTKh, v_BTKh, inputs, replace(rule, sequence_axis=None))
    H, K = q_BLHh.shape[_HEADS], k_BTKh.shape[_HEADS]
    if H % n:
        raise ValueError(
            f"ulysses splits heads: {H} query heads of a device are not divisible by {axis_name}="
            f"{n}; use an {axis_name} that divides them, or operation ring"
        )
    axes = tuple({*varying(q_BLHh, k_BTKh, v_BTKh, inputs), axis_name})
    # n divides H = G K, so these copies divide G: every copy serves equally many query heads.
    copies = n // math.gcd(K, n)
    k_BTKh, v_BTKh = (jnp.repeat(x, copies, axis=_HEADS) for x in (k_BTKh, v_BTKh))
    q, k, v = (_by_heads(pcast_varying(x, axes), axis_name) for x in (q_BLHh, k_BTKh, v_BTKh))
    whole = _of_own_heads(inputs, axis_name, H // n)
    out = attention(q, k, v, whole, replace(rule, sequence_axis=None))
    return lax.all_to_all(out, axis_name, _LENGTH, _HEADS, tiled=True)


def _by_heads(x_BLHh: jax.Array, axis_name: str) -> jax.Array:
    """`B L/n H h -> B L H/n h`."""
    return lax.all_to_all(x_BLHh, axis_name, _HEADS, _LENGTH, tiled=True)


def _of_own_heads(inputs: ScoreInputs, axis_name: str, heads: int) -> ScoreInputs:
    """The inputs of all rows and of the heads that are this device's after `_by_heads`."""

    def rows(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else all_gather(pcast_varying(x, (axis_name,)), axis_name, _LENGTH)

    def own(x_H: jax.Array | None) -> jax.Array | None:
        first = lax.axis_index(axis_name) * heads
        return None if x_H is None else lax.dynamic_slice_in_dim(x_H, first, heads)

    def scores(x_BHLT: jax.Array | None) -> jax.Array | None:
        if x_BHLT is None:
            return None
        x_BHLT = pcast_varying(x_BHLT, (axis_name,))
        if x_BHLT.shape[1] == 1:
            return all_gather(x_BHLT, axis_name, 2)
        return lax.all_to_all(x_BHLT, axis_name, 1, 2, tiled=True)

    q_index_BL, kv_index_BT = rows(inputs.q_index_BL), rows(inputs.kv_index_BT)
    assert q_index_BL is not None and kv_index_BT is not None
    return replace(
        inputs,
        q_index_BL=q_index_BL,
        kv_index_BT=kv_index_BT,
        q_segment_ids_BL=rows(inputs.q_segment_ids_BL),
        kv_segment_ids_BT=rows(inputs.kv_segment_ids_BT),
        bias_BHLT=scores(inputs.bias_BHLT),
        mask_BHLT=scores(inputs.mask_BHLT),
        sinks_H=own(inputs.sinks_H),
        head_ids_H=own(inputs.head_ids_H),
    )


@OperationRegistry.register(
    "ulysses",
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
                "bias",
                "mask",
                "dropout",
                "row_order",
                "sequence_parallel",
            }
        ),
        keys="own",
        least_length=_LEAST_LENGTH,
        heads_over_sp=True,
    ),
)
def ulysses(
    q_BLHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    inputs: ScoreInputs,
    rule: ScoreRule,
) -> jax.Array:
    """`ulysses_attention` by the blocks that run anywhere."""
    return ulysses_attention(q_BLHh, k_BTKh, v_BTKh, inputs, rule)
