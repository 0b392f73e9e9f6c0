"""The lease of a run in a bucket: one holder, taken over only from a process that is gone."""

import threading
import time
from pathlib import Path

import pytest
from buckets import Bucket, needs_buckets

from data.bucket_path import BucketPath
from parallel.cluster.config import ClusterConfig, ProcessGroupError
from parallel.cluster.process_group import ProcessGroup
from training import bucket_runs
from training.bucket_runs import Lease, bucket_of, fetch, kept_in_bucket, local_path

pytestmark = needs_buckets
FOLDER = BucketPath("gs://bucket/run/lease")


@pytest.fixture(autouse=True)
def quick(monkeypatch, bucket) -> None:
    monkeypatch.setattr("data.bucket_path.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(bucket_runs, "EXPIRY_SECONDS", 1.0)
    monkeypatch.setattr(bucket_runs, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(bucket_runs, "RENEW_SECONDS", 0.1)


def test_a_lease_that_is_renewed_is_refused_to_others(bucket: Bucket) -> None:
    holder, other = Lease(FOLDER, "/here"), Lease(FOLDER, "/there")
    holder.acquire(ProcessGroup())
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.1):
            assert holder.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(
            ValueError, match=r"run\.dir='gs://bucket/run' is in use by process \d+"
        ):
            other.acquire(ProcessGroup())
        group = ProcessGroup(2, 0, ClusterConfig(start_timeout=1))
        with pytest.raises(ProcessGroupError, match="is in use by process"):
            other.acquire(group)
    finally:
        stop.set()
        thread.join()
    holder.release()
    assert bucket.names("run/lease") == []
    other.acquire(ProcessGroup())
    other.release()


def test_a_lease_that_nobody_renews_is_taken_by_one_and_its_holder_notices(bucket) -> None:
    gone = Lease(FOLDER, "/gone")
    gone.acquire(ProcessGroup())
    taken: list[str] = []

    def take(place: str) -> None:
        lease = Lease(FOLDER, place)
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


def test_the_lease_of_a_killed_process_with_the_same_folder_is_taken_at_once(monkeypatch) -> None:
    monkeypatch.setattr(bucket_runs, "EXPIRY_SECONDS", 60.0)
    Lease(FOLDER, "/here").acquire(ProcessGroup())
    begin = time.monotonic()
    Lease(FOLDER, "/here").acquire(ProcessGroup())
    assert time.monotonic() - begin < 30


def test_a_bucket_that_fails_for_a_while_does_not_end_a_run(bucket: Bucket, caplog) -> None:
    lease = Lease(FOLDER, "/here")
    lease.acquire(ProcessGroup())
    bucket.fault = lambda method, path: 503
    assert lease.renew() and "was not renewed" in caplog.text
    bucket.fault = lambda method, path: None
    assert lease.renew()
    lease.release()


def test_files_of_a_run_are_copied_and_fetched(bucket: Bucket, tmp_path, monkeypatch) -> None:
    folder = local_path("gs://bucket/some/run")
    assert str(bucket_of(folder)) == "gs://bucket/some/run" and bucket_of(tmp_path) is None
    assert local_path("gs://bucket/some/run/checkpoints/40") == folder / "checkpoints" / "40"
    assert local_path("~/x") == Path("~/x").expanduser()
    with kept_in_bucket(folder, ProcessGroup()) as publish:
        (folder / "log.txt").write_text("one\n")
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events").write_bytes(b"\0\1")
        (folder / ".lock").write_text("not copied")
        publish()
        assert bucket.read("some/run/log.txt") == b"one\n"
        (folder / "log.txt").write_text("one\ntwo\n")
        (folder / "gone.json").write_text("{}")
        publish()
        (folder / "gone.json").unlink()
    names = [name for name in bucket.names("some/run") if "lease" not in name]
    assert names == ["some/run/log.txt", "some/run/tensorboard/events"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    other = local_path("gs://bucket/some/run")
    (other / "stale.txt").write_text("of an older visit")
    fetch(other)
    assert other != folder and (other / "log.txt").read_text() == "one\ntwo\n"
    assert (other / "tensorboard" / "events").read_bytes() == b"\0\1"
    assert not (other / "stale.txt").exists()
