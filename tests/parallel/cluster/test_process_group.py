"""Process groups over TCP, each process a thread of this one: membership, liveness, broadcasts."""

import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from parallel.cluster import liveness, process_group, rendezvous
from parallel.cluster.config import ClusterConfig
from parallel.cluster.errors import EXIT_MISMATCH, EXIT_PROCESS_LOST, ProcessGroupError
from parallel.cluster.process_group import ProcessGroup

TIME_LIMIT = 60.0  # seconds that anything may take on a busy machine
HOST = socket.gethostname()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def timeouts(start: float = TIME_LIMIT, peer: float = 1e9, stall: float = 1e9) -> ClusterConfig:
    """Return a configuration without validation, so that timeouts may be below a second."""
    return ClusterConfig.model_construct(
        start_timeout=start, peer_timeout=peer, stall_timeout=stall
    )


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIME_LIMIT
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


def shut_down(group: ProcessGroup, peer: int) -> None:
    """Close the connection to a peer, as the kernel does for a process that was killed."""
    group._peers[peer].connection._socket.shutdown(socket.SHUT_RDWR)


class Run:
    """All processes of a run, each with a thread of its own."""

    def __init__(self) -> None:
        self.address = free_address()
        self.groups: list[ProcessGroup] = []
        self.failures: list[list[tuple[str, int]]] = []
        """Per process: the calls of its `on_failure`."""

    def add(self, *ids: int, of: int, config: ClusterConfig | None = None) -> None:
        for number in ids:
            calls: list[tuple[str, int]] = []
            self.failures.append(calls)
            self.groups.append(
                ProcessGroup(
                    of,
                    number,
                    config or timeouts(),
                    on_failure=lambda *failure, calls=calls: calls.append(failure),
                )
            )

    def each(self, call: Callable[[ProcessGroup], Any]) -> list[Any]:
        """Return what each process returns, or the ProcessGroupError that it raises."""

        def catch(group: ProcessGroup) -> Any:
            try:
                return call(group)
            except ProcessGroupError as error:
                return error

        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(catch, self.groups))

    def connect(self) -> list[Any]:
        return self.each(lambda group: group.connect(self.address, {"id": group.process_id}))

    def wait_for_failure(self, number: int) -> tuple[str, int]:
        wait_until(lambda: self.failures[number])
        (failure,) = self.failures[number]
        return failure


@pytest.fixture
def run(monkeypatch) -> Iterator[Run]:
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_HELLO_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_EXTRA_SECONDS", 0.25)
    found = Run()
    yield found
    for group in found.groups:
        group.abort("the test is over", 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "liveness"]


@pytest.fixture
def three(run) -> Run:
    """A run of three connected processes."""
    run.add(0, 1, 2, of=3)
    assert not [found for found in run.connect() if isinstance(found, ProcessGroupError)]
    return run


def test_every_process_gets_the_payloads_of_all_in_the_order_of_their_ids(run):
    run.add(2, 0, 3, 1, of=4)
    assert run.connect() == [[{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}]] * 4
    for group in run.groups:
        assert group.hosts == [HOST] * 4 and len(group.clock_skews) == 4
        assert group.is_primary == (group.process_id == 0)


def test_missing_processes_are_named_on_all_that_connected(run):
    run.add(0, 2, of=4, config=timeouts(start=0.6))
    errors = run.connect()
    assert {(str(error), error.exit_code) for error in errors} == {
        (
            "2 of 4 processes did not connect within 0.6 s (cluster.start_timeout); missing: 1, 3; "
            f"connected: 0 ({HOST}), 2 ({HOST}); check the console output of the missing ones, or "
            "raise the timeout",
            EXIT_PROCESS_LOST,
        )
    }


def test_a_missing_process_0_is_named_with_its_address(run):
    run.add(1, of=2, config=timeouts(start=0.1))
    (error,) = run.connect()
    assert error.exit_code == EXIT_PROCESS_LOST
    assert str(error).startswith(f"process 0 at {run.address} did not answer within 0.1 s ")
    assert "refused" in str(error)


def test_a_port_in_use_is_named(run):
    run.add(0, of=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run.address = f"127.0.0.1:{taken.getsockname()[1]}"
        (error,) = run.connect()
    port = run.address.partition(":")[2]
    assert str(error) == (
        f"process 0 on {HOST} cannot listen on port {port}: Address already in use; stop the "
        "process that uses the port, or give --coordinator another one"
    )


HELLO_OF_1 = b'{"process_id": 1, "num_processes": 3, "host": "h", "payload": {}, "clock": 0.0}\n'


def connect_and_die(run: Run, sent: bytes) -> None:
    """Act as a process that is killed while the others connect."""
    host, _, port = run.address.partition(":")
    with socket.socket() as killed:
        wait_until(lambda: killed.connect_ex((host, int(port))) == 0)
        killed.sendall(sent)


def test_a_process_killed_during_the_start_may_connect_again(run):
    run.add(0, 2, 1, of=3)
    first, two, one = run.groups
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(first.connect, run.address)]
        connect_and_die(run, HELLO_OF_1)
        connect_and_die(run, HELLO_OF_1[:10])
        results += [pool.submit(group.connect, run.address) for group in (two, one)]
        assert [len(found.result(10)) for found in results] == [3, 3, 3]
    assert first.hosts == [HOST] * 3


def test_a_process_killed_during_the_start_is_missing(run):
    run.add(0, of=3, config=timeouts(start=0.6))
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run.groups[0].connect, run.address)
        connect_and_die(run, HELLO_OF_1)
        with pytest.raises(ProcessGroupError, match=r"^2 of 3 processes .*; missing: 1, 2; "):
            result.result(10)


def test_a_process_id_used_twice_fails_on_all(run):
    run.add(0, 1, 1, of=3)
    reason = f"--process-id=1 is used twice, on {HOST} and on {HOST}; give each process its own id"
    errors = [(str(error), error.exit_code) for error in run.connect()]
    assert errors == [(reason, EXIT_PROCESS_LOST)] * 3


def test_another_number_of_processes_fails_on_all(run):
    run.add(0, of=3)
    run.add(1, of=2)
    reason = (
        f"--num-processes=2 of process 1 on {HOST} differs from 3 of process 0 on {HOST}; give all "
        "processes the same number"
    )
    errors = [(str(error), error.exit_code) for error in run.connect()]
    assert errors == [(reason, EXIT_MISMATCH)] * 2


def test_strangers_do_not_disturb_the_start(run):
    host, port = run.address.split(":")
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
        run.add(1, of=2)
        run.groups[1].connect(run.address)

    run.add(0, of=2)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_after_strangers)
        run.groups[0].connect(run.address)
        connecting.result(TIME_LIMIT)
    for stranger in strangers:
        stranger.close()
    assert run.each(lambda group: group.all_gather("id", group.process_id)) == [[0, 1]] * 2
    assert run.failures == [[], []]


def test_every_process_knows_by_how_much_each_clock_is_ahead(run, monkeypatch):
    clock = time.time
    ahead = {"ahead": 1000.0, "behind": -1000.0}
    monkeypatch.setattr(
        rendezvous.time, "time", lambda: clock() + ahead.get(threading.current_thread().name, 0)
    )

    def connect(group: ProcessGroup) -> None:
        threading.current_thread().name = ("right", "ahead", "behind")[group.process_id]
        group.connect(run.address)

    run.add(0, 1, 2, of=3)
    run.each(connect)
    for group in run.groups:
        assert group.clock_skews == pytest.approx([0, 1000, -1000], abs=100)
        assert group.clock_skews == run.groups[0].clock_skews


def test_waiting_for_process_0_does_not_count_as_clock_skew(run, monkeypatch):
    clock = time.monotonic
    monkeypatch.setattr(rendezvous.time, "time", lambda: 1000 * clock())  # a second counts as 1000
    run.add(1, 0, of=2)

    def connect(group: ProcessGroup) -> None:
        if group.is_primary:
            time.sleep(1.0)
        group.connect(run.address)

    run.each(connect)
    assert abs(run.groups[0].clock_skews[1]) < 900


def test_all_gather_returns_the_values_of_all_in_order(three):
    found = three.each(lambda group: group.all_gather("tag", {"n": [group.process_id, None]}))
    assert found == [[{"n": [0, None]}, {"n": [1, None]}, {"n": [2, None]}]] * 3


def test_an_all_gather_can_be_started_early_and_read_late(three):
    def call(group: ProcessGroup) -> list[list[Any]]:
        draw = random.Random(group.process_id)
        results = []
        for n in range(100):
            group.start_all_gather(f"round {n}", [n, group.process_id])
            time.sleep(draw.choice([0, 0, 0.001, 0.005]))
            if n:
                results.append(group.wait_all_gather(f"round {n - 1}"))
            results.append(group.all_gather("again", n))
        return [*results, group.wait_all_gather("round 99")]

    wanted: list[list[Any]] = []
    for n in range(100):
        wanted += [[[n - 1, i] for i in range(3)]] if n else []
        wanted += [[n] * 3]
    assert three.each(call) == [[*wanted, [[99, i] for i in range(3)]]] * 3


def test_an_all_gather_that_timed_out_can_still_be_read(three):
    first = three.groups[0]
    first.start_all_gather("late", 0)
    with pytest.raises(TimeoutError, match="late"):
        first.wait_all_gather("late", 0.1)
    for number in (1, 2):
        three.groups[number].start_all_gather("late", number)
    assert first.wait_all_gather("late") == [0, 1, 2]


def test_only_process_0_makes_the_value_of_a_broadcast(three):
    calls = []

    def make(number: int) -> str:
        calls.append(number)
        return f"from {number}"

    found = three.each(lambda group: group.broadcast("tag", lambda: make(group.process_id)))
    assert found == ["from 0"] * 3 and calls == [0]


def test_equal_values_pass_the_check(three):
    values = {"a": 1, "b": [1.5, None], "c": "text"}
    assert three.each(lambda group: group.check_equal("preflight", values)) == [None] * 3


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ([1, 1, 2], f"process 2 on {HOST} has 2, 2 processes have 1"),
        ([3, 1, 1], f"process 0 on {HOST} has 3, 2 processes have 1"),
        (
            ["x", "y", "z"],
            f'process 1 on {HOST} has "y", process 2 on {HOST} has "z", process 0 has "x"',
        ),
        ([True, None, True], f"process 1 on {HOST} has null, 2 processes have true"),
    ],
)
def test_check_equal_names_who_differs_and_fails_on_all(three, values, difference):
    def check(group: ProcessGroup) -> None:
        value = values[group.process_id]
        group.check_equal("preflight", {"a": 0, "b": value, "z": group.process_id})

    errors = three.each(check)
    reason = f"preflight: b differs: {difference}; start all processes with the same"
    for error, failures in zip(errors, three.failures, strict=True):
        assert (str(error), error.exit_code) == (reason, EXIT_MISMATCH)
        # The abort of a process that was quicker gives the same reason.
        assert all(code == EXIT_MISMATCH and reason in line for line, code in failures)


def test_a_lost_connection_fails_at_once_on_all_others_with_the_last_phase(three):
    three.groups[1].set_phase("step 7")
    wait_until(lambda: three.groups[0]._peers[1].phase.name)
    shut_down(three.groups[1], 0)
    reason = (
        f"process 1 on {HOST} is lost: its connection closed, last phase 'step 7'; restart all "
        "processes"
    )
    assert [three.wait_for_failure(n) for n in (0, 2)] == [(reason, EXIT_PROCESS_LOST)] * 2


def test_the_loss_of_process_0_fails_on_all_others(three):
    first = three.groups[0]
    first._monitor.stop()
    for peer in first._peers:
        shut_down(first, peer)
    reason = f"process 0 on {HOST} is lost: its connection closed; restart all processes"
    assert [three.wait_for_failure(n) for n in (1, 2)] == [(reason, EXIT_PROCESS_LOST)] * 2


@pytest.mark.parametrize("silent", [0, 1])
def test_a_process_without_heartbeats_is_named_by_the_others(run, monkeypatch, silent):
    run.add(0, 1, of=2, config=timeouts(peer=1.0))
    run.connect()
    (peer,) = run.groups[silent]._peers.values()
    monkeypatch.setattr(peer.connection, "send", lambda *_: None)
    reason = (
        f"process {silent} on {HOST} has sent no heartbeat for 1.0 s (cluster.peer_timeout); "
        "restart all processes"
    )
    assert run.wait_for_failure(1 - silent) == (reason, EXIT_PROCESS_LOST)


def test_heartbeats_alone_keep_the_group_alive(run):
    run.add(0, 1, of=2, config=timeouts(peer=2.0))
    run.connect()
    time.sleep(2.5)
    assert run.failures == [[], []]


def test_after_a_suspension_of_this_process_the_others_get_their_time_again(run, monkeypatch):
    """When a machine is suspended, no process was silent for longer than its observer."""
    run.add(0, 1, of=2, config=timeouts(peer=1.0))
    run.connect()
    suspended = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + suspended[0], time=time.time)
    monkeypatch.setattr(liveness, "time", clock)
    for _ in range(10):
        suspended[0] += 9.0
        time.sleep(0.2)
    assert run.failures == [[], []]


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_in_the_monitor_fails_rather_than_hangs(run, monkeypatch, number):
    run.add(0, 1, of=2)
    run.connect()

    def fail(now: float) -> None:
        raise RuntimeError("a bug")

    group = run.groups[number]
    monkeypatch.setattr(group._monitor, "_check", fail)
    reason = f"process {number} on {HOST} cannot monitor the others: RuntimeError: a bug"
    assert run.wait_for_failure(number) == (reason, EXIT_PROCESS_LOST)
    for peer in group._peers.values():  # as the exit of a process does
        peer.connection.close()
    assert run.wait_for_failure(1 - number)[1] == EXIT_PROCESS_LOST


def test_a_stalled_phase_fails_on_all_and_lists_the_phases_oldest_first(run):
    run.add(0, 1, of=2, config=timeouts(stall=1000.0))
    run.connect()
    first, other = run.groups

    def set_phases(phase: str | None, other_phase: str | None) -> None:
        other.set_phase(other_phase)
        time.sleep(0.01)
        first.set_phase(phase)
        wait_until(lambda: first._peers[1].phase.name == other_phase)

    later = time.monotonic() + 2000
    first._monitor._check(later)
    set_phases("step 1", "step 1")
    set_phases(None, None)
    first._monitor._check(later)
    assert run.failures == [[], []]
    set_phases("step 5", "step 4")
    first._monitor._check(later)
    for number in range(2):
        reason, code = run.wait_for_failure(number)
        assert code == EXIT_PROCESS_LOST
        assert re.sub(r"for \d+ s\b", "for N s", reason) == (
            "no progress for 1000.0 s (cluster.stall_timeout): "
            f"process 1 on {HOST}: step 4 for N s, process 0 on {HOST}: step 5 for N s; restart "
            "all processes, or raise the timeout if this phase needs longer"
        )


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_failed_process_ends_the_others_with_its_code_and_reason(three, number):
    three.groups[number].abort("out of paper", 9)
    for other in {0, 1, 2} - {number}:
        reason = f"process {number} on {HOST} failed: out of paper"
        assert three.wait_for_failure(other) == (reason, 9)
    assert not three.failures[number]


def test_the_lost_process_is_named_rather_than_one_that_failed_because_of_it(three):
    """A collective may fail beside a killed process before its connection is seen to close."""

    def fail(group: ProcessGroup) -> None:
        if group.process_id == 1:
            shut_down(group, 0)
        else:
            group.abort("the connection was closed by a peer", 1)

    three.each(fail)
    for number in (0, 2):
        reason, code = three.wait_for_failure(number)
        assert code == EXIT_PROCESS_LOST and reason.startswith(f"process 1 on {HOST} is lost")


def test_close_waits_for_the_last_process_and_is_no_failure(three):
    def close(group: ProcessGroup) -> None:
        time.sleep(0.1 * group.process_id)
        group.close(0)

    three.each(close)
    for group in three.groups:
        assert all(peer.connection.fileno() == -1 for peer in group._peers.values())
        group.close(0)
        group.abort("again", 1)
    assert three.failures == [[], [], []]


def test_a_group_of_one_process_needs_no_connection():
    alone = ProcessGroup()
    assert alone.is_primary and alone.all_gather("x", 1) == [1]
    assert alone.broadcast("y", lambda: 2) == 2
    alone.barrier("z")
    alone.check_equal("preflight", {"a": 1})
    alone.set_phase("step 1")
    alone.close(0)
    alone.abort("reason", 1)


def test_by_default_a_failure_exits_with_a_line_on_stderr(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(process_group.os, "_exit", codes.append)
    ProcessGroup(2)._on_failure("process 1 is lost", EXIT_PROCESS_LOST)
    assert codes == [EXIT_PROCESS_LOST]
    assert capsys.readouterr().err == "error: process 1 is lost\n"
