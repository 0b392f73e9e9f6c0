"""Opening devices: libtpu without a TPU prints nothing, and a TPU VM finds its own values."""

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from parallel.sharding.devices import describe_missing_tpu

VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")


@pytest.mark.parametrize(
    ("jax_found_none", "device_file", "is_set"),
    [
        (True, "", True),
        (True, "/dev/accel0", False),
        (True, "/dev/vfio/0", False),
        (False, "", False),
    ],
)
def test_nothing_is_set_where_a_tpu_may_be_attached(
    monkeypatch, jax_found_none, device_file, is_set
) -> None:
    for name in ("TPU_SKIP_MDS_QUERY", *VARIABLES):
        monkeypatch.setenv(name, "")  # so that its value comes back
        monkeypatch.delenv(name)
    if jax_found_none:
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    pattern = device_file.replace("0", "[0-9]*")
    monkeypatch.setattr("glob.glob", lambda asked: [device_file] * (asked == pattern))
    describe_missing_tpu()
    assert [name in os.environ for name in VARIABLES] == [is_set] * 2


def test_values_of_the_user_stay(monkeypatch) -> None:
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setattr("glob.glob", lambda _: [])
    for name in VARIABLES:
        monkeypatch.setenv(name, "mine")
    describe_missing_tpu()
    assert [os.environ[name] for name in VARIABLES] == ["mine"] * 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"')
def test_libtpu_without_a_tpu_prints_nothing() -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_"))}
    found = subprocess.run(
        [sys.executable, "train.py", "--config", "configs/tp8.yaml", "--print-plan"],
        # Otherwise a lock file of another process ends libtpu before it prints.
        env=kept | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")
