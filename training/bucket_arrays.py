"""Arrays of checkpoints in buckets, as tensorstore names them.

orbax writes arrays to disks and to Google Cloud Storage with tensorstore, which also has a driver
for S3. orbax does not choose it yet (google/orbax#2739), so that two of its functions are extended.
"""

import os
from functools import cache
from typing import Any

from orbax.checkpoint import v1
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from data.bucket_path import AnyPath, BucketPath
from data.files import load_library, open_file_system

_OPTIONS = v1.options
_is_of_google, _google_store = tensorstore_utils._use_gcs_driver, gcs_utils.get_kvstore_for_gcs


def key_value_store(folder: BucketPath) -> dict[str, Any]:
    """Return the specification of a folder for tensorstore.

    Endpoint and region of S3 are those of its command line tool: AWS_ENDPOINT_URL, AWS_REGION, or
    the profile in ~/.aws/config.
    """
    scheme, _, rest = folder.url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme == "s3":
        return {"driver": "s3", "bucket": bucket, "path": prefix, **_s3_settings()}
    return {"driver": "gcs", "bucket": bucket, "path": prefix}


def orbax_options(folder: AnyPath) -> v1.Context:
    """Return options with which orbax saves to and restores from a folder."""
    if not isinstance(folder, BucketPath) or not folder.url.startswith("s3://"):
        return v1.Context()
    tensorstore_utils._use_gcs_driver = lambda path: _is_of_s3(path) or _is_of_google(path)
    gcs_utils.get_kvstore_for_gcs = _store_of_path
    # orbax would rename what it has written, which copies it.
    mode = _OPTIONS.AtomicityMode.COMMIT_FILE
    return v1.Context(atomicity_options=_OPTIONS.AtomicityOptions(mode=mode))


def _is_of_s3(path: str) -> bool:
    return path.startswith("s3:/")  # os.path.normpath leaves one slash


def _store_of_path(path: str) -> dict[str, Any]:
    if not _is_of_s3(path):
        return _google_store(path)
    return key_value_store(BucketPath("s3://" + path.removeprefix("s3:").lstrip("/")))


@cache
def _s3_settings() -> dict[str, Any]:
    system, _ = open_file_system("s3://bucket")
    session = load_library("botocore.session", "s3").get_session()
    meta = session.create_client("s3", endpoint_url=system.endpoint_url).meta
    found: dict[str, Any] = {}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # else tensorstore says that there is no ~/.aws/config
        found["aws_credentials"] = {"type": "environment"}
    if "amazonaws.com" not in meta.endpoint_url:  # another service with the same interface
        region = meta.region_name
        found["endpoint"] = meta.endpoint_url
        found["aws_region"] = "us-east-1" if region in (None, "aws-global") else region
    return found
