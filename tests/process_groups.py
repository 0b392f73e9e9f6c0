"""Process groups over TCP for tests, each process a thread of this one. A plugin of conftest.py."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from parallel.cluster import liveness, rendezvous
from parallel.cluster.config import ClusterConfig, ProcessGroupError
from parallel.cluster.process_group import ProcessGroup

TOKEN = "the token of the tests"
TIME_LIMIT = 60.0  # seconds that anything may take on a busy machine
HOST = socket.gethostname()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def timeouts(start: float = TIME_LIMIT, peer: float = 1e9, stall: float = 1e9) -> ClusterConfig:
    """Return a configuration without validation, so that timeouts may be below a second."""
    return ClusterConfig.model_construct(
        start_timeout=start, peer_timeout=peer, stall_timeout=stall
    )


def dial(address: str) -> socket.socket:
    """Connect as soon as process 0 listens."""
    host, _, port = address.partition(":")
    deadline = time.monotonic() + TIME_LIMIT
    while True:
        try:
            return socket.create_connection((host, int(port)), TIME_LIMIT)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.005)


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def shut_down(group: ProcessGroup, peer: int) -> None:
    """Close the connection to a peer, as the kernel does for a process that was killed."""
    group._peers[peer].connection._socket.shutdown(socket.SHUT_RDWR)


class Processes:
    """All processes of a run, each with a thread of its own."""

    def __init__(self) -> None:
        self.address = free_address()
        self.groups: list[ProcessGroup] = []
        self.failures: list[list[tuple[str, int]]] = []
        """Per process: the calls of its `on_failure`."""

    def add(
        self, *ids: int, of: int, config: ClusterConfig | None = None, token: str = TOKEN
    ) -> None:
        for number in ids:
            calls: list[tuple[str, int]] = []
            self.failures.append(calls)
            self.groups.append(
                ProcessGroup(
                    of,
                    number,
                    config or timeouts(),
                    token=token,
                    on_failure=lambda *failure, calls=calls: calls.append(failure),
                )
            )

    def each(self, call: Callable[[ProcessGroup], Any]) -> list[Any]:
        """Return what each process returns, or the ProcessGroupError that it raises."""

        def catch(group: ProcessGroup) -> Any:
            try:
                return call(group)
            except ProcessGroupError as error:
                return error

        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(catch, self.groups))

    def connect(self) -> list[Any]:
        return self.each(lambda group: group.connect(self.address, {"id": group.process_id}))

    def wait_for_failure(self, number: int) -> tuple[str, int]:
        wait_until(lambda: self.failures[number])
        (failure,) = self.failures[number]
        return failure


@pytest.fixture
def processes(monkeypatch) -> Iterator[Processes]:
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_EXTRA_SECONDS", 0.25)
    found = Processes()
    yield found
    for group in found.groups:
        group.abort("the test is over", 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "liveness"]


@pytest.fixture
def connected(processes) -> Processes:
    """A run of three connected processes."""
    processes.add(0, 1, 2, of=3)
    assert not [found for found in processes.connect() if isinstance(found, ProcessGroupError)]
    return processes
