"""Mixtures of experts: a step against the dense model, and the exchange on absent TPUs."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from overlap import columns, milliseconds, predict_on

from configs.build import build_program, open_devices
from configs.schema import Config, load_config
from model.moe import MoE, choose_experts
from parallel.linear.layout import TensorParallelConfig
from parallel.sharding.axes import BATCH, QUERY_LENGTH, ResidualSharding
from parallel.sharding.mesh import absent_devices


def bench_moe_step(
    sizes: dict[str, Any], *, experts: int, top_k: int, repeats: int, changes: dict[str, Any]
) -> dict[str, Any]:
    """Seconds per training step: a mixture over the dense model with the same active FLOPs.

    One device, rows of 512 tokens, batch 8. The experts of a token together are as wide as the
    dense SwiGLU; changes: more values of `model.moe`.
    """
    width = sizes["intermediate_size"]
    moe = {"num_experts": experts, "num_experts_per_tok": top_k, **changes}
    models = {
        "dense": sizes,
        "moe": sizes | {"moe": moe | {"moe_intermediate_size": width // top_k}},
    }
    steps = {}
    for name, model in models.items():
        config = Config.model_validate({"model": model})
        devices, notice = open_devices(config)
        program = build_program(config, devices)
        if name == "moe":
            choice = choose_experts(config.model, program.tp.manager)
            print(f"{notice or devices[0].device_kind}\n{choice.form}: {choice.reason}")
        with jax.set_mesh(program.tp.manager.mesh):
            batch = _random_batch(program.batch_sharding, sizes["vocab_size"])
            state = program.init()
            steps[name] = [program.train_step.lower(state, batch).compile(), state, batch]
    times: dict[str, list[float]] = {name: [] for name in steps}
    metrics: dict[str, Any] = {}
    for repeat in range(repeats + 1):
        for name, parts in steps.items():
            begin = time.perf_counter()
            parts[1], metrics[name] = jax.block_until_ready(parts[0](parts[1], parts[2]))
            if repeat:  # the first pays for page faults
                times[name].append(time.perf_counter() - begin)
        if repeat:
            print("  ".join(f"{name} {row[-1]:.3f} s" for name, row in times.items()), flush=True)
    ratios = [a / b for a, b in zip(times["moe"], times["dense"], strict=True)]
    load_NE = np.asarray(metrics["moe"]["experts"]["load_NE"])
    return {
        "bench": "moe-step",
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": {name: statistics.median(row) for name, row in times.items()},
        "temporary_gib": {
            name: parts[0].memory_analysis().temp_size_in_bytes / 2**30
            for name, parts in steps.items()
        },
        "load_max_over_mean": float((load_NE.max(-1) / load_NE.mean(-1)).max()),
        "dropped": float(np.asarray(metrics["moe"]["experts"]["dropped_N"]).max()),
    }


def _random_batch(sharding: Any, vocabulary: int) -> dict[str, jax.Array]:
    rng, shape = np.random.default_rng(0), (1, 8, 512)
    fields = {
        "tokens": rng.integers(0, vocabulary, shape, np.int32),
        "targets": rng.integers(0, vocabulary, shape, np.int32),
        "positions": np.broadcast_to(np.arange(512, dtype=np.int32), shape),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.ones(shape, np.float32),
    }
    return {name: jax.device_put(field, sharding) for name, field in fields.items()}


def bench_exchange(path: str, topology: str, overrides: Sequence[str]) -> dict[str, Any]:
    """One sparse layer of a configuration on an absent slice, forward and with its derivatives.

    Without remat, and with room for an even load (capacity_factor 1) unless overridden.
    Predicted times, what of the exchange is exposed, and the bytes that a device sends against
    the count: tokens * top_k * hidden * 2 directions * bytes, less what stays on the device.
    Raises: ValueError for a mesh on which other permutes or exchanges would be counted.
    """
    config = load_config(path, ["model.moe.capacity_factor=1.0", *overrides])
    if config.mesh.tp > 1 or config.model.moe.expert_rule == "unified":
        raise ValueError("bench exchange counts what crosses ep: use mesh.tp=1 and another rule")
    program = build_program(config, absent_devices(topology))
    tp, model = program.tp, config.model
    shape = (
        max(config.data.batch_sizes) // config.training.gradient_accumulation,
        config.data.row_length,
    )
    choice = choose_experts(model, tp.manager)
    print(f"experts {choice.exchange}, {choice.form}: {choice.reason}")
    tokens = shape[0] * shape[1] // tp.manager.axis_size([BATCH, QUERY_LENGTH])
    itemsize = jnp.dtype(model.dtype).itemsize
    n = config.mesh.ep
    counted = 2 * tokens * model.moe.num_experts_per_tok * model.hidden_size * itemsize
    counted = counted * (n - 1) // n
    print(f"{'':33}" + columns(None, 0, 0))
    rows = []
    for name in ("fwd", "fwd+bwd"):
        begin = time.perf_counter()
        compiled = _compiled_layer(tp, model, shape, backward=name == "fwd+bwd")
        seconds = time.perf_counter() - begin
        prediction, memory = predict_on(compiled, topology, tp.manager.mesh)
        kinds = ("collective-permute", "all-to-all", "ragged-all-to-all")
        sent = sum(prediction.bytes_by.get(kind, 0) for kind in kinds)
        share = prediction.exposed / prediction.total
        print(f"{topology:10} {'experts':7} {name:14} " + columns(prediction, memory, seconds))
        times = 2 if name == "fwd+bwd" else 1
        print(f"  sent {sent:,} bytes, counted {times * counted:,}; exposed {share:.1%}")
        rows.append(
            {
                "pass": name,
                "sent_bytes": sent,
                "counted_bytes": times * counted,
                "exposed_share": share,
                "temporary_gib": memory,
                "compile_seconds": seconds,
                **milliseconds(prediction),
            }
        )
    return {"bench": "exchange", "config": path, "topology": topology, "rows": rows}


def _compiled_layer(
    tp: TensorParallelConfig, model: Any, shape: tuple[int, int], *, backward: bool
) -> Any:
    """The MoE of one layer, compiled; kernels as they are stored."""
    with jax.set_mesh(tp.manager.mesh):
        layer = nnx.eval_shape(lambda: MoE(model, tp, rngs=nnx.Rngs(params=jax.random.key(0))))
        definition, params = nnx.split(layer)
        x = jax.ShapeDtypeStruct(
            (*shape, model.hidden_size),
            jnp.dtype(model.dtype),
            sharding=tp.manager.sharding(ResidualSharding),
        )

        def forward(x: jax.Array, params: Any) -> jax.Array:
            return nnx.merge(definition, params)(x)[0]

        def both(x: jax.Array, params: Any, g: jax.Array) -> Any:
            y, pull = jax.vjp(forward, x, params)
            return y, pull(g)

        lowered = (
            jax.jit(both).lower(x, params, x) if backward else jax.jit(forward).lower(x, params)
        )
        return lowered.compile()
