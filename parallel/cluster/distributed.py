"""The process among others: where they meet, signals that ask it to stop, or to save."""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import jax
from jax._src import clusters
from jax.experimental import multihost_utils

from parallel.cluster.peers import EXIT_PEER, ClusterConfig, PeerError, Peers
from parallel.sharding.simulation import simulate_cpu_devices

MAX_SKEW = 30.0
"""Seconds by which clocks may differ: logs and lineages are read side by side."""


@dataclass(frozen=True)
class Cluster:
    """Where the processes of a run meet, and which of them this one is."""

    coordinator: str
    """HOST:PORT of process 0."""
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None
    """Accelerators of this process; None: all of its host."""


def is_cluster(environment: Mapping[str, str]) -> bool:
    """Whether the environment says that this process is one of several.

    A step of SLURM with several tasks, or workers or slices of TPUs under GKE. A Cloud TPU VM
    does not say so in its environment.
    """
    return (
        (int(environment.get("SLURM_NTASKS", 1)) > 1 and "SLURM_STEP_NODELIST" in environment)
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or int(environment.get("MEGASCALE_NUM_SLICES", 1)) > 1
    )


def find_cluster(config: ClusterConfig) -> Cluster:
    """What SLURM, GKE or the metadata server of a Cloud TPU say. Raises: ValueError if none does.

    jax looks for the same only while it starts, and has no public way to ask.
    """
    coordinator, num_processes, process_id, local_device_ids = (
        clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, config.start_timeout
        )
    )
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            "--distributed: neither SLURM, GKE nor a Cloud TPU describes a cluster here; give "
            "--coordinator HOST:PORT --num-processes N --process-id I"
        )
    return Cluster(coordinator, num_processes, process_id, local_device_ids)


def start(cluster: Cluster, config: ClusterConfig, num_devices: int) -> Peers:
    """Waits for all processes, then starts jax among them; before any jax backend.

    num_devices: of the whole mesh; without accelerators each process simulates its share.
    Raises: PeerError with who is missing; ValueError.
    """
    _check(cluster)
    if num_devices % cluster.num_processes:
        raise ValueError(
            f"mesh.* multiplies to {num_devices} devices, which {cluster.num_processes} processes "
            "cannot share evenly; change mesh.*, or --num-processes"
        )
    peers = Peers(cluster.num_processes, cluster.process_id, config)
    facts = {"port": _free_port()} if peers.is_first else {}
    port = peers.join(cluster.coordinator, facts)[0]["port"]
    ahead = {n: skew for n, skew in enumerate(peers.skews) if abs(skew) > MAX_SKEW}
    if ahead:
        told = ", ".join(f"process {n} on {peers.hosts[n]} by {s:.0f} s" for n, s in ahead.items())
        peers.disagree(f"clocks differ from that of process 0: {told}; set them (NTP)")
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        simulate_cpu_devices(num_devices // cluster.num_processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if jax.config.values["jax_platforms"] == "cpu":
        _silence_gloo()
    host = cluster.coordinator.rpartition(":")[0]
    if any(name in os.environ for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        # jax's service is not on the web. gRPC reads no_proxy only if there is no no_grpc_proxy.
        direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")
        os.environ["no_grpc_proxy"] = f"{direct},{host}" if direct else host
    if not peers.is_first:
        _reach(host, port, peers)
    # Our own watch says more, and is quicker but for the loss of process 0: when the main thread
    # holds the interpreter then, jax's abort (exit code 134) may be first.
    jax.distributed.initialize(
        f"{host}:{port}",
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=cluster.local_device_ids,
        initialization_timeout=config.start_timeout,
        heartbeat_timeout_seconds=2 * config.peer_timeout,
        shutdown_timeout_seconds=config.peer_timeout,
        cluster_detection_method="deactivate",
    )
    return peers


def _check(cluster: Cluster) -> None:
    """The laws of what the command line may say."""
    count, number = cluster.num_processes, cluster.process_id
    host, _, port = cluster.coordinator.rpartition(":")
    if not (host and ":" not in host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"--coordinator={cluster.coordinator} is not HOST:PORT; give a name or an IPv4 "
            "address, and a port"
        )
    if count < 1:
        raise ValueError(f"--num-processes={count} is none; give 1 or more")
    if not 0 <= number < count:
        raise ValueError(
            f"--process-id={number} is none of --num-processes={count}; they begin at 0, give 0 "
            f"to {count - 1}"
        )


def _reach(host: str, port: int, peers: Peers) -> None:
    """Waits for jax's service in process 0: where it cannot be reached, jax only aborts.

    Raises: PeerError, of which all processes hear.
    """
    seconds, problem = peers.config.start_timeout, "no answer"
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left).close()
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(0.1)
        else:
            return
    reason = (
        f"process 0 came, but its port {port} at {host} was not reached within {seconds} s: "
        f"{problem}; let hosts reach each other on all ports"
    )
    peers.leave(EXIT_PEER, reason)
    raise PeerError(reason)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _silence_gloo() -> None:
    """It tells of every connection on C's standard output; Python's stays where it was."""
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(os.dup(1), "w", buffering=1, encoding=encoding, errors=errors)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


class StopRequest:
    """Turns the first SIGTERM or SIGINT into a flag that the loop reads between steps.

    A second signal exits at once with 1. SIGUSR1 asks for a save and nothing else. Among several
    processes all stop after the same step: that is agreed by jax's preemption service, which takes
    over SIGTERM from here when jax.distributed starts; so this must be installed before.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.save = False
        self._interrupted = self._is_agreed = False

    def install(self) -> "StopRequest":
        """Takes over SIGTERM, SIGINT and SIGUSR1 of this process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def agree(self, step: int) -> None:
        """Called once per step by every process: from some step on all of them know of a signal."""
        if not jax.distributed.is_initialized():
            return
        if self.signal is not None and not self._is_agreed:  # it came before jax listened
            self.signal = None
            os.kill(os.getpid(), signal.SIGTERM)
        if multihost_utils.reached_preemption_sync_point(step):
            self.signal, self._is_agreed = signal.SIGTERM, True
            self._interrupted = True
            signal.signal(signal.SIGTERM, self._on_signal)  # no longer jax's: the next one ends it

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            os._exit(1)
        self._interrupted = True
        if jax.distributed.is_initialized() and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)  # jax's, by now
        else:
            self.signal = signal.Signals(number)
