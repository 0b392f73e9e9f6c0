"""Paged attention on TPU: the Pallas kernel that jax ships.

The kernel reads pages in place. Its derivative is the native backend's. Letters are those of
`model/attention/paged.py`.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from model.attention.mask import UNUSED, AttentionSpec, PagedInputs
from model.attention.paged import TokenRows, any_queries_each, decoding_inputs
from model.attention.registry import Capabilities, Feature, register

_FEATURES: frozenset[Feature] = frozenset({"window", "soft_cap", "gqa", "decode", "paged"})

# Pages that the kernel fetches at a time, one copy each, into two buffers of VMEM, and queries that
# it works on. jax's own tuned sizes (jax 0.10.2) are 4 to 16 pages and 32 to 64 queries.
_KERNEL_PAGES, _KERNEL_BUFFER_BYTES, _KERNEL_QUERIES = 32, 4 * 2**20, 32
# Scalar memory of a TPU core (v5e and v5p, libtpu 0.0.42.1) holds the page table, its rows padded
# to whole lanes, lengths and starts, and a part reserved for the compiler.
_LANES, _SCALAR_BYTES, _SCALAR_RESERVED = 128, 2**20, 4096

_capabilities = partial(
    Capabilities, dtypes=("float32", "bfloat16"), head_dim_multiple=_LANES, check_vma=False
)


@register("ragged_page_attention_v2", backend="tpu", capabilities=_capabilities(features=_FEATURES))
def one_query_each_tpu(
    q_THh: Array, pages_PSKh: Array, inputs: PagedInputs, spec: AttentionSpec
) -> Array:
    """Return `any_queries_each_tpu` for one query per sequence."""
    return any_queries_each_tpu(q_THh, pages_PSKh, decoding_inputs(q_THh, inputs), spec)


@register(
    "ragged_page_attention_v3",
    backend="tpu",
    capabilities=_capabilities(features=_FEATURES | {"mixed"}),
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
