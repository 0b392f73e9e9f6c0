"""Run the tasks of a preparation on all nodes of a Ray cluster.

Why Ray: a task is a plain object with a function that returns arrays, the same one that a worker
process of one machine runs. If its worker or node dies, Ray runs it again. Beam and Spark need the
work as a dataflow, whose output has no order.

The tasks return their results, in order, to the process that writes the tokenizer and the store.
So these hold the same bytes whatever the number of nodes, their order and their failures.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from data.engine import Engine, ItemOf, ResultOf, Task
from data.files import DataError, load_library

_ATTEMPTS = 5
_SECONDS_BETWEEN_SIZES = 5.0
_SECONDS_TO_CONNECT = 60.0
# They decide what the tokens of a document are.
_LIBRARIES = ("tokenizers", "jinja2", "pyarrow", "datasets", "array-record")
_ROOT = Path(__file__).parents[1]
Report = Callable[[str], None]


@contextmanager
def ray_engine(address: str | None, workers: int | None, report: Report) -> Iterator[Engine]:
    """Connect to a Ray cluster, or start one on this machine, and yield the engine that uses it.

    address: of a cluster that has a node on this machine, as `ray.init` takes it; None: that of the
        variable RAY_ADDRESS, else a cluster of this machine, which ends with the context. workers:
        tasks at a time on the cluster of this machine; None: one per core. report: called with a
        line about the size of the cluster, and about each change of it.
    Raises: DataError when Ray is not installed, or the cluster does not answer.
    """
    ray = load_library("ray", "ray")
    exists = ray.is_initialized()
    if not exists:
        address = address or os.environ.get("RAY_ADDRESS")
        _connect(ray, None if address == "local" else address, workers)
    try:
        size = _Size(ray, report)
        yield lambda items, task: _run_tasks(ray, items, task, size)
    finally:
        if not exists:
            ray.shutdown()


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    if address is not None and workers is not None:
        raise DataError(
            f"--workers {workers} has no effect on the cluster at {address}, which runs one task "
            "per CPU of its nodes; leave it out"
        )
    # By default Ray repeats a task that lacks memory for ever.
    os.environ.setdefault("RAY_task_oom_retries", str(_ATTEMPTS - 1))
    options = {"include_dashboard": False, "num_cpus": workers} if address is None else {}
    try:
        _wait_for_port(address)
        address = address or "local"
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # Ray raises plain exceptions, too
        causes = " ".join(f"{error} {error.__cause__ or ''}".split())[:400]
        raise DataError(
            f"no connection to the Ray cluster, address {address} ({causes}); `ray start --head` "
            "starts one and prints its address; this machine must be one of its nodes, and have "
            "its token (RAY_AUTH_MODE=token) if it has one"
        ) from error


def _wait_for_port(address: str | None) -> None:
    """Wait until something listens at HOST:PORT; `ray.init` would wait for ever.

    Raises: OSError when nothing does within a minute.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    end = time.monotonic() + _SECONDS_TO_CONNECT
    while host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
        except OSError:  # a cluster that is just starting
            if time.monotonic() > end:
                raise
            time.sleep(1)
        else:
            return


class _Size:
    """The size of a cluster, whose nodes may join and leave."""

    def __init__(self, ray: Any, report: Report):
        self._ray, self._report = ray, report
        self._nodes = self._cpus = 0
        self._read()

    def cpus(self) -> int:
        """Return the number of CPUs a few seconds ago, at least 1."""
        if time.monotonic() - self._read_at > _SECONDS_BETWEEN_SIZES:
            self._read()
        return max(1, self._cpus)

    def _read(self) -> None:
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        cpus = sum(int(node["Resources"].get("CPU", 0)) for node in alive)
        if (len(alive), cpus) != (self._nodes, self._cpus):
            self._nodes, self._cpus = len(alive), cpus
            noun = "node" if len(alive) == 1 else "nodes"
            self._report(f"Ray cluster: {len(alive)} {noun}, {cpus} CPUs in all")
        self._read_at = time.monotonic()


def _run_tasks(
    ray: Any, items: Sequence[ItemOf], task: Task[ItemOf, ResultOf], size: _Size
) -> Generator[ResultOf, None, None]:
    """Yield the result of a task for each item, in order; see `Engine`.

    Raises: DataError; RuntimeError when Ray has lost a task too often.
    """
    run = ray.remote(num_cpus=1, max_retries=_ATTEMPTS - 1)(_run)
    # In a list, so that a worker process reads it once and not with every item.
    shared = [ray.put(task)]
    code = code_hash(task)
    window: deque[Any] = deque()
    waiting = iter(items)
    try:
        while True:
            limit = 2 * size.cpus()
            while len(window) < limit and (item := next(waiting, None)) is not None:
                window.append(run.remote(item, shared, code))
            if not window:
                return
            yield _result(ray, window.popleft())
    finally:
        with contextlib.suppress(ray.exceptions.RayError):  # the cluster may be gone
            for reference in window:
                ray.cancel(reference, force=True)


def _result(ray: Any, reference: Any) -> Any:
    """Return the result of a task. Raises: what the task has raised; RuntimeError."""
    errors = ray.exceptions
    try:
        return ray.get(reference)
    except errors.RayTaskError as error:
        if isinstance(error.cause, DataError | OSError):
            raise error.cause from None  # one line for the user, without the stack of a worker
        raise
    except errors.RayError as error:
        lost = (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError)
        is_lost = isinstance(error, (*lost, errors.ObjectLostError))
        what = f"a task died {_ATTEMPTS} times, perhaps for lack of memory" if is_lost else "failed"
        raise RuntimeError(
            f"Ray: {what} ({' '.join(str(error).split())[:400]}); run scripts/prepare_data.py "
            "again: it keeps what is finished"
        ) from error


def _run(item: Any, shared: list[Any], code: str) -> Any:
    """Run a task on a node. Raises: DataError, also if the node differs from the command."""
    node = platform.node()
    task, own_code = _receive(shared[0])
    if own_code != code:
        raise DataError(
            f"node {node} has another version of Torus, of a plugin, or of {', '.join(_LIBRARIES)} "
            "than the command; install the same on all nodes"
        )
    try:
        return task.run(item)
    except FileNotFoundError as error:
        raise DataError(
            f"node {node} has no file {error.filename or error}; all nodes need the input files "
            "under the same names: use a shared disk or an object store"
        ) from error


@lru_cache(maxsize=1)
def _receive(reference: Any) -> tuple[Task[Any, Any], str]:
    """Return a task and its `code_hash`, once in a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    ray = load_library("ray", "ray")
    try:
        task = ray.get(reference)
    except ray.exceptions.RaySystemError as error:  # a module that only the writer has
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"node {platform.node()} cannot load the tokenizer, template or formats ({reason}); "
            "install the plugins of the configuration on all nodes"
        ) from error
    return task, code_hash(task)


def code_hash(task: Task[Any, Any]) -> str:
    """Return the SHA-256 (hex) of the code and the library versions that decide the results."""
    found = hashlib.sha256(_installed().encode())
    for path in sorted(task.code_files):
        if not path.is_relative_to(_ROOT / "data"):  # a plugin
            found.update(path.read_bytes())
    return found.hexdigest()


@cache
def _installed() -> str:
    """Return the SHA-256 (hex) of the package `data` and of the versions of libraries."""
    found = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in sorted((_ROOT / "data").rglob("*.py")):
        found.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    for name in _LIBRARIES:
        try:
            found.update(f"{name} {importlib.metadata.version(name)}\0".encode())
        except importlib.metadata.PackageNotFoundError:
            found.update(f"{name} is missing\0".encode())
    return found.hexdigest()
