"""Signals that ask a run to stop or to save, agreed on by all processes."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import ClassVar

import jax
from jax.experimental import multihost_utils

from exit_codes import EXIT_FAILED

_STOPS = (signal.SIGTERM, signal.SIGINT)
_SHOW_CURSOR = "\x1b[?25h"
_AGAIN = {signal.SIGTERM: "send SIGTERM again", signal.SIGINT: "press Ctrl-C again"}
_STOPPING_NOW = "stopping now; {again} to quit at once"
_STOPPING_AFTER_THIS_STEP = "stopping after this step and saving; {again} to quit without saving"
_STILL_RUNNING = (
    "not stopped {seconds:.0f} s after the signal, still busy with: {phase}; {again} to quit "
    "without saving"
)
_SAME_SIGNAL = 1.0
"""Seconds after a signal in which another one counts as the same: `timeout` and terminals may send
it to a process and once more to its process group."""
_FIRST_REMINDER = 30.0
"""Seconds from a signal to the first line that says what the process is still doing."""


class StoppedEarly(BaseException):
    """A signal asked a process that runs alone to stop before its first step; nothing to save."""

    def __init__(self, by: signal.Signals):
        super().__init__(
            f"stopped by {by.name} before the first step of this process, so there is nothing to "
            "save; run again to start or resume"
        )


class StopRequest:
    """A flag that the first SIGTERM or SIGINT sets and the training loop reads between steps.

    The signal is answered with a line at once, even while a program compiles. A second one exits
    with code 1, unless it comes within a second. SIGUSR1 asks for a checkpoint, SIGUSR2 for a
    profile of this process.

    In a run with several processes, jax's preemption service decides after which step all of them
    stop. It takes over SIGTERM when jax.distributed starts, so `install` must be called before;
    from then on SIGTERM is not answered with a line, and Ctrl-C is.
    """

    _wakeup: ClassVar[socket.socket | None] = None
    """Socket to which the interpreter writes the numbers of signals; a process has one."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        """The signal that asks this run to stop."""
        self.has_nothing_to_save = False
        """Whether to raise `StoppedEarly` at a signal instead of setting the flag."""
        self._wants_checkpoint = self._wants_profile = False
        self._is_interrupted = self._is_agreed = False
        self._interrupted_at, self._num_calls = -_SAME_SIGNAL, 0

    def install(
        self,
        answer: Callable[[str], None] = print,
        phase: Callable[[], str | None] = lambda: None,
    ) -> "StopRequest":
        """Handle SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 of this process; return this object.

        answer: Shows the line that answers the first signal, and reminders if the process does not
            stop, for instance because a collective hangs; called in another thread.
        phase: Returns what the process is working on, such as "step 12"; None: no reminder now.
        """
        for number in _STOPS:
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_checkpoint)
        signal.signal(signal.SIGUSR2, self._on_profile)
        # A Python handler runs when the main thread returns from jax, which may take minutes. The
        # number of the signal, which the interpreter writes to this socket, arrives at once.
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # Open as long as it is in use: a file that reused its descriptor would receive the signals.
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if StopRequest._wakeup is not None:
            StopRequest._wakeup.close()  # its thread ends
        StopRequest._wakeup = writer
        threading.Thread(
            target=self._answer, args=(reader, answer, phase), name="signals", daemon=True
        ).start()
        return self

    def take_checkpoint_request(self) -> bool:
        """Return whether SIGUSR1 has come since the last call."""
        requested, self._wants_checkpoint = self._wants_checkpoint, False
        return requested

    def take_profile_request(self) -> bool:
        """Return whether SIGUSR2 has come since the last call."""
        requested, self._wants_profile = self._wants_profile, False
        return requested

    def agree(self) -> signal.Signals | None:
        """Return the signal for which all processes stop after this step, None to go on.

        Every process calls this after every step, also after one that is repeated.
        """
        if not jax.distributed.is_initialized():
            return self.signal
        if self.signal is not None and not self._is_agreed:
            # It came before jax listened: pass it on to jax's handler.
            self.signal = None
            os.kill(os.getpid(), signal.SIGTERM)
        # The service stops all at the largest number that a process has asked about, plus 1. It
        # compares for equality, so the number grows by 1 per call. Steps do not: they begin
        # anywhere, and go back after a rollback.
        self._num_calls += 1
        if multihost_utils.reached_preemption_sync_point(self._num_calls):
            self.signal, self._is_agreed = signal.SIGTERM, True
            # Take SIGTERM back from jax. If another process was signalled, the first signal here is
            # no second request.
            signal.signal(signal.SIGTERM, self._on_stop)
        return self.signal

    def _answer(
        self,
        reader: socket.socket,
        answer: Callable[[str], None],
        phase: Callable[[], str | None],
    ) -> None:
        with reader:
            while (number := reader.recv(1)) and number[0] not in _STOPS:
                pass
            if not number:
                return
            again = _AGAIN[signal.Signals(number[0])]
            line = _STOPPING_NOW if self.has_nothing_to_save else _STOPPING_AFTER_THIS_STEP
            answer(line.format(again=again))
            begin, wait = time.monotonic(), _FIRST_REMINDER
            while True:
                reader.settimeout(wait)
                try:
                    number = reader.recv(1)
                except TimeoutError:
                    if (doing := phase()) is not None:
                        wait = time.monotonic() - begin  # the second reminder after 60 s, then 120
                        answer(_STILL_RUNNING.format(seconds=wait, phase=doing, again=again))
                    continue
                if not number:
                    return
                if number[0] in _STOPS and time.monotonic() - begin >= _SAME_SIGNAL:
                    _quit()

    def _on_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self._wants_checkpoint = True

    def _on_profile(self, number: int, frame: FrameType | None) -> None:
        self._wants_profile = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._interrupted_at < _SAME_SIGNAL:
            return
        if self._is_interrupted:
            _quit()
        self._is_interrupted, self._interrupted_at = True, now
        is_open = jax.distributed.is_initialized() and not self._is_agreed
        if is_open and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)  # jax handles it
            return
        self.signal = signal.Signals(number)
        if self.has_nothing_to_save:
            raise StoppedEarly(self.signal)


def _quit() -> None:
    """Exit without saving; a progress bar has hidden the cursor and not ended its line."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), f"{_SHOW_CURSOR}\n".encode())
    os.write(2, b"quit without saving; the newest checkpoint is as it was\n")
    os._exit(EXIT_FAILED)
