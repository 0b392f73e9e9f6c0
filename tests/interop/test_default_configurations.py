"""Keys that config.json does not have get the defaults of transformers, in every family."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from typing import Any

from transformers import CONFIG_MAPPING

import model.families  # noqa: F401 (registers the families)
from model.families.base import FAMILIES, mathematics, model_config

SIZES = dict.fromkeys(
    ("num_hidden_layers", "num_attention_heads", "hidden_size", "moe.moe_intermediate_size"), 1
)
# Keys that have no default in transformers either.
NEEDED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}


def read(architecture: str, keys: dict[str, Any]) -> dict[str, Any]:
    keys = {**keys, "architectures": [architecture]}
    return mathematics(model_config(FAMILIES[architecture].read(keys)))


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if not name.startswith("Toy")])
def test_absent_and_null_keys_are_the_defaults_of_transformers(architecture) -> None:
    family = FAMILIES[architecture]
    theirs = CONFIG_MAPPING[family.model_type]()
    known = {name for rule in family.rules for name in rule.names}
    full = {name: value for name, value in theirs.to_dict().items() if name in known}
    full |= {name: value for name, value in NEEDED.items() if full.get(name, 0) is None}
    required: dict[str, Any] = {}
    fields: dict[str, Any] = dict(SIZES)  # a rule may read what the rules before it have set
    for rule in family.rules:  # what has no default is asked for by name
        try:
            rule.read(required, fields)
        except ValueError as error:
            assert "config.json has no" in str(error)
            required |= {name: full[name] for name in rule.names if name in full}
            rule.read(required, fields)
    assert read(architecture, required) == read(architecture, full)
    meaningful = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
    meaningful |= {"num_key_value_heads", "q_lora_rank"}
    null = {name: None for name in full.keys() - meaningful} | required
    assert read(architecture, null) == read(architecture, full)
