"""Errors of a bucket are told from damage and from mistakes; checkpoints there move whole."""

import pytest
from buckets import AnyBucket
from runs import run, write_config

from data.bucket_path import BucketPath
from training.bucket_runs import move_tree
from training.checkpoint_folders import listing
from training.checkpoint_record import COMMIT_FILE, CheckpointError, DamageError, read_error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("DATA_LOSS: checksum of a chunk"), DamageError),
        (ValueError("NOT_FOUND: no chunk"), DamageError),
        (ValueError("the content is no JSON"), DamageError),
        (FileNotFoundError("no record"), DamageError),
        (ValueError("UNAVAILABLE: the service is busy"), CheckpointError),
        (ValueError("INTERNAL: CURL error 56"), CheckpointError),
        (ValueError("UNKNOWN: HTTP response code: 599"), CheckpointError),
        (RuntimeError("a library of the service"), CheckpointError),
        (ValueError("ExpiredToken: text [http_response_code='400']"), CheckpointError),
        (ValueError("NOT_FOUND: text [http_response_code='404']"), DamageError),
        (ValueError("OUT_OF_RANGE: InvalidRange [http_response_code='416']"), DamageError),
    ],
)
def test_only_what_was_read_is_damage_and_not_a_failure_to_read(error, kind) -> None:
    assert type(read_error("checkpoint 3", error, is_remote=True)) is kind


def test_errors_of_a_listing_become_one_line() -> None:
    with pytest.raises(CheckpointError, match="gs://b/run: RuntimeError: bad gateway"):
        with listing(BucketPath("gs://b/run")):
            raise RuntimeError("bad gateway\nwith details")


class TestInABucket:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch) -> None:
        monkeypatch.setattr("data.bucket_path.PAUSE_SECONDS", 0.01)

    def test_a_checkpoint_that_moves_is_whole_wherever_it_has_its_last_file(
        self, bucket: AnyBucket
    ) -> None:
        files = [COMMIT_FILE, "_CHECKPOINT_METADATA", "state/d/1", "state/d/2", "z"]
        for name in files:
            bucket.write(f"run/8/{name}", name.encode())
        requests: list[tuple[str, str]] = []

        def note(method: str, path: str) -> None:
            places = {
                place: {name.removeprefix(place) for name in bucket.names(place)}
                for place in ("run/8/", "old/8/")
            }
            for found in places.values():
                assert COMMIT_FILE not in found or len(found) == len(files)
            requests.append((method, path))

        bucket.fault = note
        move_tree(BucketPath(f"{bucket.url}/run"), BucketPath(f"{bucket.url}/old"))
        bucket.fault = lambda method, path: None
        assert bucket.names() == sorted(f"old/8/{name}" for name in files)
        assert len(requests) > 2 * len(files)

    @pytest.mark.usefixtures("signals")
    def test_a_service_out_of_reach_is_a_failure_and_a_refusal_a_mistake(
        self, bucket: AnyBucket, tmp_path, capsys, monkeypatch
    ) -> None:
        monkeypatch.setattr("data.bucket_path.ATTEMPTS", 1)  # each is 33 s of attempts of gcsfs
        config = write_config(tmp_path)
        for status, code in ((503, 1), (403, 2)):
            bucket.fault = lambda method, path, status=status: status
            assert run(config, f"run.dir={bucket.url}/some/run") == code
            error = capsys.readouterr().err
            assert error.startswith(f"error: {bucket.url}/some/run") and error.count("\n") == 1
