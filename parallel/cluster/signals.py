"""Signals that ask a run to stop or to save, agreed on by all processes."""

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """A flag that the first SIGTERM or SIGINT sets and the training loop reads between steps.

    A second signal exits at once with code 1. SIGUSR1 asks for a checkpoint only. In a run with
    several processes, jax's preemption service decides after which step all of them stop. It takes
    over SIGTERM when jax.distributed starts, so `install` must be called before.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asks this run to stop."""
        self._wants_checkpoint = self._is_interrupted = self._is_agreed = False

    def install(self) -> "StopRequest":
        """Handle SIGTERM, SIGINT and SIGUSR1 of this process; return this object."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_checkpoint)
        return self

    def take_checkpoint_request(self) -> bool:
        """Return whether SIGUSR1 has come since the last call."""
        requested, self._wants_checkpoint = self._wants_checkpoint, False
        return requested

    def agree(self, step: int) -> signal.Signals | None:
        """Return the signal for which all processes stop after this step, None to go on.

        Every process calls this once per step, with increasing steps.
        """
        if not jax.distributed.is_initialized():
            return self.signal
        if self.signal is not None and not self._is_agreed:
            # It came before jax listened: pass it on to jax's handler.
            self.signal = None
            os.kill(os.getpid(), signal.SIGTERM)
        if multihost_utils.reached_preemption_sync_point(step):
            self.signal, self._is_agreed = signal.SIGTERM, True
            self._is_interrupted = True
            signal.signal(signal.SIGTERM, self._on_stop)  # from jax: the next one exits
        return self.signal

    def _on_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self._wants_checkpoint = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self._is_interrupted:
            os._exit(1)
        self._is_interrupted = True
        if jax.distributed.is_initialized() and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)  # jax handles it
        else:
            self.signal = signal.Signals(number)
