"""Routers of a mixture of experts: which experts a token goes to, with which weights, how evenly.

Pure functions on the tokens of one device, inside `jax.shard_map` or anywhere; they communicate
only over the mesh axes that they are given by name. `route` and `route_rows` choose, `tally` counts
over all devices what was chosen, and the losses and `rebalanced` read nothing but that count. It
refuses to know parameters, a mesh, capacities, and how tokens reach their experts.

Letters: T tokens of this device, E experts, K slots of a token, B rows, L length of this device's
part of a row (S of the whole row), G groups, M experts of a group, C tokens that an expert takes.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from parallel.linear.ring import all_gather

RouterName = Literal["softmax", "topk_softmax", "sigmoid", "switch", "expert_choice"]
# What DeepSeek's code adds to the sum that it divides weights by, as a logarithm.
_LOG_FLOOR = math.log(1e-20)


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """Everything static about a router; hashable. See `check_rule`."""

    name: RouterName
    top_k: int
    """Experts of a token; for expert_choice of an average token."""
    normalise: bool
    """softmax, sigmoid: the weights of a token sum to `scaling`. The weights of topk_softmax always
    do; those of switch (one weight would be constant and teach nothing) and expert_choice never."""
    num_groups: int = 1
    """sigmoid: neighbouring experts form this many groups."""
    top_groups: int = 1
    """sigmoid: the experts of a token come from this many groups."""
    scaling: float = 1.0
    """Factor of all weights."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where every token of this device goes.

    experts_TK: int32, distinct within a token; -1: no expert in this slot. weights_TK: float32,
    what the outputs of these experts are multiplied by; 0 in an empty slot. probs_TE: float32,
    scores that sum to one over E, for the balance loss; 0 for a token that is not valid.
    """

    experts_TK: jax.Array
    weights_TK: jax.Array
    probs_TE: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Health:
    """Sums over the valid tokens of all devices, float32, equal on all of them.

    load_E: assignments of every expert. probs_E: of the scores. tokens: how many. z_sum: of
    logsumexp(logits)^2. entropy_sum: of the entropy of a token's scores, in nats. Only probs_E and
    z_sum have a gradient.
    """

    load_E: jax.Array
    probs_E: jax.Array
    tokens: jax.Array
    z_sum: jax.Array
    entropy_sum: jax.Array


def check_rule(rule: RouterRule, num_experts: int) -> None:
    """Raises: ValueError, one line, if so many experts cannot be routed to by this rule."""
    name, k, groups, top = rule.name, rule.top_k, rule.num_groups, rule.top_groups
    if not 1 <= k <= num_experts:
        raise ValueError(
            f"num_experts_per_tok={k}: there are {num_experts} experts; use a number from 1 to "
            f"{num_experts}"
        )
    if name == "switch" and k != 1:
        raise ValueError(
            f"num_experts_per_tok={k}: the switch router chooses one expert per token; use 1"
        )
    if name != "sigmoid" and (groups, top) != (1, 1):
        raise ValueError(
            f"n_group={groups}, topk_group={top}: the {name} router knows no groups of experts; "
            "use 1 and 1, or the sigmoid router"
        )
    if groups < 1 or num_experts % groups:
        divisors = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        raise ValueError(
            f"n_group={groups} does not divide {num_experts} experts; use one of {divisors}"
        )
    if not 1 <= top <= groups:
        raise ValueError(
            f"topk_group={top}: there are {groups} groups; use a number from 1 to {groups}"
        )
    if k > (reach := top * num_experts // groups):
        raise ValueError(
            f"num_experts_per_tok={k}: the topk_group={top} best groups hold {reach} experts; use "
            f"at most {reach}, or more topk_group"
        )


def route(
    logits_TE: jax.Array,
    rule: RouterRule,
    *,
    bias_E: jax.Array | None = None,
    valid_T: jax.Array | None = None,
) -> Routing:
    """Every token chooses its K = top_k experts, best first; of equal ones the lowest comes first.

    logits_TE: float32. bias_E: added to the scores that choose, never to the weights; it has no
    gradient (arXiv 2408.15664). valid_T: False: the token goes nowhere, whatever its logits.
    The gradient flows through the weights and scores, not through the choice.

    softmax: the best of softmax(logits); the weights are these, or what they make of their sum.
    topk_softmax: the best logits (with a bias: of softmax(logits) + bias); weights: their softmax.
    sigmoid: s = sigmoid(logits), the best of s + bias in the best groups; a group is as good as its
    two best s + bias together. Weights: s, or s / (their sum + 1e-20). Scores: s / sum of all s.
    switch: the best of softmax(logits), which is also its weight.
    Source: sigmoid: arXiv 2412.19437, section 2.1.2; switch: arXiv 2101.03961, section 2.1.
    """
    assert rule.name != "expert_choice", "experts choose from whole rows: see route_rows"
    assert logits_TE.dtype == jnp.float32, logits_TE.dtype
    if valid_T is not None:
        logits_TE = _without(logits_TE, valid_T)
    # s / sum(s) as a softmax of log s: 0 / 0 cannot happen, however low all logits are.
    logs_TE = jax.nn.log_sigmoid(logits_TE) if rule.name == "sigmoid" else logits_TE
    probs_TE = jax.nn.softmax(logs_TE)
    experts_TK = _choice(logits_TE, probs_TE, rule, bias_E)
    weights_TK = rule.scaling * _weights(logits_TE, logs_TE, probs_TE, experts_TK, rule)
    if valid_T is not None:
        there_T1 = valid_T[:, None]
        experts_TK = jnp.where(there_T1, experts_TK, -1)
        weights_TK, probs_TE = (jnp.where(there_T1, x, 0.0) for x in (weights_TK, probs_TE))
    return Routing(experts_TK=experts_TK, weights_TK=weights_TK, probs_TE=probs_TE)


def _without(logits: jax.Array, valid: jax.Array) -> jax.Array:
    """Zeros for tokens that are not valid: what stands there reaches no value and no gradient."""
    return jnp.where(valid[..., None], logits, 0.0)


def _choice(
    logits_TE: jax.Array, probs_TE: jax.Array, rule: RouterRule, bias_E: jax.Array | None
) -> jax.Array:
    """The experts of every token, `T K` int32."""
    if rule.name == "sigmoid":
        scores_TE = jax.nn.sigmoid(logits_TE)
    elif rule.name == "topk_softmax" and bias_E is None:
        scores_TE = logits_TE
    else:
        scores_TE = probs_TE
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    scores_TE = lax.stop_gradient(scores_TE)
    if rule.top_groups < rule.num_groups:
        scores_TE = _in_best_groups(scores_TE, rule)
    return lax.top_k(scores_TE, rule.top_k)[1]


def _in_best_groups(scores_TE: jax.Array, rule: RouterRule) -> jax.Array:
    """-inf for the experts of all but the best groups: with a bias, scores may be negative."""
    T, E = scores_TE.shape
    G = rule.num_groups
    scores_TGM = scores_TE.reshape(T, G, E // G)
    merits_TG = jnp.max(scores_TGM, axis=2)
    if G < E:  # the second best without lax.top_k, which on a TPU pads M experts to 128
        first_TGM = jnp.arange(E // G) == jnp.argmax(scores_TGM, axis=2, keepdims=True)
        merits_TG += jnp.max(jnp.where(first_TGM, -jnp.inf, scores_TGM), axis=2)
    groups_Tg = lax.top_k(merits_TG, rule.top_groups)[1]
    kept_TG = jnp.any(groups_Tg[:, :, None] == jnp.arange(G), axis=1)
    return jnp.where(kept_TG[:, :, None], scores_TGM, -jnp.inf).reshape(T, E)


def _weights(
    logits_TE: jax.Array,
    logs_TE: jax.Array,
    probs_TE: jax.Array,
    experts_TK: jax.Array,
    rule: RouterRule,
) -> jax.Array:
    """Before the scaling, `T K`. logs_TE: logarithms of the scores, up to one number per token."""
    if rule.name == "switch" or (rule.name == "softmax" and not rule.normalise):
        return _at(probs_TE, experts_TK)
    if not (rule.name == "topk_softmax" or rule.normalise):
        return jax.nn.sigmoid(_at(logits_TE, experts_TK))
    # Shares of a sum as a softmax of logarithms: no quotient of tiny scores, nor its derivative,
    # which is NaN in float32 where a sum is near 1e-20.
    logs_TK = _at(logs_TE, experts_TK)
    if rule.name == "sigmoid":
        logs_TK = jnp.pad(logs_TK, ((0, 0), (0, 1)), constant_values=_LOG_FLOOR)
    return jax.nn.softmax(logs_TK)[:, : rule.top_k]


@partial(jax.checkpoint, prevent_cse=False)
def _at(values_TE: jax.Array, experts_TK: jax.Array) -> jax.Array:
    """The values of these experts, `T K`.

    By comparing, which fuses; a gather and the scatter of its derivative are slow on a TPU.
    Recomputed in the backward pass: what was compared would be kept, T K E booleans.
    """
    hit_TKE = experts_TK[:, :, None] == jnp.arange(values_TE.shape[1])
    return jnp.sum(jnp.where(hit_TKE, values_TE[:, None, :], 0.0), axis=2)


def route_rows(
    logits_BLE: jax.Array,
    rule: RouterRule,
    *,
    valid_BL: jax.Array | None = None,
    length_axes: tuple[str, ...],
) -> Routing:
    """expert_choice: every expert takes its C best tokens of every row; T = B L, K = E.

    Not causal: whether a token is taken depends on the tokens after it, too.
    logits_BLE: float32, `B S/length_axes E`. valid_BL: False: never taken, whatever its logits; if
    there are fewer valid ones than C = min(ceil(S top_k / E), S), all are taken. length_axes: mesh
    axes over which rows are split, outermost first; () if they are not. Weights and scores: softmax
    of a token over E, the weights times the scaling. Of equally good tokens the first are taken.
    The gradient flows through the weights and scores, not through the choice.
    Communication: one all-gather of the scores over length_axes, none in the backward pass.
    Source: arXiv 2202.09368, section 3.2.
    """
    assert rule.name == "expert_choice" and logits_BLE.dtype == jnp.float32, (rule, logits_BLE)
    B, L, E = logits_BLE.shape
    if valid_BL is None:
        valid_BL = jnp.ones((B, L), bool)
    there_BL1 = valid_BL[:, :, None]
    scores_BLE = jax.nn.softmax(_without(logits_BLE, valid_BL))
    wanted_BLE = jnp.where(there_BL1, lax.stop_gradient(scores_BLE), -jnp.inf)
    taken_BSE = _taken(all_gather(wanted_BLE, length_axes, 1), rule)
    start = lax.axis_index(length_axes) * L if length_axes else 0
    taken_BLE = lax.dynamic_slice_in_dim(taken_BSE, start, L, axis=1) & there_BL1
    experts_BLE = jnp.where(taken_BLE, jnp.arange(E, dtype=jnp.int32), -1)
    weights_BLE = rule.scaling * jnp.where(taken_BLE, scores_BLE, 0.0)
    probs_BLE = jnp.where(there_BL1, scores_BLE, 0.0)
    experts_TK, weights_TK, probs_TE = (
        x.reshape(B * L, E) for x in (experts_BLE, weights_BLE, probs_BLE)
    )
    return Routing(experts_TK=experts_TK, weights_TK=weights_TK, probs_TE=probs_TE)


def _taken(scores_BSE: jax.Array, rule: RouterRule) -> jax.Array:
    """Booleans: the C best tokens of every row and expert."""
    S, E = scores_BSE.shape[1:]
    positions_BEC = lax.top_k(jnp.swapaxes(scores_BSE, 1, 2), min(-(-S * rule.top_k // E), S))[1]

    def mark(positions_C: jax.Array) -> jax.Array:
        return jnp.zeros(S, bool).at[positions_C].set(True, unique_indices=True)

    # By position, not by comparing with the least of the C scores: a compiler may compute a score
    # twice, and the two may differ in the last bit.
    return jnp.swapaxes(jax.vmap(jax.vmap(mark))(positions_BEC), 1, 2)


def tally(
    routing: Routing,
    logits_TE: jax.Array,
    *,
    valid_T: jax.Array | None = None,
    token_axes: tuple[str, ...],
) -> Health:
    """What was chosen, summed over all devices of token_axes: those over which tokens are split.

    logits_TE, valid_T: as the router got them. token_axes: () if all tokens are here.
    Communication: all-sums of 2 E + 3 numbers, none in the backward pass. Counts are summed as
    integers, so that they do not depend on the mesh.
    """
    E = logits_TE.shape[1]
    if valid_T is None:
        valid_T = jnp.ones(logits_TE.shape[:1], bool)
    # The entropy has no gradient: that of p log p at p = 0 is infinite, and a cotangent of zero
    # times it NaN.
    entropy_TE = jax.scipy.special.entr(lax.stop_gradient(routing.probs_TE))
    norms_T = jax.nn.logsumexp(_without(logits_TE, valid_T), axis=1)
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
    return Health(
        load_E=load_E, probs_E=probs_E, tokens=tokens, z_sum=z_sum, entropy_sum=entropy_sum
    )


def balance_loss(health: Health) -> jax.Array:
    """E * sum over experts of their share of the assignments times their mean score.

    1 if either is even, E if all tokens go to one expert for certain, 0 without tokens. The share
    of the assignments has no gradient. Routers by token assign tokens * top_k times, which makes
    the share the one of the source.
    Source: arXiv 2101.03961, equation 4.
    """
    load_E = lax.stop_gradient(health.load_E)
    share_E = load_E / jnp.maximum(jnp.sum(load_E), 1.0)
    return load_E.size * jnp.sum(share_E * health.probs_E) / jnp.maximum(health.tokens, 1.0)


def z_loss(health: Health) -> jax.Array:
    """The mean of logsumexp(logits)^2, 0 without tokens. Source: arXiv 2202.08906, equation 5."""
    return health.z_sum / jnp.maximum(health.tokens, 1.0)


def rebalanced(bias_E: jax.Array, load_E: jax.Array, speed: float) -> jax.Array:
    """The bias a step later: up by `speed` for experts below the mean load, down for those above.

    Both `E`, or `N E` for N layers. Source: arXiv 2408.15664, algorithm 1.
    """
    return bias_E + speed * jnp.sign(jnp.mean(load_E, axis=-1, keepdims=True) - load_E)
