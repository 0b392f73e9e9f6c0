"""BOS and every EOS of a model directory: in documents, in runs, and nowhere else."""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from chats import BOS, CHATML, EOS, SPECIAL, TURN_END, write_model_directory

from data.config import DataConfig, SourceConfig
from data.files import DataError
from data.order_changes import explain_change
from data.pipeline import Dataset
from data.store import INFO, Encoding
from data.store_job import StoreJob, store_job
from data.tokenizers.base import (
    document_bos,
    open_tokenizer,
    save_tokenizer,
    saved_tokenizer,
    without_ends,
)
from data.tokenizers.byte_level import ByteTokenizer
from data.tokenizers.settings import TokenizerSettings

BOS_ID, EOS_ID, TURN_ID = (SPECIAL.index(token) for token in (BOS, EOS, TURN_END))


def dataset(tmp_path, tokenizer: str, **settings) -> Dataset:
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    (tmp_path / "b.txt").write_text("what is one and one?")
    given = {"sequence_length": 8, "eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache")}
    return Dataset(
        DataConfig(files=str(tmp_path / "*.txt"), tokenizer=tokenizer, **given, **settings)
    )


def test_tokenizer_config_overrides_the_older_map_of_special_tokens():
    files = {
        "special_tokens_map.json": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": None},
        "tokenizer_config.json": {"eos_token": "<end>", "bos_token": {"content": "<s>"}},
    }
    settings = TokenizerSettings({name: json.dumps(content) for name, content in files.items()})
    wanted = {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<pad>"}
    assert settings.special_tokens == wanted


@pytest.mark.parametrize(
    ("adds_bos", "settings", "wanted"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
        (True, {"bos_token": None}, False),
        (True, {"bos_token": {"content": BOS, "special": True}}, True),
    ],
)
def test_documents_begin_with_bos_as_the_tokenizer_itself_says(
    tmp_path, adds_bos, settings, wanted
):
    folder = write_model_directory(tmp_path / "model", adds_bos=adds_bos, **settings)
    tokenizer = open_tokenizer(folder)
    assert tokenizer.adds_bos == wanted
    assert document_bos(tokenizer, "auto") == (BOS_ID if wanted else None)
    assert not set(tokenizer.encode(f"the {BOS}").tolist()) & {BOS_ID, EOS_ID}


def test_every_document_of_a_store_is_between_bos_and_eos(tmp_path):
    rows = dataset(tmp_path, write_model_directory(tmp_path / "model"))
    store, tokenizer = rows.sources[0].store, rows.tokenizer
    first, last = np.split(store.tokens[:], store.ends[:1])
    for part, text in ((first, "the cat sat on the mat"), (last, "what is one and one?")):
        assert part.tolist() == [BOS_ID, *tokenizer.encode(text), EOS_ID]


def test_add_bos_overrides_the_tokenizer_and_decides_the_store(tmp_path):
    folder = write_model_directory(tmp_path / "model")
    with_it, without = (dataset(tmp_path, folder, add_bos=value) for value in ("auto", False))
    assert BOS_ID not in without.sources[0].store.tokens[:]
    assert with_it.sources[0].store.folder != without.sources[0].store.folder
    change = explain_change(without.order(0), with_it.order(0))
    assert change.endswith(f"data.add_bos was None, is now {BOS_ID}")
    with pytest.raises(DataError, match=r"data\.add_bos=true, but .*=bytes has no BOS"):
        dataset(tmp_path, "bytes", add_bos=True)


def test_a_tokenizer_json_alone_has_no_bos_and_keeps_its_stores(tmp_path):
    folder = write_model_directory(tmp_path / "model", "{{ messages }}")
    alone = open_tokenizer(f"{folder}/tokenizer.json")
    assert (alone.bos_id, alone.adds_bos, alone.eos_ids) == (None, False, (EOS_ID,))
    assert alone.digest == open_tokenizer(folder).digest
    source = SourceConfig(files=__file__)
    config = DataConfig(files=__file__)
    for tokenizer in (ByteTokenizer(), alone):
        plain = StoreJob("text", source, tokenizer, "raise")
        assert store_job("text", config, tokenizer).key == plain.key


def forget_encoding(folder) -> None:
    """Rewrite store.json as versions wrote it that did not record the encoding."""
    info = json.loads((folder / INFO).read_bytes())
    del info["encoding"], info["checksum"]
    digest = hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()
    (folder / INFO).write_text(json.dumps(info | {"checksum": digest}))


@pytest.mark.parametrize("is_old", [False, True])
def test_a_prepared_store_without_bos_is_refused_by_a_tokenizer_that_adds_it(tmp_path, is_old):
    folder = write_model_directory(tmp_path / "model")
    rows = dataset(tmp_path, folder, add_bos=False)
    store = rows.sources[0].store
    if is_old:
        forget_encoding(store.folder)
    given = {"files": str(store.folder), "tokenizer": folder, "sequence_length": 8}
    with pytest.raises(
        DataError, match=r"without BOS before .* with BOS id 1; prepare it again, or"
    ):
        Dataset(DataConfig(**given, eval_fraction=0))
    again = Dataset(DataConfig(**given, eval_fraction=0, add_bos=False))
    assert again.order(0)["sources"] == rows.order(0)["sources"]


def test_a_prepared_store_with_bos_is_refused_where_none_is_wanted(tmp_path):
    folder = write_model_directory(tmp_path / "model")
    store = dataset(tmp_path, folder).sources[0].store
    assert store.info.encoding == Encoding(bos_id=BOS_ID, chat_template="chatml")
    config = DataConfig(files=str(store.folder), tokenizer=folder, add_bos=False)
    message = r"with BOS id 1 before its documents, .* without BOS; .*, or set data\.add_bos=true$"
    with pytest.raises(DataError, match=message):
        Dataset(config)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_prepared_store_of_chats_is_opened_whether_or_not_its_template_renders_bos(
    tmp_path, is_old
):
    pytest.importorskip("jinja2")
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': chat})}\n" * 9)
    folder = write_model_directory(tmp_path / "model", CHATML)
    given = {"tokenizer": folder, "sequence_length": 16, "eval_fraction": 0.2}
    given["cache_dir"] = str(tmp_path / "cache")
    first = Dataset(DataConfig(files=str(tmp_path / "a.jsonl"), **given))
    store = first.sources[0].store
    assert first.bos_id == BOS_ID != store.tokens[0]
    if is_old:
        forget_encoding(store.folder)
    again = Dataset(DataConfig(files=str(store.folder), **given))
    assert again.order_hash(0) == first.order_hash(0)
    if not is_old:
        with pytest.raises(
            DataError, match=r"chat template \w{16}, but data\.chat_template is cha"
        ):
            Dataset(DataConfig(files=str(store.folder), **given, chat_template="chatml"))


def test_generation_ends_at_every_eos_of_the_files(tmp_path):
    generation = {"eos_token_id": [TURN_ID, SPECIAL.index("<|im_end|>"), 10**6]}
    folder = write_model_directory(tmp_path / "model", generation=generation)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    ids = open_tokenizer(folder).eos_ids
    assert ids == (EOS_ID, TURN_ID, SPECIAL.index("<|im_end|>"))
    assert ByteTokenizer().eos_ids == (256,)


def test_the_end_of_documents_is_the_usual_one_even_if_the_settings_name_another(tmp_path):
    assert open_tokenizer(write_model_directory(tmp_path / "a")).eos_id == EOS_ID
    folder = write_model_directory(tmp_path / "b")
    path = tmp_path / "b" / "tokenizer.json"
    path.write_text(path.read_text().replace(EOS, "<|unusual|>"))
    assert open_tokenizer(folder).eos_id == TURN_ID
    settings = tmp_path / "b" / "tokenizer_config.json"
    settings.write_text(json.dumps({"bos_token": BOS}))
    (tmp_path / "b" / "config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, TURN_ID]}))
    assert open_tokenizer(folder).eos_id == EOS_ID


def test_a_run_keeps_the_files_beside_the_tokenizer(tmp_path):
    given = open_tokenizer(
        write_model_directory(tmp_path / "model", "t", generation={"top_p": 0.5})
    )
    save_tokenizer(given, tmp_path / "run")
    kept = open_tokenizer(str(saved_tokenizer(tmp_path / "run", "folder")))
    for name in ("digest", "bos_id", "adds_bos", "eos_ids", "settings"):
        assert getattr(kept, name) == getattr(given, name)
        assert getattr(pickle.loads(pickle.dumps(given)), name) == getattr(given, name)
    assert kept.settings.sampling == {"top_p": 0.5} and kept.settings.chat_template == "t"
    save_tokenizer(ByteTokenizer(), tmp_path / "plain")
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["tokenizer.json"]
    assert saved_tokenizer(tmp_path / "plain", "plain").name == "tokenizer.json"
    assert saved_tokenizer(tmp_path, "folder") is None


def test_another_tokenizer_in_the_same_run_leaves_nothing_of_the_first(tmp_path):
    run, folders = tmp_path / "run", {}
    for name, options in (("one", {"template": "t", "generation": {"top_p": 0.5}}), ("two", {})):
        folders[name] = write_model_directory(tmp_path / name, **options)
    content = json.loads((tmp_path / "two" / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "two" / "tokenizer.json").write_text(json.dumps(content))
    alone = tmp_path / "alone"  # without settings
    alone.mkdir()
    (alone / "tokenizer.json").write_text(json.dumps(content))
    for used in (folders["two"], str(alone)):
        save_tokenizer(open_tokenizer(folders["one"]), run)
        given = open_tokenizer(used)
        save_tokenizer(given, run)
        found = open_tokenizer(str(saved_tokenizer(run, used)))
        assert found.digest == given.digest and found.settings == given.settings


@pytest.mark.parametrize(("name", "content"), [("config.json", "{"), ("config.json", "[]")])
def test_damaged_settings_are_one_line(tmp_path, name, content):
    folder = write_model_directory(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"config\.json .*; download it again"):
        open_tokenizer(folder)


def test_the_bos_and_the_stop_id_are_no_part_of_a_generated_text():
    ids = np.array([1, 5, 6, 2])
    assert without_ends(ids, 1, (2, 3)).tolist() == [5, 6]
    assert without_ends(ids, None, (3,)).tolist() == [1, 5, 6, 2]


def test_an_end_that_only_the_settings_name_cannot_be_spelled_by_text(tmp_path):
    """Here and in a worker process, which gets a pickled tokenizer."""
    folder = Path(write_model_directory(tmp_path))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != EOS]
    for token in content["added_tokens"]:
        token["special"] &= token["content"] != TURN_END
    (folder / "tokenizer.json").write_text(json.dumps(content))
    found = open_tokenizer(str(folder))
    assert found.eos_id == TURN_ID and TURN_END in found.special_tokens
    assert TURN_ID not in found.encode(f"a {TURN_END} b")
    again = pickle.loads(pickle.dumps(found))
    assert again.digest == found.digest
    assert again.encode(f"a {TURN_END} b").tolist() == found.encode(f"a {TURN_END} b").tolist()


@pytest.mark.parametrize("name", ["bytes", "tokenizer.json"])
def test_a_run_with_another_tokenizer_than_its_imported_model_is_opened_with_it(tmp_path, name):
    folder = write_model_directory(tmp_path / "model", "t")
    save_tokenizer(open_tokenizer(folder), tmp_path / "run")  # as an import does
    used = "bytes" if name == "bytes" else f"{folder}/{name}"
    save_tokenizer(open_tokenizer(used), tmp_path / "run")
    saved = saved_tokenizer(tmp_path / "run", used)
    assert saved == tmp_path / "run" / "tokenizer.json"
    assert open_tokenizer(str(saved)).digest == open_tokenizer(used).digest
