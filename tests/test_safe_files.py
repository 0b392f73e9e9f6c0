"""Replaced files are whole after a crash, and trusted folders are closed to other users."""

import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from safe_files import make_private, publish_folder, rename, replace_file, sync


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """What reaches the disk, in order: ("fsync" or "rename", name)."""
    found: list[tuple[str, str]] = []
    fsync = os.fsync

    def recorded_fsync(handle: int) -> None:
        found.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def recorded(act):
        def wrapped(source, target) -> None:
            found.append(("rename", os.path.basename(source)))
            act(source, target)

        return wrapped

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded(os.replace))
    monkeypatch.setattr(os, "rename", recorded(os.rename))
    return found


@pytest.mark.parametrize("content", ["žluť\r\n", b"\xff\0", ""])
def test_a_replaced_file_has_exactly_the_new_content_and_the_usual_mode(tmp_path, content):
    path = tmp_path / "new" / "config.yaml"
    for _ in range(2):
        replace_file(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert os.listdir(path.parent) == ["config.yaml"]


def test_content_is_on_disk_before_its_name_and_the_name_before_the_return(tmp_path, calls):
    replace_file(tmp_path / "a.json", "1")
    partial = calls[0][1]
    assert partial.startswith(".a.json.") and partial.endswith(".tmp")
    assert calls == [("fsync", partial), ("rename", partial), ("fsync", tmp_path.name)]


def test_files_of_a_folder_are_on_disk_before_its_name(tmp_path, calls):
    (tmp_path / "building").mkdir()
    for name in ("a", "b"):
        (tmp_path / "building" / name).touch()
    publish_folder(tmp_path / "building", tmp_path / "done")
    assert sorted(calls[:2]) == [("fsync", "a"), ("fsync", "b")]
    assert calls[2:] == [("fsync", "building"), ("rename", "building"), ("fsync", tmp_path.name)]


def test_a_rename_syncs_both_folders(tmp_path, calls):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "a").touch()
    rename(tmp_path / "one" / "a", tmp_path / "two" / "b")
    assert calls[0] == ("rename", "a") and sorted(calls[1:]) == [("fsync", "one"), ("fsync", "two")]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, step):
    def fail(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_file(tmp_path / "a", "old")
    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "a", "new")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_readers_and_writers_at_the_same_time_see_whole_files(tmp_path):
    contents = [str(number) * 100_000 for number in range(4)]
    path, done = tmp_path / "a", threading.Event()
    replace_file(path, contents[0])

    def write(content: str) -> None:
        while not done.wait(0.001):
            replace_file(path, content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    seen, deadline = set[str](), time.monotonic() + 60
    while len(seen) < 4 and time.monotonic() < deadline:
        seen.add(path.read_text())
    done.set()
    for writer in writers:
        writer.join()
    assert seen == {*contents} and os.listdir(tmp_path) == ["a"]


def test_a_file_system_that_cannot_sync_a_folder_is_accepted_and_no_other_error(
    tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    for number, refused in [(errno.EINVAL, [tmp_path / "file"]), (errno.EIO, [tmp_path])]:

        def fail(_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)
        for path in refused:
            with pytest.raises(OSError, match=os.strerror(number)):
                sync(path)
        if number == errno.EINVAL:
            sync(tmp_path)


def test_a_new_folder_is_closed_to_others_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / "deep" / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "deep" / "cache").stat().st_mode) == 0o700
    make_private(tmp_path / "deep" / "cache")


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o500])
def test_a_folder_that_others_may_read_is_accepted(tmp_path, mode):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    make_private(tmp_path / "cache")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused_with_its_mode(tmp_path, mode):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(ValueError) as refused:
        make_private(tmp_path / "cache")
    assert str(refused.value) == (
        f"{tmp_path / 'cache'} has mode {mode:04o}, so other users may put files there; delete it, "
        "so that it is created with mode 0700, or give another folder"
    )


def test_a_folder_of_another_user_is_refused_and_one_of_root_is_not(tmp_path, monkeypatch):
    owner = 1234 if os.geteuid() == 0 else os.geteuid()
    (tmp_path / "cache").mkdir(0o700)
    os.chown(tmp_path / "cache", owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(
        ValueError, match=f"belongs to user {owner}, .* a folder of user {owner + 1}"
    ):
        make_private(tmp_path / "cache")
    make_private(Path("/usr"))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(FileExistsError):
        make_private(tmp_path / "cache")
