"""Recipes describe released models, and fit the slices that their headers name."""

import importlib.util
import json
import re
import subprocess
import sys

import jax
import pytest
from conftest import ROOT

import model.families  # noqa: F401 (registers the families)
from configs.build import abstract_batch, build_program, open_devices
from configs.schema import load_config
from model.families.base import family_of, mathematics, model_config

RECIPES = {path.stem: path for path in sorted((ROOT / "configs" / "recipes").glob("*.yaml"))}
RELEASED = {
    "llama3_2_1b": "Llama-3.2-1B",
    "qwen3_0_6b": "Qwen3-0.6B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "mixtral_8x7b": "Mixtral-8x7B-v0.1",
}
TRAINING_ONLY = {"moe.router_aux_loss_coef", "moe.exchange_chunks", "moe.capacity_factor"}


def planned(name: str) -> tuple[str, float, float]:
    """Return topology, planned GiB and GiB of a chip from the header of a recipe."""
    found = re.search(r"# Planned for (\S+): ([\d.]+) of (\d+) GiB", RECIPES[name].read_text())
    assert found, f"{name} does not say for which slice it was planned"
    return found[1], float(found[2]), float(found[3])


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_of_a_recipe_is_the_released_one(name) -> None:
    config = load_config(RECIPES[name])
    base = name.rpartition("_")[0]
    if base == "llama3_8b":
        assert config.model.num_parameters == 8_030_261_248
        return
    released = ROOT / "tests" / "model" / "families" / "released" / f"{RELEASED[base]}.json"
    keys = json.loads(released.read_text())
    want = mathematics(model_config(family_of(keys).read(keys)))
    got = mathematics(config.model)
    assert {n for n in want if got[n] != want[n]} <= TRAINING_ONLY


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_step_of_a_recipe_compiles(name) -> None:
    config = load_config(RECIPES[name])
    devices, _ = open_devices(config)
    program = build_program(config, devices)
    with jax.set_mesh(program.tp.manager.mesh):
        program.train_step.lower(program.abstract_state, abstract_batch(config, program)).compile()


SHIPPED = {
    "tp8": "v5e-8",
    "bpe_400m": "v5litepod-16",
    "moe_ep8": "v5e-8",
    "llama3_8b_tp8": "v5p-16",
    "mixtral_8x7b_ep8": "v5p-64",
    "qwen3_30b_a3b_ep16": "v5p-32",
}
STEPS = {
    **{name: (path, planned(name)[0]) for name, path in RECIPES.items()},
    **{name: (ROOT / "configs" / f"{name}.yaml", topology) for name, topology in SHIPPED.items()},
}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"'
)


def plan(path, topology: str, *overrides: str) -> dict:
    """Return the plan of a step, made in a process of its own because libtpu takes one."""
    command = [sys.executable, "scripts/plan.py", "--config", str(path), "--topology", topology]
    done = subprocess.run(
        [*command, "--json", "--no-advice", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


# A compilation takes one to three minutes. A dense and a sparse model are slow tests; the others,
# among them adapters and accumulated gradients, run before a release.
SAMPLE = {"moe_ep8", "llama3_8b_pretrain"}


@needs_libtpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SAMPLE else pytest.mark.release)
        for name in STEPS
    ],
)
def test_a_shipped_step_of_few_layers_fits_its_slice(name) -> None:
    path, topology = STEPS[name]
    found = plan(path, topology, "model.num_hidden_layers=2")
    assert found["fits"] and found["hbm"] < 1 and found["step_time"] > 0
    unknown = found["parts"].get("unattributed", {})
    kinds = ("matmul", "other", "kernels", "exposed", "dma_wait")
    assert sum(unknown.get(kind, 0.0) for kind in kinds) < 0.01 * found["step_time"]


# The others take as long; their headers were written from the same compilation.
@pytest.mark.release
@needs_libtpu
@pytest.mark.parametrize("name", ["qwen3_0_6b_lora"])
def test_a_recipe_fits_the_slice_of_its_header(name) -> None:
    topology, gib, of_chip = planned(name)
    found = plan(RECIPES[name], topology)
    total = sum(found["memory"].values()) / 2**30
    assert total == pytest.approx(gib, rel=0.05)
    assert total < 0.95 * of_chip
