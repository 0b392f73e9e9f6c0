"""The environment in which the tests start jax; conftest.py imports this before jax.

Devices are simulated on the CPU, also where there is a GPU, unless JAX_PLATFORMS names that.
"""

import os
from importlib.metadata import version
from pathlib import Path

if Path("/dev/nvidiactl").exists():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

ON_GPU = "cuda" in os.environ.get("JAX_PLATFORMS", "").split(",")

# Tests compile much and run little: LLVM's optimisations would double their time, and the newer
# of two code generators, the only one since jax 0.11, adds a fifth.
if not ON_GPU:
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0",
            "--xla_cpu_use_fusion_emitters=false" if version("jax").startswith("0.10.") else "",
        ]
    )
