"""The port of process 0: its interface, and the limits on those who connect."""

import logging
import socket
import time
from types import SimpleNamespace

import pytest
from process_groups import TIME_LIMIT, TOKEN, free_address
from strangers import hang_up, hello

from parallel.cluster import listener
from parallel.cluster.handshake import authenticate
from parallel.cluster.listener import Listener, find_interface, is_loopback


@pytest.fixture
def port() -> int:
    return int(free_address().partition(":")[2])


def resolve_to(monkeypatch, *addresses: str) -> None:
    """Let every name resolve to these addresses."""
    found = [
        (socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0))
        for ip in addresses
    ]
    monkeypatch.setattr(listener.socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.parametrize(
    ("host", "found"),
    [
        *(("127.0.0.1", True), ("127.0.1.1", True), ("localhost", True), ("::1", True)),
        *(("10.0.0.1", False), ("0.0.0.0", False), ("node1", False), ("localhost.evil", False)),
    ],
)
def test_only_a_name_of_the_loopback_everywhere_is_loopback(host, found):
    assert is_loopback(host) is found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_on_the_loopback_nobody_outside_can_connect(host, port):
    with Listener(host, port, 2, "") as found:
        assert found.interface == "127.0.0.1"
        assert found._socket.getsockname() == ("127.0.0.1", port)


def test_it_listens_at_the_address_of_the_coordinator_only(monkeypatch, port):
    monkeypatch.setattr(listener, "is_loopback", lambda host: False)
    resolve_to(monkeypatch, "127.0.0.2")  # stands for the address of a network interface
    with Listener("node1", port, 2, TOKEN) as found:
        assert found._socket.getsockname() == ("127.0.0.2", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (["203.0.113.7"], "is no address of a network interface of this host"),  # a NAT, a service
        (["127.0.1.1"], "is no address of a network interface of this host"),  # Debian's /etc/hosts
        ([], "cannot be resolved here (no such name)"),
    ],
)
def test_without_such_an_interface_it_listens_on_all_and_says_so(
    monkeypatch, caplog, addresses, reason
):
    def fail(*_, **__):
        raise socket.gaierror(-2, "no such name")

    if addresses:
        resolve_to(monkeypatch, *addresses)
    else:
        monkeypatch.setattr(listener.socket, "getaddrinfo", fail)
    with caplog.at_level(logging.WARNING, "torus"):
        assert find_interface("node1") == ""
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the coordinator node1 {reason}; process 0 listens on all interfaces"
    )


def test_of_several_addresses_it_takes_one_of_this_host(monkeypatch):
    monkeypatch.setattr(listener, "is_loopback", lambda host: False)
    resolve_to(monkeypatch, "fd00::7", "203.0.113.7", "127.0.0.3")
    assert find_interface("node1") == "127.0.0.3"


def test_a_slow_handshake_is_dropped_at_its_deadline(monkeypatch, port):
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.2)
    with Listener("127.0.0.1", port, 2, TOKEN) as found:
        with socket.create_connection(("127.0.0.1", port)) as slow:
            begin = time.monotonic()
            while not found.num_dropped:
                assert time.monotonic() - begin < TIME_LIMIT
                slow.sendall(b"t")
                time.sleep(0.02)
                assert found.accept(0.02) == []
        assert found.last_drop == "127.0.0.1 sent no hello within 0.2 s"


def test_a_silent_stranger_is_dropped_after_ten_seconds(monkeypatch, port):
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep)
    monkeypatch.setattr(listener, "time", clock)
    with Listener("127.0.0.1", port, 2, TOKEN) as found:
        with socket.create_connection(("127.0.0.1", port)):
            found.accept(TIME_LIMIT)  # returns when the stranger is there
            for ahead[0], dropped in ((9.0, 0), (10.5, 1)):
                assert found.accept(0.0) == []
                assert found.num_dropped == dropped


def test_the_oldest_of_too_many_handshakes_makes_room(monkeypatch, port):
    monkeypatch.setattr(listener, "_MAX_STRANGERS", 3)
    with Listener("127.0.0.1", port, 2, TOKEN) as found:
        sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
        while len(found._strangers) < 4:
            found.accept(0.1)
        # A fifth has its place, the sixth takes that of the first.
        sockets += [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        while not found.num_dropped:
            found.accept(0.1)
        assert (found.num_dropped, len(found._strangers)) == (1, 5)
        assert found.last_drop == "127.0.0.1 made room for another connection"
        assert sockets[0].recv(1) == b""
        for sock in sockets:
            hang_up(sock)


def test_without_file_descriptors_it_drops_a_stranger_and_goes_on(monkeypatch, port):
    with Listener("127.0.0.1", port, 2, TOKEN) as found:
        sockets = [socket.create_connection(("127.0.0.1", port))]
        while not found._strangers:
            found.accept(0.1)
        real = found._socket

        class Exhausted:
            def accept(self):
                raise OSError(24, "Too many open files")

        found._socket = Exhausted()
        sockets.append(socket.create_connection(("127.0.0.1", port)))
        while not found.num_dropped:
            assert found.accept(0.1) == []
        assert found.accept(0.1) == []  # nobody is left to drop
        found._socket = real
        while not found._strangers:
            found.accept(0.1)
        for sock in sockets:
            hang_up(sock)


def test_a_process_with_the_token_is_let_in_by_its_hello_alone(port):
    with Listener("127.0.0.1", port, 2, TOKEN) as found, socket.socket() as sock:
        sock.connect(("127.0.0.1", port))
        sock.sendall(b"torus 1 " + b"0" * 64 + b"\n")
        while not any(stranger._seals for stranger in found._strangers):
            assert found.accept(0.1) == []
        ((to_0, _),) = [stranger._seals for stranger in found._strangers]
        sealed = type(to_0)(to_0._key).close(hello()) + b"\n"
        sock.sendall(sealed[:100])
        assert found.accept(0.05) == []  # half of it
        sock.sendall(sealed[100:])
        ((said, connection),) = found.accept(TIME_LIMIT)
        assert (said.process_id, said.num_processes) == (1, 3)
        assert connection.fileno() >= 0 and not found._strangers
        connection.close()


def test_a_process_that_meets_a_silent_stranger_gives_up_at_its_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sock:
            with pytest.raises(TimeoutError):
                authenticate(sock, TOKEN, time.monotonic() + 0.1)
