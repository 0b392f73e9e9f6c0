"""Load balancing of a mixture of experts: routing statistics, auxiliary losses, router bias.

Pure functions, inside `jax.shard_map` or outside of it. `routing_stats` sums over all devices what
the router chose; everything else reads these sums only.

Letters: T tokens of this device, E experts, K assignments per token.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from model.router import Routing, mask_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """Sums over the valid tokens of all devices, float32, equal on every device.

    load_E: assignments of each expert. probs_E: probabilities. tokens: number of tokens. z_sum:
    logsumexp(logits)^2. entropy_sum: entropy of the probabilities in nats. Only probs_E and z_sum
    have a gradient.
    """

    load_E: jax.Array
    probs_E: jax.Array
    tokens: jax.Array
    z_sum: jax.Array
    entropy_sum: jax.Array


def routing_stats(
    routing: Routing,
    logits_TE: jax.Array,
    *,
    valid_T: jax.Array | None = None,
    token_axes: tuple[str, ...],
) -> RoutingStats:
    """Sum routing statistics over all devices.

    logits_TE, valid_T: the arguments of `route`. token_axes: mesh axes over which tokens are split.
    Communication: all-reduces of 2 E + 3 numbers, none in the backward pass. Counts are summed as
    integers, so that they do not depend on the mesh.
    """
    E = logits_TE.shape[1]
    if valid_T is None:
        valid_T = jnp.ones(logits_TE.shape[:1], bool)
    # No gradient of the entropy: that of p log p is infinite at p = 0, and NaN times a cotangent 0.
    entropy_TE = jax.scipy.special.entr(lax.stop_gradient(routing.probs_TE))
    norms_T = jax.nn.logsumexp(mask_logits(logits_TE, valid_T), axis=1)
    hit_TKE = routing.experts_TK[:, :, None] == jnp.arange(E)
    sums = (
        jnp.sum(hit_TKE, axis=(0, 1), dtype=jnp.int32),
        jnp.sum(routing.probs_TE, axis=0),
        jnp.sum(valid_T, dtype=jnp.int32),
        jnp.sum(jnp.where(valid_T, norms_T * norms_T, 0.0)),
        jnp.sum(entropy_TE),
    )
    if token_axes:
        sums = lax.psum(sums, token_axes)
    load_E, probs_E, tokens, z_sum, entropy_sum = (x.astype(jnp.float32) for x in sums)
    return RoutingStats(
        load_E=load_E, probs_E=probs_E, tokens=tokens, z_sum=z_sum, entropy_sum=entropy_sum
    )


def load_balancing_loss(stats: RoutingStats) -> jax.Array:
    """Return E * sum over experts of (share of assignments * mean probability).

    1 if either is even, E if all tokens certainly go to one expert, 0 without tokens. Shares have
    no gradient. Source: arXiv 2101.03961, equation 4.
    """
    load_E = lax.stop_gradient(stats.load_E)
    share_E = load_E / jnp.maximum(jnp.sum(load_E), 1.0)
    return load_E.size * jnp.sum(share_E * stats.probs_E) / jnp.maximum(stats.tokens, 1.0)


def router_z_loss(stats: RoutingStats) -> jax.Array:
    """Return the mean of logsumexp(logits)^2, 0 without tokens. Source: arXiv 2202.08906, eq. 5."""
    return stats.z_sum / jnp.maximum(stats.tokens, 1.0)


def update_router_bias(bias_E: jax.Array, load_E: jax.Array, speed: float) -> jax.Array:
    """Raise the bias by `speed` for experts below the mean load and lower it for those above.

    Arrays are `E`, or `N E` for N layers. Source: auxiliary-loss-free load balancing (DeepSeek-V3),
    arXiv 2408.15664, algorithm 1.
    """
    return bias_E + speed * jnp.sign(jnp.mean(load_E, axis=-1, keepdims=True) - load_E)
