"""Start of a process group: who connects, who is missing, what is refused, clock skew."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from process_groups import HOST, TIME_LIMIT, Processes, timeouts, wait_until

from parallel.cluster import rendezvous
from parallel.cluster.config import EXIT_MISMATCH, EXIT_PROCESS_LOST, ProcessGroupError
from parallel.cluster.process_group import ProcessGroup

HELLO_OF_1 = b'{"process_id": 1, "num_processes": 3, "host": "h", "payload": {}, "clock": 0.0}\n'


def connect_and_die(processes: Processes, sent: bytes) -> None:
    """Act as a process that is killed while the others connect."""
    host, _, port = processes.address.partition(":")
    with socket.socket() as killed:
        wait_until(lambda: killed.connect_ex((host, int(port))) == 0)
        killed.sendall(sent)


def test_every_process_gets_the_payloads_of_all_in_the_order_of_their_ids(processes):
    processes.add(2, 0, 3, 1, of=4)
    assert processes.connect() == [[{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}]] * 4
    for group in processes.groups:
        assert group.hosts == [HOST] * 4 and len(group.clock_skews) == 4
        assert group.is_primary == (group.process_id == 0)


def test_missing_processes_are_named_on_all_that_connected(processes):
    processes.add(0, 2, of=4, config=timeouts(start=0.6))
    errors = processes.connect()
    assert {(str(error), error.exit_code) for error in errors} == {
        (
            "2 of 4 processes did not connect within 0.6 s (cluster.start_timeout); missing: 1, 3; "
            f"connected: 0 ({HOST}), 2 ({HOST}); check the console output of the missing ones, or "
            "raise the timeout",
            EXIT_PROCESS_LOST,
        )
    }


def test_a_missing_process_0_is_named_with_its_address(processes):
    processes.add(1, of=2, config=timeouts(start=0.1))
    (error,) = processes.connect()
    assert error.exit_code == EXIT_PROCESS_LOST
    assert str(error).startswith(f"process 0 at {processes.address} did not answer within 0.1 s ")
    assert "refused" in str(error)


def test_a_port_in_use_is_named(processes):
    processes.add(0, of=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        processes.address = f"127.0.0.1:{taken.getsockname()[1]}"
        (error,) = processes.connect()
    port = processes.address.partition(":")[2]
    assert str(error) == (
        f"process 0 on {HOST} cannot listen on port {port}: Address already in use; stop the "
        "process that uses the port, or give --coordinator another one"
    )


def test_a_process_killed_during_the_start_may_connect_again(processes):
    processes.add(0, 2, 1, of=3)
    first, two, one = processes.groups
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(first.connect, processes.address)]
        connect_and_die(processes, HELLO_OF_1)
        connect_and_die(processes, HELLO_OF_1[:10])
        results += [pool.submit(group.connect, processes.address) for group in (two, one)]
        assert [len(found.result(10)) for found in results] == [3, 3, 3]
    assert first.hosts == [HOST] * 3


def test_a_process_killed_during_the_start_is_missing(processes):
    processes.add(0, of=3, config=timeouts(start=0.6))
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(processes.groups[0].connect, processes.address)
        connect_and_die(processes, HELLO_OF_1)
        with pytest.raises(ProcessGroupError, match=r"^2 of 3 processes .*; missing: 1, 2; "):
            result.result(10)


def test_a_process_id_used_twice_fails_on_all(processes):
    processes.add(0, 1, 1, of=3)
    reason = f"--process-id=1 is used twice, on {HOST} and on {HOST}; give each process its own id"
    errors = [(str(error), error.exit_code) for error in processes.connect()]
    assert errors == [(reason, EXIT_PROCESS_LOST)] * 3


def test_another_number_of_processes_fails_on_all(processes):
    processes.add(0, of=3)
    processes.add(1, of=2)
    reason = (
        f"--num-processes=2 of process 1 on {HOST} differs from 3 of process 0 on {HOST}; give all "
        "processes the same number"
    )
    errors = [(str(error), error.exit_code) for error in processes.connect()]
    assert errors == [(reason, EXIT_MISMATCH)] * 2


def test_strangers_do_not_disturb_the_start(processes):
    host, port = processes.address.split(":")
    rubbish = [b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"7\n", b"\xff\n", b"half a li"]
    strangers: list[socket.socket] = []

    def reach() -> bool:
        try:
            strangers.append(socket.create_connection((host, int(port))))
        except ConnectionRefusedError:
            return False
        return True

    def connect_after_strangers() -> None:
        for text in rubbish:
            wait_until(reach)
            strangers[-1].sendall(text)
        strangers.pop().close()
        processes.add(1, of=2)
        processes.groups[1].connect(processes.address)

    processes.add(0, of=2)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_after_strangers)
        processes.groups[0].connect(processes.address)
        connecting.result(TIME_LIMIT)
    for stranger in strangers:
        stranger.close()
    assert processes.each(lambda group: group.all_gather("id", group.process_id)) == [[0, 1]] * 2
    assert processes.failures == [[], []]


def test_every_process_knows_by_how_much_each_clock_is_ahead(processes, monkeypatch):
    clock = time.time
    ahead = {"ahead": 1000.0, "behind": -1000.0}
    monkeypatch.setattr(
        rendezvous.time, "time", lambda: clock() + ahead.get(threading.current_thread().name, 0)
    )

    def connect(group: ProcessGroup) -> None:
        threading.current_thread().name = ("right", "ahead", "behind")[group.process_id]
        group.connect(processes.address)

    processes.add(0, 1, 2, of=3)
    processes.each(connect)
    for group in processes.groups:
        assert group.clock_skews == pytest.approx([0, 1000, -1000], abs=100)
        assert group.clock_skews == processes.groups[0].clock_skews


def test_waiting_for_process_0_does_not_count_as_clock_skew(processes, monkeypatch):
    clock = time.monotonic
    monkeypatch.setattr(rendezvous.time, "time", lambda: 1000 * clock())  # a second counts as 1000
    processes.add(1, 0, of=2)

    def connect(group: ProcessGroup) -> None:
        if group.is_primary:
            time.sleep(1.0)
        group.connect(processes.address)

    processes.each(connect)
    assert abs(processes.groups[0].clock_skews[1]) < 900
