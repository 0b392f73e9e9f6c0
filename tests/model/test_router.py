"""Routers, losses and gradients equal loops in float64, and are the same on every mesh."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from model.config import MoEConfig
from model.load_balancing import (
    load_balancing_loss,
    router_z_loss,
    routing_stats,
)
from model.router import ROUTERS, check_router, register_router, route

T, E = 16, 8
B, S = 4, 4


def spec_of(name="sigmoid", top_k=2, normalise=False, **rest) -> MoEConfig:
    return MoEConfig(
        num_experts=E, router=name, num_experts_per_tok=top_k, norm_topk_prob=normalise, **rest
    )


SPECS = {
    "softmax": spec_of("softmax", 3, True),
    "softmax-plain": spec_of("softmax", 3, routed_scaling_factor=2.5),
    "softmax-groups": spec_of("softmax", 3, n_group=4, topk_group=2, routed_scaling_factor=1.5),
    "topk_softmax": spec_of("topk_softmax", 2, True),
    "sigmoid": spec_of("sigmoid", 3, True, n_group=4, topk_group=2, routed_scaling_factor=2.5),
    "sigmoid-plain": spec_of("sigmoid"),
    "sigmoid-groups-of-one": spec_of("sigmoid", 2, True, n_group=8, topk_group=3),
    "switch": spec_of("switch", 1),
}
EXPERT_CHOICE = spec_of("expert_choice", 3, routed_scaling_factor=1.5)
every_router = pytest.mark.parametrize("name", SPECS)
rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(T, E)).astype(np.float32)
BIAS = (rng.normal(size=E) / 4).astype(np.float32)
VALID = rng.random(T) < 0.75
COTANGENT = rng.normal(size=(T, E)).astype(np.float32)  # by token and expert
# Coefficients of the losses in the objective whose gradient is compared.
BALANCE, Z = 3.0, 0.5
# The terms cancel; their sizes add up to less than 64: half of float32's last bit there.
OBJECTIVE_BOUND = 64 * 2.0**-24


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def best(scores, count, among=None):
    ids = range(len(scores)) if among is None else among
    return sorted(ids, key=lambda i: (-scores[i], i))[:count]


def best_in_groups(scores, spec, counted):
    """The best experts of the best groups, by the sum of their `counted` best scores."""
    size = len(scores) // spec.n_group
    members = [range(g * size, (g + 1) * size) for g in range(spec.n_group)]
    merits = [sum(sorted(scores[list(m)])[-counted:]) for m in members]
    groups = best(merits, spec.topk_group)
    allowed = [e for e in range(len(scores)) if e // size in groups]
    return best(scores, spec.num_experts_per_tok, allowed)


def token(logits, spec, bias):
    """Route one token in float64: experts, their weights, probabilities of all experts."""
    if spec.router == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
        choosing = scores + (0 if bias is None else bias)
        experts = best_in_groups(choosing, spec, 2)
        weights = scores[experts]
        if spec.norm_topk_prob:
            weights = weights / (weights.sum() + 1e-20)
        return experts, weights * spec.routed_scaling_factor, scores / scores.sum()
    probs = softmax(logits)
    by_logit = spec.router == "topk_softmax" and bias is None
    choosing = logits if by_logit else probs + (0 if bias is None else bias)
    experts = best_in_groups(choosing, spec, 1)
    weights = softmax(logits[experts]) if spec.router == "topk_softmax" else probs[experts]
    if spec.router == "softmax" and spec.norm_topk_prob:
        weights = weights / weights.sum()
    return experts, weights * spec.routed_scaling_factor, probs


def rows_taken(logits, valid, spec):
    """Route by expert_choice in float64: token `(row, position)` -> its experts."""
    rows, length, num_experts = logits.shape
    capacity = min(math.ceil(length * spec.num_experts_per_tok / num_experts), length)
    taken = {(b, i): [] for b in range(rows) for i in range(length)}
    for b in range(rows):
        scores = np.array([softmax(x) for x in logits[b]])
        for e in range(num_experts):
            for i in best(scores[:, e], capacity, np.flatnonzero(valid[b])):
                taken[b, i].append(e)
    return taken


def objective_of(chosen, logits, valid):
    """Compute objective, losses and statistics from {token: (experts, weights, probabilities)}."""
    load, probs = np.zeros(E), np.zeros(E)
    weighted = z = entropy = 0.0
    for t, (experts, weights, scores) in chosen.items():
        load[experts] += 1
        weighted += float(np.dot(weights, COTANGENT[t, experts]))
        probs += scores
        z += math.log(np.exp(logits[t]).sum()) ** 2
        entropy -= sum(p * math.log(p) for p in scores)
    tokens = max(int(valid.sum()), 1)
    balance = E * float(np.dot(load / max(load.sum(), 1), probs / tokens))
    total = weighted + BALANCE * balance + Z * z / tokens
    return total, (balance, z / tokens), (load, probs, valid.sum(), z, entropy)


def by_loops(logits, spec, bias, valid):
    logits = logits.astype(np.float64)
    chosen = {t: token(logits[t], spec, bias) for t in range(len(logits)) if valid[t]}
    return chosen, *objective_of(chosen, logits, valid)


def rows_by_loops(logits, spec, bias, valid):
    """Do the same for expert_choice on B rows, without a bias."""
    logits = logits.astype(np.float64)
    taken = rows_taken(logits.reshape(B, S, E), valid.reshape(B, S), spec)
    chosen = {}
    for t in np.flatnonzero(valid):
        probs, experts = softmax(logits[t]), taken[t // S, t % S]
        chosen[t] = experts, spec.routed_scaling_factor * probs[experts], probs
    return chosen, *objective_of(chosen, logits, valid)


def differences(solve, logits, *args, step=1e-6):
    """Return the gradient by central differences; the steps are too small to change a choice."""
    gradient = np.zeros(logits.shape)
    for index in np.ndindex(*logits.shape):
        move = np.zeros(logits.shape)
        move[index] = step
        ends = [solve(logits + sign * move, *args)[1] for sign in (1, -1)]
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def by_expert(routing):
    """Return the weights of a token by expert, `T E`."""
    hit_TKE = routing.experts_TK[:, :, None] == jnp.arange(routing.probs_TE.shape[1])
    return jnp.sum(jnp.where(hit_TKE, routing.weights_TK[:, :, None], 0), 1)


def objective(logits, cotangent, spec, bias, valid, token_axes=(), length_axes=()):
    """Return the objective without losses, summed over devices, the routing and its statistics.

    Tokens are local: `T E`, for expert_choice `B L E`.
    """
    length = logits.shape[-2]
    logits, valid = logits.reshape(-1, E), None if valid is None else valid.reshape(-1)
    axes = {"row_length": length, "length_axes": length_axes}
    routing = route(logits, spec, bias_E=bias, valid_T=valid, **axes)
    stats = routing_stats(routing, logits, valid_T=valid, token_axes=token_axes)
    weighted = jnp.sum(by_expert(routing) * cotangent.reshape(-1, E))
    return jax.lax.psum(weighted, token_axes) if token_axes else weighted, (routing, stats)


def losses(stats):
    return BALANCE * load_balancing_loss(stats) + Z * router_z_loss(stats)


@cache
def solver(spec):
    """Return value_and_grad on one device, compiled once per router and kind of arguments."""

    def whole(logits, bias, valid):
        total, aux = objective(logits, COTANGENT, spec, bias, valid)
        return total + losses(aux[1]), aux

    def solve(logits, bias, valid):
        if spec.router == "expert_choice":
            logits, valid = logits.reshape(B, S, E), valid.reshape(B, S)
        (total, aux), gradient = jax.tree.map(np.asarray, jitted(logits, bias, valid))
        return (total, aux), gradient.reshape(T, E)

    jitted = jax.jit(jax.value_and_grad(whole, has_aux=True))
    return solve


def assert_equals_loops(got, expected, gradient) -> None:
    """Bounds: a few roundings of float32 on values and on sums of 16 tokens."""
    (total, (routing, stats)), got_gradient = got
    chosen, expected_total, expected_losses, sums = expected
    for t in range(T):
        experts, weights, probs = chosen.get(t, ([], [], np.zeros(E)))
        slots = routing.experts_TK[t] >= 0
        assert routing.experts_TK[t][slots].tolist() == list(experts)
        np.testing.assert_allclose(routing.weights_TK[t][slots], weights, rtol=1e-6)
        assert np.all(routing.weights_TK[t][~slots] == 0)
        np.testing.assert_allclose(routing.probs_TE[t], probs, rtol=1e-6)
    names = "load_E", "probs_E", "tokens", "z_sum", "entropy_sum"
    for name, value in zip(names, sums, strict=True):
        np.testing.assert_allclose(getattr(stats, name), value, rtol=2e-6, err_msg=name)
    np.testing.assert_allclose(
        (load_balancing_loss(stats), router_z_loss(stats)), expected_losses, rtol=2e-6
    )
    np.testing.assert_allclose(total, expected_total, rtol=0, atol=OBJECTIVE_BOUND)
    np.testing.assert_allclose(got_gradient, gradient, rtol=0, atol=2e-6)
    assert routing.experts_TK.dtype == np.int32 and routing.weights_TK.dtype == np.float32


@pytest.mark.parametrize("bias_and_padding", [True, False])
@every_router
def test_routing_losses_and_gradients_equal_loops_in_float64(name, bias_and_padding) -> None:
    spec = SPECS[name]
    bias, valid = (BIAS, VALID) if bias_and_padding else (None, None)
    everyone = np.ones(T, bool) if valid is None else valid
    got = solver(spec)(LOGITS, bias, valid)
    gradient = differences(by_loops, LOGITS, spec, bias, everyone)
    assert_equals_loops(got, by_loops(LOGITS, spec, bias, everyone), gradient)


@pytest.mark.parametrize("top_k", [2, 3, 8])
def test_expert_choice_equals_loops_in_float64(top_k) -> None:
    spec = spec_of("expert_choice", top_k, routed_scaling_factor=1.5)
    got = solver(spec)(LOGITS, None, VALID)
    gradient = differences(rows_by_loops, LOGITS, spec, None, VALID)
    assert_equals_loops(got, rows_by_loops(LOGITS, spec, None, VALID), gradient)


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def on_mesh(spec, tokens, token_axes, length_axes, losses_inside):
    """Return value_and_grad of a shard_map over split tokens, on the ambient mesh."""

    def island(logits, cotangent, bias, valid):
        total, (routing, stats) = objective(
            logits, cotangent, spec, bias, valid, token_axes, length_axes
        )
        total = total + losses(stats) if losses_inside else total
        return total, (by_expert(routing).reshape(logits.shape), stats)

    def whole(*args):
        total, aux = jax.shard_map(
            island, in_specs=(tokens, tokens, P(), tokens), out_specs=(P(), (tokens, P()))
        )(*args)
        return total if losses_inside else total + losses(aux[1]), aux

    return jax.value_and_grad(jax.jit(whole), has_aux=True)


def assert_equals_one_device(mesh, spec, tokens, token_axes, length_axes=(), inside=True) -> None:
    shape = (B, S) if spec.router == "expert_choice" else (T,)
    arrays = LOGITS.reshape(*shape, E), COTANGENT.reshape(*shape, E), BIAS, VALID.reshape(shape)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))
            for array, spec in zip(arrays, (tokens, tokens, P(), tokens), strict=True)
        ]
        got = on_mesh(spec, tokens, token_axes, length_axes, inside)(*placed)
    (total, (weights, stats)), gradient = jax.tree.map(np.asarray, got)
    (expected, (routing, one_device)), expected_gradient = solver(spec)(LOGITS, BIAS, VALID)
    np.testing.assert_allclose(total, expected, rtol=0, atol=OBJECTIVE_BOUND)
    np.testing.assert_allclose(gradient.reshape(T, E), expected_gradient, rtol=0, atol=1e-6)
    expected_weights = np.asarray(by_expert(routing))
    np.testing.assert_array_equal(weights.reshape(T, E) > 0, expected_weights > 0)
    np.testing.assert_allclose(weights.reshape(T, E), expected_weights, rtol=1e-6)
    for name, value in vars(one_device).items():
        rtol = 0 if name in ("load_E", "tokens") else 1e-6
        np.testing.assert_allclose(getattr(stats, name), value, rtol=rtol, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "token_axes", "inside"),
    [
        ({"dp": 8}, ("dp",), False),
        ({"dp": 2, "tp": 2, "sp": 2}, ("dp", "sp"), True),  # both tp devices hold every token
        ({"dp": 2, "tp": 2, "sp": 2}, ("dp", "sp"), False),
        ({"dp": 1, "tp": 8}, ("dp",), True),
    ],
    ids=str,
)
def test_split_tokens_give_the_losses_and_gradients_of_one_device(sizes, token_axes, inside):
    """inside: the losses are computed in the shard_map that also routes."""
    mesh, spec = mesh_of(**sizes), SPECS["sigmoid"]
    assert_equals_one_device(mesh, spec, P(token_axes), token_axes, inside=inside)


def test_tokens_count_on_all_devices_when_all_are_valid() -> None:
    def island(logits):
        routing = route(logits, SPECS["softmax"])
        return routing_stats(routing, logits, token_axes=("dp",))

    mesh = mesh_of(dp=8)
    logits = jax.device_put(LOGITS, jax.sharding.NamedSharding(mesh, P("dp")))
    with jax.set_mesh(mesh):
        stats = jax.jit(jax.shard_map(island, in_specs=P("dp"), out_specs=P()))(logits)
    assert stats.tokens == T and stats.load_E.sum() == 3 * T


@pytest.mark.parametrize(
    ("sizes", "tokens", "length_axes"),
    [
        ({"sp": 2}, P(None, "sp"), ("sp",)),
        ({"sp": 4}, P(None, "sp"), ("sp",)),
        ({"tp": 2, "sp": 2}, P(None, ("sp", "tp")), ("sp", "tp")),
        ({"dp": 2, "tp": 2, "sp": 2}, P("dp", "sp"), ("sp",)),
        ({"dp": 2, "sp": 1}, P("dp", "sp"), ("sp",)),
        ({"dp": 2}, P("dp"), ()),
    ],
    ids=str,
)
def test_expert_choice_does_not_depend_on_how_rows_are_split(sizes, tokens, length_axes) -> None:
    token_axes = (*length_axes, "dp") if tokens[0] else length_axes
    assert_equals_one_device(mesh_of(**sizes), EXPERT_CHOICE, tokens, token_axes, length_axes)


def checked(spec, logits, bias, valid):
    """Return routing and statistics of one device after checking the laws of every router."""
    (_, (routing, stats)), gradient = solver(spec)(logits, bias, valid)
    experts, weights = routing.experts_TK, routing.weights_TK
    chosen = experts >= 0
    assert np.all(experts < E) and np.all(experts[~chosen] == -1)
    assert all(len(set(ids[ids >= 0])) == np.sum(ids >= 0) for ids in experts)
    assert np.all(weights[~chosen] == 0) and np.all(weights >= 0)
    np.testing.assert_array_equal(stats.load_E, np.bincount(experts[chosen], minlength=E))
    assert stats.tokens == valid.sum()
    assert not chosen[~valid].any() and np.all(gradient[~valid] == 0)
    np.testing.assert_allclose(routing.probs_TE.sum(1), valid, atol=1e-6)
    assert -1e-4 <= stats.entropy_sum <= valid.sum() * math.log(E) + 1e-4
    assert all(np.all(np.isfinite(x)) for x in (weights, gradient, *vars(stats).values()))
    return routing, stats


@st.composite
def inputs(draw):
    own = np.random.default_rng(draw(st.integers(0, 2**31)))
    scale, mask = draw(st.sampled_from([0, 0.1, 1, 10, 1e4])), draw(st.integers(0, 2**T - 1))
    logits, bias = own.normal(size=(T, E)) * scale, own.normal(size=E)
    return logits.astype(np.float32), bias.astype(np.float32), (mask >> np.arange(T)) % 2 == 1


@every_router
@settings(max_examples=25, deadline=None)
@given(drawn=inputs())
def test_every_valid_token_gets_top_k_distinct_experts(name, drawn) -> None:
    spec, (logits, bias, valid) = SPECS[name], drawn
    routing, stats = checked(spec, logits, bias, valid)
    np.testing.assert_array_equal(
        (routing.experts_TK >= 0).sum(1), spec.num_experts_per_tok * valid
    )
    assert stats.load_E.sum() == valid.sum() * spec.num_experts_per_tok
    sums = routing.weights_TK[valid].sum(1)
    low = logits.min() < -30  # where the 1e-20 beside the sum of sigmoids counts
    if spec.router == "topk_softmax" or (
        spec.norm_topk_prob and not (spec.router == "sigmoid" and low)
    ):
        np.testing.assert_allclose(sums, spec.routed_scaling_factor, rtol=1e-6)
    elif spec.router != "sigmoid" or spec.norm_topk_prob:
        assert np.all(sums <= spec.routed_scaling_factor * (1 + 1e-6))
    if spec.n_group > 1:
        groups = routing.experts_TK // (E // spec.n_group)
        assert all(len(set(g)) <= spec.topk_group for g in groups[valid].tolist())


@settings(max_examples=25, deadline=None)
@given(drawn=inputs())
def test_every_expert_takes_its_capacity_of_every_row_or_all_valid_tokens(drawn) -> None:
    logits, bias, valid = drawn
    routing, _ = checked(EXPERT_CHOICE, logits, bias, valid)
    taken = (routing.experts_TK >= 0).reshape(B, S, E).sum(1)
    share = np.minimum(valid.reshape(B, S).sum(1), 2)  # 4 tokens * 3 / 8 experts, rounded up
    np.testing.assert_array_equal(taken, share[:, None] + np.zeros((B, E)))


@every_router
def test_equal_experts_are_chosen_by_lowest_index(name) -> None:
    routing, _ = checked(SPECS[name], np.ones((T, E), np.float32), 0 * BIAS, VALID)
    assert np.all(routing.experts_TK[VALID] == np.arange(SPECS[name].num_experts_per_tok))


def test_equal_tokens_are_taken_by_position() -> None:
    valid = np.arange(T) % S > 0
    routing, _ = checked(EXPERT_CHOICE, np.ones((T, E), np.float32), BIAS, valid)
    taken = (routing.experts_TK >= 0).reshape(B, S, E)
    assert taken[:, 1:3].all() and not taken[:, 3].any()


@pytest.mark.parametrize("value", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("name", [*SPECS, "expert_choice"])
def test_huge_and_equal_logits_have_finite_gradients(name, value) -> None:
    equal = np.full((T, E), value, np.float32)
    for logits in (equal, equal * np.resize([1, -1], E).astype(np.float32)):
        checked(SPECS.get(name, EXPERT_CHOICE), logits, BIAS, VALID)


@pytest.mark.parametrize("shift", [20, 40, 60])
def test_tiny_sigmoids_are_divided_by_their_sum_and_the_floor(shift) -> None:
    spec, logits = SPECS["sigmoid"], LOGITS - np.float32(shift)
    routing, _ = checked(spec, logits, 0 * BIAS, np.ones(T, bool))
    # A logarithm as large as `shift` has an error of half its last bit, 2^-19 from 32 on.
    for got_K, logits_E in zip(routing.weights_TK, logits.astype(np.float64), strict=True):
        np.testing.assert_allclose(got_K, token(logits_E, spec, None)[1], rtol=2 * 2.0**-19)


@pytest.mark.parametrize(("name", "second"), [("topk_softmax", 5), ("softmax-plain", 0)])
def test_only_topk_softmax_distinguishes_probabilities_that_underflow(name, second) -> None:
    logits = np.zeros((T, E), np.float32) + np.where(np.arange(E) == 7, 1e4, np.arange(E) == 5)
    routing, _ = checked(SPECS[name], logits.astype(np.float32), None, np.ones(T, bool))
    assert np.all(routing.experts_TK[:, :2] == [7, second])


@pytest.mark.parametrize("name", ["softmax", "softmax-plain", "sigmoid"])
def test_the_backward_pass_keeps_nothing_of_tokens_by_slots_by_experts(name) -> None:
    def residuals(logits):
        return jax.vjp(lambda x: route(x, SPECS[name]).weights_TK, logits)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, LOGITS))
    assert max(leaf.size for leaf in kept) <= T * E


@pytest.mark.parametrize("name", [*SPECS, "expert_choice"])
def test_padding_is_not_counted_whatever_its_logits(name) -> None:
    spec = SPECS.get(name, EXPERT_CHOICE)
    broken = np.where(VALID[:, None], LOGITS, np.nan).astype(np.float32)
    got, expected = (solver(spec)(logits, BIAS, VALID) for logits in (broken, LOGITS))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    (total, (_, stats)), gradient = solver(spec)(broken * np.nan, BIAS, np.zeros(T, bool))
    assert total == 0 and np.all(gradient == 0)
    assert all(np.all(x == 0) for x in vars(stats).values())


@pytest.mark.parametrize("name", ["softmax", "topk_softmax", "sigmoid", "switch"])
def test_a_bias_changes_the_choice_and_has_no_gradient(name) -> None:
    spec = SPECS[name]
    low_group = np.where(np.arange(E) < E // 2, 5.0, 0.0).astype(np.float32)
    routing, _ = checked(spec, LOGITS, low_group, VALID)
    assert routing.experts_TK.max() < E // 2

    @jax.jit
    @jax.grad
    def of_bias(bias_E):
        routing = route(jnp.asarray(LOGITS), spec, bias_E=bias_E)
        stats = routing_stats(routing, jnp.asarray(LOGITS), token_axes=())
        return jnp.sum(by_expert(routing) * COTANGENT) + losses(stats)

    np.testing.assert_array_equal(of_bias(jnp.asarray(BIAS)), np.zeros(E))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "num_experts_per_tok=9: there are 8 experts; use a number from 1 to 8"),
        ({"name": "switch"}, "=2: the switch router chooses one expert per token; use 1"),
        ({"n_group": 3}, "n_group=3 does not divide 8 experts; use 1, 2, 4, 8"),
        ({"n_group": 2, "topk_group": 3}, "topk_group=3: there are 2 groups; use a number from"),
        (
            {"top_k": 3, "n_group": 4},
            "num_experts_per_tok=3: the topk_group=1 best groups hold 2 experts; use at most 2",
        ),
        ({"name": "topk_softmax", "n_group": 2}, "the topk_softmax router has no groups of exp"),
        (
            {"name": "best"},
            "unknown router 'best'; use one of softmax, topk_softmax, sigmoid, switch, exp",
        ),
    ],
    ids=str,
)
def test_a_specification_that_cannot_route_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_router(spec_of(**changes))


def test_a_router_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'switch' is registered twice; use another name"):
        register_router("switch")(route)
    routers = {
        name: ROUTERS[name] for name in (*(s.router for s in SPECS.values()), "expert_choice")
    }
    assert [name for name, router in routers.items() if not router.is_causal] == ["expert_choice"]
