"""Devices of a run, attached or simulated on the CPU, and data-sheet figures of chips."""

import glob
import os
import re
from dataclasses import dataclass

import jax

NUM_SIMULATED = 8
"""Devices that an automatic mesh axis fills on a machine without accelerators."""


def find_devices(
    num_devices: int, *, take_all: bool = False
) -> tuple[list[jax.Device], str | None]:
    """Return the devices of a run, and a line to log if they are simulated.

    CPU devices are simulated where jax finds no accelerator, or where JAX_PLATFORMS=cpu hides them.
    Call this before anything else starts a jax backend, which fixes the number of CPU devices.

    Args:
        num_devices: Devices of the mesh.
        take_all: Return all accelerators, or the number of CPU devices in JAX_NUM_CPU_DEVICES;
            num_devices is what to simulate without either.

    Raises: ValueError if there is another number of accelerators, or if the backend has too few
        devices.
    """
    describe_missing_tpu()
    # JAX_NUM_CPU_DEVICES may ask for enough already.
    configured = jax.config.values["jax_num_cpu_devices"]
    if take_all and configured > 0:
        num_devices = configured
    if not jax.distributed.is_initialized():
        _simulate(num_devices, at_least=configured)
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"jax finds no device: {str(error).splitlines()[0] if str(error) else 'no backend'}; "
            "check JAX_PLATFORMS and the installed plugins"
        ) from error
    platform, several = devices[0].platform, jax.process_count() > 1
    if several and not jax.distributed.is_initialized():
        raise ValueError(
            f"these {platform} devices belong to {jax.process_count()} processes; start train.py "
            "on all of them with --distributed"
        )
    if platform == "cpu" and not several:
        noun = "device" if num_devices == 1 else "devices"
        notice = f"found no accelerator; simulating {num_devices} {noun} on the CPU"
        return jax.devices("cpu")[:num_devices], notice
    if len(devices) != num_devices and not take_all:
        noun = f"{platform} device{'s' if len(devices) > 1 else ''}"
        owners = f"the {jax.process_count()} processes have" if several else "this machine has"
        raise ValueError(
            f"mesh.* multiplies to {num_devices}, but {owners} {len(devices)} {noun}; make the "
            f"product {len(devices)}, or give one axis as auto"
            + ("" if several else f"; JAX_PLATFORMS=cpu simulates {num_devices} on the CPU")
        )
    return list(devices), None


def _simulate(num_devices: int, at_least: int) -> None:
    """Let jax start with this many CPU devices; it has `at_least` by its configuration."""
    if num_devices > 1:
        prevent_deadlocks()
    if at_least >= num_devices:
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise ValueError(
            f"the mesh needs {num_devices} CPU devices, but jax already started with "
            f"{jax.device_count('cpu')}; build the mesh first"
        ) from error


def describe_missing_tpu() -> None:
    """Give libtpu values for what it would ask a TPU, where none is attached.

    libtpu may be installed for the planner, and jax tries it before the CPU. Where jax finds no TPU
    (it then sets TPU_SKIP_MDS_QUERY), libtpu writes a warning into each of these variables, reads
    it back as a value and prints an error. The values change neither the devices nor the programs
    of an absent slice. Nothing changes on a TPU VM: its chips are device files. Call this before a
    jax backend starts; values that the user has set stay.
    """
    if os.environ.get("TPU_SKIP_MDS_QUERY") != "1":
        return
    if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"):
        return
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def compute_capability(device: jax.Device) -> tuple[int, int]:
    """Return the (major, minor) CUDA compute capability of a GPU; (0, 0) for other devices."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


# XLA:CPU runs every simulated device on one shared thread pool, and a collective blocks its thread
# until all devices have joined it. With the default scheduler, collectives that do not depend on
# each other may start in a different order on different devices: one device then waits in an
# all-gather while the others wait in an all-reduce, and the program never ends. A larger thread
# pool makes this rarer but does not prevent it. Scheduling for least memory fixes one order for all
# devices, except around loops: see `parallel/sharding/ordering.py`. The timeouts are for machines
# with more simulated devices than cores: a device that has not had its turn yet is not stuck. XLA's
# own defaults are 20 and 40 seconds.
_XLA_OPTIONS = {
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "600",
    "xla_cpu_collective_call_terminate_timeout_seconds": "3600",
}


def prevent_deadlocks() -> None:
    """Set the environment variables for simulated devices; call it before a jax backend starts.

    XLA_FLAGS gets the options above. Factorisations of matrices, as in SOAP, get one thread per
    device: with several, those of eight devices wait for each other, which took a hundred times
    longer on two cores (November 2026).

    Child processes inherit these variables. Those that the user has set stay. Nothing is added
    where JAX_PLATFORMS excludes the CPU, because XLA refuses to start with an option that it does
    not know. The names were checked with jax 0.10.2 and 0.12.0.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    flags = os.environ.get("XLA_FLAGS", "").split()
    present = {flag.lstrip("-").partition("=")[0] for flag in flags}
    added = [f"--{name}={value}" for name, value in _XLA_OPTIONS.items() if name not in present]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *added])


@dataclass(frozen=True)
class Chip:
    """Data-sheet figures of one device as jax counts devices."""

    peak_flops: float
    """Dense bfloat16 FLOP/s."""
    hbm_bandwidth: float = 0.0
    """Bytes/s of device memory."""
    ici_bandwidth: float = 0.0
    """Bytes/s in one direction of one link to a torus neighbour; 0: no torus."""
    clock_hz: float = 0.0
    """Clock in which the compiler counts cycles: peak / (MXUs * 128 * 128 * 2); 0: it does not."""
    wrap: int = 0
    """Sides of a slice that are a multiple of this have wrap-around links; 0: no side has them."""
    dcn_bandwidth: float = 0.0
    """Bytes/s in one direction to other slices, as this device's share of its host; 0: unknown."""
    hbm_bytes: float = 0.0
    """Device memory that programs may use; 0: unknown."""
    host_bandwidth: float = 15e9
    """Bytes/s in one direction to the memory of the host (PCIe)."""

    @property
    def usable_bytes(self) -> float:
        """Device memory that jax allocates: all of a TPU, a share of a GPU; 0: unknown."""
        return self.hbm_bytes * (1.0 if self.ici_bandwidth else gpu_share())


def gpu_share() -> float:
    """Return the share of a GPU's memory that jax allocates."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)


# Keys are jax's device_kind. TPU: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e pages). Links: the
# table of "How to Scale Your Model" (jax-ml.github.io/scaling-book), 45 and 90 GB/s, where Google's
# pages give a nominal 50 and 100. GPU: NVIDIA A100, H100 SXM and H200 data sheets, dense figures.
# All read in November 2026. wrap: v4 and v5p slices are cubes of 4 with optical faces; v5e and v6e
# wrap at the 16 of a pod, and libtpu 0.0.42 refuses any other size for v5e. DCN: Google's pages
# give 6.4 and 25.6 Tbit/s per pod of 256 (v5e, v6e); v4 and v5p: the book's 25 GB/s per host of 4.
# PCIe: the book's 15 GB/s for v6e, assumed for all.
# Memory: what libtpu 0.0.42 names as available when a program needs more; GPU: the data sheets.
CHIPS: dict[str, Chip] = {
    "TPU v4": Chip(275e12, 1.2e12, 45e9, 1.05e9, 4, 6.25e9, 30.75 * 2**30),
    "TPU v5 lite": Chip(197e12, 0.82e12, 45e9, 1.5e9, 16, 3.125e9, 15.75 * 2**30),
    "TPU v5": Chip(459e12, 2.765e12, 90e9, 1.75e9, 4, 6.25e9, 95.74 * 2**30),
    "TPU v6 lite": Chip(918e12, 1.64e12, 90e9, 1.75e9, 16, 12.5e9, 31.25 * 2**30),
    "NVIDIA A100-SXM4-80GB": Chip(312e12, 2.039e12, hbm_bytes=80e9),
    "NVIDIA H100 80GB HBM3": Chip(989e12, 3.35e12, hbm_bytes=80e9),
    "NVIDIA H200": Chip(989e12, 4.8e12, hbm_bytes=141e9),
}
