"""Wire protocol of a process group: JSON messages over TCP, one message per line."""

import contextlib
import json
import socket
import threading
import time
from typing import Any

_CHUNK_BYTES = 1 << 16


class Connection:
    """One end of a TCP connection between two processes of a run."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._partial_line = b""
        self._send_lock = threading.Lock()

    def fileno(self) -> int:
        """Return the file descriptor, so that `selectors` accepts a Connection; -1 if closed."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; safe to call from several threads.

        A broken connection is ignored here: the receiving side of it reports the loss.
        """
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for data; return the messages that are complete, None once the peer has closed."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_first(self, deadline: float) -> Any:
        """Return the first message and read nothing after it; the connection then never times out.

        Raises: ValueError if the peer closes early or sends no JSON; TimeoutError at the deadline
            (of `time.monotonic`); OSError.
        """
        line = b""
        while not line.endswith(b"\n"):
            if (remaining := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(remaining)
            byte = self._socket.recv(1)
            if not byte:
                raise ValueError(
                    "the other process closed the connection before a message was complete"
                )
            line += byte
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return json.loads(line)

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
