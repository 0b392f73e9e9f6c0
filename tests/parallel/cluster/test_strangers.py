"""Fuzzing of the start of a run: strangers send anything, and its processes still meet."""

import json
import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from process_groups import HOST, TIME_LIMIT, TOKEN, Processes, dial, free_address, timeouts
from strangers import BAD_FIELDS, Strangers, hang_up, hello

from parallel.cluster.connection import Connection
from parallel.cluster.handshake import _seals, authenticate
from parallel.cluster.messages import Hello, parse

KEYS = ["kind", "hello", "of", "clock", "process_id", "num_processes", "host", "abort", "exit_code"]


class Recorder:
    """A socket that keeps the lines that are sent."""

    def __init__(self, sock):
        self._sock, self.sent = sock, b""

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def sendall(self, data):
        self.sent += data
        self._sock.sendall(data)


def meet(processes: Processes, strangers: Strangers, texts: list[bytes | None]) -> None:
    """Let three processes of a run meet while strangers send these texts, None for any."""
    processes.address = free_address()
    del processes.groups[:], processes.failures[:]
    processes.add(0, 1, 2, of=3, config=timeouts(start=20))  # a failure is seen after it
    first, one, two = processes.groups
    with ThreadPoolExecutor(3) as pool:
        connecting = [pool.submit(first.connect, processes.address)]
        for text in texts[::2]:
            strangers.send(processes.address, text)
        strangers.recorded.append(record_hello(processes.address))
        connecting.append(pool.submit(one.connect, processes.address))
        for text in texts[1::2]:
            strangers.send(processes.address, text)
        assert not any(future.done() for future in connecting)
        connecting.append(pool.submit(two.connect, processes.address))
        for future in connecting:
            future.result(TIME_LIMIT)
    strangers.close()
    assert processes.each(lambda group: group.all_gather("id", group.process_id)) == [[0, 1, 2]] * 3
    assert first.hosts == [HOST] * 3 and not any(processes.failures)
    processes.each(lambda group: group.close())
    assert not any(processes.failures)


def record_hello(address: str) -> tuple[bytes, bytes]:
    """Return the lines of a process of this run that dies while the others connect."""
    recorder = Recorder(dial(address))
    connection = authenticate(recorder, TOKEN, time.monotonic() + TIME_LIMIT)
    connection.send(parse_hello())
    hang_up(recorder)
    opening, line, _ = recorder.sent.split(b"\n")
    return opening, line


def parse_hello() -> Hello:
    found = parse(hello())
    assert isinstance(found, Hello)
    return found


FEW = settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take hours
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)
TEXTS = st.one_of(
    st.none(),
    st.binary(max_size=200),
    st.binary(max_size=100).map(lambda text: text + b"\n"),
    VALUES.map(lambda value: json.dumps(value).encode() + b"\n"),
)


@FEW
@given(texts=st.lists(TEXTS, min_size=10, max_size=30), seed=st.integers(0, 2**32))
def test_processes_meet_whatever_strangers_send(processes, texts, seed):
    meet(processes, Strangers(random.Random(seed)), texts)


def test_strangers_are_counted_and_logged_in_one_line(processes, caplog):
    with caplog.at_level(logging.WARNING, "torus"):
        meet(processes, Strangers(random.Random(0)), [None] * 200)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 2  # more than one only if this takes ten seconds
    assert lines[0].startswith(
        "process 0 dropped a connection that is not of this run (1 so far): "
    )
    assert not any(TOKEN in line for line in lines)


@pytest.mark.slow
def test_processes_meet_among_a_hundred_thousand_messages(processes):
    strangers, begin = Strangers(random.Random(0)), time.monotonic()
    for _ in range(100):
        meet(processes, strangers, [None] * 1000)
        del strangers.recorded[:-20]
    print(f"100,000 messages in {time.monotonic() - begin:.0f} s")


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
def test_an_invalid_hello_is_dropped_even_with_the_token(processes, fields):
    processes.add(0, 1, of=2)
    first, other = processes.groups
    with ThreadPoolExecutor(2) as pool:
        connecting = pool.submit(first.connect, processes.address)
        with dial(processes.address) as sock:
            connection = authenticate(sock, TOKEN, time.monotonic() + TIME_LIMIT)
            text = hello(**({"num_processes": 2} | fields))
            sock.sendall(connection._outgoing.close(text) + b"\n")
            assert sock.recv(1) == b""
        other.connect(processes.address)
        connecting.result(TIME_LIMIT)


@FEW
@given(data=st.binary(min_size=1, max_size=300), number=st.sampled_from([0, 1]))
def test_bytes_inserted_into_a_connection_count_as_a_lost_process(processes, data, number):
    """The worst that somebody in the network can do to a run that goes on: a restart."""
    processes.address = free_address()
    del processes.groups[:], processes.failures[:]
    processes.add(0, 1, of=2)
    processes.connect()
    (peer,) = processes.groups[1 - number]._peers.values()
    with peer.connection._send_lock:
        peer.connection._socket.sendall(data + b"\n")
    reason, code = processes.wait_for_failure(number)
    assert code == 76
    assert reason.startswith(f"process {1 - number} on {HOST} has sent an invalid message (")
    for group in processes.groups:
        group.abort("the test is over", 1)


def test_a_recorded_message_is_not_accepted_again(processes):
    processes.add(0, 1, of=2)
    processes.connect()
    first, other = processes.groups
    link: Connection = other._peers[0].connection
    sent: list[bytes] = []
    link._socket, real = Recorder(link._socket), link._socket
    first.start_all_gather("tag", 0), other.start_all_gather("tag", 1)
    assert first.wait_all_gather("tag") == other.wait_all_gather("tag") == [0, 1]
    sent = [line for line in link._socket.sent.split(b"\n") if b"gather" in line]
    assert len(sent) == 1
    with link._send_lock:
        real.sendall(sent[0] + b"\n")
    assert processes.wait_for_failure(0) == (
        f"process 1 on {HOST} has sent an invalid message (a message is not authentic); restart "
        "all processes",
        76,
    )


def test_each_direction_has_its_own_key():
    to_0, from_0 = _seals(TOKEN, bytes(64))
    line = to_0.close(b"text")
    assert _seals(TOKEN, bytes(64))[0].open(line) == b"text"
    with pytest.raises(ValueError, match="not authentic"):
        from_0.open(line)


def test_idle_strangers_delay_no_process(processes):
    """Each of them could hold the port for the ten seconds of a handshake."""
    processes.add(0, 1, of=2)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(processes.groups[0].connect, processes.address)
        idle = [dial(processes.address) for _ in range(300)]  # more than handshakes at a time
        begin = time.monotonic()
        processes.groups[1].connect(processes.address)
        connecting.result(TIME_LIMIT)
    assert time.monotonic() - begin < 9
    for sock in idle:
        hang_up(sock)


def test_the_threads_of_a_meeting_end(processes):
    meet(processes, Strangers(random.Random(1)), [None] * 10)
    assert not [thread for thread in threading.enumerate() if thread.name == "liveness"]
