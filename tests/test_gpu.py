"""On an NVIDIA GPU: kernels equal what they replace, and a killed run resumes bit for bit.

JAX_PLATFORMS=cuda,cpu pytest tests/test_gpu.py

Without that variable these tests are skipped, and the others run on simulated CPU devices. Results
of kernels are compared with float32 on the same GPU. 2^-7 of the norm is four times the rounding of
one bfloat16 (2^-9): weights, result and their gradients are rounded one after the other.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerator import ON_GPU
from conftest import ROOT
from program_runs import LENGTH, ROWS, TINY, leaves
from runs import losses, write_config

from configs.build import build_program
from configs.schema import load_config
from model.attention.dense import vanilla
from model.attention.mask import AttentionInputs, AttentionSpec, MaskSpec
from model.attention.registry import Request, backends_of, choose_operation
from parallel.experts.grouped_matmul import grouped_matmul
from parallel.experts.row_layout import RowGroups, RowLayout
from parallel.sharding.devices import compute_capability

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs JAX_PLATFORMS=cuda,cpu and a GPU")
BOUND = 2**-7
PATIENCE = 600
DOCUMENTS = (0, 300, 301, 700, 1024)
"""First tokens of the documents of a row, and its end."""


def distance(got: jax.Array, want: jax.Array) -> float:
    """Return the relative distance by norm, in float64."""
    a, b = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def value_and_gradients(operation: Callable[..., jax.Array], *qkv: jax.Array) -> Any:
    def loss(*qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = operation(*qkv)
        return jnp.sum(jnp.sin(3 * out.astype(jnp.float32))), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return out, *grads


def request_of(features: set[Any], length: int, head_dim: int, heads: int) -> Request:
    return Request(
        features=frozenset(features),
        platform="gpu",
        dtype="bfloat16",
        length=length,
        head_dim=head_dim,
        heads=heads,
        compute_capability=compute_capability(jax.devices()[0]),
    )


CASES = {
    "causal": (MaskSpec(), None, False),
    "bidirectional": (MaskSpec(causal=False), None, False),
    "window": (MaskSpec(window=200), None, False),
    "documents": (MaskSpec(), None, True),
    "documents and window": (MaskSpec(window=200), None, True),
    "documents, bidirectional": (MaskSpec(causal=False), None, True),
    "documents and soft cap": (MaskSpec(), 5.0, True),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["cudnn", "tokamax", "tokamax_triton"])
def test_kernels_of_attention_equal_vanilla_in_float32(name, case, head_dim, capsys) -> None:
    mask, soft_cap, has_documents = CASES[case]
    spec = AttentionSpec(scale=head_dim**-0.5, mask=mask, soft_cap=soft_cap)
    rows, length, heads, kv_heads = 2, DOCUMENTS[-1], 8, 2
    features = {"gqa"}
    features |= {"bidirectional"} if not mask.causal else set()
    features |= {"window"} if mask.window else set()
    features |= {"soft_cap"} if soft_cap else set()
    features |= {"segment_ids"} if has_documents else set()
    request = request_of(features, length, head_dim, heads)
    backend = backends_of(name)[0]
    if reasons := backend.missing(request):
        pytest.skip("; ".join(reasons))
    index = jnp.arange(length, dtype=jnp.int32)[None]
    segments = None
    if has_documents:
        row = np.searchsorted(DOCUMENTS[1:], np.arange(length), side="right").astype(np.int32)
        segments = jnp.asarray(np.stack([row, row[::-1]]))
    inputs = AttentionInputs(
        q_index_BL=index, kv_index_BT=index, q_segment_ids_BL=segments, kv_segment_ids_BT=segments
    )
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (rows, length, n, head_dim), jnp.bfloat16)
        for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )
    got = value_and_gradients(lambda *qkv: backend.function(*qkv, inputs, spec), q, k, v)
    with jax.default_matmul_precision("highest"):
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        want = value_and_gradients(lambda *qkv: vanilla(*qkv, inputs, spec), *wide)
    found = {
        part: distance(a, b)
        for part, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    }
    with capsys.disabled():
        print(f"\n  {name}, {case}, {head_dim}:", *(f"{k} {v:.1e}" for k, v in found.items()))
    assert max(found.values()) < BOUND, found


def test_auto_takes_a_kernel_for_packed_documents() -> None:
    request = request_of({"segment_ids", "gqa"}, 4096, 64, 32)
    wanted = "flash_attn2"
    if find_spec("tokamax") is not None:
        wanted = "tokamax" if request.compute_capability[0] in (9, 10) else "tokamax_triton"
    assert choose_operation(request).name == wanted


@pytest.mark.skipif(find_spec("tokamax") is None, reason='pip install -e ".[gpu]"')
@pytest.mark.parametrize("kind", ["packed", "uniform"])
def test_tokamax_multiplies_groups_as_loops_do(kind) -> None:
    """Values and both gradients against a float64 matmul per group; one group is empty."""
    groups, width, features = 4, 256, 512
    layout = RowLayout(kind, 1, 2048, groups)
    sizes = (700, 0, 1, 900) if kind == "packed" else (512, 0, 1, 300)
    starts = np.cumsum((0, *sizes[:-1])) if kind == "packed" else np.arange(groups) * 512
    rng = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((2048, width), (groups, width, features), (2048, features))
    )

    def solve(x: jax.Array, w: jax.Array, g: jax.Array, sizes: jax.Array) -> Any:
        multiply = partial(grouped_matmul, groups=RowGroups(layout, sizes), impl="tokamax")
        y, pull = jax.vjp(lambda x, w: multiply(x, w), x, w)
        return y, *pull(g)

    got = jax.jit(solve)(x, w, g, jnp.asarray(sizes, jnp.int32))
    x64, w64, g64 = (np.asarray(array, np.float64) for array in (x, w, g))
    for e, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        if size:
            assert distance(got[0][rows], x64[rows] @ w64[e]) < BOUND / 2
            assert distance(got[1][rows], g64[rows] @ w64[e].T) < BOUND / 2
            assert distance(got[2][e], x64[rows].T @ g64[rows]) < BOUND / 2
        else:
            assert not np.asarray(got[2][e]).any()


@pytest.mark.parametrize("options", [(), ("model.moe.num_experts=4",)], ids=["dense", "sparse"])
def test_a_step_in_float32_has_the_gradients_of_the_cpu(options) -> None:
    """With full precision: a GPU multiplies float32 as TF32 otherwise."""
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, "mesh.tp=1", *options])
    rng, shape = np.random.default_rng(0), (1, ROWS, LENGTH)
    batch = {
        "tokens": rng.integers(0, 256, shape, np.int32),
        "targets": rng.integers(0, 256, shape, np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.ones(shape, np.float32),
    }
    found, params = [], None
    for device in (jax.devices("cpu")[0], jax.devices()[0]):
        program = build_program(config, [device])
        with jax.set_mesh(program.tp.mesh), jax.default_matmul_precision("highest"):
            if params is None:
                params = jax.tree.map(np.asarray, program.init().params)
            shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state.params)
            placed = {name: jax.device_put(x, program.batch_sharding) for name, x in batch.items()}
            there = jax.device_put(params, shardings)
            means, _, grads = jax.jit(program.gradients)(there, placed)
            found.append((float(means["loss"]), leaves(grads)))
    (want_loss, want), (loss, grads) = found
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for name, grad in want.items():
        assert np.abs(grads[name] - grad).max() <= 2e-5 * np.abs(grad).max(), name


def start(config: str, *overrides: str) -> subprocess.Popen[str]:
    """Start train.py as users do on a machine with one GPU, with deterministic operations."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true"
    command = [sys.executable, "train.py", "--config", config, *RUN, *overrides]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL
    )


RUN = [
    *("mesh.dp=1", "mesh.tp=1", "model.dtype=bfloat16", "model.hidden_size=256"),
    *("model.intermediate_size=512", "data.sequence_length=256", "training.steps=150"),
    *("training.eval_every=75", "training.sample_tokens=0", "training.guard.recheck_every=40"),
]


def test_a_killed_run_resumes_bit_for_bit(tmp_path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    configs = []
    for folder in folders:
        folder.mkdir()
        configs.append(write_config(folder, cache=str(tmp_path / "xla")))
    assert start(configs[0], "checkpoint.every=1000").wait(PATIENCE) == 0
    process = start(configs[1], "checkpoint.every=50")
    checkpoint = folders[1] / "run" / "checkpoints" / "50"
    deadline = time.monotonic() + PATIENCE
    while not checkpoint.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    assert start(configs[1], "checkpoint.every=50").wait(PATIENCE) == 0
    assert losses(folders[1] / "run") == losses(folders[0] / "run")
    log = (folders[1] / "run" / "log.txt").read_text()
    assert log.count("command: ") == 2
