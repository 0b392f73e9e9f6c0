"""Run directories: shared by all processes, locked by one run, old runs moved aside."""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from exit_codes import EXIT_PROCESS_LOST
from parallel.cluster.config import ClusterConfig, ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from training.checkpoint_policy import CheckpointConfig
from training.directory import (
    check_not_in_use,
    check_run_directory_of,
    check_shared_filesystem,
    locked_run,
    move_aside,
    run_directory,
)
from training.session import _bytes_to_write


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


@pytest.mark.parametrize("moved", range(1, 4))
def test_a_move_that_was_interrupted_goes_on_into_the_same_folder(tmp_path, monkeypatch, moved):
    run = tmp_path / "run"
    (run / "checkpoints" / "4").mkdir(parents=True)
    for name in ("config.yaml", "log.txt", "metrics.jsonl"):
        (run / name).write_text(name)
    done: list[Path] = []

    def killed(source: Path, target: Path) -> None:
        if len(done) == moved:
            raise KeyboardInterrupt
        done.append(target)
        os.rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("training.directory.rename", killed)
        move_aside(run)
    assert move_aside(run) == tmp_path / "run.old-1"
    moved_files = {path.name for path in (tmp_path / "run.old-1").iterdir()}
    assert moved_files == {"checkpoints", "config.yaml", "log.txt", "metrics.jsonl"}
    assert not [*run.iterdir()]


@pytest.mark.parametrize("name", ["texts.txt", "log.txt"])
def test_a_run_is_not_moved_into_a_folder_of_something_else(tmp_path, name):
    (tmp_path / "run.old-1").mkdir()
    (tmp_path / "run.old-1" / name).touch()
    if name == "log.txt":  # a move that was killed after its last file
        (tmp_path / "run.old-1" / ".moving").touch()
    (tmp_path / "run.old-2").touch()
    for path in ("config.yaml", "log.txt"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / path).touch()
    assert move_aside(tmp_path / "run") == tmp_path / "run.old-3"
    assert os.listdir(tmp_path / "run.old-1")[0] in (name, ".moving")
    assert {*os.listdir(tmp_path / "run.old-3")} == {"config.yaml", "log.txt"}


def test_a_failed_move_leaves_no_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()

    def refuse(*_: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ValueError, match=r"cannot be moved to .*: Invalid .*; move it by hand"):
        move_aside(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_directory_is_locked_for_the_context(tmp_path):
    directory = tmp_path / "deep" / "run"
    with locked_run(directory, 0), pytest.raises(ValueError) as error:
        with locked_run(directory, 0):
            pytest.fail("two runs at once")
    holder = f"process {os.getpid()} of {socket.gethostname()}"
    refusal = f"run.dir={str(directory)!r} is in use by {holder}; stop that process"
    refusal += ", or use another run directory"
    assert str(error.value) == refusal
    with locked_run(directory, 0):
        assert directory.is_dir()
        with pytest.raises(ValueError) as early:
            check_not_in_use(directory)
        assert str(early.value) == refusal
    check_not_in_use(directory)


def test_a_directory_without_a_run_is_not_in_use_and_stays_as_it_is(tmp_path):
    check_not_in_use(tmp_path)
    check_not_in_use(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_of_a_moved_run_needs_its_new_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    check_run_directory_of(Path("a/config.yaml"), "a")
    check_run_directory_of(Path("a/other.yaml"), "b")
    check_run_directory_of(Path("c/config.yaml"), "b")  # no run
    with pytest.raises(ValueError, match=r"its run.dir=a is .*/a from here.*; add run.dir=.*/b to"):
        check_run_directory_of(Path("b/config.yaml"), "a")


def test_a_lock_ends_with_its_process(tmp_path):
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="is in use by another process"):
            with locked_run(tmp_path, 0):
                pytest.fail("two runs at once")
        other.kill()
        other.wait()
    with locked_run(tmp_path, 0):
        pass


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_a_run_directory_that_cannot_be_created_is_refused(tmp_path, below):
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / below
    with pytest.raises(ValueError, match=r"cannot be written: .*; give a directory that") as error:
        with locked_run(directory, 0):
            pytest.fail("a file is no directory")
    assert f"run.dir={str(directory)!r}" in str(error.value)


def test_a_bucket_without_a_name_of_the_run_is_refused():
    for place in ("gs://bucket", "s3://bucket/"):
        with pytest.raises(ValueError, match="is a whole bucket; add the name of the run to it"):
            run_directory(place)


def test_too_little_disk_space_is_refused(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 0, 100 * 2**20))
    with locked_run(tmp_path, 100 * 2**20):
        pass
    with pytest.raises(ValueError, match="has 100 MiB free, but its checkpoints need 102 MiB"):
        with locked_run(tmp_path, 102 * 2**20):
            pytest.fail("no room")


def test_space_for_checkpoints_is_that_of_all_but_the_complete_ones(tmp_path):
    for name in ("200.damaged", "400.damaged", "600"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    program = SimpleNamespace(abstract_state={"a": np.zeros(256, np.float32)})
    settings = SimpleNamespace(
        checkpoint=CheckpointConfig(keep=3, every=100), training=SimpleNamespace(steps=1000)
    )
    # Three are kept beside the one that is being written, and one is there.
    assert _bytes_to_write(tmp_path, program, settings) == 3 * 1024
    settings.checkpoint = CheckpointConfig(keep=3, every=100, resume="never")
    assert _bytes_to_write(tmp_path, program, settings) == 4 * 1024
    # Those of steps 700, 800, 900 and 1000 are left to write.
    settings.checkpoint = CheckpointConfig(keep=100, every=100)
    assert _bytes_to_write(tmp_path, program, settings) == 4 * 1024
    settings.training.steps = 600
    assert _bytes_to_write(tmp_path, program, settings) == 0


def test_a_file_system_without_locks_is_refused_with_a_remedy(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"cannot be locked: Function not .*-o flock") as e:
        enter(tmp_path, None)
    assert str(e.value).startswith(f"run.dir={str(tmp_path)!r} ")


def test_the_directory_of_a_refused_run_is_removed_if_it_is_new_and_has_no_content(tmp_path):
    def refuse(name: str, content: str) -> None:
        with pytest.raises(ValueError, match="refused"), locked_run(tmp_path / name, 0):
            (tmp_path / name / "checkpoints").mkdir(exist_ok=True)
            (tmp_path / name / "log.txt").write_text(content)
            (tmp_path / name / ".shared").write_text("a marker")
            raise ValueError("refused")

    refuse("new", "")
    refuse("deep/new", "a line")
    (tmp_path / "old").mkdir()
    refuse("old", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "old"]
    assert (tmp_path / "deep" / "new" / "log.txt").read_text() == "a line"


def test_old_runs_are_numbered_and_complete(tmp_path):
    directory = tmp_path / "run"
    assert move_aside(directory) is None
    for number in (1, 2):
        with locked_run(directory, 0):
            assert move_aside(directory) == (None if number == 1 else tmp_path / "run.old-1")
        (directory / "checkpoints" / "4").mkdir(parents=True)
        (directory / "checkpoints" / "4" / "x").write_text(f"run {number}")
        (directory / "log.txt").write_text(f"log {number}")
    assert move_aside(directory) == tmp_path / "run.old-2"
    assert os.listdir(directory) == [".lock"]
    assert move_aside(directory) is None
    for number in (1, 2):
        old = tmp_path / f"run.old-{number}"
        assert sorted(os.listdir(old)) == ["checkpoints", "log.txt"]
        assert (old / "checkpoints" / "4" / "x").read_text() == f"run {number}"
        assert (old / "log.txt").read_text() == f"log {number}"
