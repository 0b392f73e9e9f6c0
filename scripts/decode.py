"""Tokens per second of decoding, ours against a hand-written loop over one dense cache.

Both start from the same parameters and prompts, decode greedily, and must write the same tokens.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from configs.build import build_program, open_devices
from configs.schema import Config
from model.config import ModelConfig
from model.generation.generator import Generator


def plain_step(
    params: Any, cache: Any, tokens_B: jax.Array, position: jax.Array, config: ModelConfig
) -> tuple[Any, jax.Array]:
    """One token for every row, by arrays alone: the yardstick.

    params: layers as a list. cache: k and v of every layer, `B T K h`.
    """
    H, K, h = config.num_attention_heads, config.num_key_value_heads, config.head_size
    B, T = tokens_B.shape[0], cache[0][0].shape[1]
    frequency = config.rope_theta ** -(jnp.arange(h // 2) * 2 / h)
    cos, sin = jnp.cos(position * frequency), jnp.sin(position * frequency)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps) * scale

    def turn(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["embed"]["table"][tokens_B]
    written = []
    for layer, p in enumerate(params["layers"]):
        w = p["attention"]["qkv"]["kernel"]
        y = norm(x, p["attention_norm"]["scale"])
        q, k = turn((y @ w["q"]).reshape(B, H, h)), turn((y @ w["k"]).reshape(B, K, h))
        k_cache, v_cache = (
            held.at[:, position].set(new)
            for held, new in zip(cache[layer], (k, (y @ w["v"]).reshape(B, K, h)), strict=True)
        )
        written.append((k_cache, v_cache))
        scores = jnp.einsum("BKGh,BTKh->BKGT", q.reshape(B, K, H // K, h), k_cache)
        scores = jnp.where(jnp.arange(T) <= position, scores * h**-0.5, -jnp.inf)
        out = jnp.einsum("BKGT,BTKh->BKGh", jax.nn.softmax(scores), v_cache)
        x = x + out.reshape(B, H * h) @ p["attention"]["o"]["kernel"]
        y, w = norm(x, p["mlp_norm"]["scale"]), p["mlp"]["gate_up"]["kernel"]
        x = x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ p["mlp"]["down"]["kernel"]
    logits = norm(x, params["norm"]["scale"]) @ params["head"]["kernel"]
    return written, jnp.argmax(logits, -1).astype(jnp.int32)


def _plain(params: Any, config: ModelConfig, prompts: np.ndarray, new: int, slots: int) -> Any:
    """Decodes `new` tokens after prompts `B L`: (tokens `new B`, seconds of each step but one)."""
    step = jax.jit(plain_step, static_argnames="config", donate_argnums=1)
    heads = config.num_key_value_heads, config.head_size
    shape = (len(prompts), slots, *heads)
    cache: Any = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_hidden_layers)]
    tokens, written, times = jnp.asarray(prompts[:, 0]), [], []
    for position in range(prompts.shape[1] + new - 1):
        begin = time.perf_counter()
        cache, drawn = step(params, cache, tokens, jnp.asarray(position), config)
        last = position >= prompts.shape[1] - 1
        tokens = drawn if last else jnp.asarray(prompts[:, position + 1])
        if last:
            written.append(np.asarray(drawn))
            times.append(time.perf_counter() - begin)
    return np.stack(written), times[1:]


def _ours(generator: Generator, params: Any, prompts: np.ndarray, new: int) -> Any:
    """The same by a `Generator`."""
    written, times = [], []
    begin = time.perf_counter()
    for tokens in generator.stream(params, list(prompts), max_new_tokens=new):
        written.append(tokens)
        times.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    # The first step pays for prefill, the last is not followed by another.
    return np.asarray(written), times[1:-1]


def bench_decode(
    sizes: dict[str, Any], *, batches: list[int], prompt: int, new: int, repeats: int
) -> dict[str, Any]:
    """Tokens per second for every batch size and cache, and their ratio to the hand-written loop.

    prompt, new: tokens of a row before and after. Raises: ValueError if the texts
    differ by more than the near-ties that rounding decides.
    """
    if new < 4 or prompt < 1:
        raise ValueError(f"--prompt {prompt} --new {new}: use at least 1 and 4 tokens")
    # Wider weights than those that training starts from: few near-ties between tokens.
    config = Config.model_validate({"model": sizes | {"initializer_range": 0.08}})
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
            kind: Generator(program.definition, config.model, program.tp, cache=kind)
            for kind in ("dense", "paged")
        }
        slots = 1 << (prompt + new - 1).bit_length()
        for batch in batches:
            rng = np.random.default_rng(batch)
            prompts = rng.integers(0, config.model.vocab_size, (batch, prompt), np.int32)
            runs: dict[str, Callable[[], Any]] = {
                kind: partial(_ours, generator, params, prompts, new)
                for kind, generator in generators.items()
            }
            runs["plain"] = partial(_plain, plain_params, config.model, prompts, new, slots)
            results[str(batch)] = _measure(runs, batch, repeats)
    return {"bench": "decode", "prompt": prompt, "new": new, "batches": results}


def _measure(runs: dict[str, Callable[[], Any]], batch: int, repeats: int) -> dict[str, Any]:
    """In turn, after one run each that compiles; medians of tokens per second, and of ratios."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        texts = {}
        for name, run in runs.items():
            texts[name], times = run()
            if repeat:
                rates[name].append(batch / statistics.median(times))
        same = min(float((text == texts["plain"]).mean()) for text in texts.values())
        first = all((text[:8] == texts["plain"][:8]).all() for text in texts.values())
        if not first or same < 0.9:
            raise ValueError(f"batch {batch}: the texts of {', '.join(texts)} differ")
    line = {name: round(statistics.median(rate), 1) for name, rate in rates.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(rate, rates["plain"], strict=True))
        for name, rate in rates.items()
    }
    print(f"batch {batch}: {line} tokens/s", flush=True)
    return {"tokens_per_second": line, "ratio_to_plain": ratios}
