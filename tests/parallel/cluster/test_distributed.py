"""Where processes meet, what they refuse before any device work, and when all stop."""

import os
import signal
import socket
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

from parallel.cluster import distributed
from parallel.cluster.distributed import (
    MAX_SKEW,
    Cluster,
    StopRequest,
    find_cluster,
    is_cluster,
    start,
)
from parallel.cluster.peers import EXIT_DISAGREE, ClusterConfig, PeerError, Peers

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
        ({"SLURM_NTASKS": "8"}, False),  # within an allocation, but not started by srun
        ({"TPU_WORKER_HOSTNAMES": "t-0.job,t-1.job", "TPU_WORKER_ID": "1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, False),
        ({"TPU_WORKER_HOSTNAMES": "t-0.job", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"MEGASCALE_NUM_SLICES": "1"}, False),
    ],
)
def test_only_a_process_among_several_is_in_a_cluster(environment, found):
    assert is_cluster(environment) is found


@pytest.fixture
def nowhere(monkeypatch) -> pytest.MonkeyPatch:
    """An environment that describes no cluster."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TPU_", "MEGASCALE_", "OMPI_", "KUBERNETES_", "JAX_COORD")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_slurm_says_where_to_meet_how_many_and_who_this_is(nowhere):
    for name, value in SLURM.items():
        nowhere.setenv(name, value)
    # A port of the job, so that two jobs of one node do not meet.
    assert find_cluster(ClusterConfig()) == Cluster(
        f"node003:{65535 - 4095 + 4711 % 4096}", 8, 5, [1]
    )


def test_no_cluster_is_refused_with_what_to_give(nowhere):
    with pytest.raises(ValueError, match=r"^--distributed: neither SLURM, .*--process-id I$"):
        find_cluster(ClusterConfig())


@pytest.mark.parametrize(
    ("cluster", "law"),
    [
        (("host", 2, 0), "--coordinator=host is not HOST:PORT; give a name or an"),
        ((":1", 2, 0), "--coordinator=:1 is not HOST:PORT"),
        (("[::1]:1", 2, 0), "--coordinator=[::1]:1 is not HOST:PORT; give a name or an IPv4"),
        (("host:x", 2, 0), "--coordinator=host:x is not HOST:PORT"),
        (("host:65536", 2, 0), "--coordinator=host:65536 is not HOST:PORT"),
        (("host:0", 2, 0), "--coordinator=host:0 is not HOST:PORT"),
        (("host:1", 0, 0), "--num-processes=0 is none; give 1 or more"),
        (("host:1", 2, 2), "--process-id=2 is none of --num-processes=2; they begin at 0, give 0 "),
        (("host:1", 2, -1), "--process-id=-1 is none of --num-processes=2"),
        (("host:1", 3, 0), "mesh.* multiplies to 8 devices, which 3 processes cannot share evenly"),
    ],
)
def test_what_cannot_be_is_refused_before_anybody_waits(monkeypatch, cluster, law):
    monkeypatch.setattr(Peers, "join", lambda *_: pytest.fail("it waits"))
    with pytest.raises(ValueError) as refused:
        start(Cluster(*cluster), ClusterConfig(), 8)
    assert str(refused.value).startswith(law)


class Started(Exception):
    """jax is started."""


@pytest.fixture
def start_calls(monkeypatch) -> list[Any]:
    """Of jax.distributed.initialize, which only notes them."""
    calls: list[Any] = []

    def initialize(*arguments: Any, **options: Any) -> None:
        calls.append((arguments, options))
        raise Started

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(distributed, "_silence_gloo", lambda: None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: calls.append((name, value)))
    return calls


def joined(skews: list[float], port: int = 1234) -> type[Peers]:
    """Peers that have come, with these clocks; jax's service is at this port of process 0."""

    class Joined(Peers):
        def join(self, address: str, facts: dict[str, Any] | None = None) -> list[dict[str, Any]]:
            self.hosts, self.skews = [f"host-{n}" for n in range(len(skews))], skews
            return [{"port": port}, *[{}] * (len(skews) - 1)]

    return Joined


@pytest.mark.parametrize("number", [0, 1, 2])
def test_clocks_that_differ_are_refused_by_all_alike(monkeypatch, start_calls, number):
    monkeypatch.setattr(distributed, "Peers", joined([0.0, MAX_SKEW + 1, -3600.0]))
    with pytest.raises(PeerError) as refused:
        start(Cluster("host:1", 3, number), ClusterConfig(), 6)
    assert str(refused.value) == (
        "clocks differ from that of process 0: process 1 on host-1 by 31 s, process 2 on host-2 by "
        "-3600 s; set them (NTP)"
    )
    assert refused.value.code == EXIT_DISAGREE and start_calls == []


@pytest.mark.parametrize("number", [0, 1])
def test_jax_meets_at_the_port_of_process_0_and_waits_longer_than_we_do(
    monkeypatch, start_calls, number
):
    monkeypatch.setattr(distributed, "Peers", joined([0.0, MAX_SKEW - 1]))
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.setattr(distributed, "_reach", lambda *_: None)
    with pytest.raises(Started):
        start(Cluster("host:1", 2, number), ClusterConfig(peer_timeout=7), 8)
    *settings, (arguments, options) = start_calls
    assert ("jax_num_cpu_devices", 4) in settings
    assert arguments == ("host:1234", 2, number)
    assert options["heartbeat_timeout_seconds"] > 7


def test_a_port_of_jax_is_reached_without_a_proxy_or_named(monkeypatch, start_calls):
    monkeypatch.setenv("http_proxy", "http://nowhere")
    monkeypatch.setenv("no_grpc_proxy", "storage")
    two = Cluster("127.0.0.1:1", 2, 1), ClusterConfig(start_timeout=1), 8
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(distributed, "Peers", joined([0.0, 0.0], port))
        with pytest.raises(Started):
            start(*two)
    assert os.environ["no_grpc_proxy"] == "storage,127.0.0.1"
    with pytest.raises(PeerError) as ended:
        start(*two)
    assert str(ended.value) == (
        f"process 0 came, but its port {port} at 127.0.0.1 was not reached within 1 s: Connection "
        "refused; let hosts reach each other on all ports"
    )


def test_the_environment_may_say_how_many_devices_to_simulate(monkeypatch, start_calls):
    monkeypatch.setattr(distributed, "Peers", joined([0.0, 0.0]))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    with pytest.raises(Started):
        start(Cluster("host:1", 2, 0), ClusterConfig(), 8)
    assert "jax_num_cpu_devices" not in [call[0] for call in start_calls]


@pytest.fixture
def service(monkeypatch) -> dict[str, Any]:
    """jax's preemption service: the step from which it says that all stop, and who told it."""
    found: dict[str, Any] = {"step": None, "told": []}

    def reached(step: int) -> bool:
        return found["step"] is not None and step >= found["step"]

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
    monkeypatch.setattr(distributed.os, "kill", lambda pid, number: found["told"].append(number))
    return found


@pytest.fixture
def stop(signals) -> StopRequest:
    return StopRequest().install()


def test_one_process_alone_stops_after_the_step_in_which_it_was_signalled(stop):
    stop.agree(1)
    assert stop.signal is None
    signal.raise_signal(signal.SIGINT)
    stop.agree(2)
    assert stop.signal == signal.SIGINT


def test_all_stop_where_the_service_says_not_where_one_was_signalled(stop, service):
    signal.raise_signal(signal.SIGINT)  # SIGTERM is jax's by now
    assert service["told"] == [signal.SIGTERM]
    stop.agree(1)
    assert stop.signal is None
    service["step"] = 3
    stop.agree(2)
    assert stop.signal is None
    stop.agree(3)
    assert stop.signal == signal.SIGTERM
    stop.agree(4)  # one more may be needed to write the metrics
    assert stop.signal == signal.SIGTERM and service["told"] == [signal.SIGTERM]


def test_a_signal_from_before_jax_started_is_passed_on_and_obeyed_with_the_others(
    stop, service, monkeypatch
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    stop.agree(1)
    assert stop.signal is None and service["told"] == [signal.SIGTERM]
    stop.agree(2)
    service["step"] = 3
    stop.agree(3)
    assert stop.signal == signal.SIGTERM and service["told"] == [signal.SIGTERM]
