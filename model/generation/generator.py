"""Text generation: prefill the prompts, then decode one token per row and step with a cache.

Prompts of different lengths share a batch. Prompt lengths are padded to a few buckets and decoding
has one shape, so no prompt causes a compilation of its own. The host reads the tokens of a step
after it has dispatched the next step.

Letters: B rows, L prompt tokens, S stop ids, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from model.attention.cached import Cache
from model.generation.cache import DenseCache, PagedCache
from model.generation.int8_cache import Int8Cache
from model.generation.sampling import SamplingConfig, row_keys, sample_tokens
from model.plan import ExecutionPlan
from model.transformer import Transformer
from parallel.linear.config import TensorParallelConfig
from parallel.sharding.axes import (
    BATCH,
    LENGTH,
    MODE_DECODE,
    MODE_PREFILL,
    RUNTIME_MODE_TYPES,
    ResidualSharding,
    TokenSharding,
)

CacheKind = Literal["dense", "int8", "paged"]
_MIN_BUCKET = 64
ROWS_PER_DEVICE = 8
"""Padded rows have multiples of so many tokens per device: every overlap method can cut those."""
_GREEDY = SamplingConfig()


def bucket_length(length: int, multiple: int) -> int:
    """Return the padded length: at least `length`, a power of two times a multiple of `multiple`.

    The smallest bucket is the first multiple from 64 on.
    """
    size = -(-_MIN_BUCKET // multiple) * multiple
    while size < length:
        size *= 2
    return size


@dataclass(frozen=True)
class Generator:
    """A model with its cache and sampling settings; all calls share the compiled functions.

    definition: the model without parameters, from `nnx.graphdef`. cache: dense has keys and values
    in the model's dtype, int8 the same rounded, paged in pages. page_size: slots of a page of a
    paged cache. seed: decides all draws, together with the row number and the position.
    num_tokens: only ids below this are drawn, as other rows of the vocabulary are no tokens; None:
    all of `model.vocab_size`.
    """

    definition: Any
    plan: ExecutionPlan
    sampling: SamplingConfig = _GREEDY
    cache: CacheKind = "dense"
    page_size: int = 16
    seed: int = 0
    num_tokens: int | None = None

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
        """Yield the next token of every prompt, step by step; None for rows that have ended.

        A row ends with one of stop_ids, which is still yielded, or after max_new_tokens. Call it
        under `jax.set_mesh(tp.mesh)`. Raises: ValueError for an empty prompt or batch.
        """
        counts = self._prompt_lengths(prompts)
        if max_new_tokens < 1:
            return
        tokens = np.zeros((counts.size, self._bucket(counts.max())), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        stops = sorted({int(i) for i in stop_ids}) or [-1]
        vocab_size = self.plan.model.vocab_size
        num_tokens = min(self.num_tokens or vocab_size, vocab_size)
        settings = _StepSettings(
            self.definition, self.plan.tp, self.plan.precision, self.sampling, num_tokens
        )
        constants = jnp.asarray(stops, jnp.int32), jax.random.key(self.seed), settings
        cache = self._empty_cache(counts, max_new_tokens)
        tokens_BL = self._put(tokens, TokenSharding.axes, MODE_PREFILL)
        counts_B = self._put(counts, [BATCH])
        newest = _step(params, cache, tokens_BL, counts_B, *constants, mode=MODE_PREFILL)
        running = np.ones(len(prompts), bool)
        for remaining in reversed(range(max_new_tokens)):
            done = newest
            if remaining:
                tokens_BL = done.tokens_B[:, None]
                newest = _step(
                    params, done.cache, tokens_BL, done.counts_B, *constants, mode=MODE_DECODE
                )
            drawn = np.asarray(done.replicated_tokens_B)[: len(prompts)]
            yield [int(t) if is_on else None for t, is_on in zip(drawn, running, strict=True)]
            running = running & ~np.isin(drawn, stops)
            if not running.any():
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
        """Return every prompt with its continuation, as token ids; `stream` says when a row ends.

        progress: called after every step with the number of tokens that the step generated.
        """
        texts = [list(prompt) for prompt in prompts]
        steps = self.stream(params, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        for tokens in steps:
            for text, token in zip(texts, tokens, strict=True):
                text.extend([] if token is None else [token])
            progress(sum(token is not None for token in tokens))
        return [np.asarray(text, np.int32) for text in texts]

    def attention(self, length: int) -> list[str]:
        """Describe the attention operations of prefill (prompts of `length` tokens) and decoding.

        Returns one line per type of layer and phase.
        """
        phases: list[tuple[RUNTIME_MODE_TYPES, int, bool]] = [
            (MODE_PREFILL, self._bucket(length), False),
            (MODE_DECODE, 1, self.cache == "paged"),
        ]
        return [
            f"attention {choice.name} for {layer_type}, {mode.strip('_')}: {choice.reason}"
            for mode, rows, paged in phases
            for layer_type, choice in self.plan.generation_attention(
                mode, rows, paged=paged
            ).items()
        ]

    def _bucket(self, length: int) -> int:
        multiple = ROWS_PER_DEVICE * self.plan.tp.manager.axis_size(LENGTH)
        return bucket_length(int(length), multiple)

    def _prompt_lengths(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tokens of every row, with rows of 0 tokens up to a multiple of the mesh.

        Raises: ValueError for no prompt, a prompt without a token, or an unknown token id.
        """
        if not prompts or any(len(prompt) == 0 for prompt in prompts):
            raise ValueError("nothing to continue: every prompt needs at least one token")
        ids = np.concatenate([np.asarray(prompt) for prompt in prompts])
        if ids.min() < 0 or ids.max() >= self.plan.model.vocab_size:
            raise ValueError(
                f"prompts have token ids from {ids.min()} to {ids.max()}; use 0 to "
                f"{self.plan.model.vocab_size - 1}, the ids of the model's vocabulary"
            )
        parts = self.plan.tp.manager.axis_size(BATCH)
        counts = np.zeros(-(-len(prompts) // parts) * parts, np.int32)
        counts[: len(prompts)] = [len(prompt) for prompt in prompts]
        return counts

    def _empty_cache(self, counts: np.ndarray, max_new_tokens: int) -> Cache:
        lengths = counts + np.where(counts > 0, max_new_tokens, 0)
        if self.cache == "paged":
            return PagedCache.allocate(
                self.plan.model,
                self.plan.tp,
                lengths=lengths,
                page_size=self.page_size,
                min_pages=-(-_MIN_BUCKET // self.page_size),
            )
        kind = Int8Cache if self.cache == "int8" else DenseCache
        slots = self._bucket(lengths.max())
        return kind.empty(self.plan.model, self.plan.tp, batch=counts.size, length=slots)

    def _put(
        self, array: np.ndarray, axes: Any, mode: RUNTIME_MODE_TYPES = MODE_DECODE
    ) -> jax.Array:
        sharding = self.plan.tp.manager.sharding(axes, mode)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


class _StepSettings(NamedTuple):
    """The arguments of a step that are fixed when it is compiled."""

    definition: Any
    tp: TensorParallelConfig
    precision: str | None
    sampling: SamplingConfig
    num_tokens: int


class _StepResult(NamedTuple):
    """The cache with the new tokens, the tokens drawn, and the input lengths of the next step.

    tokens_B is sharded like the batch. replicated_tokens_B holds the same on every device, because
    a process may hold only a part of the batch. counts_B: 1 for rows that continue, 0 for others.
    """

    cache: Cache
    tokens_B: jax.Array
    replicated_tokens_B: jax.Array
    counts_B: jax.Array


@partial(jax.jit, static_argnames=("settings", "mode"), donate_argnums=1)
def _step(
    params: Any,
    cache: Cache,
    tokens_BL: jax.Array,
    counts_B: jax.Array,
    stops_S: jax.Array,
    key: jax.Array,
    settings: _StepSettings,
    *,
    mode: RUNTIME_MODE_TYPES,
) -> _StepResult:
    """Append the first counts_B tokens of every row to the cache, and draw the next token."""
    manager = settings.tp.manager
    model: Transformer = nnx.merge(settings.definition, params)
    batch = jax.typeof(counts_B).sharding.spec
    with jax.default_matmul_precision(settings.precision):
        hidden_BLD, cache = model.extend(tokens_BL, counts_B, cache, mode=mode)
    if tokens_BL.shape[1] > 1:
        # Only the last token of a row needs logits.
        last_BL = jnp.arange(tokens_BL.shape[1]) == counts_B[:, None] - 1
        rows = jax.sharding.reshard(hidden_BLD, P(*batch, None, None))
        hidden_BLD = jnp.sum(jnp.where(last_BL[..., None], rows, 0), axis=1, keepdims=True)
        hidden_BLD = manager.constrain(hidden_BLD, ResidualSharding, MODE_DECODE)
    with jax.default_matmul_precision(settings.precision):
        logits_BV = model.logits(hidden_BLD)[:, 0]
    logits_BV = jax.sharding.reshard(logits_BV, P(*batch, None))
    numbers_B = jax.sharding.reshard(jnp.arange(counts_B.shape[0]), batch)
    keys_B = row_keys(key, numbers_B, cache.lengths_B)
    is_token_V = jnp.arange(logits_BV.shape[1]) < settings.num_tokens
    logits_BV = jnp.where(is_token_V, logits_BV.astype(jnp.float32), -jnp.inf)
    drawn_B = sample_tokens(logits_BV, keys_B, settings.sampling)
    continues_B = (counts_B > 0) & ~jnp.any(drawn_B[:, None] == stops_S, axis=-1)
    replicated_B = jax.sharding.reshard(drawn_B, P(None))
    return _StepResult(cache, drawn_B, replicated_B, continues_B.astype(jnp.int32))


def stream_text(
    decode: Callable[[np.ndarray], str], prompt: np.ndarray, tokens: Iterable[int]
) -> Iterator[str]:
    """Yield the text of the prompt and of every token that follows, in pieces to concatenate.

    decode: turns ids into text, with U+FFFD for an incomplete character. Bytes of an incomplete
    character are held back until the next tokens complete it.
    """
    ids, shown = [int(i) for i in prompt], 0
    for token in tokens:
        ids.append(token)
        text = decode(np.asarray(ids)).rstrip("\N{REPLACEMENT CHARACTER}")
        yield text[shown:]
        shown = max(shown, len(text))
    yield decode(np.asarray(ids))[shown:]
