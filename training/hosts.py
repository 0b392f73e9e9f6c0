"""What the processes of a run tell each other while it trains: their times, and who asks to save.

They do not wait for it: what is told after one step is heard after the next.
"""

import statistics
from collections import Counter
from typing import Any

from parallel.cluster.peers import Peers
from training.metrics import log

# What one host takes longer by itself than the median does: of a step, and seconds.
_WORTH_TELLING = 0.1, 0.1


class Hosts:
    """Reports after every so many steps."""

    def __init__(self, peers: Peers, every: int):
        self._peers, self._every = peers, every
        self.all_ended: int | None = None
        self._slowest, self._spreads = Counter[int](), list[float]()
        self._times: list[tuple[float, float]] = []
        self._asked, self._count, self._is_told = False, 0, False

    def add(self, step_time: float, host_time: float) -> None:
        """A step of this process: its seconds, and those in which its devices were not awaited."""
        if self._peers.num_processes > 1:
            self._times.append((step_time, host_time))

    def exchange(
        self, step: int, asked: bool, ended: int | None = None
    ) -> tuple[bool, dict[str, float]]:
        """Called after every step, by all. asked: this process wants a save. ended: the step whose
        save has ended here; `all_ended` then is that step on all, once it has ended on all.

        Returns (some process wants a save, metrics over the processes), the same on all of them.
        """
        if self._peers.num_processes == 1:
            return asked, {}
        self._asked |= asked
        self.all_ended = None
        heard: tuple[bool, dict[str, float]] = False, {}
        if self._is_told:
            heard = self._read(step, self._peers.collect(f"report {self._count}"))
            self._is_told = False
        if step % self._every == 0 and self._times:
            step_time, host_time = map(statistics.median, zip(*self._times, strict=True))
            self._count += 1
            report = [step_time, host_time, self._asked, ended]
            self._peers.post(f"report {self._count}", report)
            self._times, self._asked, self._is_told = [], False, True
        return heard

    def _read(self, step: int, reports: list[list[Any]]) -> tuple[bool, dict[str, float]]:
        step_times, host_times, asked, ended = zip(*reports, strict=True)
        self.all_ended = ended[0] if len(set(ended)) == 1 else None
        usual = statistics.median(host_times)
        slowest = max(range(len(reports)), key=host_times.__getitem__)
        step_time = statistics.median(step_times)
        share, seconds = _WORTH_TELLING
        if host_times[slowest] - usual > max(share * step_time, seconds):
            log.warning(
                "step %d: the slowest host is %s (process %d): %.3f s of a step of %.3f s are its "
                "own, %.3f s in the median",
                step,
                self._peers.hosts[slowest],
                slowest,
                host_times[slowest],
                step_time,
                usual,
            )
        self._slowest[slowest] += 1
        self._spreads.append((max(step_times) - min(step_times)) / step_time)
        return any(asked), {
            "hosts/step_time_spread": self._spreads[-1],
            "hosts/slowest": slowest,
            "hosts/slowest_host_time": host_times[slowest],
            "hosts/median_host_time": usual,
        }

    def summary(self) -> str | None:
        """Of all reports, for a person; None if there was none."""
        if not self._spreads:
            return None
        (slowest, times), *_ = self._slowest.most_common(1)
        return (
            f"step times of hosts differ by {statistics.median(self._spreads):.1%}; the slowest by "
            f"its own work was {self._peers.hosts[slowest]} (process {slowest}) in {times} of "
            f"{len(self._spreads)} reports"
        )
