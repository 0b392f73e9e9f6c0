"""Preference pairs: read in their usual forms, masked but for the answers, never taken apart."""

import json
import re
from itertools import pairwise

import numpy as np
import pyarrow
import pytest
from chats import TEMPLATES, write_model_directory
from pyarrow import parquet
from test_pipeline import OfHost, assert_equal, one_device, rows_over_eight, steps

from data.batch import FIELDS
from data.config import DataConfig
from data.files import DataError
from data.formats.base import Document, read_documents
from data.formats.pieces import plan_pieces
from data.pipeline import Dataset, _ReadLocalRows, eval_batches, local_rows
from data.store import Store

LENGTH, BATCH = 96, 8
TURN = [{"role": "user", "content": "Hé?"}]
YES, NO = ([{"role": "assistant", "content": text}] for text in ("Jó.", "Nem."))
CHOSEN, REJECTED = (("user", "Hé?"), ("assistant", "Jó.")), (("user", "Hé?"), ("assistant", "Nem."))
FORMS = {
    "texts": {"prompt": "Hé?", "chosen": "Jó.", "rejected": "Nem."},
    "answers": {"prompt": TURN, "chosen": YES, "rejected": NO},
    "text and answers": {"prompt": "Hé?", "chosen": YES, "rejected": "Nem."},
    "conversations": {"chosen": TURN + YES, "rejected": TURN + NO},
    "both": {"prompt": "Hé?", "chosen": TURN + YES, "rejected": TURN + NO, "score": 3.5},
    "an empty prompt too": {"prompt": "", "chosen": TURN + YES, "rejected": TURN + NO},
    "sharegpt": {
        "prompt": [{"from": "human", "value": "Hé?"}],
        "chosen": [{"from": "gpt", "value": "Jó."}],
        "rejected": [{"from": "gpt", "value": "Nem."}],
    },
}


def read(path):
    pieces = plan_pieces([str(path)])
    return [d for piece in pieces for part in piece.ranges for d in read_documents(part, None)]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_pair_is_read_alike(tmp_path, form):
    (found,) = read(write(tmp_path / "a.jsonl", [FORMS[form]]))
    assert isinstance(found, Document)
    assert (found.messages, found.rejected) == (CHOSEN, REJECTED)


@pytest.mark.parametrize("form", ["texts", "conversations"])
def test_pairs_of_a_table_are_those_of_json_lines(tmp_path, form):
    records = [FORMS[form] | {"id": n} for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    for found in read(tmp_path / "a.parquet"):
        assert (found.messages, found.rejected) == (CHOSEN, REJECTED)
    parquet.write_table(pyarrow.table({"prompt": ["a"], "chosen": ["b"]}), tmp_path / "b.parquet")
    (fault,) = read(tmp_path / "b.parquet")
    assert fault.detail == "no field 'rejected'; the fields are prompt, chosen"


@pytest.mark.parametrize(
    ("record", "detail"),
    [
        ({"chosen": "a"}, "no field 'rejected'; the fields are chosen"),
        ({"chosen": "a", "rejected": "b"}, "chosen is text, and there is no prompt that it answe"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt is a number, neither text nor a l"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "rejected is empty, neither text nor a l"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "rejected is null, neither text nor a "),
        ({"chosen": TURN + YES, "rejected": TURN}, "the last message of rejected is not the assi"),
        ({"chosen": YES, "rejected": NO}, "chosen begins with the assistant's message, and there "),
        (
            {"chosen": [{"role": "a"}], "rejected": TURN},
            "chosen[0] has no field 'content'; the",
        ),
    ],
)
def test_what_is_no_pair_is_refused_with_its_line(tmp_path, record, detail):
    path = write(tmp_path / "a.jsonl", [FORMS["texts"], record])
    found, fault = read(path)
    assert isinstance(found, Document)
    assert fault.kind == "not a pair" and fault.detail.startswith(detail)
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a pair: .*; correct the file, or use"):
        dataset(tmp_path, on_error="raise")
    rows = dataset(tmp_path, on_error="skip", eval_fraction=0)
    assert "1 preference pair, " in rows.sources[0].summary
    assert "skipped: 1 not a pair" in rows.sources[0].summary


def dataset(folder, **changes) -> Dataset:
    values = {
        "files": str(folder / "*.jsonl"),
        "packing": "pairs",
        "sequence_length": LENGTH,
        "global_batch_size": BATCH,
        "eval_fraction": 0.2,
        "cache_dir": str(folder / "cache"),
    }
    return Dataset(DataConfig(**{**values, **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty-three pairs, two of them with an answer that is too long."""
    folder = tmp_path_factory.mktemp("pairs")
    answers = [("good" * (n % 3 + 1), "bad" * (n % 4 + 1)) for n in range(23)]
    answers[5], answers[9] = ("good" * 30, "bad"), ("good", "bad" * 40)
    write(
        folder / "a.jsonl",
        [{"prompt": f"{n:02d}", "chosen": a, "rejected": b} for n, (a, b) in enumerate(answers)],
    )
    return folder


def text_of(row, name="tokens") -> str:
    ids = row[name][row["segment_ids"] >= 0]
    return bytes(ids[ids < 256].tolist()).decode()


def question(row) -> str:
    return re.search(r"user\n(\d\d)", text_of(row))[1]


def rows_of(batch) -> list[dict]:
    fields = {name: np.asarray(x).reshape(-1, x.shape[-1]) for name, x in batch.items()}
    return [{name: x[n] for name, x in fields.items()} for n in range(len(fields["tokens"]))]


def assert_is_pair(chosen, rejected) -> str:
    assert "good" in text_of(chosen) and "bad" in text_of(rejected)
    assert question(chosen) == question(rejected)
    for row in (chosen, rejected):
        used = row["segment_ids"] >= 0
        assert not np.diff(used.astype(int)).max(initial=0)  # padding comes after the tokens
        np.testing.assert_array_equal(row["positions"][used], np.arange(used.sum()))
        assert set(row["segment_ids"]) <= {0, -1}
        assert row["tokens"][0] == ord("<") and row["loss_mask"].sum() > 3
    return question(chosen)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_epoch_visits_every_pair_once_in_two_rows_of_one_microbatch(folder, accumulation):
    rows = dataset(folder, global_batch_size={0: 8, 3: 4})
    source = rows.sources[0]
    assert source.summary.endswith(
        "; 2 pairs left out: longer than data.sequence_length; conversations in chatml"
    )
    found = []
    for batch in steps(rows, 0, 40, accumulation):
        every = rows_of(batch)
        found += [assert_is_pair(*every[n : n + 2]) for n in range(0, len(every), 2)]
    count = source.num_items
    assert count == 16  # of 21, a fifth is held out
    for epoch in range(3):
        assert len(set(found[epoch * count : (epoch + 1) * count])) == count
    assert found[:count] != found[count : 2 * count]
    assert rows.progress(40)["data/text/epoch"] == pytest.approx(len(found) / count)
    held = [question(source.eval_row(n)) for n in range(source.num_eval)]
    assert held[0::2] == held[1::2] and len(held) == 10
    assert {*held}.isdisjoint(found) and {"05", "09"}.isdisjoint({*held, *found})


def test_a_resumed_order_and_several_hosts_give_the_same_pairs(folder):
    whole = steps(dataset(folder), 0, 12)
    assert_equal(steps(dataset(folder), 5, 12), whole[5:])
    for step, batch in enumerate(whole):
        for host in range(8):  # one row each: pairs are divided among hosts
            held = local_rows(OfHost(rows_over_eight(), host, 8), (1, BATCH, LENGTH))
            _, fields = _ReadLocalRows(dataset(folder), {BATCH: held})(step)
            for name in FIELDS:
                np.testing.assert_array_equal(fields[name], batch[name][0, held])


def test_held_out_pairs_are_padded_by_pairs_without_a_loss(folder):
    source = dataset(folder).sources[0]
    every = [
        row
        for batch in eval_batches(source, one_device(), batch_size=4, limit=9)
        for row in rows_of(batch)
    ]
    assert len(every) == 12
    masks = [bool(row["loss_mask"].any()) for row in every]
    assert masks == [True] * 10 + [False] * 2


def learned(store: Store, tokenizer) -> list[str]:
    """Text in the loss of every document."""
    parts = [slice(a, b) for a, b in pairwise([0, *store.ends[:].tolist()])]
    return [tokenizer.decode(store.tokens[p][store.loss_mask[p] > 0]) for p in parts]


@pytest.mark.parametrize("template", ["chatml of ours", *TEMPLATES])
def test_only_the_answers_after_the_shared_messages_are_in_the_loss(tmp_path, template):
    before = [("user", "one?"), ("assistant", "the cat"), ("user", "and two?")]
    shared = [{"role": role, "content": text} for role, text in before]
    answers = [{"role": "assistant", "content": text} for text in ("sat on", "sat in")]
    record = {"chosen": [*shared, answers[0]], "rejected": [*shared, answers[1]]}
    write(tmp_path / "a.jsonl", [record])
    jinja = None if template == "chatml of ours" else TEMPLATES[template]
    model = write_model_directory(tmp_path / "model", jinja)
    rows = dataset(tmp_path, tokenizer=model, eval_fraction=0)
    found = learned(rows.sources[0].store, rows.tokenizer)
    assert ["cat" in text for text in found] == [False, False]
    assert ["sat on" in found[0], "sat in" in found[1]] == [True, True]


def test_a_template_that_renders_the_shared_messages_differently_is_refused(tmp_path):
    shared = [*TURN, *YES, *TURN]
    write(tmp_path / "a.jsonl", [{"chosen": shared + YES, "rejected": shared + NO}])
    answer = (
        "{% generation %}{{ '<think>' if loop.revindex < 3 }}{{ message['content'] }}<|im_end|>"
    )
    model = write_model_directory(
        tmp_path / "model",
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        + answer
        + "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}",
    )
    with pytest.raises(DataError, match=r"a\.jsonl:1: chat template: the template renders the sha"):
        dataset(tmp_path, tokenizer=model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"files": None},
            r"needs preference pairs; set data\.files to JSON lines, Parquet or a sav",
        ),
        (
            {"files": None, "sources": {"a": {}}},
            r"needs preference pairs; set data\.sources\.a\.files to JSON lines",
        ),
        ({"files": __file__}, r"hold texts; give JSON lines, Parquet or a saved dataset"),
        (
            {"global_batch_size": 7},
            r"global_batch_size=7 is odd, but with .* two rows; use an ev",
        ),
        (
            {"sequence_length": {0: 48, 9: 96}},
            r"which data.packing=pairs does not support; give",
        ),
        ({"sequence_length": 20}, r"0 of 23 preference pairs fit data.sequence_length=20, too few"),
        (
            {"files": None, "sources": {"a": {"files": "x", "field": "text_b"}}},
            r"data.sources.a.field=text_b has no effect with data.packing=pairs",
        ),
    ],
)
def test_settings_that_do_not_go_with_pairs_are_refused(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        dataset(folder, **changes)


def test_a_prepared_store_is_opened_only_as_what_it_holds(folder, tmp_path):
    pairs = dataset(folder)
    again = dataset(folder, files=str(pairs.sources[0].store.folder))
    assert again.order(0) == pairs.order(0)
    with pytest.raises(DataError, match=r"holds preference pairs; set data\.packing=pairs"):
        dataset(folder, files=str(pairs.sources[0].store.folder), packing="split")
    chat = {"text": [*TURN, *YES]}
    write(tmp_path / "a.jsonl", [chat] * 3)
    chats = dataset(tmp_path, packing="split")
    with pytest.raises(DataError, match=r"holds no preference pairs; prepare it again with data\."):
        dataset(tmp_path, files=str(chats.sources[0].store.folder))
