"""Scores of lm-eval tasks equal direct log-likelihoods, and those of lm-eval with transformers."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("lm_eval")

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import chats
import jax
import torch
import transformers
from conftest import ROOT
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny_models import save_model

sys.path.insert(0, str(ROOT / "scripts"))
import convert
import evaluate as script
from evaluation.adapter import TorusLM

from configs.runs import load_run

LENGTH = 64
LONGEST = 512  # of the models that tiny_models.py makes
SETTINGS = ["run.compilation_cache=null", f"data.sequence_length={LENGTH}"]
SETTINGS += ["data.global_batch_size=8"]
MESHES = {"one": (), "dp2-tp2-sp2": ("mesh.dp=2", "mesh.tp=2", "mesh.sp=2")}
# Rounding of float32 in another order of the sums, over up to 64 tokens.
close = partial(pytest.approx, rel=2e-5, abs=2e-4)
WORDS = "the cat sat on a mat and looked at one two three birds in an old tree by the sea".split()

CHOICE = """
task: torus_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: "{{choices}}"
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
ROLLING = """
task: torus_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rolling.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
"""
GENERATE = """
task: torus_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/generate.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["a"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
TASKS = ["torus_choice", "torus_rolling", "torus_generate"]


def sentence(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + k * k) % len(WORDS)] for k in range(count))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no-bos"])
def folder(request, tmp_path_factory) -> Path:
    """A model of transformers, the run that it converts to, and local tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    with pytest.MonkeyPatch.context() as patch:  # text for a token of every id of the model
        patch.setattr(chats, "TEXTS", [Path(__file__).read_text()])
        chats.write_model_directory(folder / "model", adds_bos=request.param)
    save_model("llama", folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    assert len(tokenizer) == 320
    for name in ("config.json", "generation_config.json"):
        path = folder / "model" / name
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        path.write_text(json.dumps(json.loads(path.read_text()) | ids))
    given = ["from-hf", str(folder / "model"), str(folder / "run"), *SETTINGS]
    assert convert.main(given) == 0
    for name, text in zip(("choice", "rolling", "generate"), (CHOICE, ROLLING, GENERATE)):  # noqa: B905
        (folder / "tasks").mkdir(exist_ok=True)
        (folder / "tasks" / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    choices = [
        {"question": sentence(n, 3 + n), "choices": [sentence(n + k, k) for k in (1, 2, 4)]}
        | {"label": n % 3}
        for n in range(8)
    ]
    write_lines(folder / "choice.jsonl", choices)
    texts = [{"text": sentence(n, count)} for n, count in enumerate((2, 17, 60, 33, 90))]
    write_lines(folder / "rolling.jsonl", texts)
    questions = [{"question": sentence(n, 2 + 3 * n), "answer": "x"} for n in range(7)]
    write_lines(folder / "generate.jsonl", questions)
    return folder


def open_run(folder: Path, *overrides: str) -> TorusLM:
    run = load_run(folder / "run", overrides)
    with jax.set_mesh(run.program.tp.manager.mesh):
        _, params = run.load_params()
        return TorusLM(run, run.program, params, batch_size=4)


def open_transformers(folder: Path) -> HFLM:
    return HFLM(
        pretrained=str(folder / "model"),
        device="cpu",
        dtype="float32",
        batch_size=3,
        max_length=LENGTH,
    )


def asked(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


def pairs() -> list[tuple[str, str]]:
    contexts = [sentence(n, 1 + 2 * n) for n in range(9)]
    contexts += ["", "", sentence(0, 80), "the cat "]  # none, too long, with a space at its end
    return [(text, f" {sentence(n + 3, 1 + n % 4)}") for n, text in enumerate(contexts)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.costly
def test_log_likelihoods_equal_those_of_the_logits_of_transformers(folder, mesh) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="eager", dtype=torch.float32
    )
    tested = open_run(folder, *MESHES[mesh])
    found = tested.loglikelihood(asked("loglikelihood", *pairs()), disable_tqdm=True)
    assert len(found) == len(pairs())
    num_cut = 0
    for (context, text), (likelihood, is_greedy) in zip(pairs(), found, strict=True):
        # Spaces between both belong to the continuation.
        stripped = context.rstrip()
        before = tested.tok_encode(stripped) if stripped else [tested.prefix_token_id]
        whole = tested.tok_encode(context + text) if stripped else before + tested.tok_encode(
            text, add_special_tokens=False
        )  # fmt: skip
        count = len(whole) - len(before)
        num_cut += len(whole) > LENGTH + 1
        whole = whole[-LENGTH - 1 :]
        with torch.no_grad():
            logits = model(torch.tensor([whole[:-1]])).logits[0].double().log_softmax(-1)
        targets = torch.tensor(whole[-count:])
        want = logits[-count:].gather(1, targets[:, None]).sum().item()
        assert likelihood == close(want)
        assert is_greedy == bool((logits[-count:].argmax(-1) == targets).all())
    assert tested.num_cut == num_cut > 0


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.costly
def test_every_kind_of_request_equals_the_backend_of_transformers(folder, mesh) -> None:
    ours, theirs = open_run(folder, *MESHES[mesh]), open_transformers(folder)
    requests = asked("loglikelihood", *pairs())
    found, want = (lm.loglikelihood(requests, disable_tqdm=True) for lm in (ours, theirs))
    assert [value for value, _ in found] == close([value for value, _ in want])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in want]
    texts = asked("loglikelihood_rolling", *((sentence(n, 1 + 19 * n),) for n in range(6)))
    found, want = (lm.loglikelihood_rolling(texts, disable_tqdm=True) for lm in (ours, theirs))
    assert found == close(want) and min(found) < -100 and len(set(found)) == 6
    for options in ({"until": ["b"], "max_gen_toks": 20}, {"until": [], "max_gen_toks": 5}):
        contexts = ((sentence(n, 1 + 9 * n), dict(options)) for n in range(6))
        made = asked("generate_until", *contexts)
        found, want = (lm.generate_until(made, disable_tqdm=True) for lm in (ours, theirs))
        assert found == want and any(found)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.costly
def test_the_script_gives_the_results_of_the_backend_of_transformers(
    folder, mesh, capsys, tmp_path
) -> None:
    given = ["--run", str(folder / "run"), "--tasks", ",".join(TASKS)]
    given += ["--include", str(folder / "tasks"), "--batch-size", "4"]
    output = tmp_path / "results.json"
    assert script.main([*given, "--output", str(output), *MESHES[mesh]]) == 0
    lines = capsys.readouterr().out.splitlines()
    shorter = [*given, "--tasks", "torus_choice", "data.sequence_length=16", *MESHES[mesh]]
    assert script.main(shorter) == 0
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "lost the beginning" in x]
    assert line.startswith("warning: ") and line.endswith(
        f"; data.sequence_length={LONGEST} gives longer rows"
    )
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    theirs = simple_evaluate(
        model=open_transformers(folder), tasks=TASKS, task_manager=manager, log_samples=False,
        bootstrap_iters=0,
    )  # fmt: skip
    ours = json.loads(output.read_text())
    assert ours["step"] == 0 and ours["results"].keys() == theirs["results"].keys() == {*TASKS}
    for task in TASKS:
        for name, value in theirs["results"][task].items():
            if isinstance(value, float) and "stderr" not in name:
                assert ours["results"][task][name] == pytest.approx(value, rel=2e-5), name
    bits = ours["results"]["torus_rolling"]["bits_per_byte,none"]
    assert 1 < bits < 2 * math.log2(320)
    assert any(line.startswith("torus_rolling") and f"{bits:.4f}" in line for line in lines)
    assert any("exact_match" in line for line in lines) and lines[0].startswith("task ")


@pytest.mark.parametrize("folder", [True], ids=["bos"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "torus_choise"], "--tasks torus_choise: unknown task; did you mean torus_cho"),
        (["--include", "nowhere"], "--include nowhere: no such folder"),
        (["--batch-size", "3", "mesh.dp=2"], "batch size 3: use a multiple of mesh.dp * mesh.fsdp"),
        (["--step", "7"], "has no checkpoint 7; found: 0"),
        (
            ["data.sequence_length=8", "--tasks", "torus_generate"],
            "the task generates 12 tokens",
        ),
    ],
)
@pytest.mark.costly
def test_a_mistake_is_one_line(folder, capsys, arguments, message) -> None:
    given = ["--run", str(folder / "run"), "--tasks", "torus_choice"]
    given += ["--include", str(folder / "tasks")]
    assert script.main([*given, *arguments]) == 2
    error = capsys.readouterr().err.splitlines()
    assert [line for line in error if line.startswith("error: ") and message in line]


def test_an_option_of_generation_that_is_not_supported_is_named(folder) -> None:
    made = asked("generate_until", ("the cat", {"until": ["x"], "num_beams": 4}))
    with pytest.raises(ValueError, match="the task asks for num_beams in generation_kwargs"):
        open_run(folder).generate_until(made)


def test_copies_of_a_sampled_request_have_different_answers(folder) -> None:
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12, "num_beams": 1}
    made = asked("generate_until", *[("the cat", dict(options))] * 12)  # three batches
    model = open_run(folder)
    found = model.generate_until(made, disable_tqdm=True)
    assert len(set(found)) > 8
    assert model.generate_until(made, disable_tqdm=True) == found
