"""Arrays of checkpoints in buckets, as tensorstore names them.

orbax writes arrays to disks and to Google Cloud Storage with tensorstore, which also has a driver
for S3. orbax 0.12 does not choose it (google/orbax#2739), so `_choose_s3` replaces the functions of
orbax that choose the driver. It can go when orbax knows `s3://`.
"""

import os
import re
from functools import cache
from typing import Any

from orbax.checkpoint import v1
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from data.bucket_path import AnyPath, BucketPath
from data.files import load_library, open_file_system

# orbax writes the arrays of a save into files of about this size. In a bucket, each is sent, and if
# necessary sent again, as a whole.
_FILE_BYTES = 400 * 2**20
_AMAZON = re.compile(r"https://s3(\.[a-z0-9-]+)?\.amazonaws\.com")


def key_value_store(folder: BucketPath) -> dict[str, Any]:
    """Return the specification of a folder for tensorstore.

    Endpoint, region and profile of S3 are those that the AWS command line tool would use.
    """
    scheme, _, rest = folder.url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme == "s3":
        return {"driver": "s3", "bucket": bucket, "path": prefix, **_s3_settings()}
    return {"driver": "gcs", "bucket": bucket, "path": prefix}


def orbax_options(folder: AnyPath) -> v1.Context:
    """Return options with which orbax saves to and restores from a folder."""
    if not isinstance(folder, BucketPath):
        return v1.Context()
    options = v1.options
    saving = options.ArrayOptions.Saving(ocdbt_target_data_file_size=_FILE_BYTES)
    arrays = options.ArrayOptions(saving=saving)
    if not folder.url.startswith("s3://"):
        return v1.Context(array_options=arrays)
    _choose_s3()
    # By default orbax would rename what it has written, which copies it.
    atomicity = options.AtomicityOptions(mode=options.AtomicityMode.COMMIT_FILE)
    return v1.Context(array_options=arrays, atomicity_options=atomicity)


@cache
def _choose_s3() -> None:
    """Make orbax choose tensorstore's driver for S3, in this process."""
    is_of_google, google_store = tensorstore_utils._use_gcs_driver, gcs_utils.get_kvstore_for_gcs

    def store_of_path(path: str) -> dict[str, Any]:
        if not _is_of_s3(path):
            return google_store(path)
        return key_value_store(BucketPath("s3://" + path.removeprefix("s3:").lstrip("/")))

    tensorstore_utils._use_gcs_driver = lambda path: _is_of_s3(path) or is_of_google(path)
    gcs_utils.get_kvstore_for_gcs = store_of_path


def _is_of_s3(path: str) -> bool:
    return path.startswith("s3:/")  # os.path.normpath leaves one slash


@cache
def _s3_settings() -> dict[str, Any]:
    """Return the settings of S3 that botocore finds and tensorstore would not find alone."""
    system, _ = open_file_system("s3://bucket")
    session = load_library("botocore.session", "s3").get_session()
    profile = session.get_config_variable("profile") or "default"
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    client = session.create_client("s3", region_name=region, endpoint_url=system.endpoint_url)
    found: dict[str, Any] = {"aws_credentials": {"type": "default", "profile": profile}}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # without a warning that there is no ~/.aws/config
        found["aws_credentials"] = {"type": "environment"}
    endpoint = client.meta.endpoint_url
    # Of a bucket of Amazon, tensorstore looks the region up.
    if not _AMAZON.fullmatch(endpoint):
        found |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return found
