"""What the processes of a run tell each other while it trains: their times, and who asks to save.

They do not wait for it: what is told after one step is heard after the next.
"""

import statistics

from parallel.peers import Peers
from training.metrics import log

# What one host takes longer by itself than the median does: of a step, and seconds.
_WORTH_TELLING = 0.1, 0.1


class Hosts:
    """Reports after every so many steps."""

    def __init__(self, peers: Peers, every: int):
        self._peers, self._every = peers, every
        self._times: list[tuple[float, float]] = []
        self._asked, self._count, self._is_told = False, 0, False

    def add(self, step_time: float, host_time: float) -> None:
        """A step of this process: its seconds, and those in which its devices were not awaited."""
        if self._peers.num_processes > 1:
            self._times.append((step_time, host_time))

    def exchange(self, step: int, asked: bool) -> tuple[bool, dict[str, float]]:
        """Called after every step, by all. asked: this process wants a save.

        Returns (some process does, metrics over the processes), the same on all of them.
        """
        if self._peers.num_processes == 1:
            return asked, {}
        self._asked |= asked
        heard: tuple[bool, dict[str, float]] = False, {}
        if self._is_told:
            heard = self._read(step, self._peers.collect(f"report {self._count}"))
            self._is_told = False
        if step % self._every == 0 and self._times:
            step_time, host_time = map(statistics.median, zip(*self._times, strict=True))
            self._count += 1
            self._peers.post(f"report {self._count}", [step_time, host_time, self._asked])
            self._times, self._asked, self._is_told = [], False, True
        return heard

    def _read(self, step: int, reports: list[list[float]]) -> tuple[bool, dict[str, float]]:
        step_times, host_times, asked = zip(*reports, strict=True)
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
        return any(asked), {
            "hosts/step_time_spread": (max(step_times) - min(step_times)) / step_time,
            "hosts/slowest": slowest,
            "hosts/slowest_host_time": host_times[slowest],
            "hosts/median_host_time": usual,
        }
