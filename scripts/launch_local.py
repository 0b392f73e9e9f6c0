# PYTHON_ARGCOMPLETE_OK
"""Train with several processes on this machine: the code path of a pod, over the loopback.

`python scripts/launch_local.py --processes 2 --devices-per-process 4 -- --config configs/tp8.yaml`
starts that many `train.py` processes with the arguments after `--`. Process 0 writes to the
console; the output of the others goes to stderr with a prefix `[1] `. SIGTERM or Ctrl-C stops all
of them, a second one kills them; SIGUSR1 is passed on to process 0. When a process fails, the
others have `--peer-grace` seconds to exit. Exit codes: 0 all are done, 75 all were stopped and can
resume, else that of the process that failed first: 128 + number after a signal, 1 if the launcher
killed it.
"""

import argparse
import contextlib
import ctypes
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from _clone import ROOT

from configs.command_line import CommandLine, one_line_errors
from configs.reading import ConfigError, read_tree
from exit_codes import (
    EXIT_BAD_INPUT,
    EXIT_DEVICE_FAULT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PROCESS_LOST,
    EXIT_STOPPED,
)

# Exit codes of train.py after which a restart does not help.
_FINAL = (EXIT_DONE, EXIT_BAD_INPUT, EXIT_STOPPED, EXIT_DEVICE_FAULT)

_POLL_SECONDS = 0.02
_RELAY_SECONDS = 5.0  # for the last lines of a process that has exited
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def log(line: str) -> None:
    """Print a line of the launcher itself."""
    print(f"launch_local: {line}", file=sys.stderr, flush=True)


@dataclass
class _Signals:
    """Signals that have arrived; handlers set a flag and the supervisor acts on it.

    Two signals within one poll count as one: GNU timeout sends two.
    """

    stop: bool = False
    save: bool = False

    def install(self) -> None:
        """Handle the signals of this process; SIGHUP comes when its terminal is closed."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_save)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True


def _die_with(parent: int) -> None:
    """Bind the life of a new process to the launcher's, before its program starts.

    The kernel then kills it when the launcher is killed with SIGKILL.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the launcher died before the line above
            os._exit(EXIT_FAILED)


def _relay(index: int, pipe: IO[str]) -> None:
    """Copy the lines of a process to stderr with its number as a prefix."""
    with pipe:
        for line in pipe:
            ending = "" if line.endswith("\n") else "\n"
            with contextlib.suppress(OSError):  # stderr is closed; still drain the pipe
                sys.stderr.write(f"[{index}] {line}{ending}")
                sys.stderr.flush()


class _Child:
    """A process of the run, in its own session, so that Ctrl-C reaches only the launcher."""

    def __init__(self, index: int, command: Sequence[str], environment: dict[str, str]):
        self.name = f"process {index}"
        self.killed = False
        self._index = index
        self._relays: list[threading.Thread] = []
        parent = os.getpid()
        output = subprocess.PIPE if index else None
        if index:  # buffered lines would be lost when it is killed
            environment = {**environment, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            encoding="utf-8",
            errors="backslashreplace",
            start_new_session=True,
            preexec_fn=lambda: _die_with(parent),  # safe: the launcher has no threads yet
        )

    def start_relays(self) -> None:
        """Start the threads that read its output; only after every process was forked."""
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                arguments = (self._index, pipe)
                self._relays.append(threading.Thread(target=_relay, args=arguments, daemon=True))
                self._relays[-1].start()

    def reap(self) -> bool:
        """Return whether it has exited; if so, kill the processes that it started itself."""
        if self.process.poll() is None:
            return False
        self._kill_group()
        return True

    @property
    def exit_code(self) -> int:
        """Its exit code: 128 + number after a signal, but 1 if the launcher killed it."""
        code = self.process.returncode
        if self.killed and code == -signal.SIGKILL:
            return EXIT_FAILED
        return code if code >= 0 else 128 - code

    @property
    def description(self) -> str:
        """Return how the process exited, for the log."""
        code = self.process.returncode
        if code >= 0:
            return f"{self.name} exited with code {code}"
        return f"{self.name} was killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Kill it and the processes that it started."""
        self.killed = True
        self._kill_group()

    def close(self) -> None:
        """Kill it if it runs, and wait for its last lines of output."""
        if self.process.poll() is None:
            self.kill()
            self.process.wait()
        for relay in self._relays:
            relay.join(_RELAY_SECONDS)

    def _kill_group(self) -> None:
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # none left; on macOS a zombie
            os.killpg(self.process.pid, signal.SIGKILL)


class _Supervisor:
    """Waits for all processes of one start; passes signals on and kills those that exit too late.

    grace, peer_grace: seconds until SIGKILL after SIGTERM, and after a process has failed.
    """

    def __init__(
        self, children: Sequence[_Child], signals: _Signals, *, grace: float, peer_grace: float
    ):
        self.is_stopped = False
        """Whether a signal to the launcher has stopped the processes."""
        self._children, self._running = children, list(children)
        self._signals, self._grace, self._peer_grace = signals, grace, peer_grace
        self._codes: list[int] = []
        # When the processes that still run are killed, and the reason for the log.
        self._deadline = (math.inf, "")

    def run(self) -> int:
        """Wait until all processes have exited; return the exit code for all of them."""
        while self._running:
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            self._reap(now)
            if self._signals.stop:
                self._signals.stop = False
                self._stop(now)
            if self._signals.save:
                self._signals.save = False
                self._children[0].process.send_signal(signal.SIGUSR1)
            if now >= self._deadline[0]:
                self._kill_late()
        failures = [code for code in self._codes if code not in (0, EXIT_STOPPED)]
        return failures[0] if failures else max(self._codes)

    def _reap(self, now: float) -> None:
        """Record the processes that have exited; a failure sets the deadline of the others."""
        exited = [child for child in self._running if child.reap()]
        # A process that lost a peer exits milliseconds after it and is never the first to fail.
        for child in sorted(exited, key=lambda child: child.exit_code == EXIT_PROCESS_LOST):
            self._running.remove(child)
            code = child.exit_code
            self._codes.append(code)
            is_expected = code == EXIT_STOPPED and self.is_stopped
            if code and not child.killed and not is_expected:
                log(child.description)
                # Processes that were stopped still save, each its part.
                seconds = self._grace if code == EXIT_STOPPED else self._peer_grace
                self._shorten_deadline(now + seconds, f"within {seconds:g} s of {child.name}")

    def _stop(self, now: float) -> None:
        """Send SIGTERM to all processes; the second time let them be killed."""
        if self.is_stopped:
            self._deadline = (now, "before the second signal")
            return
        self.is_stopped = True
        self._shorten_deadline(now + self._grace, f"within {self._grace:g} s of SIGTERM")
        for child in self._running:
            child.process.terminate()

    def _shorten_deadline(self, when: float, reason: str) -> None:
        self._deadline = min(self._deadline, (when, reason))

    def _kill_late(self) -> None:
        for child in self._running:
            if not child.killed:
                log(f"{child.name} did not exit {self._deadline[1]}; killing it")
                child.kill()


def _free_port(before: int) -> int:
    """Return a free port of the loopback other than the one before."""
    port = before
    while port == before:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    return port


def launch(
    program: Sequence[str],
    arguments: Sequence[str],
    *,
    processes: int,
    devices: int,
    restarts: int = 0,
    grace: float = 120.0,
    peer_grace: float = 60.0,
) -> int:
    """Run `program` as `processes` processes of `devices` CPU devices; return the exit code.

    After a failure all start again, up to `restarts` times. Bad input (2) and signals to the
    launcher or the processes do not count as failures. grace: seconds from SIGTERM to SIGKILL.
    peer_grace: seconds from the failure of one process to SIGKILL for the others.

    Raises: OSError if a process cannot be started; none is left running then.
    """
    signals = _Signals()
    signals.install()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
    }
    port, restart = 0, 0
    while True:
        port = _free_port(port)
        environment["TORUS_RUN_TOKEN"] = secrets.token_hex(32)  # of this attempt alone
        cluster = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(processes)]
        children: list[_Child] = []
        try:
            for index in range(processes):
                command = [*program, *cluster, "--process-id", str(index), *arguments]
                children.append(_Child(index, command, environment))
            for child in children:
                child.start_relays()
            supervisor = _Supervisor(children, signals, grace=grace, peer_grace=peer_grace)
            code = supervisor.run()
        finally:
            for child in children:
                child.close()
        if code in _FINAL or supervisor.is_stopped or signals.stop:
            return code
        if restart == restarts:
            return code
        restart += 1
        log(f"restart {restart} of {restarts}")


def _starts_over(arguments: Sequence[str]) -> bool:
    """Return whether the configuration of train.py sets checkpoint.resume=never."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", help="as for train.py")
    known, others = parser.parse_known_args(arguments)
    overrides = [word for word in others if "=" in word and not word.startswith("-")]
    try:
        checkpoint = read_tree(known.config or os.devnull, overrides).get("checkpoint")
    except ConfigError:  # which train.py reports
        return False
    return isinstance(checkpoint, dict) and checkpoint.get("resume") == "never"


@one_line_errors(OSError)
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and launch; bad input is one line on stderr and exit code 2."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    parser = CommandLine(
        description=__doc__,
        usage="%(prog)s --processes N --devices-per-process D [--restarts R] [--grace SECONDS] "
        "[--peer-grace SECONDS] -- --config FILE [section.key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, kind, default, text in (
        ("--processes", int, None, "number of processes"),
        ("--devices-per-process", int, None, "simulated CPU devices of each process"),
        ("--restarts", int, 0, "how often to start all processes again after a failure"),
        ("--grace", float, 120.0, "seconds from SIGTERM to SIGKILL"),
        ("--peer-grace", float, 60.0, "seconds from a failed process to SIGKILL for the others"),
    ):
        parser.add_argument(option, type=kind, default=default, required=default is None, help=text)
    parser.add_argument(
        "misplaced",
        nargs="*",
        metavar="-- ARGUMENT",
        help="arguments of train.py after --, such as --config configs/tp8.yaml (required)",
    )
    args = parser.parse_args(given[:split])
    arguments = given[split + 1 :]
    least = {"processes": 1, "devices_per_process": 1, "restarts": 0, "grace": 0, "peer_grace": 0}
    for name, bound in least.items():
        value = getattr(args, name)
        if not value >= bound:
            option = f"--{name.replace('_', '-')}={value}"
            raise ValueError(f"{option} is too low; give {bound} or more")
    if args.misplaced or not arguments:
        example = "-- --config configs/tp8.yaml"
        what = f"{args.misplaced[0]} is no option" if args.misplaced else "nothing for train.py"
        raise ValueError(f"{what}; put the arguments of train.py after --, as in {example}")
    if args.restarts and _starts_over(arguments):
        raise ValueError(
            "checkpoint.resume=never with --restarts would start over each time; leave one of "
            "them out"
        )
    try:
        return launch(
            [sys.executable, str(ROOT / "train.py")],
            arguments,
            processes=args.processes,
            devices=args.devices_per_process,
            restarts=args.restarts,
            grace=args.grace,
            peer_grace=args.peer_grace,
        )
    except OSError as error:
        raise OSError(f"the processes could not be started: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
