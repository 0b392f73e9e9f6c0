"""Liveness of a process group: lost, silent and stalled processes are named on all others."""

import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT
from process_groups import HOST, TIME_LIMIT, shut_down, timeouts, wait_until

from exit_codes import EXIT_PROCESS_LOST
from parallel.cluster import liveness
from parallel.cluster.process_group import ProcessGroup


def test_a_lost_connection_fails_at_once_on_all_others_with_the_last_phase(connected):
    connected.groups[1].set_phase("step 7")
    wait_until(lambda: connected.groups[0]._peers[1].phase.name)
    shut_down(connected.groups[1], 0)
    reason = (
        f"process 1 on {HOST} is lost: its connection closed, last phase 'step 7'; restart all "
        "processes"
    )
    assert [connected.wait_for_failure(n) for n in (0, 2)] == [(reason, EXIT_PROCESS_LOST)] * 2


def test_the_loss_of_process_0_fails_on_all_others(connected):
    first = connected.groups[0]
    first._monitor.stop()
    for peer in first._peers:
        shut_down(first, peer)
    reason = f"process 0 on {HOST} is lost: its connection closed; restart all processes"
    assert [connected.wait_for_failure(n) for n in (1, 2)] == [(reason, EXIT_PROCESS_LOST)] * 2


@pytest.mark.parametrize("silent", [0, 1])
def test_a_process_without_heartbeats_is_named_by_the_others(processes, monkeypatch, silent):
    processes.add(0, 1, of=2, config=timeouts(peer=1.0))
    processes.connect()
    (peer,) = processes.groups[silent]._peers.values()
    monkeypatch.setattr(peer.connection, "send_text", lambda *_: None)
    reason = (
        f"process {silent} on {HOST} has sent no heartbeat for 1.0 s (cluster.peer_timeout); "
        "restart all processes"
    )
    assert processes.wait_for_failure(1 - silent) == (reason, EXIT_PROCESS_LOST)


def test_a_large_result_for_frozen_processes_does_not_stop_the_monitor(processes):
    processes.add(0, 1, 2, 3, of=4, config=timeouts(peer=4.0))
    processes.connect()
    value = "x" * (1 << 22)
    for frozen in processes.groups[1:3]:
        frozen.start_all_gather("large", value)
        frozen._monitor.stop()  # reads nothing more, and its connection stays open
    for number in (0, 3):
        processes.groups[number].start_all_gather("large", value)
    reason = f"process 1 on {HOST} has sent no heartbeat for 4.0 s (cluster.peer_timeout)"
    for number in (0, 3):
        found, code = processes.wait_for_failure(number)
        assert found.startswith(reason) and code == EXIT_PROCESS_LOST


@pytest.mark.parametrize("limit", ["peer", "stall"])
def test_a_timeout_ends_neither_long_before_nor_long_after_its_limit(processes, limit):
    processes.add(0, 1, of=2, config=timeouts(**{limit: 1000.0}))
    processes.connect()
    first, _ = processes.groups
    first.set_phase("step 1")
    now = time.monotonic()
    first._monitor._check(now + 900)
    assert processes.failures == [[], []]
    first._monitor._check(now + 1000 + TIME_LIMIT)
    assert f"for 1000.0 s (cluster.{limit}_timeout)" in processes.wait_for_failure(0)[0]


def test_heartbeats_alone_keep_the_group_alive(processes):
    processes.add(0, 1, of=2, config=timeouts(peer=4.0))
    processes.connect()
    time.sleep(4.5)
    assert processes.failures == [[], []]


def test_after_a_suspension_of_this_process_the_others_get_their_time_again(processes, monkeypatch):
    """When a machine is suspended, no process was silent for longer than its observer."""
    processes.add(0, 1, of=2, config=timeouts(peer=1.0))
    processes.connect()
    suspended = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + suspended[0], time=time.time)
    monkeypatch.setattr(liveness, "time", clock)
    for _ in range(10):
        suspended[0] += 9.0
        time.sleep(0.2)
    assert processes.failures == [[], []]


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_in_the_monitor_fails_rather_than_hangs(processes, monkeypatch, number):
    processes.add(0, 1, of=2)
    processes.connect()

    def fail(now: float) -> None:
        raise RuntimeError("a bug")

    group = processes.groups[number]
    monkeypatch.setattr(group._monitor, "_check", fail)
    reason = f"process {number} on {HOST} cannot monitor the others: RuntimeError: a bug"
    assert processes.wait_for_failure(number) == (reason, EXIT_PROCESS_LOST)
    for peer in group._peers.values():  # as the exit of a process does
        peer.connection.close()
    assert processes.wait_for_failure(1 - number)[1] == EXIT_PROCESS_LOST


def test_a_stalled_phase_fails_on_all_with_their_stacks_and_lists_the_phases_oldest_first(
    processes, tmp_path
):
    processes.add(0, 1, of=2, config=timeouts(stall=1000.0))
    processes.connect()
    first, other = processes.groups
    for number, group in enumerate(processes.groups):
        group.stack_file = tmp_path / f"stacks.{number}.txt"

    def set_phases(phase: str | None, other_phase: str | None) -> None:
        # The older one, however long a heartbeat takes.
        other._monitor._phase = liveness.Phase(other_phase, time.monotonic() - 100)
        first.set_phase(phase)
        wait_until(lambda: first._peers[1].phase.name == other_phase)

    later = time.monotonic() + 2000
    first._monitor._check(later)
    set_phases("step 1", "step 1")
    set_phases(None, None)
    first._monitor._check(later)
    assert processes.failures == [[], []]
    set_phases("step 5", "step 4")
    first._monitor._check(later)
    for number in range(2):
        reason, code = processes.wait_for_failure(number)
        assert code == EXIT_PROCESS_LOST
        assert re.sub(r"for \d+ s\b", "for N s", reason) == (
            "no progress for 1000.0 s (cluster.stall_timeout): "
            f"process 1 on {HOST}: step 4 for N s, process 0 on {HOST}: step 5 for N s; the stacks "
            "of all threads are in stacks.txt and stacks.N.txt of the run directory; restart all "
            "processes, or raise the timeout if this phase needs longer"
        )
        stacks = (tmp_path / f"stacks.{number}.txt").read_text()
        assert stacks.partition(" no progress")[2].startswith(" for 1000.0 s")
        assert "thread MainThread:" in stacks and "thread liveness:" in stacks


def test_a_lost_process_leaves_no_stacks(connected, tmp_path):
    for number, group in enumerate(connected.groups):
        group.stack_file = tmp_path / f"stacks.{number}.txt"
    shut_down(connected.groups[1], 0)
    for number in (0, 2):
        connected.wait_for_failure(number)
    assert not list(tmp_path.iterdir())


def alone(processes, **limits: float) -> ProcessGroup:
    processes.add(0, of=1, config=timeouts(**limits))
    (group,) = processes.groups
    group.monitor_alone()
    return group


def test_a_process_that_runs_alone_stalls_too_and_shows_where_it_waits(processes, capsys):
    group = alone(processes, stall=0.5)
    time.sleep(1.0)
    assert processes.failures == [[]], "there is no phase yet"
    group.set_phase("step 3")
    reason, code = processes.wait_for_failure(0)
    assert code == EXIT_PROCESS_LOST
    assert re.fullmatch(
        r"no progress for 0\.5 s \(cluster\.stall_timeout\): "
        rf"process 0 on {HOST}: step 3 for \d+ s; "
        r"the stacks of all threads are in stacks\.txt of the run directory; .*",
        reason,
    )
    # Without a run directory they are on stderr.
    assert "in wait_until\n" in capsys.readouterr().err


def test_a_process_that_runs_alone_gets_its_time_again_after_a_suspension(processes, monkeypatch):
    suspended = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + suspended[0])
    monkeypatch.setattr(liveness, "time", clock)
    alone(processes, stall=1000.0).set_phase("step 3")
    for _ in range(4):
        suspended[0] += 900.0
        time.sleep(0.2)
    assert processes.failures == [[]]


def test_a_group_of_one_closes_at_once(processes):
    group = alone(processes)
    group.set_phase("step 3")
    began = time.monotonic()
    group.close()
    group.close()
    assert time.monotonic() - began < TIME_LIMIT


def test_the_lost_process_is_named_rather_than_one_that_failed_because_of_it(
    connected, monkeypatch
):
    """A collective may fail beside a killed process before its connection is seen to close."""
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", TIME_LIMIT)  # that `abort` waits

    def fail(group: ProcessGroup) -> None:
        if group.process_id == 1:
            shut_down(group, 0)
        else:
            group.abort("the connection was closed by a peer", 1)

    connected.each(fail)
    for number in (0, 2):
        reason, code = connected.wait_for_failure(number)
        assert code == EXIT_PROCESS_LOST and reason.startswith(f"process 1 on {HOST} is lost")


ABORT = """
import ctypes, os, sys, threading, time
from parallel.cluster.liveness import delay_abort

def report():  # as the monitor does, as soon as it gets the interpreter
    time.sleep(0.2)
    os._exit(76)

if sys.argv[1] == "report":
    threading.Thread(target=report).start()
delay_abort()
threading.Thread(target=ctypes.CDLL(None).abort).start()  # as a thread of jax does
ctypes.PyDLL(None).usleep(1_000_000)  # holds the interpreter
time.sleep(60)
"""


def abort_in_a_thread(what: str) -> int:
    return subprocess.run([sys.executable, "-c", ABORT, what], cwd=ROOT).returncode


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_the_monitor_reports_before_an_abort_even_while_another_thread_holds_the_interpreter():
    assert abort_in_a_thread("report") == EXIT_PROCESS_LOST


@pytest.mark.slow  # it sleeps six seconds
@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_a_delayed_abort_still_ends_the_process():
    began = time.monotonic()
    assert abort_in_a_thread("nothing") == -signal.SIGABRT
    assert time.monotonic() - began > 5.5
