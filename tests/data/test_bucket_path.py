"""What paths in buckets say of a service; the bucket is in memory."""

import time

import fsspec
import pytest

from data import bucket_path
from data.bucket_path import BucketPath


def test_a_missing_object_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="memory://bucket/none: "):
        BucketPath("memory://bucket/none").read_bytes()


def test_a_service_that_takes_long_to_answer_is_a_line_and_only_at_first(
    monkeypatch, capfd
) -> None:
    system = fsspec.filesystem("memory")
    answer = system.cat_file

    def slowly(*arguments, **options):
        time.sleep(0.3)
        return answer(*arguments, **options)

    monkeypatch.setattr(bucket_path.log, "handlers", [])
    monkeypatch.setattr(bucket_path, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(bucket_path, "_answered", set())
    monkeypatch.setattr(system, "cat_file", slowly)
    path = BucketPath("memory://slow/a")
    path.overwrite(b"text")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(bucket_path, "_answered", set())
    assert path.read_bytes() == path.read_bytes() == b"text"
    wanted = "waiting for an answer of memory://slow; check the network and the credentials if none"
    assert capfd.readouterr().err == f"{wanted} comes\n"
