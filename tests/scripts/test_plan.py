"""scripts/plan.py: what it refuses, how it ranks and advises, what it predicts on paper.

Planning compiles for minutes. Here a stand-in for the compiler answers from the estimate; slow
tests at the end ask libtpu.
"""

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT
from hlo_text import program, vector

sys.path.insert(0, str(ROOT / "scripts"))
import plan as plan_script
from planning import gpus, report
from planning.candidates import all_candidates, change
from planning.estimate import estimate, slice_machine
from planning.scaling import scale
from planning.search import advise, as_it_is, larger_slices, rank, search
from planning.step import StepPlan, check_mesh, check_slices

from configs.schema import Config, fill_mesh, load_config
from parallel.planning.compiler import CompiledProgram
from parallel.planning.memory import MemoryUse
from parallel.planning.prediction import CollectiveTime
from parallel.planning.refusals import OutOfMemory
from parallel.planning.slices import GENERATIONS, read_topology
from parallel.planning.timeline import predict
from parallel.sharding.devices import CHIPS

V5E, V5P = CHIPS["TPU v5 lite"], CHIPS["TPU v5"]
V5P_32 = read_topology("v5p-32")
LLAMA = ROOT / "configs" / "llama3_8b_tp8.yaml"
GIB = 2**30


def llama(*overrides: str) -> Config:
    return load_config(LLAMA, overrides)


def answer(config: Config, topology: str, *, needed: float | None = None) -> StepPlan:
    """Return the plan of a compiler that agrees with the estimate."""
    named = read_topology(topology)
    chip = {"v5e": V5E, "v5p": V5P}[named.generation]
    guess = estimate(config, slice_machine(chip, named))
    size = guess.bytes if needed is None else needed
    cycles = round(guess.seconds * chip.clock_hz)
    prediction = predict(program(vector("v", cycles)), chip)
    memory = MemoryUse(int(size), 0, 0, 0, None, {"parameters": int(size)}, ())
    compiled = CompiledProgram(prediction, memory, 0.0, "")
    refused = OutOfMemory("too large.", size, chip.hbm_bytes)
    tokens = max(config.data.batch_sizes) * config.data.row_length
    flops = config.model.flops_per_token(config.data.row_length) * tokens
    fits = size <= chip.hbm_bytes
    return StepPlan(config, named, chip, (), tokens, flops, compiled if fits else refused)


@pytest.mark.parametrize(
    ("topology", "overrides", "remedy"),
    [
        ("v5p-32", [], "needs 8 chips, but v5p:2x2x4 (v5p-32) has 16; set mesh.fsdp=2"),
        ("v5p-8", ["mesh.tp=2", "mesh.fsdp=4"], "set mesh.fsdp=2"),
        ("v5p-8", [], "set mesh.tp=4"),
        (
            "v5p-16*2",
            [],
            "mesh.dcn_dp=1, but v5p:2x2x2*2 has 2 slices; set mesh.dcn_dp=2 mesh.dp=2",
        ),
        ("v5p-16*2", ["mesh.dp=4", "mesh.dcn_dp=2"], "set mesh.dp=2"),
    ],
)
def test_a_mesh_of_another_size_is_refused_with_the_axis_to_change(
    topology: str, overrides: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(LLAMA), "--topology", topology, "--check-mesh", *overrides]
    assert plan_script.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: mesh") and remedy in error and error.count("\n") == 1
    advised = dict(text.split("=") for text in remedy.split() if text.startswith("mesh."))
    changed = [*overrides, *(f"{key}={value}" for key, value in advised.items())]
    check_slices(llama(*changed), read_topology(topology))
    check_mesh(llama(*changed), read_topology(topology))


@pytest.mark.parametrize("option", [["--json"], ["--fail-if", "hbm>0.9"], ["--tokens", "1B"]])
def test_check_mesh_refuses_what_it_would_ignore(capsys, option) -> None:
    arguments = ["--config", str(LLAMA), "--topology", "v5p-16", "--check-mesh", *option]
    with pytest.raises(SystemExit) as ended:
        plan_script.main(arguments)
    assert ended.value.code == 2
    assert f"leave out {option[0]}" in capsys.readouterr().err


def test_check_mesh_confirms_a_mesh_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_script.main(["--config", str(LLAMA), "--topology", "v5p-16", "--check-mesh"]) == 0
    assert capsys.readouterr() == (
        "",
        "mesh tp8 has the 8 chips of v5p:2x2x2; memory was not checked\n",
    )


def test_candidates_train_the_same_model_on_all_chips() -> None:
    topology = read_topology("v5e-8")
    config = fill_mesh(load_config(ROOT / "configs" / "moe_ep8.yaml"), topology.num_chips)
    found = list(all_candidates(config, topology))
    assert len({candidate.overrides for candidate in found}) == len(found) > 100
    assert {candidate.config.mesh.num_devices for candidate in found} == {8}
    assert any(candidate.config.mesh.ep == 4 for candidate in found)
    for candidate in found:
        undone = change(
            candidate.config,
            {
                **{f"mesh.{axis}": size for axis, size in config.mesh},
                "parallel.residual": config.parallel.residual,
                "model.remat": config.model.remat,
                "training.gradient_accumulation": 1,
            },
        )
        assert undone is not None and undone.config == config
        again = load_config(ROOT / "configs" / "moe_ep8.yaml", candidate.overrides)
        assert fill_mesh(again, topology.num_chips) == candidate.config


def test_a_batch_size_by_steps_has_candidates_too() -> None:
    growing = "data.global_batch_size={0: 16, 500: 32}"
    config = load_config(ROOT / "configs" / "tp8.yaml", [growing])
    found = change(config, {"model.remat": "full"})
    assert found is not None and found.overrides == ("model.remat=full",)
    assert found.config.data == config.data


def test_the_ranking_leaves_out_what_cannot_fit() -> None:
    topology = read_topology("v5p-16")
    machine = slice_machine(V5P, topology)
    limit = 1.15 * V5P.hbm_bytes
    everything = list(all_candidates(llama(), topology))
    ranked = rank(llama(), topology, V5P)
    fitting = [c for c in everything if estimate(c.config, machine).bytes <= limit]
    assert 0 < len(ranked) == len(fitting) < len(everything)
    assert len(rank(llama(), topology, V5P, correction=2.0)) < len(ranked)


def test_a_search_compiles_the_best_estimates_until_enough_fit() -> None:
    asked = []

    def planner(config: Config, topology: str) -> StepPlan | None:
        asked.append(config)
        if len(asked) == 2:
            return None  # it cannot be planned
        return answer(config, topology, needed=1e13 if len(asked) == 1 else None)

    topology = read_topology("v5p-16")
    found = list(search(llama(), topology, V5P, planner, 3))
    assert [ranked.plan.fits for ranked in found if ranked.plan] == [False, True, True, True]
    assert len(asked) == 5
    order = [ranked.candidate.config for ranked in rank(llama(), topology, V5P)]
    assert asked == sorted(asked, key=order.index)
    best = "\n".join(report.search_table(sorted(found[1:], key=lambda one: one.seconds)))
    assert f"best: {' '.join(found[1].candidate.overrides)}" in best
    base = as_it_is(answer(llama(), "v5p-16"))
    assert "best: the configuration as it is" in "\n".join(report.search_table([base]))


@pytest.mark.parametrize(
    ("topology", "overrides"),
    [
        ("v5p-16", ["model.remat=none", "data.global_batch_size=64", "mesh.tp=1", "mesh.dp=8"]),
        ("v5e-16", ["mesh.tp=1", "mesh.fsdp=16", "data.global_batch_size=64"]),
        ("v5e-8", ["mesh.tp=1", "mesh.fsdp=8"]),
    ],
)
@pytest.mark.costly
def test_advice_fits_when_it_is_applied(topology: str, overrides: list[str]) -> None:
    plan = answer(llama(*overrides), topology)
    assert not plan.fits
    advice = advise(plan, answer)
    assert advice is not None and advice.plan is not None and advice.plan.fits
    applied = llama(*overrides, *advice.candidate.overrides)
    assert applied == advice.candidate.config
    assert answer(applied, str(advice.plan.topology)).fits
    if topology == "v5e-8":
        assert advice.plan.topology.num_chips > 8, "nothing fits on this slice"
    words = report.proposal(plan, advice).splitlines()[0].split()
    assert words[0] == "try" and words[-1] == advice.candidate.overrides[-1]
    assert ("--topology" in words) == (advice.plan.topology != plan.topology)


def test_without_a_change_that_fits_the_advice_says_so() -> None:
    def nothing(config: Config, topology: str) -> StepPlan:
        return answer(config, topology, needed=1e15)

    plan = answer(llama("mesh.tp=1", "mesh.fsdp=8"), "v5e-8", needed=1e15)
    assert advise(plan, nothing) is None
    assert "use a larger slice" in report.proposal(plan, None)


def test_scaling_by_one_is_the_compiled_step() -> None:
    plan = answer(llama("mesh.tp=1", "mesh.fsdp=8"), "v5p-16")
    weak, strong = list(scale(plan, 8, 8))
    prediction = plan.compiled.prediction
    for point in (weak, strong):
        assert point.seconds == pytest.approx(prediction.total)
        assert point.mfu == pytest.approx(plan.mfu)


def test_weak_scaling_keeps_compute_and_strong_scaling_divides_it() -> None:
    plan = answer(llama("mesh.tp=1", "mesh.fsdp=8"), "v5p-16")  # no communication
    points = {(p.mode, p.chips): p for p in scale(plan, 8, 4096)}
    first = points["weak", 8]
    assert points["weak", 64].tokens_per_second == pytest.approx(8 * first.tokens_per_second)
    assert points["strong", 16].seconds == pytest.approx(first.seconds / 2)
    assert ("strong", 32) not in points, "16 rows cannot be divided over 32 devices"
    with pytest.raises(ValueError, match="start at 8"):
        list(scale(plan, 2, 4))
    assert points["weak", 4096].rows == 16 * 512
    assert [p.chips for p in scale(plan, 4096, 8192) if p.mode == "weak"] == [4096, 8192]


def test_fsdp_within_a_larger_slice_uses_its_links() -> None:
    plan = answer(llama(), "v5p-16")  # tp 8, no fsdp
    one, two = [point for point in scale(plan, 8, 16) if point.mode == "weak"]
    assert 0 < two.exposed - one.exposed < 0.05


def test_sums_between_slices_make_steps_longer() -> None:
    rows = "data.global_batch_size=512"
    plan = answer(llama("mesh.tp=1", "mesh.fsdp=256", rows), "v5e-256")
    one, two = [point for point in scale(plan, 256, 512) if point.mode == "weak"]
    assert two.seconds > one.seconds and two.exposed > 0


def with_collective(plan: StepPlan, one: CollectiveTime) -> StepPlan:
    """Return the plan of a step that is longer by a collective."""
    before = plan.compiled.prediction
    total, exposed = before.total + one.exposed, before.exposed + one.exposed
    prediction = replace(before, total=total, exposed=exposed, collectives=[one])
    return replace(plan, answer=replace(plan.compiled, prediction=prediction))


def test_sums_over_dp_stay_and_those_of_more_shards_are_shorter() -> None:
    one = CollectiveTime("all-reduce", "dp", "mlp", 1, 1e9, 0.1, 0.1)
    plan = with_collective(answer(llama("mesh.tp=4", "mesh.dp=2"), "v5p-16"), one)
    points = {(p.mode, p.chips): p for p in scale(plan, 8, 16)}
    assert points["weak", 8].exposed == pytest.approx(0.1)
    assert points["strong", 8].seconds == pytest.approx(plan.compiled.prediction.total)
    # Twice the chips: half of the gradients to sum over two more hops of 1 us, and kernels that
    # are gathered.
    gathers = estimate(llama("mesh.tp=4", "mesh.dp=2", "mesh.fsdp=2"), slice_machine(V5P, V5P_32))
    assert points["weak", 16].exposed == pytest.approx(0.05 + 2e-6 + gathers.exposed["fsdp"])


def test_sums_between_slices_are_counted_once_and_are_no_activations() -> None:
    one = CollectiveTime("all-reduce", "between slices", "mlp", 1, 1e9, 0.5, 0.2)
    mesh = ("mesh.tp=4", "mesh.fsdp=64", "mesh.dp=2", "mesh.dcn_dp=2", "data.global_batch_size=512")
    plan = with_collective(answer(llama(*mesh), "v5e-256*2"), one)
    points = {(p.mode, p.chips): p for p in scale(plan, 512, 1024)}
    assert points["weak", 512].exposed == points["strong", 512].exposed == pytest.approx(0.2)
    gradients = 4 * plan.config.model.num_parameters / 256
    crossing = 2 * gradients * 3 / 4 / V5E.dcn_bandwidth
    assert points["weak", 1024].exposed == pytest.approx(crossing / 32)


@pytest.mark.parametrize("text", ["hbm>0.95", " mfu < 0.4", "step_time>=2"])
def test_conditions_name_a_figure(text: str) -> None:
    name, sign, limit = plan_script.condition(text)
    plan = answer(llama("mesh.tp=1", "mesh.fsdp=8"), "v5p-16")
    figure = getattr(plan, name)
    assert report.holds(plan, (name, sign, limit)) == eval(f"{figure} {sign} {limit}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9-8"], "there is no TPU v9. Known: v4-8 to"),
        (["--topology", "b200-8"], "or a GPU: a100-8, h100-8, h200-8"),
        (["--topology", "v5p-12"], "v5p slices have 8, 16, 32"),
        (["--topology", "v5p-16", "mesh.tp=3"], "model.num_attention_heads=32 is not divisible"),
        (["--topology", "h100-4"], "h100-4 has 4 GPUs; make the product 4"),
        (["--topology", "h100"], "write the GPUs of a node such as h100-8"),
        (["--topology", "h100-8", "--search"], "--search: works for TPU slices only"),
        (["--topology", "v5e:3x3"], "there is no such slice; v5e has 1x1, 2x2, 2x4"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_script.main(["--config", str(LLAMA), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_an_option_without_the_one_it_needs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_script.parse(
            ["--config", "c", "--topology", "v5p-8", "--tokens", "1T", "--price", "-3"]
        )
    assert "--price -3: use a number above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plan_script.parse(["--config", "c", "--topology", "v5p-8", "--search", "--compiles", "0"])
    assert "--compiles: 0: use a whole number of at least 1" in capsys.readouterr().err
    for option, needed in (["--price", "4"], "--tokens"), (["--plot", "x.png"], "--scale"):
        with pytest.raises(SystemExit):
            plan_script.parse(["--config", "c", "--topology", "v5p-8", *option])
        assert f"needs {needed}" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "tokens"), [("1T", 1e12), ("300b", 3e11), ("1.5K", 1500)])
def test_tokens_have_units(text: str, tokens: float) -> None:
    assert plan_script.count(text) == tokens


def test_the_cost_of_a_run_follows_from_its_tokens() -> None:
    plan = answer(llama("mesh.tp=1", "mesh.fsdp=8"), "v5p-16")
    days = 1e12 / plan.tokens_per_second / 86400
    line = report.cost_line(plan, 1e12, 4.2)
    assert f"{days:,.0f} days" in line and f"{days * 24 * 8 * 4.2:,.0f} at 4.2" in line


def test_without_a_compiler_gpus_are_estimated_and_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "has_gpu_compiler", lambda: False)
    base = ["--config", str(ROOT / "configs" / "tp8.yaml"), "--topology", "h100-8"]
    assert plan_script.main(base) == 0
    text = capsys.readouterr().out
    assert (
        text.startswith("fits on h100-8 (8 GPUs), by estimate")
        and "memory and times are formulas" in text
    )
    large = ["model.num_hidden_layers=64", "model.hidden_size=16384", "--json"]
    assert plan_script.main([*base, *large]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["estimated"]
    assert sum(found["memory"].values()) == found["hbm_bytes"]


def test_nodes_of_gpus_are_joined_by_slower_links() -> None:
    one, two = gpus.read_gpus("H100-8"), gpus.read_gpus("h100-8*2")
    assert one is not None and two is not None and two.num_gpus == 16
    tpus = [name for known in GENERATIONS.values() for name in (*known.gke, *known.gcloud)]
    assert not any(gpus.read_gpus(f"{name}-8") for name in (*GENERATIONS, *tpus))
    assert two.machine.bandwidth(16) < one.machine.bandwidth(8) == two.machine.bandwidth(8)


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"'
)
SMALL = [
    *("model.hidden_size=512", "model.num_hidden_layers=2", "model.intermediate_size=1024"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=4", "model.vocab_size=1024"),
    *("data.sequence_length=512", "mesh.tp=1", "mesh.fsdp=4"),
    # libtpu fails on sums over fsdp in the loop over microbatches if it may move them.
    "training.gradient_accumulation=2",
]


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a process of its own, because libtpu takes a whole process."""
    command = [sys.executable, "scripts/plan.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
@needs_libtpu
def test_the_plan_of_a_small_step_adds_up_and_is_kept(tmp_path) -> None:
    arguments = ["--config", str(LLAMA), "--topology", "v5e-4", "--json", "--cache", str(tmp_path)]
    trace = tmp_path / "trace.json"
    done = run_plan(*arguments, "--trace", str(trace), *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] and found["chips"] == 4
    parts = sum(
        sum(part[kind] for kind in ("matmul", "other", "kernels", "exposed", "dma_wait"))
        for part in found["parts"].values()
    )
    assert parts == pytest.approx(found["step_time"])
    assert 0 < found["mfu"] < 1 and found["hbm_bytes"] < found["hbm_available_bytes"]
    assert sum(found["memory"].values()) >= found["hbm_bytes"]
    assert math.isclose(found["hbm"], found["hbm_bytes"] / found["hbm_available_bytes"])
    assert json.loads(trace.read_text())["traceEvents"]
    again = run_plan(*arguments, *SMALL)
    assert json.loads(again.stdout) == found
    assert "E0000" not in done.stderr + again.stderr
    failed = run_plan(*arguments, "--fail-if", "mfu<2", *SMALL)
    assert failed.returncode == 1


@pytest.mark.slow
@needs_libtpu
def test_a_step_that_does_not_fit_is_one_line_and_no_traceback(tmp_path) -> None:
    done = run_plan(
        *("--config", str(LLAMA), "--topology", "v5e:2x4", "--no-advice"),
        *("--cache", str(tmp_path), "mesh.tp=1", "mesh.fsdp=8"),
    )
    assert done.returncode == 1
    assert done.stdout.startswith("does not fit on v5e:2x4 (v5litepod-8, 8 chips): it needs 20.")
    assert "Traceback" not in done.stderr


def test_the_next_larger_slice_skips_sizes_that_do_not_exist() -> None:
    assert [str(t) for t in larger_slices(read_topology("v5e-1"))] == ["v5e:2x2", "v5e:2x4"]
