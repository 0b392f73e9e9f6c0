"""Simulated CPU devices and the XLA options under which their collectives cannot deadlock.

XLA:CPU runs every simulated device on one shared thread pool, and a collective blocks its thread
until all devices have joined it. With the default scheduler, collectives that do not depend on each
other may start in a different order on different devices: one device then waits in an all-gather
while the others wait in an all-reduce, and the program never ends. A larger thread pool makes this
rarer but does not prevent it. Scheduling for least memory fixes one order for all devices.
"""

import os

import jax

# Option -> value. The timeouts are for machines with more simulated devices than cores: a device
# that has not had its turn yet is not stuck. XLA's own defaults are 20 and 40 seconds.
_XLA_OPTIONS = {
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "600",
    "xla_cpu_collective_call_terminate_timeout_seconds": "3600",
}


def prevent_deadlocks() -> None:
    """Add the XLA options to XLA_FLAGS; call it before a jax backend starts.

    Child processes inherit them. Options that the user has set stay. Nothing is added where
    JAX_PLATFORMS excludes the CPU, because XLA refuses to start with an option that it does not
    know. The names were checked with jax 0.10.2 and 0.12.0.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        return
    flags = os.environ.get("XLA_FLAGS", "").split()
    present = {flag.lstrip("-").partition("=")[0] for flag in flags}
    added = [f"--{name}={value}" for name, value in _XLA_OPTIONS.items() if name not in present]
    os.environ["XLA_FLAGS"] = " ".join([*flags, *added])


def simulate_cpu_devices(num_devices: int) -> None:
    """Ask jax for this many CPU devices in this process; call it before a backend starts.

    Raises:
        RuntimeError: A backend has started already with another number of CPU devices.
    """
    jax.config.update("jax_num_cpu_devices", num_devices)
