"""Load-balancing loss, entropy and router bias on cases computed by hand."""

import jax
import numpy as np

from model.config import MoEConfig
from model.load_balancing import (
    load_balancing_loss,
    router_z_loss,
    routing_stats,
    update_router_bias,
)
from model.router import route

T, E = 16, 8


def stats_of(logits, name, top_k):
    moe = MoEConfig(num_experts=E, router=name, num_experts_per_tok=top_k, norm_topk_prob=False)
    return routing_stats(route(logits, moe), logits, token_axes=())


def test_the_load_balancing_loss_is_one_if_balanced_and_num_experts_if_collapsed() -> None:
    even = 9.0 * np.eye(E, dtype=np.float32)[np.arange(T) % E]
    collapsed = np.tile(50.0 * np.eye(E, dtype=np.float32)[0], (T, 1))
    for logits, loss in ((even, 1.0), (collapsed, float(E))):
        got = load_balancing_loss(jax.jit(stats_of, static_argnums=(1, 2))(logits, "switch", 1))
        np.testing.assert_allclose(got, loss, rtol=1e-6)


def test_padding_adds_to_no_statistic() -> None:
    logits = np.random.default_rng(1).standard_normal((T, E), np.float32)
    valid = np.arange(T) % 3 > 0
    moe = MoEConfig(num_experts=E, router="sigmoid", num_experts_per_tok=3)
    padded, alone = (
        routing_stats(route(x, moe, valid_T=mask), x, valid_T=mask, token_axes=())
        for x, mask in ((logits, valid), (logits[valid], None))
    )
    for name, value in vars(alone).items():
        np.testing.assert_allclose(vars(padded)[name], value, rtol=1e-5, err_msg=name)
    norms = np.log(np.exp(logits.astype(np.float64)[valid]).sum(1))
    np.testing.assert_allclose(router_z_loss(padded), (norms**2).mean(), rtol=1e-5)


def test_the_entropy_has_no_gradient() -> None:
    """The gradient of p log p would be NaN at p = 0."""
    logits = 1e4 * np.random.default_rng(0).standard_normal((T, E), np.float32)
    gradient = jax.jit(jax.grad(lambda x: stats_of(x, "softmax", 3).entropy_sum))(logits)
    assert np.all(gradient == 0)


def test_the_bias_rises_below_the_mean_load_and_falls_above_it() -> None:
    load_NE = np.array([[0, 4, 8, 4], [1, 1, 1, 1]], np.float32)
    bias_NE = np.full((2, 4), 0.5, np.float32)
    expected = [[0.75, 0.5, 0.25, 0.5], [0.5] * 4]
    np.testing.assert_array_equal(update_router_bias(bias_NE, load_NE, 0.25), expected)
    np.testing.assert_array_equal(update_router_bias(bias_NE[0], load_NE[0], 0.25), expected[0])
