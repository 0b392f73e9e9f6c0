"""Peak memory of the devices and of this process, as metrics."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from training.logs import peak_memory


class Device(Protocol):
    """The part of a jax device that is read here."""

    id: int

    def memory_stats(self) -> Mapping[str, Any] | None:
        """Return counters of the allocator; None on a CPU."""


def memory_metrics(devices: Sequence[Device]) -> dict[str, float]:
    """Return the peaks since the start of the process, in GiB.

    `memory/device_K` of device K and `memory/peak`, their maximum, where the runtime counts them:
    on TPUs and GPUs. `memory/host_peak` of this process.
    """
    peaks = {}
    for device in devices:
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        if peak is not None:
            peaks[f"memory/device_{device.id}"] = peak / 2**30
    metrics = {"memory/host_peak": peak_memory() / 2**30, **peaks}
    return metrics | ({"memory/peak": max(peaks.values())} if peaks else {})
