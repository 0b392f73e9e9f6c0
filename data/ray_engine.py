"""Tokenize shards of input files on all nodes of a Ray cluster.

Why Ray: a task is a plain function that returns arrays, so that it is the same function that a
worker process of one machine runs; a task whose worker or node dies is run again; and it is one
package of Python, on a laptop and under Kubernetes or SLURM. Beam and Spark want the work in
dataflows of their own, whose outputs have no order, and Spark a Java runtime.

The tasks return their documents to the process that writes the store, in order. So the store holds
the same bytes whatever the number of nodes, their order and their failures.
"""

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
from functools import cache
from pathlib import Path
from typing import Any

from data.files import DataError, load_library
from data.formats.shards import InputShard
from data.tokenization import Engine, TokenizedShard, TokenizeSettings, tokenize_shard

_ATTEMPTS = 5
# The number of CPUs is read again after so many seconds: nodes join and leave.
_SECONDS_PER_LOOK = 5.0
_SECONDS_TO_CONNECT = 60.0
# They decide what the tokens of a document are.
_LIBRARIES = ("tokenizers", "jinja2", "pyarrow", "datasets", "array-record")


@contextmanager
def ray_engine(
    address: str | None, workers: int | None, report: Callable[[str], None]
) -> Iterator[Engine]:
    """Connect to a Ray cluster, or start one on this machine, and yield the engine that uses it.

    address: of a cluster, as `ray.init` takes it; None: that of the variable RAY_ADDRESS, else a
        cluster of this machine, which ends with the context. workers: tasks at a time on the
        cluster of this machine; None: one per core. report: called with a line about the cluster.
    Raises: DataError when Ray is not installed, or the cluster does not answer.
    """
    ray = load_library("ray", "ray")
    exists = ray.is_initialized()
    if not exists:
        _connect(ray, address or os.environ.get("RAY_ADDRESS"), workers)
    try:
        nodes, cpus = _size(ray)
        report(f"Ray with {nodes} node{'s' if nodes > 1 else ''}, {cpus} CPUs in all")
        yield lambda shards, settings: _tokenize_shards(ray, shards, settings)
    finally:
        if not exists:
            ray.shutdown()


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    if address is not None and workers is not None:
        raise DataError(
            f"--workers {workers} has no effect on the cluster at {address}, whose nodes have as "
            "many as they have CPUs; leave it out"
        )
    quiet = {"include_dashboard": False} if address is None else {}
    try:
        _check_port(address)
        ray.init(
            address="local" if address is None else address,
            num_cpus=workers,
            log_to_driver=False,
            logging_level="ERROR",
            **quiet,
        )
    except (OSError, RuntimeError, ValueError) as error:
        place = "on this machine" if address is None else f"at {address}"
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"no Ray cluster answers {place} ({reason}); `ray start --head` starts one, and prints "
            "its address for --address; if it asks for a token, set RAY_AUTH_MODE=token"
        ) from error


def _check_port(address: str | None) -> None:
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


def _size(ray: Any) -> tuple[int, int]:
    """Return nodes and CPUs of the cluster, at least 1 each."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    cpus = sum(node["Resources"].get("CPU", 0) for node in alive)
    return max(1, len(alive)), max(1, int(cpus))


def _tokenize_shards(
    ray: Any, shards: Sequence[InputShard], settings: TokenizeSettings
) -> Generator[TokenizedShard, None, None]:
    """Yield the documents of each shard, in order; see `tokenize_shards`.

    Raises: DataError; RuntimeError when Ray has lost a task too often.
    """
    task = ray.remote(num_cpus=1, max_retries=_ATTEMPTS - 1)(_tokenize)
    # In a list, so that a worker process reads it once and not with every task.
    shared = [ray.put(settings)]
    environment = environment_hash()
    window: deque[Any] = deque()
    looked, limit = -_SECONDS_PER_LOOK, 0
    waiting = iter(shards)
    try:
        while True:
            if time.monotonic() - looked >= _SECONDS_PER_LOOK:
                looked, limit = time.monotonic(), 2 * _size(ray)[1]
            while len(window) < limit and (shard := next(waiting, None)) is not None:
                window.append(task.remote(shard, shared, environment))
            if not window:
                return
            yield _result(ray, window.popleft())
    finally:
        for reference in window:
            ray.cancel(reference, force=True)


def _result(ray: Any, reference: Any) -> TokenizedShard:
    """Return the result of a task. Raises: what the task has raised; RuntimeError."""
    try:
        found: TokenizedShard = ray.get(reference)
        return found
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DataError | OSError):
            raise error.cause from None  # one line for the user, without the stack of a worker
        raise
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"Ray has lost a task {_ATTEMPTS} times, perhaps for lack of memory "
            f"({' '.join(str(error).split())[:300]}); run scripts/prepare_data.py again: it "
            "continues where this one stopped"
        ) from error


def _tokenize(shard: InputShard, shared: list[Any], environment: str) -> TokenizedShard:
    """Tokenize a shard on a node. Raises: DataError, also if the node differs from the writer."""
    node = platform.node()
    if environment_hash() != environment:
        raise DataError(
            f"node {node} has another version of Torus or of {', '.join(_LIBRARIES)} than the "
            "process that writes the store; install the same on all nodes"
        )
    try:
        return tokenize_shard(shard, _settings(shared[0]))
    except FileNotFoundError as error:
        raise DataError(
            f"node {node} has no file {error.filename or error}; all nodes need the input files "
            "under the same names: use a shared disk or an object store"
        ) from error


_received: dict[Any, TokenizeSettings] = {}


def _settings(reference: Any) -> TokenizeSettings:
    """Return the settings of a store, read once by a worker process."""
    if reference not in _received:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
        _received.clear()
        _received[reference] = load_library("ray", "ray").get(reference)
    return _received[reference]


@cache
def environment_hash() -> str:
    """Return the SHA-256 (hex) of the code and the library versions that decide the tokens."""
    root = Path(__file__).parent
    found = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    for name in _LIBRARIES:
        try:
            found.update(f"{name} {importlib.metadata.version(name)}\0".encode())
        except importlib.metadata.PackageNotFoundError:
            found.update(f"{name} is missing\0".encode())
    return found.hexdigest()
