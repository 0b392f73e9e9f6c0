"""Routers choose and weigh as loops in float64 do; losses and gradients are those of one device."""

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

from model.router import (
    RouterRule,
    balance_loss,
    check_rule,
    rebalanced,
    route,
    route_rows,
    tally,
    z_loss,
)

T, E = 16, 8
B, S = 4, 4
RULES = {
    "softmax": RouterRule(name="softmax", top_k=3, normalise=True),
    "softmax-plain": RouterRule(name="softmax", top_k=3, normalise=False, scaling=2.5),
    "topk_softmax": RouterRule(name="topk_softmax", top_k=2, normalise=True),
    "sigmoid": RouterRule(
        name="sigmoid", top_k=3, normalise=True, num_groups=4, top_groups=2, scaling=2.5
    ),
    "sigmoid-plain": RouterRule(name="sigmoid", top_k=2, normalise=False),
    "sigmoid-groups-of-one": RouterRule(
        name="sigmoid", top_k=2, normalise=True, num_groups=8, top_groups=3
    ),
    "switch": RouterRule(name="switch", top_k=1, normalise=False),
}
CHOICE = RouterRule(name="expert_choice", top_k=3, normalise=False, scaling=1.5)
rule_of_every_router = pytest.mark.parametrize("name", RULES)
rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(T, E)).astype(np.float32)
BIAS = (rng.normal(size=E) / 4).astype(np.float32)
VALID = rng.random(T) < 0.75
COTANGENT = rng.normal(size=(T, E)).astype(np.float32)  # by token and expert, whatever the slot
# What the losses count for, beside the weights, in the objective whose gradient is compared.
BALANCE, Z = 3.0, 0.5
# Its terms cancel; together they have a size of less than 64: half of float32's last bit there.
OBJECTIVE_BOUND = 64 * 2.0**-24


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def best(scores, count, among=None):
    ids = range(len(scores)) if among is None else among
    return sorted(ids, key=lambda i: (-scores[i], i))[:count]


def token(logits, rule, bias):
    """One token in float64: its experts, their weights, the scores of all experts."""
    if rule.name == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
        choosing = scores + (0 if bias is None else bias)
        size = len(logits) // rule.num_groups
        members = [range(g * size, (g + 1) * size) for g in range(rule.num_groups)]
        merits = [sum(sorted(choosing[list(m)])[-2:]) for m in members]
        groups = best(merits, rule.top_groups)
        allowed = [e for e in range(len(logits)) if e // size in groups]
        experts = best(choosing, rule.top_k, allowed)
        weights = scores[experts]
        if rule.normalise:
            weights = weights / (weights.sum() + 1e-20)
        return experts, weights * rule.scaling, scores / scores.sum()
    probs = softmax(logits)
    by_logit = rule.name == "topk_softmax" and bias is None
    choosing = logits if by_logit else probs + (0 if bias is None else bias)
    experts = best(choosing, rule.top_k)
    weights = softmax(logits[experts]) if rule.name == "topk_softmax" else probs[experts]
    if rule.name == "softmax" and rule.normalise:
        weights = weights / weights.sum()
    return experts, weights * rule.scaling, probs


def rows_taken(logits, valid, rule):
    """expert_choice in float64: token `(row, place)` -> its experts."""
    rows, length, num_experts = logits.shape
    capacity = min(math.ceil(length * rule.top_k / num_experts), length)
    taken = {(b, i): [] for b in range(rows) for i in range(length)}
    for b in range(rows):
        scores = np.array([softmax(x) for x in logits[b]])
        for e in range(num_experts):
            for i in best(scores[:, e], capacity, np.flatnonzero(valid[b])):
                taken[b, i].append(e)
    return taken


def objective_of(chosen, logits, valid):
    """From {token: (experts, weights, scores)}: the objective and the tally, in float64."""
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


def oracle(logits, rule, bias, valid):
    logits = logits.astype(np.float64)
    chosen = {t: token(logits[t], rule, bias) for t in range(len(logits)) if valid[t]}
    return chosen, *objective_of(chosen, logits, valid)


def rows_oracle(logits, rule, bias, valid):
    """The same for expert_choice on B rows; bias is not used."""
    logits = logits.astype(np.float64)
    taken = rows_taken(logits.reshape(B, S, E), valid.reshape(B, S), rule)
    chosen = {}
    for t in np.flatnonzero(valid):
        probs, experts = softmax(logits[t]), taken[t // S, t % S]
        chosen[t] = experts, rule.scaling * probs[experts], probs
    return chosen, *objective_of(chosen, logits, valid)


def differences(solve, logits, *args, step=1e-6):
    """The gradient of the oracle's objective by central differences; no choice changes so near."""
    gradient = np.zeros(logits.shape)
    for index in np.ndindex(*logits.shape):
        move = np.zeros(logits.shape)
        move[index] = step
        ends = [solve(logits + sign * move, *args)[1] for sign in (1, -1)]
        gradient[index] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def by_expert(routing):
    """Weights of a token by expert, `T E`, whatever the slots."""
    hit_TKE = routing.experts_TK[:, :, None] == jnp.arange(routing.probs_TE.shape[1])
    return jnp.sum(jnp.where(hit_TKE, routing.weights_TK[:, :, None], 0), 1)


def objective(logits, cotangent, rule, bias, valid, token_axes=(), length_axes=()):
    """Local tokens `T E`, for expert_choice `B L E` -> what is differentiated; routing and tally.

    The objective is summed over devices; balance and z losses are left to the caller.
    """
    if rule.name == "expert_choice":
        routing = route_rows(logits, rule, valid_BL=valid, length_axes=length_axes)
    else:
        routing = route(logits, rule, bias_E=bias, valid_T=valid)
    valid_T = None if valid is None else valid.reshape(-1)
    health = tally(routing, logits.reshape(-1, E), valid_T=valid_T, token_axes=token_axes)
    weighted = jnp.sum(by_expert(routing) * cotangent.reshape(-1, E))
    return jax.lax.psum(weighted, token_axes) if token_axes else weighted, (routing, health)


def losses(health):
    return BALANCE * balance_loss(health) + Z * z_loss(health)


@cache
def solver(rule):
    """value_and_grad on one device, compiled once per rule and per kind of bias and valid."""

    def whole(logits, bias, valid):
        total, aux = objective(logits, COTANGENT, rule, bias, valid)
        return total + losses(aux[1]), aux

    def solve(logits, bias, valid):
        if rule.name == "expert_choice":
            logits, valid = logits.reshape(B, S, E), valid.reshape(B, S)
        (total, aux), gradient = jax.tree.map(np.asarray, jitted(logits, bias, valid))
        return (total, aux), gradient.reshape(T, E)

    jitted = jax.jit(jax.value_and_grad(whole, has_aux=True))
    return solve


def assert_is_oracle(got, expected, gradient) -> None:
    """Bounds: a few roundings of float32 on values, the same on sums of 16 tokens."""
    (total, (routing, health)), got_gradient = got
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
        np.testing.assert_allclose(getattr(health, name), value, rtol=2e-6, err_msg=name)
    np.testing.assert_allclose((balance_loss(health), z_loss(health)), expected_losses, rtol=2e-6)
    np.testing.assert_allclose(total, expected_total, rtol=0, atol=OBJECTIVE_BOUND)
    np.testing.assert_allclose(got_gradient, gradient, rtol=0, atol=2e-6)
    assert routing.experts_TK.dtype == np.int32 and routing.weights_TK.dtype == np.float32


@pytest.mark.parametrize("bias_and_padding", [True, False])
@rule_of_every_router
def test_routing_losses_and_gradients_equal_loops_in_float64(name, bias_and_padding) -> None:
    rule = RULES[name]
    bias, valid = (BIAS, VALID) if bias_and_padding else (None, None)
    everyone = np.ones(T, bool) if valid is None else valid
    got = solver(rule)(LOGITS, bias, valid)
    gradient = differences(oracle, LOGITS, rule, bias, everyone)
    assert_is_oracle(got, oracle(LOGITS, rule, bias, everyone), gradient)


@pytest.mark.parametrize("top_k", [2, 3, 8])
def test_expert_choice_equals_loops_in_float64(top_k) -> None:
    rule = RouterRule(name="expert_choice", top_k=top_k, normalise=False, scaling=1.5)
    got = solver(rule)(LOGITS, None, VALID)
    gradient = differences(rows_oracle, LOGITS, rule, None, VALID)
    assert_is_oracle(got, rows_oracle(LOGITS, rule, None, VALID), gradient)


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def on_mesh(rule, tokens, token_axes, length_axes, losses_inside):
    """value_and_grad outside of a jitted shard_map over split tokens, on the ambient mesh."""

    def island(logits, cotangent, bias, valid):
        total, (routing, health) = objective(
            logits, cotangent, rule, bias, valid, token_axes, length_axes
        )
        total = total + losses(health) if losses_inside else total
        return total, (by_expert(routing).reshape(logits.shape), health)

    def whole(*args):
        total, aux = jax.shard_map(
            island, in_specs=(tokens, tokens, P(), tokens), out_specs=(P(), (tokens, P()))
        )(*args)
        return total if losses_inside else total + losses(aux[1]), aux

    return jax.value_and_grad(jax.jit(whole), has_aux=True)


def assert_equals_one_device(mesh, rule, tokens, token_axes, length_axes=(), inside=True) -> None:
    shape = (B, S) if rule.name == "expert_choice" else (T,)
    arrays = LOGITS.reshape(*shape, E), COTANGENT.reshape(*shape, E), BIAS, VALID.reshape(shape)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))
            for array, spec in zip(arrays, (tokens, tokens, P(), tokens), strict=True)
        ]
        got = on_mesh(rule, tokens, token_axes, length_axes, inside)(*placed)
    (total, (weights, health)), gradient = jax.tree.map(np.asarray, got)
    (expected, (routing, sums)), expected_gradient = solver(rule)(LOGITS, BIAS, VALID)
    np.testing.assert_allclose(total, expected, rtol=0, atol=OBJECTIVE_BOUND)
    np.testing.assert_allclose(gradient.reshape(T, E), expected_gradient, rtol=0, atol=1e-6)
    expected_weights = np.asarray(by_expert(routing))
    np.testing.assert_array_equal(weights.reshape(T, E) > 0, expected_weights > 0)
    np.testing.assert_allclose(weights.reshape(T, E), expected_weights, rtol=1e-6)
    for name, value in vars(sums).items():
        rtol = 0 if name in ("load_E", "tokens") else 1e-6
        np.testing.assert_allclose(getattr(health, name), value, rtol=rtol, err_msg=name)


@pytest.mark.parametrize(
    ("sizes", "token_axes", "inside"),
    [
        ({"dp": 8}, ("dp",), False),
        ({"dp": 2, "tp": 2, "sp": 2}, ("dp", "sp"), True),  # every token on both devices of tp
        ({"dp": 2, "tp": 2, "sp": 2}, ("dp", "sp"), False),
        ({"dp": 1, "tp": 8}, ("dp",), True),
    ],
    ids=str,
)
def test_split_tokens_give_the_losses_and_gradients_of_one_device(sizes, token_axes, inside):
    """inside: the losses are computed in the shard_map that also routes."""
    mesh, rule = mesh_of(**sizes), RULES["sigmoid"]
    assert_equals_one_device(mesh, rule, P(token_axes), token_axes, inside=inside)


def test_tokens_count_on_all_devices_when_all_are_valid() -> None:
    def island(logits):
        routing = route(logits, RULES["softmax"])
        return tally(routing, logits, token_axes=("dp",))

    mesh = mesh_of(dp=8)
    logits = jax.device_put(LOGITS, jax.sharding.NamedSharding(mesh, P("dp")))
    with jax.set_mesh(mesh):
        health = jax.jit(jax.shard_map(island, in_specs=P("dp"), out_specs=P()))(logits)
    assert health.tokens == T and health.load_E.sum() == 3 * T


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
def test_experts_choose_alike_however_rows_are_split(sizes, tokens, length_axes) -> None:
    token_axes = (*length_axes, "dp") if tokens[0] else length_axes
    assert_equals_one_device(mesh_of(**sizes), CHOICE, tokens, token_axes, length_axes)


def checked(rule, logits, bias, valid):
    """Routing and tally of one device, once the laws of every routing were checked."""
    (_, (routing, health)), gradient = solver(rule)(logits, bias, valid)
    experts, weights = routing.experts_TK, routing.weights_TK
    chosen = experts >= 0
    assert np.all(experts < E) and np.all(experts[~chosen] == -1)
    assert all(len(set(ids[ids >= 0])) == np.sum(ids >= 0) for ids in experts)
    assert np.all(weights[~chosen] == 0) and np.all(weights >= 0)
    np.testing.assert_array_equal(health.load_E, np.bincount(experts[chosen], minlength=E))
    assert health.tokens == valid.sum()
    assert not chosen[~valid].any() and np.all(gradient[~valid] == 0)
    np.testing.assert_allclose(routing.probs_TE.sum(1), valid, atol=1e-6)
    assert -1e-4 <= health.entropy_sum <= valid.sum() * math.log(E) + 1e-4
    assert all(np.all(np.isfinite(x)) for x in (weights, gradient, *vars(health).values()))
    return routing, health


@st.composite
def inputs(draw):
    own = np.random.default_rng(draw(st.integers(0, 2**31)))
    scale, mask = draw(st.sampled_from([0, 0.1, 1, 10, 1e4])), draw(st.integers(0, 2**T - 1))
    logits, bias = own.normal(size=(T, E)) * scale, own.normal(size=E)
    return logits.astype(np.float32), bias.astype(np.float32), (mask >> np.arange(T)) % 2 == 1


@rule_of_every_router
@settings(max_examples=25, deadline=None)
@given(drawn=inputs())
def test_every_valid_token_gets_top_k_distinct_experts(name, drawn) -> None:
    rule, (logits, bias, valid) = RULES[name], drawn
    routing, health = checked(rule, logits, bias, valid)
    np.testing.assert_array_equal((routing.experts_TK >= 0).sum(1), rule.top_k * valid)
    assert health.load_E.sum() == valid.sum() * rule.top_k
    sums = routing.weights_TK[valid].sum(1)
    low = logits.min() < -30  # where the 1e-20 beside the sum of sigmoids counts
    if rule.name == "topk_softmax" or (rule.normalise and not (rule.name == "sigmoid" and low)):
        np.testing.assert_allclose(sums, rule.scaling, rtol=1e-6)
    elif rule.name != "sigmoid" or rule.normalise:
        assert np.all(sums <= rule.scaling * (1 + 1e-6))
    if rule.num_groups > 1:
        groups = routing.experts_TK // (E // rule.num_groups)
        assert all(len(set(g)) <= rule.top_groups for g in groups[valid].tolist())


@settings(max_examples=25, deadline=None)
@given(drawn=inputs())
def test_every_expert_takes_its_share_of_every_row_or_all_that_is_there(drawn) -> None:
    logits, bias, valid = drawn
    routing, _ = checked(CHOICE, logits, bias, valid)
    taken = (routing.experts_TK >= 0).reshape(B, S, E).sum(1)
    share = np.minimum(valid.reshape(B, S).sum(1), 2)  # 4 tokens * 3 / 8 experts, rounded up
    np.testing.assert_array_equal(taken, share[:, None] + np.zeros((B, E)))


@rule_of_every_router
def test_of_equal_experts_the_lowest_come_first(name) -> None:
    routing, _ = checked(RULES[name], np.ones((T, E), np.float32), 0 * BIAS, VALID)
    assert np.all(routing.experts_TK[VALID] == np.arange(RULES[name].top_k))


def test_of_equal_tokens_the_first_are_taken() -> None:
    valid = np.arange(T) % S > 0
    routing, _ = checked(CHOICE, np.ones((T, E), np.float32), BIAS, valid)
    taken = (routing.experts_TK >= 0).reshape(B, S, E)
    assert taken[:, 1:3].all() and not taken[:, 3].any()


@pytest.mark.parametrize("value", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("name", [*RULES, "expert_choice"])
def test_huge_and_equal_logits_have_finite_gradients(name, value) -> None:
    equal = np.full((T, E), value, np.float32)
    for logits in (equal, equal * np.resize([1, -1], E).astype(np.float32)):
        checked(RULES.get(name, CHOICE), logits, BIAS, VALID)


@pytest.mark.parametrize("shift", [20, 40, 60])
def test_tiny_sigmoids_are_divided_by_their_sum_and_the_floor(shift) -> None:
    rule, logits = RULES["sigmoid"], LOGITS - np.float32(shift)
    routing, _ = checked(rule, logits, 0 * BIAS, np.ones(T, bool))
    # A logarithm as large as `shift` has an error of half its last bit, 2^-19 from 32 on.
    for got_K, logits_E in zip(routing.weights_TK, logits.astype(np.float64), strict=True):
        np.testing.assert_allclose(got_K, token(logits_E, rule, None)[1], rtol=2 * 2.0**-19)


@pytest.mark.parametrize(("name", "second"), [("topk_softmax", 5), ("softmax-plain", 0)])
def test_only_topk_softmax_tells_vanished_probabilities_apart(name, second) -> None:
    logits = np.zeros((T, E), np.float32) + np.where(np.arange(E) == 7, 1e4, np.arange(E) == 5)
    routing, _ = checked(RULES[name], logits.astype(np.float32), None, np.ones(T, bool))
    assert np.all(routing.experts_TK[:, :2] == [7, second])


def test_the_entropy_has_no_gradient_that_could_be_nan() -> None:
    def entropy(logits):
        return tally(route(logits, RULES["softmax"]), logits, token_axes=()).entropy_sum

    assert np.all(jax.jit(jax.grad(entropy))(1e4 * LOGITS) == 0)


@pytest.mark.parametrize("name", ["softmax", "softmax-plain", "sigmoid"])
def test_the_backward_pass_keeps_nothing_of_tokens_by_slots_by_experts(name) -> None:
    def residuals(logits):
        return jax.vjp(lambda x: route(x, RULES[name]).weights_TK, logits)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, LOGITS))
    assert max(leaf.size for leaf in kept) <= T * E


@pytest.mark.parametrize("name", [*RULES, "expert_choice"])
def test_padding_counts_nowhere_whatever_stands_there(name) -> None:
    rule = RULES.get(name, CHOICE)
    broken = np.where(VALID[:, None], LOGITS, np.nan).astype(np.float32)
    got, expected = (solver(rule)(logits, BIAS, VALID) for logits in (broken, LOGITS))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    (total, (_, health)), gradient = solver(rule)(broken * np.nan, BIAS, np.zeros(T, bool))
    assert total == 0 and np.all(gradient == 0)
    assert all(np.all(x == 0) for x in vars(health).values())


@pytest.mark.parametrize("name", ["softmax", "topk_softmax", "sigmoid", "switch"])
def test_a_bias_chooses_and_has_no_gradient(name) -> None:
    rule = RULES[name]
    low_group = np.where(np.arange(E) < E // 2, 5.0, 0.0).astype(np.float32)
    routing, _ = checked(rule, LOGITS, low_group, VALID)
    assert routing.experts_TK.max() < E // 2

    @jax.jit
    @jax.grad
    def of_bias(bias_E):
        routing = route(jnp.asarray(LOGITS), rule, bias_E=bias_E)
        health = tally(routing, jnp.asarray(LOGITS), token_axes=())
        return jnp.sum(by_expert(routing) * COTANGENT) + losses(health)

    np.testing.assert_array_equal(of_bias(jnp.asarray(BIAS)), np.zeros(E))


def test_an_even_load_costs_one_and_a_collapse_the_number_of_experts() -> None:
    rule = RULES["switch"]
    even = 9.0 * np.eye(E, dtype=np.float32)[np.arange(T) % E]
    collapsed = np.tile(50.0 * np.eye(E, dtype=np.float32)[0], (T, 1))
    for logits, loss in ((even, 1.0), (collapsed, float(E))):
        _, health = checked(rule, logits, 0 * BIAS, np.ones(T, bool))
        np.testing.assert_allclose(balance_loss(health), loss, rtol=1e-6)


def test_the_bias_rises_below_the_mean_load_and_falls_above_it() -> None:
    load_NE = np.array([[0, 4, 8, 4], [1, 1, 1, 1]], np.float32)
    bias_NE = np.full((2, 4), 0.5, np.float32)
    expected = [[0.75, 0.5, 0.25, 0.5], [0.5] * 4]
    np.testing.assert_array_equal(rebalanced(bias_NE, load_NE, 0.25), expected)
    np.testing.assert_array_equal(rebalanced(bias_NE[0], load_NE[0], 0.25), expected[0])


def a_rule(name="sigmoid", top_k=2, **rest):
    return RouterRule(name=name, top_k=top_k, normalise=False, **rest)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (a_rule(top_k=9), "num_experts_per_tok=9: there are 8 experts; use a number from 1 to 8"),
        (a_rule(top_k=0), "num_experts_per_tok=0: there are 8 experts; use a number from 1 to 8"),
        (
            a_rule("switch"),
            "num_experts_per_tok=2: the switch router chooses one expert per token; use 1",
        ),
        (a_rule(num_groups=3), "n_group=3 does not divide 8 experts; use one of 1, 2, 4, 8"),
        (a_rule(num_groups=2, top_groups=3), "topk_group=3: there are 2 groups; use a number from"),
        (
            a_rule(top_k=3, num_groups=4),
            "num_experts_per_tok=3: the topk_group=1 best groups hold 2 experts; use at most 2",
        ),
        (a_rule("softmax", num_groups=2), "the softmax router knows no groups of experts; use 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rule_that_cannot_route_is_refused(bad, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_rule(bad, E)


@pytest.mark.parametrize("good", [*RULES.values(), CHOICE], ids=str)
def test_a_rule_that_can_route_is_accepted(good) -> None:
    check_rule(good, E)
