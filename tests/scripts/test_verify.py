"""`scripts/verify.py` compares meshes with one device, finds planted errors, and continues."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT, release, slow

sys.path.insert(0, str(ROOT / "scripts"))
import verify
from verification import results
from verification.bounds import check_finite, compare, failure
from verification.cases import Case, factorisations, find_cases, spread
from verification.inputs import LEVEL_RATIO, routing_levels
from verification.results import Results
from verification.scaling import as_tree, scale_down, shrink
from verification.steps import StepResult

from configs.build import build_plan
from configs.schema import load_config, make_config
from parallel.sharding.mesh import MeshConfig

TINY = "model: {num_hidden_layers: 1}\nrun: {compilation_cache: null}\n"


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Arguments for a model of one layer."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    return ["--config", str(tmp_path / "tiny.yaml"), "--output", str(tmp_path / "results")]


def scaled(path: str, *overrides: str):
    full = load_config(ROOT / "configs" / path, overrides)
    return full, scale_down(full)


# Scaling down.


@pytest.mark.parametrize("size", [5, 6, 12, 20, 40, 96, 1000, 4096])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_small_size_divides_over_a_mesh_exactly_if_the_full_one_does(size, parts) -> None:
    assert (shrink(size, 32) % parts == 0) == (size % parts == 0)
    assert shrink(size, 32) <= min(size, 32)


GEMMA = [
    "model.layer_types=[sliding_attention,sliding_attention,full_attention]",
    "model.sliding_window=4096", "model.attn_logit_softcapping=50.0", "model.attention_sinks=true",
    "model.num_hidden_layers=31", "model.tie_word_embeddings=true", "model.norm_placement=both",
]  # fmt: skip
DEEPSEEK = [
    "model.moe.first_k_dense_replace=3", "model.moe.router=sigmoid", "model.moe.n_group=8",
    "model.moe.topk_group=4", "model.moe.num_experts=256", "model.moe.num_experts_per_tok=8",
    "model.moe.num_shared_experts=1", "model.num_key_value_heads=32",
    "model.mla={q_lora_rank: 1536, kv_lora_rank: 512}", "model.num_hidden_layers=61",
]  # fmt: skip


def test_attention_keeps_its_structure() -> None:
    full, small = scaled("llama3_8b_tp8.yaml", *GEMMA, "lora.rank=64", "lora.alpha=16.0")
    model = small.model
    assert model.layer_kinds == ("sliding_attention", "sliding_attention", "full_attention") * 2 + (
        "sliding_attention",
    )
    assert model.num_attention_heads / model.num_key_value_heads == 4
    assert model.sliding_window < small.data.row_length / 2
    assert small.lora.scale == full.lora.scale
    for name in ("attn_logit_softcapping", "attention_sinks", "tie_word_embeddings"):
        assert getattr(model, name) == getattr(full.model, name)
    assert model.num_parameters < 1_000_000


def test_experts_and_latents_keep_their_structure() -> None:
    _, small = scaled("mixtral_8x7b_ep8.yaml", *DEEPSEEK)
    moe = small.model.moe
    assert small.model.sparse_layers == (False, True, True)
    assert (moe.router, moe.num_shared_experts) == ("sigmoid", 1)
    assert 1 <= moe.topk_group < moe.n_group < moe.num_experts
    assert moe.num_experts_per_tok > 2 and moe.num_experts % 8 == 0
    assert small.model.mla.q_lora_rank > small.model.mla.kv_lora_rank
    assert small.model.num_parameters < 1_000_000


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_configuration_of_the_repository_scales_down(path) -> None:
    small = scale_down(load_config(path))
    assert small.model.num_parameters < 1_000_000
    assert make_config(as_tree(small)) == small


def test_a_configuration_with_changing_rows_scales_down() -> None:
    lengths = "data.sequence_length={0: 64, 4: 128}", "data.repack_at=[4]"
    small = scale_down(load_config("configs/tp8.yaml", lengths))
    assert small == scale_down(load_config("configs/tp8.yaml"))


@pytest.mark.parametrize("scores_per_group", [1, 2])
@pytest.mark.parametrize(("experts", "groups"), [(16, 4), (16, 1), (8, 4), (4, 4)])
def test_no_two_experts_or_groups_are_nearly_equal(experts, groups, scores_per_group) -> None:
    levels_TE = routing_levels(50, experts, groups, np.random.default_rng(0))
    ordered_TE = np.sort(levels_TE, axis=1)
    np.testing.assert_array_equal(ordered_TE[1:], ordered_TE[:-1])
    assert len({tuple(row) for row in levels_TE.argsort(axis=1)}) > 10
    best_TGm = np.sort(levels_TE.reshape(50, groups, -1), axis=2)[:, :, -scores_per_group:]
    for values_TN in (ordered_TE, np.sort(best_TGm.sum(axis=2), axis=1)):
        assert (values_TN[:, :-1] <= values_TN[:, 1:] * LEVEL_RATIO * 1.0001).all()


# Cases.


def test_eight_devices_have_35_factorisations() -> None:
    meshes = factorisations(8)
    assert len({*meshes}) == 35 and {mesh.num_devices for mesh in meshes} == {8}


def test_what_a_configuration_refuses_is_listed_with_its_reason() -> None:
    full, small = scaled("qwen3_30b_a3b_ep16.yaml")
    found = find_cases(small, full, jax.devices(), "tp8")
    (refusal,) = found.refusals
    assert (found.cases, refusal.mesh_name, refusal.what) == ([], "tp8", "all")
    assert "num_key_value_heads=4 is not divisible by mesh.tp=8" in refusal.reason


def test_a_refusal_of_one_dtype_refuses_no_other(monkeypatch) -> None:
    def refuse(config, devices):
        if config.model.dtype == "bfloat16" and config.parallel.residual == "hidden":
            raise ValueError("no bfloat16 here")
        return build_plan(config, devices)

    monkeypatch.setattr("verification.cases.build_plan", refuse)
    full, small = scaled("tp8.yaml")
    found = find_cases(small, full, jax.devices(), "tp8")
    (refusal,) = found.refusals
    assert "hidden none bfloat16, hidden ring bfloat16" in refusal.what
    assert refusal.reason == "no bfloat16 here"
    assert {(case.residual, case.dtype) for case in found.cases} == {
        ("sequence", "float32"), ("sequence", "bfloat16"), ("replicated", "float32"),
        ("replicated", "bfloat16"), ("hidden", "float32"),
    }  # fmt: skip


def test_an_error_outside_of_the_configuration_is_no_refusal(monkeypatch) -> None:
    def fail(tree):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("verification.cases.make_config", fail)
    full, small = scaled("tp8.yaml")
    with pytest.raises(ValueError, match="a mistake of ours"):
        find_cases(small, full, jax.devices(), "tp8")


def test_every_program_is_a_case_once() -> None:
    full, small = scaled("tp8.yaml")
    # Two layouts gather, by five methods; the third gathers nothing.
    assert len(find_cases(small, full, jax.devices(), "tp8").cases) == 2 * (5 + 5 + 1)
    found = find_cases(small, full, jax.devices(), "dp8")
    assert (len(found.cases), found.repeated) == (2, 2 * 14)


def test_the_beginning_of_an_order_meets_every_choice() -> None:
    full, small = scaled("tp8.yaml")
    cases = find_cases(small, full, jax.devices(), "").cases
    order = spread(cases, 0)
    assert sorted(case.name for case in order) == sorted(case.name for case in cases)
    # Every axis with every size, layout, method, dtype, and every mesh.
    assert {v for case in order[:40] for v in case.values} == {v for c in cases for v in c.values}
    assert spread(cases, 1) != order == spread(cases, 0)


# Bounds.


def step(loss: float, gradient: float, load: int = 4) -> StepResult:
    return StepResult(loss, {"w": np.full(9, gradient, np.float32)}, np.array([[load, 8 - load]]))


NAN = math.nan
REFERENCES = {"float32": step(1.0, 1.0), "bfloat16": step(1.001, 1.01)}


@pytest.mark.parametrize(
    ("found", "dtype", "is_within"),
    [
        (step(1.0, 1.0), "float32", True),
        (step(1 + 1e-7, 1 + 1e-6), "float32", True),
        (step(1.0, 1 + 1e-4), "float32", False),
        (step(1 + 1e-4, 1.0), "float32", False),
        (step(1.002, 1.02), "bfloat16", True),
        (step(1.001, 1.3), "bfloat16", False),
        (step(float("nan"), 1.0), "float32", False),
        (step(1.0, float("nan")), "float32", False),
        (step(1.0, 1.0, load=5), "float32", False),
    ],
)
def test_an_error_is_within_its_bound_or_not(found, dtype, is_within) -> None:
    _, small = scaled("tp8.yaml")
    assert compare(found, dtype, REFERENCES, small).is_within == is_within


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("broken", ["float32", "bfloat16"])
@pytest.mark.parametrize("values", [(NAN, 1.0), (1.0, NAN), (1.0, math.inf)])
def test_nothing_is_within_the_bounds_of_a_reference_that_is_not_finite(
    dtype, broken, values
) -> None:
    _, small = scaled("tp8.yaml")
    references = REFERENCES | {broken: step(*values)}
    found = compare(REFERENCES[dtype], dtype, references, small)
    assert not found.is_within and found.ratio == math.inf
    what = "gradient of w" if values[0] == 1 else "loss"
    with pytest.raises(ValueError, match=f"one device: the {what} is not finite"):
        check_finite(references[broken], "one device")


# Runs.


@pytest.mark.slow
def test_a_verification_passes_and_continues_where_it_stopped(tiny, capsys) -> None:
    assert verify.main([*tiny, "--sample", "1"]) == 0
    assert "497 of 498 cases were not run" in capsys.readouterr().out
    assert verify.main([*tiny, "--sample", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["ok"] and len(found["cases"]) == 2 and found["not_run"] == 496
    assert "continuing after 1 case\n" in err and "[1/2" not in err


def test_results_of_another_configuration_or_code_are_not_used(tmp_path) -> None:
    full, _ = scaled("tp8.yaml")
    case = Case(MeshConfig(dp=8), "sequence", "none", "float32")
    comparison = compare(step(1.0, 1.0), "float32", REFERENCES, full)
    Results(tmp_path, full).add(case, 1.0, comparison)
    (path,) = tmp_path.glob("results-*.jsonl")
    with path.open("a") as file:
        file.write('{"case": "half a li')
    again = Results(tmp_path, full)
    assert again.get(case).comparison == comparison
    assert again.notice.endswith("continuing after 1 case")
    other, _ = scaled("tp8.yaml", "model.qk_norm=true")
    changed = Results(tmp_path, other)
    assert changed.get(case) is None and f"is not that of {path.name}" in changed.notice
    # Nothing is lost: whoever goes back continues.
    assert Results(tmp_path, full).get(case).comparison == comparison


@pytest.mark.parametrize("fact", ["code", "XLA_FLAGS", "version of jax"])
def test_other_flags_and_libraries_have_results_of_their_own(tmp_path, monkeypatch, fact) -> None:
    full, _ = scaled("tp8.yaml")
    facts = results.describe_program(full)
    assert fact in facts
    for value in ("one", "two", "one"):
        other = {**facts, fact: value}
        monkeypatch.setattr(results, "describe_program", lambda _, other=other: other)
        notice = Results(tmp_path, full).notice
    assert len([*tmp_path.iterdir()]) == 2 and "continuing after 0 cases" in notice


def test_a_change_of_the_verification_itself_is_one_of_the_code(tmp_path, monkeypatch) -> None:
    full, _ = scaled("tp8.yaml")
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    (tmp_path / "bounds.py").write_text("# one\n")
    Results(tmp_path / "found", full)
    (tmp_path / "bounds.py").write_text("# two\n")
    assert "a new file, because" in Results(tmp_path / "found", full).notice


@pytest.mark.parametrize("line", ["not JSON", "[1]", "{}", '{"case": "dp8"}'])
@pytest.mark.parametrize("number", [1, 2])
def test_a_damaged_line_of_results_is_named_and_the_file_is_kept(tmp_path, line, number) -> None:
    full, _ = scaled("tp8.yaml")
    Results(tmp_path, full)
    (path,) = tmp_path.iterdir()
    path.write_text("\n".join([*path.read_text().splitlines()[: number - 1], line, "x", ""]))
    before = path.read_text()
    with pytest.raises(ValueError, match=rf"{path.name} line {number}: .*; delete the line") as e:
        Results(tmp_path, full)
    assert "\n" not in str(e.value) and path.read_text() == before


def test_a_case_that_did_not_run_is_tried_again(tmp_path) -> None:
    full, _ = scaled("tp8.yaml")
    case = Case(MeshConfig(dp=8), "sequence", "none", "float32")
    results = Results(tmp_path, full)
    results.add(case, 1.0, failure(MemoryError("no memory")))
    assert results.get(case) is not None and Results(tmp_path, full).get(case) is None


def test_where_every_case_is_refused_nothing_is_verified(tiny, capsys, monkeypatch) -> None:
    def refuse(*_):
        raise ValueError("not on this mesh")

    monkeypatch.setattr("verification.cases.build_plan", refuse)
    assert verify.main([*tiny, "--mesh", "tp8"]) == 2
    out, err = capsys.readouterr()
    assert "tp8            refused (all): not on this mesh" in out and "within" not in out
    assert err.startswith("error: ") and err.count("\n") == 1 and "no case ran" in err


def test_an_interrupted_verification_says_in_one_line_that_it_continues(tiny, tmp_path) -> None:
    command = [sys.executable, ROOT / "scripts" / "verify.py", *tiny, "--mesh", "dp8"]
    # Children of a background job would ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with process:
        lines = iter(process.stderr.readline, "")
        assert any("one device" in line for line in lines)  # it compiles now
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert (process.returncode, rest) == (130, "interrupted; the same command continues\n")
    assert [*(tmp_path / "results").glob("results-*.jsonl")]


def test_a_planted_error_is_found_and_named(tiny, capsys, monkeypatch) -> None:
    """A sum over several devices counts half of it twice."""
    psum = jax.lax.psum

    def wrong(x, axis_name, **others):
        total = psum(x, axis_name, **others)
        several = axis_name and jax.lax.axis_size(axis_name) > 1
        return jax.tree.map(lambda y: y * 1.5, total) if several else total

    monkeypatch.setattr("jax.lax.psum", wrong)
    assert verify.main([*tiny, "--mesh", "dp8", "--sample", "1"]) == 1
    assert "1 of 1 cases failed or are beyond their bound: dp8 " in capsys.readouterr().out


def test_a_step_that_does_not_run_is_a_failure(capsys, tiny, monkeypatch) -> None:
    def fail(program, *_):
        if program.tp.manager.mesh.size > 1:
            raise TypeError("no rule for this\nsharding")
        return REFERENCES[program.config.dtype]

    monkeypatch.setattr("verification.run.run_step", fail)
    assert verify.main([*tiny, "--mesh", "dp8", "--sample", "1"]) == 1
    assert "FAILED  TypeError: no rule for this\n" in capsys.readouterr().out


def test_a_full_disk_is_one_line_and_no_result(tiny, capsys, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("verification.results.replace_file", fail)
    assert verify.main([*tiny, "--mesh", "dp8", "--sample", "1"]) == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sample", "0"], "--sample 0"),
        (["--mesh", "pp2"], "--mesh pp2"),
        (["--mesh", "tp"], "--mesh tp"),
        (["model.hidden_size=-1"], "model.hidden_size"),
        (["--output", "/dev/null/x"], "--output /dev/null/x"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tiny, capsys, arguments, message) -> None:
    assert verify.main([*tiny, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


SAMPLED = {
    "dense": ["configs/tp8.yaml"],
    "gemma": ["configs/llama3_8b_tp8.yaml", *GEMMA],
    "sparse": ["configs/moe_ep8.yaml"],
    "lora": [
        "configs/tp8.yaml", "lora.rank=2", "model.num_key_value_heads=2",
        "parallel.replicate_kv=true", "training.gradient_accumulation=2",
    ],
    "deepseek": ["configs/mixtral_8x7b_ep8.yaml", *DEEPSEEK],
    "dpo": [
        "configs/tp8.yaml", "training.objective=dpo", "data.packing=pairs", "data.files=x.jsonl",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [slow(n) if n in ("dense", "sparse") else release(n) for n in SAMPLED]
)
def test_a_sample_of_meshes_computes_what_one_device_computes(tmp_path, name) -> None:
    path, *changes = SAMPLED[name]
    arguments = ["--config", str(ROOT / path), "--output", str(tmp_path), "--sample", "3"]
    assert verify.main([*arguments, "run.compilation_cache=null", *changes]) == 0


def test_a_case_is_named_by_all_its_choices() -> None:
    case = Case(MeshConfig(dp=2, tp=4), "hidden", "ring", "float32")
    assert case.name == "dp2-tp4 hidden ring float32"
