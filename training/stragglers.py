"""Straggler detection: which host slows down the others, and by how much."""

import statistics
from collections import Counter

from parallel.cluster.process_group import ProcessGroup
from training.logs import log

# A host is reported when its own work exceeds the median host's by both of these.
_MIN_SHARE_OF_STEP = 0.1
_MIN_SECONDS = 0.1


class StragglerMonitor:
    """Compares the times of all hosts, so that the slowest can be named.

    Step times are nearly equal on all hosts, since collectives make each wait for the slowest. The
    time that a host spends outside of its devices tells them apart.
    """

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._times: list[tuple[float, float]] = []
        self._slowest, self._spreads = Counter[int](), list[float]()

    def add(self, step_time: float, host_time: float) -> None:
        """Record a step of this process.

        Args:
            step_time: Seconds of the whole step.
            host_time: Seconds of it in which this process did not wait for its devices.
        """
        if self._group.num_processes > 1:
            self._times.append((step_time, host_time))

    def take_report(self) -> tuple[float, float] | None:
        """Return the medians of (step_time, host_time) since the last report; None if no steps."""
        if not self._times:
            return None
        step_time, host_time = map(statistics.median, zip(*self._times, strict=True))
        self._times = []
        return step_time, host_time

    def compare(self, step: int, reports: list[tuple[float, float]]) -> dict[str, float]:
        """Compare the reports of all processes and log a warning for a straggler.

        Returns:
            The metrics `hosts/...`.
        """
        step_times, host_times = zip(*reports, strict=True)
        step_time, median = statistics.median(step_times), statistics.median(host_times)
        slowest = max(range(len(reports)), key=host_times.__getitem__)
        if host_times[slowest] - median > max(_MIN_SHARE_OF_STEP * step_time, _MIN_SECONDS):
            log.warning(
                "step %d: %s (process %d) is a straggler: %.3f s of host work in a step of %.3f s, "
                "the median host has %.3f s",
                step,
                self._group.hosts[slowest],
                slowest,
                host_times[slowest],
                step_time,
                median,
            )
        self._slowest[slowest] += 1
        self._spreads.append((max(step_times) - min(step_times)) / step_time)
        return {
            "hosts/step_time_spread": self._spreads[-1],
            "hosts/slowest": slowest,
            "hosts/slowest_host_time": host_times[slowest],
            "hosts/median_host_time": median,
        }

    def summary(self) -> str | None:
        """Return one line about the whole run; None without a report."""
        if not self._spreads:
            return None
        ((slowest, count),) = self._slowest.most_common(1)
        return (
            f"step times of the hosts differ by {statistics.median(self._spreads):.1%} (median); "
            f"most often slowest: {self._group.hosts[slowest]} (process {slowest}), in {count} of "
            f"{len(self._spreads)} reports"
        )
