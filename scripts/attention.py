"""Time and memory of attention operations against `vanilla`, with derivatives, on one device."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from model.attention.operation import OperationMetadata, OperationRegistry
from parallel.sharding.mesh import MeshConfig, build_mesh, find_devices
from parallel.sharding.partition import PartitionAxis, PartitionManager

_HEADS, _HEAD_DIM = 8, 64


def bench_attention(
    names: Sequence[str], lengths: Sequence[int], *, dtype: str, repeats: int
) -> dict[str, Any]:
    """Seconds in turn with `vanilla`, their ratio, and temporary memory, for causal rows.

    One row of 8 heads of width 64. Raises: ValueError for an operation that cannot do it.
    """
    devices, notice = find_devices(1)
    print(notice or devices[0].device_kind)
    manager = PartitionManager(PartitionAxis(), build_mesh(MeshConfig(), devices))
    metadata = OperationMetadata(jnp.dtype(dtype), partition_manager=manager)
    rows = []
    for length in lengths:
        keys = jax.random.split(jax.random.key(length), 3)
        shape = (1, length, _HEADS, _HEAD_DIM)
        with jax.set_mesh(manager.mesh):
            parts = [jax.random.normal(key, shape, jnp.dtype(dtype)) for key in keys]
            compiled = {
                name: _derivative(name, metadata).lower(*parts).compile()
                for name in ("vanilla", *names)
            }
            seconds = _in_turn(compiled, parts, repeats)
        for name in names:
            ratios = [a / b for a, b in zip(seconds[name], seconds["vanilla"], strict=True)]
            memory = {
                key: program.memory_analysis().temp_size_in_bytes
                for key, program in compiled.items()
            }
            row = {
                "name": name,
                "length": length,
                "ratio": statistics.median(ratios),
                "seconds": statistics.median(seconds[name]),
                "temporary_mib": memory[name] / 2**20,
                "memory_ratio": memory[name] / max(memory["vanilla"], 1),
            }
            rows.append(row)
            print(
                f"{name:12} {length:6} rows  {row['seconds']:8.4f} s  {row['ratio']:5.2f} of "
                f"vanilla  {row['temporary_mib']:8.1f} MiB  {row['memory_ratio']:6.3f} of vanilla",
                flush=True,
            )
    return {"bench": "attention", "dtype": dtype, "rows": rows}


def _derivative(name: str, metadata: OperationMetadata) -> Any:
    operation = OperationRegistry.create(name, metadata)

    def loss(*parts: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(operation(*parts).astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def _in_turn(compiled: dict[str, Any], parts: Any, repeats: int) -> dict[str, list[float]]:
    """Seconds of every run, one after another; the first of each does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for repeat in range(repeats + 1):
        for name, program in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(*parts))
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
    return seconds
