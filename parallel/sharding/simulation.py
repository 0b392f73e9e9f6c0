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


def simulate_cpu_devices(num_devices: int) -> None:
    """Ask jax for this many CPU devices in this process; call it before a backend starts.

    Adds options to XLA_FLAGS, which child processes inherit. Options that the user has set stay.

    Raises:
        RuntimeError: A backend has started already with another number of CPU devices.
    """
    jax.config.update("jax_num_cpu_devices", num_devices)
    if num_devices == 1:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in _XLA_OPTIONS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *added])
