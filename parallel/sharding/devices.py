"""The devices of a run: accelerators, simulated CPU devices, or a TPU that is not attached."""

import os
import re
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from parallel.sharding.simulation import prevent_deadlocks, simulate_cpu_devices


def find_devices(num_devices: int) -> tuple[list[jax.Device], str | None]:
    """Return the devices of a run, and a line to log if they are simulated.

    Accelerators if there are exactly enough of them, otherwise simulated CPU devices. Call this
    before anything else starts a jax backend, which fixes the number of CPU devices.

    Raises: ValueError if accelerators would stay unused, or if the backend has too few devices.
    """
    is_alone = not jax.distributed.is_initialized()
    if is_alone and num_devices > 1:
        prevent_deadlocks()
    # JAX_NUM_CPU_DEVICES may ask for enough already.
    if is_alone and jax.config.values["jax_num_cpu_devices"] < num_devices:
        try:
            simulate_cpu_devices(num_devices)
        except RuntimeError as error:
            raise ValueError(
                f"the mesh needs {num_devices} CPU devices, but jax already started with "
                f"{jax.device_count('cpu')}; build the mesh first"
            ) from error
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"jax finds no device: {str(error).splitlines()[0] if str(error) else 'no backend'}; "
            "check JAX_PLATFORMS and the installed plugins"
        ) from error
    platform = devices[0].platform
    if jax.process_count() > 1:
        if not jax.distributed.is_initialized():
            raise ValueError(
                f"these {platform} devices belong to {jax.process_count()} processes; start "
                "train.py on all of them with --distributed"
            )
        if len(devices) != num_devices:
            raise ValueError(
                f"mesh.* multiplies to {num_devices} but the {jax.process_count()} processes have "
                f"{len(devices)} {platform} devices; make the product {len(devices)}"
            )
        return list(devices), None
    if platform != "cpu":
        if len(devices) == num_devices:
            return list(devices), None
        if len(devices) > num_devices:
            raise ValueError(
                f"mesh.* multiplies to {num_devices} but there are {len(devices)} {platform} "
                f"devices; make the product {len(devices)}, or hide the rest from jax"
            )
        found = f"{len(devices)} {platform} device{'s' if len(devices) > 1 else ''}"
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    else:
        found = "no accelerator"
    cpus = jax.devices("cpu")[:num_devices]
    noun = "device" if num_devices == 1 else "devices"
    return cpus, f"found {found}; simulating {num_devices} {noun} on the CPU"


@dataclass(frozen=True)
class Topology:
    """TPU slices by name: "v5p:2x2x2" is one slice, "v5p:2x2x2*4" are four of them."""

    slice_name: str
    sides: tuple[int, ...]
    num_slices: int


def read_topology(text: str) -> Topology:
    """Parse the name of a TPU topology. Raises: ValueError if it has another form."""
    found = re.fullmatch(r"(\w+:([1-9]\d*(?:x[1-9]\d*)*))(?:\*([1-9]\d*))?", text)
    if found is None:
        raise ValueError(
            f"topology {text}: not the name of a TPU; write a slice like v5p:2x2x2 or v5e:2x4, and "
            "two of them like v5p:2x2x2*2"
        )
    sides = tuple(int(side) for side in found[2].split("x"))
    return Topology(found[1], sides, int(found[3] or 1))


def absent_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a TPU that is not attached; programs compile for them but do not run.

    topology: A name that `read_topology` accepts. Needs libtpu, which `pip install "jax[tpu]"`
    installs on any Linux x86 machine.

    Raises: ValueError without libtpu, or for a topology that libtpu does not know.
    """
    named = read_topology(topology)
    # Otherwise libtpu queries the cloud's metadata server and refuses a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=named.slice_name, num_slices=named.num_slices
        )
        return list(found.devices)
    except Exception as error:  # jaxlib has no exception type for libtpu's errors
        raise ValueError(
            f"topology {topology}: {str(error).splitlines()[0]}; install libtpu by "
            'pip install -e ".[plan]" and name a slice like v5p:2x2x2 or v5e:2x4'
        ) from error
