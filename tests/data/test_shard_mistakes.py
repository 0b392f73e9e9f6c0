"""What must not happen to a store in shards: mixed settings, lost plans, held-out files."""

import json
import resource
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from test_sharded_stores import (
    PIECE_BYTES,
    ROWS,
    batches,
    content,
    dataset,
    job_of,
    joined,
    shards,
    write_texts,
)

from data.chat import ChosenTemplate, chatml
from data.config import DataConfig, SourceConfig
from data.engine import run_tasks
from data.files import DataError
from data.formats.pieces import plan_pieces
from data.packed_store import PackSettings
from data.pipeline import Dataset
from data.prepare import build
from data.prepared_store import prepared_folder
from data.sharded_store import ShardedRows, ShardedStore
from data.store import INFO
from data.store_job import StoreJob, identity_of, without_files
from data.tokenizers.byte_level import ByteTokenizer


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    for name in ("data.prepare.plan_pieces", "data.shard_plan.plan_pieces"):
        monkeypatch.setattr(name, partial(plan_pieces, piece_bytes=PIECE_BYTES))


class Killed(BaseException):
    pass


def killed_at_once(pieces, settings):
    raise Killed
    yield


def test_a_part_that_has_made_nothing_is_replaced_under_the_same_rules(tmp_path) -> None:
    folder = tmp_path / "store"
    shards(job_of(write_texts(tmp_path / "one")), folder)
    with pytest.raises(Killed):
        shards(job_of(write_texts(tmp_path / "two")), folder, append=True, engine=killed_at_once)
    third = job_of(write_texts(tmp_path / "three", 3))
    with pytest.raises(DataError, match="add --append to add these files"):
        shards(third, folder)
    with pytest.raises(DataError, match="has another BOS before its documents"):
        shards(replace(third, bos_id=5), folder, append=True)
    assert shards(third, folder, append=True).num_documents == 20 + 11


def test_what_was_made_for_a_plan_that_was_given_up_is_never_published(
    tmp_path, monkeypatch
) -> None:
    one, two = (job_of(write_texts(tmp_path / name)) for name in ("one", "two"))
    wanted = content(shards(one, tmp_path / "wanted", 300).folder)
    folder = tmp_path / "store"

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("data.shard_writer.move_folder", killed)
        shards(one, folder, 120)  # its first shard is whole, and not in its place
    with pytest.raises(Killed):
        shards(two, folder, 120, engine=killed_at_once)
    assert content(shards(one, folder, 300).folder) == wanted


def test_a_shard_that_is_made_again_has_the_rows_of_every_setting(tmp_path) -> None:
    job, folder = job_of(write_texts(tmp_path / "one")), tmp_path / "store"
    longer = replace(ROWS, row_length=2 * ROWS.row_length)
    for rows in (ROWS, longer):
        shards(job, folder, rows=rows)
    wanted = content(folder)
    for rows, other in ((ROWS, longer), (longer, ROWS)):
        shutil.rmtree(folder / "shards" / "00000-00001")
        shards(job, folder, rows=rows)
        with pytest.raises(DataError, match="has no rows for these settings"):
            ShardedRows(ShardedStore(folder), other)
        shards(job, folder, rows=other)
        assert content(folder) == wanted
        for settings in (ROWS, longer):
            read = ShardedRows(ShardedStore(folder), settings)
            for row in range(read.train.num_rows):
                store, packed, number = read.train.locate(row)
                assert len(store.tokens) and number < packed.num_rows


def test_everything_that_has_no_rows_of_the_wanted_length_is_named(tmp_path) -> None:
    folder, longer = tmp_path / "store", replace(ROWS, row_length=2 * ROWS.row_length)
    one, two, three = (job_of(write_texts(tmp_path / name)) for name in ("one", "two", "three"))
    for job in (one, two, three):
        shards(job, folder, append=job is not one)
    shards(two, folder, append=True, rows=longer)
    with pytest.raises(DataError) as error:
        ShardedRows(ShardedStore(folder), longer)
    named = [name in str(error.value) for name in ("/one", "/two", "/three")]
    assert named == [True, False, True], error.value


def test_a_run_notices_that_a_preparation_was_begun_anew(tmp_path) -> None:
    folder = tmp_path / "store"
    with pytest.raises(Killed):
        shards(job_of(write_texts(tmp_path / "one")), folder, in_order=True, engine=killed_at_once)
    waiting = ShardedStore(folder)
    waiting.refresh()
    shards(job_of(write_texts(tmp_path / "two", 3)), folder, in_order=True)
    with pytest.raises(DataError, match="has changed since the start of this run: the store was"):
        waiting.refresh()
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="or deleted; start the run again"):
        waiting.refresh()


def test_a_store_that_was_replaced_meanwhile_is_left_alone(tmp_path) -> None:
    """As by a command on another machine, which no lock keeps away."""
    folder = tmp_path / "store"

    def replaced(pieces, settings):
        yield from run_tasks(pieces[:1], settings)
        shutil.rmtree(folder / "parts")
        with pytest.raises(Killed):
            shards(two, tmp_path / "other", engine=killed_at_once)
        shutil.copytree(tmp_path / "other" / "parts", folder / "parts")
        yield from run_tasks(pieces[1:], settings)

    one, two = (job_of(write_texts(tmp_path / name)) for name in ("one", "two"))
    with pytest.raises(DataError, match=r"00000\.json has changed since this command began"):
        shards(one, folder, engine=replaced)
    assert not (folder / "shards").exists()


def test_what_is_missing_is_named_at_the_start_with_its_files(tmp_path) -> None:
    one, two = (job_of(write_texts(tmp_path / name)) for name in ("one", "two"))
    folder = tmp_path / "store"
    shards(one, folder)
    shards(two, folder, append=True)
    shutil.rmtree(folder / "shards" / "00000-00001")
    missing = rf"shard 00000-00001 is missing; .* from data\.files={tmp_path}/one/"
    for attempt in (partial(ShardedStore, folder), partial(shards, two, folder)):
        with pytest.raises(DataError, match=missing):
            attempt()
    shards(one, folder)
    ShardedStore(folder).verify()


def test_packed_rows_are_verified(tmp_path) -> None:
    store = shards(job_of(write_texts(tmp_path / "one")), tmp_path / "store")
    (rows,) = (store.folder / "shards" / "00000-00001" / "packs").glob("*/rows.bin")
    content = bytearray(rows.read_bytes())
    content[-3] ^= 1
    rows.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.bin: .*00000-00001, and run the command that prep"):
        ShardedStore(store.folder).verify()
    shutil.rmtree(rows.parent.parent)
    with pytest.raises(DataError, match=r"pack\.json: .*delete .*00000-00001"):
        ShardedStore(store.folder).verify()


def test_changed_files_are_not_added_a_second_time(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "one"), tmp_path / "store"
    shards(job_of(source), folder)
    (tmp_path / "one" / "000.txt").write_text("changed")
    for append in (False, True):
        with pytest.raises(DataError, match="one of these files or a setting has changed since"):
            shards(job_of(source), folder, append=append)


def test_a_command_that_is_refused_writes_nothing(tmp_path) -> None:
    source = write_texts(tmp_path / "one")
    before = content(tmp_path)
    for folder in ("one", "new"):
        with pytest.raises(DataError, match=r"holds other files|is no store in shards yet"):
            shards(job_of(source), tmp_path / folder, append=True)
    assert content(tmp_path) == before and not (tmp_path / "new").exists()
    assert not (tmp_path / "one" / "building").exists()


def test_a_folder_of_texts_named_building_is_left_alone(tmp_path) -> None:
    (tmp_path / "texts" / "building").mkdir(parents=True)
    assert prepared_folder(str(tmp_path / "texts")) is None
    assert not [*(tmp_path / "texts" / "building").iterdir()]


def test_a_held_out_file_of_the_hub_is_known_at_every_revision() -> None:
    place, name = "hf://datasets/someone/stories", "data/validation-0.parquet"
    pinned = f"{place}@{40 * 'a'}/{name}"
    with pytest.raises(DataError, match="is one of eval_files"):
        without_files([f"{place}/{name}"], frozenset({identity_of(pinned)}), "data.files")
    assert identity_of(pinned) != identity_of(pinned.replace("stories", "other"))


def test_the_plan_of_a_complete_part_stays_when_all_its_shards_are_deleted(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "one"), tmp_path / "store"
    wanted = content(shards(job_of(source), folder).folder)
    shutil.rmtree(folder / "shards")
    with pytest.raises(DataError, match="add --append"):
        shards(job_of(write_texts(tmp_path / "two")), folder)
    shards(job_of(source), folder)
    assert content(folder) == wanted


def test_held_out_files_are_found_in_shards_that_come_later(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "input", 20), tmp_path / "store"
    opened: list[Dataset] = []
    held = str(tmp_path / "input" / "019.txt")
    config = DataConfig(
        files=str(folder), eval_files=held, sequence_length=16, global_batch_size=2,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip

    def watch(done: int, total: int, tokens: int) -> None:
        if not opened and (folder / "shards").exists() and any((folder / "shards").iterdir()):
            opened.append(Dataset(config))

    rows = replace(ROWS, eval_fraction=0.0)
    shards(job_of(source), folder, in_order=True, report=watch, rows=rows)
    with pytest.raises(DataError, match=r"019\.txt, which is one of eval_files"):
        opened[0].refresh()
    assert opened[0].is_growing


def test_another_chat_template_is_found_with_the_first_chat_that_comes_later(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "input", 20), tmp_path / "store"
    talk = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "input" / "talk.jsonl").write_text(json.dumps({"text": talk}))
    opened: list[Dataset] = []
    config = DataConfig(
        files=str(folder), eval_fraction=0.0, sequence_length=16, global_batch_size=2,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip

    def watch(done: int, total: int, tokens: int) -> None:
        if not opened and (folder / "shards").exists() and any((folder / "shards").iterdir()):
            opened.append(Dataset(config))

    job = replace(job_of(source), chat_template=ChosenTemplate("other", chatml, "other"))
    rows = replace(ROWS, eval_fraction=0.0)
    shards(job, folder, in_order=True, report=watch, rows=rows)
    message = "was prepared with chat template other, but data.chat_template is chatml"
    with pytest.raises(DataError, match=message):
        opened[0].refresh()
    with pytest.raises(DataError, match=message):
        Dataset(config)


def test_pairs_that_fit_no_row_are_no_damage(tmp_path) -> None:
    (tmp_path / "input").mkdir()
    for name, length in (("a", 2), ("b", 500)):
        pair = {"prompt": "one?", "chosen": "t" * length, "rejected": "no"}
        (tmp_path / "input" / f"{name}.jsonl").write_text((json.dumps(pair) + "\n") * 4)
    job = replace(job_of(SourceConfig(files=f"{tmp_path}/input/*")), is_paired=True)
    rows = PackSettings(row_length=128, packing="pairs", eval_fraction=0.0)
    folder = shards(job, tmp_path / "store", 1, rows=rows).folder
    store = ShardedStore(folder)
    assert [record.name != "" for record in ShardedRows(store, rows)._records].count(False) > 0
    store.verify()


def test_a_store_in_a_list_of_files_is_refused(tmp_path) -> None:
    source = write_texts(tmp_path / "input")
    store = build(job_of(source), tmp_path / "whole").folder
    sharded = shards(job_of(source), tmp_path / "sharded").folder
    for folder in (store, sharded):
        job = job_of(SourceConfig(files=(source.files, str(folder))))
        with pytest.raises(
            DataError, match=f"{folder} is a prepared store and cannot be part of a list"
        ):
            assert job.paths


def test_a_store_that_grows_is_no_evaluation(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "input", 20), tmp_path / "store"
    (tmp_path / "a.txt").write_text("text " * 99)
    errors: list[str] = []

    def watch(done: int, total: int, tokens: int) -> None:
        if not errors and (folder / "shards").exists() and any((folder / "shards").iterdir()):
            with pytest.raises(DataError) as error:
                Dataset(
                    DataConfig(
                        files=str(tmp_path / "a.txt"), eval_files=str(folder), sequence_length=16,
                        cache_dir=str(tmp_path / "cache"),
                    )
                )  # fmt: skip
            errors.append(str(error.value))

    rows = replace(ROWS, eval_fraction=0.0)
    shards(job_of(source), folder, in_order=True, report=watch, rows=rows)
    assert "is still being prepared, and held-out files must be complete" in errors[0]


def test_the_first_shard_with_enough_text_holds_some_out(tmp_path) -> None:
    (tmp_path / "input").mkdir()
    for n, text in enumerate(["", "", "x", *["long enough to be held out " * 9] * 3]):
        (tmp_path / "input" / f"{n}.txt").write_text(text)
    job = job_of(SourceConfig(files=f"{tmp_path}/input/*"))
    store = shards(job, tmp_path / "store", 1, in_order=True)
    source = dataset(store.folder, tmp_path).sources[0]
    held = [row.info["held_out_rows"] for row in source.packed._records]
    assert source.num_eval and sum(count > 0 for count in held) == 1 and not held[0]
    few = tmp_path / "few"
    few.mkdir()
    (few / "a.txt").write_text("")
    (few / "b.txt").write_text("x")
    with pytest.raises(DataError, match="no shard has enough text to hold out"):
        shards(job_of(SourceConfig(files=f"{few}/*")), tmp_path / "small", 1)


def test_many_shards_need_few_open_files(tmp_path) -> None:
    store = shards(job_of(write_texts(tmp_path / "input", 60)), tmp_path / "store", 1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert len(store.shards) > 50
    used = len([*Path("/proc/self/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 200, before[1]))
    try:
        data = dataset(store.folder, tmp_path)
        batches(data, 100)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert len([*Path("/proc/self/fd").iterdir()]) < limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_many_sources_in_shards_share_the_open_files(tmp_path, monkeypatch) -> None:
    folder = shards(job_of(write_texts(tmp_path / "input", 60)), tmp_path / "store", 1).folder
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len([*Path("/proc/self/fd").iterdir()]) + 300
    for module in ("data.pipeline", "data.sharded_store"):  # as where no more are allowed
        monkeypatch.setattr(f"{module}.allow_open_files", lambda count: limit)
    config = DataConfig(
        sources={f"s{n}": SourceConfig(files=str(folder)) for n in range(8)}, sequence_length=16,
        eval_fraction=0.05, global_batch_size=8, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        batches(Dataset(config), 60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_source_in_shards_may_join_a_run_later(tmp_path) -> None:
    one = shards(job_of(write_texts(tmp_path / "one")), tmp_path / "a").folder
    two = shards(job_of(write_texts(tmp_path / "two", 4)), tmp_path / "b").folder

    def of(sources: dict[str, dict]) -> Dataset:
        return Dataset(
            DataConfig(
                sources={name: SourceConfig(**given) for name, given in sources.items()},
                sequence_length=16, eval_fraction=0.05, cache_dir=str(tmp_path / "cache"),
            )
        )  # fmt: skip

    first = {"a": {"files": str(one)}}
    both = {**first, "b": {"files": str(two), "weight": {0: 0, 100: 1}}}
    assert of(first).order(10) == of(both).order(10) != of(both).order(101)


def test_work_that_is_half_done_is_done_again(tmp_path) -> None:
    (tmp_path / "input").mkdir()
    for n, text in enumerate(["text " * 30, "", "more " * 30]):
        (tmp_path / "input" / f"{n}.txt").write_text(text)
    job, folder = job_of(SourceConfig(files=f"{tmp_path}/input/*")), tmp_path / "store"
    wanted = content(shards(job, tmp_path / "whole", 1).folder)
    with pytest.raises(Killed):
        shards(job, folder, 1, engine=killed_at_once)
    (work,) = [path for path in (folder / "building").iterdir() if path.is_dir()]
    (work / "00000-00001").mkdir()  # made, and empty
    (work / "00000-00002.done").mkdir()
    assert content(shards(job, folder, 1).folder) == wanted


def test_other_tokens_than_before_are_refused_until_they_are_the_same(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "input"), tmp_path / "store"
    wanted = content(shards(job_of(source), folder).folder)
    shutil.rmtree(folder / "shards" / "00000-00001")

    def changed(pieces, settings):
        for documents, skipped in run_tasks(pieces, settings):
            yield [replace(part, tokens=part.tokens[::-1].copy()) for part in documents], skipped

    with pytest.raises(DataError, match="holds other tokens than before"):
        shards(job_of(source), folder, engine=changed)
    assert content(shards(job_of(source), folder).folder) == wanted


def test_files_that_change_after_the_first_shard_have_a_remedy(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "input"), tmp_path / "store"

    def engine(pieces, settings):
        for number, shard in enumerate(run_tasks(pieces, settings)):
            if number == 5:
                (tmp_path / "input" / "005.txt").write_text("another text")
            yield shard

    with pytest.raises(DataError, match=r"restore it, or delete .*store and prepare it again"):
        shards(job_of(source), folder, engine=engine)
    with pytest.raises(DataError, match=r"is not complete, .* delete .*store and prepare it again"):
        shards(job_of(source), folder, append=True)


def test_skipped_documents_of_another_part_are_no_error_of_this_one(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "input"), tmp_path / "store"
    (tmp_path / "input" / "x.jsonl").write_text('{"text": "a"}\n{"text": \n')
    shards(job_of(source, on_error="skip"), folder)
    store = shards(job_of(write_texts(tmp_path / "two", 3)), folder, append=True)
    assert len(store.parts) == 2 and store.skipped["invalid JSON"].count == 1


def test_a_wrong_field_is_named_although_its_documents_are_skipped(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 9)
    job = job_of(SourceConfig(files=f"{tmp_path}/a.jsonl"), on_error="skip")
    with pytest.raises(DataError, match="no document has a token; skipped: 9 missing field"):
        shards(job, tmp_path / "store")


def test_a_folder_with_other_files_is_not_taken(tmp_path) -> None:
    source = write_texts(tmp_path / "input")
    with pytest.raises(DataError, match="holds other files, such as"):
        shards(job_of(source), tmp_path / "input")
    whole = build(job_of(source), tmp_path / "whole")
    with pytest.raises(DataError, match=r"holds other files, such as .*choose another folder"):
        shards(job_of(source), whole.folder)
    assert (whole.folder / INFO).exists() and not (whole.folder / "parts").exists()


def test_another_store_than_that_of_the_run_is_named(tmp_path) -> None:
    folder = tmp_path / "store"
    shards(job_of(write_texts(tmp_path / "one")), folder)
    shards(job_of(write_texts(tmp_path / "two", 3)), folder, append=True)
    other = shards(job_of(write_texts(tmp_path / "three", 3)), tmp_path / "other")
    with pytest.raises(DataError, match="has 1 part, but the run was trained on 2; name the store"):
        ShardedStore(other.folder, num_parts=2)


def test_damaged_rows_of_a_shard_are_mended_with_the_shard(tmp_path) -> None:
    source, folder = write_texts(tmp_path / "input"), tmp_path / "store"
    wanted = content(shards(job_of(source), folder).folder)
    shard = folder / "shards" / "00000-00001"
    (rows,) = (shard / "packs").glob("*/rows.bin")
    rows.write_bytes(bytes(len(rows.read_bytes())))
    with pytest.raises(DataError, match=rf"differ from what was written; delete {shard}, and run"):
        batches(dataset(folder, tmp_path), 100)
    shutil.rmtree(shard)
    shards(job_of(source), folder)
    assert content(folder) == wanted


def test_jobs_of_other_tokenizers_have_other_parts(tmp_path) -> None:
    class Other(ByteTokenizer):
        digest = "another"

    source, folder = write_texts(tmp_path / "input"), tmp_path / "store"
    store = shards(job_of(source), folder)
    job = StoreJob("text", write_texts(tmp_path / "two"), Other(), "raise")
    with pytest.raises(DataError, match="was made with tokenizer bytes; set"):
        shards(job, folder, append=True)
    assert joined(ShardedStore(folder)) == joined(store)
