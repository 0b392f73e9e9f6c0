"""Trains with several processes on this machine: the code path of a pod, over the loopback.

`python scripts/launch_local.py --processes 2 --devices-per-process 4 -- --config configs/tp8.yaml`
starts `train.py` that often, with what follows `--`. Process 0 has the console; lines of the others
come to stderr behind `[1] `. SIGTERM or Ctrl-C stops all of them, a second one kills them, SIGUSR1
goes to process 0. When one fails the rest have `--peer-grace` seconds to end by themselves. Exit
codes: 0 all are done, 75 all were stopped and can resume, else that of the process that failed
first: 128 + number after a signal, 1 if the launcher had to kill.
"""

import argparse
import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_STOPPED, EXIT_PEER = 1, 2, 75, 76  # of train.py

_POLL_SECONDS = 0.02
_RELAY_SECONDS = 5.0  # for the last lines of a process that has ended
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def tell(line: str) -> None:
    """A line of the launcher itself."""
    print(f"launch_local: {line}", file=sys.stderr, flush=True)


@dataclass
class _Asked:
    """What signals ask for: handlers note it, the loop acts.

    So two of them within one turn of the loop are one: GNU timeout sends two.
    """

    stop: bool = False
    save: bool = False

    def install(self) -> None:
        """Takes over the signals of this process; SIGHUP comes when its terminal is closed."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_save)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop = True

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True


def _die_with(parent: int) -> None:
    """Runs in a new process before its program: it must not survive a launcher killed by -9."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(EXIT_FAILED)


def _relay(index: int, pipe: IO[str]) -> None:
    """Lines of a process to stderr, behind its number."""
    with pipe:
        for line in pipe:
            ending = "" if line.endswith("\n") else "\n"
            with contextlib.suppress(OSError):  # nobody reads it any more; read on
                sys.stderr.write(f"[{index}] {line}{ending}")
                sys.stderr.flush()


class _Child:
    """A process in a session of its own: Ctrl-C at the terminal reaches the launcher alone."""

    def __init__(self, index: int, command: Sequence[str], environment: dict[str, str]):
        self.name = f"process {index}"
        self.killed = False
        self._index = index
        self._relays: list[threading.Thread] = []
        parent = os.getpid()
        output = subprocess.PIPE if index else None
        if index:  # or it takes its last lines with it when it is killed
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
            preexec_fn=lambda: _die_with(parent),  # the launcher has no threads here
        )

    def start_relays(self) -> None:
        """Begins to read what it prints; not before every process was forked."""
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                arguments = (self._index, pipe)
                self._relays.append(threading.Thread(target=_relay, args=arguments, daemon=True))
                self._relays[-1].start()

    def has_ended(self) -> bool:
        """Whether it has; then none of its own processes stays."""
        if self.process.poll() is None:
            return False
        self._kill_group()
        return True

    @property
    def exit_code(self) -> int:
        """Of a process that has ended: 128 + number after a signal, but 1 after ours."""
        code = self.process.returncode
        if self.killed and code == -signal.SIGKILL:
            return EXIT_FAILED
        return code if code >= 0 else 128 - code

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code >= 0:
            return f"{self.name} ended with exit code {code}"
        return f"{self.name} was killed by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """SIGKILL to it and to its own processes."""
        self.killed = True
        self._kill_group()

    def close(self) -> None:
        """Kills what is left, and waits for its last lines."""
        if self.process.poll() is None:
            self.kill()
            self.process.wait()
        for relay in self._relays:
            relay.join(_RELAY_SECONDS)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody; on macOS a zombie
            os.killpg(self.process.pid, signal.SIGKILL)


def _watch(
    children: Sequence[_Child], asked: _Asked, *, grace: float, peer_grace: float
) -> tuple[int, bool]:
    """Until all have ended: the exit code for all, and whether a signal stopped the launcher."""
    running, codes, is_stopped = list(children), [], False
    limit = (math.inf, "")  # when the rest are killed, and after what
    while running:
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        ended = [child for child in running if child.has_ended()]
        # Who lost a peer ends milliseconds after it, and is never the first to fail.
        for child in sorted(ended, key=lambda child: child.exit_code == EXIT_PEER):
            running.remove(child)
            code = child.exit_code
            codes.append(code)
            is_expected = code == EXIT_STOPPED and is_stopped
            if code and not child.killed and not is_expected:
                tell(child.end)
                # Those that were asked to stop still save, each its part.
                seconds = grace if code == EXIT_STOPPED else peer_grace
                limit = min(limit, (now + seconds, f"within {seconds:g} s of {child.name}"))
        if asked.stop:
            asked.stop = False
            if is_stopped:
                limit = (now, "before the second signal")
            else:
                is_stopped = True
                limit = min(limit, (now + grace, f"within {grace:g} s of SIGTERM"))
                for child in running:
                    child.process.terminate()
        if asked.save:
            asked.save = False
            children[0].process.send_signal(signal.SIGUSR1)
        if now >= limit[0]:
            for child in running:
                if not child.killed:
                    tell(f"{child.name} did not end {limit[1]}: SIGKILL")
                    child.kill()
    failures = [code for code in codes if code not in (0, EXIT_STOPPED)]
    return failures[0] if failures else max(codes), is_stopped


def _free_port(before: int) -> int:
    """A port of the loopback that nobody uses, and that is not the one before."""
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
    """Runs `program` in `processes` processes of `devices` CPU devices each; their exit code.

    grace, peer_grace: seconds before SIGKILL, after SIGTERM and after one has failed. They start
    again, up to `restarts` times, after any failure but bad input (2), unless a signal stopped
    them or the launcher.
    Raises: OSError if a process cannot be started; none is left then.
    """
    asked = _Asked()
    asked.install()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
    }
    port, restart = 0, 0
    while True:
        port = _free_port(port)
        cluster = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(processes)]
        children: list[_Child] = []
        try:
            for index in range(processes):
                command = [*program, *cluster, "--process-id", str(index), *arguments]
                children.append(_Child(index, command, environment))
            for child in children:
                child.start_relays()
            code, is_stopped = _watch(children, asked, grace=grace, peer_grace=peer_grace)
        finally:
            for child in children:
                child.close()
        if code in (0, EXIT_BAD_INPUT, EXIT_STOPPED) or is_stopped or asked.stop:
            return code
        if restart == restarts:
            return code
        restart += 1
        tell(f"restart {restart} of {restarts}")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and launches; what a user can mend is one line and 2."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="%(prog)s --processes N --devices-per-process D [--restarts R] [--grace SECONDS] "
        "[--peer-grace SECONDS] -- --config FILE [section.key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--devices-per-process", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0, help="how often, after a failure")
    parser.add_argument(
        "--grace", type=float, default=120.0, help="seconds from SIGTERM to SIGKILL"
    )
    parser.add_argument(
        "--peer-grace", type=float, default=60.0, help="seconds to SIGKILL after one has failed"
    )
    args = parser.parse_args(given[:split])
    arguments = given[split + 1 :]
    least = {"processes": 1, "devices_per_process": 1, "restarts": 0, "grace": 0, "peer_grace": 0}
    for name, bound in least.items():
        value = getattr(args, name)
        if not value >= bound:
            option = f"--{name.replace('_', '-')}={value}"
            print(f"error: {option} is too low; give {bound} or more", file=sys.stderr)
            return EXIT_BAD_INPUT
    if not arguments:
        example = "-- --config configs/tp8.yaml"
        print(f"error: no arguments for train.py; put them after --: {example}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if args.restarts and any("resume=never" in argument for argument in arguments):
        print(
            "error: checkpoint.resume=never with --restarts begins anew each time", file=sys.stderr
        )
        return EXIT_BAD_INPUT
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
        print(f"error: the processes could not be started: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
