"""Measures: `scripts/bench.py BENCHMARK`; `--help` lists them.

The last line of stdout is one JSON object. `step` and `moe-step` time a training step, `decode` a
token, `attention` an operation: machines are noisy, so both sides take turns, and the median of the
ratios is what counts. `data` times text to tokens to batches. `overlap`, `ring`, `exchange` and
`model` need no TPU: they compile for a slice that is not here (`pip install -e ".[plan]"`) and
predict times from the schedule, by parallel/planning/schedule.py.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import overlap
from attention import bench_attention
from decode import bench_decode
from delivery import bench_data
from experts import bench_exchange, bench_moe_step

from configs.build import build_program
from configs.schema import Config
from model.config import DTypeName, ModelConfig, RematPolicy
from parallel.experts.grouped_matmul import FormName
from parallel.sharding.mesh import find_devices


def plain_loss(params: Any, batch: dict[str, jax.Array], config: ModelConfig) -> jax.Array:
    """The same model as one function of plain arrays: no modules, no mesh, no scan, no chunks."""
    H, K, h = config.num_attention_heads, config.num_key_value_heads, config.head_size

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps) * scale

    def rotate(x: jax.Array) -> jax.Array:
        frequency = config.rope_theta ** -(jnp.arange(h // 2) / (h // 2))
        angle = batch["positions"][..., None, None] * frequency
        a, b = jnp.split(x, 2, -1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["embed"]["table"][batch["tokens"]]
    B, L, _ = x.shape
    segments = batch["segment_ids"]
    visible = jnp.tril(jnp.ones((L, L), bool)) & (segments[:, :, None] == segments[:, None])
    for layer in range(config.num_hidden_layers):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        y, w = norm(x, p["attention_norm"]["scale"]), p["attention"]["qkv"]["kernel"]
        q = rotate((y @ w["q"]).reshape(B, L, H, h)).reshape(B, L, K, H // K, h)
        k = rotate((y @ w["k"]).reshape(B, L, K, h))
        v = (y @ w["v"]).reshape(B, L, K, h)
        scores = jnp.einsum("blkgh,btkh->bkglt", q, k) * h**-0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1)
        out = jnp.einsum("bkglt,btkh->blkgh", weights, v).reshape(B, L, H * h)
        x = x + out @ p["attention"]["o"]["kernel"]
        y, w = norm(x, p["mlp_norm"]["scale"]), p["mlp"]["gate_up"]["kernel"]
        x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ p["mlp"]["down"]["kernel"]
    logits = norm(x, params["norm"]["scale"]) @ params["head"]["kernel"]
    target = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, -1) - target
    return jnp.sum(losses * batch["loss_mask"]) / jnp.sum(batch["loss_mask"])


# Of the model that runs on this machine: every figure of these benchmarks is a ratio.
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "dtype": "float32",
}


def bench_step(overrides: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds per training step on one device: ours over a hand-written jitted function."""
    config = Config.model_validate({"model": SIZES | overrides})
    devices, notice = find_devices(1)
    print(notice or devices[0].device_kind)
    program = build_program(config, devices)
    rng, shape = np.random.default_rng(0), (1, 8, 512)
    fields = {
        "tokens": rng.integers(0, SIZES["vocab_size"], shape, np.int32),
        "targets": rng.integers(0, SIZES["vocab_size"], shape, np.int32),
        "positions": np.broadcast_to(np.arange(512, dtype=np.int32), shape),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.ones(shape, np.float32),
    }
    plain_batch = {name: jax.device_put(field[0], devices[0]) for name, field in fields.items()}
    optimizer = program.optimizer

    def plain_step(params: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(plain_loss)(params, plain_batch, program.config)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with jax.set_mesh(program.tp.manager.mesh):
        batch = {
            name: jax.device_put(field, program.batch_sharding) for name, field in fields.items()
        }
        state = program.init()
        begin = time.perf_counter()
        ours = program.train_step.lower(state, batch).compile()
        compile_ours = time.perf_counter() - begin
    params = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state.params)
    opt_state = optimizer.init(params)
    begin = time.perf_counter()
    plain = jax.jit(plain_step, donate_argnums=(0, 1)).lower(params, opt_state).compile()
    compile_plain = time.perf_counter() - begin
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(ours(state, batch))
        middle = time.perf_counter()
        params, opt_state, loss = jax.block_until_ready(plain(params, opt_state))
        end = time.perf_counter()
        if repeat:  # the first pays for page faults
            times["ours"].append(middle - begin)
            times["plain"].append(end - middle)
        print(
            f"ours {middle - begin:.3f} s  plain {end - middle:.3f} s  "
            f"loss {float(metrics['loss']):.5f} {float(loss):.5f}",
            flush=True,
        )
    ratios = [a / b for a, b in zip(times["ours"], times["plain"], strict=True)]
    memory = {"ours": ours.memory_analysis(), "plain": plain.memory_analysis()}
    return {
        "bench": "step",
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "compile_seconds": {"ours": compile_ours, "plain": compile_plain},
        "temporary_gib": {name: m.temp_size_in_bytes / 2**30 for name, m in memory.items()},
        "remat": config.model.remat,
    }


def at_least_one(text: str) -> int:
    """A count from the command line."""
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: use at least 1")
    return count


def _parser() -> argparse.ArgumentParser:
    """Every benchmark as a subcommand; `run` of its arguments gives the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[Any], dict[str, Any]], text: str) -> Any:
        added = commands.add_parser(name, help=text)
        added.set_defaults(run=run)
        return added

    step = command("step", lambda a: bench_step({"remat": a.remat}, a.repeats), "a training step")
    step.add_argument("--repeats", type=at_least_one, default=5)
    step.add_argument("--remat", choices=get_args(RematPolicy), default=ModelConfig().remat)
    attention = command("attention", _attention, "operations against vanilla, by length")
    attention.add_argument("--names", nargs="+", default=["flash_attn2"])
    lengths = [512, 1024, 2048, 4096, 8192]
    attention.add_argument("--lengths", type=at_least_one, nargs="+", default=lengths)
    attention.add_argument("--dtype", choices=get_args(DTypeName), default="float32")
    attention.add_argument("--repeats", type=at_least_one, default=3)
    decode = command("decode", _decode, "tokens per second against a hand-written loop")
    decode.add_argument("--batches", type=at_least_one, nargs="+", default=[1, 32])
    decode.add_argument("--prompt", type=at_least_one, default=128, help="tokens before")
    decode.add_argument("--new", type=at_least_one, default=64, help="tokens after")
    decode.add_argument("--repeats", type=at_least_one, default=5)
    moe = command("moe-step", _moe_step, "a step with experts against the dense model")
    moe.add_argument("--experts", type=at_least_one, default=8)
    moe.add_argument("--top-k", type=at_least_one, default=2)
    moe.add_argument("--capacity-factor", type=float, help="default: nothing is dropped")
    moe.add_argument("--grouped-matmul", choices=get_args(FormName), default="auto")
    moe.add_argument("--repeats", type=at_least_one, default=5)
    data = command("data", _data, "tokenisation, delivery of batches, start-up")
    data.add_argument("--copies", type=at_least_one, default=8, help="of the text to tokenise")
    data.add_argument("--gigabytes", type=float, default=10.0, help="of the store to open")
    data.add_argument("--repeats", type=at_least_one, default=3)
    _add_absent(command)
    return parser


def _add_absent(command: Callable[..., Any]) -> None:
    """The benchmarks that compile for a TPU slice that is not here."""
    rings = command("overlap", _overlap, "predicted time of blocks")
    rings.add_argument("--topologies", nargs="+", default=["v5p:2x2x2", "v5e:2x4"])
    rings.add_argument("--cases", nargs="+", default=list(overlap.CASES), choices=overlap.CASES)
    rings.add_argument(
        "--methods", nargs="+", default=list(overlap.METHODS), choices=overlap.METHODS
    )
    rings.add_argument(
        "--size", type=at_least_one, default=8192, help="width, and tokens over all devices"
    )
    rings.add_argument("--dump", type=Path, help="directory for the compiled programs, as text")
    ring = command("ring", _ring, "predicted ring attention")
    ring.add_argument("--topology", default="v5p:2x2x2")
    ring.add_argument(
        "--length", type=at_least_one, default=32768, help="tokens of a row, over all devices"
    )
    ring.add_argument("--heads", type=at_least_one, default=32)
    ring.add_argument("--kv-heads", type=at_least_one, default=8)
    for name, run, path, topology in (
        ("model", overlap.bench_model, "configs/llama3_8b_tp8.yaml", "v5p:2x2x2"),
        ("exchange", bench_exchange, "configs/qwen3_30b_a3b_ep16.yaml", "v5p:2x2x4"),
    ):
        what = "training step" if name == "model" else "sparse layer"
        added = command(
            name,
            lambda a, run=run: run(a.config, a.topology, a.overrides),
            f"predicted {what} of a configuration",
        )
        added.add_argument("--config", default=path)
        added.add_argument("--topology", default=topology)
        added.add_argument("overrides", nargs="*", metavar="section.key=value")


def _attention(args: argparse.Namespace) -> dict[str, Any]:
    return bench_attention(args.names, args.lengths, dtype=args.dtype, repeats=args.repeats)


def _decode(args: argparse.Namespace) -> dict[str, Any]:
    return bench_decode(
        SIZES, batches=args.batches, prompt=args.prompt, new=args.new, repeats=args.repeats
    )


def _moe_step(args: argparse.Namespace) -> dict[str, Any]:
    changes = {"capacity_factor": args.capacity_factor, "grouped_matmul": args.grouped_matmul}
    return bench_moe_step(
        SIZES, experts=args.experts, top_k=args.top_k, repeats=args.repeats, changes=changes
    )


def _data(args: argparse.Namespace) -> dict[str, Any]:
    return bench_data(copies=args.copies, gigabytes=args.gigabytes, repeats=args.repeats)


def _overlap(args: argparse.Namespace) -> dict[str, Any]:
    return overlap.bench_blocks(
        args.topologies, args.cases, args.methods, size=args.size, dump=args.dump
    )


def _ring(args: argparse.Namespace) -> dict[str, Any]:
    rows = overlap.bench_ring(
        args.topology, length=args.length, heads=args.heads, kv_heads=args.kv_heads
    )
    return {"bench": "ring", "rows": rows}


def main() -> None:
    """Runs one benchmark and prints its JSON."""
    args = _parser().parse_args()
    try:
        result = args.run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
