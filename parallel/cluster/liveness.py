"""Liveness: heartbeats, and the detection of lost, hung and stalled processes.

Every process sends a heartbeat once a second over its connection to process 0, with the phase it
is in ("compiling", "step 12"). A closed connection means a killed process, silence for
`cluster.peer_timeout` a frozen one or a lost host. Process 0 also knows the phase of all: when one
lasts longer than `cluster.stall_timeout`, the run has stalled. A process that runs alone is
monitored for stalls, too.
"""

import ctypes
import selectors
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exit_codes import EXIT_PROCESS_LOST
from parallel.cluster.config import ClusterConfig
from parallel.cluster.connection import Connection
from parallel.cluster.messages import Abort, Heartbeat, Message, encode

HEARTBEAT_SECONDS = 1.0
PATIENCE = 1.0
"""Seconds that an abort waits for another message to the same peer, which may be frozen."""


def delay_abort() -> None:
    """Let every `abort()` of C and C++ in this process wait six seconds, so that others can report.

    When process 0 is lost, a C++ thread of jax aborts this process at once. The monitor knows the
    lost process, but it is a Python thread, and another thread may hold the interpreter. jax has a
    callback for this (`missed_heartbeat_callback`), but jaxlib 0.10.2 and 0.12.0.1 cannot convert
    its argument to Python.

    The handler is the function `sleep` of C, because it needs no interpreter. Its argument is the
    number of the signal, and SIGABRT is 6. Then `abort` ends the process as usual. A SIGABRT from
    outside is ignored the first time.
    """
    libc = ctypes.CDLL(None)
    install = getattr(libc, "sysv_signal", libc.signal)  # reset at the first signal, where possible
    install.argtypes = (ctypes.c_int, ctypes.c_void_p)
    install.restype = ctypes.c_void_p
    install(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


@dataclass
class Phase:
    """Current activity of a process."""

    name: str | None = None
    """None: nothing that the stall timeout applies to."""
    start: float = 0.0
    """When it began, on the monotonic clock of this process."""


class Peer:
    """Another process of the group, as seen over the connection to it."""

    def __init__(self, host: str, connection: Connection):
        self.host, self.connection = host, connection
        self.last_heard = time.monotonic()
        self.phase = Phase()
        self.has_left = False
        """Whether it has announced its exit, so that a closed connection is no loss."""


class LivenessMonitor:
    """A thread that receives from all peers, sends heartbeats and reports a lost process.

    on_message: called with (process id, message) for everything but heartbeats; raises ValueError
        for a message that this process must not send.
    on_failure: called once with (reason, exit code); the thread has nothing more to do then.
    on_stall: called with the reason before `on_failure` if the run has stalled.
    """

    def __init__(
        self,
        process_id: int,
        host: str,
        peers: Mapping[int, Peer],
        config: ClusterConfig,
        *,
        on_message: Callable[[int, Message], None],
        on_failure: Callable[[str, int], None],
        on_stall: Callable[[str], None],
    ):
        self._label = f"process {process_id} on {host}"
        self._is_primary, self._host = process_id == 0, host
        self._peers, self._config = peers, config
        self._on_message, self._on_failure, self._on_stall = on_message, on_failure, on_stall
        self._phase = Phase(start=time.monotonic())
        self.is_stopping = False
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set_phase(self, name: str | None) -> None:
        """Set the phase of this process and restart its stall timeout."""
        self._phase = Phase(name, time.monotonic())

    def wait_for_failure(self) -> None:
        """Give the thread the time of one heartbeat to notice and report a lost process."""
        if self._peers:
            self._thread.join(HEARTBEAT_SECONDS)

    def stop(self) -> None:
        """End the thread."""
        self.is_stopping = True
        self._thread.join()

    def fail(
        self, reason: str, exit_code: int = EXIT_PROCESS_LOST, *, has_stalled: bool = False
    ) -> None:
        """Report a failure; process 0 sends it to all others first."""
        if self._is_primary:
            abort = Abort(reason=reason, exit_code=exit_code, has_stalled=has_stalled)
            self._broadcast(abort, PATIENCE)
        self.is_stopping = True
        if has_stalled:
            self._on_stall(reason)
        self._on_failure(reason, exit_code)

    def _run(self) -> None:
        """Monitor the peers. An error in here ends the run: unmonitored it could hang for ever."""
        try:
            self._monitor()
        except Exception as error:
            self.fail(f"{self._label} cannot monitor the others: {type(error).__name__}: {error}")

    def _monitor(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, peer in self._peers.items():
                selector.register(peer.connection, selectors.EVENT_READ, number)
            last = time.monotonic() - HEARTBEAT_SECONDS
            while not self.is_stopping:
                for key, _ in selector.select(timeout=HEARTBEAT_SECONDS / 4):
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - last >= HEARTBEAT_SECONDS:
                    phase = self._phase
                    if now - last > 5 * HEARTBEAT_SECONDS:
                        # This process itself stood still, and could not hear the others.
                        for peer in self._peers.values():
                            peer.last_heard += now - last
                        phase.start = min(now, phase.start + now - last)
                    last = now
                    seconds = max(0.0, now - phase.start)
                    # A peer that is being sent something else needs no heartbeat.
                    self._broadcast(Heartbeat(phase=phase.name, phase_seconds=seconds), 0.0)
                    self._check(now)

    def _receive(self, number: int) -> bool:
        """Handle what a peer has sent; False once its connection is closed."""
        peer = self._peers[number]
        try:
            messages = peer.connection.receive()
            if messages is None:
                if not self.is_stopping and not peer.has_left:
                    self._fail_lost(number, "is lost: its connection closed")
                return False
            peer.last_heard = time.monotonic()
            for message in messages:
                if isinstance(message, Heartbeat):
                    start = peer.last_heard - message.phase_seconds
                    peer.phase = Phase(message.phase, start)
                else:
                    self._on_message(number, message)
        except ValueError as error:
            if not self.is_stopping:
                self._fail_lost(number, f"has sent an invalid message ({error})")
            return False
        return True

    def _check(self, now: float) -> None:
        """Fail if a peer is silent or, on process 0, if a process has stalled."""
        limit = self._config.peer_timeout
        for number, peer in self._peers.items():
            if now - peer.last_heard > limit:
                self._fail_lost(
                    number, f"has sent no heartbeat for {limit} s (cluster.peer_timeout)"
                )
                return
        if self._is_primary:
            self._check_stall(now)

    def _check_stall(self, now: float) -> None:
        limit = self._config.stall_timeout
        phases = [(0, self._host, self._phase)]
        phases += [(number, peer.host, peer.phase) for number, peer in self._peers.items()]
        if any(phase.name and now - phase.start > limit for *_, phase in phases):
            listed = ", ".join(
                f"process {number} on {host}: {phase.name or 'idle'} for {now - phase.start:.0f} s"
                for number, host, phase in sorted(phases, key=lambda entry: entry[2].start)
            )
            files = "stacks.txt and stacks.N.txt" if self._peers else "stacks.txt"
            again = "restart all processes" if self._peers else "start it again"
            self.fail(
                f"no progress for {limit} s (cluster.stall_timeout): {listed}; the stacks of all "
                f"threads are in {files} of the run directory; {again}, or raise "
                "the timeout if this phase needs longer",
                has_stalled=True,
            )

    def _fail_lost(self, number: int, problem: str) -> None:
        peer = self._peers[number]
        phase = f", last phase {peer.phase.name!r}" if peer.phase.name else ""
        self.fail(f"process {number} on {peer.host} {problem}{phase}; restart all processes")

    def _broadcast(self, message: Message, patience: float) -> None:
        text = encode(message)
        for peer in self._peers.values():
            peer.connection.send_text(text, patience)
