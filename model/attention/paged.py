"""Attention to keys and values in pages, for generation.

`ragged_page_attention_v2` is chosen for one query per sequence (decoding), and
`ragged_page_attention_v3` for any number: the tokens of all sequences one after another. Both are
one function. The native backend gathers pages and runs anywhere. The backend for TPU is the Pallas
kernel that jax ships; it reads pages in place, and its derivative is the native backend's. All
arrays are local to one device. Key i of a sequence is slot i of its pages; other orders are not
supported.

Letters: S sequences, T tokens of all sequences, H query heads, K kv heads, G = H / K, h head dim.
pages_PSKh are P pages of S slots with 2 K heads: k0, v0, k1, v1, ..., or with K heads whose keys
are also the values; page_table_SP lists the pages of every sequence. In one step of the native
backend: W pages, Y keys in them.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from model.attention.blockwise import varying
from model.attention.mask import UNUSED, AttentionSpec, MaskSpec, PagedInputs, with_sinks
from model.attention.registry import Capabilities, Feature, register
from parallel.linear.ring import pcast_varying

_FEATURES: frozenset[Feature] = frozenset(
    {"window", "soft_cap", "gqa", "decode", "paged", "chunk", "prefix", "sinks", "shared_values"}
)
_TPU_FEATURES = _FEATURES - {"chunk", "prefix", "sinks", "shared_values"}
_capabilities = partial(Capabilities, blockwise=True)


@register("ragged_page_attention_v2", capabilities=_capabilities(features=_FEATURES, preference=20))
@register(
    "ragged_page_attention_v3",
    capabilities=_capabilities(features=_FEATURES | {"mixed"}, preference=10),
)
def any_queries_each(
    q_THh: Array, pages_PSKh: Array, inputs: PagedInputs, spec: AttentionSpec
) -> Array:
    """Return attention by an online softmax over pages; every token gathers those it may see.

    q `T H h` and pages `P S 2K h` (H a multiple of K) -> `T H h` in q's dtype; zeros for a token
    that sees nothing (padding, an empty sequence).
    A step gathers `spec.block_k` keys per token, in whole pages; memory does not grow with the
    context. None: one page, the fastest on CPU at 1, 4 and 32 sequences of 2048 keys. Steps in
    which no query sees a key are skipped. The backward pass gathers again and keeps out `T H h` of
    every step in float32.
    Source: online softmax (arXiv 1805.02867), in blocks as FlashAttention (arXiv 2205.14135).
    """
    T, H, h = q_THh.shape
    size, stored = pages_PSKh.shape[1:3]
    K = stored if spec.shared_values else stored // 2
    tokens = TokenRows.of(inputs, T)
    ids_NTW = _steps_of_pages(inputs.page_table_SP, tokens.sequence_T, size, spec.block_k)
    keys = ids_NTW.shape[2] * size
    arrays = (q_THh, pages_PSKh, inputs.page_table_SP, inputs.lengths_S, tokens.index_T)
    axes = varying(arrays)
    q_TKGh = pcast_varying(q_THh, axes).reshape(T, K, H // K, h)

    def step(sums: Any, page: Any) -> tuple[Any, None]:
        low, ids_TW = page
        index_Y = low + jnp.arange(keys)

        def attend(sums: Any) -> Any:
            seen_TY = tokens.visible(index_Y, spec)
            # A slot beyond the end may hold nan, and 0 * nan is nan.
            used_TY = index_Y < tokens.length_T[:, None]
            kv_TYKh = pages_PSKh[ids_TW].reshape(T, keys, stored, h)
            kv_TYKh = jnp.where(used_TY[..., None, None], kv_TYKh, 0)
            return _add_keys(sums, q_TKGh, kv_TYKh, seen_TY, spec)

        return lax.cond(tokens.any_visible(low, keys, spec.mask), attend, lambda x: x, sums), None

    empty = (
        jnp.full((T, K, H // K), -jnp.inf, jnp.float32),
        jnp.zeros((T, K, H // K), jnp.float32),
        jnp.zeros((T, K, H // K, h), jnp.float32),
    )
    start = tuple(pcast_varying(x, axes) for x in empty)
    lows_N = jnp.arange(ids_NTW.shape[0]) * keys
    # prevent_cse is needed outside of scan only; inside it blocks fusion.
    body = jax.checkpoint(step, prevent_cse=False)
    (top, norm, out), _ = lax.scan(body, start, (lows_N, ids_NTW))
    return _normalised(top, norm, out, inputs.sinks_H).astype(q_THh.dtype)


@dataclass(frozen=True)
class TokenRows:
    """Sequence of every token, the keys of that sequence, and its row index (UNUSED: padding)."""

    sequence_T: Array
    length_T: Array
    index_T: Array

    @classmethod
    def of(cls, inputs: PagedInputs, tokens: int) -> "TokenRows":
        """Return the rows of this many tokens."""
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

    def visible(self, index_Y: Array, spec: AttentionSpec) -> Array:
        """Return booleans `T Y`; the mask alone would show the prefix to padding."""
        seen_TY = spec.mask.visible(self.index_T[:, None], index_Y)
        if spec.chunk is not None:
            seen_TY &= self.index_T[:, None] // spec.chunk == index_Y // spec.chunk
        there_TY = (self.index_T > UNUSED)[:, None] & (index_Y < self.length_T[:, None])
        return seen_TY & there_TY

    def any_visible(self, low: Array, keys: int, mask: MaskSpec) -> Array:
        """Return whether a token may see one of the `keys` keys from `low` on."""
        there_T = self.index_T > UNUSED
        q_low = jnp.min(jnp.where(there_T, self.index_T, jnp.iinfo(jnp.int32).max))
        q_high = jnp.max(self.index_T)
        longest = jnp.max(jnp.where(there_T, self.length_T, 0))
        return (low < longest) & mask.any_visible(q_low, q_high, low, low + keys - 1)


def _steps_of_pages(
    page_table_SP: Array, sequence_T: Array, size: int, block_k: int | None
) -> Array:
    """Return page ids `N T W`: N steps, each with W pages of every token's sequence."""
    tokens, pages = sequence_T.shape[0], page_table_SP.shape[1]
    width = min(max((block_k or size) // size, 1), pages)
    # Page 0 pads the last step; its keys are beyond every length.
    table_SP = jnp.pad(page_table_SP, ((0, 0), (0, -pages % width)))
    return table_SP[sequence_T].reshape(tokens, -1, width).transpose(1, 0, 2)


def _add_keys(
    sums: Any, q_TKGh: Array, kv_TYKh: Array, seen_TY: Array, spec: AttentionSpec
) -> tuple[Array, Array, Array]:
    """Return the running maximum, norm and sum of values with these keys added."""
    top_TKG, norm_TKG, out_TKGh = sums
    k, v = kv_TYKh[:, :, 0::2], kv_TYKh[:, :, 1::2]
    if spec.shared_values:
        k = v = kv_TYKh
    scores = jnp.einsum("TKGh,TYKh->TKGY", q_TKGh, k, preferred_element_type=jnp.float32)
    scores = scores * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    scores = jnp.where(seen_TY[:, None, None], scores, -jnp.inf)
    # The result does not depend on the subtracted maximum, so it needs no derivative.
    new_TKG = lax.stop_gradient(jnp.maximum(top_TKG, jnp.max(scores, axis=-1)))
    safe_TKG = jnp.where(jnp.isfinite(new_TKG), new_TKG, 0)
    weights = jnp.exp(scores - safe_TKG[..., None])
    shrink_TKG = jnp.exp(top_TKG - safe_TKG)
    part_TKGh = jnp.einsum(
        "TKGY,TYKh->TKGh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    norm_TKG = norm_TKG * shrink_TKG + jnp.sum(weights, axis=-1)
    return new_TKG, norm_TKG, out_TKGh * shrink_TKG[..., None] + part_TKGh


def _normalised(top_TKG: Array, norm_TKG: Array, out_TKGh: Array, sinks_H: Array | None) -> Array:
    """Return the result `T H h` in float32; zeros where nothing was seen."""
    T, K, G, h = out_TKGh.shape
    seen_TKG = norm_TKG > 0
    safe_TKG = jnp.where(seen_TKG, norm_TKG, 1)
    out_THh = (out_TKGh / safe_TKG[..., None]).reshape(T, K * G, h)
    if sinks_H is None:
        return out_THh
    lse_TKG = jnp.where(seen_TKG, top_TKG + jnp.log(safe_TKG), -jnp.inf)
    return with_sinks(out_THh[None], lse_TKG.reshape(T, K * G).T[None], sinks_H)[0][0]


# Pages that the kernel fetches at a time, one copy each, into two buffers of VMEM, and queries that
# it works on. jax's own tuned sizes (jax 0.10.2) are 4 to 16 pages and 32 to 64 queries.
_KERNEL_PAGES, _KERNEL_BUFFER_BYTES, _KERNEL_QUERIES = 32, 4 * 2**20, 32
# Scalar memory of a TPU core (v5e and v5p, libtpu 0.0.42.1) holds the page table, its rows padded
# to whole lanes, lengths and starts, and a part reserved for the compiler.
_LANES, _SCALAR_BYTES, _SCALAR_RESERVED = 128, 2**20, 4096

_tpu_capabilities = partial(
    Capabilities, dtypes=("float32", "bfloat16"), head_dim_multiple=_LANES, check_vma=False
)


@register(
    "ragged_page_attention_v2",
    backend="tpu",
    capabilities=_tpu_capabilities(features=_TPU_FEATURES),
)
@register(
    "ragged_page_attention_v3",
    backend="tpu",
    capabilities=_tpu_capabilities(features=_TPU_FEATURES | {"mixed"}),
)
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def any_queries_each_tpu(
    q_THh: Array, pages_PSKh: Array, inputs: PagedInputs, spec: AttentionSpec
) -> Array:
    """Return attention by jax's kernel, differentiable through the native backend.

    Source: jax.experimental.pallas.ops.tpu.ragged_paged_attention.
    Raises: ValueError for a number of kv heads that it cannot tile, or a page table that is larger
        than scalar memory.
    """
    _check_kernel(pages_PSKh, inputs)
    pages_at_once, queries_at_once = _kernel_blocks(q_THh, pages_PSKh, inputs, spec)
    lengths_S = inputs.lengths_S
    starts = inputs.query_starts
    if starts is None:
        starts = jnp.arange(lengths_S.shape[0] + 1, dtype=jnp.int32)
    # The kernel prefetches the keys of the next sequence, and loses count if that one has no key or
    # if the last sequences have no queries. So every sequence gets a key, and sequences without
    # queries at the end are left out. Without any query the first token is computed and discarded.
    kernel_starts = starts.at[-1].max(1)
    with_queries = jnp.sum(kernel_starts[:-1] < kernel_starts[-1], dtype=jnp.int32)
    out_THh = ragged_paged_attention(
        q_THh,
        pages_PSKh,
        jnp.maximum(lengths_S, 1),
        inputs.page_table_SP,
        kernel_starts,
        with_queries[None],
        sm_scale=spec.scale,
        sliding_window=spec.mask.window,
        soft_cap=spec.soft_cap,
        num_kv_pages_per_block=pages_at_once,
        num_queries_per_block=queries_at_once,
    )
    seen_T = TokenRows.of(inputs, q_THh.shape[0]).index_T > UNUSED
    return jnp.where(seen_T[:, None, None], out_THh, 0)


def _kernel_forward(
    q_THh: Array, pages_PSKh: Array, inputs: PagedInputs, spec: AttentionSpec
) -> tuple[Array, Any]:
    return any_queries_each_tpu(q_THh, pages_PSKh, inputs, spec), (q_THh, pages_PSKh, inputs)


def _kernel_backward(spec: AttentionSpec, kept: Any, dout_THh: Array) -> tuple[Array, Array, None]:
    q_THh, pages_PSKh, inputs = kept
    _, pull = jax.vjp(lambda q, pages: any_queries_each(q, pages, inputs, spec), q_THh, pages_PSKh)
    return *pull(dout_THh), None


any_queries_each_tpu.defvjp(_kernel_forward, _kernel_backward)


def _check_kernel(pages_PSKh: Array, inputs: PagedInputs) -> None:
    """Raise ValueError for inputs that the kernel or its compiler would refuse less clearly."""
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
    q_THh: Array, pages_PSKh: Array, inputs: PagedInputs, spec: AttentionSpec
) -> tuple[int, int]:
    """Return the pages and queries that the kernel works on at a time.

    The kernel's tuned table is not used: it reads the local device, which a plan does not have.
    """
    page_bytes = math.prod(pages_PSKh.shape[1:]) * pages_PSKh.dtype.itemsize
    fitting = min(_KERNEL_PAGES, _KERNEL_BUFFER_BYTES // (2 * page_bytes))
    if spec.block_k is not None:
        fitting = spec.block_k // pages_PSKh.shape[1]
    queries = min(spec.block_q or _KERNEL_QUERIES, q_THh.shape[0])
    return min(max(fitting, 1), inputs.page_table_SP.shape[1]), queries
