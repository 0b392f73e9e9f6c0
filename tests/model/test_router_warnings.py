"""A warning where the weights of experts do not depend on the router."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import MoEConfig
from model.router import describe_router_warnings, route


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"router": "softmax"}, 1),
        ({"router": "sigmoid"}, 1),
        ({"router": "topk_softmax", "norm_topk_prob": False}, 1),
        ({"router": "softmax", "norm_topk_prob": False}, 0),
        ({"router": "switch"}, 0),
        ({"router": "softmax", "num_experts_per_tok": 2}, 0),
        ({"router": "softmax", "num_experts": 0}, 0),
    ],
)
def test_a_single_expert_whose_weight_is_constant_is_said(changes, count) -> None:
    moe = MoEConfig(**{"num_experts": 4, "num_experts_per_tok": 1, **changes})
    assert len([*describe_router_warnings(moe)]) == count
    if moe.num_experts and moe.num_experts_per_tok == 1:
        logits = jnp.asarray([[1.0, -0.5, 0.2, 0.1]], jnp.float32)
        gradient = jax.grad(lambda logits: route(logits, moe).weights_TK.sum())(logits)
        assert (np.abs(np.asarray(gradient)).max() < 1e-6) == bool(count)


BOTH = "set model.moe.router=switch or model.moe.norm_topk_prob=false"


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"router": "sigmoid"}, BOTH),
        ({"router": "softmax", "n_group": 2}, "set model.moe.norm_topk_prob=false"),
        ({"router": "sigmoid", "router_bias": True}, "set model.moe.norm_topk_prob=false"),
        ({"router": "topk_softmax"}, "set model.moe.router=switch"),
        ({"router": "topk_softmax", "router_bias": True}, "set another model.moe.router"),
    ],
)
def test_only_remedies_that_the_configuration_allows_are_named(changes, remedy) -> None:
    moe = MoEConfig(num_experts=4, num_experts_per_tok=1, **changes)
    (line,) = describe_router_warnings(moe)
    assert line.endswith(f"; {remedy}")
