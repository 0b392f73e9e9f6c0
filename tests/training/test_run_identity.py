"""A run directory that was copied, moved or mixed with another is noticed for what it is."""

import shutil
import socket
from pathlib import Path

import pytest
from conftest import slow
from runs import losses, read_lines, run

from training import run_identity
from training.checkpoint_record import read_record
from training.logs import log
from training.run_identity import identify_run


@pytest.fixture
def made(tmp_path) -> Path:
    """A run directory with an identity."""
    (tmp_path / "run").mkdir()
    assert identify_run(tmp_path / "run")[1] is None
    return tmp_path / "run"


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *values: lines.append(text % values))
    return lines


def test_a_directory_that_stays_keeps_its_id_also_on_another_host(made, monkeypatch):
    before, _ = identify_run(made)
    monkeypatch.setattr(run_identity.socket, "gethostname", lambda: "other")
    now, line = identify_run(made)
    assert line is None and now.run_id == before.run_id
    assert (now.host, now.directory) == ("other", str(made))
    assert identify_run(made) == (now, None)


def test_two_runs_have_two_ids(made, tmp_path):
    (tmp_path / "other").mkdir()
    assert identify_run(made)[0].run_id != identify_run(tmp_path / "other")[0].run_id


def test_a_copy_is_a_run_of_its_own_that_names_the_original(made, tmp_path):
    original = identify_run(made)[0]
    (made / "trackers.json").write_text("{}")
    shutil.copytree(made, tmp_path / "copy")
    copy, line = identify_run(tmp_path / "copy")
    # Trackers show the copy as a run of its own.
    assert (made / "trackers.json").exists() and not (tmp_path / "copy/trackers.json").exists()
    assert copy.run_id != original.run_id and copy.origins == (original.run_id,)
    assert line == (
        f"run directory {tmp_path}/copy was copied from {original.host}:{made} (run "
        f"{original.run_id}); it continues as run {copy.run_id}"
    )
    # Said once; the original does not change; a copy of the copy has both as origins.
    assert identify_run(tmp_path / "copy") == (copy, None)
    assert identify_run(made) == (original, None)
    shutil.copytree(tmp_path / "copy", tmp_path / "third")
    assert identify_run(tmp_path / "third")[0].origins == (original.run_id, copy.run_id)


def test_a_renamed_directory_is_the_same_run(made, tmp_path):
    before = identify_run(made)[0]
    made.rename(tmp_path / "renamed")
    now, line = identify_run(tmp_path / "renamed")
    assert now.run_id == before.run_id and not now.origins
    assert line == f"run directory {tmp_path}/renamed was moved from {before.host}:{made}"
    assert identify_run(tmp_path / "renamed") == (now, None)


def test_a_copy_whose_original_cannot_be_seen_is_a_run_of_its_own(made, tmp_path):
    before = identify_run(made)[0]
    shutil.copytree(made, tmp_path / "copy")
    shutil.rmtree(made)
    now, line = identify_run(tmp_path / "copy")
    assert now.run_id != before.run_id and now.origins == (before.run_id,)
    assert f"was copied or moved from {before.host}:{made}" in line


def test_another_name_of_the_same_directory_does_not_matter(made, tmp_path, monkeypatch):
    before = identify_run(made)[0]
    (tmp_path / "link").symlink_to(made)
    assert identify_run(tmp_path / "link") == (before, None)
    # As a second mount point, of which resolve knows nothing.
    monkeypatch.setattr(Path, "resolve", lambda self: self)
    now, line = identify_run(tmp_path / "link")
    assert line is None and now.run_id == before.run_id


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run_id": "1"}', "\0" * 100])
def test_a_damaged_identity_is_replaced_with_a_warning(made, warnings, text):
    before = identify_run(made)[0]
    (made / "run.json").write_text(text)
    now, line = identify_run(made)
    assert line is None and now.run_id != before.run_id
    (warning,) = warnings
    assert warning.startswith(f"{made}/run.json is not readable (") and "gets a new id" in warning
    assert identify_run(made) == (now, None)


def test_only_a_checkpoint_of_another_run_is_warned_about(made, tmp_path, warnings):
    original = identify_run(made)[0]
    shutil.copytree(made, tmp_path / "copy")
    copy = identify_run(tmp_path / "copy")[0]
    copy.check_record({"step": 1, "run_id": copy.run_id})
    copy.check_record({"step": 1, "run_id": original.run_id})
    copy.check_record({"step": 1})  # of an earlier version
    original.check_record({"step": 2, "run_id": original.run_id})
    assert warnings == []
    original.check_record({"step": 3, "run_id": copy.run_id})
    assert warnings == [
        f"checkpoint 3 was saved by run {copy.run_id}, and this is run {original.run_id}: the "
        "directory holds files of two runs; training continues from that checkpoint"
    ]


def test_a_copied_run_trains_on_bit_equal_and_leaves_the_original_alone(
    undisturbed, half, tmp_path
):
    original, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(original, copy)  # with its lock file
    assert run(half, f"run.dir={copy}") == 0
    assert losses(copy) == losses(undisturbed / "run")
    assert list(losses(original)) == [1, 2, 3]
    log_of = (copy / "log.txt").read_text()
    assert log_of.count(f"run directory {copy} was copied from ") == 1
    assert run(half) == 0
    assert losses(original) == losses(undisturbed / "run")
    records = [read_record(folder / "checkpoints" / "6", 6) for folder in (original, copy)]
    ids = [record["run_id"] for record in records]
    assert ids[0] != ids[1]
    assert [record["lineage"][0]["run_id"] for record in records] == [ids[0]] * 2


def test_a_moved_run_trains_on_bit_equal(undisturbed, half, tmp_path):
    (tmp_path / "run").rename(tmp_path / "moved")
    assert run(half, f"run.dir={tmp_path}/moved") == 0
    assert losses(tmp_path / "moved") == losses(undisturbed / "run")
    assert (
        f"moved was moved from {socket.gethostname()}:{tmp_path}/run"
        in (tmp_path / "moved" / "log.txt").read_text()
    )


@pytest.mark.parametrize("kept", [0, 3, slow(1), slow(9)])
@pytest.mark.costly
def test_older_or_newer_metrics_than_the_checkpoint_are_continued_or_cut(
    undisturbed, half, tmp_path, kept
):
    """A backup of another moment was restored over the directory: `kept` lines of metrics."""
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(True)
    later = [line.replace(f'"step": {n}', f'"step": {n + 3}') for n, line in enumerate(lines, 1)]
    path.write_text("".join([*lines, *later, *later][:kept]))
    assert run(half) == 0
    wanted = losses(undisturbed / "run")
    assert losses(tmp_path / "run") == {n: x for n, x in wanted.items() if n <= kept or n > 3}
    missing = f"{3 - kept} of the 3 steps before the resume are missing" if kept < 3 else None
    text = (tmp_path / "run" / "log.txt").read_text()
    assert ("before the resume are missing" in text) is (missing is not None)
    assert missing is None or missing in text


def test_an_older_checkpoint_is_used_when_the_newest_was_not_or_only_partly_restored(
    undisturbed, half, tmp_path
):
    folder = tmp_path / "run" / "checkpoints"
    assert run(half, "training.steps=4") == 0
    for name in ("4", "3"):
        shutil.copytree(folder / name, tmp_path / name)
    (file,) = (folder / "4" / "state" / "ocdbt.process_0" / "d").iterdir()
    file.unlink()  # partly restored
    assert run(half, "training.steps=4") == 0
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "renamed to 4.damaged; resuming from 3" in text
    shutil.rmtree(folder / "4")  # not restored
    assert run(half) == 0
    assert losses(tmp_path / "run") == losses(undisturbed / "run")


def test_a_checkpoint_of_another_run_among_those_of_this_one_is_noticed(half, tmp_path):
    assert run(half, f"run.dir={tmp_path}/other", "training.steps=4") == 0
    shutil.copytree(tmp_path / "other/checkpoints/4", tmp_path / "run/checkpoints/4")
    assert run(half, "training.steps=5") == 0
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "checkpoint 4 was saved by run " in text and "holds files of two runs" in text
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 5
