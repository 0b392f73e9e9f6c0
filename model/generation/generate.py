"""Text from a trained model: prefill the prompts, then one token per row and step, from a cache.

Prompts of different lengths share a batch. Prefill runs on a few lengths only (buckets), decoding
on one shape, so nothing is compiled per prompt. The tokens of a step are read after the next is
dispatched. Letters: B rows, L prompt tokens, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from model.attention.cached import Cache
from model.attention.dispatch import choose_for_layer
from model.config import ModelConfig
from model.generation.cache import DenseCache, PagedCache
from model.generation.sampling import SamplingConfig, row_keys, sample_tokens
from model.transformer import Transformer
from parallel.linear.layout import TensorParallelConfig
from parallel.sharding.axes import (
    BATCH,
    LENGTH,
    MODE_DECODE,
    MODE_PREFILL,
    RUNTIME_MODE_TYPES,
    ResidualSharding,
    TokenSharding,
)

CacheKind = Literal["dense", "paged"]
_LEAST_BUCKET = 64
_GREEDY = SamplingConfig()


def bucket(length: int, multiple: int) -> int:
    """The length to which rows of this one are padded: a power of two times `multiple`."""
    size = -(-_LEAST_BUCKET // multiple) * multiple
    while size < length:
        size *= 2
    return size


@dataclass(frozen=True)
class Generator:
    """A model and how it writes; the functions that it compiles are shared by all its calls.

    definition: the model without its parameters, as `nnx.graphdef` gives it. page_size: slots of a
    page of a paged cache. seed: with the number of a row and a position it decides what is drawn.
    """

    definition: Any
    config: ModelConfig
    tp: TensorParallelConfig
    sampling: SamplingConfig = _GREEDY
    cache: CacheKind = "dense"
    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size}: use at least 1 slot per page")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: use at least 0 and less than 2**32")

    def stream(
        self,
        params: Any,
        prompts: Sequence[np.ndarray],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
    ) -> Iterator[list[int | None]]:
        """Yields the next token of every prompt, step by step; None for rows that have ended.

        A row ends with one of stop_ids, which is still yielded, or after max_new_tokens. Under
        `jax.set_mesh(tp.mesh)`. Raises: ValueError for an empty prompt or batch.
        """
        counts = self._counts(prompts)
        if max_new_tokens < 1:
            return
        shape = counts.size, bucket(int(counts.max()), self.tp.manager.axis_size(LENGTH))
        tokens = np.zeros(shape, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        cache = self._empty_cache(counts, shape[1], max_new_tokens)
        stops = tuple(sorted({int(i) for i in stop_ids}))
        stops_S = jnp.asarray(stops or (-1,), jnp.int32)
        step = partial(_step, definition=self.definition, tp=self.tp, sampling=self.sampling)
        put = partial(self._put, axes=[BATCH])
        seed = jax.random.key(self.seed)
        alive_B, left = put(counts > 0), max_new_tokens
        cache, drawn_B, shown_B, alive_B = step(
            params,
            cache,
            self._put(tokens, TokenSharding.axes, MODE_PREFILL),
            put(counts),
            alive_B,
            stops_S,
            seed,
            mode=MODE_PREFILL,
        )
        going = counts[: len(prompts)] > 0
        while left:
            left -= 1
            now_B, now_shown_B, was_alive = drawn_B, shown_B, going
            if left:
                cache, drawn_B, shown_B, alive_B = step(
                    params,
                    cache,
                    now_B[:, None],
                    alive_B.astype(jnp.int32),
                    alive_B,
                    stops_S,
                    seed,
                    mode=MODE_DECODE,
                )
            drawn = np.asarray(now_shown_B)[: len(prompts)]
            yield [int(t) if alive else None for t, alive in zip(drawn, was_alive, strict=True)]
            going = was_alive & ~np.isin(drawn, stops)
            if not going.any():
                return

    def __call__(
        self,
        params: Any,
        prompts: Sequence[np.ndarray],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> list[np.ndarray]:
        """The prompts and what follows each, as ids; `stream` says when a row ends.

        progress: called with the number of tokens that every step has written.
        """
        texts = [list(prompt) for prompt in prompts]
        steps = self.stream(params, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        for tokens in steps:
            for text, token in zip(texts, tokens, strict=True):
                text.extend([] if token is None else [token])
            progress(sum(token is not None for token in tokens))
        return [np.asarray(text, np.int32) for text in texts]

    def attention(self, length: int) -> list[str]:
        """One line per type of layer on what prefills prompts of this length, and what decodes."""
        manager = self.tp.manager
        padded = bucket(length, manager.axis_size(LENGTH))
        phases: list[tuple[RUNTIME_MODE_TYPES, int, bool]] = [
            (MODE_PREFILL, padded, False),
            (MODE_DECODE, 1, self.cache == "paged"),
        ]
        lines = []
        for kind in dict.fromkeys(self.config.layer_kinds):
            for mode, rows, paged in phases:
                choice = choose_for_layer(
                    self.config, kind, manager, length=rows, mode=mode, paged=paged
                )
                lines.append(
                    f"attention {choice.name} for {kind}, {mode.strip('_')}: {choice.reason}"
                )
        return lines

    def _counts(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """Tokens of every row, those included that fill the batch up for the mesh: they have none.

        Raises: ValueError for no prompt, or one without a token.
        """
        if not prompts or any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("nothing to continue: every prompt needs at least one token")
        ids = np.concatenate([np.asarray(prompt) for prompt in prompts])
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            raise ValueError(
                f"prompts have token ids from {ids.min()} to {ids.max()}; use 0 to "
                f"{self.config.vocab_size - 1}, the ids of the model's vocabulary"
            )
        parts = self.tp.manager.axis_size(BATCH)
        counts = np.zeros(-(-len(prompts) // parts) * parts, np.int32)
        counts[: len(prompts)] = [len(prompt) for prompt in prompts]
        return counts

    def _empty_cache(self, counts: np.ndarray, length: int, max_new_tokens: int) -> Cache:
        room = counts + np.where(counts > 0, max_new_tokens, 0)
        if self.cache == "paged":
            return PagedCache.allocate(
                self.config,
                self.tp,
                lengths=room,
                page_size=self.page_size,
                least_pages=-(-_LEAST_BUCKET // self.page_size),
            )
        slots = bucket(int(room.max()), self.tp.manager.axis_size(LENGTH))
        return DenseCache.empty(self.config, self.tp, batch=counts.size, length=slots)

    def _put(
        self, array: np.ndarray, axes: Any, mode: RUNTIME_MODE_TYPES = MODE_DECODE
    ) -> jax.Array:
        sharding = self.tp.manager.sharding(axes, mode)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@partial(jax.jit, static_argnames=("definition", "tp", "sampling", "mode"), donate_argnums=1)
def _step(
    params: Any,
    cache: Cache,
    tokens_BL: jax.Array,
    counts_B: jax.Array,
    alive_B: jax.Array,
    stops_S: jax.Array,
    seed: jax.Array,
    *,
    definition: Any,
    tp: TensorParallelConfig,
    sampling: SamplingConfig,
    mode: RUNTIME_MODE_TYPES,
) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
    """Extends every row by its first counts_B tokens.

    Returns: the cache, the next tokens as the batch lies, and on every device: a process may hold
    only a part of the batch; who goes on.
    """
    model: Transformer = nnx.merge(definition, params)
    batch = jax.typeof(counts_B).sharding.spec
    hidden_BLD, cache = model.extend(tokens_BL, counts_B, cache, mode=mode)
    if tokens_BL.shape[1] > 1:
        # Only the last token of a row is continued: its logits alone are computed.
        last_BL = jnp.arange(tokens_BL.shape[1]) == counts_B[:, None] - 1
        rows = jax.sharding.reshard(hidden_BLD, P(*batch, None, None))
        hidden_BLD = jnp.sum(jnp.where(last_BL[..., None], rows, 0), axis=1, keepdims=True)
        hidden_BLD = tp.manager.constrain(hidden_BLD, ResidualSharding, MODE_DECODE)
    logits_BV = jax.sharding.reshard(model.logits(hidden_BLD)[:, 0], P(*batch, None))
    numbers_B = jax.sharding.reshard(jnp.arange(counts_B.shape[0]), batch)
    keys_B = row_keys(seed, numbers_B, cache.lengths_B)
    drawn_B = sample_tokens(logits_BV.astype(jnp.float32), keys_B, sampling)
    going_B = alive_B & ~jnp.any(drawn_B[:, None] == stops_S, axis=-1)
    return cache, drawn_B, jax.sharding.reshard(drawn_B, P(None)), going_B
