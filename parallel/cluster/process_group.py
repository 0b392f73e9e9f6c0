"""The processes of a run: membership, liveness and small broadcasts, over TCP beside the devices.

jax.distributed lacks three things that a run needs. It starts before anybody has compared what the
processes were given. When a process is lost it aborts the others from C++, without a name, an exit
code of ours or a log line, and only after its heartbeat timeout. It does not notice a process that
lives but makes no progress. This group is therefore connected first and stays beside it. It knows
no jax, so it works while the devices hang.

Could jax's coordination service carry it? It has a key-value store, barriers, heartbeats and a list
of live processes. In jax 0.10.2 and 0.12.0.1 only `jax._src.distributed` reaches them:
`jax.distributed` exports initialize, is_initialized and shutdown, and what `multihost_utils` builds
on the service (`live_devices`, `process_allgather`) needs devices that run. The service ends the
processes from C++ when heartbeats stop. Whoever reaches its port may write to it: jax 0.10 has no
authentication; 0.12 has mutual TLS with certificate files (`jax_mtls_cert_file`, which protects
that service here, too), and a certificate does not say which attempt of a run it is for. So this
group has its own connections. Reconsider this when the key-value store is public and a lost process
can be handled in Python.

Process 0 listens at the coordinator's address; every other process keeps one connection to it.
When a process is killed, hangs or fails, every process exits with one line that names it. All
connections are authenticated with the token of the run, during the start and after it
(`handshake.py`). No message can end a process with code 0 (`messages.Abort`).
"""

import hashlib
import json
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from exit_codes import EXIT_BAD_INPUT
from parallel.cluster.config import ClusterConfig, ProcessGroupError
from parallel.cluster.liveness import PATIENCE, LivenessMonitor, Peer
from parallel.cluster.messages import Abort, Gather, Hello, Member, Message, Result, encode
from parallel.cluster.rendezvous import Rendezvous, connect_to_primary
from parallel.cluster.stacks import write_stacks

_LOG = logging.getLogger("torus")
_LEAVE = "leave"
_LAST_WORDS_SECONDS = 5.0


class ProcessGroup:
    """All processes of a run, seen from one of them.

    A group of one needs no connection; `monitor_alone` applies its stall timeout.
    """

    def __init__(
        self,
        num_processes: int = 1,
        process_id: int = 0,
        config: ClusterConfig | None = None,
        *,
        token: str = "",
        on_failure: Callable[[str, int], None] | None = None,
    ):
        """Create a group that is not connected yet.

        token: the secret of this attempt of the run, equal on all processes; "" is for processes of
            one machine only.
        on_failure: called with (reason, exit code) in a thread when a process is lost. The default
            writes the reason to stderr and to the log, and exits.
        """
        self.num_processes, self.process_id = num_processes, process_id
        self.config = config or ClusterConfig()
        self.hosts: list[str] = [socket.gethostname()]
        """Host name of every process."""
        self.clock_skews: list[float] = [0.0]
        """Seconds by which the clock of every process is ahead of the clock of process 0."""
        self.interface = ""
        """IP address at which process 0 has listened; "" on other processes, or for all."""
        self.phase: str | None = None
        """What this process works on; see `set_phase`."""
        self.stack_file: Path | None = None
        """File for the stacks of all threads of this process if the run stalls; None: stderr."""
        self._token = token
        self._on_failure = on_failure or _exit
        self._peers: dict[int, Peer] = {}
        self._monitor: LivenessMonitor | None = None
        self._contributions: dict[str, dict[int, Any]] = {}
        self._results: dict[str, list[Any]] = {}
        self._result_arrived = threading.Condition()
        self._outbox = queue.SimpleQueue[bytes | None]()
        self._sender = threading.Thread(target=self._send_results, name="results", daemon=True)

    @property
    def is_primary(self) -> bool:
        """Whether this is process 0, which writes files and prints for all."""
        return self.process_id == 0

    def connect(self, address: str, payload: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Connect all processes through process 0 at HOST:PORT; return the payload of each.

        Raises: ProcessGroupError that names the missing processes after `cluster.start_timeout`.
        """
        host, _, port = address.rpartition(":")
        timeout = self.config.start_timeout
        if self.is_primary:
            primary = Member(host=self.hosts[0], clock_skew=0.0, payload=payload or {})
            rendezvous = Rendezvous(self.num_processes, timeout, primary, self._token)
            members = rendezvous.accept(host, int(port))
            connections, self.interface = rendezvous.connections, rendezvous.interface
        else:
            hello = Hello(
                process_id=self.process_id,
                num_processes=self.num_processes,
                host=self.hosts[0],
                payload=payload or {},
                clock=0.0,
            )
            members, connection = connect_to_primary(host, int(port), hello, self._token, timeout)
            connections = {0: connection}
        self.hosts = [member.host for member in members]
        self.clock_skews = [member.clock_skew for member in members]
        self._peers = {n: Peer(self.hosts[n], link) for n, link in connections.items()}
        if self.is_primary:
            self._sender.start()
        self._start_monitor()
        return [member.payload for member in members]

    def monitor_alone(self) -> None:
        """Apply the stall timeout to a group of one process, until `close` or `abort`."""
        assert self.num_processes == 1 and self._monitor is None
        self._start_monitor()

    def _start_monitor(self) -> None:
        self._monitor = LivenessMonitor(
            self.process_id,
            self.hosts[self.process_id],
            self._peers,
            self.config,
            on_message=self._handle,
            on_failure=self._on_failure,
            on_stall=lambda reason: _in_time(write_stacks, self.stack_file, reason),
        )
        self._monitor.start()

    @property
    def is_connected(self) -> bool:
        """Whether this process is between `connect` (or `monitor_alone`) and `close`."""
        return self._monitor is not None

    def set_phase(self, phase: str | None) -> None:
        """Say what this process works on, for error messages, and restart its stall timeout.

        phase: a description such as "compiling" or "step 12"; None suspends the stall timeout.
        """
        self.phase = phase
        if self._monitor is not None:
            self._monitor.set_phase(phase)

    def start_all_gather(self, tag: str, value: Any) -> None:
        """Contribute a JSON value to the all-gather `tag`, without waiting.

        Every process calls this once per tag; a tag may be used again after its result was read.
        """
        if self.is_primary:
            self._contribute(tag, 0, value)
        else:
            self._peers[0].connection.send(Gather(tag=tag, value=value))

    def wait_all_gather(self, tag: str, timeout: float | None = None) -> list[Any]:
        """Wait until every process has contributed; return the values in the order of process ids.

        Raises: TimeoutError after `timeout` seconds; the result can still be read later.
        """
        with self._result_arrived:
            if not self._result_arrived.wait_for(lambda: tag in self._results, timeout):
                raise TimeoutError(tag)
            return self._results.pop(tag)

    def all_gather(self, tag: str, value: Any) -> list[Any]:
        """Return the JSON value of every process, in the order of process ids."""
        self.start_all_gather(tag, value)
        return self.wait_all_gather(tag)

    def barrier(self, tag: str) -> None:
        """Wait until every process has called this."""
        self.all_gather(tag, None)

    def broadcast(self, tag: str, make: Callable[[], Any]) -> Any:
        """Return a JSON value that process 0 makes; the others do not call `make`."""
        return self.all_gather(tag, make() if self.is_primary else None)[0]

    def check_equal(self, tag: str, values: Mapping[str, Any]) -> None:
        """Check that a flat mapping of JSON values is equal on all processes.

        The processes exchange digests, and the values only if these differ.

        Raises: ProcessGroupError on every process; it names the key, the processes that differ
            from the majority, and their values. A restart does not help.
        """
        text = json.dumps(dict(values), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(set(self.all_gather(f"{tag}: digest", digest))) == 1:
            return
        gathered = self.all_gather(tag, dict(values))
        for key in sorted({key for each in gathered for key in each}):
            holders: dict[str, list[int]] = {}
            for number, each in enumerate(gathered):
                holders.setdefault(json.dumps(each.get(key)), []).append(number)
            if len(holders) > 1:
                usual = max(holders, key=lambda value: len(holders[value]))
                different = ", ".join(
                    f"process {n} on {self.hosts[n]} has {value}"
                    for value, numbers in holders.items()
                    if value != usual
                    for n in numbers
                )
                self.fail(
                    f"{tag}: {key} differs: {different}, {_subject(holders[usual])} {usual}; "
                    "start all processes with the same",
                    EXIT_BAD_INPUT,
                )

    def fail(self, reason: str, exit_code: int) -> NoReturn:
        """Abort the run on all processes, and raise. Raises: ProcessGroupError."""
        self.abort(reason, exit_code)
        raise ProcessGroupError(reason, exit_code)

    def abort(self, reason: str, exit_code: int) -> None:
        """End all other processes because this one has failed, and close the connections.

        exit_code: of all processes, 1 to 255.

        Does nothing in a group that is not connected, or closed.
        """
        if self._monitor is None:
            return
        # A collective fails when a process is lost. The monitor, which knows the process, reports
        # it first.
        self._monitor.wait_for_failure()
        self._monitor.is_stopping = True  # process 0 sends the abort to all, this process included
        who = f"process {self.process_id} on {self.hosts[self.process_id]}"
        text = encode(Abort(reason=f"{who} failed: {reason}", exit_code=exit_code))
        for peer in self._peers.values():
            peer.connection.send_text(text, PATIENCE)
        self._disconnect()

    def close(self) -> None:
        """Wait until every process calls this, then close the connections.

        Each process exits with a code of its own; that of another one is not even sent. Does
        nothing in a group that is not connected, or closed.
        """
        if self._monitor is not None:
            self.barrier(_LEAVE)
            self._outbox.put(None)
            if self.is_primary and self._peers:
                self._sender.join()
            self._disconnect()

    def _disconnect(self) -> None:
        assert self._monitor is not None
        self._monitor.stop()
        self._monitor = None
        self._outbox.put(None)
        for peer in self._peers.values():
            peer.connection.close()

    def _handle(self, number: int, message: Message) -> None:
        """Handle a message of process `number`, in the thread of the monitor.

        Raises: ValueError if this process does not send such messages.
        """
        if isinstance(message, Abort):
            if self._monitor is not None and not self._monitor.is_stopping:
                self._monitor.fail(
                    message.reason, message.exit_code, has_stalled=message.has_stalled
                )
        elif isinstance(message, Gather) and self.is_primary:
            self._contribute(message.tag, number, message.value)
        elif isinstance(message, Result) and len(message.values) == self.num_processes:
            self._peers[number].has_left |= message.tag == _LEAVE
            self._publish(message.tag, message.values)
        else:
            raise ValueError(f"unexpected message: {type(message).__name__}")

    def _contribute(self, tag: str, number: int, value: Any) -> None:
        """Process 0: record a contribution; the last one makes the result for all."""
        if tag == _LEAVE and number:
            self._peers[number].has_left = True
        with self._result_arrived:
            values = self._contributions.setdefault(tag, {})
            values[number] = value
            if len(values) < self.num_processes:
                return
            del self._contributions[tag]
        ordered = [values[n] for n in range(self.num_processes)]
        self._outbox.put(encode(Result(tag=tag, values=ordered)))
        self._publish(tag, ordered)

    def _send_results(self) -> None:
        """Process 0: send results to all, in a thread of its own.

        A frozen process reads nothing, and must not stop the thread that watches it.
        """
        while (text := self._outbox.get()) is not None:
            for peer in self._peers.values():
                peer.connection.send_text(text)

    def _publish(self, tag: str, values: list[Any]) -> None:
        with self._result_arrived:
            self._results[tag] = values
            self._result_arrived.notify_all()


def _subject(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]} has"
    return f"{len(numbers)} processes have"


def _exit(reason: str, exit_code: int) -> None:
    """Exit at once with a line on stderr and in the log; the main thread may hang in a collective.

    If another thread hangs in a write to the log, it holds the log's lock, and that must not delay
    the exit.
    """
    _in_time(_write_reason, reason)
    os._exit(exit_code)


def _in_time(write: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a thread of its own, and give it a few seconds: its file may hang."""
    writer = threading.Thread(target=write, args=arguments, daemon=True)
    writer.start()
    writer.join(_LAST_WORDS_SECONDS)


def _write_reason(reason: str) -> None:
    sys.stderr.write(f"error: {reason}\n")  # in one piece: other processes may write there too
    sys.stderr.flush()
    _LOG.debug("error: %s", reason)
    for handler in _LOG.handlers:
        handler.flush()
