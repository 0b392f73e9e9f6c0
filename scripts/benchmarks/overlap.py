"""Predicted time of tensor-parallel blocks by every overlap method, beside the compiler's own.

The blocks are made of this project's linears, bfloat16, tensor-parallel over the whole slice, with
the residual stream sequence-sharded. `xla` is the same arithmetic as plain matmuls, with the
compiler's collectives and its windowed einsums; `xla-plain` turns the windowed einsums off.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.prediction import HEADER, Pass, columns, compile_pass, figures
from model.activations import gated_silu
from parallel.linear.chain import chain
from parallel.linear.collective_matmul import Overlap
from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import ColumnParallelLinear, RowParallelLinear
from parallel.planning.compiler import SliceCompiler
from parallel.planning.slices import absent_devices
from parallel.sharding.axes import BATCH, QUERY_LENGTH, TP, ResidualSharding
from parallel.sharding.mesh import MeshConfig, build_mesh
from parallel.sharding.residual import residual_rules

Method = Literal["xla", "xla-plain", Overlap]
METHODS: tuple[Method, ...] = get_args(Method)
CASES = ("silu", "swiglu", "qkv", "o")
_NO_WINDOWS: dict[str, Any] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


class Block(nnx.Module):
    """One case: an MLP ("silu", "swiglu") or a projection of attention ("qkv", "o").

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
        """Apply the block to rows sharded over tp.

        The output has the same layout, except that "qkv" returns features sharded over tp, and
        "o" takes them. native: leave all collectives to the compiler.
        """
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
        # The matmul itself gets the layout of the sum, so that the compiler reduce-scatters.
        kernel = self.row.kernel[...]
        return jnp.einsum("blf,fd->bld", x, kernel, out_sharding=residual)


def bench_overlap(
    topologies: Sequence[str],
    cases: Sequence[str],
    methods: Sequence[Method],
    *,
    passes: Sequence[Pass],
    size: int,
    dump: Path | None,
) -> dict[str, Any]:
    """Predict every case by every method.

    size: the width, and the number of tokens over all devices.
    dump: a folder for the compiled programs as text.
    """
    rows = []
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
    print(f"{'slice':10} {'case':7} {'pass':8} {'method':14}" + HEADER)
    for topology, case, name, method in product(topologies, cases, passes, methods):
        devices = absent_devices(topology)
        mesh = build_mesh(MeshConfig(tp=len(devices)), devices)
        function, arguments = _block(mesh, case, method, size)
        options = _NO_WINDOWS if method == "xla-plain" else None
        compiler = SliceCompiler(topology, mesh)
        compiled = compile_pass(compiler, name, function, arguments, options=options)
        label = {"topology": topology, "case": case, "pass": name, "method": method}
        if dump is not None:
            file = dump / f"{'_'.join(label.values()).replace(':', '-')}.txt"
            file.write_text(compiled.text)
        print(f"{topology:10} {case:7} {name:8} {method:14}" + columns(compiled), flush=True)
        rows.append({**label, **figures(compiled)})
    return {"bench": "overlap", "rows": rows}


def _block(mesh: jax.sharding.Mesh, case: str, method: Method, size: int) -> tuple[Any, list[Any]]:
    """Return a case as a function, and its abstract arguments."""
    overlap: Overlap = "none" if method == "xla" or method == "xla-plain" else method
    native = overlap != method
    tp = TensorParallelConfig(
        mesh,
        reduce_scatter_output=True,
        partition_axis=residual_rules("sequence"),
        overlap=overlap,
    )
    with jax.set_mesh(mesh):
        definition, params = nnx.split(nnx.eval_shape(lambda: Block(case, size, tp)))
    axes = [BATCH, QUERY_LENGTH, TP] if case == "o" else ResidualSharding
    x = jax.ShapeDtypeStruct((1, size, size), jnp.bfloat16, sharding=tp.manager.sharding(axes))

    def apply(x: jax.Array, params: Any) -> Any:
        return nnx.merge(definition, params)(x, native)

    return apply, [x, params]
