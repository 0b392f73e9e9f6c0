"""Processes that talk over TCP, here threads of one: who came, who is lost, what all say."""

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

from parallel.cluster import peers as module
from parallel.cluster.peers import EXIT_DISAGREE, EXIT_PEER, ClusterConfig, PeerError, Peers

SECONDS = 60.0  # that anything may take on a busy machine
HOST = socket.gethostname()
End = tuple[str, int]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def seconds(start: float = SECONDS, peer: float = 1e9, stall: float = 1e9) -> ClusterConfig:
    """Also less than a second."""
    return ClusterConfig.model_construct(
        start_timeout=start, peer_timeout=peer, stall_timeout=stall
    )


def until(condition: Callable[[], Any]) -> None:
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.005)


class Company:
    """All processes of a run, each with a thread of its own."""

    def __init__(self) -> None:
        self.address, self.all, self.ends = free_address(), list[Peers](), list[list[End]]()

    def add(self, *ids: int, of: int, config: ClusterConfig | None = None) -> None:
        for number in ids:
            ends: list[End] = []
            self.ends.append(ends)
            config = config or seconds()
            self.all.append(Peers(of, number, config, end=lambda *e, ends=ends: ends.append(e)))

    def each(self, do: Callable[[Peers], Any]) -> list[Any]:
        """What it gives to each of them, or the PeerError that it raises."""

        def call(peers: Peers) -> Any:
            try:
                return do(peers)
            except PeerError as error:
                return error

        with ThreadPoolExecutor(len(self.all)) as pool:
            return list(pool.map(call, self.all))

    def join(self) -> list[Any]:
        return self.each(lambda peers: peers.join(self.address, {"id": peers.process_id}))

    def wait_end(self, number: int) -> End:
        """How process `number` was ended."""
        until(lambda: self.ends[number])
        assert len(self.ends[number]) == 1
        return self.ends[number][0]


@pytest.fixture
def company(monkeypatch) -> Iterator[Company]:
    monkeypatch.setattr(module, "_TICK", 0.05)
    found = Company()
    yield found
    for peers in found.all:
        peers.leave(1, "the test is over")
    assert not [thread for thread in threading.enumerate() if thread.name == "peers"]


@pytest.fixture
def three(company) -> Company:
    """Three that have come."""
    company.add(0, 1, 2, of=3)
    assert not [found for found in company.join() if isinstance(found, PeerError)]
    return company


def test_all_know_the_facts_of_all_in_the_order_of_their_ids(company):
    company.add(2, 0, 3, 1, of=4)
    assert company.join() == [[{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}]] * 4
    for peers in company.all:
        assert peers.hosts == [HOST] * 4 and len(peers.skews) == 4
        assert peers.is_first == (peers.process_id == 0)


def test_missing_ones_are_listed_with_those_that_came(company):
    company.add(0, 2, of=4, config=seconds(start=0.6))
    errors = company.join()
    assert {str(error) for error in errors} == {
        f"2 of 4 processes came within 0.6 s: 0 ({HOST}), 2 ({HOST}); missing: 1, 3; look at "
        "their logs, or raise cluster.start_timeout"
    }
    assert [error.code for error in errors] == [EXIT_PEER, EXIT_PEER]


def test_who_finds_no_process_0_says_where_it_looked(company):
    company.add(1, of=2, config=seconds(start=0.1))
    (error,) = company.join()
    assert error.code == EXIT_PEER
    assert str(error).startswith(f"process 0 at {company.address} did not come within 0.1 s: ")
    assert "refused" in str(error)


def test_a_port_that_is_taken_is_named(company):
    company.add(0, of=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        company.address = f"127.0.0.1:{taken.getsockname()[1]}"
        (error,) = company.join()
    port = company.address.partition(":")[2]
    assert str(error) == (
        f"process 0 on {HOST} cannot open port {port}: Address already in use; end who holds it, "
        "or name another"
    )


def come_and_die(company: Company, said: bytes) -> None:
    """A process that is killed in the roll call."""
    host, _, port = company.address.partition(":")
    with socket.socket() as killed:
        until(lambda: killed.connect_ex((host, int(port))) == 0)
        killed.sendall(said)


def test_who_was_killed_while_it_waited_may_come_again(company):
    company.add(0, 2, 1, of=3)
    first, two, one = company.all
    with ThreadPoolExecutor(3) as pool:
        came = [pool.submit(first.join, company.address)]
        come_and_die(company, b'{"hello": 1, "of": 3, "host": "h", "clock": 0.0}\n')
        come_and_die(company, b'{"hello": 2')
        came += [pool.submit(peers.join, company.address) for peers in (two, one)]
        assert [len(found.result(10)) for found in came] == [3, 3, 3]
    assert first.hosts == [HOST] * 3


def test_who_was_killed_while_it_waited_is_missing(company):
    company.add(0, of=3, config=seconds(start=0.6))
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(company.all[0].join, company.address)
        come_and_die(company, b'{"hello": 1, "of": 3, "host": "h", "clock": 0.0}\n')
        with pytest.raises(PeerError, match=r"^1 of 3 processes came .* missing: 1, 2; "):
            came.result(10)


def test_who_stood_still_gives_the_others_their_time_again(company, monkeypatch):
    """All of a machine that is suspended: nobody was silent for longer than oneself."""
    company.add(0, 1, of=2, config=seconds(peer=1.0))
    company.join()
    suspended = [0.0]
    clock = {"monotonic": lambda: time.monotonic() + suspended[0], "time": time.time}
    monkeypatch.setattr(module, "time", SimpleNamespace(**clock))
    for _ in range(10):
        suspended[0] += 9.0
        time.sleep(0.2)
    assert company.ends == [[], []]


def test_collect_ends_after_its_time_and_the_word_still_comes(three):
    three.all[0].post("late", 0)
    with pytest.raises(TimeoutError, match="late"):
        three.all[0].collect("late", 0.1)
    for number in (1, 2):
        three.all[number].post("late", number)
    assert three.all[0].collect("late") == [0, 1, 2]


def test_an_id_that_comes_twice_ends_all_with_its_number(company):
    company.add(0, 1, 1, of=3)
    reason = f"process 1 came twice: from {HOST} and from {HOST}; give each an id of its own"
    assert [(str(error), error.code) for error in company.join()] == [(reason, EXIT_PEER)] * 3


def test_another_number_of_processes_ends_all(company):
    company.add(0, of=3)
    company.add(1, of=2)
    reason = f"process 1 on {HOST} came as one of 2; process 0 on {HOST} waits for 3"
    assert [(str(error), error.code) for error in company.join()] == [(reason, EXIT_DISAGREE)] * 2


def test_strangers_do_not_disturb_the_roll_call(company):
    host, port = company.address.split(":")
    rubbish = [b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"7\n", b"\xff\n", b"half a li"]
    strangers = []

    def come_first() -> None:
        for text in rubbish:
            until(lambda: _connect(strangers, host, int(port)))
            strangers[-1].sendall(text)
        strangers.pop().close()
        company.add(1, of=2)
        company.all[1].join(company.address)

    company.add(0, of=2)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come_first)
        company.all[0].join(company.address)
        coming.result(SECONDS)
    for stranger in strangers:
        stranger.close()
    assert company.each(lambda peers: peers.gather("here", peers.process_id)) == [[0, 1]] * 2
    assert company.ends == [[], []]


def _connect(strangers: list[socket.socket], host: str, port: int) -> bool:
    try:
        strangers.append(socket.create_connection((host, port)))
    except ConnectionRefusedError:
        return False
    return True


def test_a_clock_that_is_ahead_is_measured_by_all(company, monkeypatch):
    clock = time.time
    ahead = {"ahead": 1000.0, "behind": -1000.0}
    monkeypatch.setattr(
        module.time, "time", lambda: clock() + ahead.get(threading.current_thread().name, 0)
    )

    def join(peers: Peers) -> None:
        threading.current_thread().name = ("right", "ahead", "behind")[peers.process_id]
        peers.join(company.address)

    company.add(0, 1, 2, of=3)
    company.each(join)
    for peers in company.all:
        assert peers.skews == pytest.approx([0, 1000, -1000], abs=100)
        assert peers.skews == company.all[0].skews


def test_the_clock_of_one_that_waited_for_process_0_is_not_late(company, monkeypatch):
    clock = time.monotonic
    monkeypatch.setattr(module.time, "time", lambda: 1000 * clock())  # a second counts as 1000
    company.add(1, 0, of=2)

    def join(peers: Peers) -> None:
        if peers.is_first:
            time.sleep(1.0)
        peers.join(company.address)

    company.each(join)
    assert abs(company.all[0].skews[1]) < 900


def test_gather_gives_the_values_of_all_in_order(three):
    words = three.each(lambda peers: peers.gather("word", {"n": [peers.process_id, None]}))
    assert words == [[{"n": [0, None]}, {"n": [1, None]}, {"n": [2, None]}]] * 3


def test_what_is_posted_is_collected_later_by_each_in_its_own_time(three):
    def speak(peers: Peers) -> list[list[Any]]:
        draw = random.Random(peers.process_id)
        heard = []
        for n in range(100):
            peers.post(f"round {n}", [n, peers.process_id])
            time.sleep(draw.choice([0, 0, 0.001, 0.005]))
            if n:
                heard.append(peers.collect(f"round {n - 1}"))
            heard.append(peers.gather("again", n))
        return [*heard, peers.collect("round 99")]

    wanted: list[list[Any]] = []
    for n in range(100):
        wanted += [[[n - 1, i] for i in range(3)]] if n else []
        wanted += [[n] * 3]
    assert three.each(speak) == [[*wanted, [[99, i] for i in range(3)]]] * 3


def test_only_process_0_makes_what_all_have_from_it(three):
    made = []

    def make(number: int) -> str:
        made.append(number)
        return f"of {number}"

    found = three.each(lambda p: p.from_first("it", lambda: make(p.process_id)))
    assert found == ["of 0"] * 3 and made == [0]


def test_equal_facts_are_no_matter(three):
    facts = {"a": 1, "b": [1.5, None], "c": "text"}
    assert three.each(lambda peers: peers.compare("preflight", facts)) == [None] * 3


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1, 1, 2], f"process 2 on {HOST} has 2, where 2 processes have 1"),
        ([3, 1, 1], f"process 0 on {HOST} has 3, where 2 processes have 1"),
        (
            ["x", "y", "z"],
            f'process 1 on {HOST} has "y", process 2 on {HOST} has "z", where process 0 has "x"',
        ),
        ([True, None, True], f"process 1 on {HOST} has null, where 2 processes have true"),
    ],
)
def test_who_differs_from_most_is_named_and_all_end_with_2(three, values, told):
    def compare(peers: Peers) -> None:
        value = values[peers.process_id]
        peers.compare("preflight", {"a": 0, "b": value, "z": peers.process_id})

    found = three.each(compare)
    reason = f"preflight: b: {told}; give all processes the same"
    for number, error in enumerate(found):
        assert (str(error), error.code) == (reason, EXIT_DISAGREE)
        # The word of one that was quicker says the same.
        assert all(code == EXIT_DISAGREE and reason in line for line, code in three.ends[number])


def test_a_connection_that_closes_ends_all_others_at_once(three):
    three.all[1].doing("step 7")
    until(lambda: three.all[0]._peers[1].doing)
    three.all[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)
    reason = (
        f"process 1 on {HOST} is gone: its connection closed; its last word was 'step 7'; start "
        "all processes again"
    )
    assert [three.wait_end(n) for n in (0, 2)] == [(reason, EXIT_PEER)] * 2


def test_the_end_of_process_0_ends_all(three):
    first = three.all[0]
    first._closing = True
    first._thread.join()
    for peer in first._peers.values():
        peer.connection.shutdown(socket.SHUT_RDWR)
    reason = f"process 0 on {HOST} is gone: its connection closed; start all processes again"
    assert [three.wait_end(n) for n in (1, 2)] == [(reason, EXIT_PEER)] * 2


@pytest.mark.parametrize("silent", [0, 1])
def test_who_gives_no_sign_of_life_ends_all_others(company, monkeypatch, silent):
    company.add(0, 1, of=2, config=seconds(peer=1.0))
    company.join()
    monkeypatch.setattr(company.all[silent], "_send", lambda *_: None)
    reason = f"process {silent} on {HOST} has been silent for 1.0 s; start all processes again"
    assert company.wait_end(1 - silent) == (reason, EXIT_PEER)


@pytest.mark.parametrize("number", [0, 1])
def test_who_cannot_watch_ends_rather_than_waits_for_ever(company, monkeypatch, number):
    company.add(0, 1, of=2)
    company.join()

    def fail(now: float) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(company.all[number], "_look", fail)
    reason = f"process {number} on {HOST} cannot watch: RuntimeError: a bug"
    assert company.wait_end(number) == (reason, EXIT_PEER)
    company.all[number]._close()  # as the end of a process does
    assert company.wait_end(1 - number)[1] == EXIT_PEER


def test_signs_of_life_keep_all_going_that_say_nothing_else(company):
    company.add(0, 1, of=2, config=seconds(peer=2.0))
    company.join()
    time.sleep(2.5)
    assert company.ends == [[], []]


def test_a_step_that_does_not_end_ends_all_from_the_first_one_on(company):
    company.add(0, 1, of=2, config=seconds(stall=1000.0))
    company.join()
    first, other = company.all

    def heard(word: str | None) -> bool:
        return first._peers[1].doing == word

    later = time.monotonic() + 2000
    first._look(later)
    first.doing("step 1")
    other.doing("step 1")
    until(lambda: heard("step 1"))
    first.doing(None)
    other.doing(None)
    until(lambda: heard(None))
    first._look(later)
    assert company.ends == [[], []]
    other.doing("step 4")
    time.sleep(0.01)
    first.doing("step 5")
    until(lambda: heard("step 4"))
    first._look(later)
    for number in range(2):
        reason, code = company.wait_end(number)
        assert code == EXIT_PEER
        assert re.sub(r"for \d+ s", "for N s", reason) == (
            "nothing has got on for 1000.0 s (cluster.stall_timeout); "
            f"process 1 on {HOST}: step 4 for N s, process 0 on {HOST}: step 5 for N s"
        )


@pytest.mark.parametrize("number", [0, 1, 2])
def test_who_fails_ends_the_others_with_its_code_and_reason(three, number):
    three.all[number].leave(9, "out of paper")
    for other in {0, 1, 2} - {number}:
        assert three.wait_end(other) == (f"process {number} on {HOST} ended: out of paper", 9)
    assert not three.ends[number]


def test_the_lost_one_is_named_not_who_failed_for_it(three):
    """A collective fails in the neighbour of a killed process, perhaps before anybody looks."""

    def fail(peers: Peers) -> None:
        if peers.process_id == 1:
            peers._peers[0].connection.shutdown(socket.SHUT_RDWR)
        else:
            peers.leave(1, "the connection was closed by a peer")

    three.each(fail)
    for number in (0, 2):
        reason, code = three.wait_end(number)
        assert code == EXIT_PEER and reason.startswith(f"process 1 on {HOST} is gone")


def test_all_leave_together_quietly_whoever_is_late(three):
    def leave(peers: Peers) -> None:
        time.sleep(0.1 * peers.process_id)
        peers.leave(0)

    three.each(leave)
    for peers in three.all:
        assert [peer.connection.fileno() for peer in peers._peers.values()] in ([-1], [-1, -1])
        peers.leave(0)
        peers.leave(1, "again")
    assert three.ends == [[], [], []]
    assert not [thread for thread in threading.enumerate() if thread.name == "peers"]


def test_a_single_process_talks_to_itself_at_once():
    alone = Peers()
    assert alone.is_first and alone.gather("x", 1) == [1]
    assert alone.from_first("y", lambda: 2) == 2
    alone.compare("preflight", {"a": 1})
    alone.doing("step 1")
    alone.leave(0)
    alone.leave(1, "reason")
    assert alone._thread is None


def test_a_lost_process_ends_this_one_with_a_line_on_stderr(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    Peers(2)._end("process 1 is gone", EXIT_PEER)
    assert codes == [EXIT_PEER]
    assert capsys.readouterr().err == "error: process 1 is gone\n"
