"""Start-up of a run with several processes: find the cluster, connect, initialize jax."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
from jax._src import clusters

from exit_codes import EXIT_BAD_INPUT, EXIT_PROCESS_LOST
from parallel.cluster.config import ClusterConfig
from parallel.cluster.listener import is_loopback
from parallel.cluster.liveness import delay_abort
from parallel.cluster.process_group import ProcessGroup
from parallel.sharding.devices import NUM_SIMULATED, prevent_deadlocks

TOKEN_VARIABLE = "TORUS_RUN_TOKEN"
"""Environment variable with the secret of this attempt of a run. The launch scripts set it."""
MIN_TOKEN_LENGTH = 16
"""Characters; the launch scripts make 64, which are 256 random bits."""
MAX_CLOCK_SKEW = 30.0
"""Seconds by which the clocks of hosts may differ: their logs are read side by side."""


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, and which of them this one is."""

    coordinator: str
    """HOST:PORT at which process 0 listens."""
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None
    """Accelerators of this process; None: all of its host."""
    token: str = field(default="", repr=False)
    """Secret of this attempt of the run, by which its processes know each other."""


def is_cluster(environment: Mapping[str, str]) -> bool:
    """Whether the environment variables describe a run with several processes.

    They do in a SLURM step with several tasks, and on GKE with several TPU workers or slices. On a
    Cloud TPU VM they do not, nor in an interactive shell of `salloc`, a step of one task in which
    SLURM_NTASKS is that of the job.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1
    return (
        (int(tasks) > 1 and "SLURM_STEP_NODELIST" in environment)
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or int(environment.get("MEGASCALE_NUM_SLICES", 1)) > 1
    )


def find_cluster(config: ClusterConfig) -> Cluster:
    """Return the cluster that SLURM, GKE or the metadata server of a Cloud TPU describes.

    This calls a private function of jax, which has no public way to ask without starting.

    Raises: ValueError if there is none.
    """
    coordinator, num_processes, process_id, local_device_ids = (
        clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, config.start_timeout
        )
    )
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            "--distributed: found no cluster of SLURM, GKE or Cloud TPU; give "
            "--coordinator HOST:PORT --num-processes N --process-id I"
        )
    return Cluster(coordinator, num_processes, process_id, local_device_ids)


def select_cluster(
    given: tuple[str | None, int | None, int | None],
    config: ClusterConfig,
    environment: Mapping[str, str],
    *,
    detect: bool,
) -> Cluster | None:
    """Return the cluster that the command line or the environment names; None: this process alone.

    None for a cluster of one process too: it needs no jax service, which would take its SIGTERM.
    given: coordinator, number of processes and number of this process. detect: ask the metadata
    server of a Cloud TPU. The token of the run comes from the environment only: a command line is
    visible to all users of a machine. Raises: ValueError if they do not describe a cluster.
    """
    token = environment.get(TOKEN_VARIABLE, "").strip()
    coordinator, num_processes, process_id = given
    if coordinator is not None and num_processes is not None and process_id is not None:
        cluster = Cluster(coordinator, num_processes, process_id, token=token)
        _check(cluster)
        return cluster if num_processes > 1 else None
    if any(value is not None for value in given):
        raise ValueError("give all of --coordinator, --num-processes and --process-id, or none")
    if not detect and not is_cluster(environment):
        return None
    cluster = find_cluster(config)
    return replace(cluster, token=token) if cluster.num_processes > 1 else None


def initialize(cluster: Cluster, config: ClusterConfig, num_devices: int | None) -> ProcessGroup:
    """Connect all processes, then initialize jax.distributed; call before any jax backend starts.

    num_devices: of the whole mesh; without accelerators each process simulates its share. None: the
        mesh takes all devices; without accelerators the processes simulate 8 together.

    Raises: ProcessGroupError if a process is missing, unreachable, or has a wrong clock;
        ValueError.
    """
    _check(cluster)
    if num_devices is None:
        num_devices = max(1, NUM_SIMULATED // cluster.num_processes) * cluster.num_processes
    if num_devices % cluster.num_processes:
        raise ValueError(
            f"mesh.* multiplies to {num_devices} devices, which do not divide over "
            f"{cluster.num_processes} processes; change mesh.*, or --num-processes"
        )
    _check_token(cluster)
    group = ProcessGroup(cluster.num_processes, cluster.process_id, config, token=cluster.token)
    payload = {"jax_port": _free_port()} if group.is_primary else {}
    port = group.connect(cluster.coordinator, payload)[0]["jax_port"]
    _check_clocks(group)
    share = os.environ.get("JAX_NUM_CPU_DEVICES") or num_devices // cluster.num_processes
    prevent_deadlocks()
    jax.config.update("jax_num_cpu_devices", int(share))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if jax.config.values["jax_platforms"] == "cpu":
        _silence_gloo()
    host = cluster.coordinator.rpartition(":")[0]
    _bypass_proxy(host)
    if not group.is_primary:
        _wait_for_port(host, port, group)
    # The process group reports a lost process earlier and with its name. An exception is the loss
    # of process 0, which a thread of jax notices at the same time.
    delay_abort()
    jax.distributed.initialize(
        f"{host}:{port}",
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=cluster.local_device_ids,
        initialization_timeout=config.start_timeout,
        heartbeat_timeout_seconds=2 * config.peer_timeout,
        shutdown_timeout_seconds=config.peer_timeout,
        cluster_detection_method="deactivate",
        # Without one jax, too, listens on all interfaces. Its own service has no token.
        coordinator_bind_address=_join(group.interface, port) if group.interface else None,
    )
    return group


def _check(cluster: Cluster) -> None:
    """Check the arguments of the command line. Raises: ValueError."""
    count, number = cluster.num_processes, cluster.process_id
    host, _, port = cluster.coordinator.rpartition(":")
    if not (host and ":" not in host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(
            f"--coordinator={cluster.coordinator} is not HOST:PORT; give a host name or an IPv4 "
            "address, and a port"
        )
    if count < 1:
        raise ValueError(f"--num-processes={count} is too low; give 1 or more")
    if not 0 <= number < count:
        raise ValueError(
            f"--process-id={number} is out of range for --num-processes={count}; give 0 to "
            f"{count - 1}"
        )


def _check_token(cluster: Cluster) -> None:
    """Check that the connections are authenticated unless they stay on this machine."""
    length, host = len(cluster.token), cluster.coordinator.rpartition(":")[0]
    if 0 < length < MIN_TOKEN_LENGTH:
        raise ValueError(
            f"{TOKEN_VARIABLE} has {length} characters; give it {MIN_TOKEN_LENGTH} or more, such "
            "as the output of `openssl rand -hex 32`"
        )
    if not length and cluster.num_processes > 1 and not is_loopback(host):
        raise ValueError(
            f"{TOKEN_VARIABLE} is not set, so anybody who reaches {cluster.coordinator} could join "
            "or end this run; use scripts/launch, which sets it, or export one secret on all "
            "hosts, such as the output of `openssl rand -hex 32`"
        )


def _join(interface: str, port: int) -> str:
    return f"[{interface}]:{port}" if ":" in interface else f"{interface}:{port}"


def _check_clocks(group: ProcessGroup) -> None:
    """Check that the hosts agree on the time. Raises: ProcessGroupError."""
    wrong = {n: skew for n, skew in enumerate(group.clock_skews) if abs(skew) > MAX_CLOCK_SKEW}
    if wrong:
        listed = ", ".join(
            f"process {n} on {group.hosts[n]} by {skew:+.0f} s" for n, skew in wrong.items()
        )
        group.fail(
            f"clocks differ from the clock of process 0: {listed}; synchronise the hosts with NTP",
            EXIT_BAD_INPUT,
        )


def _bypass_proxy(host: str) -> None:
    """Exempt the service of jax.distributed on this host from a proxy for the web.

    gRPC reads no_proxy only where there is no no_grpc_proxy.
    """
    if any(name in os.environ for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        exempt = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy")
        os.environ["no_grpc_proxy"] = f"{exempt},{host}" if exempt else host


def _wait_for_port(host: str, port: int, group: ProcessGroup) -> None:
    """Wait for the service of jax.distributed in process 0; jax itself would only abort.

    Raises: ProcessGroupError on every process.
    """
    timeout, problem = group.config.start_timeout, "no answer"
    deadline = time.monotonic() + timeout
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=remaining).close()
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(0.1)
        else:
            return
    group.fail(
        f"port {port} of process 0 at {host} was not reachable within {timeout} s "
        f"(cluster.start_timeout): {problem}; open all ports between the hosts",
        EXIT_PROCESS_LOST,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _silence_gloo() -> None:
    """Discard what gloo prints on the standard output of C; Python's output stays as it was."""
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdout = open(os.dup(1), "w", buffering=1, encoding=encoding, errors=errors)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
