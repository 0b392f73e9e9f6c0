"""Start of a process group: who connects, who is missing, what is refused, clock skew."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from process_groups import HOST, TIME_LIMIT, TOKEN, Processes, dial, free_address, timeouts

from exit_codes import EXIT_BAD_INPUT, EXIT_PROCESS_LOST
from parallel.cluster import rendezvous
from parallel.cluster.config import ProcessGroupError
from parallel.cluster.handshake import authenticate
from parallel.cluster.listener import Listener
from parallel.cluster.messages import Hello
from parallel.cluster.process_group import ProcessGroup

HELLO_OF_1 = Hello(process_id=1, num_processes=3, host="h", payload={}, clock=0.0)


def connect_and_die(processes: Processes, hello: Hello | None) -> None:
    """Act as a process that is killed while the others connect."""
    with dial(processes.address) as killed:
        connection = authenticate(killed, TOKEN, time.monotonic() + TIME_LIMIT)
        if hello is not None:
            connection.send(hello)


def test_every_process_gets_the_payloads_of_all_in_the_order_of_their_ids(processes):
    processes.add(2, 0, 3, 1, of=4)
    assert processes.connect() == [[{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}]] * 4
    for group in processes.groups:
        assert group.hosts == [HOST] * 4 and len(group.clock_skews) == 4
        assert group.is_primary == (group.process_id == 0)


def test_missing_processes_are_named_on_all_that_connected(processes, monkeypatch):
    monkeypatch.setattr(rendezvous, "_EXTRA_SECONDS", TIME_LIMIT)  # to hear of it from process 0
    processes.add(0, 2, of=4, config=timeouts(start=2.0))
    errors = processes.connect()
    assert {(str(error), error.exit_code) for error in errors} == {
        (
            "2 of 4 processes did not connect within 2.0 s (cluster.start_timeout); missing: 1, 3; "
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


@pytest.mark.parametrize("number", [0, 1])
def test_the_others_are_waited_for_during_the_start_timeout(monkeypatch, number):
    """By a clock that only waiting moves; process 1 waits longer, for the reason of process 0."""
    seconds = [0.0]

    class Silent(Listener):
        def accept(self, timeout):
            seconds[0] += timeout
            return []

    def sleep(pause):
        seconds[0] += pause

    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep, time=time.time)
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(rendezvous, "Listener", Silent)
    group = ProcessGroup(2, number, timeouts(start=100.0), token=TOKEN)
    with pytest.raises(ProcessGroupError, match=r"within 100\.0 s \(cluster\.start_timeout\)"):
        group.connect(free_address())
    assert 100 <= seconds[0] <= 100 + number * rendezvous._EXTRA_SECONDS + 1


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
        connect_and_die(processes, None)
        results += [pool.submit(group.connect, processes.address) for group in (two, one)]
        assert [len(found.result(TIME_LIMIT)) for found in results] == [3, 3, 3]
    assert first.hosts == [HOST] * 3


def test_a_process_killed_during_the_start_is_missing(processes):
    processes.add(0, of=3, config=timeouts(start=3.0))
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(processes.groups[0].connect, processes.address)
        connect_and_die(processes, HELLO_OF_1)
        with pytest.raises(ProcessGroupError, match=r"^2 of 3 processes .*; missing: 1, 2; "):
            result.result(TIME_LIMIT)


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
    assert errors == [(reason, EXIT_BAD_INPUT)] * 2


@pytest.mark.parametrize("of_0", [TOKEN, ""])
def test_a_process_of_another_attempt_is_dropped_and_both_sides_say_why(processes, caplog, of_0):
    processes.add(0, of=2, config=timeouts(start=0.6), token=of_0)
    processes.add(1, of=2, config=timeouts(start=0.2), token="the token of the attempt before")
    first, other = (str(error) for error in processes.connect())
    reason = "has another TORUS_RUN_TOKEN, so it belongs to another run or to another attempt"
    assert first.startswith("1 of 2 processes did not connect within 0.6 s")
    assert f"the last: 127.0.0.1 {reason}" in first and "missing: 1; " in first
    assert other.startswith(f"process 0 at {processes.address} did not answer within 0.2 s")
    assert f"it {reason}" in other
    lines = [record.getMessage() for record in caplog.records]
    assert (
        sum(line.startswith("process 0 dropped a connection ") and reason in line for line in lines)
        == 1
    )
    assert sum(line.endswith("; trying again") and reason in line for line in lines) == 1
    assert not any("the token of" in line for line in [first, other, *lines])


def test_a_process_waits_while_process_0_of_another_attempt_holds_the_port(processes, monkeypatch):
    monkeypatch.setattr(rendezvous, "_OTHER_TOKEN_SECONDS", 0.02)
    host, _, port = processes.address.partition(":")
    processes.add(0, 1, of=2)
    right, other = processes.groups
    with ThreadPoolExecutor(1) as pool:
        with Listener(host, int(port), 2, "the token of the attempt before") as listener:
            connecting = pool.submit(other.connect, processes.address)
            while not listener.num_dropped:
                assert listener.accept(0.1) == []
        right.connect(processes.address)
        connecting.result(TIME_LIMIT)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\n",
        b"HTTP/1.1 400 No\r\n\r\n",
        b'{"abort": "x", "exit_code": 0}\n',
        b"x" * 999,
    ],
)
def test_a_stranger_in_place_of_process_0_cannot_end_a_process(processes, answer):
    """It answers, and then the right process 0 takes the port."""
    host, _, port = processes.address.partition(":")
    processes.add(0, 1, of=2)
    right, other = processes.groups
    with ThreadPoolExecutor(1) as pool:
        with socket.create_server((host, int(port))) as server:
            connecting = pool.submit(other.connect, processes.address)
            for _ in range(3):
                with server.accept()[0] as stranger:
                    stranger.recv(1000)
                    stranger.sendall(answer)
        right.connect(processes.address)
        connecting.result(TIME_LIMIT)


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
