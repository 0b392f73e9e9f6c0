"""Estimates of memory are near those of compiled steps, and `remat: auto` follows them."""

import math
from dataclasses import replace
from typing import Any

import jax
import pytest
from conftest import ROOT

from configs.build import build_program
from configs.memory import kept_per_token, resolve_remat, step_memory
from configs.schema import Config, load_config
from parallel.sharding.devices import CHIPS

GIB = 2**30
V5P = CHIPS["TPU v5"]
FSDP = ("mesh.tp=1", "mesh.fsdp=8")


def llama(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "llama3_8b_tp8.yaml", overrides)


def bytes_of(state: Any) -> int:
    """Return the bytes of arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )


# docs/predicted.md: compiled by libtpu 0.0.42 in November 2026. Sums of all buffers; of `dots` over
# tp 8, what is held at the same time, because the sum depends on the placement of gradients.
@pytest.mark.parametrize(
    ("overrides", "gib"),
    [
        (["model.remat=full"], 23),
        (["model.remat=dots"], 45.4),
        (["mesh.tp=4", "mesh.fsdp=2", "model.remat=full"], 24),
        ([*FSDP, "model.remat=full"], 24),
        ([*FSDP, "model.remat=attention"], 36),
        ([*FSDP, "model.remat=dots"], 50),
        (["mesh.tp=2", "mesh.fsdp=4", "model.remat=none"], 76),
    ],
)
def test_estimates_are_near_compiled_steps(overrides: list[str], gib: float) -> None:
    assert sum(step_memory(llama(*overrides), V5P).values()) / GIB == pytest.approx(gib, rel=0.06)


def held_bytes(config: Config) -> dict[str, int]:
    """Return the bytes of one device of each part of the state."""
    program = build_program(config, jax.devices())
    with jax.set_mesh(program.tp.manager.mesh):
        state = program.abstract_state
    return {part: bytes_of(getattr(state, part)) for part in ("params", "opt_state", "ema")}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("moe_ep8", ["mesh.ep=2", "mesh.sp=4"]),
        ("moe_ep8", ["mesh.ep=2", "mesh.sp=2", "mesh.fsdp=2", "model.moe.expert_rule=alt"]),
        ("moe_ep8", ["mesh.ep=2", "mesh.sp=2", "mesh.tp=2", "model.moe.expert_rule=unified"]),
        ("tp8", ["model.mtp_loss_weights=[0.3,0.1]", "optimizer.ema_decay=0.9"]),
        ("tp8", ["lora.rank=1", "lora.base_dtype=int8", "lora.targets=[o]"]),
        ("tp8", ["lora.rank=1", "lora.base_dtype=bfloat16", "lora.targets=[o]"]),
        ("tp8", ["model.param_dtype=bfloat16", "optimizer.ema_decay=0.9", "optimizer.name=sgd"]),
    ],
    ids=str,
)
def test_the_bytes_of_parameters_and_averages_are_those_of_the_state(name, keys) -> None:
    sizes = ["mesh.ep=1", "mesh.tp=1"] if name == "moe_ep8" else []
    config = load_config(ROOT / "configs" / f"{name}.yaml", [*sizes, *keys])
    held, memory = held_bytes(config), step_memory(config, V5P)
    assert memory["parameters"] == pytest.approx(held["params"], rel=0.06)  # norms, adapters
    if config.optimizer.ema_decay is not None:
        kept = held["ema"] + held["opt_state"]
        assert memory["optimizer"] == pytest.approx(kept, rel=0.03)


def test_experts_without_a_capacity_keep_the_rows_of_their_buffers() -> None:
    config = load_config(ROOT / "configs" / "qwen3_30b_a3b_ep16.yaml", ["model.remat=dots"])

    def products(capacity: str) -> float:
        keys = [f"model.moe.capacity_factor={capacity}", "model.remat=dots"]
        config = load_config(ROOT / "configs" / "qwen3_30b_a3b_ep16.yaml", keys)
        return kept_per_token(config)[2]

    width, expert = config.model.hidden_size, config.model.expert_size
    # 16 devices send 8 rows per token each, instead of 8 in all.
    assert products("null") - products("1.0") == (128 - 8) * (2 * expert + 2 * width)


@pytest.mark.parametrize("moments", ["null", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "name", ["adamw", "muon", "lion", "adafactor", "sgd", "schedule_free_adamw", "soap"]
)
def test_the_bytes_of_an_optimizer_are_those_of_its_state(name: str, moments: str) -> None:
    keys = ["mesh.fsdp=2", "mesh.tp=4", f"optimizer.name={name}"]
    keys += [f"optimizer.moments_dtype={moments}"]
    if name == "schedule_free_adamw":
        keys += ["optimizer.schedule=constant", "optimizer.moments_dtype=null"]
    config = load_config(ROOT / "configs" / "tp8.yaml", keys)
    held, memory = held_bytes(config)["opt_state"], step_memory(config, V5P)
    rest = 0.03 * memory["parameters"]  # norms, counters, sums of rows and columns
    assert memory["optimizer"] == pytest.approx(held, abs=rest)


@pytest.mark.parametrize(
    "model",
    [
        "mesh.sp=2 mesh.tp=2 mesh.fsdp=2",
        "mesh.tp=8 optimizer.options.max_size=512",
        "mesh.fsdp=2 mesh.tp=4 model.mtp_loss_weights=[0.3,0.1,0.1]",
        "mesh.fsdp=2 mesh.tp=4 model.mla.kv_lora_rank=128 model.mla.v_head_dim=16",
        "mesh.fsdp=2 mesh.tp=4 model.mla.q_lora_rank=64 model.mla.kv_lora_rank=128",
        "mesh.ep=2 mesh.sp=2 mesh.fsdp=2 mesh.tp=1 model.moe.num_experts=4 "
        "model.moe.num_experts_per_tok=2 model.moe.num_shared_experts=1 "
        "model.moe.first_k_dense_replace=1",
        "mesh.ep=2 mesh.sp=2 mesh.fsdp=2 mesh.tp=1 model.moe.num_experts=8 "
        "model.moe.expert_rule=alt",
        "mesh.ep=2 mesh.sp=2 mesh.fsdp=2 mesh.tp=1 model.moe.num_experts=8 "
        "model.moe.expert_rule=unified",
    ],
)
def test_the_bytes_of_statistics_are_those_of_the_state(model: str) -> None:
    config = load_config(ROOT / "configs" / "tp8.yaml", ["optimizer.name=soap", *model.split()])
    program = build_program(config, jax.devices())
    with jax.set_mesh(program.tp.manager.mesh):
        state = program.abstract_state.opt_state
    memory = step_memory(config, V5P)
    rest = 0.03 * memory["parameters"]  # norms, counters, columns that tp does not divide
    assert memory["optimizer"] == pytest.approx(bytes_of(state), abs=rest)


@pytest.mark.parametrize(("remat", "gib"), [("attention", 77), ("dots", 101.5)])
def test_estimates_of_a_sparse_model_are_near_compiled_steps(remat: str, gib: float) -> None:
    overrides = [f"model.remat={remat}", "model.moe.capacity_factor=1.0"]
    config = load_config(ROOT / "configs" / "qwen3_30b_a3b_ep16.yaml", overrides)
    assert sum(step_memory(config, V5P).values()) / GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(("gib", "name"), [(60, "dots"), (45, "attention"), (30, "full")])
def test_auto_keeps_the_most_that_fits(gib: float, name: str) -> None:
    chip = replace(V5P, hbm_bytes=gib * GIB)
    chosen, reason = resolve_remat(llama(*FSDP, "model.remat=auto"), chip)
    assert chosen == llama(*FSDP, f"model.remat={name}")
    assert reason.startswith("keeps the most that fits") and f"of {gib}.0 GiB" in reason


def test_auto_says_when_nothing_fits() -> None:
    chip = replace(V5P, hbm_bytes=16 * GIB)
    chosen, reason = resolve_remat(llama(*FSDP, "model.remat=auto"), chip)
    assert chosen.model.remat == "full" and reason.startswith("keeps the least, and still needs")


def test_auto_counts_what_jax_allocates_on_a_gpu() -> None:
    chip = replace(CHIPS["NVIDIA H100 80GB HBM3"], hbm_bytes=60 * GIB)
    assert chip.usable_bytes == 45 * GIB
    assert resolve_remat(llama(*FSDP, "model.remat=auto"), chip)[0].model.remat == "attention"


def test_auto_is_careful_with_unknown_devices() -> None:
    chosen, reason = resolve_remat(llama(*FSDP, "model.remat=auto"), None)
    assert chosen.model.remat == "full" and "unknown" in reason


def test_a_named_policy_stays() -> None:
    config = llama("model.remat=full")
    assert resolve_remat(config, V5P) == (config, "as model.remat says")


def test_on_simulated_devices_auto_is_dots_and_the_plan_says_why() -> None:
    config = load_config(ROOT / "configs" / "tp8.yaml", ["model.remat=auto"])
    plan = build_program(config, jax.devices()[:8]).plan
    assert plan.model.remat == "dots"
    line = "remat dots: the choice for simulated devices"
    assert line in [*plan.describe()]
