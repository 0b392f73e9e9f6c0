"""The port of process 0 during the start: it lets the processes of this run in, and nobody else.

Handshakes run side by side, so a stranger that says nothing delays no process. Their time, bytes
and number are bounded; whatever else a stranger does, its connection is dropped and counted.
"""

import ipaddress
import logging
import selectors
import socket
import time

from parallel.cluster.connection import Connection
from parallel.cluster.handshake import HANDSHAKE_SECONDS, Stranger
from parallel.cluster.messages import Hello

_LOG = logging.getLogger("torus")
_MAX_STRANGERS = 128  # handshakes at a time, beside one of each process
_POLL_SECONDS = 0.02
_SECONDS_PER_LINE = 10.0  # of the log, about dropped connections


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address means this machine, for every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_interface(host: str) -> str:
    """Return the IP address of this machine that HOST names; "" if there is none, with a log line.

    There is none if the address belongs to a load balancer or a NAT, if the name is unknown here,
    or if this machine alone resolves it to the loopback, as some distributions do for their own
    host name.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = f"cannot be resolved here ({error.strerror})"
    else:
        # IPv4 first: that is what the other processes try first for localhost.
        for family, *_, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
            ip = str(address[0])
            if is_loopback(ip) and not is_loopback(host):
                continue
            with socket.socket(family) as probe:
                try:
                    probe.bind((ip, 0))
                except OSError:
                    continue
            return ip
        reason = "is no address of a network interface of this host"
    _LOG.warning("the coordinator %s %s; process 0 listens on all interfaces", host, reason)
    return ""


class Listener:
    """Listens at HOST:PORT and authenticates what connects. A context manager.

    Raises: OSError if the port is taken.
    """

    def __init__(self, host: str, port: int, num_processes: int, token: str):
        self.interface = find_interface(host)
        """IP address at which it listens; "" for all of this host."""
        self.num_dropped = 0
        self.last_drop = ""
        """Sender and reason of the last dropped connection."""
        family = socket.AF_INET6 if ":" in self.interface else socket.AF_INET
        self._socket = socket.create_server(
            (self.interface, port), family=family, backlog=_MAX_STRANGERS + num_processes
        )
        self._socket.setblocking(False)
        self._token, self._limit = token, _MAX_STRANGERS + num_processes
        self._strangers: dict[Stranger, None] = {}  # a set in the order of their arrival
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._next_line = 0.0

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        for stranger in list(self._strangers):
            self._forget(stranger)
            stranger.close()
        self._selector.close()
        self._socket.close()

    def accept(self, timeout: float) -> list[tuple[Hello, Connection]]:
        """Wait up to `timeout` seconds for data; return the processes that have authenticated."""
        found = []
        for key, _ in self._selector.select(timeout):
            if isinstance(key.fileobj, Stranger):
                found += self._advance(key.fileobj)
            else:
                self._welcome()
        now = time.monotonic()
        for stranger in [s for s in self._strangers if s.deadline <= now]:
            self._drop(stranger, f"sent no hello within {HANDSHAKE_SECONDS:g} s")
        return found

    def _welcome(self) -> None:
        try:
            sock, address = self._socket.accept()
        except OSError:  # it has gone again, or there are no more file descriptors
            if self._strangers:
                self._drop(next(iter(self._strangers)), "made room for another connection")
            else:
                time.sleep(_POLL_SECONDS)
            return
        stranger = Stranger(sock, str(address[0]), time.monotonic() + HANDSHAKE_SECONDS)
        self._strangers[stranger] = None
        self._selector.register(stranger, selectors.EVENT_READ)
        if len(self._strangers) > self._limit:
            self._drop(next(iter(self._strangers)), "made room for another connection")

    def _advance(self, stranger: Stranger) -> list[tuple[Hello, Connection]]:
        if stranger not in self._strangers:  # dropped a moment ago
            return []
        try:
            authenticated = stranger.advance(self._token)
        except OSError as error:
            self._drop(stranger, f"broke the connection ({error.strerror})")
            return []
        except ValueError as error:
            self._drop(stranger, str(error))
            return []
        if authenticated is None:
            return []
        self._forget(stranger)
        return [authenticated]

    def _forget(self, stranger: Stranger) -> None:
        self._selector.unregister(stranger)
        del self._strangers[stranger]

    def _drop(self, stranger: Stranger, reason: str) -> None:
        """Close a connection; log the first, and then one line for all within some seconds."""
        self._forget(stranger)
        stranger.close()
        self.num_dropped += 1
        self.last_drop = f"{stranger.host} {reason}"
        if (now := time.monotonic()) >= self._next_line:
            self._next_line = now + _SECONDS_PER_LINE
            _LOG.warning(
                "process 0 dropped a connection that is not of this run (%d so far): %s",
                self.num_dropped,
                self.last_drop,
            )
