"""The process among others: signals that ask it to stop, or to save."""

import os
import signal
from types import FrameType


class StopRequest:
    """Turns the first SIGTERM or SIGINT into a flag that the loop reads between steps.

    A second signal exits at once with 1. SIGUSR1 asks for a save and nothing else. Install it
    before jax.distributed starts: a Python handler installed afterwards would disable jax's own
    preemption notice.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.save = False

    def install(self) -> "StopRequest":
        """Takes over SIGTERM, SIGINT and SIGUSR1 of this process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(1)
        self.signal = signal.Signals(number)
