# PYTHON_ARGCOMPLETE_OK
"""Measure or predict the speed of parts of the trainer: `scripts/bench.py BENCHMARK`.

The last line of stdout is one JSON object. `step`, `torch`, `moe-step`, `attention`, `decode` and
`data` run on this machine. They time both sides of a comparison in turns and report the median of
the ratios, because the speed of a machine varies. `gpu` measures training steps on one GPU.
`overlap`, `ring`, `exchange` and `model` compile for a TPU slice that need not exist
(`pip install -e ".[plan]"`) and predict times from the schedule of the compiled program. Exit
codes: 0 done, 2 bad input.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any, get_args

import _clone
from benchmarks.attention import bench_attention
from benchmarks.decode import bench_decode
from benchmarks.delivery import bench_data
from benchmarks.exchange import bench_exchange
from benchmarks.gpu import bench_gpu
from benchmarks.model import bench_model
from benchmarks.overlap import CASES, METHODS, bench_overlap
from benchmarks.prediction import PASSES
from benchmarks.ring import bench_ring
from benchmarks.step import bench_moe_step, bench_step
from benchmarks.torch_step import bench_torch

from configs.command_line import (
    CommandLine,
    above_zero,
    at_least_one,
    on_disk,
    one_line_errors,
    run_script,
)
from model.config import DTypeName, ModelConfig
from model.remat import REMAT_POLICIES
from parallel.experts.grouped_matmul import GROUPED_MATMULS

Result = dict[str, Any]
Command = Callable[[str, Callable[..., Result], str], CommandLine]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `run` of the result is a function of all other values."""
    parser = CommandLine(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")

    def command(name: str, run: Callable[..., Result], text: str) -> CommandLine:
        defaults = argparse.ArgumentDefaultsHelpFormatter
        added = commands.add_parser(name, help=text, description=text, formatter_class=defaults)
        added.set_defaults(run=run)
        return added

    _add_measured(command)
    _add_predicted(command)
    return parser.parse_commands(argv)


def _add_measured(command: Command) -> None:
    """Add the benchmarks that run on this machine."""
    step = command("step", bench_step, "training step compared with a hand-written jitted function")
    step.add_argument(
        "--remat",
        choices=list(REMAT_POLICIES),
        default=ModelConfig().remat,
        help="what the backward pass recomputes",
    )
    torch = command("torch", bench_torch, "training step compared with PyTorch's eager step")
    moe = command(
        "moe-step", bench_moe_step, "training step with experts compared with a dense one"
    )
    moe.add_argument("--experts", type=at_least_one, default=8, help="experts per sparse layer")
    moe.add_argument("--top-k", type=at_least_one, default=2, help="experts per token")
    moe.add_argument("--capacity-factor", type=float, help="if not set, no token is dropped")
    moe.add_argument(
        "--grouped-matmul",
        choices=["auto", *GROUPED_MATMULS],
        default="auto",
        help="implementation of the experts' matmuls",
    )
    attention = command("attention", bench_attention, "attention operations compared with vanilla")
    attention.add_argument("--names", nargs="+", default=["flash_attn2"], help="operations")
    lengths = [512, 1024, 2048, 4096, 8192]
    attention.add_argument(
        "--lengths", type=at_least_one, nargs="+", default=lengths, help="tokens of the row"
    )
    attention.add_argument(
        "--dtype", choices=get_args(DTypeName), default="float32", help="dtype of q, k and v"
    )
    decode = command("decode", bench_decode, "decoding compared with a hand-written loop")
    decode.add_argument(
        "--batches", type=at_least_one, nargs="+", default=[1, 32], help="rows decoded at once"
    )
    decode.add_argument("--prompt", type=at_least_one, default=128, help="prompt tokens per row")
    decode.add_argument("--new", type=at_least_one, default=64, help="tokens to decode per row")
    gpu = command("gpu", bench_gpu, "training steps on one GPU as a share of its matmul peak")
    gpu.add_argument("--rows", type=at_least_one, default=8, help="rows of a batch")
    gpu.add_argument("--length", type=at_least_one, default=4096, help="tokens of a row")
    gpu.add_argument(
        "--tiny", action="store_true", help="tiny models on any device, to test this benchmark"
    )
    data = _add_data(command)
    repeated = ((step, 5), (torch, 5), (moe, 5), (attention, 3), (decode, 5), (gpu, 5), (data, 3))
    for added, default in repeated:
        added.add_argument(
            "--repeats", type=at_least_one, default=default, help="measurements; the median counts"
        )


def _add_data(command: Command) -> CommandLine:
    data = command("data", bench_data, "tokenisation, delivery of batches, opening a large store")
    data.add_argument(
        "--copies", type=at_least_one, default=8, help="times the standard library is tokenised"
    )
    data.add_argument(
        "--gigabytes",
        type=above_zero,
        default=10.0,
        help="size of the store to open, or of a shard",
    )
    data.add_argument(
        "--shards",
        type=at_least_one,
        help="open a store of this many shards, and measure nothing else",
    )
    return data


def _add_predicted(command: Command) -> None:
    """Add the benchmarks that compile for a TPU slice that is not here."""
    overlap = command("overlap", bench_overlap, "predicted time of blocks, by overlap method")
    overlap.add_argument(
        "--topologies", nargs="+", default=["v5p:2x2x2", "v5e:2x4"], help="TPU slices"
    )
    overlap.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="blocks")
    overlap.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=METHODS, help="overlap methods"
    )
    overlap.add_argument(
        "--size", type=at_least_one, default=8192, help="width, and tokens over all devices"
    )
    overlap.add_argument("--dump", type=on_disk, help="folder for the compiled programs as text")
    ring = command("ring", bench_ring, "predicted time of ring attention")
    ring.add_argument("--topology", default="v5p:2x2x2", help="TPU slice")
    ring.add_argument(
        "--length", type=at_least_one, default=32768, help="tokens of the row over all devices"
    )
    ring.add_argument("--heads", type=at_least_one, default=32, help="query heads")
    ring.add_argument("--kv-heads", type=at_least_one, default=8, help="key and value heads")
    with_passes = [overlap, ring]
    for name, run, path, topology, text in (
        ("model", bench_model, "llama3_8b_tp8", "v5p:2x2x2", "a whole training step"),
        ("exchange", bench_exchange, "qwen3_30b_a3b_ep16", "v5p:2x2x4", "one sparse layer"),
    ):
        configured = command(name, run, f"predicted time of {text}")
        default = str(_clone.ROOT / "configs" / f"{path}.yaml")
        configured.add_argument(
            "--config", dest="path", default=default, help="YAML file of the run"
        )
        configured.add_argument("--topology", default=topology, help="TPU slice")
        configured.add_overrides("mesh.tp=2")
    with_passes.append(configured)  # the last: one sparse layer
    for one in with_passes:
        one.add_argument(
            "--passes",
            nargs="+",
            default=list(PASSES),
            choices=PASSES,
            help="with or without gradients",
        )


@one_line_errors()
def main(argv: list[str] | None = None) -> int:
    """Run one benchmark, print its JSON, and return the exit code."""
    options = vars(parse(argv))
    run = options.pop("run")
    print(json.dumps(run(**options)))
    return 0


if __name__ == "__main__":
    run_script(main)
