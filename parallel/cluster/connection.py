"""Wire protocol of a process group: sealed JSON messages over TCP, one message per line."""

import contextlib
import hmac
import socket
import threading
import time

from parallel.cluster.messages import Message, encode, parse

_CHUNK_BYTES = 1 << 16
# An all-gather of the whole configuration of a thousand processes has some 30 MB.
_MAX_LINE_BYTES = 1 << 28


class Seal:
    """Authentication of the messages of one direction: an HMAC over their number and text."""

    def __init__(self, key: bytes):
        self._key, self._count = key, 0

    def _code(self, text: bytes) -> bytes:
        numbered = self._count.to_bytes(8, "big") + text
        self._count += 1
        return hmac.digest(self._key, numbered, "sha256").hex().encode()

    def close(self, text: bytes) -> bytes:
        """Return the line, without its line break, of the next message."""
        return self._code(text) + b" " + text

    def open(self, line: bytes) -> bytes:
        """Return the text of the next line. Raises: ValueError if it is not authentic."""
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(text)):
            raise ValueError("a message is not authentic")
        return text


class Connection:
    """One end of an authenticated TCP connection between two processes of a run."""

    def __init__(self, sock: socket.socket, *, outgoing: Seal, incoming: Seal):
        self._socket = sock
        self._outgoing, self._incoming = outgoing, incoming
        self._partial_line = bytearray()
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor, so that `selectors` accepts a Connection; -1 if closed."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message; safe to call from several threads. See `send_text`."""
        self.send_text(encode(message))

    def send_text(self, text: bytes, patience: float = -1) -> None:
        """Send one encoded message; safe to call from several threads.

        A broken connection is ignored here: the receiving side of it reports the loss.

        patience: seconds to wait while another thread sends to this peer, which may be frozen; then
            nothing is sent. -1: no limit.
        """
        if not self._send_lock.acquire(timeout=patience):
            return
        try:
            with contextlib.suppress(OSError):
                self._socket.sendall(self._outgoing.close(text) + b"\n")
        finally:
            self._send_lock.release()

    def receive(self) -> list[Message] | None:
        """Wait for data; return the messages that are complete, None once the peer has closed.

        Raises: ValueError if a message is not authentic, invalid or too long.
        """
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        return [self._parse(line) for line in self._split(data)]

    def receive_first(self, deadline: float) -> Message:
        """Return the first message and read nothing after it; the connection then never times out.

        Raises: ValueError if the peer closes early or sends no valid message; TimeoutError at the
            deadline (of `time.monotonic`); OSError.
        """
        lines: list[bytes] = []
        while not lines:
            if (remaining := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(remaining)
            waiting = self._socket.recv(_CHUNK_BYTES, socket.MSG_PEEK)
            if not waiting:
                raise ValueError(
                    "the other process closed the connection before a message was complete"
                )
            size = waiting.find(b"\n") + 1 or len(waiting)
            lines = self._split(self._socket.recv(size))
        self._socket.settimeout(None)
        return self._parse(lines[0])

    def _split(self, data: bytes) -> list[bytes]:
        """Add data to the partial line; return the lines that are complete."""
        *ends, start = data.split(b"\n")
        lines = []
        for end in ends:
            lines.append(bytes(self._partial_line) + end)
            self._partial_line.clear()
        self._partial_line += start
        if len(self._partial_line) > _MAX_LINE_BYTES:
            raise ValueError(f"a message has more than {_MAX_LINE_BYTES} bytes")
        return lines

    def _parse(self, line: bytes) -> Message:
        return parse(self._incoming.open(line))

    @property
    def is_closed(self) -> bool:
        """Whether the peer has closed its end; reads nothing."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
