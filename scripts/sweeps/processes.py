"""Processes of the trials of a sweep: started in order, stopped by a signal, killed by a second."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Literal

from _clone import ROOT

from exit_codes import EXIT_DONE, EXIT_STOPPED
from sweeps.trials import Trial

State = Literal["finished", "failed", "stopped", "waiting"]
OUTPUT = "output.txt"
_POLL_SECONDS, _SAME_SIGNAL_SECONDS = 0.1, 1.0
_START_BOUND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != int(sys.argv[1]):  # it died before the line above
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def _bound_python() -> list[str]:
    """Return the start of a command line for Python that ends with this process, even by SIGKILL.

    A program in between asks the kernel for that. Libraries have threads in this process, so no
    Python code may run between a fork and the start of another program.
    """
    return [sys.executable, "-c", _START_BOUND, str(os.getpid()), sys.executable]


class TrialProcess:
    """`train.py` on one trial, in a session of its own, so that Ctrl-C reaches the sweep alone.

    Its output is appended to `output.txt` in the run directory.
    """

    def __init__(self, trial: Trial, config: str):
        self.trial, self._path = trial, trial.directory / OUTPUT
        trial.directory.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a") as output:
            self._begin = output.tell()
            self._process = subprocess.Popen(
                [*_bound_python(), str(ROOT / "train.py"), "--config", config, *trial.overrides],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def state(self) -> State | None:
        """State at the end of the process, None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code == EXIT_DONE:
            return "finished"
        return "stopped" if code == EXIT_STOPPED else "failed"

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended it: SIGKILL, or one that came before it handled signals."""
        return (self._process.poll() or 0) < 0

    @property
    def reason(self) -> str:
        """The last error line of the output, and where to read more."""
        with open(self._path, errors="replace") as file:
            file.seek(self._begin)
            lines = [line.strip() for line in file if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        last = (errors or lines or ["no output"])[-1].removeprefix("error: ")
        return f"exit code {self._process.returncode}: {last}; see {self._path}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)


class Stopper:
    """Counts the signals that ask the sweep to stop.

    Those within a second count as one: a terminal may send a signal to the process, and once more
    to its group.
    """

    def __init__(self) -> None:
        self.num_signals, self._last = 0, -math.inf
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._count)

    def _count(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.num_signals += now - self._last > _SAME_SIGNAL_SECONDS
        self._last = now


class Supervisor:
    """Runs trials, a few at a time.

    Args:
        config: the configuration file of all trials.
        parallel: processes at a time.
        report: called with (trial, state, reason); the state None means that the trial has begun.
        say: prints a line.
    """

    def __init__(
        self,
        config: str,
        parallel: int,
        report: Callable[[Trial, State | None, str], None],
        say: Callable[[str], None],
    ):
        self._config, self._parallel = config, parallel
        self._report, self._say = report, say
        self._running: list[TrialProcess] = []

    def run(self, trials: Sequence[Trial], stopper: Stopper) -> dict[str, State]:
        """Run the trials; return the state of each by its name. A failed one stops no other."""
        states: dict[str, State] = {trial.name: "waiting" for trial in trials}
        waiting, num_signals = list(trials), 0
        while self._running or (waiting and not stopper.num_signals):
            while waiting and len(self._running) < self._parallel and not stopper.num_signals:
                trial = waiting.pop(0)
                self._report(trial, None, "")
                self._running.append(TrialProcess(trial, self._config))
            time.sleep(_POLL_SECONDS)
            if stopper.num_signals > num_signals:
                self._stop(again=num_signals > 0)
                num_signals = stopper.num_signals
            for process in [one for one in self._running if one.state is not None]:
                self._running.remove(process)
                states[process.trial.name] = self._end(process, was_stopped=num_signals > 0)
        return states

    def _stop(self, *, again: bool) -> None:
        for process in self._running:
            process.send(signal.SIGKILL if again else signal.SIGTERM)
        if again:
            self._say("killing the running trials")
        elif self._running:
            self._say(
                f"stopping {', '.join(process.trial.name for process in self._running)} after this "
                "step and saving; press Ctrl-C again to kill"
            )

    def _end(self, process: TrialProcess, *, was_stopped: bool) -> State:
        state = process.state
        assert state is not None
        if was_stopped and process.was_killed:
            state = "stopped"
        self._report(process.trial, state, process.reason if state == "failed" else "")
        return state
