"""One process with eight simulated CPU devices, and compiled programs kept in the checkout."""

import gc
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import accelerator  # noqa: F401 (first: it sets the environment of jax)
import hypothesis
import jax
import pytest

from parallel.linear.config import TensorParallelConfig
from parallel.sharding.devices import prevent_deadlocks
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.residual import residual_rules

BEGIN = time.monotonic()
pytest_plugins = ["runs", "process_groups", "launch_scripts", "buckets"]

ROOT = Path(__file__).parent.parent

# Tracing makes many objects of which few are garbage: collections would take a tenth of the time.
gc.set_threshold(100_000, 50, 50)

# A busy machine is no failure.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# Before any backend starts: runs in this process and in child processes compile alike.
prevent_deadlocks()
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "xla-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# The factorisations of eight devices on which sharded must equal single-device.
MESHES = {
    "tp8": MeshConfig(tp=8),
    "fsdp8": MeshConfig(fsdp=8),
    "dp8": MeshConfig(dp=8),
    "dp2-fsdp2-tp2": MeshConfig(dp=2, fsdp=2, tp=2),
    "tp4-sp2": MeshConfig(tp=4, sp=2),
    "ep2-fsdp2-sp2": MeshConfig(ep=2, fsdp=2, sp=2),
}
ONE_DEVICE = MeshConfig()
COSTLY_EVERY = 4


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """Unload compiled programs before they use up the memory maps that Linux allows a process.

    A program takes about ten of the 65530. XLA crashes where it gets no more.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > 20_000:
        jax.clear_caches()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--budget",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="skip the tests that have not begun after this time, and count them as skipped",
    )
    parser.addoption(
        "--rotate",
        type=int,
        default=0,
        metavar="N",
        help="begin with other tests for every N, so that runs with a budget reach all in turn",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a costly test, except the first of every four, as further ones."""
    counts: Counter[str] = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "costly" in marks and not marks & {"slow", "release"}:
            test = item.nodeid.partition("[")[0]
            if counts[test] % COSTLY_EVERY:
                item.add_marker("further")
            counts[test] += 1


@pytest.hookimpl(specname="pytest_collection_modifyitems", trylast=True)  # after `-m` has selected
def pytest_rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin at another test for every N. Multiples of the golden ratio spread evenly, modulo 1."""
    first = int(len(items) * (config.getoption("rotate") * (math.sqrt(5) - 1) / 2 % 1))
    items[:] = items[first:] + items[:first]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - BEGIN > item.config.getoption("budget"):
        pytest.skip("no time left: --budget")


def slow(*case: Any) -> Any:
    """Return the case of a parametrized test as a slow one, which CI runs in its second stage."""
    return pytest.param(*case, marks=pytest.mark.slow)


def release(*case: Any) -> Any:
    """Return the case of a parametrized test as one that runs before a release, and not in CI."""
    return pytest.param(*case, marks=pytest.mark.release)


def sample(cases: Iterable[Any], every: int = 4) -> list[Any]:
    """Return the cases of a product: of `every` consecutive ones, the first is a slow one.

    The others run before a release.
    """
    return [release(*case) if number % every else slow(*case) for number, case in enumerate(cases)]


def tensor_parallel(mesh: MeshConfig, residual="sequence", overlap="none") -> TensorParallelConfig:
    """The parallel configuration on the first devices of this process."""
    return TensorParallelConfig(
        mesh=build_mesh(mesh, jax.devices()[: mesh.num_devices]),
        partition_axis=residual_rules(residual),
        reduce_scatter_output=True,
        overlap=overlap,
    )
