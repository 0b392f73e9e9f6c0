"""Wall time per step, throughput and model FLOPs utilisation."""

import contextlib
import threading
import time
from collections.abc import Iterator

from parallel.sharding.devices import CHIPS
from training.logs import log
from training.step import Program

SLOW_STEP_SECONDS = 60.0
_SLOW_STEP = (
    "a step has taken %.0f s so far and is still running; simulated devices share the cores of "
    "this machine, so use a smaller model or fewer devices if this is too slow"
)


class StepClock:
    """Measures the wall time of steps, and how much of it the host waited for data or devices."""

    def __init__(self, program: Program):
        self._program = program
        mesh = program.tp.manager.mesh
        chip = CHIPS.get(mesh.devices.flat[0].device_kind)
        self._peak_flops = chip.peak_flops * mesh.size if chip else None
        self._data_wait = self._device_wait = 0.0
        self._is_simulated = mesh.devices.flat[0].platform == "cpu"
        self._is_slow = threading.Event()
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last reading: it was not spent on training."""
        self._time = time.perf_counter()

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time of the context as waiting for a batch."""
        begin = time.perf_counter()
        yield
        self._data_wait += time.perf_counter() - begin

    @contextlib.contextmanager
    def waiting_for_devices(self) -> Iterator[None]:
        """Count the time of the context as waiting for the devices."""
        begin = time.perf_counter()
        with self._slow_step_notice():
            yield
        self._device_wait += time.perf_counter() - begin

    @contextlib.contextmanager
    def _slow_step_notice(self) -> Iterator[None]:
        """Log one line per run if a step on simulated devices takes long."""
        if not self._is_simulated or self._is_slow.is_set():
            yield
            return
        timer = threading.Timer(SLOW_STEP_SECONDS, self._log_slow_step)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _log_slow_step(self) -> None:
        self._is_slow.set()
        log.info(_SLOW_STEP, SLOW_STEP_SECONDS)

    def read(self, num_rows: int, length: int) -> dict[str, float]:
        """Return the metrics of a step of `num_rows` x `length` tokens, and restart.

        `step_time` and `host_time` (without waiting for devices) in seconds, `tokens_per_second`,
        `data_wait` as a fraction of the step time, and `mfu` on chips with a known peak.
        """
        now = time.perf_counter()
        step_time, self._time = now - self._time, now
        data_wait, self._data_wait = self._data_wait, 0.0
        device_wait, self._device_wait = self._device_wait, 0.0
        tokens = num_rows * length
        values = {
            "step_time": step_time,
            "tokens_per_second": tokens / step_time,
            "data_wait": data_wait / step_time,
            "host_time": max(0.0, step_time - device_wait),
        }
        if self._peak_flops is not None:
            flops = self._program.flops_per_token(length) * tokens
            values["mfu"] = flops / self._peak_flops / step_time
        return values
