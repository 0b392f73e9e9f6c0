"""Run directories: shared by all processes, locked by one run, old runs moved aside."""

import errno
import fcntl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel.cluster.config import ClusterConfig
from parallel.cluster.errors import EXIT_PROCESS_LOST, ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from training.directory import check_shared_filesystem, locked_run, move_aside


def one_of_two(number: int, start_timeout: float = 60.0) -> ProcessGroup:
    """Return a process of two; process 0 broadcasts the token `1`."""

    class Silent(ProcessGroup):
        def broadcast(self, tag: str, make: Callable[[], Any]) -> Any:
            return "1"

        def all_gather(self, tag: str, value: Any) -> list[Any]:
            return [value, value]

    found = Silent(2, number, ClusterConfig.model_construct(start_timeout=start_timeout))
    found.hosts = ["host-0", "host-1"]
    return found


def test_a_shared_directory_passes_the_check(tmp_path):
    for number in range(2):
        check_shared_filesystem(tmp_path, one_of_two(number))


@pytest.mark.parametrize("before", [None, "0"])
def test_a_directory_of_the_same_name_on_another_disk_is_refused(tmp_path, before):
    here, there = tmp_path / "host-0", tmp_path / "host-1"
    for directory in (here, there):
        directory.mkdir()
        if before is not None:
            (directory / ".shared").write_text(before)  # both were shared once
    check_shared_filesystem(here, one_of_two(0))
    with pytest.raises(ValueError) as refused:
        check_shared_filesystem(there, one_of_two(1))
    assert str(refused.value) == (
        f"run.dir={str(there)!r} on host-1 is not that of process 0; give a "
        "directory on a file system that all hosts share"
    )


@pytest.fixture
def held(tmp_path):
    """A run directory locked by another process, and a function that releases it."""
    lock = open(tmp_path / ".lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield tmp_path, lock.close
    lock.close()


def test_one_process_is_refused_a_locked_directory_at_once(held):
    directory, _ = held
    with pytest.raises(ValueError, match=r"is in use by another process; give another run\.dir"):
        enter(directory, None)


def test_several_processes_end_after_start_timeout_on_a_locked_directory(held):
    directory, _ = held
    with pytest.raises(
        ProcessGroupError, match=r"is in use by another process, for 0\.1 s"
    ) as ended:
        enter(directory, one_of_two(0, start_timeout=0.1))
    assert ended.value.exit_code == EXIT_PROCESS_LOST


def test_several_processes_wait_for_the_lock_of_a_lost_host(held):
    directory, release = held
    timer = threading.Timer(0.3, release)
    timer.start()
    enter(directory, one_of_two(0))
    timer.join()


def enter(directory: Path, group: ProcessGroup | None) -> None:
    with locked_run(directory, 0, group):
        pass


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints"])
def test_only_a_run_is_moved_aside_and_links_are_followed(tmp_path, name):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "there" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"not those of a run; give another run\.dir"):
        move_aside(tmp_path / "link")
    (tmp_path / "there" / name).touch()
    assert move_aside(tmp_path / "link") == tmp_path / "there.old-1"
    assert list((tmp_path / "there").iterdir()) == []
    assert (tmp_path / "there.old-1" / "thesis.txt").exists()


def test_a_failed_move_leaves_no_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()

    def refuse(*_: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ValueError, match=r"cannot be moved to .*: Invalid .*; move it by hand"):
        move_aside(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
