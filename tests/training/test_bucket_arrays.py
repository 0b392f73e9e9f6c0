"""How tensorstore finds the arrays of checkpoints in buckets."""

import os
import time

import numpy as np
import pytest
import tensorstore
from buckets import needs_s3
from orbax.checkpoint._src.serialization.tensorstore_utils import build_kvstore_tspec

from data.bucket_path import BucketError, BucketPath
from training import bucket_arrays
from training.bucket_arrays import key_value_store, orbax_options
from training.stored_arrays import chunked


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    bucket_arrays._s3_settings.cache_clear()
    for name in [*os.environ]:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def test_a_bucket_of_google_is_named_alone() -> None:
    found = key_value_store(BucketPath("gs://bucket/a/b"))
    assert found == {"driver": "gcs", "bucket": "bucket", "path": "a/b"}


def test_tensorstore_finds_the_region_of_a_bucket_of_amazon(monkeypatch) -> None:
    pytest.importorskip("s3fs", reason='pip install -e ".[s3]"')
    found = key_value_store(BucketPath("s3://bucket/a/b"))
    assert found.pop("aws_credentials") == {"type": "default", "profile": "default"}
    assert found == {"driver": "s3", "bucket": "bucket", "path": "a/b"}
    bucket_arrays._s3_settings.cache_clear()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = key_value_store(BucketPath("s3://bucket/a/b"))
    assert found["aws_credentials"] == {"type": "environment"}


PRIVATE = "https://bucket.vpce-1a2b.s3.us-east-1.vpce.amazonaws.com"


@pytest.mark.parametrize(
    ("endpoint", "variable", "region"),
    [
        ("http://127.0.0.1:9000", None, "us-east-1"),
        ("http://127.0.0.1:9000", "AWS_DEFAULT_REGION", "eu-west-3"),
        (PRIVATE, "AWS_REGION", "eu-west-3"),
        (None, "AWS_REGION", "cn-north-1"),
    ],
)
def test_another_service_is_given_by_its_endpoint(monkeypatch, endpoint, variable, region) -> None:
    pytest.importorskip("s3fs", reason='pip install -e ".[s3]"')
    if endpoint is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    if variable is not None:
        monkeypatch.setenv(variable, region)
    found = key_value_store(BucketPath("s3://bucket/a/b"))
    assert found["endpoint"] == (endpoint or f"https://s3.{region}.amazonaws.com.cn")
    assert found["aws_region"] == region


def test_orbax_takes_paths_of_s3_and_still_those_of_google() -> None:
    """It names them with one slash, as `os.path.normpath` returns them."""
    pytest.importorskip("s3fs", reason='pip install -e ".[s3]"')
    for url in ("s3://bucket/run", "gs://bucket/run"):
        options = orbax_options(BucketPath(url))
        saving = chunked({"a": np.zeros(8)}, None, options).array_options.saving
        assert saving.ocdbt_target_data_file_size == 400 * 2**20
        assert saving.storage_options.chunk_byte_size == 64 * 2**20
    base = build_kvstore_tspec("s3://bucket/run/1/state")["base"]
    assert (base["driver"], base["bucket"], base["path"]) == ("s3", "bucket", "run/1/state")
    base = build_kvstore_tspec("gs://bucket/run/1/state")["base"]
    assert base == {"driver": "gcs", "bucket": "bucket", "path": "run/1/state"}
    assert build_kvstore_tspec("/run/1/state")["base"]["driver"] == "file"


class TestWithMoto:
    pytestmark = needs_s3

    @pytest.mark.parametrize("profile", ["default", "work"])
    def test_credentials_of_a_file_sign_the_requests(
        self, amazon_bucket, tmp_path, monkeypatch, profile
    ) -> None:
        (file := tmp_path / "credentials").write_text(
            f"[{profile}]\naws_access_key_id = of-a-file\naws_secret_access_key = secret\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        monkeypatch.setenv("AWS_PROFILE", profile)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        amazon_bucket.write("a/x", b"content")
        store = tensorstore.KvStore.open(key_value_store(BucketPath("s3://bucket/a/"))).result()
        assert store.read("x").result().value == b"content"
        assert BucketPath("s3://bucket/a/x").read_bytes() == b"content"
        assert amazon_bucket.credentials == {"of-a-file"}

    def test_a_refusal_is_a_mistake_and_not_a_busy_service(self, amazon_bucket) -> None:
        amazon_bucket.fault = lambda method, path: 400
        path, asked = BucketPath("s3://bucket/a/x"), time.monotonic()
        with pytest.raises(OSError, match="s3://bucket/a/x: on demand") as error:
            path.create(b"content")
        assert not isinstance(error.value, BucketError) and time.monotonic() - asked < 10
