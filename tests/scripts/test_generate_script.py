"""`scripts/generate.py` on a trained run: stdout is the text, the same on every mesh."""

import importlib.util
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from chats import BOS, HEADS, write_model_directory
from conftest import ROOT

import train
from configs.runs import load_run
from data.chat_jinja import CHATML_JINJA, save_chat_template
from data.tokenizers.base import END, IM_END, open_tokenizer
from data.tokenizers.training import train_tokenizer
from model.generation.generator import Generator
from training.hugging_face.companions import export_companions

sys.path.insert(0, str(ROOT / "scripts"))
import generate as script

CONFIG = """
run: {dir: FOLDER/run, compilation_cache: null}
mesh: {dp: 2, tp: 2}
model:
  vocab_size: 264
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  intermediate_size: 64
  dtype: float32
  layer_types: [sliding_attention, full_attention]
  sliding_window: 8
data: {files: FOLDER/*.txt, sequence_length: 32, global_batch_size: 8, cache_dir: FOLDER/cache}
optimizer: {schedule: constant, warmup_steps: 0, learning_rate: 1e-2}
training: {steps: 4, eval_every: 4, sample_every: 2, sample_tokens: 8, sample_temperature: 0}
checkpoint: {every: 2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a run of four steps and checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "a.txt").write_text("".join(f"def f{n}(x): return x * {n}\n" for n in range(400)))
    (folder / "config.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    assert train.main(["--config", str(folder / "config.yaml")]) == 0
    return folder


def stdout_of(capsys, folder: Path, *arguments: str) -> str:
    """stdout of a successful command."""
    capsys.readouterr()
    prompt = [] if "--prompt" in arguments else ["--prompt", "def "]
    common = ["--run", str(folder / "run"), "--max-new-tokens", "8", "--temperature", "0"]
    assert script.main([*common, *prompt, *arguments]) == 0
    return capsys.readouterr().out


def test_samples_are_logged_during_training_and_equal_the_script(folder, capsys) -> None:
    log = (folder / "run" / "log.txt").read_text()
    middle, end = log.index("sample at step 2:\ndef "), log.rindex("sample:\ndef ")
    assert middle < end and log.count("sample") == 2
    # The script continues from the last checkpoint like the last sample.
    text = stdout_of(capsys, folder)
    assert "attention" not in capsys.readouterr().err
    paged = ["--prompt", "def ", "--cache", "paged", "--explain"]
    assert script.main(["--run", str(folder / "run"), *paged]) == 0
    notes = capsys.readouterr().err
    assert "attention vanilla for sliding_attention, prefill: native backend" in notes
    assert "attention ragged_page_attention_v2 for full_attention, autoregressive" in notes
    assert ", paged cache\n" in notes
    assert text.startswith("def ") and log[end + len("sample:\n") :].startswith(text[:8])


@pytest.mark.parametrize(
    "arguments",
    [
        ("mesh.dp=1", "mesh.tp=1"),
        ("mesh.dp=1", "mesh.sp=2"),
        ("--cache", "paged", "--page-size", "4"),
        ("--cache", "int8"),
        ("--step", "4"),
    ],
    ids=str,
)
@pytest.mark.costly
def test_mesh_and_cache_do_not_change_the_text(folder, capsys, arguments) -> None:
    assert stdout_of(capsys, folder, *arguments) == stdout_of(capsys, folder)


def test_several_prompts_equal_one_at_a_time(folder, capsys) -> None:
    prompts = ("def f1(x)", "é", "x")
    alone = [stdout_of(capsys, folder, "--prompt", prompt) for prompt in prompts]
    together = stdout_of(capsys, folder, *(word for p in prompts for word in ("--prompt", p)))
    assert together == "".join(alone)


def test_other_checkpoints_and_seeds_give_other_text(folder, capsys) -> None:
    late = stdout_of(capsys, folder)
    assert stdout_of(capsys, folder, "--step", "2") != late
    hot = ["--temperature", "3", "--top-k", "100", "--top-p", "0.99", "--seed"]
    drawn = [stdout_of(capsys, folder, *hot, seed) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("arguments", "law"),
    [
        (("--step", "3"), "has no checkpoint 3; found: 2, 4"),
        (("--run", "/nowhere"), "/nowhere has no config.yaml; give a run directory"),
        (("--top-p", "2"), "top_p=2.0: use more than 0 and at most 1"),
        (("--prompt", ""), '--prompt "": the tokenizer has no BOS token; give at least one char'),
        (("--page-size", "4"), "--page-size 4: needs --cache paged"),
        (("--chat",), "give either --prompt TEXT or --chat"),
        (("--max-new-tokens", "0"), "--max-new-tokens 0: use at least 1"),
        (("--stop-id", "3000000000"), "--stop-id 3000000000: the tokens of this run are 0 to 256"),
        (("--stop-id", "-1"), "--stop-id -1: the tokens of this run are 0 to 256"),
        (("model.hidden_size=64",), "restore the values of the run's config.yaml"),
        (("mesh.sp=2", "--cache", "paged"), "a paged cache cannot split rows over sp"),
        (("mesh.dpp=2",), "mesh.dpp: unknown key; did you mean mesh.dp?"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(folder, capsys, arguments, law) -> None:
    capsys.readouterr()
    assert script.main(["--run", str(folder / "run"), "--prompt", "def ", *arguments]) == 2
    out, error = capsys.readouterr()
    assert law in error and out == ""
    assert error.splitlines()[-1].startswith("error: ") and "Traceback" not in error


def chat_with(capsys, monkeypatch, folder: Path, lines: str) -> tuple[list[str], list[str]]:
    """The answers to the lines of stdin, and the lines on stderr."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    common = ["--run", str(folder / "run"), "--max-new-tokens", "8", "--temperature", "0"]
    assert script.main([*common, "--chat", "--explain"]) == 0
    out, error = capsys.readouterr()
    return out.split("\n")[:-1], error.splitlines()


def test_a_chat_answers_every_line_after_the_whole_conversation(
    folder, capsys, monkeypatch
) -> None:
    first, second, third = "def f1", "x", "def"
    asked = f"{first}\n{second}\n/reset\n\n{third}\n"
    answers = "\n".join(chat_with(capsys, monkeypatch, folder, asked)[0])
    alone = "\n".join(chat_with(capsys, monkeypatch, folder, f"{third}\n")[0])
    assert answers.endswith(alone)
    # The same as the conversation as one prompt.
    prompt = f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n"
    text = stdout_of(capsys, folder, "--prompt", prompt)
    assert text.startswith(prompt)
    answer = text.removeprefix(prompt).removesuffix("\n").partition("<|im_end|>")[0]
    assert answers.startswith(f"{answer}\n")


def test_a_tokenizer_other_than_that_of_the_run_is_refused(folder, capsys) -> None:
    given = ["--run", str(folder / "run"), "--prompt", "x", "data.tokenizer=other.json"]
    assert script.main(given) == 2
    error = capsys.readouterr().err
    assert f"data.tokenizer: {folder}/run has its own tokenizer; remove the override" in error


def test_an_imported_model_is_as_long_as_its_source_says(folder, capsys) -> None:
    source = folder / "run" / "hugging_face.json"
    try:
        for longest in (16, 4096):
            source.write_text(json.dumps({"config": {"max_position_embeddings": longest}}))
            assert script.main(["--run", str(folder / "run"), "--prompt", "x" * 40]) == 0
            warning = "but the model was trained on rows of 32;"
            assert (warning in capsys.readouterr().err) == (longest == 16)
    finally:
        source.unlink()


def test_every_turn_of_a_chat_says_how_long_it_is(folder, capsys, monkeypatch) -> None:
    lengths, original = [], script.encode_chat_prompt

    def recorded(*arguments):
        ids = original(*arguments)
        lengths.append(len(ids))
        return ids

    monkeypatch.setattr(script, "encode_chat_prompt", recorded)
    notes = chat_with(capsys, monkeypatch, folder, "hi\nyou\n")[1]
    assert len(lengths) == 2 and 32 < lengths[0] < lengths[1]
    warnings = [line for line in notes if line.startswith("warning: ")]
    assert warnings == [
        f"warning: prompt and answer may have {length + 8} tokens together, but the model was "
        "trained on rows of 32; lower --max-new-tokens, or begin a new conversation with /reset"
        for length in lengths
    ]
    described = [line for line in notes if line.startswith("attention ")]
    kinds = {re.sub(r"[\d,]+", "", line) for line in described}
    assert described and len(kinds) == len(described)


def test_a_prompt_longer_than_the_rows_of_the_training_is_warned_about(folder, capsys) -> None:
    for length, is_long in ((24, False), (25, True)):
        common = ["--run", str(folder / "run"), "--max-new-tokens", "8"]
        assert script.main([*common, "--prompt", "x" * length]) == 0
        assert ("answer may have 33 tokens together" in capsys.readouterr().err) == is_long


def test_a_stop_id_ends_the_text(folder, capsys) -> None:
    text = stdout_of(capsys, folder).removesuffix("\n")
    token = text.removeprefix("def ").encode()[2]
    stopped = stdout_of(capsys, folder, "--stop-id", str(token)).removesuffix("\n")
    before = text.removeprefix("def ").encode().partition(bytes([token]))[0]
    assert stopped.encode() == b"def " + before


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_a_text_is_cut_at_a_marker_that_is_spread_over_pieces(size) -> None:
    text = "a < b <|im_ <|im_end|> never"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]

    def cut(marker: str | None, *, is_unfinished: bool = False) -> str:
        return "".join(script.cut_at(marker, pieces, lambda: is_unfinished))

    assert cut("<|im_end|>") == "a < b <|im_ "
    assert cut("absent") == cut("absent", is_unfinished=True) == cut(None) == text
    assert cut("never again") == text
    assert cut("never again", is_unfinished=True) == text.removesuffix("never")


def test_prompts_of_a_run_and_of_the_script_begin_with_bos_alike(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 400)
    model = write_model_directory(tmp_path / "model", generation={"temperature": 0.0})
    (tmp_path / "config.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    overrides = [f"data.tokenizer={model}", "model.vocab_size=320", "training.sample_prompt='the '"]
    (template := tmp_path / "mine.jinja").write_text(HEADS)
    overrides.append(f"data.chat_template={template}")
    assert train.main(["--config", str(tmp_path / "config.yaml"), *overrides]) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    sample = log[log.rindex("sample:\n") + len("sample:\n") :]
    shutil.rmtree(tmp_path / "model")  # the run has its own copies
    template.unlink()
    prompts, original = [], Generator.stream

    def recorded(self, params, given, **options):
        prompts.extend(given)
        return original(self, params, given, **options)

    monkeypatch.setattr(Generator, "stream", recorded)
    capsys.readouterr()
    # Greedy, as generation_config.json asks.
    assert (
        script.main(["--run", f"{tmp_path}/run", "--prompt", "the ", "--max-new-tokens", "8"]) == 0
    )
    text = capsys.readouterr().out
    assert sample.startswith(text) and BOS not in text
    assert prompts[0][0] == 1 and len(prompts[0]) > 1
    if importlib.util.find_spec("jinja2") is not None:
        notes = chat_with(capsys, monkeypatch, tmp_path, "the cat\n")[1]
        assert any(f"in {tmp_path}/run/chat_template.jinja; /reset" in line for line in notes)
    export_companions(tmp_path / "run", None, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == HEADS
    # Another one on the command line, and a resume without a file.
    given = load_run(tmp_path / "run", [f"data.chat_template={tmp_path}/other.jinja"])
    assert given.chat_template_name == f"{tmp_path}/other.jinja"
    save_chat_template("chatml", tmp_path / "run")
    assert not (tmp_path / "run" / "chat_template.jinja").exists()


def test_an_export_of_a_run_on_chats_answers_as_the_run_does(tmp_path) -> None:
    train_tokenizer(["the cat sat on the mat"] * 9, 272, tmp_path / "t.json")
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": chat}) + "\n") * 400)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    overrides = [f"data.tokenizer={tmp_path}/t.json", f"data.files={tmp_path}/a.jsonl"]
    overrides += ["model.vocab_size=272", "training.steps=1", "training.sample_every=null"]
    assert train.main(["--config", str(tmp_path / "config.yaml"), *overrides]) == 0
    tokenizer = open_tokenizer(str(tmp_path / "t.json"))
    export_companions(tmp_path / "run", tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHATML_JINJA
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found["eos_token_id"] == [tokenizer.controls[end] for end in (END, IM_END)]


def test_int8_weights_generate_and_change_no_file(folder, capsys) -> None:
    checkpoints = sorted((folder / "run" / "checkpoints").rglob("*"))
    before = {path: path.stat().st_mtime_ns for path in checkpoints}
    text = stdout_of(capsys, folder, "--weights", "int8")
    assert text.startswith("def ") and len(text) > len("def ")
    assert {path: path.stat().st_mtime_ns for path in checkpoints} == before
