"""Compiles blocks and whole steps for an absent TPU slice and predicts them: see bench.py.

The blocks are made of this project's own linears, bfloat16, tensor-parallel over the whole slice,
the residual stream sequence-sharded. `xla` is the same arithmetic as plain matmuls, with the
compiler's own collectives and its windowed einsums; `xla-plain` has those turned off.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from configs.build import build_program, choose_overlaps
from configs.schema import load_config
from model.attention.operation import OperationMetadata, OperationRegistry
from model.attention.ring import zigzag_order
from model.layers import gated_silu
from parallel.linear.collective_matmul import Overlap
from parallel.linear.layout import TensorParallelConfig
from parallel.linear.linear import ColumnParallelLinear, RowParallelLinear, chain
from parallel.planning.schedule import Prediction, predict
from parallel.sharding.axes import (
    BATCH,
    MODE_TRAIN,
    QUERY_LENGTH,
    TP,
    AttnKVSharding,
    AttnQSharding,
    ResidualSharding,
)
from parallel.sharding.mesh import (
    CHIPS,
    Chip,
    MeshConfig,
    absent_devices,
    build_mesh,
    places,
    read_topology,
)
from parallel.sharding.partition import PartitionAxis, PartitionManager, residual_rules

Method = Literal["xla", "xla-plain", Overlap]
METHODS: tuple[Method, ...] = get_args(Method)
CASES = ("silu", "swiglu", "qkv", "o")
_NO_WINDOWS: dict[str, Any] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


class Block(nnx.Module):
    """One case: an MLP (silu, swiglu) or a projection of attention (qkv, o).

    Proportions of Llama-3-70B: width D, intermediate 3.5 D, one kv feature per eight of q.
    """

    def __init__(self, case: str, width: int, tp: TensorParallelConfig):
        options: dict[str, Any] = {
            "use_bias": False,
            "param_dtype": jnp.bfloat16,
            "parallel_config": tp,
        }
        wide, kv = width * 7 // 2, width // 8
        outputs: dict[str, Any] = {
            "silu": wide,
            "swiglu": {"gate": wide, "up": wide},
            "qkv": {"q": width, "k": kv, "v": kv},
        }
        self.case, self.tp = case, tp
        if case != "o":
            self.column = ColumnParallelLinear(width, outputs[case], **options)
        if case != "qkv":
            self.row = RowParallelLinear(width if case == "o" else wide, width, **options)

    def __call__(self, x: jax.Array, native: bool) -> Any:
        """Rows sequence-sharded (`o`: features on tp) to the same (`qkv`: features on tp)."""
        residual = self.tp.manager.resolve(ResidualSharding)
        if self.case == "qkv":
            return self.column.native_forward(x) if native else self.column(x)
        if self.case == "o" and not native:
            return self.row(x, residual)
        if not native:
            function = gated_silu if self.case == "swiglu" else jax.nn.silu
            return chain(x, self.column, function, self.row)
        if self.case == "silu":
            x = jax.nn.silu(self.column.native_forward(x))
        elif self.case == "swiglu":
            x = gated_silu(*self.column.native_forward(x).values())
        # The layout of the sum belongs to the matmul, so that the compiler scatters at once.
        kernel = self.row.kernel[...]
        return jnp.einsum("blf,fd->bld", x, kernel, out_sharding=residual)


def bench_blocks(
    topologies: Sequence[str],
    cases: Sequence[str],
    methods: Sequence[Method],
    *,
    size: int,
    dump: Path | None = None,
) -> dict[str, Any]:
    """Predicted milliseconds of every case, forward and forward with backward, by every method."""
    rows = []
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
    print(f"{'slice':10} {'case':7} {'pass':8} {'method':14}" + columns(None, 0, 0))
    for topology in topologies:
        devices = absent_devices(topology)
        mesh = build_mesh(MeshConfig(tp=len(devices)), devices)
        for case in cases:
            for backward in (False, True):
                for method in methods:
                    compiled, seconds = _compile(mesh, case, method, size, backward)
                    name = "fwd+bwd" if backward else "fwd"
                    label = topology, case, name, method
                    if dump is not None:
                        file = dump / f"{'_'.join(label).replace(':', '-')}.txt"
                        file.write_text(compiled.as_text())
                    rows.append(_row(label, compiled, mesh, seconds))
    return {"bench": "overlap", "rows": rows}


def _compile(
    mesh: jax.sharding.Mesh, case: str, method: Method, size: int, backward: bool
) -> tuple[Any, float]:
    """The compiled program, and the CPU seconds that it took."""
    native = method == "xla" or method == "xla-plain"
    tp = TensorParallelConfig(
        mesh,
        reduce_scatter_output=True,
        partition_axis=residual_rules("sequence"),
        overlap="none" if method == "xla" or method == "xla-plain" else method,
    )
    with jax.set_mesh(mesh):
        definition, params = nnx.split(nnx.eval_shape(lambda: Block(case, size, tp)))
        axes = [BATCH, QUERY_LENGTH, TP] if case == "o" else ResidualSharding
        x = jax.ShapeDtypeStruct((1, size, size), jnp.bfloat16, sharding=tp.manager.sharding(axes))

        def forward(x: jax.Array, params: Any) -> Any:
            return nnx.merge(definition, params)(x, native)

        def both(x: jax.Array, params: Any, g: Any) -> Any:
            y, pull = jax.vjp(forward, x, params)
            return y, pull(g)

        out = jax.eval_shape(forward, x, params)
        begin = time.process_time()  # of the compiler alone, whatever else the machine does
        lowered = (
            jax.jit(both).lower(x, params, out) if backward else jax.jit(forward).lower(x, params)
        )
        compiled = lowered.compile(_NO_WINDOWS if method == "xla-plain" else None)
    return compiled, time.process_time() - begin


def _row(
    label: tuple[str, str, str, str], compiled: Any, mesh: jax.sharding.Mesh, seconds: float
) -> dict[str, Any]:
    """Prints and returns one line of the table."""
    topology, case, name, method = label
    prediction, memory = predict_on(compiled, topology, mesh)
    head = f"{topology:10} {case:7} {name:8} {method:14}"
    print(head + columns(prediction, memory, seconds), flush=True)
    return {
        "topology": topology,
        "exposed_share": prediction.exposed / prediction.total,
        "case": case,
        "pass": name,
        "method": method,
        "compile_seconds": seconds,
        "temporary_gib": memory,
        **milliseconds(prediction),
    }


def bench_model(path: str, topology: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The predicted training step of a configuration, and what its time is made of."""
    config = load_config(path, overrides)
    program = build_program(config, absent_devices(topology))
    mesh = program.tp.manager.mesh
    for kind, choice in choose_overlaps(config, program.tp).items():
        print(f"overlap {choice.overlap} for {kind}: {choice.reason}")
    micro = config.training.gradient_accumulation
    shape = (micro, max(config.data.batch_sizes) // micro, config.data.row_length)
    fields = {name: jnp.int32 for name in ("tokens", "targets", "positions", "segment_ids")}
    with jax.set_mesh(mesh):
        batch = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=program.batch_sharding)
            for name, dtype in {**fields, "loss_mask": jnp.float32}.items()
        }
        begin = time.perf_counter()
        compiled = program.train_step.lower(program.abstract_state, batch).compile()
    seconds = time.perf_counter() - begin
    prediction, temporary = predict_on(compiled, topology, mesh)
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    flops = config.model.flops_per_token(shape[2]) * shape[0] * shape[1] * shape[2]
    mfu = flops / prediction.total / mesh.size / _chip(topology).peak_flops
    print(prediction.table(25))
    hbm = temporary + held / 2**30
    print(f"MFU {mfu:.3f}, HBM {hbm:.1f} GiB per device, compiled in {seconds:.0f} s")
    return {
        "bench": "model",
        "config": path,
        "topology": topology,
        "mfu": mfu,
        "hbm_gib": hbm,
        "compile_seconds": seconds,
        **milliseconds(prediction),
    }


def bench_ring(topology: str, *, length: int, heads: int, kv_heads: int) -> list[dict[str, Any]]:
    """Predicted ring attention, rows of `length` tokens over sp, forward and with derivatives.

    One row, head_dim 128, bfloat16, rows in zigzag order, hops unrolled and in a scan.
    """
    devices, results = absent_devices(topology), []
    mesh = build_mesh(MeshConfig(sp=len(devices)), devices)
    manager = PartitionManager(PartitionAxis(), mesh)
    order = jnp.asarray(zigzag_order(length, len(devices)))

    def array(count: int, axes: Any) -> jax.ShapeDtypeStruct:
        shape, sharding = (1, length, count, 128), manager.sharding(axes, MODE_TRAIN)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    q, kv = array(heads, AttnQSharding), array(kv_heads, AttnKVSharding)
    print(f"{'':33}" + columns(None, 0, 0))
    for scan in (False, True):
        metadata = OperationMetadata(
            jnp.bfloat16, partition_manager=manager, scan_ring_attention=scan
        )
        operation = OperationRegistry.create("ring", metadata)

        def forward(*parts: jax.Array, operation: Any = operation) -> jax.Array:
            return operation(*parts, q_index=order, kv_index=order)

        def both(*parts: jax.Array, forward: Any = forward) -> Any:
            out, pull = jax.vjp(forward, *parts[:3])
            return out, pull(parts[3])

        for name, function, parts in (
            ("fwd", forward, (q, kv, kv)),
            ("fwd+bwd", both, (q, kv, kv, q)),
        ):
            begin = time.perf_counter()
            with jax.set_mesh(mesh):
                compiled = jax.jit(function).lower(*parts).compile()
            label = (topology, "ring", name, "scan" if scan else "unrolled")
            results.append(_row(label, compiled, mesh, time.perf_counter() - begin))
    return results


def _chip(topology: str) -> Chip:
    kind = absent_devices(topology)[0].device_kind
    if kind not in CHIPS:
        raise ValueError(f"topology {topology}: no figures for {kind}; known: {', '.join(CHIPS)}")
    return CHIPS[kind]


def predict_on(compiled: Any, topology: str, mesh: jax.sharding.Mesh) -> tuple[Prediction, float]:
    """The prediction, and the GiB of temporary memory per device."""
    named = read_topology(topology)
    of_one_slice = mesh.devices.flat[: mesh.size // named.num_slices]
    prediction = predict(
        compiled.as_text(), _chip(topology), named.sides, places=places(of_one_slice)
    )
    return prediction, compiled.memory_analysis().temp_size_in_bytes / 2**30


_PARTS = ("total", "matmul", "other", "kernels", "exposed", "dma_wait")


def milliseconds(prediction: Prediction) -> dict[str, float]:
    """The parts of a prediction, by name."""
    return {f"{name}_ms": getattr(prediction, name) * 1e3 for name in _PARTS}


def columns(prediction: Prediction | None, memory: float, seconds: float) -> str:
    """A line of figures; None: their names."""
    if prediction is None:
        return "".join(f"{name:>9}" for name in (*_PARTS, "temp GiB", "compile"))
    times = "".join(f"{value:9.2f}" for value in milliseconds(prediction).values())
    return f"{times}{memory:9.2f}{seconds:8.0f}s"
