"""Handshake of two processes: each proves to the other that it knows the token of the run.

The token is a secret that the launcher makes for one attempt of a run and gives to all of its
processes. It never travels:

    process i: torus 1 NONCE_I
    process 0: torus 1 NONCE_0 HMAC(token, "process 0", NONCE_I, NONCE_0)
    process i: its hello, sealed

Both nonces are random and used once, so a recorded handshake proves nothing later. Each direction
has a key, HMAC(token, direction, NONCE_I, NONCE_0), and every message carries
HMAC(key, number of the message, text). So nobody in the middle can insert, change, repeat or
reorder messages. They can be read: nothing here is encrypted, because no message holds a secret.
A missing message is noticed as a lost connection.

Process 0 therefore interprets two lines of a stranger: the first against a pattern, the second by
its HMAC. JSON is parsed only afterwards.

Without a token, which is allowed on the loopback only, the key is empty. Then the seal protects
against accidents, but not against other users of the machine.
"""

import hmac
import re
import secrets
import socket
import time

from parallel.cluster.connection import Connection, Seal
from parallel.cluster.messages import Hello, parse

OTHER_TOKEN = (
    "has another TORUS_RUN_TOKEN, so it belongs to another run or to another attempt of this run"
)
HANDSHAKE_SECONDS = 10.0
"""Seconds from a connection to the hello of the process behind it."""
MAX_HELLO_BYTES = 1 << 16
_MAX_OPENING_BYTES = 256
_OPENING = re.compile(rb"torus 1 ([0-9a-f]{64})")
_CHALLENGE = re.compile(rb"torus 1 ([0-9a-f]{64}) ([0-9a-f]{64})")
_REFUSAL = b"torus 1 other token"


class OtherTokenError(ValueError):
    """The other end of a connection knows another token, or none."""


def _derive(token: str, purpose: bytes, nonces: bytes) -> bytes:
    key = token.encode(errors="surrogateescape")  # environment variables may have any bytes
    return hmac.digest(key, b"torus 1 " + purpose + b"\0" + nonces, "sha256")


def _seals(token: str, nonces: bytes) -> tuple[Seal, Seal]:
    """Return the seals of messages to process 0 and from process 0."""
    return Seal(_derive(token, b"to 0", nonces)), Seal(_derive(token, b"from 0", nonces))


class Stranger:
    """A connection at process 0 whose other end has not authenticated yet; never blocks."""

    def __init__(self, sock: socket.socket, host: str, deadline: float):
        sock.setblocking(False)
        self.host, self.deadline = host, deadline
        """IP address of the other end; time of `time.monotonic` at which it is dropped."""
        self._socket = sock
        self._received = b""
        self._seals: tuple[Seal, Seal] | None = None

    def fileno(self) -> int:
        """Return the file descriptor, so that `selectors` accepts a Stranger."""
        return self._socket.fileno()

    def advance(self, token: str) -> tuple[Hello, Connection] | None:
        """Read what has arrived; return the hello once it is complete and authentic.

        Raises: ValueError with the reason why the connection must be dropped; OSError.
        """
        limit = MAX_HELLO_BYTES if self._seals else _MAX_OPENING_BYTES
        data = self._socket.recv(limit - len(self._received))
        if not data:
            raise ValueError("closed the connection during the handshake")
        self._received += data
        line, separator, rest = self._received.partition(b"\n")
        if not separator:
            if len(self._received) >= limit:
                raise ValueError(f"sent a line of more than {limit} bytes")
            return None
        if rest:
            raise ValueError("sent more than one line at a time")
        self._received = b""
        if self._seals is None:
            self._challenge(line, token)
            return None
        return self._open_hello(line, *self._seals)

    def _challenge(self, line: bytes, token: str) -> None:
        opening = _OPENING.fullmatch(line)
        if opening is None:
            raise ValueError("does not speak the protocol of Torus")
        own = secrets.token_bytes(32)
        nonces = bytes.fromhex(opening[1].decode()) + own
        self._seals = _seals(token, nonces)
        proof = _derive(token, b"process 0", nonces)
        # It fits into the empty buffer of a new connection, else BlockingIOError drops it.
        self._socket.sendall(f"torus 1 {own.hex()} {proof.hex()}\n".encode())

    def _open_hello(self, line: bytes, to_0: Seal, from_0: Seal) -> tuple[Hello, Connection]:
        try:
            text = to_0.open(line)
        except ValueError:
            raise OtherTokenError(OTHER_TOKEN) from None
        hello = parse(text)
        if not isinstance(hello, Hello):
            raise ValueError("sent another message before its hello")
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return hello, Connection(self._socket, outgoing=from_0, incoming=to_0)

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()


def authenticate(sock: socket.socket, token: str, deadline: float) -> Connection:
    """Carry out the handshake with process 0, up to the hello, and return the connection.

    deadline: of `time.monotonic`.

    Raises: OtherTokenError; ValueError if the other end is not process 0 of a run; OSError.
    """
    own = secrets.token_bytes(32)
    sock.sendall(f"torus 1 {own.hex()}\n".encode())
    line = b""
    while not line.endswith(b"\n"):
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(remaining)
        data = sock.recv(_MAX_OPENING_BYTES - len(line))
        if not data:
            raise ValueError("closed the connection during the handshake")
        line += data
        if len(line) >= _MAX_OPENING_BYTES:
            raise ValueError("sent too long a line")
    challenge = _CHALLENGE.fullmatch(line[:-1])
    if challenge is None:
        raise ValueError("does not speak the protocol of Torus")
    nonces = own + bytes.fromhex(challenge[1].decode())
    if not hmac.compare_digest(challenge[2].decode(), _derive(token, b"process 0", nonces).hex()):
        sock.sendall(_REFUSAL + b"\n")  # for a clear line in its log: no seal fits this line
        raise OtherTokenError(OTHER_TOKEN)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    to_0, from_0 = _seals(token, nonces)
    return Connection(sock, outgoing=to_0, incoming=from_0)
