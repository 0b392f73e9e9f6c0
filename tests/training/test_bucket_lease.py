"""The lease of a run in a bucket: one holder, taken over only from a process that is gone."""

import shutil
import threading
import time
from pathlib import Path

import pytest
from buckets import AnyBucket

from data.bucket_path import BucketPath
from parallel.cluster.config import ClusterConfig, ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from training import bucket_runs
from training import lease as leases
from training.bucket_runs import bucket_of, fetch, kept_in_bucket, local_path, open_local
from training.lease import Lease


@pytest.fixture
def lease_folder(bucket: AnyBucket) -> BucketPath:
    return BucketPath(f"{bucket.url}/run/lease")


@pytest.fixture(autouse=True)
def quick(monkeypatch, bucket) -> None:
    monkeypatch.setattr("data.bucket_path.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 1.0)
    monkeypatch.setattr(leases, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(bucket_runs, "RENEW_SECONDS", 0.1)


def test_a_lease_that_is_renewed_is_refused_to_others(lease_folder, bucket: AnyBucket) -> None:
    holder, other = Lease(lease_folder, "/here"), Lease(lease_folder, "/there")
    holder.acquire(ProcessGroup())
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.1):
            assert holder.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(
            ValueError, match=rf"run\.dir='{bucket.url}/run' is in use by process \d+"
        ):
            other.acquire(ProcessGroup())
        group = ProcessGroup(2, 0, ClusterConfig(start_timeout=1))
        with pytest.raises(ProcessGroupError, match="is in use by process"):
            other.acquire(group)
    finally:
        stop.set()
        thread.join()
    holder.release()
    assert bucket.names("run/lease") == ["run/lease/00000001.json"]
    other.acquire(ProcessGroup())
    assert bucket.names("run/lease") == ["run/lease/00000002.json"]
    assert not holder.renew()  # as if it had been suspended
    other.release()
    third = Lease(lease_folder, "/third")
    third.acquire(ProcessGroup())
    assert not holder.renew() and not other.renew() and third.renew()


def test_a_lease_that_was_not_renewed_lately_lets_no_save_begin(lease_folder, monkeypatch) -> None:
    lease = Lease(lease_folder, "/here")
    lease.acquire(ProcessGroup())
    lease.check()
    later = leases._now() + 1
    monkeypatch.setattr(leases, "_now", lambda: later)
    with pytest.raises(OSError, match="was not renewed for 1 s"):
        lease.check()


def test_a_number_that_was_free_only_in_an_old_list_is_given_back(
    lease_folder, bucket, monkeypatch
) -> None:
    late, listing, looks = Lease(lease_folder, "/late"), Lease._numbers, []

    def numbers(self: Lease) -> list[int]:
        found = listing(self)
        looks.append(found)
        if self is late and len(looks) == 1:  # two others have it before this process goes on
            for place in ("/second", "/third"):
                holder = Lease(lease_folder, place)
                holder.acquire(ProcessGroup())
                if place == "/second":
                    holder.release()
        return found

    first = Lease(lease_folder, "/first")
    first.acquire(ProcessGroup())
    first.release()
    monkeypatch.setattr(Lease, "_numbers", numbers)
    late.acquire(ProcessGroup())
    assert bucket.names("run/lease") == ["run/lease/00000004.json"] and late.renew()


def test_files_are_not_copied_with_a_lease_that_another_may_have(
    bucket: AnyBucket, monkeypatch, caplog
) -> None:
    folder = local_path(f"{bucket.url}/some/run")
    with kept_in_bucket(folder, ProcessGroup()) as publish:
        (folder / "log.txt").write_text("old")
        later = leases._now() + 100
        monkeypatch.setattr(leases, "_now", lambda: later)
        monkeypatch.setattr(Lease, "renew", lambda self: True)
        with pytest.raises(OSError, match="was not renewed for"):
            publish()
    assert "some/run/log.txt" not in bucket.names("some/run")
    assert "files of the run were not copied" in caplog.text


def test_a_start_that_failed_does_not_keep_the_next_one_away(bucket: AnyBucket) -> None:
    folder = local_path(f"{bucket.url}/some/run")
    bucket.write("some/run/log.txt", b"error: no such model\n")
    with kept_in_bucket(folder, ProcessGroup()):
        assert (folder / "log.txt").read_bytes() == b"error: no such model\n"
    bucket.write("other/photos.zip", b"x")
    with pytest.raises(ValueError, match=r"holds objects such as photos\.zip, which are not"):
        fetch(local_path(f"{bucket.url}/other"))


def test_readers_leave_the_files_of_a_second_process_alone(bucket: AnyBucket) -> None:
    folder = local_path(f"{bucket.url}/some/run")
    bucket.write("some/run/log.txt", b"old")
    with kept_in_bucket(folder, ProcessGroup(2, 1), names=["stacks.1.txt"]):
        (folder / "log.txt").write_text("newer")
        open_local(f"{bucket.url}/some/run")
        assert (folder / "log.txt").read_text() == "newer"
    open_local(f"{bucket.url}/some/run")
    assert (folder / "log.txt").read_text() == "old"


def test_a_lease_that_nobody_renews_is_taken_by_one_and_its_holder_notices(
    lease_folder, bucket
) -> None:
    gone = Lease(lease_folder, "/gone")
    gone.acquire(ProcessGroup())
    taken: list[str] = []

    def take(place: str) -> None:
        lease = Lease(lease_folder, place)
        try:
            lease.acquire(ProcessGroup())
        except ValueError:
            return
        taken.append(place)
        for _ in range(20):  # longer than the others watch
            assert lease.renew()
            time.sleep(0.1)

    threads = [threading.Thread(target=take, args=(f"/{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and not gone.renew()


def test_the_lease_of_a_killed_process_with_the_same_folder_is_taken_at_once(
    lease_folder, monkeypatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 60.0)
    Lease(lease_folder, "/here").acquire(ProcessGroup())
    begin = time.monotonic()
    Lease(lease_folder, "/here").acquire(ProcessGroup())
    assert time.monotonic() - begin < 30


def test_a_bucket_that_fails_for_a_while_does_not_end_a_run(
    lease_folder, bucket: AnyBucket, caplog, monkeypatch
) -> None:
    monkeypatch.setattr("data.bucket_path.ATTEMPTS", 1)  # each is 33 s of attempts of gcsfs
    lease = Lease(lease_folder, "/here")
    lease.acquire(ProcessGroup())
    bucket.fault = lambda method, path: 503
    assert lease.renew() and "was not renewed" in caplog.text
    bucket.fault = lambda method, path: None
    assert lease.renew()
    lease.release()


def test_files_of_a_run_are_copied_and_fetched(bucket: AnyBucket, tmp_path, monkeypatch) -> None:
    folder = local_path(f"{bucket.url}/some/run")
    assert str(bucket_of(folder)) == f"{bucket.url}/some/run" and bucket_of(tmp_path) is None
    assert local_path(f"{bucket.url}/some/run/checkpoints/40") == folder / "checkpoints" / "40"
    assert local_path("~/x") == Path("~/x").expanduser()
    with kept_in_bucket(folder, ProcessGroup()) as publish:
        (folder / "log.txt").write_text("one\n")
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events").write_bytes(b"\0\1")
        (folder / "metrics.jsonl").write_text("{}\n")
        (folder / "config.yaml").write_text("run: {}\n")
        (folder / ".lock").write_text("not copied")
        publish()
        assert bucket.read("some/run/metrics.jsonl") == b"{}\n"
        (folder / "log.txt").write_text("one\ntwo\n")
    names = [name for name in bucket.names("some/run") if "lease" not in name]
    files = ["config.yaml", "log.txt", "metrics.jsonl", "tensorboard/events"]
    assert names == [f"some/run/{name}" for name in files]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    other = local_path(f"{bucket.url}/some/run")
    (other / "stale.txt").write_text("of an older visit")
    fetch(other)
    assert other != folder and (other / "log.txt").read_text() == "one\ntwo\n"
    assert (other / "tensorboard" / "events").read_bytes() == b"\0\1"
    assert not (other / "stale.txt").exists()


def test_what_a_killed_process_could_not_copy_is_kept_on_its_machine(bucket, tmp_path) -> None:
    folder = local_path(f"{bucket.url}/some/run")
    with kept_in_bucket(folder, ProcessGroup()):
        for name in ("run.json", "config.yaml", "log.txt"):
            (folder / name).write_text(f"{name}\n")
    with open(folder / "log.txt", "a") as file:
        file.write("the last words\n")
    (folder / "stacks.txt").write_text("where it hung\n")
    with kept_in_bucket(folder, ProcessGroup()):
        assert (folder / "log.txt").read_text() == "log.txt\nthe last words\n"
    assert bucket.read("some/run/stacks.txt") == b"where it hung\n"
    bucket.write("some/run/run.json", b"another run")
    (folder / "of_the_old_run.txt").write_text("not in the bucket")
    fetch(folder)
    assert not (folder / "of_the_old_run.txt").exists()
    assert (folder / "run.json").read_text() == "another run"


def test_a_deleted_local_folder_deletes_nothing_in_the_bucket(bucket) -> None:
    folder = local_path(f"{bucket.url}/some/run")
    with kept_in_bucket(folder, ProcessGroup()):
        (folder / "config.yaml").write_text("run: {}\n")
    with kept_in_bucket(folder, ProcessGroup()):
        shutil.rmtree(folder)
    assert bucket.read("some/run/config.yaml") == b"run: {}\n"


def test_objects_that_are_no_run_are_not_taken_for_one(bucket) -> None:
    bucket.write("texts/a.txt", b"text")
    folder = local_path(f"{bucket.url}/texts")
    with (
        pytest.raises(ValueError, match=rf"{bucket.url}/texts holds objects such as a\.txt"),
        kept_in_bucket(folder, ProcessGroup()),
    ):
        pass
    with pytest.raises(ValueError, match="which are not those of a run"):
        bucket_runs.move_aside(folder)
    assert bucket.read("texts/a.txt") == b"text"
