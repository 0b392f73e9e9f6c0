"""Strangers that disturb the start of a run through raw sockets: what each sends is random."""

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from process_groups import TOKEN, dial

from parallel.cluster.handshake import _CHALLENGE, _REFUSAL, MAX_HELLO_BYTES, _seals

HELLO = {"kind": "hello", "process_id": 1, "num_processes": 3, "host": "h", "payload": {}}
# One of these makes the hello of a process that knows the token invalid. Another number of
# processes, or an id that is taken, is not among them: from such a process they end the run.
BAD_FIELDS: list[dict[str, Any]] = [
    {"process_id": True},
    {"process_id": 0},
    {"process_id": -1},
    {"process_id": 3},
    {"process_id": 1.0},
    {"process_id": "1"},
    {"process_id": None},
    {"process_id": 10**30},
    {"num_processes": 0},
    {"num_processes": [3]},
    {"host": ""},
    {"host": "a\nb"},
    {"host": "\x1b[2J"},
    {"host": "h" * 300},
    {"host": 1},
    {"payload": []},
    {"clock": "now"},
    {"clock": float("nan")},
    {"clock": float("inf")},
    {"clock": True},
    {"kind": "abort"},
    {"kind": "members"},
    {"kind": "heartbeat"},
    {"kind": "unknown"},
    {"kind": None},
    {"unknown": 1},
]
OLD_LINES = [
    b'{"hello":1,"of":2,"clock":0}\n',
    b'{"process_id": 1, "num_processes": 99, "host": "h", "payload": {}, "clock": 0.0}\n',
    b'{"process_id": 1, "num_processes": 3, "host": "h", "payload": {}, "clock": 0.0}\n',
    b'{"abort": "over", "exit_code": 0}\n',
    b'{"gather": "leave", "value": 0}\n',
    b"[" * 200 + b"\n",
    b"9" * 200 + b"\n",
    b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


def hello(**changes: Any) -> bytes:
    return json.dumps({**HELLO, "clock": time.time(), **changes}).encode()


class Strangers:
    """Connects to one address after another; every message is a connection."""

    def __init__(self, choices: random.Random):
        self.choices = choices
        self.recorded: list[tuple[bytes, bytes]] = []
        """Opening and hello of processes of earlier attempts with the same token."""
        self._open: list[socket.socket] = []

    def send(self, address: str, text: bytes | None = None) -> None:
        """Be one stranger, of a random kind; with a text, one that sends it first or second."""
        kinds: list[Callable[[socket.socket], None]] = [
            self._say_anything,
            self._answer_with_garbage,
            self._answer_unsealed,
            self._answer_with_a_replay,
            self._answer_with_another_token,
            self._answer_with_an_invalid_hello,
            self._answer_with_a_wrong_seal,
            self._answer_without_end,
        ]
        sock = dial(address)
        try:
            if text is None:
                self.choices.choice(kinds)(sock)
            else:
                if self.choices.randrange(2):
                    self._open_with(sock)
                sock.sendall(text)
        except ConnectionError:
            pass  # dropped while it talked
        if self.choices.randrange(4):
            hang_up(sock)
        else:
            self._open.append(sock)
        if len(self._open) > 40:
            hang_up(self._open.pop(0))

    def close(self) -> None:
        while self._open:
            hang_up(self._open.pop())

    def _bytes(self, limit: int) -> bytes:
        return bytes(self.choices.randrange(256) for _ in range(self.choices.randrange(limit)))

    def _say_anything(self, sock: socket.socket) -> None:
        opening, replay = self.choices.choice([*self.recorded, (b"torus 1 " + b"0" * 64, b"")])
        text = self.choices.choice(
            [
                self._bytes(400),
                self._bytes(40) + b"\n",
                self.choices.choice(OLD_LINES),
                opening[: self.choices.randrange(len(opening))] + b"\n",
                opening + b"\n" + replay + b"\n",
                opening,
                hello() + b"\n",
                b"x" * self.choices.choice([255, 256, 257, 5000]),
                b"",
            ]
        )
        sock.sendall(text)

    def _open_with(self, sock: socket.socket, opening: bytes = b"torus 1 " + b"5" * 64) -> bytes:
        """Send a valid opening; return both nonces."""
        sock.sendall(opening + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            data = sock.recv(1000)
            if not data:
                raise ConnectionResetError
            answer += data
        challenge = _CHALLENGE.fullmatch(answer[:-1])
        assert challenge is not None
        return bytes.fromhex((opening[8:] + challenge[1]).decode())

    def _answer_with_garbage(self, sock: socket.socket) -> None:
        self._open_with(sock)
        text = self.choices.choice([self._bytes(300), _REFUSAL, b"0" * 64 + b" {}", b" " * 65, b""])
        sock.sendall(text + b"\n")

    def _answer_unsealed(self, sock: socket.socket) -> None:
        self._open_with(sock)
        seal = self.choices.choice([b"", b"0" * 64 + b" ", b"\xff" * 64 + b" ", b"f" * 65])
        sock.sendall(seal + hello() + b"\n")

    def _answer_with_a_replay(self, sock: socket.socket) -> None:
        if self.recorded:
            opening, line = self.choices.choice(self.recorded)
            self._open_with(sock, opening)
            sock.sendall(line + b"\n")

    def _answer_with_another_token(self, sock: socket.socket) -> None:
        nonces = self._open_with(sock)
        token = self.choices.choice(["", TOKEN[:-1], TOKEN + " ", "the attempt before"])
        sock.sendall(_seals(token, nonces)[0].close(hello()) + b"\n")

    def _answer_with_an_invalid_hello(self, sock: socket.socket) -> None:
        to_0, _ = _seals(TOKEN, self._open_with(sock))
        bad = self.choices.choice(
            [
                hello(**self.choices.choice(BAD_FIELDS)),
                self._bytes(200),
                b"[" * 50_000,
                b"1" * 5000,
                b"null",
                hello()[:-1],
            ]
        )
        sock.sendall(to_0.close(bad.replace(b"\n", b"")) + b"\n")

    def _answer_with_a_wrong_seal(self, sock: socket.socket) -> None:
        """Send a valid hello with a bit changed, or for the other direction, or as second."""
        to_0, from_0 = _seals(TOKEN, self._open_with(sock))
        line = bytearray(to_0.close(hello()))
        kind = self.choices.randrange(3)
        if kind == 0:
            line[self.choices.randrange(len(line))] ^= 1 << self.choices.randrange(8)
        else:
            line[:] = (to_0 if kind == 1 else from_0).close(hello())
        sock.sendall(line.replace(b"\n", b"") + b"\n")

    def _answer_without_end(self, sock: socket.socket) -> None:
        self._open_with(sock)
        sock.sendall(b"y" * self.choices.choice([1, 1000, MAX_HELLO_BYTES + 1]))


def hang_up(sock: socket.socket) -> None:
    """Close a connection with a reset, so that no port of this machine stays taken."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
