"""Membership: every process of a run connects to process 0 and learns who the others are.

Process 0 accepts connections until all have sent a hello. It then sends each the list of all
members. A process that restarts during this phase may connect again. Only processes that know the
token of the run get this far (`handshake.py`); other connections are dropped (`listener.py`).
"""

import logging
import os
import socket
import time
from typing import NoReturn

from exit_codes import EXIT_BAD_INPUT, EXIT_PROCESS_LOST
from parallel.cluster.config import ProcessGroupError
from parallel.cluster.connection import Connection
from parallel.cluster.handshake import HANDSHAKE_SECONDS, OtherTokenError, authenticate
from parallel.cluster.listener import Listener
from parallel.cluster.messages import Abort, Hello, Member, Members, Message

_LOG = logging.getLogger("torus")
_POLL_SECONDS = 0.25
_RETRY_SECONDS = 0.1
_OTHER_TOKEN_SECONDS = 1.0  # until the next attempt, after process 0 of another run has answered
# Process 0 knows who is missing, so the others wait this much longer for its answer.
_EXTRA_SECONDS = 5.0


class Rendezvous:
    """The accepting side, on process 0. After `accept` it holds one connection per process."""

    def __init__(self, num_processes: int, start_timeout: float, primary: Member, token: str):
        self.connections: dict[int, Connection] = {}
        self.interface = ""
        """IP address at which it has listened; "" for all of this host."""
        self._num_processes, self._start_timeout = num_processes, start_timeout
        self._members = {0: primary}
        self._token = token

    def accept(self, host: str, port: int) -> list[Member]:
        """Wait for all processes at HOST:PORT and send each the list of members.

        Raises: ProcessGroupError if the port is taken, a process is missing at the timeout, or two
            have the same id; the processes that did connect raise the same.
        """
        deadline = time.monotonic() + self._start_timeout
        try:
            listener = Listener(host, port, self._num_processes, self._token)
        except OSError as error:
            raise ProcessGroupError(
                f"process 0 on {self._members[0].host} cannot listen on port {port}: "
                f"{os.strerror(error.errno or 0)}; stop the process that uses the port, or give "
                "--coordinator another one"
            ) from error
        self.interface = listener.interface
        with listener:
            while self._count_alive() < self._num_processes:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    self._refuse_incomplete(listener)
                for hello, connection in listener.accept(min(remaining, _POLL_SECONDS)):
                    self._admit(hello, connection)
        members = [self._members[n] for n in range(self._num_processes)]
        for connection in self.connections.values():
            connection.send(Members(members=members))
        return members

    def _count_alive(self) -> int:
        """Forget the processes that died while they waited; return how many are left."""
        for number in [n for n, connection in self.connections.items() if connection.is_closed]:
            self.connections.pop(number).close()
            del self._members[number]
        return len(self._members)

    def _admit(self, hello: Hello, connection: Connection) -> None:
        """Add the process behind a connection. Raises: ProcessGroupError."""
        number, num_processes = hello.process_id, hello.num_processes
        member = Member(
            host=hello.host, clock_skew=hello.clock - time.time(), payload=hello.payload
        )
        self._count_alive()  # a process that was restarted replaces its dead connection
        is_duplicate = number in self._members
        self.connections[-1 if is_duplicate else number] = connection
        primary = self._members[0].host
        if num_processes != self._num_processes:
            self._refuse(
                f"--num-processes={num_processes} of process {number} on {member.host} differs "
                f"from {self._num_processes} of process 0 on {primary}; give all processes the "
                "same number",
                EXIT_BAD_INPUT,
            )
        if is_duplicate:
            self._refuse(
                f"--process-id={number} is used twice, on {self._members[number].host} and on "
                f"{member.host}; give each process its own id"
            )
        self._members[number] = member

    def _refuse_incomplete(self, listener: Listener) -> NoReturn:
        missing = [str(n) for n in range(self._num_processes) if n not in self._members]
        connected = ", ".join(f"{n} ({m.host})" for n, m in sorted(self._members.items()))
        dropped = ""
        if listener.num_dropped:
            dropped = f"dropped: {listener.num_dropped}, the last: {listener.last_drop}; "
        self._refuse(
            f"{len(missing)} of {self._num_processes} processes did not connect within "
            f"{self._start_timeout} s (cluster.start_timeout); missing: {', '.join(missing)}; "
            f"connected: {connected}; {dropped}check the console output of the missing ones, or "
            "raise the timeout"
        )

    def _refuse(self, reason: str, exit_code: int = EXIT_PROCESS_LOST) -> NoReturn:
        """Fail on every process that has connected."""
        for connection in self.connections.values():
            connection.send(Abort(reason=reason, exit_code=exit_code))
            connection.close()
        raise ProcessGroupError(reason, exit_code)


def connect_to_primary(
    host: str, port: int, hello: Hello, token: str, start_timeout: float
) -> tuple[list[Member], Connection]:
    """Connect to process 0 at HOST:PORT, which may start later; wait until all have connected.

    The clock of `hello` is set to the time at which it is sent. A process with another token that
    answers there, such as process 0 of the attempt before, is no reason to give up.

    Raises: ProcessGroupError if process 0 does not answer in time or refuses.
    """
    deadline = time.monotonic() + start_timeout + _EXTRA_SECONDS
    problem, has_warned = "no answer", False
    while (remaining := deadline - time.monotonic()) > 0:
        pause = _RETRY_SECONDS
        try:
            reply, connection = _enter(host, port, hello, token, deadline)
        except OtherTokenError as error:
            problem, pause = f"it {error}", _OTHER_TOKEN_SECONDS
            if not has_warned:
                _LOG.warning("process 0 at %s:%d %s; trying again", host, port, error)
            has_warned = True
        except (OSError, ValueError) as error:  # not process 0 yet
            problem = str(error) or type(error).__name__
        else:
            if isinstance(reply, Members) and len(reply.members) == hello.num_processes:
                return reply.members, connection
            connection.close()
            if isinstance(reply, Abort):
                raise ProcessGroupError(reply.reason, reply.exit_code)
            problem = "its first message does not list the members"
        time.sleep(min(pause, remaining))
    raise ProcessGroupError(
        f"process 0 at {host}:{port} did not answer within {start_timeout} s "
        f"(cluster.start_timeout): {problem}; check its console output and --coordinator"
    )


def _enter(
    host: str, port: int, hello: Hello, token: str, deadline: float
) -> tuple[Message, Connection]:
    """Connect, authenticate and wait for the first message. Raises: OSError, ValueError."""
    sock = socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic()))
    try:
        limit = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
        connection = authenticate(sock, token, limit)
        connection.send(hello.model_copy(update={"clock": time.time()}))
        return connection.receive_first(deadline), connection
    except BaseException:
        sock.close()
        raise
