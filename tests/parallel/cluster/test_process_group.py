"""Process groups: all-gathers, broadcasts, comparisons, failures and the end."""

import random
import time
from typing import Any

import pytest
from process_groups import HOST

from exit_codes import EXIT_BAD_INPUT, EXIT_PROCESS_LOST
from parallel.cluster import process_group
from parallel.cluster.process_group import ProcessGroup


def test_all_gather_returns_the_values_of_all_in_order(connected):
    found = connected.each(lambda group: group.all_gather("tag", {"n": [group.process_id, None]}))
    assert found == [[{"n": [0, None]}, {"n": [1, None]}, {"n": [2, None]}]] * 3


def test_an_all_gather_can_be_started_early_and_read_late(connected):
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
    assert connected.each(call) == [[*wanted, [[99, i] for i in range(3)]]] * 3


def test_an_all_gather_that_timed_out_can_still_be_read(connected):
    first = connected.groups[0]
    first.start_all_gather("late", 0)
    with pytest.raises(TimeoutError, match="late"):
        first.wait_all_gather("late", 0.1)
    for number in (1, 2):
        connected.groups[number].start_all_gather("late", number)
    assert first.wait_all_gather("late") == [0, 1, 2]


def test_only_process_0_makes_the_value_of_a_broadcast(connected):
    calls = []

    def make(number: int) -> str:
        calls.append(number)
        return f"from {number}"

    found = connected.each(lambda group: group.broadcast("tag", lambda: make(group.process_id)))
    assert found == ["from 0"] * 3 and calls == [0]


def test_equal_values_pass_the_check(connected, monkeypatch):
    values = {"a": 1, "b": [1.5, None], "c": "text"}
    assert connected.each(lambda group: group.check_equal("preflight", values)) == [None] * 3
    sent: list[Any] = []
    start = ProcessGroup.start_all_gather

    def note(group: ProcessGroup, tag: str, value: Any) -> None:
        sent.append(value)
        start(group, tag, value)

    monkeypatch.setattr(ProcessGroup, "start_all_gather", note)
    assert connected.each(lambda group: group.check_equal("preflight", values)) == [None] * 3
    assert len(set(sent)) == 1 and len(sent) == 3 and len(sent[0]) == 64  # digests alone


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
def test_check_equal_names_who_differs_and_fails_on_all(connected, values, difference):
    def check(group: ProcessGroup) -> None:
        value = values[group.process_id]
        group.check_equal("preflight", {"a": 0, "b": value, "z": group.process_id})

    errors = connected.each(check)
    reason = f"preflight: b differs: {difference}; start all processes with the same"
    for error, failures in zip(errors, connected.failures, strict=True):
        assert (str(error), error.exit_code) == (reason, EXIT_BAD_INPUT)
        # The abort of a process that was quicker gives the same reason.
        assert all(code == EXIT_BAD_INPUT and reason in line for line, code in failures)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_failed_process_ends_the_others_with_its_code_and_reason(connected, number):
    connected.groups[number].abort("out of paper", 9)
    for other in {0, 1, 2} - {number}:
        reason = f"process {number} on {HOST} failed: out of paper"
        assert connected.wait_for_failure(other) == (reason, 9)
    assert not connected.failures[number]


def test_close_waits_for_the_last_process_and_is_no_failure(connected):
    def close(group: ProcessGroup) -> None:
        time.sleep(0.1 * group.process_id)
        group.close()

    connected.each(close)
    for group in connected.groups:
        assert all(peer.connection.fileno() == -1 for peer in group._peers.values())
        group.close()
        group.abort("again", 1)
    assert connected.failures == [[], [], []]


def test_a_group_of_one_process_needs_no_connection():
    alone = ProcessGroup()
    assert alone.is_primary and alone.all_gather("x", 1) == [1]
    assert alone.broadcast("y", lambda: 2) == 2
    alone.barrier("z")
    alone.check_equal("preflight", {"a": 1})
    alone.set_phase("step 1")
    alone.close()
    alone.abort("reason", 1)


def test_by_default_a_failure_exits_with_a_line_on_stderr(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(process_group.os, "_exit", codes.append)
    ProcessGroup(2)._on_failure("process 1 is lost", EXIT_PROCESS_LOST)
    assert codes == [EXIT_PROCESS_LOST]
    assert capsys.readouterr().err == "error: process 1 is lost\n"
