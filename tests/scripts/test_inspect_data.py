"""`scripts/inspect_data.py` shows the rows of a batch and correct statistics."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from data import inspection
from data.batch import FIELDS
from data.config import DataConfig
from data.pipeline import Dataset
from data.tokenizers.base import open_tokenizer
from data.tokenizers.byte_level import ByteTokenizer
from data.tokenizers.training import train_tokenizer
from safe_files import json_digest

sys.path.insert(0, str(ROOT / "scripts"))
import inspect_data as script
import prepare_data

CONFIG = """
model: {nobody: reads this}
data:
  sources:
    chat: {files: FOLDER/chat.jsonl, field: messages, weight: {0: 3, 4: 1}}
    words: {files: FOLDER/words.jsonl}
  sequence_length: {0: 32, 2: 64}
  global_batch_size: 8
  packing: best_fit
  on_error: skip
  eval_fraction: 0.1
  cache_dir: FOLDER/cache
"""
QUESTIONS, WORDS = 12, [1 + 7 * n % 100 for n in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A configuration of two sources: chats, and lines of w of many lengths."""
    folder = tmp_path_factory.mktemp("inspect")
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"A{n:03d}"}]
        for n in range(QUESTIONS)
    ]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": c}) for c in chats))
    lines = [json.dumps({"text": "w" * count}) for count in WORDS]
    (folder / "words.jsonl").write_text("\n".join([*lines, "broken"]))
    (folder / "config.yaml").write_text(CONFIG.replace("FOLDER", str(folder)))
    return folder


def show(capsys, folder: Path, *arguments: str) -> str:
    """stdout of a command that succeeds."""
    capsys.readouterr()
    assert script.main(["--config", str(folder / "config.yaml"), *arguments]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    return out


def make_fields(documents: list[tuple[str, str]], padding: int) -> dict[str, np.ndarray]:
    """Fields of documents, each a text without loss, a text in the loss, and the end."""
    columns: dict[str, list[float]] = {field: [] for field in FIELDS}
    for number, (prompt, answer) in enumerate(documents):
        ids = [*(prompt + answer).encode(), ByteTokenizer.eos_id]
        learned = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
        columns["tokens"] += ids
        columns["segment_ids"] += [number] * len(ids)
        columns["loss_mask"] += [*learned[1:], 0]
    columns["tokens"] += [ByteTokenizer.eos_id] * padding
    columns["segment_ids"] += [-1] * padding
    columns["loss_mask"] += [0] * padding
    return {field: np.array(values) for field, values in columns.items()}


ascii_text = st.text(st.sampled_from("abc \n[]"), min_size=2, max_size=9)


@given(
    documents=st.lists(st.tuples(st.just("") | ascii_text, ascii_text), min_size=1, max_size=5),
    padding=st.integers(0, 3),
)
def test_document_ends_and_masks_are_shown_in_their_places(documents, padding) -> None:
    text = inspection.row_text(make_fields(documents, padding), ByteTokenizer())
    shown = [(f"⟦{prompt}⟧" if prompt else "") + f"{answer}⏎" for prompt, answer in documents]
    end = f"┃ {padding} padding" if padding else ""
    assert text.plain == "┃".join(shown) + end
    dim = [text.plain[s.start : s.end] for s in text.spans if "dim" in str(s.style)]
    assert dim == [f"⟦{prompt}⟧" for prompt, _ in documents if prompt]
    colours = [str(s.style).split()[-1] for s in text.spans if text.plain[s.end - 1] == "⏎"]
    assert colours == [inspection.COLOURS[n % 2] for n in range(len(documents))]


@given(text=st.text(max_size=20))
def test_nothing_in_a_text_moves_the_terminal(text) -> None:
    shown = inspection.row_text(make_fields([("", text)], 0), ByteTokenizer()).plain
    codes = {ord(character) for character in shown} - {ord("\n"), ord("\t")}
    assert not codes & {*range(32), *range(0x7F, 0xA0)}


def test_single_tokens_are_shown_with_their_ids(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["the cat the cat"], 300, path)
    tokenizer = open_tokenizer(str(path))
    fields = make_fields([("", "")], 0)
    fields["tokens"] = np.array([*tokenizer.encode("the\ncat"), tokenizer.eos_id])
    fields["segment_ids"] = np.zeros(len(fields["tokens"]), int)
    fields["loss_mask"] = np.ones(len(fields["tokens"]))
    shown = inspection.row_text(fields, tokenizer, by_token=True).plain
    assert re.sub(r"\d+:", "", shown) == " 'the' '\\n' 'cat' ⏎"
    assert [int(number) for number in re.findall(r"(\d+):", shown)] == fields["tokens"].tolist()


@pytest.mark.parametrize("step", [0, 1, 5])
def test_the_rows_are_those_of_the_batch(folder, capsys, step) -> None:
    out = show(capsys, folder, "--step", str(step), "--rows", "99")
    config = script.load_data_config(str(folder / "config.yaml"), [])
    batch = Dataset(config).read_train(step, range(8))
    length = batch["tokens"].shape[1]
    assert length == (32 if step < 2 else 64)
    titles = re.findall(rf"^row (\d) of 8 of step {step} · source (\w+), row", out, re.MULTILINE)
    assert [int(number) for number, _ in titles] == list(range(8))
    bodies = re.split(r"\nrow \d of 8.*\n.*\n", out.split("\n\nsource ")[0])[1:]
    for number, (body, (_, source)) in enumerate(zip(bodies, titles, strict=True)):
        places = batch["segment_ids"][number] >= 0
        ids = [token for token in batch["tokens"][number][places].tolist() if token != 256]
        found = re.sub("[┃⏎⟦⟧]| [0-9]+ padding", "", body).rstrip("\n")
        assert found == bytes(ids).decode().rstrip("\n")
        assert ("w" in found and "A" not in found) == (source == "words")


def test_the_rows_of_a_run_are_those_that_it_had_before_texts_were_added(tmp_path, capsys) -> None:
    for name in "ab":
        text = "".join(f"def {name}{n}(x): return x * {n * n}\n" for n in range(400))
        (tmp_path / f"{name}.txt").write_text(text)
    out = ["--out", f"{tmp_path}/store", "--shard-gb", "1", "data.sequence_length=32"]
    assert prepare_data.main([*out, f"data.files={tmp_path}/a.txt"]) == 0
    (run := tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    values = {"files": f"{tmp_path}/store", "sequence_length": 32, "global_batch_size": 4}
    for folder in (run.parent.parent, tmp_path):
        (folder / "config.yaml").write_text(json.dumps({"data": values}))
    record = {"step": 1, "order": Dataset(DataConfig(**values)).order(1)}
    metadata = {"record": record, "sha256": json_digest(record)}
    (run / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": metadata}))
    before = show(capsys, run.parent.parent)
    assert prepare_data.main([*out, "--append", f"data.files={tmp_path}/b.txt"]) == 0
    assert show(capsys, run.parent.parent) == before != show(capsys, tmp_path)


def test_held_out_rows_of_validation_files_are_shown(folder, capsys, tmp_path) -> None:
    (tmp_path / "held.jsonl").write_text('{"text": "vvvvv"}\n')
    held = f"data.sources.words.eval_files={tmp_path}/held.jsonl"
    out = show(capsys, folder, "--held-out", "--source", "words", "data.eval_fraction=0", held)
    assert "held-out row 0 of 1 · source words" in out and "\nvvvvv⏎" in out
    assert re.search(r"held-out rows +1 of \d+ tokens$", out, re.MULTILINE)


def test_rows_of_a_source_are_those_it_gives_from_the_step_on(folder, capsys) -> None:
    out = show(capsys, folder, "--source", "chat", "--step", "5", "--rows", "3")
    rows = Dataset(script.load_data_config(str(folder / "config.yaml"), []))
    (first, _) = rows.rows_of(5)[0].counts(rows.schedule.first_row(5))
    epochs = [divmod(first + n, rows.sources[0].packed.train.num_rows) for n in range(3)]
    titles = re.findall(r"^source chat, row (\d+) of epoch (\d+)$", out, re.MULTILINE)
    assert [(int(epoch), int(row)) for row, epoch in titles] == epochs
    assert "⟧A0" in out and "words" not in out


def test_held_out_rows_are_shown_of_every_source(folder, capsys) -> None:
    out = show(capsys, folder, "--held-out", "--rows", "99")
    for source in Dataset(script.load_data_config(str(folder / "config.yaml"), [])).sources:
        shown = re.findall(
            rf"^held-out row (\d+) of {source.num_eval} · source {source.name}$", out, re.MULTILINE
        )
        assert [int(number) for number in shown] == list(range(source.num_eval))


def test_numbers_are_those_of_the_text(folder, capsys) -> None:
    out = show(capsys, folder, "--rows", "0", "--step", "4")
    chat, words = (
        dict(re.findall(r"^ *(\S.*?) (\d[\d,.]*)", part, re.MULTILINE))
        for part in re.split(r"^source \w+$", out, flags=re.MULTILINE)[1:]
    )
    assert chat["documents"] == str(QUESTIONS) and words["documents"] == str(len(WORDS))
    assert words["tokens"] == f"{sum(WORDS) + len(WORDS):,}"
    # The answer, <|im_end|> in plain bytes, and the end of the document.
    assert chat["tokens in the loss"] == str(QUESTIONS * (len("A000<|im_end|>") + 1))
    assert words["skipped: invalid JSON"] == "1" and f"{folder}/words.jsonl:41" in out
    assert out.count("weight at step 4 1 (50.0% of rows)") == 2
    lengths = [count + 1 for count in WORDS]
    assert f"shortest {min(lengths)}, median {np.median(lengths):,.0f}" in out
    assert f"longest {max(lengths)}" in out


@given(st.lists(st.integers(1, 2**50), min_size=1))
def test_bins_are_powers_of_two(lengths) -> None:
    expected = Counter(length.bit_length() - 1 for length in lengths)
    found = {
        n: count for n, count in enumerate(inspection.length_histogram(np.array(lengths))) if count
    }
    assert found == expected


@given(st.lists(st.integers(0, 10**7), min_size=1).filter(any))
def test_every_bin_with_a_document_has_a_bar(counts) -> None:
    lines = list(inspection.histogram_lines(np.array(counts)))
    used = counts[next(n for n, count in enumerate(counts) if count) :]
    assert [
        int(re.findall(r" ([\d,]+)(?: █+)?$", line)[0].replace(",", "")) for line in lines
    ] == used
    assert [("█" in line) for line in lines] == [count > 0 for count in used]
    assert max(line.count("█") for line in lines) == inspection.BAR_WIDTH


@given(st.integers(2, 10**12))
def test_an_axis_has_three_to_six_round_ticks(most) -> None:
    ticks = inspection._ticks(most)
    assert ticks[0] == 0 and 3 <= len(ticks) <= 6 and most - ticks[-1] < ticks.step
    assert str(ticks.step).rstrip("0") in ("1", "2", "5")


def test_the_plot_has_a_panel_per_source_with_its_bars(folder, capsys, tmp_path) -> None:
    path = tmp_path / "lengths.png"
    out = show(capsys, folder, "--rows", "0", "--plot", str(path))
    assert f"{path} written" in out
    with Image.open(path) as image:
        assert image.format == "PNG" and image.size == (900, 500)
        pixels = np.array(image.convert("RGB"))
    bar = np.all(pixels == [int(inspection.BAR[n : n + 2], 16) for n in (1, 3, 5)], axis=-1)
    # Chats are 64 to 127 bytes, words 2 to 101, so the axis has bins from 2 to 64.
    step = (900 - inspection.MARGIN[0] - inspection.MARGIN[2]) / 6
    bins = [
        [bool(half[:, round(inspection.MARGIN[0] + (n + 0.5) * step)].any()) for n in range(6)]
        for half in (bar[:260], bar[260:])
    ]
    assert bins == [[False] * 5 + [True], [True] * 6]


def test_a_picture_grows_with_the_number_of_sources(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("a" * 999)
    sources = {f"s{n}": {"files": str(tmp_path / "a.txt")} for n in range(6)}
    rows = Dataset(
        DataConfig(sources=sources, cache_dir=str(tmp_path / "cache"), sequence_length=8)
    )
    inspection.plot_lengths(rows.sources, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.size[1] >= 6 * inspection.PANEL_HEIGHT


@pytest.mark.parametrize(
    ("arguments", "law"),
    [
        (("--rows", "-1"), "--rows -1: use at least 0"),
        (("--step", "-1"), "--step -1: use at least 0"),
        (("--source", "x"), "--source x is not in the configuration; use one of chat, words"),
        (("--held-out", "--step", "1"), "--step has no meaning with --held-out"),
        (
            ("--held-out", "data.eval_fraction=0"),
            "data.eval_fraction=0 leaves the held-out split empty",
        ),
        (("model.hidden_size=1",), "override 'model.hidden_size=1'"),
        (("data.packng=split",), "data.packng: unknown key; did you mean data.packing?"),
        (("--config", "nowhere.yaml"), "--config nowhere.yaml: No such file"),
        (("data.sources.chat.files=nowhere/*",), "data.sources.chat.files='nowhere/*' matches no"),
        (("data.on_error=raise",), "words.jsonl:41: "),
        (("--plot", "a.unknown"), "unknown file extension: .unknown"),
        (("--plot", "nowhere/a.png"), "No such file or directory: 'nowhere/a.png'"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(folder, capsys, arguments, law) -> None:
    capsys.readouterr()
    config = [] if "--config" in arguments else ["--config", str(folder / "config.yaml")]
    assert script.main([*config, "--rows", "0", *arguments]) == 2
    _, error = capsys.readouterr()
    assert error.startswith("error: ") and law in error and error.count("\n") == 1
