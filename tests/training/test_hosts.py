"""What processes tell each other between steps: the same answers on all, at the same step."""

import logging
from typing import Any

import pytest

from parallel.cluster.peers import Peers
from training.hosts import Hosts

NOTHING = (False, {})


class Board:
    """What was posted by all, by topic."""

    def __init__(self, num_processes: int):
        self.posts: dict[str, dict[int, Any]] = {}
        self.num_processes = num_processes

    def peers(self, number: int) -> Peers:
        """Of process `number`; the others' words are there when they are collected."""
        found = Peers(self.num_processes, number)
        found.hosts = [f"host-{n}" for n in range(self.num_processes)]

        def post(topic: str, value: Any) -> None:
            self.posts.setdefault(topic, {})[number] = value

        def collect(topic: str) -> list[Any]:
            return [self.posts[topic][n] for n in range(self.num_processes)]

        found.post, found.collect = post, collect  # type: ignore[method-assign]
        return found


def run(
    times: list[list[tuple[float, float]]],
    *,
    every: int,
    asks: dict[int, int] | None = None,
    first: int = 1,
) -> list[list[tuple[bool, dict[str, float]]]]:
    """What each process hears after each step, as the loop calls it: times come a step late.

    times: by process, then step. asks: step -> process that wants a save.
    """
    board = Board(len(times))
    hosts = [Hosts(board.peers(n), every) for n in range(len(times))]
    heard: list[list[tuple[bool, dict[str, float]]]] = [[] for _ in times]
    for n in range(len(times[0])):
        step = first + n
        for number, host in enumerate(hosts):
            if n:
                host.add(*times[number][n - 1])
            heard[number].append(host.exchange(step, (asks or {}).get(step) == number))
    return heard


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torus"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records]


def even(processes: int, steps: int) -> list[list[tuple[float, float]]]:
    return [[(1.0, 0.2)] * steps for _ in range(processes)]


def test_all_hear_the_same_at_the_same_step_the_one_after_it_was_told(warnings):
    times = [[(1.0 + n, 0.1 * n)] * 10 for n in range(3)]
    heard = run(times, every=4)
    assert heard[0] == heard[1] == heard[2]
    assert [n + 1 for n, words in enumerate(heard[0]) if words != NOTHING] == [5, 9]
    assert heard[0][4][1] == {
        "hosts/step_time_spread": pytest.approx(2 / 2),
        "hosts/slowest": 2,
        "hosts/slowest_host_time": pytest.approx(0.2),
        "hosts/median_host_time": pytest.approx(0.1),
    }


def test_what_is_told_is_the_median_of_the_steps_since():
    times = [[(1.0, 0.1), (9.0, 5.0), (1.2, 0.2), (2.0, 0.6), (2.0, 0.6), (2.0, 0.6), (0, 0)]] * 2
    heard = run(times, every=3)[0]
    assert heard[3][1]["hosts/median_host_time"] == pytest.approx((0.1 + 5.0) / 2)
    assert heard[6][1]["hosts/median_host_time"] == pytest.approx(0.6)


@pytest.mark.parametrize("first", [1, 7, 8])
def test_a_wish_to_save_of_one_is_heard_by_all_at_one_step(first):
    wishes = {first + 2: 1}
    heard = run(even(3, 12), every=4, asks=wishes, first=first)
    assert heard[0] == heard[1] == heard[2]
    saves = [first + n for n, (asked, _) in enumerate(heard[0]) if asked]
    assert len(saves) == 1 and 0 < saves[0] - (first + 2) <= 5


def test_a_wish_before_there_is_anything_to_tell_is_not_forgotten():
    """The first step of a process may be one after which they speak, and it has no times yet."""
    heard = run(even(2, 6), every=2, asks={4: 0}, first=4)
    assert [4 + n for n, (asked, _) in enumerate(heard[1]) if asked] == [7]


def test_two_wishes_are_two_saves():
    heard = run(even(2, 12), every=2, asks={1: 0, 6: 1})
    assert [n + 1 for n, (asked, _) in enumerate(heard[0]) if asked] == [3, 7]


@pytest.mark.parametrize(
    ("slow", "step_time", "told"),
    [
        (0.55, 2.0, True),
        (0.39, 2.0, False),  # less than a tenth of a step
        (0.29, 0.5, False),  # less than a tenth of a second
        (0.31, 0.5, True),
    ],
)
def test_the_slowest_is_named_only_if_it_is_worth_it(warnings, slow, step_time, told):
    times = [[(step_time, 0.2)] * 3, [(step_time, slow)] * 3, [(step_time, 0.1)] * 3]
    run(times, every=2)
    line = (
        f"step 3: the slowest host is host-1 (process 1): {slow:.3f} s of a step of "
        f"{step_time:.3f} s are its own, 0.200 s in the median"
    )
    assert warnings() == [line] * 3 if told else warnings() == []


def test_a_save_has_ended_when_it_has_on_all():
    board = Board(2)
    hosts = [Hosts(board.peers(n), 2) for n in range(2)]
    known = []
    for step in range(1, 10):
        for number, host in enumerate(hosts):
            host.add(1.0, 0.1)
            host.exchange(step, False, 2 if step > (2, 5)[number] else None)
        known.append([host.all_ended for host in hosts])
    assert known == [[step, step] for step in [None] * 6 + [2, None, 2]]


def test_the_summary_counts_who_was_slowest_how_often():
    board = Board(3)
    hosts = [Hosts(board.peers(n), 1) for n in range(3)]
    assert hosts[0].summary() is None
    for step, (slow, step_time) in enumerate([(2, 1.1), (1, 1.2), (2, 1.4), (0, 9.0)]):
        for number, host in enumerate(hosts):
            host.add(step_time if number == slow else 1.0, 0.5 if number == slow else 0.1)
            host.exchange(step, False)
    told = (
        "step times of hosts differ by 20.0%; the slowest by its own work was host-2 (process 2) "
        "in 2 of 3 reports"  # the last one was told, and nobody has heard it yet
    )
    assert [host.summary() for host in hosts] == [told] * 3


def test_one_process_alone_saves_when_asked_and_tells_nothing():
    hosts = Hosts(Peers(), 2)
    for step in range(1, 6):
        hosts.add(1.0, 0.5)
        assert hosts.exchange(step, step == 3) == (step == 3, {})
