"""`tokamax` and `tokamax_triton`: attention of packed rows by tokamax's kernels for NVIDIA GPUs.

A document in a row is a range of keys, so every query has a first key, and without causality a last
one. The kernels read these `B L` numbers; with `tokamax` no array of L x L exists, and the forward
kernel skips blocks of keys before the first. `tokamax_triton` has a boolean mask `B L L` in its
backward pass if there are documents or a window.

Letters: B batch, L queries and keys, H query heads, K kv heads, h head dim.
Source: https://github.com/openxla/tokamax, version 0.0.17.
"""

import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from model.attention.mask import AttentionInputs, AttentionSpec
from model.attention.registry import RESULT_NAME, Capabilities, Feature, register

_FEATURES: frozenset[Feature] = frozenset({"bidirectional", "segment_ids", "window", "gqa"})
_capabilities = partial(
    Capabilities, dtypes=("bfloat16", "float16"), package="tokamax", check_vma=False
)


# jax 0.12 and tokamax 0.0.17 compile it for H100 and B200, heads of 64 to 256 (24 November 2026);
# tokamax has no such kernels with gradients for Ampere.
@register(
    "tokamax",
    backend="gpu",
    capabilities=_capabilities(
        features=_FEATURES | {"soft_cap"}, preference=67, gpu_generations=(9, 10)
    ),
)
def mosaic(
    q_BLHh: Array, k_BLKh: Array, v_BLKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Return attention of whole rows in natural order, by Mosaic kernels. Memory linear in L."""
    return attend("mosaic_gpu", q_BLHh, k_BLKh, v_BLKh, inputs, spec)


@register(
    "tokamax_triton",
    backend="gpu",
    capabilities=_capabilities(
        features=_FEATURES, preference=65, gpu_generations=(8, 9, 10, 11, 12)
    ),
)
def triton(
    q_BLHh: Array, k_BLKh: Array, v_BLKh: Array, inputs: AttentionInputs, spec: AttentionSpec
) -> Array:
    """Return attention of whole rows in natural order, by Triton kernels."""
    return attend("triton", q_BLHh, k_BLKh, v_BLKh, inputs, spec)


def attend(
    implementation: str,
    q_BLHh: Array,
    k_BLKh: Array,
    v_BLKh: Array,
    inputs: AttentionInputs,
    spec: AttentionSpec,
) -> Array:
    """Return attention `B L H h` by this implementation of tokamax; ignores row indices.

    The tokens of a document, or of a chunk of it, must be adjacent, as in packed rows: tokens that
    have the same segment id but others between them do not see each other.
    """
    ranges = key_ranges(q_BLHh.shape[1], inputs.q_segment_ids_BL, spec)
    return _attention(implementation, spec, (q_BLHh, k_BLKh, v_BLKh), ranges)


def key_ranges(
    length: int, segment_ids_BL: Array | None, spec: AttentionSpec
) -> tuple[Array | None, Array | None]:
    """Return the first key that each query sees, and the end of its keys, `B L` or `1 L` int32.

    None: no bound other than causality and the row.
    """
    index_1L = jnp.arange(length, dtype=jnp.int32)[None]
    start_BL = end_BL = None
    if segment_ids_BL is not None:
        changes_BL = segment_ids_BL[:, 1:] != segment_ids_BL[:, :-1]
        is_first_BL = jnp.pad(changes_BL, ((0, 0), (1, 0)), constant_values=True)
        start_BL = lax.cummax(jnp.where(is_first_BL, index_1L, 0), axis=1)
        is_last_BL = jnp.pad(changes_BL, ((0, 0), (0, 1)), constant_values=True)
        end_BL = lax.cummin(jnp.where(is_last_BL, index_1L + 1, length), axis=1, reverse=True)
    if (window := spec.mask.window) is not None:
        low_1L, high_1L = index_1L - (window - 1), index_1L + window
        start_BL = jnp.maximum(0 if start_BL is None else start_BL, low_1L)
        end_BL = jnp.minimum(length if end_BL is None else end_BL, high_1L)
    return start_BL, None if spec.mask.causal else end_BL


_Arrays = tuple[Array, Array, Array]
_Ranges = tuple[Array | None, Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(implementation: str, spec: AttentionSpec, qkv: _Arrays, ranges: _Ranges) -> Array:
    return _forward(implementation, spec, qkv, ranges)[0]


# tokamax has a derivative too; this one names the results, so that a remat policy can keep them.
def _forward(
    implementation: str, spec: AttentionSpec, qkv: _Arrays, ranges: _Ranges
) -> tuple[Array, Any]:
    forward, _, bound = _bind(implementation, spec, qkv, ranges)
    out_BLHh, (top_BHL, norm_BHL) = forward(*bound.args, **bound.kwargs)
    # Without the barrier XLA runs the kernel twice in a scan over layers: once for the next
    # operation, and once to write its result into the array of all layers (jax 0.11.2, H200).
    result = lax.optimization_barrier((out_BLHh, top_BHL + jnp.log(norm_BHL)))
    out_BLHh, lse_BHL = checkpoint_name(result, RESULT_NAME)
    return out_BLHh, (qkv, ranges, out_BLHh, lse_BHL)


def _backward(
    implementation: str, spec: AttentionSpec, residuals: Any, dout_BLHh: Array
) -> tuple[_Arrays, None]:
    qkv, ranges, out_BLHh, lse_BHL = residuals
    _, backward, bound = _bind(implementation, spec, qkv, ranges)
    # The weights are exp(score - maximum) / norm; these two enter in no other way.
    softmax = lse_BHL, jnp.ones_like(lse_BHL)
    options = {**bound.kwargs, "return_residuals": False}
    grads = backward(softmax, out_BLHh, dout_BLHh, *bound.args, **options)
    return (grads["q"], grads["k"], grads["v"]), None


_attention.defvjp(_forward, _backward)


def _bind(
    implementation: str, spec: AttentionSpec, qkv: _Arrays, ranges: _Ranges
) -> tuple[Any, Any, Any]:
    """Return tokamax's operation, its derivative, and the bound arguments of both.

    tokamax is imported here, because it is optional. Its public function takes boolean masks only;
    `Mask` with ranges of keys is in the module that its public classes come from.
    """
    base = importlib.import_module("tokamax._src.ops.attention.base")
    forward = importlib.import_module("tokamax._src.ops.attention.api").IMPLEMENTATIONS[
        implementation
    ]
    start_B1L, end_B1L = (y if y is None else y[:, None] for y in ranges)
    bound = forward.bind(
        *qkv,
        mask=base.Mask(k_start=start_B1L, k_end=end_B1L, is_causal=spec.mask.causal),
        logits_scale=spec.scale,
        logits_soft_cap=spec.soft_cap,
        return_residuals=True,
    )
    return forward, forward.vjp or base.DotProductAttentionVjp(), bound
