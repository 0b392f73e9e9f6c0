"""Decoding speed, compared with a hand-written loop over one dense cache.

Both start from the same parameters and prompts, decode greedily, and must write the same tokens.
`int8` decodes with int8 kernels, and `int8 cache` with an int8 cache; their tokens may be others.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import plain
from benchmarks.measure import MODEL, medians, ratios
from configs.build import build_program, open_devices
from configs.schema import Config
from model.config import ModelConfig
from model.generation.generator import Generator


def bench_decode(*, batches: list[int], prompt: int, new: int, repeats: int) -> dict[str, Any]:
    """Measure tokens per second for every batch size, with the dense and the paged cache.

    prompt: tokens per row before decoding. new: tokens to decode per row.

    Raises:
        ValueError: The texts differ by more than the near-ties that rounding decides.
    """
    if new < 4:
        raise ValueError(f"--new {new}: use at least 4 tokens")
    # Training starts from smaller weights, with which many tokens would be nearly equal choices.
    config = Config.model_validate({"model": MODEL | {"initializer_range": 0.08}})
    devices, notice = open_devices(config)
    print(notice or devices[0].device_kind)
    program, results = build_program(config, devices), {}
    with jax.set_mesh(program.tp.manager.mesh):
        params = program.init().params
        plain_params = jax.tree.map(lambda x: jnp.asarray(np.array(x)), params)
        plain_params["layers"] = [
            jax.tree.map(lambda y, n=n: y[n], plain_params["layers"])
            for n in range(config.model.num_hidden_layers)
        ]
        generators = {
            kind: (Generator(program.definition, program.plan, cache=kind), params)
            for kind in ("dense", "paged")
        }
        int8_cache = Generator(program.definition, program.plan, cache="int8")
        generators["int8 cache"] = int8_cache, params
        int8, rounded = program.with_int8_kernels(jax.tree.map(jnp.copy, params))
        generators["int8"] = Generator(int8.definition, int8.plan), rounded
        for batch in batches:
            rng = np.random.default_rng(batch)
            prompts = rng.integers(0, config.model.vocab_size, (batch, prompt), np.int32)
            runs: dict[str, Callable[[], Any]] = {
                kind: partial(_generate, generator, values, prompts, new)
                for kind, (generator, values) in generators.items()
            }
            runs["plain"] = partial(_generate_plain, plain_params, config.model, prompts, new)
            results[str(batch)] = _measure(runs, batch, repeats)
    return {"bench": "decode", "prompt": prompt, "new": new, "batches": results}


def _generate(generator: Generator, params: Any, prompts: np.ndarray, new: int) -> Any:
    """Decode with a `Generator`: (tokens `new B`, seconds of each step but the first and last)."""
    tokens, times = [], []
    begin = time.perf_counter()
    for tokens_B in generator.stream(params, list(prompts), max_new_tokens=new):
        tokens.append(tokens_B)
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    # The first step includes the prefill. No step follows the last.
    return np.asarray(tokens), times[1:-1]


def _generate_plain(params: Any, config: ModelConfig, prompts: np.ndarray, new: int) -> Any:
    """Decode with the hand-written step: (tokens `new B`, seconds of each step but the first)."""
    step = jax.jit(plain.decode_step, static_argnames="config", donate_argnums=1)
    batch, length = prompts.shape
    slots = 1 << (length + new - 1).bit_length()
    shape = (batch, slots, config.num_key_value_heads, config.head_size)
    cache: Any = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_hidden_layers)]
    tokens_B, tokens, times = jnp.asarray(prompts[:, 0]), [], []
    for position in range(length + new - 1):
        begin = time.perf_counter()
        cache, tokens_B = step(params, cache, tokens_B, jnp.asarray(position), config)
        if position < length - 1:
            tokens_B = jnp.asarray(prompts[:, position + 1])
        else:
            tokens.append(np.asarray(tokens_B))
            times.append(time.perf_counter() - begin)
    return np.stack(tokens), times[1:]


def _measure(runs: dict[str, Callable[[], Any]], batch: int, repeats: int) -> dict[str, Any]:
    """Run all in turn, after one round that compiles: tokens per second, and ratios to plain."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        texts = {}
        for name, run in runs.items():
            texts[name], times = run()
            if repeat:
                rates[name].append(batch / statistics.median(times))
        exact = [text for name, text in texts.items() if "int8" not in name]
        same = min(float((text == texts["plain"]).mean()) for text in exact)
        first = all((text[:8] == texts["plain"][:8]).all() for text in exact)
        if not first or same < 0.9:
            raise ValueError(f"batch {batch}: the texts of {', '.join(texts)} differ")
    figures = {name: round(rate, 1) for name, rate in medians(rates).items()}
    print(f"batch {batch}: {figures} tokens/s", flush=True)
    to_plain = medians({name: ratios(rate, rates["plain"]) for name, rate in rates.items()})
    return {"tokens_per_second": figures, "ratio_to_plain": to_plain}
