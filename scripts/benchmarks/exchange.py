"""Predicted time of one sparse layer on a TPU slice that is not here, and the bytes it sends."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.prediction import HEADER, Pass, columns, compile_pass, figures
from configs.build import build_program
from configs.schema import load_config
from model.moe import MoE
from parallel.planning.compiler import SliceCompiler
from parallel.planning.slices import absent_devices
from parallel.sharding.axes import BATCH, QUERY_LENGTH, ResidualSharding
from training.step import Program

_EXCHANGES = ("collective-permute", "all-to-all", "ragged-all-to-all")


def bench_exchange(
    path: str, topology: str, overrides: Sequence[str], *, passes: Sequence[Pass]
) -> dict[str, Any]:
    """Predict the sparse layer of a configuration, forward and with its derivatives.

    Without remat. Unless overridden, with room for an even load (capacity_factor 1).

    Raises:
        ValueError: The mesh has other permutes or exchanges than those over ep.
    """
    config = load_config(path, ["model.moe.capacity_factor=1.0", *overrides])
    if config.mesh.tp > 1 or config.model.moe.expert_rule == "unified":
        raise ValueError("bench exchange counts what crosses ep: use mesh.tp=1 and another rule")
    program = build_program(config, absent_devices(topology))
    size, length = config.data.largest_batch
    shape = (size // config.training.gradient_accumulation, length, config.model.hidden_size)
    print(*program.plan.describe(), sep="\n")
    function, arguments = _sparse_layer(program, shape)
    counted = _counted_bytes(program, shape)
    print(f"{'':33}" + HEADER)
    compiler, rows = SliceCompiler(topology, program.tp.manager.mesh), []
    for name in passes:
        compiled = compile_pass(compiler, name, function, arguments)
        row = {
            "pass": name,
            "sent_bytes": sum(compiled.prediction.bytes_by.get(kind, 0) for kind in _EXCHANGES),
            "counted_bytes": counted * (2 if name == "fwd+bwd" else 1),
            **figures(compiled),
        }
        rows.append(row)
        print(f"{topology:10} {'experts':7} {name:14} " + columns(compiled))
        print(
            f"  sent {row['sent_bytes']:,} bytes, counted {row['counted_bytes']:,}; "
            f"exposed {row['exposed_share']:.1%}"
        )
    return {"bench": "exchange", "config": path, "topology": topology, "rows": rows}


def _counted_bytes(program: Program, shape: tuple[int, int, int]) -> int:
    """Return the bytes that each device has to send in a forward pass.

    tokens * top_k * (hidden_size * 2 directions * itemsize + a float32 weight), less the share that
    stays.
    """
    manager, model = program.tp.manager, program.config
    tokens = shape[0] * shape[1] // manager.axis_size([BATCH, QUERY_LENGTH])
    row = 2 * model.hidden_size * jnp.dtype(model.dtype).itemsize + 4
    ep = manager.mesh.shape["ep"]
    return tokens * model.moe.num_experts_per_tok * row * (ep - 1) // ep


def _sparse_layer(program: Program, shape: tuple[int, int, int]) -> tuple[Any, list[Any]]:
    """Return the MoE of one layer as a function, and its abstract arguments."""
    tp, model = program.tp, program.config
    with jax.set_mesh(tp.manager.mesh):
        layer = nnx.eval_shape(lambda: MoE(program.plan, rngs=nnx.Rngs(params=jax.random.key(0))))
    definition, params = nnx.split(layer)
    sharding = tp.manager.sharding(ResidualSharding)
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(model.dtype), sharding=sharding)

    def apply(x: jax.Array, params: Any) -> jax.Array:
        return nnx.merge(definition, params)(x)[0]

    return apply, [x, params]
