"""docs/metrics.md lists every metric, and no metric that does not exist."""

import json
import re

import jax.numpy as jnp
import numpy as np
from conftest import ROOT

from training.dpo import DPOConfig, sum_over_pairs
from training.health import load_metrics

PAGE = (ROOT / "docs" / "metrics.md").read_text()
LISTED = {
    name
    for row in PAGE.splitlines()
    if row.startswith("| `")
    for name in re.findall(r"`([\w/]+)`", row.split("|")[1])
}


def is_listed(name: str) -> bool:
    name = re.sub(r"^memory/device_\d+$", "memory/device_K", name)
    general = re.sub(r"^(eval|data)/[^/]+/", r"\1/SOURCE/", name)
    return re.sub(r"^moe/layer_\d+/", "moe/", general) in LISTED


def test_the_metrics_of_a_run_are_listed(undisturbed) -> None:
    lines = (undisturbed / "run" / "metrics.jsonl").read_text().splitlines()
    found = {name for line in lines for name in json.loads(line)} - {"step"}
    assert len(found) > 20 and [name for name in sorted(found) if not is_listed(name)] == []


def test_the_metrics_of_experts_and_pairs_are_listed() -> None:
    ones = np.ones(2)
    arrays = {name: ones for name in ("entropy_N", "dropped_N", "balance_N", "z_N")}
    arrays |= {"load_NE": np.ones((2, 4)), "bias_NE": np.ones((2, 4))}
    pairs = jnp.zeros((3, 2))
    found = {*load_metrics(arrays, [0, 1])}
    found |= {*sum_over_pairs(pairs, pairs, jnp.ones(3, bool), DPOConfig())}
    assert [name for name in sorted(found) if not is_listed(name)] == []


def test_every_listed_metric_is_one_of_the_code() -> None:
    rooms = [ROOT / "training", ROOT / "data", ROOT / "model"]
    code = "\n".join(path.read_text() for room in rooms for path in room.rglob("*.py"))
    assert len(LISTED) > 40
    for name in LISTED:
        last = name.removeprefix("eval_").rpartition("/")[2]
        assert re.search(rf"[\"'/`]{last}\b", code), f"{name} is in no code"
