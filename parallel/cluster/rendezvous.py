"""Membership: every process of a run connects to process 0 and learns who the others are.

Process 0 accepts connections until all have sent a hello. It then sends each the list of all
members. A process that restarts during this phase may connect again; connections that send no
valid hello are dropped.
"""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from parallel.cluster.config import EXIT_MISMATCH, EXIT_PROCESS_LOST, ProcessGroupError
from parallel.cluster.connection import Connection

_HELLO_SECONDS = 1.0  # from accepting a connection to its hello
_RETRY_SECONDS = 0.1
# Process 0 knows who is missing, so the others wait this much longer for its answer.
_EXTRA_SECONDS = 5.0


@dataclass(frozen=True)
class Member:
    """Facts about one process that every process of the group knows."""

    host: str
    clock_skew: float
    """Seconds by which its clock is ahead of the clock of process 0."""
    payload: dict[str, Any]


class Rendezvous:
    """The accepting side, on process 0. After `accept` it holds one connection per process."""

    def __init__(self, num_processes: int, start_timeout: float, primary: Member):
        self.connections: dict[int, Connection] = {}
        self._num_processes, self._start_timeout = num_processes, start_timeout
        self._members = {0: primary}

    def accept(self, host: str, port: int) -> list[Member]:
        """Wait for all processes at HOST:PORT and send each the list of members.

        Raises: ProcessGroupError if the port is taken, a process is missing at the timeout, or two
            have the same id; the processes that did connect raise the same.
        """
        deadline = time.monotonic() + self._start_timeout
        is_loopback = host in ("127.0.0.1", "localhost")
        try:
            listener = socket.create_server(
                (host if is_loopback else "", port), backlog=self._num_processes
            )
        except OSError as error:
            raise ProcessGroupError(
                f"process 0 on {self._members[0].host} cannot listen on port {port}: "
                f"{os.strerror(error.errno or 0)}; stop the process that uses the port, or give "
                "--coordinator another one"
            ) from error
        with listener:
            while self._count_alive() < self._num_processes:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection = Connection(listener.accept()[0])
                except TimeoutError:
                    break
                self._admit(connection)
        if self._count_alive() < self._num_processes:
            self._refuse_incomplete()
        members = [self._members[n] for n in range(self._num_processes)]
        for connection in self.connections.values():
            connection.send({"members": [asdict(member) for member in members]})
        return members

    def _count_alive(self) -> int:
        """Forget the processes that died while they waited; return how many are left."""
        for number in [n for n, connection in self.connections.items() if connection.is_closed]:
            self.connections.pop(number).close()
            del self._members[number]
        return len(self._members)

    def _admit(self, connection: Connection) -> None:
        """Add the process behind a connection; drop what is not a process of a run."""
        try:
            hello = connection.receive_first(time.monotonic() + _HELLO_SECONDS)
            number, num_processes = hello["process_id"], hello["num_processes"]
            skew = hello["clock"] - time.time()
            member = Member(hello["host"], skew, hello["payload"])
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        self._count_alive()  # a process that was restarted replaces its dead connection
        is_duplicate = number in self._members
        self.connections[-1 if is_duplicate else number] = connection
        primary = self._members[0].host
        if num_processes != self._num_processes:
            self._refuse(
                f"--num-processes={num_processes} of process {number} on {member.host} differs "
                f"from {self._num_processes} of process 0 on {primary}; give all processes the "
                "same number",
                EXIT_MISMATCH,
            )
        if is_duplicate:
            self._refuse(
                f"--process-id={number} is used twice, on {self._members[number].host} and on "
                f"{member.host}; give each process its own id"
            )
        self._members[number] = member

    def _refuse_incomplete(self) -> NoReturn:
        missing = [str(n) for n in range(self._num_processes) if n not in self._members]
        connected = ", ".join(f"{n} ({m.host})" for n, m in sorted(self._members.items()))
        self._refuse(
            f"{len(missing)} of {self._num_processes} processes did not connect within "
            f"{self._start_timeout} s (cluster.start_timeout); missing: {', '.join(missing)}; "
            f"connected: {connected}; check the console output of the missing ones, or raise the "
            "timeout"
        )

    def _refuse(self, reason: str, exit_code: int = EXIT_PROCESS_LOST) -> NoReturn:
        """Fail on every process that has connected."""
        for connection in self.connections.values():
            connection.send({"abort": reason, "exit_code": exit_code})
            connection.close()
        raise ProcessGroupError(reason, exit_code)


def connect_to_primary(
    host: str, port: int, hello: Mapping[str, Any], start_timeout: float
) -> tuple[list[Member], Connection]:
    """Connect to process 0 at HOST:PORT, which may start later; wait until all have connected.

    Raises: ProcessGroupError if process 0 does not answer in time or refuses.
    """
    deadline = time.monotonic() + start_timeout + _EXTRA_SECONDS
    problem = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            connection = Connection(socket.create_connection((host, port), timeout=remaining))
        except OSError as error:
            problem = str(error) or type(error).__name__
            time.sleep(_RETRY_SECONDS)
            continue
        connection.send({**hello, "clock": time.time()})
        try:
            reply = connection.receive_first(deadline)
            if "abort" not in reply:
                return [Member(**member) for member in reply["members"]], connection
        except (OSError, ValueError, KeyError, TypeError) as error:  # not process 0 yet
            problem = str(error) or type(error).__name__
            connection.close()
            time.sleep(_RETRY_SECONDS)
        else:
            connection.close()
            raise ProcessGroupError(reply["abort"], reply["exit_code"])
    raise ProcessGroupError(
        f"process 0 at {host}:{port} did not answer within {start_timeout} s "
        f"(cluster.start_timeout): {problem}; check its console output and --coordinator"
    )
