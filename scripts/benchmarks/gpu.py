"""Training steps of a dense and of a sparse model on one GPU, as a share of its matmul peak."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measure import medians, random_batch, time_in_turns
from benchmarks.step import training_step
from configs.build import build_program, open_devices
from configs.schema import Config
from parallel.sharding.devices import CHIPS
from training.step import Program

# Llama-3.2-1B (its config.json on Hugging Face): 1.24 billion parameters.
_DENSE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
_EXPERTS, _TOP_K = 8, 2
_SHAPES = [(8192, 8192, 8192), (16384, 8192, 4096), (32768, 2048, 8192)]
"""Rows, contracted features and columns of the matmuls whose fastest is the peak."""
_CALLS = 8
"""Steps, or matmuls, between two readings of the clock: the host then never delays the GPU."""


def bench_gpu(*, rows: int, length: int, repeats: int, tiny: bool) -> dict[str, Any]:
    """Measure training steps on one GPU: tokens per second, and MFU by two peaks.

    The dense model has the shape of Llama-3.2-1B. The sparse one has half of its layers, in which 2
    of 8 experts, together as wide as the dense MLP, see a token; its parameters fit into 80 GB
    then. The step is that of train.py for packed documents; every row is one document, so that all
    FLOPs that MFU counts are computed.

    rows, length: of a batch. tiny: tiny models on any platform, to test this benchmark.

    Raises:
        ValueError: There is no GPU, or there are several.
    """
    if tiny:
        rows, length = 2, 128
    base = _DENSE | (_TINY if tiny else {})
    sparse = {
        "num_hidden_layers": base["num_hidden_layers"] // 2,
        "moe": {
            "num_experts": _EXPERTS,
            "num_experts_per_tok": _TOP_K,
            "moe_intermediate_size": base["intermediate_size"] // _TOP_K,
        },
    }
    programs = {
        name: _open(base | changes, rows, length)
        for name, changes in (("dense", {}), ("sparse", sparse))
    }
    device = programs["dense"].tp.manager.mesh.devices.flat[0]
    if not tiny and device.platform != "gpu":
        raise ValueError(
            f"this needs a GPU, but jax found a {device.platform}; --tiny runs on any device"
        )
    peak = _matmul_peak([(256, 256, 256)] if tiny else _SHAPES, repeats)
    print(f"{device.device_kind}: matmul peak {peak / 1e12:.1f} TFLOP/s, measured in bfloat16")
    models = {
        name: _measure(program, rows, length, repeats, peak) for name, program in programs.items()
    }
    kind = device.device_kind
    return {"bench": "gpu", "device": kind, "tiny": tiny, "matmul_peak": peak, "models": models}


def _open(model: dict[str, Any], rows: int, length: int) -> Program:
    data = {"sequence_length": length, "global_batch_size": rows}
    config = Config.model_validate({"model": {**model, "remat": "auto"}, "data": data})
    return build_program(config, open_devices(config)[0])


def _matmul_peak(shapes: list[tuple[int, int, int]], repeats: int) -> float:
    """Return the most FLOP/s of these matmuls in bfloat16, each by its median time."""
    multiply = jax.jit(jnp.matmul)
    rates = []
    for m, k, n in shapes:
        x, w = (jax.random.normal(jax.random.key(0), s, jnp.bfloat16) for s in ((m, k), (k, n)))

        def products(x: jax.Array = x, w: jax.Array = w) -> list[jax.Array]:
            return [multiply(x, w) for _ in range(_CALLS)]

        seconds = medians(time_in_turns({"matmul": products}, repeats))["matmul"] / _CALLS
        rates.append(2 * m * k * n / seconds)
    return max(rates)


def _measure(program: Program, rows: int, length: int, repeats: int, peak: float) -> dict[str, Any]:
    """Return the figures of the training step of one model."""
    print(*program.plan.describe(), sep="\n")
    step = training_step(program, random_batch(program.config.vocab_size, rows, length))
    temporary = step.compiled.memory_analysis().temp_size_in_bytes

    def steps() -> Any:
        for _ in range(_CALLS):
            step()
        return step.metrics

    seconds = medians(time_in_turns({"step": steps}, repeats, show=True))["step"] / _CALLS
    flops = program.flops_per_token(length) * rows * length
    chip = CHIPS.get(program.tp.manager.mesh.devices.flat[0].device_kind)
    operations = {choice.name: choice.reason for _, _, choice in program.plan.attention}
    experts = program.plan.experts
    return {
        "seconds": seconds,
        "tokens_per_second": rows * length / seconds,
        "model_flops": flops,
        "mfu_of_measured_peak": flops / seconds / peak,
        "mfu_of_data_sheet_peak": None if chip is None else flops / seconds / chip.peak_flops,
        "parameters": program.config.num_parameters,
        "loss": float(step.metrics["loss"]),
        "attention": operations,
        "grouped_matmul": None if experts is None else experts.grouped_matmul,
        "remat": program.config.remat,
        "temporary_gib": temporary / 2**30,
        "compile_seconds": step.compile_seconds,
    }
