"""Predicted time of ring attention on a TPU slice that is not here."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.prediction import HEADER, Pass, columns, compile_pass, figures
from model.attention.api import OperationRegistry
from model.attention.mask import AttentionInputs
from model.attention.metadata import OperationMetadata
from model.attention.ring import zigzag_order
from parallel.planning.compiler import SliceCompiler
from parallel.planning.slices import absent_devices
from parallel.sharding.axes import MODE_TRAIN, AttnKVSharding, AttnQSharding
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.partition import PartitionAxis, PartitionManager


def bench_ring(
    topology: str, *, length: int, heads: int, kv_heads: int, passes: Sequence[Pass]
) -> dict[str, Any]:
    """Predict one row of `length` tokens over sp, with the hops unrolled and in a scan.

    head_dim 128, bfloat16, the tokens in zigzag order.
    """
    devices, rows = absent_devices(topology), []
    mesh = build_mesh(MeshConfig(sp=len(devices)), devices)
    manager = PartitionManager(PartitionAxis(), mesh)
    compiler = SliceCompiler(topology, mesh)
    order = jnp.asarray(zigzag_order(length, len(devices)))

    def array(count: int, axes: Any) -> jax.ShapeDtypeStruct:
        shape, sharding = (1, length, count, 128), manager.sharding(axes, MODE_TRAIN)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    q, kv = array(heads, AttnQSharding), array(kv_heads, AttnKVSharding)
    print(f"{'':33}" + HEADER)
    for method in ("unrolled", "scan"):
        metadata = OperationMetadata(
            jnp.bfloat16, partition_manager=manager, scan_ring_attention=method == "scan"
        )
        operation = OperationRegistry.create("ring", metadata)

        def attend(*qkv: jax.Array, operation: Any = operation) -> jax.Array:
            return operation(*qkv, inputs=AttentionInputs(q_index_BL=order, kv_index_BT=order))

        for name in passes:
            compiled = compile_pass(compiler, name, attend, [q, kv, kv])
            print(f"{topology:10} {name:8} {method:14}" + columns(compiled), flush=True)
            rows.append({"pass": name, "method": method, **figures(compiled)})
    return {"bench": "ring", "topology": topology, "rows": rows}
