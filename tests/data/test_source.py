"""Validation files of a source: they alone are held out, and no source trains on them."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from data.config import DataConfig
from data.files import DataError
from data.order_changes import explain_change
from data.pipeline import Dataset
from data.tokenizers.base import open_tokenizer
from data.tokenizers.byte_level import ByteTokenizer
from data.tokenizers.training import ensure_tokenizer

TRAINED = [f"train {n:03d} " + "ab" * (n % 7) for n in range(40)]
HELD = [f"held {n:03d} " + "xy" * (n % 5) for n in range(13)]


def write_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_lines(tmp_path / "train.jsonl", TRAINED)
    write_lines(tmp_path / "held.jsonl", HELD)
    return tmp_path


def open_data(folder: Path, **changes) -> Dataset:
    values = {
        "files": str(folder / "train.jsonl"),
        "eval_files": str(folder / "held.jsonl"),
        "sequence_length": 16,
        "global_batch_size": 4,
        "packing": "best_fit",
        "cache_dir": str(folder / "cache"),
    }
    return Dataset(DataConfig(**{**values, **changes}))


def texts_of(rows: list[dict]) -> str:
    """The text of rows, without padding."""
    ids = np.array([token for row in rows for token in row["tokens"][row["segment_ids"] >= 0]])
    return ByteTokenizer().decode(ids[ids != ByteTokenizer().eos_id])


def all_texts(dataset: Dataset, number: int = 0) -> tuple[str, str]:
    """The text of one epoch of training rows, and of all held-out rows."""
    source = dataset.sources[number]
    train = [source.train_row(n) for n in range(source.num_items)]
    return texts_of(train), texts_of([source.eval_row(n) for n in range(source.num_eval)])


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_the_held_out_rows_are_the_validation_files_and_all_other_text_is_trained_on(
    folder, packing, fraction
):
    dataset = open_data(folder, eval_fraction=fraction, packing=packing)
    train, held = all_texts(dataset)
    assert sorted(train) == sorted("".join(TRAINED)) and sorted(held) == sorted("".join(HELD))
    source = dataset.sources[0]
    assert dataset.num_eval == source.num_eval > 0
    # Documents in several rows are counted in parts.
    assert source.eval_bytes(source.num_eval) == pytest.approx(len("".join(HELD)), rel=1e-12)
    assert "; eval_files: 13 documents, " in source.summary


def test_every_other_source_keeps_its_own_held_out_split(folder):
    sources = {
        "a": {"files": str(folder / "train.jsonl")},
        "b": {"files": write_lines(folder / "more.jsonl", ["more " * 9] * 20)}
        | {"eval_files": str(folder / "held.jsonl")},
    }
    dataset = open_data(folder, files=None, eval_files=None, sources=sources, eval_fraction=0.2)
    train, held = all_texts(dataset, 0)
    assert sorted(train + held) == sorted("".join(TRAINED)) and held
    assert sorted(all_texts(dataset, 1)[1]) == sorted("".join(HELD))
    assert dataset.config.evaluated_sources == ["a", "b"]
    none = DataConfig(sources=sources, eval_fraction=0.0)
    assert none.evaluated_sources == ["b"]


@pytest.mark.parametrize("glob", ["*.jsonl", "[ht]*.jsonl"])
def test_no_source_trains_on_a_validation_file_that_its_glob_matches(folder, glob):
    (folder / "held2.jsonl").symlink_to(folder / "held.jsonl")
    sources = {
        "a": {"files": str(folder / glob)},
        "b": {"files": str(folder / "train.jsonl"), "eval_files": str(folder / "held.jsonl")},
    }
    dataset = open_data(folder, files=None, eval_files=None, sources=sources, eval_fraction=0.0)
    for number in range(2):
        assert sorted(all_texts(dataset, number)[0]) == sorted("".join(TRAINED))


def test_a_source_that_would_have_no_training_file_is_refused(folder):
    with pytest.raises(DataError, match=r"data\.files: each of its 1 file\(s\) is one of eval_fi"):
        open_data(folder, files=str(folder / "held.jsonl"))


def test_validation_files_that_do_not_exist_are_named_by_their_key(folder):
    with pytest.raises(DataError, match=r"data\.eval_files='nowhere/\*' matches no file"):
        open_data(folder, eval_files="nowhere/*")
    sources = {"a": {"files": str(folder / "train.jsonl"), "eval_files": "nowhere/*"}}
    with pytest.raises(DataError, match=r"data\.sources\.a\.eval_files='nowhere/\*' matches no"):
        open_data(folder, files=None, eval_files=None, sources=sources)


def test_a_prepared_store_holds_validation_text_and_none_that_is_trained_on(folder):
    held, train = (
        str(Dataset(DataConfig(files=str(folder / f"{name}.jsonl"), eval_fraction=0.0,
                               cache_dir=str(folder / "cache"))).sources[0].store.folder)
        for name in ("held", "train")
    )  # fmt: skip
    dataset = open_data(folder, files=train, eval_files=held)
    assert sorted(all_texts(dataset)[1]) == sorted("".join(HELD))
    glob = open_data(folder, files=str(folder / "*.jsonl"), eval_files=held)
    assert sorted(all_texts(glob)[0]) == sorted("".join(TRAINED))
    with pytest.raises(DataError, match=r"was prepared from .*held\.jsonl, which is one of eval_f"):
        open_data(folder, files=held)


def test_validation_conversations_and_pairs_are_rows_like_any_others(folder):
    def chat(answer: str) -> list[dict]:
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]

    for name, count in (("train", 12), ("held", 5)):
        chats = [json.dumps({"text": chat(f"{name}{n}")}) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(chats))
    dataset = open_data(folder, sequence_length=128)
    source = dataset.sources[0]
    learned = sum(int(source.eval_row(n)["loss_mask"].sum()) for n in range(source.num_eval))
    assert learned == int(np.count_nonzero(source.held_out[0].loss_mask[:]))
    train, held = all_texts(dataset)
    assert train.count("train") == 12 and held.count("held") == 5 and "held" not in train
    for name, count in (("train", 12), ("held", 5)):
        pairs = [
            json.dumps(
                {"prompt": "q", "chosen": f"{name}{n}", "rejected": "x" * (1 + 300 * (n == 2))}
            )
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(pairs))
    source = open_data(folder, sequence_length=128, packing="pairs").sources[0]
    assert (source.num_items, source.num_eval, source.num_pairs_left_out) == (11, 8, 2)
    assert "(4 pairs)" in source.summary and "2 pairs left out" in source.summary


def test_another_validation_text_is_another_order_that_names_it(folder):
    with_files = open_data(folder)
    without = open_data(folder, eval_files=None, eval_fraction=0.01)
    before, plain = with_files.order(3), without.order(3)
    assert "eval_files" not in plain, "runs without them are older than the key"
    assert before == open_data(folder).order(3)
    write_lines(folder / "held.jsonl", [*HELD, "another"])
    changed = open_data(folder).order(3)
    text = "the text of eval_files of source 'text'"
    assert explain_change(before, changed) == f"{text} has changed"
    assert explain_change(before, plain) == f"{text} was removed"
    assert explain_change(plain, before) == f"{text} was added"
    assert explain_change(before, before) == ""


def test_the_rows_of_validation_files_are_the_same_after_a_restart(folder):
    one, two = open_data(folder), open_data(folder)
    for n in range(one.num_eval):
        first, second = (each.sources[0].eval_row(n) for each in (one, two))
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_eval_files_beside_sources_are_refused():
    with pytest.raises(ValidationError, match=r"use data\.sources\.NAME\.eval_files"):
        DataConfig(sources={"a": {}}, eval_files="x")


def test_a_tokenizer_is_not_trained_on_validation_files(folder):
    pytest.importorskip("tokenizers")
    write_lines(folder / "held.jsonl", ["zqzqzqzq " * 50])
    path = folder / "tokenizer.json"
    config = DataConfig(
        files=str(folder / "*.jsonl"),
        eval_files=str(folder / "held.jsonl"),
        tokenizer=str(path),
    )
    ensure_tokenizer(config, 280, lambda line: None)
    assert len(open_tokenizer(str(path)).encode("zqzq")) == 4, "no merge of these letters"


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_conversations_that_are_cut_are_counted_in_a_warning(tmp_path, packing):
    talks = [[("user", "hi"), ("assistant", "a" * length)] for length in (4, 200, 5, 300)]
    lines = [{"text": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"eval_files": None, "eval_fraction": 0, "packing": packing}
    (line,) = open_data(tmp_path, sequence_length=128, **given).warnings()
    assert (
        line
        == {
            "best_fit": "data text: 2 of 4 conversations longer than a row of 128 tokens, and cut; "
            "raise data.sequence_length",
            "split": "data text: 3 of 4 conversations cut at the end of a row of 128 tokens; "
            "use data.packing=best_fit, or raise data.sequence_length",
        }[packing]
    )
    long_rows = open_data(tmp_path, sequence_length=512, global_batch_size=1, **given)
    assert len(long_rows.warnings()) == (packing == "split")
    lengths = {"sequence_length": {0: 128, 2: 512}, "repack_at": (2,), "global_batch_size": 1}
    found = open_data(tmp_path, **lengths, **given).warnings()
    assert found == [*long_rows.warnings(), line]


def test_the_remedy_for_an_invalid_message_is_not_another_field(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}')
    with pytest.raises(DataError) as error:
        Dataset(DataConfig(files=str(path), cache_dir=str(tmp_path / "cache")))
    detail = "invalid message: messages[1] has no field 'content'; the fields are role"
    remedy = "correct the file, or use data.on_error=skip"
    assert str(error.value) == f"{path}:1: {detail}; {remedy}"


def test_conversations_without_an_answer_are_counted_in_a_warning(tmp_path) -> None:
    talks = [[("user", "hi"), (role, "a" * 40)] for role in ("assistant", "narrator", "assistant")]
    lines = [{"text": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {"eval_files": None, "eval_fraction": 0, "packing": "best_fit"}
    rows = open_data(tmp_path, sequence_length=128, global_batch_size=1, **given)
    assert rows.warnings() == [
        "data text: 1 of 3 conversations have no text of the role assistant, so nothing of them is "
        "in the loss; check their roles"
    ]
