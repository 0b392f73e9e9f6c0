"""Attention over keys and values in pages: decoding, and prefill and decoding in one call.

`ragged_page_attention_v2` takes one query per sequence, `ragged_page_attention_v3` any number, the
tokens of all sequences behind each other. The native form gathers pages and runs anywhere; on TPU
it is the kernel that jax ships. Arrays of one device: nothing here knows a mesh. It refuses rows in
another order than that of their indices: key i of a sequence is slot i of its pages.

Letters: S sequences, T tokens of all sequences, H query heads, K kv heads, G = H / K, h head dim.
pages_PSKh are P pages of S slots with 2 K heads: k0, v0, k1, v1, ...; page_table_SP lists the
pages of every sequence. In a step of the native form: W pages, Y keys in them.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from model.attention.capabilities import Capabilities, Feature
from model.attention.operation import OperationRegistry
from model.attention.scores import UNUSED, PagedInputs, Pattern, ScoreRule, with_sinks
from parallel.linear.ring import pcast_varying

_KERNEL: frozenset[Feature] = frozenset({"window", "soft_cap", "gqa", "decode", "paged"})
_NATIVE: frozenset[Feature] = _KERNEL | {"chunk", "prefix", "sinks"}
_MIXED: frozenset[Feature] = frozenset({"mixed"})

# The TPU kernel fetches this many pages at a time, one copy each, into two buffers of VMEM, for so
# many queries. Its own tuned sizes (jax 0.10.2) are 4 to 16 pages and 32 to 64 queries.
_KERNEL_PAGES, _KERNEL_BUFFER_BYTES, _KERNEL_QUERIES = 32, 4 * 2**20, 32
# Scalar memory of a TPU core (v5e and v5p, libtpu 0.0.42.1) holds the page table, its rows padded
# to whole lanes, lengths and starts, and what the compiler keeps there.
_LANES, _SCALAR_BYTES, _SCALAR_RESERVED = 128, 2**20, 4096


class PagedFunction(Protocol):
    """q `T H h` and pages `P S 2K h` (H a multiple of K) -> `T H h` in q's dtype.

    A token that sees nothing (padding, an empty sequence) gets zeros.
    """

    def __call__(
        self, q_THh: jax.Array, pages_PSKh: jax.Array, inputs: PagedInputs, rule: ScoreRule
    ) -> jax.Array: ...


@OperationRegistry.register(
    "ragged_page_attention_v2",
    capabilities=Capabilities(features=_NATIVE, layouts=("thd",)),
)
def one_query_each(
    q_THh: jax.Array, pages_PSKh: jax.Array, inputs: PagedInputs, rule: ScoreRule
) -> jax.Array:
    """Decoding: token t is the last key of sequence t."""
    return any_queries_each(q_THh, pages_PSKh, _one_each(q_THh, inputs), rule)


@OperationRegistry.register(
    "ragged_page_attention_v3",
    capabilities=Capabilities(features=_NATIVE | _MIXED, layouts=("thd",)),
)
def any_queries_each(
    q_THh: jax.Array, pages_PSKh: jax.Array, inputs: PagedInputs, rule: ScoreRule
) -> jax.Array:
    """Softmax in one pass over the pages, a few at a time; every token gathers those it may see.

    Memory: a step's keys and values per token, not the context: `rule.block_k` keys, in whole
    pages. None: one page, the fastest on CPU at 1, 4 and 32 sequences of 2048 keys. Steps in which
    nobody sees anything are skipped. The backward pass gathers again and keeps out `T H h` float32
    of every step.
    Source: online softmax (arXiv 1805.02867), in blocks as FlashAttention (arXiv 2205.14135).
    """
    T, H, h = q_THh.shape
    size, K = pages_PSKh.shape[1], pages_PSKh.shape[2] // 2
    rows = _Rows.of(inputs, T)
    ids_NTW = _steps_of_pages(inputs.page_table_SP, rows.sequence_T, size, rule.block_k)
    keys = ids_NTW.shape[2] * size
    arrays = (q_THh, pages_PSKh, inputs.page_table_SP, inputs.lengths_S, rows.index_T)
    axes = tuple({name: None for x in arrays for name in jax.typeof(x).manual_axis_type.varying})
    q_TKGh = pcast_varying(q_THh, axes).reshape(T, K, H // K, h)

    def step(sums: Any, page: Any) -> tuple[Any, None]:
        low, ids_TW = page
        index_Y = low + jnp.arange(keys)

        def attend(sums: Any) -> Any:
            seen_TY = rows.visible(index_Y, rule.pattern)
            # A slot beyond the end may hold anything, and 0 * nan is nan.
            used_TY = index_Y < rows.length_T[:, None]
            kv_TYKh = pages_PSKh[ids_TW].reshape(T, keys, 2 * K, h)
            kv_TYKh = jnp.where(used_TY[..., None, None], kv_TYKh, 0)
            return _add_keys(sums, q_TKGh, kv_TYKh, seen_TY, rule)

        return lax.cond(rows.any_visible(low, keys, rule.pattern), attend, lambda x: x, sums), None

    empty = (
        jnp.full((T, K, H // K), -jnp.inf, jnp.float32),
        jnp.zeros((T, K, H // K), jnp.float32),
        jnp.zeros((T, K, H // K, h), jnp.float32),
    )
    start = tuple(pcast_varying(x, axes) for x in empty)
    lows_N = jnp.arange(ids_NTW.shape[0]) * keys
    # prevent_cse is for code outside of scan; inside it only blocks fusion.
    body = jax.checkpoint(step, prevent_cse=False)
    (top, norm, out), _ = lax.scan(body, start, (lows_N, ids_NTW))
    return _normalised(top, norm, out, inputs.sinks_H).astype(q_THh.dtype)


@dataclass(frozen=True)
class _Rows:
    """Where every token stands: its sequence, that one's keys, its own row index or UNUSED."""

    sequence_T: jax.Array
    length_T: jax.Array
    index_T: jax.Array

    @classmethod
    def of(cls, inputs: PagedInputs, tokens: int) -> "_Rows":
        starts, lengths_S = inputs.query_starts, inputs.lengths_S
        if starts is None:
            starts = jnp.arange(lengths_S.shape[0] + 1, dtype=jnp.int32)
        token_T = jnp.arange(tokens, dtype=jnp.int32)
        before_T = jnp.sum(starts <= token_T[:, None], axis=1, dtype=jnp.int32) - 1
        sequence_T = jnp.clip(before_T, 0, lengths_S.shape[0] - 1)
        length_T = lengths_S[sequence_T]
        index_T = length_T - starts[sequence_T + 1] + token_T
        there_T = (token_T < starts[-1]) & (index_T >= 0)
        return cls(sequence_T, length_T, jnp.where(there_T, index_T, UNUSED))

    def visible(self, index_Y: jax.Array, pattern: Pattern) -> jax.Array:
        """Booleans `T Y`; the pattern alone would show the first `prefix` keys to padding."""
        seen_TY = pattern.visible(self.index_T[:, None], index_Y)
        there_TY = (self.index_T > UNUSED)[:, None] & (index_Y < self.length_T[:, None])
        return seen_TY & there_TY

    def any_visible(self, low: jax.Array, keys: int, pattern: Pattern) -> jax.Array:
        """Whether some token may see one of these many keys from `low` on."""
        there_T = self.index_T > UNUSED
        q_low = jnp.min(jnp.where(there_T, self.index_T, jnp.iinfo(jnp.int32).max))
        q_high = jnp.max(self.index_T)
        longest = jnp.max(jnp.where(there_T, self.length_T, 0))
        return (low < longest) & pattern.any_visible(q_low, q_high, low, low + keys - 1)


def _steps_of_pages(
    page_table_SP: jax.Array, sequence_T: jax.Array, size: int, block_k: int | None
) -> jax.Array:
    """Page ids `N T W`: N steps, in each of them W pages of every token's sequence."""
    tokens, pages = sequence_T.shape[0], page_table_SP.shape[1]
    width = min(max((block_k or size) // size, 1), pages)
    # Page 0 fills the last step up: it lies beyond every length.
    table_SP = jnp.pad(page_table_SP, ((0, 0), (0, -pages % width)))
    return table_SP[sequence_T].reshape(tokens, -1, width).transpose(1, 0, 2)


def _add_keys(
    sums: Any, q_TKGh: jax.Array, kv_TYKh: jax.Array, seen_TY: jax.Array, rule: ScoreRule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The running maximum, norm and sum of values, once these keys are in."""
    top_TKG, norm_TKG, out_TKGh = sums
    k, v = kv_TYKh[:, :, 0::2], kv_TYKh[:, :, 1::2]
    scores = jnp.einsum("TKGh,TYKh->TKGY", q_TKGh, k, preferred_element_type=jnp.float32)
    scores = scores * rule.scale
    if rule.soft_cap is not None:
        scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
    scores = jnp.where(seen_TY[:, None, None], scores, -jnp.inf)
    # The result does not depend on what is subtracted: no derivative goes through it.
    new_TKG = lax.stop_gradient(jnp.maximum(top_TKG, jnp.max(scores, axis=-1)))
    safe_TKG = jnp.where(jnp.isfinite(new_TKG), new_TKG, 0)
    weights = jnp.exp(scores - safe_TKG[..., None])
    shrink_TKG = jnp.exp(top_TKG - safe_TKG)
    part_TKGh = jnp.einsum(
        "TKGY,TYKh->TKGh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    norm_TKG = norm_TKG * shrink_TKG + jnp.sum(weights, axis=-1)
    return new_TKG, norm_TKG, out_TKGh * shrink_TKG[..., None] + part_TKGh


def _normalised(
    top_TKG: jax.Array, norm_TKG: jax.Array, out_TKGh: jax.Array, sinks_H: jax.Array | None
) -> jax.Array:
    """Out `T H h` in float32; zeros where nothing was seen."""
    T, K, G, h = out_TKGh.shape
    seen_TKG = norm_TKG > 0
    safe_TKG = jnp.where(seen_TKG, norm_TKG, 1)
    out_THh = (out_TKGh / safe_TKG[..., None]).reshape(T, K * G, h)
    if sinks_H is None:
        return out_THh
    lse_TKG = jnp.where(seen_TKG, top_TKG + jnp.log(safe_TKG), -jnp.inf)
    return with_sinks(out_THh[None], lse_TKG.reshape(T, K * G).T[None], sinks_H)[0][0]


def _one_each(q_THh: jax.Array, inputs: PagedInputs) -> PagedInputs:
    """The inputs of one query per sequence."""
    assert q_THh.shape[0] == inputs.lengths_S.shape[0], "one query per sequence"
    return replace(inputs, query_starts=None)


@OperationRegistry.register(
    "ragged_page_attention_v2",
    capabilities=Capabilities(
        features=_KERNEL,
        dtypes=("float32", "bfloat16"),
        layouts=("thd",),
        head_dim_multiple=_LANES,
        types_varying=False,
    ),
    form="tpu",
)
def one_query_each_tpu(
    q_THh: jax.Array, pages_PSKh: jax.Array, inputs: PagedInputs, rule: ScoreRule
) -> jax.Array:
    """`any_queries_each_tpu` with one query per sequence."""
    return any_queries_each_tpu(q_THh, pages_PSKh, _one_each(q_THh, inputs), rule)


@OperationRegistry.register(
    "ragged_page_attention_v3",
    capabilities=Capabilities(
        features=_KERNEL | _MIXED,
        dtypes=("float32", "bfloat16"),
        layouts=("thd",),
        head_dim_multiple=_LANES,
        types_varying=False,
    ),
    form="tpu",
)
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def any_queries_each_tpu(
    q_THh: jax.Array, pages_PSKh: jax.Array, inputs: PagedInputs, rule: ScoreRule
) -> jax.Array:
    """The kernel that jax ships; it reads pages where they lie. The native form's derivative.

    Source: jax.experimental.pallas.ops.tpu.ragged_paged_attention.
    Raises: ValueError for numbers of kv heads that it cannot tile, and for a page table that is
    larger than scalar memory.
    """
    _check_kernel(pages_PSKh, inputs)
    pages_at_once, queries_at_once = _kernel_blocks(q_THh, pages_PSKh, inputs, rule)
    lengths_S = inputs.lengths_S
    starts = inputs.query_starts
    if starts is None:
        starts = jnp.arange(lengths_S.shape[0] + 1, dtype=jnp.int32)
    # The kernel fetches the keys of the next sequence ahead, and loses count if that one has none,
    # or if sequences without queries stand at the end. So every sequence has a key, and those at
    # the end are left out; if there are no queries at all, the first token is computed for nobody.
    kernel_starts = starts.at[-1].max(1)
    asked = jnp.sum(kernel_starts[:-1] < kernel_starts[-1], dtype=jnp.int32)
    out_THh = ragged_paged_attention(
        q_THh,
        pages_PSKh,
        jnp.maximum(lengths_S, 1),
        inputs.page_table_SP,
        kernel_starts,
        asked[None],
        sm_scale=rule.scale,
        sliding_window=rule.pattern.window,
        soft_cap=rule.soft_cap,
        num_kv_pages_per_block=pages_at_once,
        num_queries_per_block=queries_at_once,
    )
    seen_T = _Rows.of(inputs, q_THh.shape[0]).index_T > UNUSED
    return jnp.where(seen_T[:, None, None], out_THh, 0)


def _kernel_forward(
    q_THh: jax.Array, pages_PSKh: jax.Array, inputs: PagedInputs, rule: ScoreRule
) -> tuple[jax.Array, Any]:
    return any_queries_each_tpu(q_THh, pages_PSKh, inputs, rule), (q_THh, pages_PSKh, inputs)


def _kernel_backward(
    rule: ScoreRule, kept: Any, dout_THh: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    q_THh, pages_PSKh, inputs = kept
    _, pull = jax.vjp(lambda q, pages: any_queries_each(q, pages, inputs, rule), q_THh, pages_PSKh)
    return *pull(dout_THh), None


any_queries_each_tpu.defvjp(_kernel_forward, _kernel_backward)


def _check_kernel(pages_PSKh: jax.Array, inputs: PagedInputs) -> None:
    """What the kernel or its compiler would refuse in words of their own."""
    words = pages_PSKh.shape[2] * pages_PSKh.dtype.itemsize // 4
    if words not in (1, 2, 4) and words % 8:
        raise ValueError(
            f"{pages_PSKh.shape[2] // 2} kv heads of {pages_PSKh.dtype} per device: the paged "
            "kernel tiles the 32-bit words of keys and values of a slot by 1, 2, 4 or multiples "
            "of 8; use another mesh.tp, or a dense cache"
        )
    rows, pages = inputs.page_table_SP.shape
    needed = 4 * rows * (math.ceil(pages / _LANES) * _LANES + 2) + _SCALAR_RESERVED
    if needed > _SCALAR_BYTES:
        raise ValueError(
            f"a page table of {rows} x {pages} entries needs {needed} bytes of scalar memory, "
            f"which has {_SCALAR_BYTES}; use larger pages, fewer rows per device or a dense cache"
        )


def _kernel_blocks(
    q_THh: jax.Array, pages_PSKh: jax.Array, inputs: PagedInputs, rule: ScoreRule
) -> tuple[int, int]:
    """Pages and queries that the kernel works on at a time.

    Not from its tuned table: that one asks the device that is here, which a plan does not have.
    """
    page_bytes = math.prod(pages_PSKh.shape[1:]) * pages_PSKh.dtype.itemsize
    fitting = min(_KERNEL_PAGES, _KERNEL_BUFFER_BYTES // (2 * page_bytes))
    if rule.block_k is not None:
        fitting = rule.block_k // pages_PSKh.shape[1]
    queries = min(rule.block_q or _KERNEL_QUERIES, q_THh.shape[0])
    return min(max(fitting, 1), inputs.page_table_SP.shape[1]), queries
