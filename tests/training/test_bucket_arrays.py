"""How tensorstore finds the arrays of checkpoints in buckets."""

import pytest

from data.bucket_path import BucketPath
from training import bucket_arrays
from training.bucket_arrays import key_value_store, orbax_options


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    bucket_arrays._s3_settings.cache_clear()
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def test_a_bucket_of_google_is_named_alone() -> None:
    found = key_value_store(BucketPath("gs://bucket/a/b"))
    assert found == {"driver": "gcs", "bucket": "bucket", "path": "a/b"}


def test_tensorstore_finds_the_region_of_a_bucket_of_amazon(monkeypatch) -> None:
    pytest.importorskip("s3fs", reason='pip install -e ".[s3]"')
    found = key_value_store(BucketPath("s3://bucket/a/b"))
    assert found == {"driver": "s3", "bucket": "bucket", "path": "a/b"}
    bucket_arrays._s3_settings.cache_clear()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = key_value_store(BucketPath("s3://bucket/a/b"))
    assert found["aws_credentials"] == {"type": "environment"}


@pytest.mark.parametrize(("region", "used"), [(None, "us-east-1"), ("eu-west-3", "eu-west-3")])
def test_another_service_is_given_by_its_endpoint(monkeypatch, region, used) -> None:
    pytest.importorskip("s3fs", reason='pip install -e ".[s3]"')
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    if region is not None:
        monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    found = key_value_store(BucketPath("s3://bucket/a/b"))
    assert found["endpoint"] == "http://127.0.0.1:9000" and found["aws_region"] == used


def test_orbax_takes_paths_of_s3_and_still_those_of_google(monkeypatch) -> None:
    """It names them with one slash, as `os.path.normpath` returns them."""
    pytest.importorskip("s3fs", reason='pip install -e ".[s3]"')
    orbax_options(BucketPath("s3://bucket/run"))
    store = bucket_arrays.tensorstore_utils.build_kvstore_tspec("s3://bucket/run/1/state")
    assert store["base"] == {"driver": "s3", "bucket": "bucket", "path": "run/1/state"}
    store = bucket_arrays.tensorstore_utils.build_kvstore_tspec("gs://bucket/run/1/state")
    assert store["base"] == {"driver": "gcs", "bucket": "bucket", "path": "run/1/state"}
    store = bucket_arrays.tensorstore_utils.build_kvstore_tspec("/run/1/state")
    assert store["base"]["driver"] == "file"
