"""Start-up among several processes: how a cluster is found, what is refused, what jax is given."""

import os
import socket
import subprocess
import sys
from typing import Any

import jax
import pytest
from conftest import ROOT
from process_groups import HOST, free_address

from exit_codes import EXIT_BAD_INPUT, EXIT_PROCESS_LOST
from parallel.cluster import distributed
from parallel.cluster.config import ClusterConfig, ProcessGroupError
from parallel.cluster.distributed import (
    MAX_CLOCK_SKEW,
    Cluster,
    find_cluster,
    initialize,
    is_cluster,
    select_cluster,
)
from parallel.cluster.process_group import ProcessGroup

TOKEN = "0123456789abcdef"
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[003,007-009],login1",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, False),
        (SLURM, True),
        (SLURM | {"SLURM_NTASKS": "1"}, False),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, False),  # an interactive shell of salloc
        (SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"SLURM_NTASKS": "8"}, False),  # within an allocation, but not started by srun
        ({"TPU_WORKER_HOSTNAMES": "t-0.job,t-1.job", "TPU_WORKER_ID": "1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, False),
        ({"TPU_WORKER_HOSTNAMES": "t-0.job", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"MEGASCALE_NUM_SLICES": "1"}, False),
    ],
)
def test_only_an_environment_of_several_processes_is_a_cluster(environment, found):
    assert is_cluster(environment) is found


@pytest.fixture
def no_cluster(monkeypatch) -> pytest.MonkeyPatch:
    """Remove all variables that describe a cluster."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TPU_", "MEGASCALE_", "OMPI_", "KUBERNETES_", "JAX_COORD")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_slurm_gives_the_coordinator_the_processes_and_the_device(no_cluster):
    for name, value in SLURM.items():
        no_cluster.setenv(name, value)
    # The port depends on the job, so that two jobs on one node do not connect.
    assert find_cluster(ClusterConfig()) == Cluster(
        f"node003:{65535 - 4095 + 4711 % 4096}", 8, 5, [1]
    )


def test_no_cluster_is_refused_with_the_options_to_give(no_cluster):
    with pytest.raises(ValueError, match=r"^--distributed: found no cluster .*--process-id I$"):
        find_cluster(ClusterConfig())


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        (("host", 2, 0), "--coordinator=host is not HOST:PORT; give a host name or an"),
        ((":1", 2, 0), "--coordinator=:1 is not HOST:PORT"),
        (("[::1]:1", 2, 0), "--coordinator=[::1]:1 is not HOST:PORT; give a host name or an IPv4"),
        (("host:x", 2, 0), "--coordinator=host:x is not HOST:PORT"),
        (("host:65536", 2, 0), "--coordinator=host:65536 is not HOST:PORT"),
        (("host:0", 2, 0), "--coordinator=host:0 is not HOST:PORT"),
        (("host:1", 0, 0), "--num-processes=0 is too low; give 1 or more"),
        (("host:1", 2, 2), "--process-id=2 is out of range for --num-processes=2; give 0 to 1"),
        (("host:1", 2, -1), "--process-id=-1 is out of range for --num-processes=2"),
        (("host:1", 3, 0), "mesh.* multiplies to 8 devices, which do not divide over 3 processes"),
    ],
)
def test_impossible_arguments_are_refused_before_any_process_connects(monkeypatch, cluster, reason):
    monkeypatch.setattr(ProcessGroup, "connect", lambda *_: pytest.fail("it connects"))
    with pytest.raises(ValueError) as refused:
        initialize(Cluster(*cluster), ClusterConfig(), 8)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    ("cluster", "reason"),
    [
        (
            ("node1:9000", 2, 0),
            "TORUS_RUN_TOKEN is not set, so anybody who reaches node1:9000",
        ),
        (
            ("10.0.0.1:9000", 2, 1),
            "TORUS_RUN_TOKEN is not set, so anybody who reaches 10.0.",
        ),
        (("127.0.0.1:9000", 2, 1, None, "short"), "TORUS_RUN_TOKEN has 5 characters; give it 16"),
    ],
)
def test_several_hosts_need_a_secret_token(monkeypatch, cluster, reason):
    monkeypatch.setattr(ProcessGroup, "connect", lambda *_: pytest.fail("it connects"))
    with pytest.raises(ValueError) as refused:
        initialize(Cluster(*cluster), ClusterConfig(), 8)
    assert str(refused.value).startswith(reason) and "openssl rand -hex 32" in str(refused.value)
    assert "short" not in str(refused.value)


@pytest.mark.parametrize(
    "cluster", [("127.0.0.1:1", 2, 0), ("localhost:1", 2, 1), ("node1:1", 1, 0)]
)
def test_the_processes_of_one_machine_need_no_token(monkeypatch, start_calls, cluster):
    monkeypatch.setattr(distributed, "ProcessGroup", connected([0.0] * cluster[1]))
    monkeypatch.setattr(distributed, "_wait_for_port", lambda *_: None)
    with pytest.raises(Started):
        initialize(Cluster(*cluster), ClusterConfig(), 8)


def test_a_cluster_of_one_process_is_a_process_alone(monkeypatch):
    options = {"config": ClusterConfig(), "environment": {}}
    assert select_cluster(("host:1", 1, 0), **options, detect=False) is None
    with pytest.raises(ValueError, match="--process-id=1 is out of range"):
        select_cluster(("host:1", 1, 1), **options, detect=False)
    monkeypatch.setattr(distributed, "find_cluster", lambda _: Cluster("host:1", 1, 0))
    assert select_cluster((None, None, None), **options, detect=True) is None


def test_the_token_comes_from_the_environment_and_is_never_shown(no_cluster):
    environment = {"TORUS_RUN_TOKEN": f"{TOKEN}\n"}
    given = select_cluster(("host:1", 2, 1), ClusterConfig(), environment, detect=False)
    assert given == Cluster("host:1", 2, 1, token=TOKEN) and TOKEN not in repr(given)
    assert select_cluster((None, None, None), ClusterConfig(), environment, detect=False) is None
    for name, value in SLURM.items():
        no_cluster.setenv(name, value)
    found = select_cluster((None, None, None), ClusterConfig(), SLURM | environment, detect=False)
    assert found.num_processes == 8 and found.token == TOKEN


@pytest.mark.parametrize(
    ("interface", "address"),
    [("", None), ("10.0.0.1", "10.0.0.1:1234"), ("fd00::1", "[fd00::1]:1234")],
)
def test_jax_listens_at_the_interface_of_the_coordinator(
    monkeypatch, start_calls, interface, address
):
    monkeypatch.setattr(distributed, "ProcessGroup", connected([0.0, 0.0], interface=interface))
    with pytest.raises(Started):
        initialize(Cluster("host:1", 2, 0, token=TOKEN), ClusterConfig(), 8)
    assert start_calls[-1][1]["coordinator_bind_address"] == address


class Started(Exception):
    """jax.distributed.initialize was called."""


@pytest.fixture
def start_calls(monkeypatch) -> list[Any]:
    """Record the calls of jax.distributed.initialize and jax.config.update."""
    calls: list[Any] = []

    def initialize(*arguments: Any, **options: Any) -> None:
        calls.append((arguments, options))
        raise Started

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(distributed, "_silence_gloo", lambda: None)
    monkeypatch.setattr(distributed, "delay_abort", lambda: None)  # it is for the whole process
    monkeypatch.setattr(jax.config, "update", lambda name, value: calls.append((name, value)))
    return calls


def connected(skews: list[float], port: int = 1234, interface: str = "") -> type[ProcessGroup]:
    """A group whose clocks have these skews and whose process 0 serves jax at this port."""

    class Connected(ProcessGroup):
        def connect(self, address: str, payload: Any = None) -> list[dict[str, Any]]:
            self.hosts, self.clock_skews = [f"host-{n}" for n in range(len(skews))], skews
            self.interface = interface
            return [{"jax_port": port}, *[{}] * (len(skews) - 1)]

    return Connected


@pytest.mark.parametrize("number", [0, 1, 2])
def test_wrong_clocks_are_refused_on_all_processes(monkeypatch, start_calls, number):
    monkeypatch.setattr(distributed, "ProcessGroup", connected([0.0, MAX_CLOCK_SKEW + 1, -3600.0]))
    with pytest.raises(ProcessGroupError) as refused:
        initialize(Cluster("host:1", 3, number, token=TOKEN), ClusterConfig(), 6)
    assert str(refused.value) == (
        "clocks differ from the clock of process 0: process 1 on host-1 by +31 s, process 2 on "
        "host-2 by -3600 s; synchronise the hosts with NTP"
    )
    assert refused.value.exit_code == EXIT_BAD_INPUT and start_calls == []


@pytest.mark.parametrize("number", [0, 1])
def test_jax_gets_the_port_of_process_0_and_a_longer_heartbeat_timeout(
    monkeypatch, start_calls, number
):
    monkeypatch.setattr(distributed, "ProcessGroup", connected([0.0, MAX_CLOCK_SKEW - 1]))
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setattr(distributed, "_wait_for_port", lambda *_: None)
    with pytest.raises(Started):
        initialize(Cluster("host:1", 2, number, token=TOKEN), ClusterConfig(peer_timeout=7), 8)
    *settings, (arguments, options) = start_calls
    assert ("jax_num_cpu_devices", 4) in settings
    assert arguments == ("host:1234", 2, number)
    assert 7 < options["heartbeat_timeout_seconds"] <= 3 * 7


def test_the_port_of_jax_is_reached_without_a_proxy_or_named(monkeypatch, start_calls):
    monkeypatch.setenv("http_proxy", "http://nowhere")
    monkeypatch.setenv("no_grpc_proxy", "storage")
    two = Cluster("127.0.0.1:1", 2, 1), ClusterConfig(start_timeout=1), 8
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(distributed, "ProcessGroup", connected([0.0, 0.0], port))
        with pytest.raises(Started):
            initialize(*two)
    assert os.environ["no_grpc_proxy"] == "storage,127.0.0.1"
    with pytest.raises(ProcessGroupError) as ended:
        initialize(*two)
    assert str(ended.value) == (
        f"port {port} of process 0 at 127.0.0.1 was not reachable within 1 s "
        "(cluster.start_timeout): Connection refused; open all ports between the hosts"
    )


def test_the_environment_may_set_the_number_of_simulated_devices(monkeypatch, start_calls):
    monkeypatch.setattr(distributed, "ProcessGroup", connected([0.0, 0.0]))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    with pytest.raises(Started):
        initialize(Cluster("host:1", 2, 0, token=TOKEN), ClusterConfig(), 8)
    assert ("jax_num_cpu_devices", 2) in start_calls


MEMBER = """
import ctypes, sys, time
from parallel.cluster.config import ClusterConfig
from parallel.cluster.distributed import Cluster, initialize

group = initialize(Cluster(sys.argv[1], 2, int(sys.argv[2])), ClusterConfig(), 2)
print("connected", flush=True)
if not group.is_primary:
    ctypes.PyDLL(None).usleep(3_000_000)  # holds the interpreter, as a long call of C++ does
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_the_loss_of_process_0_is_named_although_jax_aborts_on_it():
    address, processes = free_address(), []
    for number in range(2):
        arguments = [sys.executable, "-c", MEMBER, address, str(number)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, text=True, **pipes))
    first, other = processes
    try:
        for process in processes:
            assert process.stdout.readline() == "connected\n", process.stderr.read()
        first.kill()
        first.communicate()
        errors = other.communicate(timeout=60)[1]
    finally:
        other.kill()
    assert "JAX distributed service detected fatal errors" in errors  # or this tests nothing
    assert f"error: process 0 on {HOST} is lost: its connection closed" in errors
    assert other.returncode == EXIT_PROCESS_LOST
