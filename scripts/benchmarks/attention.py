"""Time and memory of attention operations, with derivatives, on one device."""

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measure import ratios, time_in_turns
from model.attention.api import OperationRegistry
from model.attention.metadata import OperationMetadata
from parallel.sharding.devices import find_devices
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionAxis, PartitionManager

_NUM_TOKENS, _HEADS, _HEAD_DIM = 4096, 8, 64


def bench_attention(
    names: Sequence[str], lengths: Sequence[int], *, dtype: str, repeats: int
) -> dict[str, Any]:
    """Compare operations with `vanilla` on causal rows of 8 heads of width 64.

    There are 4096 tokens, in as many rows as that makes, or one longer row.

    Raises:
        ValueError: An operation does not support the case.
    """
    devices, notice = find_devices(1)
    print(notice or devices[0].device_kind)
    manager = PartitionManager(PartitionAxis(), build_mesh(MeshConfig(), devices))
    metadata = OperationMetadata(jnp.dtype(dtype), partition_manager=manager)
    rows = []
    for length in lengths:
        keys = jax.random.split(jax.random.key(length), 3)
        shape = (max(_NUM_TOKENS // length, 1), length, _HEADS, _HEAD_DIM)
        with jax.set_mesh(manager.mesh):
            qkv = [jax.random.normal(key, shape, jnp.dtype(dtype)) for key in keys]
            compiled = {
                name: _value_and_gradients(name, metadata).lower(*qkv).compile()
                for name in ("vanilla", *names)
            }
            runs = {name: partial(program, *qkv) for name, program in compiled.items()}
            seconds = time_in_turns(runs, repeats)
        memory = {
            name: program.memory_analysis().temp_size_in_bytes for name, program in compiled.items()
        }
        for name in names:
            row = {
                "name": name,
                "length": length,
                "ratio": statistics.median(ratios(seconds[name], seconds["vanilla"])),
                "seconds": statistics.median(seconds[name]),
                "temporary_mib": memory[name] / 2**20,
                "memory_ratio": memory[name] / max(memory["vanilla"], 1),
            }
            rows.append(row)
            print(
                f"{name:12} {length:6} tokens  {row['seconds']:8.4f} s  {row['ratio']:5.2f} of "
                f"vanilla  {row['temporary_mib']:8.1f} MiB  {row['memory_ratio']:6.3f} of vanilla",
                flush=True,
            )
    return {"bench": "attention", "dtype": dtype, "rows": rows}


def _value_and_gradients(name: str, metadata: OperationMetadata) -> Any:
    """Return a jitted function of q, k, v: a scalar of the operation's output, and its gradients.

    The sine keeps the cotangent from being constant.
    """
    operation = OperationRegistry.create(name, metadata)

    def scalar(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(operation(*qkv).astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(scalar, (0, 1, 2)))
