"""What the caller of an operation gives: checked, and brought into the order `B L heads h`.

Nothing here knows a mesh or an operation. Letters: B batch, L queries, T keys, H query heads, K kv
heads, S sinks, h head dim.
"""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp

from model.attention.capabilities import Layout
from model.attention.scores import ScoreInputs
from parallel.sharding.axes import DEFAULT_MASK_VALUE

_HEADS, _LENGTH = 2, 1


def dropout_draws(key: jax.Array | None, q: jax.Array) -> dict[str, jax.Array]:
    """What a draw of q `B L H h` depends on: two words of the key, row and head; none, no draws."""
    if key is None:
        return {}
    return {
        "dropout_seed": jax.random.key_data(key).ravel()[-2:],
        "row_ids_B": jnp.arange(q.shape[0], dtype=jnp.int32),
        "head_ids_H": jnp.arange(q.shape[_HEADS], dtype=jnp.int32),
    }


def as_bthd(y: jax.Array, layout: Layout) -> jax.Array:
    """From the caller's order of dims to `B L heads h`."""
    if layout == "thd":
        return y[None]
    return y.transpose(0, 2, 1, 3) if layout == "bhtd" else y


def from_bthd(y: jax.Array, layout: Layout) -> jax.Array:
    """What `as_bthd` did, undone."""
    if layout == "thd":
        return y[0]
    return y.transpose(0, 2, 1, 3) if layout == "bhtd" else y


def as_rows(y: jax.Array) -> jax.Array:
    """Indices or ids of one row for all, `L`, as `1 L`."""
    return jnp.asarray(y if y.ndim == 2 else y[None], jnp.int32)


def as_bias(bias: jax.Array | None) -> jax.Array | None:
    """What is as good as hidden (finfo.min, -inf) is hidden: a query of such keys sees nothing."""
    if bias is None:
        return None
    hidden = bias.astype(jnp.float32) <= 0.5 * DEFAULT_MASK_VALUE
    return jnp.where(hidden, -jnp.inf, bias)


def sink_logits(softmax_aux: jax.Array | None, heads: int, kv_heads: int) -> jax.Array | None:
    """One float32 logit per query head; several sinks are as good as one of their logsumexp."""
    if softmax_aux is None:
        return None
    if softmax_aux.shape == (heads,):
        return softmax_aux.astype(jnp.float32)
    if softmax_aux.ndim != 2 or softmax_aux.shape[1] != kv_heads:
        raise ValueError(
            f"softmax_aux {softmax_aux.shape}: give logits ({heads},) of the query heads, or "
            f"(sinks, {kv_heads}) of the kv heads"
        )
    per_key_K = jax.nn.logsumexp(softmax_aux.astype(jnp.float32), axis=0)
    return jnp.repeat(per_key_K, heads // kv_heads)


def check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, layout: Layout) -> None:
    """Raises: ValueError for q, k, v that do not belong together."""
    if layout not in get_args(Layout):
        raise ValueError(f"attention layout {layout!r}: use one of {', '.join(get_args(Layout))}")
    rank = 3 if layout == "thd" else 4
    for name, y in (("query", q), ("key", k), ("value", v)):
        if y.ndim != rank:
            raise ValueError(f"{name} {y.shape}: layout {layout} has {rank} dims")
    q, k, v = (jax.eval_shape(partial(as_bthd, layout=layout), y) for y in (q, k, v))
    if k.shape != v.shape or (q.shape[0], q.shape[-1]) != (k.shape[0], k.shape[-1]):
        raise ValueError(
            f"query {q.shape}, key {k.shape}, value {v.shape} (batch, length, heads, head_dim) do "
            "not fit: they share batch and head_dim, and key and value share all"
        )
    if 0 in (*q.shape, *k.shape):
        raise ValueError(f"query {q.shape} and key {k.shape}: give at least one of everything")
    if q.shape[_HEADS] % k.shape[_HEADS]:
        raise ValueError(
            f"{q.shape[_HEADS]} query heads are not a multiple of {k.shape[_HEADS]} kv heads"
        )


def check_inputs(inputs: ScoreInputs, q: jax.Array, k: jax.Array) -> None:
    """Raises: ValueError for an array that does not belong to q `B L H h` and k `B T K h`."""
    (B, L, H, _), T = q.shape, k.shape[_LENGTH]
    if inputs.q_segment_ids_BL is None and inputs.kv_segment_ids_BT is not None:
        raise ValueError(
            "kv_segment_ids are given without q_segment_ids: no query has a segment to see; give "
            "both, or q_segment_ids alone if queries and keys are the same rows"
        )
    if inputs.mask_BHLT is not None and inputs.mask_BHLT.dtype != bool:
        raise ValueError(
            f"attention mask of {inputs.mask_BHLT.dtype}: give booleans, False where a key is not "
            "seen; what is to be added to the scores is bias"
        )
    for field, sizes in (
        ("q_index_BL", (B, L)),
        ("kv_index_BT", (B, T)),
        ("q_segment_ids_BL", (B, L)),
        ("kv_segment_ids_BT", (B, T)),
        ("bias_BHLT", (B, H, L, T)),
        ("mask_BHLT", (B, H, L, T)),
    ):
        array = getattr(inputs, field)
        if array is None:
            continue
        # Of the first dims, one can stand for all.
        shared = len(sizes) // 2
        fits = array.ndim == len(sizes) and all(
            size == want or (dim < shared and size == 1)
            for dim, (size, want) in enumerate(zip(array.shape, sizes, strict=True))
        )
        if not fits:
            name = field.rpartition("_")[0]
            raise ValueError(
                f"attention {name} {array.shape} has not the shape {sizes}, whose first "
                f"{shared} dims may be 1"
            )
