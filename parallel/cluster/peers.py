"""The processes of a run, talking over TCP beside the devices: who came, who is left, what all say.

Process 0 listens at the coordinator's address; each of the others keeps one connection to it, with
one JSON object per line. A killed process is known at once (its connection closes), a frozen one
when it has been silent for `peer_timeout`, one that computes nothing after `stall_timeout`; then
every process ends with a line that names it. jax's own service only aborts, after longer.
"""

import contextlib
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, PositiveInt

_LOG = logging.getLogger("torus")

EXIT_PEER = 76
"""A process was lost, hung or never came: start all of them again."""
EXIT_DISAGREE = 2
"""Processes that differ in what they were given: bad input."""
_LEAVE = "leave"
_TICK = 1.0  # seconds between two signs of life


class ClusterConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How long the processes of a run wait for each other, in seconds."""

    start_timeout: PositiveInt = 300
    """For all to come; then the missing ones are listed, and the run ends with 76."""
    peer_timeout: PositiveInt = 60
    """For a sign of life; a process that was killed is noticed at once."""
    stall_timeout: PositiveInt = 1800
    """For a training step of any process to end."""


class PeerError(Exception):
    """The processes cannot go on together. code: with which all of them end."""

    def __init__(self, reason: str, code: int = EXIT_PEER):
        super().__init__(reason)
        self.code = code


@dataclass
class _Peer:
    """What is known of a process."""

    host: str
    connection: socket.socket | None = None
    unread: bytes = b""
    heard: float = 0.0
    doing: str | None = None
    since: float = 0.0

    def close(self) -> None:
        """Ends the connection, if there is one."""
        if self.connection is not None:
            self.connection.close()

    @property
    def is_gone(self) -> bool:
        """Whether it has closed its connection."""
        assert self.connection is not None
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Peers:
    """All processes of a run, seen from one. Of a single process it costs nothing."""

    def __init__(
        self,
        num_processes: int = 1,
        process_id: int = 0,
        config: ClusterConfig | None = None,
        *,
        end: Callable[[str, int], None] | None = None,
    ):
        """end: (reason, exit code), called in a thread when a process is lost; the default says
        why on stderr and in the log, and exits."""
        self.num_processes, self.process_id = num_processes, process_id
        self.hosts: list[str] = [socket.gethostname()]
        """Host name of every process."""
        self.skews: list[float] = [0.0]
        """By how many seconds the clock of each is ahead of that of process 0."""
        self.config = config or ClusterConfig()
        self._end = end or _exit
        self._peers: dict[int, _Peer] = {}
        self._posts: dict[str, dict[int, Any]] = {}
        self._results: dict[str, list[Any]] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._left: set[int] = set()
        self._closing = False
        self._doing: tuple[str | None, float] = (None, time.monotonic())
        self._thread: threading.Thread | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes and talks for all."""
        return self.process_id == 0

    def join(self, address: str, facts: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Waits until all processes are connected to process 0 at HOST:PORT.

        facts: told to all; returns those of every process. Raises: PeerError with who is missing.
        """
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + self.config.start_timeout
        hello = {"hello": self.process_id, "of": self.num_processes, "host": self.hosts[0]}
        hello["facts"] = facts or {}
        serve = self._listen if self.is_first else self._call
        welcome = serve(host, int(port), hello, deadline)
        self.hosts = [entry["host"] for entry in welcome]
        self.skews = [entry["skew"] for entry in welcome]
        self._thread = threading.Thread(target=self._watch_all, name="peers", daemon=True)
        self._thread.start()
        return [entry["facts"] for entry in welcome]

    def doing(self, what: str | None) -> None:
        """Tells what this process works on; from then on the stall timeout runs, not with None."""
        self._doing = what, time.monotonic()

    def post(self, topic: str, value: Any) -> None:
        """Tells all a JSON value on a topic of which all speak once; does not wait."""
        if self.is_first:
            self._posted(topic, 0, value)
        else:
            self._send(self._peers[0], {"post": topic, "value": value})

    def collect(self, topic: str, seconds: float | None = None) -> list[Any]:
        """What each process posted, in their order; waits for the last of them.

        Raises: TimeoutError after so many seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: topic in self._results, seconds):
                raise TimeoutError(topic)
            return self._results.pop(topic)

    def gather(self, topic: str, value: Any) -> list[Any]:
        """`post` and `collect`."""
        self.post(topic, value)
        return self.collect(topic)

    def from_first(self, topic: str, make: Callable[[], Any]) -> Any:
        """A JSON value that process 0 makes, on all of them."""
        return self.gather(topic, make() if self.is_first else None)[0]

    def compare(self, topic: str, facts: Mapping[str, Any]) -> None:
        """Holds that flat JSON facts are the same on all processes.

        Raises: PeerError that names, by fact, who says what; a restart would not help.
        """
        told = self.gather(topic, dict(facts))
        for key in sorted({key for each in told for key in each}):
            said: dict[str, list[int]] = {}
            for number, each in enumerate(told):
                said.setdefault(json.dumps(each.get(key)), []).append(number)
            if len(said) > 1:
                usual = max(said, key=lambda value: len(said[value]))
                odd = ", ".join(
                    f"process {n} on {self.hosts[n]} has {value}"
                    for value, numbers in said.items()
                    if value != usual
                    for n in numbers
                )
                self.disagree(
                    f"{topic}: {key}: {odd}, where {_count(said[usual])} {usual}; "
                    "give all processes the same"
                )

    def disagree(self, reason: str) -> None:
        """What all of them find: it ends all, with the same code whoever is first.

        Raises: PeerError.
        """
        self.leave(EXIT_DISAGREE, reason)
        raise PeerError(reason, EXIT_DISAGREE)

    def leave(self, code: int, reason: str = "") -> None:
        """The end of this process; if it is not the end that all come to, it ends the others.

        Does nothing the second time.
        """
        if self._thread is None:
            return
        if reason:
            # A collective fails when a process is lost: the watch, which knows whom, goes first.
            self._thread.join(_TICK)
            self._closing = True  # process 0 tells it to all, this one too
            who = f"process {self.process_id} on {self.hosts[self.process_id]}"
            self._broadcast({"end": f"{who} ended: {reason}", "code": code})
        else:
            self.gather(_LEAVE, code)
        self._closing = True
        self._thread.join()
        self._thread = None
        self._close()

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _listen(
        self, host: str, port: int, hello: dict[str, Any], deadline: float
    ) -> list[dict[str, Any]]:
        """Process 0: takes a connection of each of the others."""
        came = {0: {**hello, "skew": 0.0}}
        here = host if host in ("127.0.0.1", "localhost") else ""
        try:
            listener = socket.create_server((here, port), backlog=self.num_processes)
        except OSError as error:
            raise PeerError(
                f"process 0 on {hello['host']} cannot open port {port}: "
                f"{os.strerror(error.errno or 0)}; end who holds it, or name another"
            ) from error
        with listener:
            # Who was killed while it waited may come again.
            while len(came := self._living(came)) < self.num_processes:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    break
                try:
                    entry = json.loads(_read_line(connection, time.monotonic() + _TICK))
                    number, skew = entry["hello"], entry["clock"] - time.time()
                except (OSError, ValueError, KeyError, TypeError):
                    connection.close()  # not one of ours
                    continue
                came_twice = number in self._living(came)
                if not came_twice and number in self._peers:
                    self._peers[number].close()
                self._peers[-1 if came_twice else number] = _Peer(
                    entry["host"], connection, heard=time.monotonic()
                )
                if entry["of"] != self.num_processes:
                    self._refuse(
                        f"process {number} on {entry['host']} came as one of {entry['of']}; "
                        f"process 0 on {hello['host']} waits for {self.num_processes}",
                        EXIT_DISAGREE,
                    )
                if came_twice:
                    self._refuse(
                        f"process {number} came twice: from {came[number]['host']} and from "
                        f"{entry['host']}; give each an id of its own"
                    )
                came[number] = {**entry, "skew": skew}
                _settle(connection)
        if len(came := self._living(came)) < self.num_processes:
            missing = [str(n) for n in range(self.num_processes) if n not in came]
            here = ", ".join(f"{n} ({entry['host']})" for n, entry in sorted(came.items()))
            self._refuse(
                f"{len(came)} of {self.num_processes} processes came within "
                f"{self.config.start_timeout} s: {here}; missing: {', '.join(missing)}; look at "
                "their logs, or raise cluster.start_timeout"
            )
        welcome = [came[n] for n in range(self.num_processes)]
        self._broadcast({"welcome": welcome})
        return welcome

    def _living(self, came: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        return {n: came[n] for n in came if n == 0 or not self._peers[n].is_gone}

    def _refuse(self, reason: str, code: int = EXIT_PEER) -> None:
        self._broadcast({"end": reason, "code": code})
        self._close()
        raise PeerError(reason, code)

    def _call(
        self, host: str, port: int, hello: dict[str, Any], deadline: float
    ) -> list[dict[str, Any]]:
        """The others: connects to process 0, which may not have come yet."""
        # A little longer than process 0 waits, which knows more of who is missing.
        deadline += 5 * _TICK
        problem = "no answer"
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.ExitStack() as stack:
                try:
                    connection = socket.create_connection((host, port), timeout=left)
                    stack.enter_context(connection)
                    connection.sendall(_line({**hello, "clock": time.time()}))
                    reply = json.loads(_read_line(connection, deadline))
                    if "end" in reply:
                        raise PeerError(reply["end"], reply["code"])
                    welcome = reply["welcome"]
                except (OSError, ValueError, KeyError, TypeError) as error:  # not process 0 yet
                    problem = str(error) or type(error).__name__
                    time.sleep(0.1)
                    continue
                stack.pop_all()
            _settle(connection)
            self._peers[0] = _Peer(welcome[0]["host"], connection, heard=time.monotonic())
            return welcome
        raise PeerError(
            f"process 0 at {host}:{port} did not come within {self.config.start_timeout} s: "
            f"{problem}; look at its log, or check the address"
        )

    def _watch_all(self) -> None:
        """`_watch`, whose failure ends this process: unwatched it could wait for ever."""
        try:
            self._watch()
        except Exception as error:
            who = f"process {self.process_id} on {self.hosts[self.process_id]}"
            self._finish(f"{who} cannot watch: {type(error).__name__}: {error}", EXIT_PEER)

    def _watch(self) -> None:
        """Reads what the others say, tells that this process lives, and notices who does not."""
        with selectors.DefaultSelector() as selector:
            for number, peer in self._peers.items():
                assert peer.connection is not None
                selector.register(peer.connection, selectors.EVENT_READ, number)
            beat = time.monotonic() - _TICK
            while not self._closing:
                for key, _ in selector.select(timeout=_TICK / 4):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - beat >= _TICK:
                    if now - beat > 5 * _TICK:  # it was this process that stood still
                        for peer in self._peers.values():
                            peer.heard += now - beat
                    beat = now
                    what, since = self._doing
                    self._broadcast({"beat": what, "seconds": now - since})
                    self._look(now)

    def _read(self, number: int) -> bool:
        """Takes what a connection holds; False when it holds no more."""
        peer = self._peers[number]
        assert peer.connection is not None
        try:
            data = peer.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            if not self._closing and number not in self._left:
                self._lose(number, "is gone: its connection closed")
            return False
        peer.heard = time.monotonic()
        *lines, peer.unread = (peer.unread + data).split(b"\n")
        for line in lines:
            self._take(number, json.loads(line))
        return True

    def _take(self, number: int, message: dict[str, Any]) -> None:
        peer = self._peers[number]
        if "beat" in message:
            peer.doing, peer.since = message["beat"], peer.heard - message["seconds"]
        elif "post" in message:
            self._posted(message["post"], number, message["value"])
        elif "result" in message:
            if message["result"] == _LEAVE:
                self._left.add(number)
            self._publish(message["result"], message["values"])
        elif "end" in message and not self._closing:
            self._finish(message["end"], message["code"])

    def _posted(self, topic: str, number: int, value: Any) -> None:
        """Process 0: another word on a topic; the last one is the result."""
        if topic == _LEAVE:
            self._left.add(number)
        with self._changed:
            said = self._posts.setdefault(topic, {})
            said[number] = value
            if len(said) < self.num_processes:
                return
            del self._posts[topic]
        values = [said[n] for n in range(self.num_processes)]
        self._broadcast({"result": topic, "values": values})
        self._publish(topic, values)

    def _publish(self, topic: str, values: list[Any]) -> None:
        with self._changed:
            self._results[topic] = values
            self._changed.notify_all()

    def _look(self, now: float) -> None:
        """Whether all are alive, and get on."""
        for number, peer in self._peers.items():
            if now - peer.heard > self.config.peer_timeout:
                self._lose(number, f"has been silent for {self.config.peer_timeout} s")
                return
        if not self.is_first:
            return
        limit = self.config.stall_timeout
        known = {0: _Peer(self.hosts[0], doing=self._doing[0], since=self._doing[1])} | self._peers
        stalled = [n for n, p in known.items() if p.doing and now - p.since > limit]
        if stalled:
            told = ", ".join(
                f"process {n} on {p.host}: {p.doing or 'nothing'} for {now - p.since:.0f} s"
                for n, p in sorted(known.items(), key=lambda item: item[1].since)
            )
            reason = f"nothing has got on for {limit} s (cluster.stall_timeout); {told}"
            self._finish(reason, EXIT_PEER)

    def _lose(self, number: int, how: str) -> None:
        peer = self._peers[number]
        last = f"; its last word was {peer.doing!r}" if peer.doing else ""
        reason = f"process {number} on {peer.host} {how}{last}; start all processes again"
        self._finish(reason, EXIT_PEER)

    def _finish(self, reason: str, code: int) -> None:
        """The end of all: by process 0 the others know."""
        if self.is_first:
            self._broadcast({"end": reason, "code": code})
        self._closing = True
        self._end(reason, code)

    def _broadcast(self, message: dict[str, Any]) -> None:
        for peer in self._peers.values():
            self._send(peer, message)

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        assert peer.connection is not None
        # Whom it does not reach, `_watch` will miss.
        with self._sending, contextlib.suppress(OSError):
            peer.connection.sendall(_line(message))


def _count(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"process {numbers[0]} has"
    return f"{len(numbers)} processes have"


def _settle(connection: socket.socket) -> None:
    """For good, and without waiting to fill packets."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """The first line, and nothing after it.

    Raises: ValueError if the connection ends before, TimeoutError.
    """
    line = b""
    while not line.endswith(b"\n"):
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        byte = connection.recv(1)
        if not byte:
            raise ValueError("the connection closed")
        line += byte
    return line


def _exit(reason: str, code: int) -> None:
    """Ends this process at once: others may wait for it in a collective that never ends."""
    # Whoever hangs in a write to the log holds its lock: that must not keep this process.
    teller = threading.Thread(target=_tell, args=(reason,), daemon=True)
    teller.start()
    teller.join(5 * _TICK)
    os._exit(code)


def _tell(reason: str) -> None:
    sys.stderr.write(f"error: {reason}\n")  # at once: other processes may write there too
    sys.stderr.flush()
    _LOG.debug("error: %s", reason)
    for handler in _LOG.handlers:
        handler.flush()
