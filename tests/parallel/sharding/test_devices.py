"""Opening devices: a mesh takes the accelerators or says why not; libtpu stays silent."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from conftest import ROOT

from configs.build import open_devices
from configs.schema import load_config
from parallel.sharding.devices import describe_missing_tpu, find_devices

VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")


def have_gpus(monkeypatch, count: int) -> None:
    gpus = [SimpleNamespace(platform="gpu", id=i) for i in range(count)]
    cpus = jax.devices("cpu")
    monkeypatch.setattr("jax.devices", lambda backend=None: cpus if backend else gpus)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_demo_takes_the_accelerators_that_there_are(monkeypatch, count) -> None:
    have_gpus(monkeypatch, count)
    config = load_config(ROOT / "configs" / "tp8.yaml", ["run.compilation_cache=null"])
    devices, notice = open_devices(config)
    assert [device.platform for device in devices] == ["gpu"] * count and notice is None


@pytest.mark.parametrize(("count", "have"), [(1, "1 gpu device"), (16, "16 gpu devices")])
def test_nothing_is_simulated_beside_accelerators(monkeypatch, count, have) -> None:
    have_gpus(monkeypatch, count)
    remedy = f"make the product {count}, or give one axis as auto; JAX_PLATFORMS=cpu simulates 8"
    with pytest.raises(ValueError, match=f"8, but this machine has {have}; {remedy}"):
        find_devices(8)


def test_without_accelerators_the_automatic_axis_simulates_as_many_as_jax_is_told() -> None:
    assert find_devices(3, take_all=True) == (
        jax.devices(),
        "found no accelerator; simulating 8 devices on the CPU",
    )


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
