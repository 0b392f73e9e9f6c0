"""Mixtures of experts: the balance loss of a source, and routers of equal mathematics."""

import json
from pathlib import Path

import pytest

from model.families.base import FAMILIES, find_family, mathematics, model_config

RELEASED = Path(__file__).parent / "released" / "Qwen3-30B-A3B.json"


@pytest.mark.parametrize(("asked", "wanted"), [({}, 0.0), ({"output_router_logits": True}, 0.001)])
def test_the_balance_loss_of_a_source_is_that_of_transformers(asked, wanted) -> None:
    keys = json.loads(RELEASED.read_text()) | asked
    model = model_config(FAMILIES["Qwen3MoeForCausalLM"].read(keys))
    # One loss over all layers there, and one per layer here: the mean of 48, for 8 experts.
    assert model.moe.router_aux_loss_coef == pytest.approx(wanted * 8 / 48)


def test_experts_of_equal_mathematics_are_written_as_mixtral() -> None:
    moe = {"num_experts": 4, "moe_intermediate_size": 24, "router": "softmax"}
    model = model_config({f"moe.{name}": value for name, value in moe.items()})
    family = find_family(model)
    assert family.architecture == "MixtralForCausalLM"
    assert family.write(model)["intermediate_size"] == 24
    for changes in ({"norm_topk_prob": False}, {"router_bias": True}, {"n_group": 2}):
        fields = {f"moe.{name}": value for name, value in {**moe, **changes}.items()}
        assert mathematics(model_config(fields))["moe.router"] == "softmax"
