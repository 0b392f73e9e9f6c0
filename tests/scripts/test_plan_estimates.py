"""Estimates of the planner: near compiled steps, and the bytes that formulas give by hand."""

import sys
from dataclasses import replace

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from planning import gpus
from planning.estimate import Estimate, estimate, slice_machine

from configs.schema import Config, load_config
from parallel.planning.slices import read_topology
from parallel.sharding.devices import CHIPS

V5P, V5P_32 = CHIPS["TPU v5"], read_topology("v5p-32")


def llama(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "llama3_8b_tp8.yaml", overrides)


# docs/predicted.md: compiled by libtpu 0.0.42 in November 2026.
@pytest.mark.parametrize(
    ("overrides", "topology", "milliseconds"),
    [
        ([], "v5p-16", 1927),
        (["mesh.tp=4", "mesh.fsdp=2"], "v5p-16", 1793),
        (["mesh.tp=1", "mesh.fsdp=8"], "v5p-16", 1669),
        (["mesh.tp=1", "mesh.fsdp=8", "model.remat=dots"], "v5p-16", 1473),
        (["mesh.tp=1", "mesh.fsdp=8", "model.remat=attention"], "v5p-16", 1636),
        (["mesh.dp=2", "mesh.dcn_dp=2", "data.global_batch_size=32"], "v5p-16*2", 1964),
        (
            "mesh.tp=1 mesh.dp=8 mesh.fsdp=8 data.global_batch_size=128 model.remat=dots".split(),
            "v5p-128",
            1523,
        ),
    ],
)
def test_estimates_are_near_compiled_steps(
    overrides: list[str], topology: str, milliseconds: float
) -> None:
    machine = slice_machine(V5P, read_topology(topology))
    found = estimate(llama(*overrides), machine).seconds * 1e3
    assert found == pytest.approx(milliseconds, rel=0.15)


def test_estimates_count_kernels_of_experts_over_fsdp_and_their_sums_over_dp() -> None:
    config = load_config(
        ROOT / "configs" / "qwen3_30b_a3b_ep16.yaml",
        ["mesh.ep=1", "mesh.fsdp=8", "mesh.dp=2", "model.moe.expert_rule=split"],
    )
    model = config.model
    experts = 3 * model.hidden_size * model.expert_size * model.moe.num_experts * 48
    found = estimate(config, slice_machine(V5P, V5P_32)).communication
    # Gathered in bfloat16 forward and backward, and sums that count twice. Float32 sums over dp.
    assert found["fsdp"] > 4 * 2 * experts * 7 / 8 / 180e9
    assert found["fsdp"] < 1.1 * 4 * 2 * model.num_parameters * 7 / 8 / 180e9
    assert found["dp"] == pytest.approx(2 * 4 * model.num_parameters / 8 / 2 / 180e9, rel=0.01)


def test_collectives_over_fsdp_use_the_links_that_their_devices_have() -> None:
    nodes = gpus.read_gpus("h100-8*2")
    assert nodes is not None
    config = load_config(ROOT / "configs" / "qwen3_30b_a3b_ep16.yaml", ["mesh.ep=8", "mesh.fsdp=2"])

    def over_fsdp(**figures: float) -> float:
        return estimate(config, replace(nodes.machine, **figures)).communication["fsdp"]

    assert over_fsdp(near=1e15) == over_fsdp()
    assert over_fsdp(far=2 * nodes.machine.far) == pytest.approx(over_fsdp() / 2)


def test_microbatches_are_summed_over_dp_one_by_one_and_dpo_runs_its_reference() -> None:
    machine = slice_machine(V5P, read_topology("v5p-16"))

    def of(*overrides: str):
        return estimate(llama("mesh.tp=4", "mesh.dp=2", *overrides), machine)

    once, twice = of(), of("training.gradient_accumulation=2")
    gradients = 4 * llama().model.num_parameters / 4
    assert once.communication["dp"] == pytest.approx(gradients / 180e9, rel=0.01)
    assert twice.communication["dp"] == pytest.approx(2 * once.communication["dp"])
    small = of("model.param_dtype=bfloat16").communication["dp"]
    assert small == pytest.approx(once.communication["dp"] / 2)
    pairs = of(
        "training.objective=dpo",
        "data.packing=pairs",
        "data.files=pairs.jsonl",
        "training.init_from=model",
    )
    assert pairs.compute["matmul"] == pytest.approx(once.compute["matmul"] * 10 / 8)
    assert pairs.communication["tp"] == pytest.approx(once.communication["tp"] * 17 / 13)


def test_estimates_of_frozen_kernels_have_no_gradients_and_follow_their_dtype() -> None:
    machine = slice_machine(V5P, read_topology("v5p-16"))

    def over_fsdp(*overrides: str) -> float:
        return estimate(llama("mesh.tp=1", "mesh.fsdp=8", *overrides), machine).communication[
            "fsdp"
        ]

    trained, frozen = over_fsdp(), over_fsdp("lora.rank=8")
    assert frozen == pytest.approx(trained / 2)
    # The head stays bfloat16.
    assert frozen / 2 < over_fsdp("lora.rank=8", "lora.base_dtype=int8") < 0.55 * frozen


def test_experts_send_their_rows_over_tp_and_unified_ones_exchange_over_fsdp() -> None:
    machine = slice_machine(V5P, read_topology("v5p-16"))

    def of(*overrides: str) -> Estimate:
        keys = ["mesh.ep=1", "data.global_batch_size=16", "model.moe.capacity_factor=1.0"]
        config = load_config(ROOT / "configs" / "qwen3_30b_a3b_ep16.yaml", [*keys, *overrides])
        return estimate(config, machine)

    found = of("mesh.tp=2", "mesh.fsdp=4", "model.remat=dots").communication
    stream = 4 * 4096 * 2048 * 2  # bytes of four rows of a device
    assert found["tp"] == pytest.approx(48 * (1 + 8) * 5 * stream / 2 / 180e9)
    assert "ep" not in found
    unified = of("mesh.fsdp=8", "model.moe.expert_rule=unified").communication
    split = of("mesh.ep=8", "model.moe.expert_rule=split").communication
    assert unified["ep"] == pytest.approx(split["ep"])
    copied = of("mesh.sp=4", "mesh.fsdp=2", "model.moe.expert_rule=split").communication
    experts = 3 * 2048 * 768 * 128 * 48 / 2
    assert copied["dp"] == pytest.approx(2 * 4 * experts * 3 / 4 / 180e9)


def test_switches_carry_every_byte_of_an_exchange_once() -> None:
    nodes = gpus.read_gpus("h100-8")
    assert nodes is not None
    config = load_config(
        ROOT / "configs" / "qwen3_30b_a3b_ep16.yaml",
        ["mesh.ep=8", "data.global_batch_size=8", "model.moe.capacity_factor=1.0"],
    )
    found = estimate(config, nodes.machine).communication["ep"]
    # There and back, forward and backward, 8 experts per token, 2048 features in bfloat16.
    sent = 4 * 2 * 8 * 2048 * config.data.row_length * 48 * 7 / 8
    assert found == pytest.approx(sent / 450e9)
