"""Routers of a mixture of experts: which experts a token goes to, and with which weights.

Pure functions on the tokens of one device, inside `jax.shard_map` or outside of it. To add a
router, register a function: its name becomes a value of `model.moe.router`.

Letters: T tokens of this device, E experts, K assignments per token, B rows, L row length on this
device (S of the whole row), G groups, M experts per group, C expert capacity per row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps

import jax
import jax.numpy as jnp
from jax import lax

from model.config import MoEConfig
from parallel.linear.ring import all_gather
from registry import Registry

# Logarithm of what DeepSeek's code adds to the sum that it divides weights by.
_LOG_FLOOR = math.log(1e-20)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Routing:
    """Assignment of the tokens of one device to experts.

    experts_TK: int32, distinct within a token; -1: no expert. weights_TK: float32 factors of the
    experts' outputs; 0 without an expert. probs_TE: float32 probabilities for the load-balancing
    loss; 0 for an invalid token. max_assignments: static bound on the number of assignments.
    """

    experts_TK: jax.Array
    weights_TK: jax.Array
    probs_TE: jax.Array
    max_assignments: int = field(metadata={"static": True})


RouteFunction = Callable[..., Routing]


@dataclass(frozen=True)
class RouterImpl:
    """A registered router: its function, with the arguments of `route`, and what it supports."""

    function: RouteFunction
    uses_normalise: bool = False
    uses_groups: bool = False
    uses_bias: bool = True
    single_expert: bool = False
    is_causal: bool = True
    """The experts of a token do not depend on later tokens."""


ROUTERS: Registry[RouterImpl] = Registry("router")


def register_router(name: str, **supports: bool) -> Callable[[RouteFunction], RouteFunction]:
    """Return a decorator that registers a router; `supports` are the flags of `RouterImpl`.

    Raises: ValueError if the name is taken.
    """

    def register(function: RouteFunction) -> RouteFunction:
        ROUTERS[name] = RouterImpl(function, **supports)
        return function

    return register


def check_router(moe: MoEConfig) -> None:
    """Check the routing of a configuration. Raises: ValueError if its router cannot do that."""
    E, k, groups, top = moe.num_experts, moe.num_experts_per_tok, moe.n_group, moe.topk_group
    router = ROUTERS[moe.router]
    if not 1 <= k <= E:
        raise ValueError(
            f"num_experts_per_tok={k}: there are {E} experts; use a number from 1 to {E}"
        )
    if router.single_expert and k != 1:
        raise ValueError(
            f"num_experts_per_tok={k}: the {moe.router} router chooses one expert per token; use 1"
        )
    if not router.uses_groups and (groups, top) != (1, 1):
        raise ValueError(
            f"n_group={groups}, topk_group={top}: the {moe.router} router has no groups of "
            "experts; use 1 and 1, or the sigmoid or softmax router"
        )
    if E % groups:
        divisors = ", ".join(str(n) for n in range(1, E + 1) if E % n == 0)
        raise ValueError(f"n_group={groups} does not divide {E} experts; use {divisors}")
    if top > groups:
        raise ValueError(
            f"topk_group={top}: there are {groups} groups; use a number from 1 to {groups}"
        )
    if k > (reach := top * E // groups):
        raise ValueError(
            f"num_experts_per_tok={k}: the topk_group={top} best groups hold {reach} experts; "
            f"use at most {reach}, or more topk_group"
        )


def check_is_causal(moe: MoEConfig) -> None:
    """Check that text can be generated and scored. Raises: ValueError if experts look ahead."""
    if moe.num_experts and not ROUTERS[moe.router].is_causal:
        raise ValueError(
            f"model.moe.router={moe.router} reads later tokens of a row, so it can neither "
            "generate nor score text; use another router"
        )


def describe_router_warnings(moe: MoEConfig) -> Iterator[str]:
    """Yield a line if the weights of the chosen experts do not depend on the router."""
    is_normalised = moe.router == "topk_softmax" or (
        ROUTERS[moe.router].uses_normalise and moe.norm_topk_prob
    )
    if moe.num_experts and moe.num_experts_per_tok == 1 and is_normalised:
        has_groups = (moe.n_group, moe.topk_group) != (1, 1)
        remedies = {
            "model.moe.router=switch": not has_groups and not moe.has_router_bias,
            "model.moe.norm_topk_prob=false": ROUTERS[moe.router].uses_normalise,
        }
        possible = [value for value, is_possible in remedies.items() if is_possible]
        yield (
            "the weight of a single expert per token is always 1, so that the router learns from "
            f"the balance loss alone; set {' or '.join(possible or ['another model.moe.router'])}"
        )


def route(
    logits_TE: jax.Array,
    moe: MoEConfig,
    *,
    bias_E: jax.Array | None = None,
    valid_T: jax.Array | None = None,
    row_length: int = 1,
    length_axes: tuple[str, ...] = (),
) -> Routing:
    """Choose experts and weights for the tokens of this device.

    logits_TE: float32. bias_E: added to the scores that choose experts, never to the weights; it
    has no gradient (auxiliary-loss-free balancing, arXiv 2408.15664). valid_T: False: the token
    gets no expert, whatever its logits. row_length, length_axes: L, and the mesh axes over which
    rows are split, outermost first; only routers that compare tokens of a row read them.
    The gradient flows through weights and probabilities, not through the choice. Experts are
    ordered best first; of equal scores the lowest index comes first.
    Communication: none, except for expert_choice.
    """
    assert logits_TE.dtype == jnp.float32, logits_TE.dtype
    options = {"row_length": row_length, "length_axes": length_axes}
    function = ROUTERS[moe.router].function
    return function(logits_TE, moe, bias_E=bias_E, valid_T=valid_T, **options)


Choice = tuple[jax.Array, jax.Array, jax.Array]
"""experts_TK, weights_TK before scaling, probs_TE."""
TokenChoice = Callable[[jax.Array, MoEConfig, jax.Array | None], Choice]
"""(logits_TE, moe, bias_E) -> the choice of every token."""


def token_choice(choose: TokenChoice) -> RouteFunction:
    """Turn a function that chooses K experts for each token by itself into a router."""

    @wraps(choose)
    def function(
        logits_TE: jax.Array,
        moe: MoEConfig,
        *,
        bias_E: jax.Array | None,
        valid_T: jax.Array | None,
        **_: object,
    ) -> Routing:
        if valid_T is not None:
            logits_TE = mask_logits(logits_TE, valid_T)
        experts_TK, weights_TK, probs_TE = choose(logits_TE, moe, bias_E)
        weights_TK = moe.routed_scaling_factor * weights_TK
        if valid_T is not None:
            valid_T1 = valid_T[:, None]
            experts_TK = jnp.where(valid_T1, experts_TK, -1)
            weights_TK, probs_TE = (jnp.where(valid_T1, x, 0.0) for x in (weights_TK, probs_TE))
        return Routing(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            probs_TE=probs_TE,
            max_assignments=experts_TK.size,
        )

    return function


@register_router("softmax", uses_normalise=True, uses_groups=True)
@token_choice
def _softmax(logits_TE: jax.Array, moe: MoEConfig, bias_E: jax.Array | None) -> Choice:
    """Take the top k of softmax(logits); weights are these probabilities, or their shares.

    Of several groups, those with the best single experts are considered. Source: DeepSeek-V2,
    arXiv 2405.04434, section 2.2.2.
    """
    probs_TE = jax.nn.softmax(logits_TE)
    experts_TK = _top_k(probs_TE, moe, bias_E, scores_per_group=1)
    if moe.norm_topk_prob:
        # Shares of a sum as a softmax of logarithms: a quotient of tiny probabilities, and its
        # gradient, is NaN in float32 where the sum is near 1e-20.
        return experts_TK, jax.nn.softmax(_at(logits_TE, experts_TK)), probs_TE
    return experts_TK, _at(probs_TE, experts_TK), probs_TE


@register_router("topk_softmax")
@token_choice
def _topk_softmax(logits_TE: jax.Array, moe: MoEConfig, bias_E: jax.Array | None) -> Choice:
    """Take the top k logits (with a bias: of softmax(logits) + bias); weights are their softmax."""
    probs_TE = jax.nn.softmax(logits_TE)
    experts_TK = _top_k(logits_TE if bias_E is None else probs_TE, moe, bias_E)
    return experts_TK, jax.nn.softmax(_at(logits_TE, experts_TK)), probs_TE


@register_router("sigmoid", uses_normalise=True, uses_groups=True)
@token_choice
def _sigmoid(logits_TE: jax.Array, moe: MoEConfig, bias_E: jax.Array | None) -> Choice:
    """Take the top k of s + bias in the best groups, s = sigmoid(logits), as DeepSeek-V3 does.

    A group is as good as the sum of its two best s + bias. Weights: s, or s / (their sum + 1e-20).
    Probabilities: s / sum of all s. Source: arXiv 2412.19437, section 2.1.2.
    """
    logs_TE = jax.nn.log_sigmoid(logits_TE)
    # s / sum(s) as a softmax of log s: 0 / 0 cannot happen, however low all logits are.
    probs_TE = jax.nn.softmax(logs_TE)
    experts_TK = _top_k(jax.nn.sigmoid(logits_TE), moe, bias_E)
    if not moe.norm_topk_prob:
        return experts_TK, jax.nn.sigmoid(_at(logits_TE, experts_TK)), probs_TE
    logs_TK = jnp.pad(_at(logs_TE, experts_TK), ((0, 0), (0, 1)), constant_values=_LOG_FLOOR)
    return experts_TK, jax.nn.softmax(logs_TK)[:, : moe.num_experts_per_tok], probs_TE


@register_router("switch", single_expert=True)
@token_choice
def _switch(logits_TE: jax.Array, moe: MoEConfig, bias_E: jax.Array | None) -> Choice:
    """Take the best expert; its weight is its softmax probability.

    A normalised weight would be constant 1 and have no gradient.
    Source: arXiv 2101.03961, section 2.1.
    """
    probs_TE = jax.nn.softmax(logits_TE)
    experts_TK = _top_k(probs_TE, moe, bias_E)
    return experts_TK, _at(probs_TE, experts_TK), probs_TE


def mask_logits(logits: jax.Array, valid: jax.Array) -> jax.Array:
    """Zero the logits of invalid tokens, so that no value or gradient depends on them."""
    return jnp.where(valid[..., None], logits, 0.0)


def _top_k(
    scores_TE: jax.Array, moe: MoEConfig, bias_E: jax.Array | None, scores_per_group: int = 2
) -> jax.Array:
    """Return the experts with the highest score + bias, `T K` int32.

    scores_per_group: number of best scores that are summed to rank a group: 1 (DeepSeek-V2) or 2
    (DeepSeek-V3).
    """
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    scores_TE = lax.stop_gradient(scores_TE)
    if moe.topk_group < moe.n_group:
        scores_TE = _mask_groups(scores_TE, moe, scores_per_group)
    return lax.top_k(scores_TE, moe.num_experts_per_tok)[1]


def _mask_groups(scores_TE: jax.Array, moe: MoEConfig, scores_per_group: int) -> jax.Array:
    """Set the scores outside of the best groups to -inf: with a bias, scores may be negative."""
    T, E = scores_TE.shape
    G = moe.n_group
    scores_TGM = scores_TE.reshape(T, G, E // G)
    rank_TG = jnp.max(scores_TGM, axis=2)
    # The second best without lax.top_k, which on a TPU pads M experts to 128.
    if scores_per_group == 2 and G < E:
        first_TGM = jnp.arange(E // G) == jnp.argmax(scores_TGM, axis=2, keepdims=True)
        rank_TG += jnp.max(jnp.where(first_TGM, -jnp.inf, scores_TGM), axis=2)
    groups_Tg = lax.top_k(rank_TG, moe.topk_group)[1]
    kept_TG = jnp.any(groups_Tg[:, :, None] == jnp.arange(G), axis=1)
    return jnp.where(kept_TG[:, :, None], scores_TGM, -jnp.inf).reshape(T, E)


@partial(jax.checkpoint, prevent_cse=False)
def _at(values_TE: jax.Array, experts_TK: jax.Array) -> jax.Array:
    """Return the values of the chosen experts, `T K`.

    Compares and sums, which fuses; a gather and the scatter of its gradient are slow on a TPU.
    Recomputed in the backward pass, which would otherwise keep T K E booleans.
    """
    hit_TKE = experts_TK[:, :, None] == jnp.arange(values_TE.shape[1])
    return jnp.sum(jnp.where(hit_TKE, values_TE[:, None, :], 0.0), axis=2)


@register_router("expert_choice", uses_bias=False, is_causal=False)
def _expert_choice(
    logits_TE: jax.Array,
    moe: MoEConfig,
    *,
    bias_E: jax.Array | None,
    valid_T: jax.Array | None,
    row_length: int,
    length_axes: tuple[str, ...],
) -> Routing:
    """Let every expert take its C = min(ceil(S top_k / E), S) best tokens of every row; K = E.

    If a row has fewer valid tokens than C, all of them are taken; of equal tokens the first ones.
    Probabilities: softmax of a token over E; they are also the weights.
    Communication: one all-gather of the probabilities over length_axes, none in the backward pass.
    Source: arXiv 2202.09368, section 3.2.
    """
    E, L = logits_TE.shape[1], row_length
    logits_BLE = logits_TE.reshape(-1, L, E)
    valid_BL = jnp.ones(logits_BLE.shape[:2], bool) if valid_T is None else valid_T.reshape(-1, L)
    valid_BL1 = valid_BL[:, :, None]
    probs_BLE = jax.nn.softmax(mask_logits(logits_BLE, valid_BL))
    scores_BLE = jnp.where(valid_BL1, lax.stop_gradient(probs_BLE), -jnp.inf)
    scores_BSE = all_gather(scores_BLE, length_axes, 1)
    S = scores_BSE.shape[1]
    capacity = min(-(-S * moe.num_experts_per_tok // E), S)
    start = lax.axis_index(length_axes) * L if length_axes else 0
    taken_BSE = _best_tokens(scores_BSE, capacity)
    taken_BLE = lax.dynamic_slice_in_dim(taken_BSE, start, L, axis=1) & valid_BL1
    experts_BLE = jnp.where(taken_BLE, jnp.arange(E, dtype=jnp.int32), -1)
    weights_BLE = moe.routed_scaling_factor * jnp.where(taken_BLE, probs_BLE, 0.0)
    return Routing(
        experts_TK=experts_BLE.reshape(-1, E),
        weights_TK=weights_BLE.reshape(-1, E),
        probs_TE=jnp.where(valid_BL1, probs_BLE, 0.0).reshape(-1, E),
        max_assignments=len(logits_BLE) * E * min(capacity, L),
    )


def _best_tokens(scores_BSE: jax.Array, capacity: int) -> jax.Array:
    """Return whether a token is among the best of its row for an expert, `B S E`."""
    S = scores_BSE.shape[1]
    positions_BEC = lax.top_k(jnp.swapaxes(scores_BSE, 1, 2), capacity)[1]

    def mark(positions_C: jax.Array) -> jax.Array:
        return jnp.zeros(S, bool).at[positions_C].set(True, unique_indices=True)

    # By position, not by comparison with the lowest of the C scores: a compiler may compute a score
    # twice, and the two results may differ in the last bit.
    return jnp.swapaxes(jax.vmap(jax.vmap(mark))(positions_BEC), 1, 2)
