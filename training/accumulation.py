"""Gradient accumulation: a sum over the microbatches of a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def sum_over_parts(
    micro: Callable[[Any, Any, Any], Any], params: Any, batch: dict[str, jax.Array], platform: str
) -> Any:
    """Return the sum of `micro(params, microbatch, number)` over the microbatches of a batch.

    Gradients are added in float32 at least, and rounded once.

    Args:
        micro: returns a tuple of pytrees; the last one has the shapes and shardings of `params`.
        params: the trained parameters.
        batch: fields (A, B/A, L): A microbatches.
        platform: platform of the devices, as jax names it.
    """
    parts = batch["tokens"].shape[0]
    first = {name: field[0] for name, field in batch.items()}
    if parts == 1:
        return micro(params, first, 0)

    def body(total: Any, part: tuple[dict[str, jax.Array], jax.Array]) -> tuple[Any, None]:
        found = micro(params, *part)
        if platform == "tpu":
            # libtpu 0.0.42 moves sums over devices out of this loop, and fails with fsdp: a
            # RET_CHECK of while_loop_all_reduce_code_motion.cc. The barrier hides them from it.
            found = lax.optimization_barrier(found)
        with jax.named_scope("accumulate"):
            return jax.tree.map(_add, total, found), None

    *sums, _ = jax.eval_shape(micro, params, first, 0)
    zero = *jax.tree.map(jnp.zeros_like, sums), jax.tree.map(_wide_zeros, params)
    *found, gradients = lax.scan(body, zero, (batch, jnp.arange(parts)))[0]
    return *found, jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, params)


def _wide_zeros(x: jax.Array) -> jax.Array:
    """Return zeros in float32 at least: in bfloat16, a sum of 256 terms would stop to grow."""
    return jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32))


def _add(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x.astype(total.dtype)
