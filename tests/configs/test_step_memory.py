"""Estimates of memory are near those of compiled steps, and `remat: auto` follows them."""

from dataclasses import replace

import jax
import pytest
from conftest import ROOT

from configs.build import build_program
from configs.memory import resolve_remat, step_memory
from configs.schema import Config, load_config
from parallel.sharding.devices import CHIPS

GIB = 2**30
V5P = CHIPS["TPU v5"]
FSDP = ("mesh.tp=1", "mesh.fsdp=8")


def llama(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "llama3_8b_tp8.yaml", overrides)


# docs/predicted.md: compiled by libtpu 0.0.42 in November 2026.
@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        (["model.remat=full"], 24),
        (["model.remat=dots"], 49),
        ([*FSDP, "model.remat=full"], 24),
        ([*FSDP, "model.remat=attention"], 36),
        ([*FSDP, "model.remat=dots"], 50),
        (["mesh.tp=2", "mesh.fsdp=4", "model.remat=none"], 76),
    ],
)
def test_estimates_are_near_compiled_steps(overrides: list[str], gib: float) -> None:
    assert sum(step_memory(llama(*overrides), V5P).values()) / GIB == pytest.approx(gib, rel=0.06)


@pytest.mark.parametrize(("gib", "name"), [(60, "dots"), (45, "attention"), (30, "full")])
def test_auto_keeps_the_most_that_fits(gib: float, name: str) -> None:
    chip = replace(V5P, hbm_bytes=gib * GIB)
    chosen, reason = resolve_remat(llama(*FSDP, "model.remat=auto"), chip)
    assert chosen == llama(*FSDP, f"model.remat={name}")
    assert reason.startswith("keeps the most that fits") and f"of {gib}.0 GiB" in reason


def test_auto_says_when_nothing_fits() -> None:
    chip = replace(V5P, hbm_bytes=16 * GIB)
    chosen, reason = resolve_remat(llama(*FSDP, "model.remat=auto"), chip)
    assert chosen.model.remat == "full" and "more than the 16.0 of a device" in reason


def test_a_named_policy_stays() -> None:
    config = llama("model.remat=full")
    assert resolve_remat(config, V5P) == (config, "as configured")


def test_on_simulated_devices_auto_is_dots_and_the_plan_says_why() -> None:
    config = load_config(ROOT / "configs" / "tp8.yaml", ["model.remat=auto"])
    plan = build_program(config, jax.devices()[:8]).plan
    assert plan.model.remat == "dots"
    line = "remat dots: chosen unseen, as the device memory is unknown"
    assert line in [*plan.describe()]
