"""`ulysses`: attention over rows that are split over devices, by splitting the heads instead.

An all-to-all gives every device all tokens of some heads. Each device runs an operation of a single
device. Another all-to-all restores the split rows. A ring needs more collectives but hides them;
ulysses needs at least as many query heads as devices, divisible by them.

Letters: B batch, L queries, T keys, H query heads, K kv heads, G = H / K, h head dim; n devices of
the sequence axis. Source: DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import math
from dataclasses import replace

import jax.numpy as jnp
from jax import Array, lax

from model.attention.blockwise import varying
from model.attention.flash import flash_attention
from model.attention.mask import AttentionInputs, AttentionSpec
from model.attention.registry import ALL, AttentionFunction, Capabilities, register
from parallel.linear.ring import all_gather, pcast_varying

_LENGTH, _HEADS = 1, 2


@register(
    "ulysses",
    capabilities=Capabilities(
        features=ALL - {"decode"},
        preference=70,
        blockwise=True,
        keys="local",
        min_length=1024,  # as the ring's
        heads_over_sp=True,
    ),
)
def ulysses_attention(
    q_BLHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
    attention: AttentionFunction = flash_attention,
) -> Array:
    """Return attention over rows split on spec.sequence_axis: q `B L/n H h`, k, v `B T/n K h`.

    attention: the operation of a single device, on `B L H/n h`. Bias and mask are
    `B|1 H|1 L/n T`, with columns in the order in which the devices hold the keys.
    Communication per device: all-to-alls of q, k, v and of the result, (n - 1)/n of a block each;
    kv heads that n does not divide are repeated n / gcd(K, n) times first. All-gathers of indices
    and segment ids. Raises: ValueError unless n divides H.
    """
    axis_name = spec.sequence_axis
    n = 1 if axis_name is None else lax.axis_size(axis_name)
    if axis_name is None or n == 1:
        return attention(q_BLHh, k_BTKh, v_BTKh, inputs, replace(spec, sequence_axis=None))
    H, K = q_BLHh.shape[_HEADS], k_BTKh.shape[_HEADS]
    if H % n:
        raise ValueError(
            f"ulysses splits heads: {H} query heads of a device are not divisible by {axis_name}="
            f"{n}; use an {axis_name} that divides them, or operation ring"
        )
    axes = tuple({*varying(q_BLHh, k_BTKh, v_BTKh, inputs), axis_name})
    # n divides H = G K, so the number of copies divides G: each serves equally many query heads.
    copies = n // math.gcd(K, n)
    k_BTKh, v_BTKh = (jnp.repeat(x, copies, axis=_HEADS) for x in (k_BTKh, v_BTKh))
    q, k, v = (_split_heads(pcast_varying(x, axes), axis_name) for x in (q_BLHh, k_BTKh, v_BTKh))
    inputs = _inputs_of_local_heads(inputs, axis_name, H // n)
    out = attention(q, k, v, inputs, replace(spec, sequence_axis=None))
    return lax.all_to_all(out, axis_name, _LENGTH, _HEADS, tiled=True)


def _split_heads(x_BLHh: Array, axis_name: str) -> Array:
    """`B L/n H h -> B L H/n h`."""
    return lax.all_to_all(x_BLHh, axis_name, _HEADS, _LENGTH, tiled=True)


def _inputs_of_local_heads(inputs: AttentionInputs, axis_name: str, heads: int) -> AttentionInputs:
    """Return the inputs of all tokens and of this device's heads after `_split_heads`."""

    def local(dims: str, x: Array) -> Array:
        if dims == "H":
            return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * heads, heads)
        if len(dims) < 2:
            return x
        x = pcast_varying(x, (axis_name,))
        if dims != "BHLT":
            return all_gather(x, axis_name, _LENGTH)
        if x.shape[1] == 1:
            return all_gather(x, axis_name, 2)
        return lax.all_to_all(x, axis_name, 1, 2, tiled=True)

    return replace(inputs, **{name: local(dims, x) for name, dims, x in inputs.present()})
